"""File systems of a test: mounted, and frozen for a while."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mount a file system at a folder; skip the test where that is not allowed."""
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield
    finally:
        # What this process has mapped there keeps it busy; it goes with the last of that.
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[Callable[..., None]]:
    """Give what freezes the file system of a folder, or thaws it; it is thawed at the end."""

    def freeze(thaw: bool = False) -> None:
        subprocess.run(["fsfreeze", "--unfreeze" if thaw else "--freeze", str(folder)], check=True)

    try:
        yield freeze
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], capture_output=True, check=False)
