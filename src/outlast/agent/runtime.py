"""The runtime folder: pulse pages and the control socket of one launcher, in memory where possible."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from outlast.transport.processes import is_alive

_PREFIX = "outlast-"


def _base() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def make() -> Path:
    """Make this launcher's runtime folder, readable by its user only."""
    sweep()
    path = _base() / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    path.mkdir(mode=0o700)
    return path


def sweep() -> None:
    """Remove runtime folders whose launcher is gone and whose guard could not clean up."""
    for path in _base().glob(f"{_PREFIX}*-*"):
        owner = path.name[len(_PREFIX) :].partition("-")[0]
        if owner.isdigit() and not is_alive(int(owner)) and path.stat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
