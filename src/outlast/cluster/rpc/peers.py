"""Which connection belongs to which peer; when two agents dial each other at once, one connection is left.

The dialler's proof is a claim: it says "I have no connection with you" and names the last one that it knew.
The side that was dialled decides:

- a connection of an older process of that name, or one that the dialler opened before, or one that it names
  and thus has lost: the new one takes its place;
- a connection that this side opened and that the dialler did not know of when it sent its claim: both dialled
  at once and this one came first; the new one is refused;
- this side's own claim is on its way: the connection that the lesser name opened is kept.

Both sides come to the same result, whatever the order in which things arrive.

Addresses that are dialled: looked up in threads of their own, tried one by one, with pauses.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outlast.cluster.rpc.connection import Line, SendQueue, Stage
from outlast.cluster.rpc.handshake import Hello, Reason, Refusal


@dataclass
class Peer:
    """What is known of one peer."""

    box: SendQueue = field(default_factory=SendQueue)
    line: Line | None = None  # open
    claim: Line | None = None  # dialled by this side, the proof is on its way
    last: str = ""  # nonce of the last open connection


class Directory:
    """All peers by name.

    Args:
        name: this side's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.peers: dict[str, Peer] = {}
        self.open = 0

    def of(self, name: str) -> Peer:
        """Return what is known of a peer; a new entry where nothing is."""
        peer = self.peers.get(name)
        if peer is None:
            peer = self.peers[name] = Peer()
        return peer

    def line(self, name: str) -> Line | None:
        """Return the open connection with a peer."""
        peer = self.peers.get(name)
        return peer.line if peer is not None else None

    def claim(self, line: Line, hello: Hello) -> str:
        """Decide whether a connection that this side dialled is wanted, now that the other side is known.

        Returns:
            The nonce for the proof.

        Raises:
            Refusal: there is one already, or about to be.
        """
        peer = self.of(hello.name)
        same = peer.line is not None and _hello(peer.line).boot == hello.boot
        if same or peer.claim is not None:
            raise Refusal(Reason.CROSSED, "there is a connection already")
        peer.claim = line
        return peer.last

    def admit(self, line: Line) -> list[Line]:
        """Decide whether a connection that the other side dialled, and proved its claim on, is kept.

        Returns:
            Those of which it takes the place.

        Raises:
            Refusal: another one is kept.
        """
        hello = _hello(line)
        peer = self.of(hello.name)
        old, mine = peer.line, peer.claim
        if (
            old is not None
            and old.dials
            and _hello(old).boot == hello.boot
            and line.greeting.last != old.greeting.nonce
        ):
            raise Refusal(Reason.CROSSED, "both sides dialled; the other connection is kept")
        if mine is not None and _hello(mine).boot == hello.boot and self._name < hello.name:
            raise Refusal(Reason.CROSSED, "both sides dialled; the other connection is kept")
        peer.claim = None
        return [each for each in (old, mine) if each is not None]

    def opened(self, line: Line) -> Line | None:
        """Note that a connection is open; return the one whose place it takes."""
        peer = self.of(_hello(line).name)
        old, peer.line, peer.claim = peer.line, line, None
        self.open += old is None
        peer.last = line.greeting.nonce
        line.box = peer.box
        line.stage = Stage.OPEN
        line.peer = _hello(line).name
        return old

    def ended(self, line: Line) -> str:
        """Forget a connection; return the peer's name if it was its open one, else nothing."""
        hello = line.greeting.peer
        peer = self.peers.get(hello.name) if hello is not None else None
        if hello is None or peer is None:
            return ""
        if peer.claim is line:
            peer.claim = None
        if peer.line is not line:
            return ""
        peer.line = None
        self.open -= 1
        return hello.name


def _hello(line: Line) -> Hello:
    hello = line.greeting.peer
    assert hello is not None
    return hello


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
_LOOKUPS = 8

Found = list[tuple[int, Any]]  # family and socket address


@dataclass
class Dial:
    """What is under way for one address."""

    address: str
    expected: str = ""  # whose address it is said to be
    knocks: SendQueue = field(default_factory=SendQueue)
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
