"""What checkpoints and sessions need of the world, as protocols; tests put their own behind them."""

from __future__ import annotations

from typing import Protocol

from outlast.errors import OutlastError


class ExchangeFailed(OutlastError):
    """Ranks did not answer in an exchange, or the store between them is gone."""


class Clock(Protocol):
    """Two readings of time; neither compares with another host's."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start, for durations and deadlines."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch, for display and for what outlives a process."""
        ...


class Exchange(Protocol):
    """A round in which every rank hands in a text and gets everyone's.

    All ranks call :meth:`gather` in the same order with the same topics.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        ...

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:
        """Return every rank's value, ordered by rank.

        Args:
            topic: what the round is about; appears in errors.
            value: what this rank says.
            timeout: seconds to wait for the others.

        Raises:
            ExchangeFailed: names the ranks that did not answer in time.
        """
        ...
