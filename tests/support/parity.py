"""Starting one command under torchrun and under ``outlast run``: torchrun is the control."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE = 150.0
COMMANDS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "outlast": [sys.executable, "-m", "outlast", "run"],
}
LAUNCHERS = pytest.mark.parametrize("launcher", list(COMMANDS), scope="module")
_OURS = ("PET_", "TORCHELASTIC_", "OUTLAST_", "MASTER_", "OMP_")


@dataclass(frozen=True)
class Launched:
    """What a launch left.

    Args:
        code: exit code of the launcher.
        folder: in which it was started.
        stdout, stderr: of the launcher.
    """

    code: int
    folder: Path
    stdout: str
    stderr: str

    def notes(self) -> list[dict[str, Any]]:
        """Return what the ranks wrote down, in the order of attempts and ranks."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("note-*.json"))]

    def logs(self, pattern: str = "*") -> Path:
        """Return the only folder that the launch made below ``logs``."""
        (found,) = (self.folder / "logs").glob(pattern)
        return found


@functools.cache
def _options_of_torchrun() -> frozenset[str]:
    from torch.distributed.run import get_args_parser

    return frozenset(text for action in get_args_parser()._actions for text in action.option_strings)


def torchrun_has(option: str) -> bool:
    """Say whether torchrun has an option, which may be shortened, in this version of torch."""
    return any(known.startswith(option) for known in _options_of_torchrun())


def skip_without(launcher: str, *words: str) -> None:
    """Skip a test of options that torchrun does not have in this version of torch."""
    named = [word.partition("=")[0] for word in words if word.startswith("--")]
    lacks = [one for one in named if not torchrun_has(one)]
    if launcher == "torchrun" and lacks:
        pytest.skip(f"torchrun of torch {torch.__version__} has no {', '.join(lacks)}")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what another launcher may have left, and more."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, "PARITY_SENTINEL": "of the launcher", **more}


def command(launcher: str, folder: Path, *words: str) -> list[str]:
    """Return the command line of a launcher; ours has its run folder in the test's."""
    ours = ["--run-dir", str(folder / "run")] if launcher == "outlast" else []
    return [*COMMANDS[launcher], *ours, *words]


def launch(launcher: str, folder: Path, *words: str, variables: Mapping[str, str] | None = None) -> Launched:
    """Run a launcher to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the launchers differ in it
    out, err = folder / "console.out", folder / "console.err"  # files: what outlives a launcher holds pipes
    with open(out, "w") as stdout, open(err, "w") as stderr:
        done = subprocess.run(
            command(launcher, folder, *words),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            timeout=DEADLINE,
            check=False,
            env=environment(**(variables or {})),
        )
    signal.signal(signal.SIGHUP, hangup)
    return Launched(done.returncode, folder, out.read_text(), err.read_text())
