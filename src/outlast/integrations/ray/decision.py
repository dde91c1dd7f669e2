"""Decides which agents of a Ray job are started, stopped and started again.

Each bundle of the job's placement group has one agent. The agent of the first bundle that gets a node creates
the job; the others join at the address of one that runs. When an agent fails, its bundle gets another one
after a delay that grows; after several failures in a row it gets none. If no agent runs any more, the next
one creates the job again and goes on from its newest checkpoint. The job ends with the first exit code that
is final, when as many agents have finished as the job needs at least, or when fewer bundles are left.
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
        bundles: bundles of the placement group.
        fewest: nodes without which the job cannot run.
        restarts: failures in a row after which a bundle is no longer used.
        lead: seconds that agents get to end in.
    """

    bundles: int
    fewest: int
    restarts: int
    lead: float


@dataclass(frozen=True)
class Placed:
    """A bundle has a node."""

    bundle: int


@dataclass(frozen=True)
class Ended:
    """The agent of a bundle ended; ``code`` None: its node or its actor was lost."""

    bundle: int
    code: int | None


@dataclass(frozen=True)
class Notice:
    """The job is to end: signal ``number`` came."""

    number: int


@dataclass(frozen=True)
class Place:
    """Find a node for a bundle."""

    bundle: int


@dataclass(frozen=True)
class Start:
    """Start the agent of a bundle that has a node.

    Args:
        rank: number of the node for this agent, 0 for the one that creates the job.
        at: the bundle whose address is the endpoint; its own: it creates the job.
    """

    bundle: int
    rank: int
    at: int


@dataclass(frozen=True)
class Stop:
    """Send SIGTERM to the agent of a bundle."""

    bundle: int


@dataclass(frozen=True)
class Finish:
    """End the job; what still runs is killed."""

    code: int
    reason: str


Order = Place | Start | Stop | Finish


class _Phase(Enum):
    WAITING = "waiting"
    PLACING = "placing"
    RUNNING = "running"
    DONE = "done"
    UNUSED = "no longer used"


@dataclass
class _Bundle:
    phase: _Phase = _Phase.WAITING
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
    _bundles: list[_Bundle] = field(default_factory=list)
    _ranks: int = 0
    _ending: _Ending | None = None

    def begin(self, now: float) -> list[Order]:
        """Find nodes for all bundles."""
        self._bundles = [_Bundle(due=now) for _ in range(self.terms.bundles)]
        return self.tick(now)

    def handle(self, event: Placed | Ended | Notice, now: float) -> list[Order]:
        """Take what happened; return what is to be done."""
        if isinstance(event, Notice):
            code = ExitCode.SIGNAL_BASE + event.number
            return self._end(code, f"signal {event.number} came", now)
        bundle = self._bundles[event.bundle]
        if isinstance(event, Placed):
            wanted = bundle.phase is _Phase.PLACING and self._ending is None
            return [self._start(event.bundle, now)] if wanted else []
        if bundle.phase not in (_Phase.PLACING, _Phase.RUNNING):
            return []
        self._take(event, bundle, now)
        if self._ending is None:
            return self._judge(event, now)
        return [] if self._running() else [self._finish(self._ending)]

    def tick(self, now: float) -> list[Order]:
        """Start what is due, or end what was to end by now."""
        if self._ending is not None:
            return [self._finish(self._ending)] if now >= self._ending.deadline else []
        orders: list[Order] = []
        for number, bundle in enumerate(self._bundles):
            if bundle.phase is _Phase.WAITING and bundle.due <= now:
                bundle.phase, bundle.since = _Phase.PLACING, now
                orders.append(Place(number))
        return orders

    def deadline(self) -> float:
        """Return when ``tick`` is to be called; infinite: not before something happens."""
        if self._ending is not None:
            return self._ending.deadline
        waiting = (bundle.due for bundle in self._bundles if bundle.phase is _Phase.WAITING)
        return min(waiting, default=math.inf)

    def _running(self) -> list[int]:
        return [number for number, bundle in enumerate(self._bundles) if bundle.phase is _Phase.RUNNING]

    def _count(self, phase: _Phase) -> int:
        return sum(bundle.phase is phase for bundle in self._bundles)

    def _start(self, number: int, now: float) -> Start:
        running = self._running()
        rank = self._ranks if running else 0
        self._ranks = rank + 1
        bundle = self._bundles[number]
        bundle.phase, bundle.since = _Phase.RUNNING, now
        return Start(number, rank, running[0] if running else number)

    def _take(self, event: Ended, bundle: _Bundle, now: float) -> None:
        if event.code == ExitCode.OK:
            bundle.phase = _Phase.DONE
            return
        bundle.failures = 1 if now - bundle.since >= HEALTHY else bundle.failures + 1
        if event.code in OF_ONE_NODE or bundle.failures > self.terms.restarts:
            bundle.phase = _Phase.UNUSED
            return
        bundle.phase = _Phase.WAITING
        lost = event.code is None
        bundle.due = now if lost else now + min(FIRST_DELAY * 2 ** (bundle.failures - 1), LONGEST_DELAY)

    def _judge(self, event: Ended, now: float) -> list[Order]:
        code = ExitCode.FAILED if event.code is None else event.code
        if code in FINAL:
            return self._end(code, f"bundle {event.bundle}: exit code {code} is final", now)
        if self._count(_Phase.DONE) >= self.terms.fewest:
            return self._end(ExitCode.OK, f"{self._count(_Phase.DONE)} agents finished", now)
        left = self.terms.bundles - self._count(_Phase.UNUSED)
        if left < self.terms.fewest:
            what = f"{left} of {self.terms.bundles} bundles are left, {self.terms.fewest} are needed"
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
