"""The control socket: what workers tell their agent, one JSON line a datagram.

Local, ordered and reliable (a Unix datagram socket in the 0700 runtime folder). A worker
never waits for its agent longer than ``PATIENCE``: a line that finds the queue full for
that long is counted as lost, and training goes on.

File descriptors and memory of ours inside a process that belongs to the user.

A script may close every descriptor above 2 and open files of its own; those then get the numbers that
were ours. So what we hold in a rank has a high number, and memory is mapped without a descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

from outlast.files import open_private

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_HIGHEST = 1024  # descriptors that every system allows; select() takes no higher ones
_ROOM = 64  # of them for us


def set_apart(descriptor: int) -> int:
    """Give a descriptor a high number, and close the one it had; return the new one.

    Where the limit of open files leaves no room it stays what it is.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _HIGHEST if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST)
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(allowed - _ROOM, 3))
    except OSError:
        return descriptor
    os.close(descriptor)
    return high


def file_of(descriptor: int) -> tuple[int, int] | None:
    """Return what identifies the file of a descriptor (not an eventfd: all share one); None: it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def still_ours(descriptor: int, file: tuple[int, int] | None) -> Iterator[int | None]:
    """Yield a duplicate of a descriptor; None: the script has closed it, or its number has another file."""
    own = -1
    with contextlib.suppress(OSError):
        own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGHEST - _ROOM)
    with contextlib.suppress(OSError):
        own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3) if own < 0 else own
    found = file_of(own) if own >= 0 else None
    try:
        yield own if found is not None and found == file else None
    finally:
        if found is not None and file_of(own) == found:  # else the script has closed this number, too
            os.close(own)


class Pipe:
    """A pipe, both ends apart and without waiting, that is used only while the script has not closed it."""

    def __init__(self) -> None:
        self.reader, self.writer = map(set_apart, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        self.file = file_of(self.reader)

    @property
    def whole(self) -> bool:
        """Whether both ends are ours still."""
        return self.file is not None and file_of(self.reader) == self.file == file_of(self.writer)

    def write(self, content: bytes) -> bool:
        """Write unless it is full; return False where it is closed."""
        with still_ours(self.writer, self.file) as own:
            try:
                return own is not None and os.write(own, content) >= 0
            except BlockingIOError:
                return True
            except OSError:
                return False

    def read(self, limit: int) -> bytes:
        """Return what it holds; nothing where it is closed."""
        with still_ours(self.reader, self.file) as own, contextlib.suppress(OSError):
            return b"" if own is None else os.read(own, limit)
        return b""

    def close(self) -> None:
        """Close what is ours still."""
        for descriptor in (self.reader, self.writer):
            if self.file is not None and file_of(descriptor) == self.file:
                os.close(descriptor)


def map_shared(path: str | os.PathLike[str], size: int) -> memoryview:
    """Map a file of a private folder; ``mmap.mmap`` would keep a descriptor open beside the mapping.

    Raises:
        RunFolderUnusable: the file is not ours.
        OSError: the file cannot be opened or mapped.
    """
    descriptor = open_private(path, os.O_RDWR)
    try:
        address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(path))
    finally:
        os.close(descriptor)
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False  # it is used until the very end
    return memoryview(memory).cast("B")


def open_standard_streams() -> None:
    """Open /dev/null where a standard stream is closed, so that no other file gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


PATIENCE = 1.0
LINE_BYTES = 64 * 1024


class Reporter:
    """The worker's end."""

    def __init__(self, path: str) -> None:
        self.lost = 0
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket = socket.socket(fileno=set_apart(opened.detach()))
        self._socket.settimeout(PATIENCE)
        self._path = path

    def send(self, line: str) -> None:
        """Pass a line on; a failure is counted, never raised."""
        try:
            self._socket.sendto(line.encode(), self._path)
        except OSError:
            self.lost += 1

    def nudge(self) -> None:
        """Wake the agent, which looks at every heartbeat page then; an agent with a full queue is awake."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", socket.MSG_DONTWAIT, self._path)

    def close(self) -> None:
        """Close the socket; what is sent from then on is lost."""
        self._socket.close()


class Inbox:
    """The agent's end; ``fileno()`` is readable when a line waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = self._bound()

    def _bound(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        found.setblocking(False)
        found.bind(os.fspath(self.path))
        return found

    def bind_again(self) -> None:
        """Listen at the path once more, after the file was removed; the descriptor is another one then.

        Raises:
            OSError: it cannot be made.
        """
        fresh = self._bound()
        self._socket.close()
        self._socket = fresh

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def lines(self, limit: int = 1000) -> Iterator[str]:
        """Yield what has arrived, at most ``limit`` lines."""
        for _ in range(limit):
            try:
                line = self._socket.recv(LINE_BYTES)
            except BlockingIOError:
                return
            if line:  # else it was sent to wake the agent
                yield line.decode(errors="replace")

    def close(self) -> None:
        """Close the socket and remove its path."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
