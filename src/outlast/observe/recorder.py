"""The event log on disk: append-only JSON lines, one system call a line.

Recording never stops what it records: a line that cannot be written is counted, and the
first line that can be is preceded by a note of how many were lost.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from outlast.core import codec
from outlast.core.events import ActionTaken, FaultSeen, Note, Record, RunEnded, Saved

LINE_BYTES = 4096  # a single append of that size is whole, whoever else appends
EVIDENCE_BYTES = 400
_DURABLE = (ActionTaken, RunEnded, Saved)


@dataclass(frozen=True)
class Log:
    """What a log file holds; ``skipped`` lines were torn or make no sense."""

    records: tuple[Record, ...]
    unknown: tuple[codec.Unknown, ...]
    skipped: int


class Recorder:
    """Appends records to one file; several processes may do so at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lost = 0
        self._why = ""
        self._descriptor = -1

    def record(self, record: Record) -> None:
        """Append one line; never raises."""
        try:
            self._open()
            if self.lost:
                text = f"{self.lost} records could not be written: {self._why}"
                self._write(Note(record.time, record.clock, record.generation, text))
                self.lost = 0
            self._write(record)
            if isinstance(record, _DURABLE):
                os.fdatasync(self._descriptor)
        except OSError as error:
            self.lost += 1
            self._why = error.strerror or str(error)

    def _open(self) -> None:
        if self._descriptor >= 0:
            return
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def _write(self, record: Record) -> None:
        line = codec.encode(record).encode()
        if len(line) >= LINE_BYTES and isinstance(record, FaultSeen):
            short = {name: _cut(text) for name, text in record.evidence.items()}
            line = codec.encode(replace(record, reason=_cut(record.reason), evidence=short)).encode()
        line += b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            with contextlib.suppress(OSError):
                os.write(self._descriptor, b"\n")
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _cut(text: str) -> str:
    return text if len(text) <= EVIDENCE_BYTES else text[:EVIDENCE_BYTES] + " ... (cut)"


def read(path: str | os.PathLike[str]) -> Log:
    """Read a log; torn and senseless lines are counted.

    Raises:
        OSError: the file cannot be read.
    """
    records: list[Record] = []
    unknown: list[codec.Unknown] = []
    skipped = 0
    for line in Path(path).read_text(errors="replace").splitlines():
        if not line:
            continue
        try:
            found = codec.decode(line)
        except codec.CodecError:
            skipped += 1
            continue
        if isinstance(found, Record):
            records.append(found)
        else:
            unknown.append(found)
    return Log(tuple(records), tuple(unknown), skipped)
