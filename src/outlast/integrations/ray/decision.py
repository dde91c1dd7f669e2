"""Decides which agents of a Ray job are started, stopped and started again.

A job has one seat for each bundle of its placement group. The agent of the first seat that gets a node founds
the job; the others join at the address of one that runs. When an agent ends with a failure, its seat is
filled again after a delay that grows, and given up after several failures in a row. If no agent runs any
more, the next one founds the job again and goes on from its newest checkpoint. The job ends with the first
exit code that is final, when as many agents have finished as the fewest nodes, or when fewer seats than that
are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from outlast.errors import ExitCode
from outlast.integrations.kubernetes.manifest import FINAL, OF_ONE_NODE

FIRST_DELAY, LONGEST_DELAY = 10.0, 360.0  # seconds: Kubernetes' delays of a Job's pods
HEALTHY = 3600.0  # seconds that an agent lives for the failures before it to be forgotten


@dataclass(frozen=True)
class Terms:
    """What the machine goes by.

    Args:
        seats: bundles of the placement group.
        fewest: nodes without which the job cannot run.
        restarts: failures in a row after which a seat is given up.
        lead: seconds that agents get to end in.
    """

    seats: int
    fewest: int
    restarts: int
    lead: float


@dataclass(frozen=True)
class Placed:
    """A seat has a node."""

    seat: int


@dataclass(frozen=True)
class Ended:
    """The agent of a seat ended; ``code`` None: its node or its actor was lost."""

    seat: int
    code: int | None


@dataclass(frozen=True)
class Notice:
    """The job is to end: signal ``number`` came."""

    number: int


@dataclass(frozen=True)
class Place:
    """Find a node for a seat."""

    seat: int


@dataclass(frozen=True)
class Start:
    """Start the agent of a seat that has a node.

    Args:
        rank: number of the node for this agent, 0 for the one that founds the job.
        at: the seat whose address is the endpoint; its own: it founds the job.
    """

    seat: int
    rank: int
    at: int


@dataclass(frozen=True)
class Stop:
    """Send SIGTERM to the agent of a seat."""

    seat: int


@dataclass(frozen=True)
class Finish:
    """End the job; what still runs is killed."""

    code: int
    reason: str


Order = Place | Start | Stop | Finish


class _Life(Enum):
    WAITING = "waiting"
    PLACING = "placing"
    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given up"


@dataclass
class _Seat:
    life: _Life = _Life.WAITING
    due: float = 0.0
    since: float = 0.0
    failures: int = 0


@dataclass
class _Ending:
    code: int
    reason: str
    deadline: float


@dataclass
class RayJob:
    """The machine; ``begin`` once, then ``handle`` what happens and ``tick`` at the deadline."""

    terms: Terms
    _seats: list[_Seat] = field(default_factory=list)
    _ranks: int = 0
    _ending: _Ending | None = None

    def begin(self, now: float) -> list[Order]:
        """Find nodes for all seats."""
        self._seats = [_Seat(due=now) for _ in range(self.terms.seats)]
        return self.tick(now)

    def handle(self, event: Placed | Ended | Notice, now: float) -> list[Order]:
        """Take what happened; return what is to be done."""
        if isinstance(event, Notice):
            code = ExitCode.SIGNAL_BASE + event.number
            return self._end(code, f"signal {event.number} came", now)
        seat = self._seats[event.seat]
        if isinstance(event, Placed):
            wanted = seat.life is _Life.PLACING and self._ending is None
            return [self._start(event.seat, now)] if wanted else []
        if seat.life not in (_Life.PLACING, _Life.RUNNING):
            return []
        self._take(event, seat, now)
        if self._ending is None:
            return self._judge(event, now)
        return [] if self._running() else [self._finish(self._ending)]

    def tick(self, now: float) -> list[Order]:
        """Start what is due, or end what was to end by now."""
        if self._ending is not None:
            return [self._finish(self._ending)] if now >= self._ending.deadline else []
        orders: list[Order] = []
        for number, seat in enumerate(self._seats):
            if seat.life is _Life.WAITING and seat.due <= now:
                seat.life, seat.since = _Life.PLACING, now
                orders.append(Place(number))
        return orders

    def deadline(self) -> float:
        """Return when ``tick`` is to be called; infinite: not before something happens."""
        if self._ending is not None:
            return self._ending.deadline
        waiting = (seat.due for seat in self._seats if seat.life is _Life.WAITING)
        return min(waiting, default=math.inf)

    def _running(self) -> list[int]:
        return [number for number, seat in enumerate(self._seats) if seat.life is _Life.RUNNING]

    def _count(self, life: _Life) -> int:
        return sum(seat.life is life for seat in self._seats)

    def _start(self, number: int, now: float) -> Start:
        running = self._running()
        rank = self._ranks if running else 0
        self._ranks = rank + 1
        seat = self._seats[number]
        seat.life, seat.since = _Life.RUNNING, now
        return Start(number, rank, running[0] if running else number)

    def _take(self, event: Ended, seat: _Seat, now: float) -> None:
        if event.code == ExitCode.OK:
            seat.life = _Life.DONE
            return
        seat.failures = 1 if now - seat.since >= HEALTHY else seat.failures + 1
        if event.code in OF_ONE_NODE or seat.failures > self.terms.restarts:
            seat.life = _Life.GIVEN_UP
            return
        seat.life = _Life.WAITING
        lost = event.code is None
        seat.due = now if lost else now + min(FIRST_DELAY * 2 ** (seat.failures - 1), LONGEST_DELAY)

    def _judge(self, event: Ended, now: float) -> list[Order]:
        code = ExitCode.FAILED if event.code is None else event.code
        if code in FINAL:
            return self._end(code, f"seat {event.seat}: exit code {code} is final", now)
        if self._count(_Life.DONE) >= self.terms.fewest:
            return self._end(ExitCode.OK, f"{self._count(_Life.DONE)} agents finished", now)
        left = self.terms.seats - self._count(_Life.GIVEN_UP)
        if left < self.terms.fewest:
            what = f"{left} of {self.terms.seats} seats are left, {self.terms.fewest} are needed"
            return self._end(code or ExitCode.FAILED, what, now)
        return self.tick(now)

    def _end(self, code: int, reason: str, now: float) -> list[Order]:
        if self._ending is not None:
            return []
        running = self._running()
        self._ending = _Ending(code, reason, now + self.terms.lead)
        if not running:
            return [self._finish(self._ending)]
        return [Stop(number) for number in running] if code != ExitCode.OK else []

    @staticmethod
    def _finish(ending: _Ending) -> Finish:
        return Finish(int(ending.code), ending.reason)
