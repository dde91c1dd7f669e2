"""The writer's process: ``python -m outlast.checkpoint.writer FOLDER LINK BYTE RECORDS``.

It outlives its owner by as long as it takes to bring the newest staged state to disk, so it is
deaf to the signals that end a job, and it stands back behind the ranks for processor and disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outlast import files
from outlast.checkpoint.replica.handshake import CREDENTIALS_BYTES, Credentials
from outlast.checkpoint.tiers.memory_folder import MemoryFolder
from outlast.checkpoint.writer.committer import NICENESS
from outlast.checkpoint.writer.service import Service
from outlast.checkpoint.writer_process import (
    STILL,
    Owner,
    Standstill,
    is_of,
    lock_holder,
    others_own,
    remove_renamed,
)
from outlast.errors import RunFolderUnusable
from outlast.ipc.control import Reporter
from outlast.ipc.processes import cpu_seconds, kill_if, start_ticks
from outlast.observe.policy import codec
from outlast.observe.recorder import Recorder
from outlast.recovery.policy.events import Note, Record

IO_PRIORITY = 7  # the lowest of the best-effort class; NVRx and Megatron --async-ckpt-io-priority, 3
_BEST_EFFORT = 2
OOM_SCORE, _MOST_OOM_SCORE = 500, 1000  # thousandths of all memory
PREDECESSOR_PATIENCE = 600.0
_LOCK_PATIENCE = 5.0  # for a file system whose locks do not work; shorter than what counts as a short life
_FILE_BYTES = 1 << 16  # of a file of /proc
_PROGRAM = b"outlast.checkpoint.writer"
_DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(root: str, link: str, byte: str, control: str, events: str, lease: str = "") -> int:
    """Serve a memory folder. What this node proves to others is read from standard input, once.

    Args:
        root: the memory folder.
        link: descriptor that becomes readable when the owner is done or dead.
        byte: by which that owner holds the folder.
        control: the agent's socket for records.
        events: the event log, for when the agent does not take records any more.
        lease: file that says whether this node may commit; "" where it is the only one.
    """
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    _step_back()
    credentials = Credentials.from_json(sys.stdin.read(CREDENTIALS_BYTES))
    folder, owner = MemoryFolder(root), Owner(int(link), int(byte))
    reporter = Reporter(control) if control else None
    recorder = Recorder(Path(events))

    def sink(record: Record) -> None:
        if reporter is not None:
            lost = reporter.lost
            reporter.send(codec.encode(record))
            if reporter.lost == lost:
                return
        recorder.record(record)

    def report(text: str) -> None:
        sys.stderr.write(f"[outlast] {text}\n")
        sink(Note(time.time(), time.monotonic(), 0, text))

    lock = _only_saver(folder, owner, Predecessor(folder.root, folder.lock, owner.byte, report))
    if lock < 0:
        return 1
    remove_renamed(folder.root)  # its memory is needed
    try:
        service = files.when_there_is_room(
            lambda: Service(folder, owner, sink, lambda: is_of(folder.lock, lock), credentials, lease),
            PREDECESSOR_PATIENCE,
            lambda _: None,
        )
    except RuntimeError as error:
        sys.stderr.write(
            f"[outlast] checkpoint writer: {error}; this node limits processes (ulimit -u, pids.max)\n"
        )
        return 1
    service.run()
    os.close(lock)
    return 0


def _step_back() -> None:
    """Give the ranks priority for processors, for the disk, and for memory."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    # Where memory is full the kernel kills the process that has most of it mapped, shared memory included.
    # That is a rank because of its buffers, and its end restarts the job and frees none of their pages. This
    # process keeps nothing that is not in files, and its owner starts it again, so it goes first, unless a
    # rank has half of the memory more. The score is relative: a protected pod stays protected from others.
    with contextlib.suppress(OSError, ValueError):
        place = Path("/proc/self/oom_score_adj")
        place.write_text(str(min(_MOST_OOM_SCORE, int(place.read_text()) + OOM_SCORE)))
    number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
    if number is not None:  # ioprio_set, for this process
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT << 13 | IO_PRIORITY)


class Predecessor:
    """An earlier checkpoint writer that holds the memory folder's lock, and whose owner has gone.

    Its owner replaced it if it was stopped. Nobody else does that, and the ranks wait for the writer that
    waits for the lock. One that does not run at all (stopped, in a frozen control group, in a call that the
    kernel does not end) is killed; what it was to save is in the folder, and its successor saves it.

    Args:
        root: the memory folder.
        lock: the file.
        byte: of the owner of the writer that waits; while there are others, nothing is killed.
        report: takes a sentence for the user.
    """

    def __init__(self, root: Path, lock: Path, byte: int, report: Callable[[str], None]) -> None:
        self._root, self._lock, self._byte = root, lock, byte
        self._report = report
        self._still = Standstill(self._identity)
        self._seen = (0, 0)
        self._killed, self._reported = 0, False

    def _identity(self) -> object:
        pid = lock_holder(self._lock)
        activity = _activity(pid) if pid > 0 else None
        self._seen = pid, start_ticks(pid)
        return None if activity is None else (*self._seen, activity)

    def look(self, now: float) -> None:
        """Kill it if it has not run for :data:`STILL` seconds; report one that does not end for that long."""
        if not self._still.over(now):
            return
        pid, began = self._seen

        def is_meant(one: int) -> bool:
            return (
                start_ticks(one) == began and _is_writer(one, self._root) and lock_holder(self._lock) == one
            )

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
    """Return whether a process of this account was started as the writer of a memory folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            words = file.read(_FILE_BYTES).split(b"\0")
        own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False
    return own and os.fsencode(root) in words and any(_PROGRAM in word for word in words)


def _only_saver(folder: MemoryFolder, owner: Owner, predecessor: Predecessor) -> int:
    """Take the folder's lock; wait for an older writer first. -1: it did not end in time.

    Also when the owner has gone meanwhile, and the folder has another: whatever is staged is its writer's.
    The kernel names who holds such a lock; it is lost when this process closes any descriptor of the file.
    """
    deadline, fail_since = time.monotonic() + PREDECESSOR_PATIENCE, math.inf
    while time.monotonic() < deadline and not owner.replaced(folder.root):
        try:
            folder.make()
            lock = files.open_private(folder.lock, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in files.NO_ROOM:
                raise
            time.sleep(0.02)
            continue
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_of(folder.lock, lock):
                return lock
        except OSError as error:
            now = time.monotonic()
            fail_since = math.inf if error.errno in (errno.EAGAIN, errno.EACCES) else min(fail_since, now)
            if now > fail_since + _LOCK_PATIENCE:
                raise
            with contextlib.suppress(OSError, RunFolderUnusable):
                predecessor.look(now)
            time.sleep(0.02)
        os.close(lock)
    return -1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
