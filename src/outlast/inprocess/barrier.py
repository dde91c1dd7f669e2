"""The re-entry barrier: the connection between workers with a resilient function and their agent.

A Unix socket in the runtime folder, with one JSON object a message; a worker is identified by its pid, from
the kernel. Messages of workers: ``inside`` (with the options that the agent needs), ``failed``, ``unwinds``,
``waits``, ``returned``, ``leaves``. Messages of the agent: ``interrupt``, ``enter`` (with the assignment of
the next generation) and ``release`` (all ranks of the node have returned). Each message has the generation
that it is about.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.ipc.control import set_apart
from outlast.ipc.descriptors import for_strangers

INTERRUPT_SIGNAL = signal.SIGRTMIN + 11  # raises in the main thread of a worker that is inside its function
MESSAGE_BYTES = 1 << 20
_KIND = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

_MOST_READ = 64  # messages of one worker, or new connections, at a time
_MOST_LINES, _SHARE = 4096, 4
_FAR = 1e9  # seconds, 30 years
_MOST = 1 << 53  # of a generation

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """A message of a worker.

    Args:
        what: "inside", "failed" and so on; empty: the connection was closed.
        generation: that it is about.
        granularity: of "inside", which processes are replaced together.
        patience: of "inside", the seconds that a worker has to reach the barrier.
        silence: of "inside", the seconds of silence that the script allows; None: it names none.
        place: of "stuck", the frame in which the worker sleeps.
    """

    what: str
    generation: int = 0
    granularity: str = ""
    patience: float = 0.0
    silence: float | None = None
    place: str = ""


class Gate:
    """The agent's end; ``fileno()`` is readable on a message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = self._bound()
        self._poll = select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)
        self._lines: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._unheard: dict[int, None] = {}  # pids that have said nothing yet, the oldest first

    def _bound(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, _KIND)
        found.setblocking(False)
        found.bind(os.fspath(self.path))
        found.listen(1024)
        return found

    def bind_again(self) -> None:
        """Listen at the path once more, after the file was removed.

        Raises:
            OSError: it cannot be made.
        """
        fresh = self._bound()
        self._poll.unregister(self._socket)
        self._socket.close()
        self._socket = fresh
        self._poll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._poll.fileno()

    def messages(self) -> Iterator[tuple[int, Said]]:
        """Yield the messages, each with the pid of its worker; what no worker sends is passed over."""
        for descriptor, _ in self._poll.poll(0):
            if descriptor == self._socket.fileno():
                self._accept()
        for descriptor, _ in self._poll.poll(0):
            pid = self._pids.get(descriptor)
            if pid is not None:
                yield from self._read(pid)

    def _accept(self) -> None:
        most = for_strangers(_MOST_LINES, _SHARE)
        with contextlib.suppress(OSError):  # nobody is left, or no descriptor
            for _ in range(_MOST_READ):
                line, _ = self._socket.accept()
                line.setblocking(False)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
                size = _CREDENTIALS.size
                (pid, _, _) = _CREDENTIALS.unpack(
                    line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
                )
                self.forget(pid)
                self._lines[pid] = line
                self._pids[line.fileno()] = pid
                self._poll.register(line, select.EPOLLIN)
                self._unheard[pid] = None
                if len(self._lines) > most:
                    self.forget(next(iter(self._unheard)))

    def _read(self, pid: int) -> Iterator[tuple[int, Said]]:
        for _ in range(_MOST_READ):
            if pid not in self._lines:
                return
            try:
                said = self._lines[pid].recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            if not said:
                self.forget(pid)
            message = _decoded(said) if said else Said("")
            if message is not None:
                self._unheard.pop(pid, None)
                yield pid, message

    def tell(self, pid: int, message: Message) -> None:
        """Send a message to a worker; errors are ignored, since its deadline remains."""
        line = self._lines.get(pid)
        if line is not None:
            with contextlib.suppress(OSError):
                line.send(json.dumps(message).encode())

    def forget(self, pid: int) -> None:
        """Close the connection of a worker."""
        line = self._lines.pop(pid, None)
        self._unheard.pop(pid, None)
        if line is not None:
            self._poll.unregister(line)
            del self._pids[line.fileno()]
            line.close()

    def close(self) -> None:
        """Close all connections, and remove the socket."""
        for pid in list(self._lines):
            self.forget(pid)
        self._poll.close()
        self._socket.close()
        self.path.unlink(missing_ok=True)


class Line:
    """The worker's end."""

    def __init__(self, path: str) -> None:
        """Connect.

        Raises:
            OSError: there is no agent.
        """
        opened = socket.socket(socket.AF_UNIX, _KIND)
        self._socket = socket.socket(fileno=set_apart(opened.detach()))
        self._socket.connect(path)

    def say(self, message: Message) -> None:
        """Send a message to the agent; if it is gone, this process is killed anyway."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode())

    def hear(self) -> Message | None:
        """Wait for the next message; None: the agent is gone."""
        while True:
            try:
                said = self._socket.recv(MESSAGE_BYTES)
            except OSError:
                return None
            if not said:
                return None
            message = _object(said)
            if message:
                return message


def _object(said: bytes) -> dict[str, Any]:
    try:
        found = json.loads(said) if said else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _decoded(said: bytes) -> Said | None:
    """Return a message that a worker may send; None: it is none."""
    found = _object(said)
    what, granularity, place = (found.get(name, "") for name in ("say", "granularity", "place"))
    generation, patience, silence = (
        found.get("generation", 0),
        found.get("patience", 0.0),
        found.get("silence"),
    )
    texts = all(isinstance(one, str) for one in (what, granularity, place))
    seconds = all(
        type(one) in (int, float) and 0 <= one < _FAR
        for one in (patience, 0.0 if silence is None else silence)
    )
    if not texts or not what or not seconds or type(generation) is not int or not 0 <= generation < _MOST:
        return None
    return Said(what, generation, granularity, patience, silence, place)
