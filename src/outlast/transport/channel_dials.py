"""Addresses that are dialled: looked up in threads of their own, tried one by one, with pauses."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outlast.transport.channel_line import Line, Outbox

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
_LOOKUPS = 8

Found = list[tuple[int, Any]]  # family and socket address


@dataclass
class Dial:
    """What is under way for one address."""

    address: str
    expected: str = ""  # whose address it is said to be
    knocks: Outbox = field(default_factory=Outbox)
    line: Line | None = None
    busy: bool = False
    candidates: Found = field(default_factory=list)
    peer: str = ""  # who turned out to be there
    pause: float = 0.0
    not_before: float = 0.0

    def failed(self, now: float) -> None:
        """Note that nobody useful was there."""
        self.busy, self.line = False, None
        self.pause = min(max(FIRST_PAUSE, 2 * self.pause), LONGEST_PAUSE)
        self.not_before = now + self.pause

    def succeeded(self) -> None:
        """Note that there is a connection."""
        self.busy, self.line, self.pause, self.not_before = False, None, 0.0, 0.0


def split(address: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        ValueError: it is not host:port.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"host:port expected, {address[:100]!r} found")
    return host, int(port)


class Resolver:
    """Looks names up without making anybody wait, at most so many at once.

    Args:
        answer: takes the dial and what was found, or a sentence on why nothing was; called from any thread.
    """

    def __init__(self, answer: Callable[[Dial, Found | str], None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Dial, str, int]] = deque()
        self._threads = 0

    def ask(self, dial: Dial, host: str, port: int) -> None:
        """Look a name up; a number is answered at once."""
        try:
            self._answer(dial, _lookup(host, port, socket.AI_NUMERICHOST))
            return
        except (OSError, UnicodeError):
            pass
        with self._lock:
            self._waiting.append((dial, host, port))
            if self._threads == _LOOKUPS:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="channel names", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._threads -= 1
                self._waiting.pop()
            self._answer(dial, f"{host} was not looked up: {error}")

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                dial, host, port = self._waiting.popleft()
            found: Found | str
            try:
                found = _lookup(host, port, 0)
            except (OSError, UnicodeError) as error:
                said = error.strerror if isinstance(error, OSError) else str(error)
                found = f"the name {host} does not resolve: {said}"
            self._answer(dial, found)


def _lookup(host: str, port: int, flags: int) -> Found:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(int(family), address) for family, _, _, _, address in infos]
