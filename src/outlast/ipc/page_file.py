"""The file of a heartbeat page, as the agent reads and writes it.

The agent does not map it: a rank may cut its own file off, and a load from what is cut off is SIGBUS. A read
copies some words, and says where they end.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from outlast import files

_WORD = 8
_MOST = 1 << 53  # of a number that counts; arithmetic with floats is exact below
_FAR = 1e9  # seconds, 30 years: more than any clock or duration says


class PageDamaged(Exception):
    """A page lacks words, or has a number that no rank writes."""


class PageFile:
    """The file of one page.

    Args:
        path: of the file; whatever is there is removed, since the name can be guessed.
        size: in bytes.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._descriptor = _made(path)
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # else a store is SIGBUS where there is no room
        except OSError:
            self.close()
            raise

    def bytes(self, at: int, count: int) -> bytes:
        """Return some words.

        Raises:
            PageDamaged: they are not there.
        """
        try:
            found = os.pread(self._descriptor, _WORD * count, _WORD * at)
        except OSError as error:
            raise PageDamaged(f"words {at} to {at + count}: {error.strerror}") from error
        if len(found) < _WORD * count:
            raise PageDamaged(f"words {at} to {at + count} are cut off")
        return found

    def words(self, at: int, count: int) -> Sequence[int]:
        """Return some words as whole numbers; see :meth:`bytes`."""
        return memoryview(self.bytes(at, count)).cast("q")

    def write(self, at: int, *values: float) -> None:
        """Write some words; a page that takes none belongs to a rank that hears nothing."""
        content = b"".join(struct.pack("=q" if isinstance(one, int) else "=d", one) for one in values)
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, content, _WORD * at)

    def close(self) -> None:
        """Close it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _made(path: Path) -> int:
    """Make a file in the place of whatever is there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        files.remove(path)
    return os.open(path, flags, 0o600)


def count(value: int, most: int = _MOST, least: int = 0) -> int:
    """Return a number that was read.

    Raises:
        PageDamaged: it is not in its range.
    """
    if not least <= value <= most:
        raise PageDamaged(f"{value} is not in [{least}, {most}]")
    return value


def moment(value: float) -> float:
    """Return a time in seconds that was read; see :func:`count`."""
    if not -_FAR < value < _FAR:
        raise PageDamaged(f"{value} is no time")
    return value


def limit(value: float) -> float:
    """Return a time in seconds that was read, infinite where there is none; see :func:`count`."""
    return value if value == math.inf else moment(value)
