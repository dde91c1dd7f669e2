"""The event log on disk: append-only JSON lines, one system call a line.

Recording never stops the recorded process. A line that cannot be written is counted, and the next line that
can is preceded by a note of how many are missing and why. A line torn by a kill is harmless: the next one
begins on a new line, and the reader counts the torn one.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from outlast.files import open_regular, sync_folder
from outlast.observe.policy import codec
from outlast.recovery.policy.events import ActionTaken, Note, Record, RunEnded, Saved

LINE_BYTES = 4096  # a line that long is one page of one write, also while other processes append
CUT = " ... (cut)"
_LONG = ("evidence", "command", "reason", "signature", "start")  # names and numbers are never cut
# How much is left of a line that is too long, step by step: characters of a text, texts of a list.
_CUTS = ((1024, 1024), (512, 512), (256, 256), (128, 128), (64, 64), (32, 32), (16, 16), (8, 8))
_DURABLE = (ActionTaken, RunEnded, Saved)  # what the next launcher or a person relies on after a power loss
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # a pipe, a terminal, some network mounts
_MOST_LINE_BYTES = 16 << 20  # read at once; what is longer is no line of ours
_MOST_BEFORE_END = 256 << 20  # of a log, looked at for its latest record of a kind
_BLOCK = 1 << 20
_HEAD = b'{"v":'
_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True)
class Log:
    """The content of a log file.

    Args:
        records: in the order of the file.
        unknown: lines of newer versions and of kinds that this version does not know.
        skipped: number of lines that are torn or invalid.
    """

    records: tuple[Record, ...]
    unknown: tuple[codec.Unknown, ...]
    skipped: int


class Recorder:
    """Appends records to one file; several processes may do so at once.

    Args:
        path: the log. Its folder may appear later, and the file may be removed meanwhile: both
            are looked at again with every record.

    Attributes:
        lost: records that could not be written so far.
        why: the last of them could not be; empty: all were written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.lost = 0
        self._path = os.fspath(path)
        self._descriptor = -1
        self.why = ""
        self._unsaid = 0
        self._start = b""
        self._is_new = False

    def record(self, record: Record) -> None:
        """Append one line; never raises. Records that must survive a power loss are on disk on return."""
        try:
            self._open()
            if self._unsaid:
                text = f"{self._unsaid} records before this line may be missing: {self.why}"
                self._write(Note(record.time, record.clock, record.generation, text))
                self._unsaid = 0
            self._write(record)
            if isinstance(record, _DURABLE):
                self._sync()
        except Exception as error:  # noqa: BLE001 - a log that fails must not end the job that it tells of
            self.lost += 1
            self._unsaid += 1
            self.why = _reason(error)
            self.close()

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                self.why = _reason(error)

    def _open(self) -> None:
        """Open the file unless it is open and still exists; begin on a new line."""
        if self._descriptor >= 0:
            if os.fstat(self._descriptor).st_nlink:
                return
            self.close()
        self._descriptor = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._descriptor).st_size
        torn = size and os.pread(self._descriptor, 1, size - 1) != b"\n"
        self._start = b"\n" if torn else b""
        self._is_new = not size

    def _write(self, record: Record) -> None:
        line = self._start + fit(record) + b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")
        self._start = b""

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
            if self._is_new:
                self._is_new = False
                sync_folder(os.path.dirname(self._path) or ".")
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"


def fit(record: Record) -> bytes:
    """Return a record's line, its texts cut so that it is shorter than ``LINE_BYTES``.

    Evidence is cut before anything else. Numbers and names stay, so a line of very many of them
    may be longer; it is then still written at once.
    """
    line = codec.encode(record).encode()
    long = [spec.name for spec in fields(record) if spec.name in _LONG]
    for names in ([name for name in long if name == "evidence"], long):
        for characters, texts in _CUTS:
            if len(line) < LINE_BYTES:
                return line
            shorter: dict[str, Any] = {name: _cut(getattr(record, name), characters, texts) for name in names}
            line = codec.encode(replace(record, **shorter)).encode()
    return line


def _cut(value: Any, characters: int, texts: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= characters else value[:characters] + CUT
    more = f"{len(value) - texts} more{CUT}"
    if isinstance(value, dict):
        kept = {name: _cut(item, characters, texts) for name, item in list(value.items())[:texts]}
        return kept if len(value) <= texts else {**kept, "...": more}
    cut = tuple(_cut(item, characters, texts) for item in value[:texts])
    return cut if len(value) <= texts else (*cut, more)


def read(path: str | os.PathLike[str]) -> Log:
    """Read a log; torn and invalid lines are counted, never raised.

    Raises:
        OSError: the file cannot be read, or is no regular file: a FIFO would be waited for.
    """
    records: list[Record] = []
    unknown: list[codec.Unknown] = []
    skipped = 0
    with open(open_regular(path, follow=True), "rb") as file:
        while line := file.readline(_MOST_LINE_BYTES):
            if not line.strip():
                continue
            found, whole = decode_line(line)
            skipped += not whole
            if isinstance(found, Record):
                records.append(found)
            elif found is not None:
                unknown.append(found)
    return Log(tuple(records), tuple(unknown), skipped)


def latest(path: str | os.PathLike[str], kind: type[_R], before: type[Record] | None = None) -> _R | None:
    """Return the latest record of a kind in a log; None: there is none near its end.

    Other records are not decoded. Of a line of more than 16 MiB only a part is held.

    Args:
        path: the log.
        kind: of the record.
        before: only what is in front of the latest record of this kind counts.

    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    wanted: list[type[Record]] = [kind] if before is None else [kind, before]
    with open(open_regular(path, follow=True), "rb") as file:
        at = file.seek(0, os.SEEK_END)
        least, rest = max(0, at - _MOST_BEFORE_END), b""
        marked = _mark_of(wanted[-1])
        while at > least:
            begin = max(least, at - _BLOCK)
            file.seek(begin)
            lines = (file.read(at - begin) + rest).split(b"\n")
            at, rest = begin, lines[0] if begin and len(lines[0]) <= _MOST_LINE_BYTES else b""
            for line in reversed(lines[1:] if begin else lines):
                if marked not in line:
                    continue
                found, _ = decode_line(line)
                if not isinstance(found, wanted[-1]):
                    continue
                if isinstance(found, kind):
                    return found
                wanted.pop()
                marked = _mark_of(kind)
    return None


def _mark_of(kind: type[Record]) -> bytes:
    """Return the part of a line that names its kind."""
    return f'"kind":"{next(name for name, each in codec.KINDS.items() if each is kind)}"'.encode()


def decode_line(line: bytes) -> tuple[Record | codec.Unknown | None, bool]:
    """Return what a line of a log holds, and whether the line is whole; None: nothing can be read in it.

    Where a writer was killed within a line and another went on right behind it, the second
    line is found: an unescaped ``{"v":`` begins a line and nothing else.
    """
    found = _decode(line)
    if found is not None:
        return found, True
    return _decode(line[max(0, line.rfind(_HEAD, 1)) :]), False


def _decode(line: bytes) -> Record | codec.Unknown | None:
    try:
        return codec.decode(line.decode())
    except (codec.CodecError, UnicodeDecodeError):
        return None
