"""An earlier checkpoint writer that holds the memory folder's lock, and whose owner has gone.

Its owner replaced it if it was stopped. Nobody else does that, and the ranks wait for the writer that waits
for the lock. One that does not run at all (stopped, in a frozen control group, in a call that the kernel does
not end) is killed; what it was to save is in the folder, and its successor saves it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from outlast.checkpoint.writer_process import others_own
from outlast.ipc.processes import cpu_seconds, kill_if, start_ticks

STILL = 10.0  # seconds without a moment on a processor; a writer that lives looks around every 0.5 s
_LOOK = 1.0
_LOCKS_BYTES = 4 << 20  # a line has some 60
_FILE_BYTES = 1 << 16
_PROGRAM = b"outlast.checkpoint.writer"


class Predecessor:
    """Watches the process that holds the lock of a memory folder.

    Args:
        root: the memory folder.
        lock: the file.
        byte: of the owner of the writer that waits; while there are others, nothing is killed.
        report: takes a sentence for the user.
    """

    def __init__(self, root: Path, lock: Path, byte: int, report: Callable[[str], None]) -> None:
        self._root, self._lock, self._byte = root, lock, byte
        self._report = report
        self._seen: tuple[int, int, tuple[float, int]] | None = None
        self._since, self._looked_at = 0.0, -_LOOK
        self._killed, self._reported = 0, False

    def look(self, now: float) -> None:
        """Kill it if it has not run for :data:`STILL` seconds; report one that does not end for that long."""
        if now < self._looked_at + _LOOK:
            return
        self._looked_at = now
        pid = holder(self._lock)
        activity = _activity(pid) if pid else None
        seen = None if activity is None else (pid, start_ticks(pid), activity)
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        elif now > self._since + STILL:
            self._since = now
            self._end(*seen[:2])

    def _end(self, pid: int, began: int) -> None:
        def is_meant(one: int) -> bool:
            return start_ticks(one) == began and _is_writer(one, self._root) and holder(self._lock) == one

        if pid == self._killed:
            if not self._reported:
                self._reported = True
                self._report(
                    f"the checkpoint writer of an earlier start (pid {pid}) was killed and does not end: it"
                    " is in a frozen control group, or in a call to a disk that does not answer; this start"
                    f" waits for it, as it holds {self._lock}"
                )
        elif not others_own(self._root, self._byte) and kill_if(pid, is_meant):
            self._killed = pid
            self._report(
                f"the checkpoint writer of an earlier start (pid {pid}) did not run for {STILL:.0f} s and was"
                " killed; this one continues with what is staged"
            )


def holder(lock: Path) -> int:
    """Return the process that holds a file's lock (flock, exclusive), 0: none that can be seen from here.

    The kernel names the process that took it; it is returned if it has the locked file open now.
    """
    try:
        found = os.stat(lock)
    except OSError:
        return 0
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for words in _locks_in("/proc/locks", _LOCKS_BYTES):
        if words[-1] == file:
            pid = int(words[-2])
            with contextlib.suppress(OSError):
                for one in os.listdir(f"/proc/{pid}/fdinfo"):
                    if any(own[-1] == file for own in _locks_in(f"/proc/{pid}/fdinfo/{one}", _FILE_BYTES)):
                        return pid
    return 0


def _locks_in(path: str, most: int) -> Iterator[list[str]]:
    """Yield the words up to the file of each exclusive flock that a file of /proc lists.

    Such as ``lock: 1: FLOCK ADVISORY WRITE 12203 fe:00:1613834 0 EOF``, without "lock:" in /proc/locks; one
    that is waited for has an arrow.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file.read(most).decode(errors="replace").splitlines():
            words = line.split()[:-2]
            if words[-5:-2] == ["FLOCK", "ADVISORY", "WRITE"] and "->" not in words:
                yield words


def _activity(pid: int) -> tuple[float, int] | None:
    """Return what changes whenever a thread of a process runs; None: one waits for a processor now."""
    switches = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/status", "rb") as file:
                for line in file.read(_FILE_BYTES).splitlines():
                    name, _, value = line.partition(b":")
                    if name == b"State" and value.split()[:1] == [b"R"]:
                        return None
                    if name.endswith(b"voluntary_ctxt_switches"):
                        switches += int(value)
    return cpu_seconds(pid), switches


def _is_writer(pid: int, root: Path) -> bool:
    """Say whether a process of this account was started as the writer of a memory folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            words = file.read(_FILE_BYTES).split(b"\0")
        own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False
    return own and os.fsencode(root) in words and any(_PROGRAM in word for word in words)
