"""One in-process restart on one node as a transcript; see :mod:`.transcript`.

begin reentry 4 seats granularity rank patience 30    workers that are called out of their function
begin reentry 4 seats granularity rank patience 30 suspect 2 waits 0     2 hung; 0 is at the gate already
at 0.1 seat 1 unwinds                      or: waits, stuck, ended
at 9 wait until 40                         do what is due meanwhile
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from outlast.inprocess.policy import (
    CULPRIT_PATIENCE,
    Called,
    Ended,
    Enter,
    Event,
    Granularity,
    Kill,
    Order,
    Reentry,
    Refill,
    Stuck,
    Unwinds,
    Waits,
)

_EVENTS: dict[str, type[Event]] = {"unwinds": Unwinds, "waits": Waits, "stuck": Stuck, "ended": Ended}
_BEGIN = r"begin reentry (\d+) seats granularity (\w+) patience (\S+)(?: suspect (\d+))?(?: waits (\d+))?"


class ReentryStage:
    """The workers of one node, between two generations."""

    def __init__(self, line: str) -> None:
        found = re.fullmatch(_BEGIN, line)
        if found is None:
            raise ValueError(f"transcript: {line!r} is no event")
        patience = float(found[3])
        called = {
            seat: Called(CULPRIT_PATIENCE if str(seat) == found[4] else patience, str(seat) == found[5])
            for seat in range(int(found[1]))
        }
        self._machine = Reentry(called, Granularity(found[2]), patience, 0.0)
        self._now = 0.0

    def take(self, line: str) -> Iterator[str]:
        """Take a line of the script, and give the answers."""
        found = re.fullmatch(r"at (\S+) (?:seat (\d+) (\w+)|wait until (\S+))", line)
        if found is None or (found[3] and found[3] not in _EVENTS):
            raise ValueError(f"transcript: {line!r} is no event")
        yield from self._wait(float(found[1]))
        if found[4]:
            yield from self._wait(float(found[4]))
            return
        yield from self._tell(self._machine.handle(_EVENTS[found[3]](int(found[2])), self._now))

    def _wait(self, until: float) -> Iterator[str]:
        while (due := self._machine.deadline()) is not None and due <= until:
            self._now = max(self._now, due)
            yield from self._tell(self._machine.tick(self._now))
        self._now = max(self._now, until)

    def _tell(self, orders: Iterable[Order]) -> Iterator[str]:
        for order in orders:
            match order:
                case Kill(seat, reason):
                    yield f"{self._now:.2f} s: seat {seat} is ended: {reason}"
                case Refill(seat):
                    yield f"{self._now:.2f} s: seat {seat} is forked again"
                case Enter(seats):
                    yield f"{self._now:.2f} s: seats {', '.join(map(str, seats))} enter together"
