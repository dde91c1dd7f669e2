"""The right to commit, as an agent of several nodes passes it on to the processes of its node.

A small file in memory: the generation whose ranks may commit, until when, and a check. A process reads it
right before a commit to a place where others could commit, too. The clock goes on while the machine sleeps,
and is the same for all processes.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path

from outlast import files
from outlast.errors import StaleGeneration

_FORM = struct.Struct("<QdI")
_POLL = 0.02
_TRIES, _TRY_AGAIN = 20, 0.001  # reads of a file that is not whole, and seconds between two


def boot_time() -> float:
    """Return seconds since the machine was started, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseFile:
    """The agent's side: writes the file.

    Args:
        path: in memory; readable by its user only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = files.open_private(path, os.O_RDWR | os.O_CREAT)
        self._last = (-1, 0.0)
        self.allow(0, 0.0)

    def make_again(self) -> None:
        """Make the file once more, after it was removed.

        Raises:
            OSError: it cannot be made.
        """
        os.close(self._file)
        self._file = files.open_private(self.path, os.O_RDWR | os.O_CREAT)
        last, self._last = self._last, (-1, 0.0)
        self.allow(*last)

    def allow(self, generation: int, until: float) -> None:
        """Say which generation may commit, and until when."""
        if (generation, until) == self._last:
            return
        self._last = (generation, until)
        body = struct.pack("<Qd", generation, max(until, 0.0))
        os.pwrite(self._file, body + struct.pack("<I", zlib.crc32(body)), 0)

    def close(self) -> None:
        """Take the right back, and let go of the file."""
        self.allow(0, 0.0)
        os.close(self._file)


def allowed(path: str) -> tuple[int, float]:
    """Return which generation may commit, and for how many seconds more.

    Raises:
        OSError: there is no such file any more.
    """
    for _ in range(_TRIES):  # it is written in place, and a reader may come in between
        with open(files.open_private(path), "rb") as file:
            content = file.read(_FORM.size)
        if len(content) == _FORM.size:
            generation, until, check = _FORM.unpack(content)
            if check == zlib.crc32(content[:16]):
                return generation, until - boot_time()
        time.sleep(_TRY_AGAIN)
    return 0, 0.0  # its agent was killed while it wrote


def wait_for(path: str, generation: int, patience: float) -> None:
    """Return as soon as a generation may commit: the one that this node takes part in, or an older one.

    Args:
        path: of the file; empty: the job has one node, and nobody to be taken for.
        generation: of the process that wants to commit.
        patience: in seconds.

    Raises:
        StaleGeneration: it may not, and waiting changed nothing.
    """
    deadline = boot_time() + patience
    while path:
        try:
            may, left = allowed(path)
        except FileNotFoundError:
            may, left = 0, 0.0
        if may >= generation and left > 0:
            return
        if boot_time() >= deadline:
            held = f"only {may} and older ones may" if left > 0 else "this node has no contact with the job"
            raise StaleGeneration(
                f"generation {generation} may not commit: {held}; nothing was committed, and the job goes on"
            )
        time.sleep(_POLL)
