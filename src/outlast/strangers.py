"""Connections that have not proven yet that they belong here: how many, and how long each is listened to.

Every port that other hosts reach keeps them apart from the proven ones, so a crowd of them never takes a
place that a peer needs. Where there are too many, the oldest connection of the host that has the most is
closed: a host with one connection is not pushed out by a host with hundreds.
"""

from __future__ import annotations

from typing import Generic, TypeVar

One = TypeVar("One")


class Strangers(Generic[One]):
    """Bookkeeping of them; what they are is the owner's business.

    Args:
        most: of them at once.
        patience: seconds that each is listened to.
    """

    def __init__(self, most: int, patience: float) -> None:
        self.most = most
        self.patience = patience
        self._deadlines: dict[One, float] = {}  # the earliest first
        self._host_of: dict[One, str] = {}
        self._by_host: dict[str, dict[One, None]] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, one: object) -> bool:
        return one in self._deadlines

    def add(self, one: One, host: str, now: float) -> One | None:
        """Add one; return the one that has to go for it, if there are too many."""
        self._deadlines[one] = now + self.patience
        self._host_of[one] = host
        self._by_host.setdefault(host, {})[one] = None
        return None if len(self._deadlines) <= self.most else self.surplus()

    def surplus(self) -> One | None:
        """Return the one that has to go first: the oldest of the host that has the most."""
        if not self._deadlines:
            return None
        busiest = max(self._by_host, key=lambda host: len(self._by_host[host]))
        return next(iter(self._by_host[busiest]))

    def remove(self, one: One) -> bool:
        """Forget one: it is proven, or gone; say whether it was there."""
        if self._deadlines.pop(one, None) is None:
            return False
        host = self._host_of.pop(one)
        ours = self._by_host[host]
        del ours[one]
        if not ours:
            del self._by_host[host]
        return True

    def deadline(self) -> float | None:
        """Return when the next one is late; None: there is none."""
        return next(iter(self._deadlines.values()), None)

    def late(self, now: float) -> One | None:
        """Return one that has not proven anything in time; None: there is none."""
        one = next(iter(self._deadlines), None)
        return one if one is not None and self._deadlines[one] <= now else None
