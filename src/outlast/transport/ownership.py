"""Who needs the saver of a memory folder: each owner holds a byte of a file there locked as long as it lives.

A saver that ends removes the folder. It may have come late, or be slow, so that the job's next owner has
begun by then: its ranks' states are in the folder, and a saver of its own waits for this one's end. Its own
owner's byte tells a saver nothing: the kernel may let go of it a moment after the pipe between them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_OWNERS = "owners"
_BYTES = 1 << 62
_PATIENCE, _LOOK = 60.0, 0.01


@dataclass(frozen=True)
class Owner:
    """What a saver knows of its owner.

    Args:
        link: descriptor that becomes readable when the owner is done or dead.
        byte: which it holds locked.
    """

    link: int
    byte: int

    def gone(self) -> bool:
        """Say whether the owner has said that the job is over, or has died."""
        return bool(select.select([self.link], [], [], 0)[0])

    def replaced(self, root: Path) -> bool:
        """Say whether it has gone, and a memory folder has another owner."""
        return self.gone() and _others_own(root, self.byte)


def own(root: Path) -> tuple[int, int]:
    """Return a descriptor that keeps a memory folder from being removed while it is open, and its byte.

    The descriptor is -1 where there can be no such folder, or a saver that ends stands still while it
    removes one.
    """
    byte, deadline = secrets.randbelow(_BYTES - 1), time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        descriptor = -1
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = _opened(root)
            if _locked(descriptor, [_range(byte, 1)]) and is_of(root / _OWNERS, descriptor):
                return descriptor, byte
        except (FileNotFoundError, FileExistsError):
            if root.is_file() or root.is_symlink():  # else a saver that ends has removed it meanwhile
                break
        except OSError:
            deadline = 0.0  # the saver will find that, too, and say so
        if descriptor >= 0:
            os.close(descriptor)
        time.sleep(_LOOK)
    return -1, byte


def _others_own(root: Path, byte: int) -> bool:
    with contextlib.suppress(OSError):
        descriptor = _opened(root)
        try:
            for others in _but(byte):
                found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, others)
                if struct.unpack_from("h", found)[0] != fcntl.F_UNLCK:
                    return True
        finally:
            os.close(descriptor)
    return False


@contextlib.contextmanager
def without_others(root: Path, byte: int) -> Iterator[bool]:
    """Yield whether a folder has no other owner; if so, none comes before the end of the block."""
    try:
        descriptor = _opened(root)
    except OSError:  # it is gone, so that there is nothing to be alone with
        yield False
        return
    try:
        yield _locked(descriptor, _but(byte)) and is_of(root / _OWNERS, descriptor)
    finally:
        os.close(descriptor)


def is_of(path: Path, descriptor: int) -> bool:
    """Say whether a descriptor is that of the file which has a path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _opened(root: Path) -> int:
    return os.open(root / _OWNERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(descriptor: int, ranges: Iterable[bytes]) -> bool:
    """Lock bytes of the file for as long as it is open; say whether nobody had any of them."""
    try:
        for one in ranges:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, one)
    except BlockingIOError:
        return False
    return True


def _but(byte: int) -> Iterator[bytes]:
    if byte:
        yield _range(0, byte)
    yield _range(byte + 1, _BYTES - byte - 1)


def _range(start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
