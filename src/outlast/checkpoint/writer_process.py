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
import glob
import os
import secrets
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast import files
from outlast.checkpoint.replica.handshake import NOBODY, Credentials
from outlast.errors import RunFolderUnusable
from outlast.ipc.control import set_apart
from outlast.ipc.processes import Child, start, state_of

MEMORY_PREFIX = "outlast-memory-"  # of the names of all memory folders; the account follows
MEMBERS = "members.json"  # the table of ranks, in a memory folder
REMOVED = "outlast-removed-"  # of the names of those that are being removed
BELL = "bell"  # a socket there that wakes the writer
_DRAWN = "[0-9a-f]" * 8
_OWNERS = "owners"
_LOCK = "lock"
_BYTES, _NOBODY = 1 << 62, -1
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
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
        """Return whether the owner has reported the end of the job, or has died."""
        return bool(files.readable([self.link], 0.0))

    def replaced(self, root: Path) -> bool:
        """Return whether it has gone, and a memory folder has another owner."""
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
            deadline = 0.0  # the writer will find that, too, and report it
        if descriptor >= 0:
            os.close(descriptor)
        time.sleep(_LOOK)
    return -1, byte


def others_own(root: Path, byte: int) -> bool:
    """Return whether a memory folder has a living owner besides that of a byte."""
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
    """Yield whether a folder has no owner but that of a byte; if so, it gets none until the block ends."""
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
    """Remove memory folders of this account that nobody needs.

    Their owner died before its writer began, so that nothing is in them; or their writer died while it
    removed them.
    """
    _remove_named(base, f"{REMOVED}{_DRAWN}-{MEMORY_PREFIX}{os.geteuid()}-*")
    for root in base.glob(f"{MEMORY_PREFIX}{os.geteuid()}-*"):
        _remove_unused(root)


def remove_renamed(root: Path) -> None:
    """Remove what a memory folder was renamed to for that; no live one has such a name."""
    _remove_named(root.parent, f"{REMOVED}{_DRAWN}-{glob.escape(root.name)}")


def _remove_named(base: Path, pattern: str) -> None:
    for root in base.glob(pattern):
        with contextlib.suppress(OSError, RunFolderUnusable):
            files.require_private(root)
            shutil.rmtree(root, ignore_errors=True)


def _remove_unused(root: Path) -> None:
    """Remove a memory folder that nobody owns and in which no writer has begun."""
    with contextlib.suppress(OSError, RunFolderUnusable):
        files.require_private(root)
        if not set(os.listdir(root)) <= {_OWNERS, _LOCK, MEMBERS, BELL}:
            return
        with without_others(root, _NOBODY) as alone:
            if alone and not lock_holder(root / _LOCK):
                for path in root.iterdir():
                    path.unlink()
                root.rmdir()


def lock_holder(lock: files.AnyPath) -> int:
    """Return the process that holds a file's lock (fcntl); 0: none; -1: one that cannot be seen from here."""
    try:
        descriptor = files.open_private(lock)
    except FileNotFoundError:
        return 0
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_GETLK, _range(0, 0))
    finally:
        os.close(descriptor)
    kind, *_, pid = struct.unpack(_FLOCK, found)
    return 0 if kind == fcntl.F_UNLCK else pid or -1


def is_of(path: Path, descriptor: int) -> bool:
    """Return whether a descriptor is that of the file which has a path now."""
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
    if byte > 0:
        yield _range(0, byte)
    yield _range(byte + 1, _BYTES - byte - 1)


def _range(start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)


_PROGRAM = (  # without the folder of the owner's script, whose modules must not shadow any of ours
    "import sys; sys.path[:1] = []; from outlast.checkpoint.writer.__main__ import main; "
    "sys.exit(main(*sys.argv[1:]))"
)
_TRIES = 5  # starts of a writer that ended within _SHORT seconds, in a row
_SHORT = 10.0
_KILL_PATIENCE = 5.0
STILL = 10.0  # seconds for which a writer may stand still; one that works looks every 0.5 s
_LOOK_AT_STATE = 1.0


class Standstill:
    """Finds that a process has not moved for :data:`STILL` seconds.

    Args:
        look: returns what stays the same while it stands still; None: it moves.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._seen: object = None
        self._since, self._looked_at = 0.0, -_LOOK_AT_STATE

    def over(self, now: float) -> bool:
        """Return whether it stood still until now for that long; after a True it is watched anew."""
        if now < self._looked_at + _LOOK_AT_STATE:
            return False
        self._looked_at, seen = now, self._look()
        still = seen is not None and seen == self._seen
        over = still and now > self._since + STILL
        if over or not still:
            self._seen, self._since = seen, now
        return over


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
        self.root = root
        self._credentials = credentials
        self._arguments = (control, str(events), lease)
        self._process: Child | None = None
        self._pipe = self._owned = -1
        self._started = 0.0
        self._short = 0
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
        if self._process is None:
            self._start()
            return ""
        how = f"was stopped for {STILL:.0f} s and killed" if self._killed else "ended"
        if self._runs(self._process) or not self._start_again(self._process):
            return ""
        return f"the checkpoint writer {how}; another one continues with what is staged"

    def _runs(self, process: Child) -> bool:
        """Return whether it runs; kill it if somebody has stopped it (SIGSTOP): ranks wait for it."""
        if process.poll() is not None:
            return False
        if self._stopped.over(time.monotonic()):
            self._killed = process.send(signal.SIGKILL)
        return True

    def _start_again(self, process: Child) -> bool:
        """Start another one in place of one that has ended; return whether it may be tried.

        Raises:
            OSError: no process can be started.
        """
        self._short = self._short + 1 if time.monotonic() - self._started < _SHORT else 0
        if self._short >= _TRIES:
            return False
        self._let_go()
        process.close()
        self._start()
        return True

    def _start(self) -> None:
        self._killed = False
        self._owned, byte = own(self.root)
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        secret, told = os.pipe2(os.O_CLOEXEC)
        self._started = time.monotonic()
        words = map(str, (self.root, reader, byte, *self._arguments))
        try:
            process = self._process = Child(
                start(
                    [sys.executable, "-c", _PROGRAM, *words],
                    stdin=secret,
                    pass_fds=[reader],
                    start_new_session=True,
                )
            )
            self._stopped = Standstill(lambda: True if state_of(process.pid) == "T" else None)
            process.pidfd = set_apart(process.pidfd)
        except OSError:
            self._let_go()
            os.close(told)
            raise
        finally:
            os.close(reader)
            os.close(secret)
        with contextlib.suppress(OSError), open(told, "wb") as pipe:  # one that has died is replaced
            pipe.write(self._credentials.to_json().encode())

    def hang_up(self) -> None:
        """Report the end of the job: the writer brings the newest state to disk, cleans up and ends."""
        self._short = 0
        self._let_go()

    def _let_go(self) -> None:
        for descriptor in (self._owned, self._pipe):
            if descriptor >= 0:
                os.close(descriptor)
        self._owned = self._pipe = -1

    def finished(self) -> bool:
        """Return whether it has ended after :meth:`hang_up`; one that was killed before that is replaced."""
        process = self._process
        if process is None:
            return True
        if self._runs(process):
            return False
        if process.exit_code is not None and process.exit_code >= 0:
            if process.exit_code:  # it could not begin: there were too many processes, for one
                _remove_unused(self.root)
            return True
        try:
            again = self._start_again(process)
        except OSError:
            return True
        self._let_go()
        return not again

    def ended(self) -> bool:
        """Return whether it has."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """End it at once, and close the descriptor that holds it."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            if self._process.wait(_KILL_PATIENCE) is not None:
                self._process.close()
