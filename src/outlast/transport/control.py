"""The control socket: what workers tell their agent, one JSON line a datagram.

Local, ordered and reliable (a Unix datagram socket in the 0700 runtime folder). A worker
never waits for its agent longer than ``PATIENCE``: a line that finds the queue full for
that long is counted as lost, and training goes on.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from outlast.transport.descriptors import set_apart

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


class Inbox:
    """The agent's end; ``fileno()`` is readable when a line waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind(os.fspath(path))

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def lines(self, limit: int = 1000) -> Iterator[str]:
        """Yield what has arrived, at most ``limit`` lines."""
        for _ in range(limit):
            try:
                yield self._socket.recv(LINE_BYTES).decode(errors="replace")
            except BlockingIOError:
                return

    def close(self) -> None:
        """Close the socket and remove its path."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
