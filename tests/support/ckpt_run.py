"""A run folder with real copies, and the command that looks after them as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from outlast.checkpoint.policy.manifest import copy_name, rank_files
from outlast.config import CheckpointOptions
from outlast.observe.run_folder import RunFolder
from tests.support import warm
from tests.support.jobs import DEADLINE, Job, checkpointer, save_steps

RUN_ID = f"run-{os.getpid()}"  # its memory folder is shared by all who test on this machine
STEPS = (1, 2, 3, 40)
NAMES = [copy_name(step, 1) for step in reversed(STEPS)]
TENSORS, DIGESTS, DOCUMENT = rank_files(0, 1)
KEEP_ALL = CheckpointOptions(timeout=DEADLINE, keep_last_n=9)


def make_run(root: Path) -> dict[int, bytes]:
    """Make a run folder with a copy of each step, and return the state's content at each."""
    folder = RunFolder(root)
    folder.claim(RUN_ID)
    folder.release()
    return save_steps(folder.checkpoints, *STEPS, run_id=RUN_ID, settings=KEEP_ALL)


def restored(root: Path, run_id: str = RUN_ID) -> tuple[int, bytes]:
    """Restore the run and return step and content."""
    job = Job(9)
    found = checkpointer(root / "checkpoints", run_id=run_id, generation=2).restore(job.state)
    assert found is not None
    return found.step, job.content()


def ckpt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "outlast", "ckpt", *words], DEADLINE)


def lines(*words: str | Path) -> list[dict[str, Any]]:
    done = ckpt(*words, "--json")
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def content(root: Path) -> dict[str, bytes]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def flip(path: Path, place: int = -1) -> None:
    octets = bytearray(path.read_bytes())
    octets[place] ^= 4
    path.write_bytes(octets)
