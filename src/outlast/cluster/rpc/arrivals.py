"""What a channel tells its owner, and how it gets from the channel's thread to the owner's."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field

MOST_BYTES = 64 << 20  # that wait for the owner; then nothing more is read from the peers
MOST_ITEMS = 200_000


@dataclass(frozen=True)
class Received:
    """A message that arrived.

    Args:
        sender: the name that the other side gave, and proved to have the token for.
        text: what it sent.
    """

    sender: str
    text: bytes


@dataclass(frozen=True)
class Pong:
    """A peer's channel has answered a ping; ``idle``: seconds since its owner took its messages last."""

    peer: str
    idle: float


CUT = os.strerror(errno.ETIMEDOUT)  # of a peer that is gone: the network was silent, its process may be alive


@dataclass(frozen=True)
class Gone:
    """The connection with a peer ended and no other took its place: its process may have ended."""

    peer: str
    reason: str


@dataclass(frozen=True)
class Refused:
    """A connection did not come about; nobody else is touched by it.

    Args:
        address: what was dialled, or where somebody who is not welcome came from.
        reason: one sentence.
        vacant: nothing listens at what was dialled, or another agent than the one that was expected.
    """

    address: str
    reason: str
    vacant: bool = False


Arrival = Received | Pong | Gone | Refused


@dataclass(frozen=True)
class Counters:
    """What has passed since the start; ``refused`` by the name of the reason, on either side."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int
    dropped: int
    refused: dict[str, int]


@dataclass
class Tally:
    """The counters while they count; written by the channel's thread only."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    dropped: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def read(self) -> Counters:
        """Return what was counted."""
        return Counters(
            self.sent, self.sent_bytes, self.received, self.received_bytes, self.dropped, dict(self.refused)
        )


class Arrivals:
    """A queue between two threads; its descriptor is readable while something waits."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting: deque[tuple[Arrival, int]] = deque()
        self._put = 0  # bytes; each written by one thread only
        self._taken = 0
        self._told = False
        self._taken_at = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the owner has looked what arrived."""
        return max(0.0, time.monotonic() - self._taken_at)

    @property
    def full(self) -> bool:
        """Whether the owner is so far behind that nothing more should be put in."""
        return self._put - self._taken > MOST_BYTES or len(self._waiting) > MOST_ITEMS

    def put(self, item: Arrival, size: int = 0) -> None:
        """Add an item; :meth:`tell` makes the descriptor readable."""
        self._put += size
        self._waiting.append((item, size))

    def tell(self) -> None:
        """Wake the owner if something waits."""
        if self._waiting and not self._told:
            self._told = True
            os.eventfd_write(self.descriptor, 1)

    def take(self) -> list[Arrival]:
        """Return what has arrived."""
        self._taken_at = time.monotonic()
        if self.descriptor < 0:
            return []
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        self._told = False  # before the queue is emptied: what comes in after that tells again
        taken = []
        for _ in range(len(self._waiting)):
            item, size = self._waiting.popleft()
            self._taken += size
            taken.append(item)
        return taken

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
