"""Other processes of this host, which may end while a test looks at them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438  # of every architecture
_SEIZE, _INTERRUPT, _DETACH, _ALL = 0x4206, 0x4207, 17, 0x40000000  # linux/ptrace.h, linux/wait.h


def command_line(pid: int) -> str:
    """Return the words of a process; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def children_of(pid: int) -> Iterator[int]:
    """Yield the pids of a process's children."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                yield from map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


def tree_of(pid: int) -> list[int]:
    """Return the pids of a process and of all below it."""
    found = [pid]
    for one in found:
        found += [child for child in children_of(one) if child not in found]
    return found


def state_of(pid: int) -> str:
    """Return the letter of /proc/PID/stat; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    return state_of(pid) not in ("", "Z", "X")


def listening(pid: int) -> set[int]:
    """Return the TCP ports that a process listens at, by IPv4."""
    return {int(row[1].partition(":")[2], 16) for _, row in _tcp_sockets(pid) if row[3] == "0A"}


def break_connections(pid: int) -> int:
    """Shut down the connections that a process has by IPv4, at both ends; return how many there were."""
    found = [descriptor for descriptor, row in _tcp_sockets(pid) if row[3] == "01"]
    holder = os.pidfd_open(pid)
    for descriptor in found:
        with contextlib.suppress(OSError), _taken(holder, descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    os.close(holder)
    return len(found)


def _taken(holder: int, descriptor: int) -> socket.socket:
    number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, holder, descriptor, 0)
    if number < 0:
        raise OSError(ctypes.get_errno(), f"descriptor {descriptor} cannot be taken")
    return socket.socket(fileno=number)


def _tcp_sockets(pid: int) -> list[tuple[int, list[str]]]:
    """Return the descriptors of a process that are TCP sockets, each with its row of /proc/net/tcp."""
    held = {}
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            held[os.readlink(path)] = int(path.name)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [(held[name], row) for row in rows if (name := f"socket:[{row[9]}]") in held]


def children_running(parent: int, words: str) -> set[int]:
    """Return the children of a process whose command line has these words."""
    return {pid for pid in children_of(parent) if words in command_line(pid)}


def child_running(parent: int, words: str) -> int:
    """Return one of these children; 0 when there is none."""
    return next(iter(children_running(parent, words)), 0)


@contextlib.contextmanager
def main_thread_stopped(pid: int) -> Iterator[None]:
    """Stop a process's main thread while its other threads go on, as a system call does that does not return.

    The process is a child of this one, which becomes its tracer for a while.
    """
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    for request in (_SEIZE, _INTERRUPT):
        if trace(request, pid, None, None) < 0:
            raise OSError(ctypes.get_errno(), f"ptrace request {request:#x} on {pid}")
    os.waitpid(pid, _ALL)
    try:
        yield
    finally:
        trace(_DETACH, pid, None, None)
