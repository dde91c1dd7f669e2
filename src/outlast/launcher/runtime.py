"""The runtime folder of one launcher: heartbeat pages and control socket, in shared memory where possible."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from outlast import files
from outlast.checkpoint.writer_process import remove_abandoned
from outlast.errors import RunFolderUnusable

_PREFIX = "outlast-"
_NAME = re.compile(rf"{_PREFIX}\d+-[0-9a-f]{{8}}")
_SHARED = Path("/dev/shm")
_FILES = 64  # inodes; some file systems do not count them
_ROOM = 4 << 20  # bytes; a page takes 64 KiB, and the saver's small files lie beside it


def _base() -> Path:
    if os.access(_SHARED, os.W_OK):
        room = os.statvfs(_SHARED)
        if room.f_bavail * room.f_frsize >= _ROOM and (not room.f_files or room.f_favail >= _FILES):
            return _SHARED
    return Path(tempfile.gettempdir())


def caveat(folder: Path) -> str:
    """Return what is to be said of where a runtime folder is, "" for shared memory."""
    if folder.parent == _SHARED:
        return ""
    return (
        f"{_SHARED} has no room for {_ROOM >> 20} MiB or {_FILES} files, or cannot be written:"
        f" {folder.parent} is used instead"
    )


def make() -> Path:
    """Make this launcher's runtime folder, readable by its user only.

    Raises:
        RunFolderUnusable: it cannot be made, or others may replace it.
    """
    sweep()
    path = _base() / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    try:
        make_again(path)
    except OSError as error:
        raise RunFolderUnusable(
            f"runtime folder {path}: {error.strerror}; nothing was started; make room there, or name another"
            " place with TMPDIR"
        ) from error
    return path


def make_again(path: Path) -> None:
    """Make a runtime folder that is not there, or not any more.

    Raises:
        OSError: it cannot be made, or something else is in its place.
        RunFolderUnusable: others may replace it.
    """
    hidden = path.with_name(f".{path.name}")
    hidden.mkdir(mode=0o700)
    files.require_private(hidden)
    fcntl.flock(_open(hidden), fcntl.LOCK_EX)  # left open: the lock ends with the process
    hidden.rename(path)


def sweep() -> None:
    """Remove runtime folders whose launcher is gone and whose cleaner could not clean up.

    Also memory folders in which no saver ever began. This is done whenever a launcher starts: until then,
    what is left is in memory, readable by its user only, and goes when the machine is started again.

    The lock tells it, not the pid in the name: containers may share ``/dev/shm`` and not their pids.
    """
    base = _base()
    remove_abandoned(base)
    for path in base.glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):  # its cleaner, or another launcher, was faster
            if not _NAME.fullmatch(path.name) or path.lstat().st_uid != os.geteuid():
                continue
            folder = _open(path)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
