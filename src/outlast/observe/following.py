"""Reading of event logs while they are written: each poll takes what came since the one before.

Nothing is asked of the run that is watched: a reader opens the files of the run folder and takes no lock.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from outlast.errors import UsageError
from outlast.files import open_regular
from outlast.observe import recorder, runs
from outlast.observe.policy import codec
from outlast.observe.policy.now import Now, NowFold
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import Record

_CHUNK = 1 << 17  # bytes of a log read at once; a job may have a thousand
_RECENT = 1 << 20  # bytes at the end of a log of which every line is decoded
_MOST_LINE = 16 << 20  # bytes without a line break; what is longer is no line of ours
# Kinds that make most of a long log. What they say is out of date soon, so old ones are not decoded.
_BULK = tuple(f'{{"v":1,"kind":"{kind}"'.encode() for kind in ("progress", "step_times", "telemetry"))


class Follower:
    """Reads one log from its begin, and then what is appended.

    Args:
        path: the log; it may appear later.
        recent: bytes at its end of which every line is decoded.

    Attributes:
        skipped: lines that were torn or invalid.
        unknown: lines of a newer version.
        replaced: the file was cut or is another one than before; nothing of it was read since then.
    """

    def __init__(self, path: Path, recent: int = _RECENT) -> None:
        self.path = path
        self._recent = recent
        self.skipped = self.unknown = 0
        self.replaced = False
        self._offset = 0
        self._inode = 0
        self._rest = b""

    def poll(self) -> Iterator[Record]:
        """Yield the records that were appended; a last line without its end waits for the next poll.

        Raises:
            OSError: the file cannot be read, or is no regular file.
        """
        end = None  # of the log as the poll began
        while end is None or self._offset < end:
            chunk, size = self._read()
            end = size if end is None else end
            if not chunk:
                return
            self._offset += len(chunk)
            yield from self._lines(chunk, self._offset > end - self._recent)

    def _read(self) -> tuple[bytes, int]:
        """Return what comes next and the size of the log; the file is not left open, since a job has many."""
        try:
            descriptor = open_regular(self.path, follow=True)
        except FileNotFoundError:
            self.replaced = self._inode != 0
            return b"", 0
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            self._inode = self._inode or found.st_ino
            self.replaced = found.st_ino != self._inode or found.st_size < self._offset
            if self.replaced:
                return b"", 0
            file.seek(self._offset)
            return file.read(_CHUNK), found.st_size

    def _lines(self, chunk: bytes, recent: bool) -> Iterator[Record]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            self._rest = b""
            self.skipped += 1
        for line in lines:
            if not line or (not recent and line.startswith(_BULK)):
                continue
            found, whole = recorder.decode_line(line)
            self.skipped += not whole
            if isinstance(found, codec.Unknown):
                self.unknown += 1
            elif found is not None:
                yield found


class RunFollower:
    """Follows the logs of all nodes of a run.

    Args:
        run_dir: the run folder.
        node: read the log of this node only; empty: those of all.
        recent: bytes at the end of each log of which every line is decoded.
    """

    def __init__(self, run_dir: Path, node: str = "", recent: int = _RECENT) -> None:
        self.run_dir = run_dir
        self._node = node
        self._folder = RunFolder(run_dir, node)
        self._recent = recent
        self._begin()

    def _begin(self) -> None:
        self._followers: dict[str, Follower] = {}
        self._fold = NowFold()

    @property
    def skipped(self) -> int:
        """Lines that were torn or invalid."""
        return sum(one.skipped for one in self._followers.values())

    @property
    def unknown(self) -> int:
        """Lines of a newer version."""
        return sum(one.unknown for one in self._followers.values())

    def poll(self) -> Now:
        """Read what was appended and return what the run does now; a log that was replaced is read anew.

        Records of several nodes are taken by wall time, so that the newest one has the last word.

        Raises:
            UsageError: no log is there, or one cannot be read.
        """
        try:
            self._read()
            if any(one.replaced for one in self._followers.values()):
                self._begin()
                self._read()
        except UsageError:
            self._begin()  # of some logs more was read than taken
            raise
        return self._fold.now()

    def _read(self) -> None:
        try:
            paths = {} if self._node else self._folder.node_events()
            if self._folder.events.exists():
                paths[self._node] = self._folder.events
        except OSError as error:
            raise UsageError(
                f"{self._folder.root}: {error.strerror or error}; it cannot be followed"
            ) from error
        if not paths and not self._followers:
            raise UsageError(
                f"{self._folder.events}: no event log is there; name the folder that outlast run was given"
                f" as --run-dir{runs.nearby(self._folder.root)}"
            )
        for name, path in paths.items():
            self._followers.setdefault(name, Follower(path, self._recent))
        logs = [_named(name, one) for name, one in self._followers.items()]
        for record, name in heapq.merge(*logs, key=lambda pair: pair[0].time):
            self._take(record, name)

    def _take(self, record: Record, name: str) -> None:
        self._fold.take(record, name)


def _named(name: str, log: Follower) -> Iterator[tuple[Record, str]]:
    try:
        for record in log.poll():
            yield record, name
    except OSError as error:
        raise UsageError(f"{log.path}: {error.strerror or error}; it cannot be followed") from error
