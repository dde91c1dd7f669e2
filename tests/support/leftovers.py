"""What a test leaves behind: processes, our files in shared memory and in the folder of temporary files.

A process that runs tests has a /dev/shm of its own where it may mount one (as root), and a folder of
temporary files, so that all that appears there is its own. It adopts processes that lose their parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.support import warm

PATIENCE = 30.0  # seconds for what ends by itself: a writer of checkpoints, a cleaner
OURS = "outlast"  # begins the names of what the product makes; other libraries clean up as they see fit
UNFINISHED = "outlast-trainer-"  # what a killed rank of Transformers was writing
KEPT = ("resource_tracker", "chromium")  # processes that later tests use, too
SHARED = Path("/dev/shm")
_CLONE_NEWNS, _PR_SET_CHILD_SUBREAPER = 0x20000, 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_folders: list[Path] = []  # of this process alone


def set_apart() -> None:
    """Give this process a /dev/shm and a folder of temporary files, and have it adopt orphans."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="ot-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    _folders.append(Path(folder))
    atexit.register(_remove, folder, os.getpid())
    if os.geteuid() == 0 and _LIBC.unshare(_CLONE_NEWNS) == 0:
        private = ["mount", "--make-rprivate", "/"]
        memory = ["mount", "-t", "tmpfs", "-o", "mode=1777", "tests", str(SHARED)]
        done = [subprocess.run(words, capture_output=True, check=False) for words in (private, memory)]
        if not any(one.returncode for one in done):
            _folders.append(SHARED)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def nothing_left(*meant: str) -> Iterator[None]:
    """Fail if something that appeared in the block is there when ``PATIENCE`` is over; remove it.

    Args:
        meant: words in the command lines and paths of what stays on purpose: it is removed.
    """
    before, files = processes(), _files()
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        left = processes(before)
        kept = _files() - files
        found = [one for one in (*left.values(), *map(str, kept)) if not any(word in one for word in meant)]
        if not found or time.monotonic() > deadline:
            break
        gc.collect()  # the workers of a DataLoader end with its iterator
        time.sleep(0.02)
    inside = sorted(str(one.relative_to(path.parent)) for path in kept for one in path.rglob("*"))
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in kept:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    if found:
        pytest.fail(f"left behind: {found}" + (f", with {inside}" if inside else ""))


def _files() -> set[Path]:
    found = (path for folder in _folders for path in folder.iterdir())
    return {path for path in found if path.name.startswith(OURS) and not path.name.startswith(UNFINISHED)}


def processes(known: Collection[int] = ()) -> dict[int, str]:
    """Return the living descendants of this process, with their command lines; reap dead children.

    Those that are known are left out, and theirs: what an earlier fixture has started may start others.
    """
    found: dict[int, str] = {}
    me, kept = os.getpid(), {warm.forker_pid()}
    todo = [(pid, me) for pid in _children(me)]
    while todo:
        pid, parent = todo.pop()
        if pid in known and pid not in kept:
            continue
        todo += ((one, pid) for one in _children(pid))
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state in b"ZX":
            if parent == me:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        elif pid not in kept and not any(word in line for word in KEPT):
            found[pid] = f"process {pid} {line.strip()}"
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found
