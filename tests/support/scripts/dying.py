"""Kill a job with SIGKILL before each change that it makes to the file system, one after the other.

    dying.py FOLDER {sound,damaged}

A forked process restores and saves; the profiler counts its changes and the process kills
itself just before the n-th, for n = 1, 2, ... until it survives. After each death a restore has
to find a whole checkpoint. Prints all file operations in order and what went wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from saves_steps import Job

import outlast

CHANGES = {"write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"}
OPERATIONS = CHANGES | {"open", "close"}
LIMIT = 2000
OPTIONS = outlast.CheckpointOptions(async_save=False, keep_last_n=2, timeout=60.0)


def forked(part: Callable[[], None]) -> int:
    """Run a part in a forked process and return how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - the parent hears of it by the status
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_before(number: int, pipe: int) -> None:
    """Have this process killed before its change of that number; name each operation on the way."""
    count = 0

    def profile(_: FrameType, event: str, function: Any) -> None:
        nonlocal count
        if event == "c_call" and function.__module__ == "posix" and function.__name__ in OPERATIONS:
            count += function.__name__ in CHANGES
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            sys.setprofile(None)
            os.write(pipe, f"{function.__name__} ".encode())
            sys.setprofile(profile)

    sys.setprofile(profile)


def go_on(run: Path, seed: int, begin: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Restore, do one step and save it; return what was restored."""
    job = Job(seed)
    with outlast.start(str(run), save_interval=10**6, checkpoints=OPTIONS) as session:
        begin()
        step = session.restore(**job.state)
        content = job.content()
        job.train()
        session.step_done(step + 1)
        assert session.save(), "the save was lost"
        sys.setprofile(None)
    return step, content


def make(run: Path) -> None:
    """Save three steps; leave what each holds."""
    job, content = Job(1), {}
    options = outlast.CheckpointOptions(async_save=False, keep_last_n=9)
    with outlast.start(str(run), save_interval=1, checkpoints=options) as session:
        session.restore(**job.state)
        for step in session.steps(3):
            job.train()
            content[step + 1] = job.content()
    (run.parent / "content").write_text(json.dumps(content))


def examine(run: Path, content: dict[int, str]) -> None:
    """Check that a whole checkpoint is found, and that the job can go on from it."""
    before = max(int(path.name[5:14]) for path in (run / "checkpoints").glob("step-*") if whole(path))
    step, found = go_on(run, 2)
    assert step == before, (step, before)
    assert content.get(step, found) == found, "the state differs"
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert not left, left


def whole(copy: Path) -> bool:
    return (copy / "COMMIT").exists() and not (copy / "damaged").exists()


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    make(folder / "before")  # here, so that forks need not import what it needs
    content = {int(step): held for step, held in json.loads((folder / "content").read_text()).items()}
    if kind == "damaged":
        newest = folder / "before" / "checkpoints" / "step-000000003.g0"
        (newest / "damaged").touch()
        tensors = newest / "rank-00000-of-00001.safetensors"
        octets = bytearray(tensors.read_bytes())
        octets[-1] ^= 4
        tensors.write_bytes(octets)
    problems, operations, number = [], "", 0
    for number in range(1, LIMIT):
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "before", run)
        readable, writable = os.pipe()

        def part(number: int = number, writable: int = writable, run: Path = run) -> None:
            go_on(run, 1, lambda: die_before(number, writable))

        status = forked(part)
        os.close(writable)
        with os.fdopen(readable) as pipe:
            operations = pipe.read()
        if status not in (0, -signal.SIGKILL):
            problems.append(f"before change {number} the job ended with {status}")
        if forked(lambda run=run: examine(run, content)) != 0:
            problems.append(f"killed before change {number}, after {operations[-200:]}")
        if status == 0:
            break
    print(json.dumps({"changes": number, "operations": operations.split(), "problems": problems}))


if __name__ == "__main__":
    main()
