"""Frameworks that users bring: jobs of them are skipped where they are not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, SCRIPTS, Run

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # DeepSpeed looks for a GPU


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)}: not installed; the extra `frameworks` brings it"
    return pytest.mark.skipif(bool(missing), reason=reason)


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package}: not installed; docs/reference/frameworks.md names the page that says how")


def job(
    folder: Path, script: str, way: str, *, fatal: int = 0, pace: float = 0.0, options: tuple[str, ...] = ()
) -> Run:
    """Return a job of two ranks in a folder of its own."""
    folder.mkdir()
    arguments = (str(folder), way, str(fatal), str(pace))
    return Run(folder / "run", script, *arguments, options=("--nproc-per-node", "2", *options))


def alone(folder: Path, script: str, way: str) -> subprocess.CompletedProcess[str]:
    """Run a script as one plain interpreter."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPTS / script), str(folder), way, "0", "0"]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        cwd=folder,
        env={**os.environ, "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"},
    )


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def reached(path: Path, count: int) -> Callable[[], bool]:
    """Return a condition: a trace has so many lines."""
    return lambda: len(lines_of(path)) >= count
