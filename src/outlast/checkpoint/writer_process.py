"""Starting the checkpoint writer, and who owns its memory folder.

The writer is a process of its own, tied to its owner by a pipe that closes when the owner ends. Each owner
holds a byte of a file in the memory folder locked as long as it lives. A writer that ends removes the
folder. If it was late or slow, the job's next owner may have begun by then: its ranks' states are in the
folder, and a writer of its own waits for this one's end. A writer does not look at its own owner's byte: the
kernel may release it a moment after the pipe between them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast import files
from outlast.checkpoint.replica.handshake import NOBODY, Credentials
from outlast.errors import RunFolderUnusable
from outlast.ipc.control import set_apart
from outlast.ipc.processes import Child, start, state_of

MEMORY_PREFIX = "outlast-memory-"  # of the names of all memory folders; the account follows
MEMBERS = "members.json"  # the table of ranks, in a memory folder
BELL = "bell"  # a socket there that wakes the writer
_OWNERS = "owners"
_LOCK = "lock"
_BYTES = 1 << 62
_PATIENCE, _LOOK = 60.0, 0.01


@dataclass(frozen=True)
class Owner:
    """What a writer knows of its owner.

    Args:
        link: descriptor that becomes readable when the owner is done or dead.
        byte: which it holds locked.
    """

    link: int
    byte: int

    def gone(self) -> bool:
        """Say whether the owner has said that the job is over, or has died."""
        return bool(files.readable([self.link], 0.0))

    def replaced(self, root: Path) -> bool:
        """Say whether it has gone, and a memory folder has another owner."""
        return self.gone() and others_own(root, self.byte)


def own(root: Path) -> tuple[int, int]:
    """Return a descriptor that keeps a memory folder from being removed while it is open, and its byte.

    The descriptor is -1 where there can be no such folder, or a writer that ends stands still while it
    removes one.

    Raises:
        RunFolderUnusable: what is there is not a private folder of this account.
    """
    byte, deadline = secrets.randbelow(_BYTES - 1), time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        descriptor = -1
        try:
            files.make_private(root)
            descriptor = _opened(root)
            if _locked(descriptor, [_range(byte, 1)]) and is_of(root / _OWNERS, descriptor):
                return descriptor, byte
        except FileNotFoundError:
            pass  # a writer that ends has removed it meanwhile
        except OSError:
            deadline = 0.0  # the writer will find that, too, and say so
        if descriptor >= 0:
            os.close(descriptor)
        time.sleep(_LOOK)
    return -1, byte


def others_own(root: Path, byte: int) -> bool:
    """Say whether a memory folder has a living owner besides that of a byte."""
    with contextlib.suppress(OSError, RunFolderUnusable):
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
    except (OSError, RunFolderUnusable):  # it is gone, so that there is nothing to be alone with
        yield False
        return
    try:
        yield _locked(descriptor, _but(byte)) and is_of(root / _OWNERS, descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(base: Path) -> None:
    """Remove memory folders of this account whose owner died before its writer began: nothing is in them."""
    for root in base.glob(f"{MEMORY_PREFIX}{os.geteuid()}-*"):
        _remove_unused(root)


def _remove_unused(root: Path) -> None:
    """Remove a memory folder that nobody owns and in which no writer has begun."""
    with contextlib.suppress(OSError, RunFolderUnusable):
        files.require_private(root)
        if not set(os.listdir(root)) <= {_OWNERS, _LOCK, MEMBERS, BELL}:
            return
        descriptor = _opened(root)
        try:
            alone = _locked(descriptor, [_range(0, _BYTES)]) and is_of(root / _OWNERS, descriptor)
            if alone and not is_locked(root / _LOCK):
                for path in root.iterdir():
                    path.unlink()
                root.rmdir()
        finally:
            os.close(descriptor)


def is_locked(lock: files.AnyPath) -> bool:
    """Say whether another process holds a file's lock (flock); a missing file is not locked."""
    try:
        descriptor = files.open_private(lock)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_of(path: Path, descriptor: int) -> bool:
    """Say whether a descriptor is that of the file which has a path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _opened(root: Path) -> int:
    return files.open_private(root / _OWNERS, os.O_RDWR | os.O_CREAT)


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


_PROGRAM = (  # without the folder of the owner's script, whose modules must not shadow any of ours
    "import sys; sys.path[:1] = []; from outlast.checkpoint.writer.__main__ import main; "
    "sys.exit(main(*sys.argv[1:]))"
)
_TRIES = 5  # starts of a writer that ended within _SHORT seconds, in a row
_SHORT = 10.0
_KILL_PATIENCE = 5.0
_STOPPED = 10.0  # seconds for which a writer may be stopped
_LOOK_AT_STATE = 1.0


class SaverProcess:
    """The owner's hold on the writer of a memory folder; one that ended is started again.

    Args:
        root: the memory folder.
        control: the socket that takes its records; "" for the event log itself.
        events: the event log.
        credentials: what this node proves to others; it reaches the writer through a pipe.
        lease: file that says whether this node may commit; "" where it is the only one.
    """

    def __init__(
        self,
        root: Path,
        control: str,
        events: Path,
        credentials: Credentials = NOBODY,
        lease: str = "",
    ) -> None:
        self._credentials = credentials
        self._arguments = (str(root), control, str(events), lease)
        self._process: Child | None = None
        self._pipe = self._owned = -1
        self._started = 0.0
        self._short = 0
        self._tries_to_finish = 0
        self._looked_at = self._stopped_since = 0.0
        self._killed = False

    @property
    def pid(self) -> int:
        """Its process, 0 when there is none."""
        return 0 if self._process is None or self._process.exit_code is not None else self._process.pid

    def ensure(self) -> str:
        """See to it that a writer runs; return why the one before ended, "" when it runs or never did.

        Raises:
            OSError: no process can be started.
        """
        process = self._process
        if process is not None and process.poll() is None:
            self._end_stopped(process)
            return ""
        why = ""
        if process is not None:
            self._short = self._short + 1 if time.monotonic() - self._started < _SHORT else 0
            if self._short >= _TRIES:
                return ""
            how = f"was stopped for {_STOPPED:.0f} s and killed" if self._killed else "ended"
            why = f"the checkpoint writer {how}; another one continues with what is staged"
            self.hang_up()
            process.close()
        self._start()
        return why

    def _end_stopped(self, process: Child) -> None:
        """Kill a writer that somebody has stopped (SIGSTOP) and nobody continues: ranks wait for it."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_AT_STATE:
            return
        self._looked_at = now
        if state_of(process.pid) != "T":
            self._stopped_since = 0.0
        elif not self._stopped_since:
            self._stopped_since = now
        elif now > self._stopped_since + _STOPPED:
            self._killed = process.send(signal.SIGKILL)

    def _start(self) -> None:
        self._stopped_since, self._killed = 0.0, False
        root, *rest = self._arguments
        self._owned, byte = own(Path(root))
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        secret, told = os.pipe2(os.O_CLOEXEC)
        self._started = time.monotonic()
        try:
            self._process = Child(
                start(
                    [sys.executable, "-c", _PROGRAM, root, str(reader), str(byte), *rest],
                    stdin=secret,
                    pass_fds=[reader],
                    start_new_session=True,
                )
            )
            self._process.pidfd = set_apart(self._process.pidfd)
        except OSError:
            self.hang_up()
            os.close(told)
            raise
        finally:
            os.close(reader)
            os.close(secret)
        with contextlib.suppress(OSError), open(told, "wb") as pipe:  # one that has died is replaced
            pipe.write(self._credentials.to_json().encode())

    def hang_up(self) -> None:
        """Say that the job is over: it brings the newest staged state to disk, cleans up and ends."""
        for descriptor in (self._owned, self._pipe):
            if descriptor >= 0:
                os.close(descriptor)
        self._owned = self._pipe = -1

    def finished(self) -> bool:
        """Return whether it has ended after :meth:`hang_up`; one that was killed before that is replaced."""
        process = self._process
        if process is None:
            return True
        if process.poll() is None:
            self._end_stopped(process)
            return False
        if process.exit_code is not None and process.exit_code >= 0:
            if process.exit_code:  # it could not begin: there were too many processes, for one
                _remove_unused(Path(self._arguments[0]))
            return True
        self._tries_to_finish += 1
        if self._tries_to_finish > _TRIES:
            return True
        process.close()
        try:
            self._start()
        except OSError:
            return True
        self.hang_up()
        return False

    def ended(self) -> bool:
        """Say whether it has."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """End it at once, and close the descriptor that holds it."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            if self._process.wait(_KILL_PATIENCE) is not None:
                self._process.close()
