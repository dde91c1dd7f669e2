"""The node ledger on disk: a folder with a file of JSON lines for each node that writes.

Each agent appends to its own file, so no two processes write to one, and a line is one system call. A file
that cannot be written is said once and does not concern the job.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from outlast import files, settings
from outlast.errors import OutlastError
from outlast.health.policy.ledger import Entry, Ledger, entry_of

SUFFIX = ".jsonl"
_MOST_FILES = 20_000
_MOST_BYTES = 4 << 20  # of one file: tens of thousands of entries


class NodeLedger:
    """The entries of all nodes.

    Args:
        folder: is made with the first entry.
        writer: name of this node, or of the person's host.
        note: takes what is to be said.
    """

    def __init__(self, folder: Path, writer: str, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._path = folder / f"{writer.replace('/', '_')}{SUFFIX}"
        self._note = note
        self._said: set[str] = set()

    def read(self, quarantine_after: int) -> Ledger:
        """Return what the folder says; what cannot be read is left out, and said."""
        entries: list[Entry] = []
        bad = 0
        try:
            paths = sorted(self._folder.glob(f"*{SUFFIX}"))[:_MOST_FILES]
            if paths:
                files.require_own_run_folder(self._folder, settings.in_pod())
        except (OSError, OutlastError) as error:
            self._say(f"the node ledger {self._folder} is not used: {error}")
            return Ledger((), quarantine_after)
        for path in paths:
            try:
                lines = files.read_whole(path, _MOST_BYTES).splitlines()
            except OSError as error:
                self._say(f"the node ledger {path} cannot be read: {error.strerror or error}")
                continue
            for line in lines:
                try:
                    entries.append(entry_of(line))
                except ValueError:
                    bad += 1
        if bad:
            self._say(f"the node ledger {self._folder}: {bad} lines are no entries; they are ignored")
        return Ledger(entries, quarantine_after)

    def append(self, entry: Entry) -> None:
        """Write an entry; a failure is said, not raised."""
        try:
            files.make_run_folder(self._folder, settings.in_pod())
            descriptor = files.open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size > _MOST_BYTES - (1 << 16):
                    raise OSError(errno.EFBIG, f"it has {size} bytes; move it away")
                torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, (b"\n" if torn else b"") + entry.to_line().encode() + b"\n")
            finally:
                os.close(descriptor)
        except (OSError, OutlastError) as error:
            self._say(f"the node ledger {self._path} cannot be written: {error}")

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < 16:
            self._said.add(text)
            self._note(text)
