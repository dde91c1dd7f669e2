"""Which connection belongs to which peer; when two agents dial each other at once, one connection is left.

The dialler's proof is a claim: it says "I have no connection with you" and names the last one that it knew.
The side that was dialled decides:

- a connection of an older process of that name, or one that the dialler opened before, or one that it names
  and thus has lost: the new one takes its place;
- a connection that this side opened and that the dialler did not know of when it sent its claim: both dialled
  at once and this one came first; the new one is refused;
- this side's own claim is on its way: the connection that the lesser name opened is kept.

Both sides come to the same result, whatever the order in which things arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.transport.channel_auth import Hello, Reason, Refusal
from outlast.transport.channel_line import Line, Outbox, Stage


@dataclass
class Peer:
    """What is known of one peer."""

    box: Outbox = field(default_factory=Outbox)
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
