"""XIDs in the kernel log, and what NVIDIA's catalogue says of each.

``xid_catalog.json`` lists the 172 codes of the catalogue (https://docs.nvidia.com/deploy/xid-errors): number,
name, immediate and investigatory action. It was made from the table that gpud (leptonai/gpud, Apache-2.0)
generates from the catalogue. These are facts; NVIDIA's texts are not in it.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from outlast.health.policy.telemetry import Notice, Sample, XidEvent

KMSG = "/dev/kmsg"
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+),?\s*(.*)")
_RECORD_BYTES = 8192  # CONSOLE_EXT_LOG_MAX of the kernel
_MOST = 1000  # records of one reading
_OLD = 100_000  # records that are there at the start, at most
_TEXT = 300  # characters that are kept of a line


class KernelLog:
    """Reads what is appended to the kernel log.

    Args:
        path: /dev/kmsg, or a text file; one that does not exist yet may appear.
        node: name of the node.
        addresses: index of each device by its PCI address; the mapping may grow.
        after: what is known already: the number of a record of /dev/kmsg, or a place in a file; -1: all that
            is there now; -2: nothing.
    """

    name = "kernel log"
    starting = False

    def __init__(self, path: str, node: str, addresses: Mapping[str, int], after: int = -1) -> None:
        self._path = path
        self._node = node
        self._addresses = addresses
        self._descriptor = -1
        self._after = after
        self._rest = b""
        self._said = ""
        self.doing = (0, "")

    @property
    def position(self) -> int:
        """Number of the last record, or place in a file, that was read; negative: none was."""
        return self._after

    def sample(self, now: float) -> Sequence[Sample]:
        """Return the XIDs that were logged since the last call; never blocks on an empty log."""
        self.doing = (self.doing[0] + 1, self._path)
        found: list[Sample] = []
        try:
            lines = list(self._lines())
        except OSError as error:
            return self._unreadable(now, error)
        for line in lines:
            if line == "":
                found.append(Notice(now, self._node, "messages of the kernel were overwritten unread"))
            elif event := self._event(line, now):
                found.append(event)
        return found

    def _unreadable(self, now: float, error: OSError) -> list[Sample]:
        self._close()
        why = f"{self._path}: {error.strerror or error}"
        told, self._said = self._said, why
        return [] if told == why else [Notice(now, self._node, f"XIDs cannot be read: {why}")]

    def _event(self, line: str, now: float) -> XidEvent | None:
        match = _XID.search(line)
        if match is None or len(match[2]) > 6:
            return None
        pci = match[1].lower().partition(".")[0]
        index = self._addresses.get(pci, -1)
        return XidEvent(now, self._node, pci, index, int(match[2]), match[3].strip()[:_TEXT])

    def _lines(self) -> Iterator[str]:
        """Yield new lines; an empty one where some were lost."""
        if self._descriptor < 0:
            self._open()
        yield from self._records(_MOST) if self._path == KMSG else self._appended()

    def _open(self) -> None:
        """Open the log where reading begins."""
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self._after = max(self._after, 0)  # what a file has that appears later is new
            raise
        if self._path == KMSG:
            if self._after == -1:
                for _ in self._records(_OLD):
                    pass
            return
        size = os.fstat(self._descriptor).st_size
        start = size if self._after == -1 else max(self._after, 0)
        self._after = os.lseek(self._descriptor, start if start <= size else 0, os.SEEK_SET)

    def _records(self, most: int) -> Iterator[str]:
        for _ in range(most):
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                yield ""
                continue
            head, _, text = record.decode(errors="replace").partition(";")
            parts = head.split(",")
            number = int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else -1
            if number > self._after or number < 0:
                self._after = max(number, self._after)
                yield text.partition("\n")[0] or " "

    def _appended(self) -> Iterator[str]:
        """Yield the whole lines that were appended to a file; one that was cut is read from its start."""
        opened, named = os.fstat(self._descriptor), os.stat(self._path)
        place = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino) or opened.st_size < place:
            self._close()
            self._rest, self._after = b"", 0
            self._open()
        for _ in range(_MOST):
            chunk = os.read(self._descriptor, _RECORD_BYTES)
            if not chunk:
                break
            *lines, self._rest = (self._rest[-_RECORD_BYTES:] + chunk).split(b"\n")
            self._after += len(chunk)
            yield from (line.decode(errors="replace") or " " for line in lines)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@functools.cache
def catalogue() -> dict[int, dict[str, Any]]:
    """Return NVIDIA's catalogue: name (``mnemonic``), ``immediate`` and ``investigatory`` action by code."""
    text = resources.files(__package__).joinpath("xid_catalog.json").read_text(encoding="utf-8")
    return {int(entry["code"]): entry for entry in json.loads(text)}
