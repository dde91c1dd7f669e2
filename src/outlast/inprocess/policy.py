"""In-process restart: the options, and the decisions about each worker of a node between two generations.

The living workers are told to leave their function, and wait at the re-entry barrier. Those that do not come
are killed and, like those that died, forked again. When all that were kept wait there, they enter together.
Forked workers are not waited for: they meet the others in the function.

Why it always ends: each seat goes from called to waiting or gone, never back, and each wait has a deadline. A
process that the kernel does not let die is waited for no longer than ``KILL_PATIENCE``; whatever it still
does belongs to an old generation.

Across nodes (:class:`Gates`), no node gets its assignment of the next generation before the ranks of all
nodes wait or are gone: otherwise the first ranks would be taken for hung while they wait for the last. A node
kills ranks that do not come, so each node answers within the time that it promised. If one does not, all
workers are restarted in the same generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from outlast.checkpoint.policy.manifest import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from outlast.cluster.policy.messages import NodeStatus
    from outlast.recovery.policy.events import Fault


HANG_TIMEOUT = 60.0  # seconds; NVRx inprocess.Wrapper, soft_timeout
HARD_TO_SOFT = 1.5  # NVRx: hard_timeout 90 s for a soft_timeout of 60 s
BARRIER_TIMEOUT = 120.0  # seconds; NVRx inprocess.Wrapper, barrier_timeout
LEAST_PATIENCE = 10.0  # seconds; a rank may be in a long operation although hang_timeout is short
CULPRIT_PATIENCE = 1.0  # a hung rank that can be interrupted answers in milliseconds
GPU_CULPRIT_PATIENCE = 5.0  # NCCL's abort takes 0.5 s, and 0.01 s for each kernel that waits
KILL_PATIENCE = 10.0


def culprit_patience(stopped: bool, gpu: bool, allowed: float) -> float:
    """Return the seconds that a hung rank has to answer.

    Args:
        stopped: it is, so that it cannot answer.
        gpu: it uses a GPU.
        allowed: what its script allows a rank to leave its function.
    """
    return 0.0 if stopped else min(GPU_CULPRIT_PATIENCE if gpu else CULPRIT_PATIENCE, allowed)


class Granularity(str, Enum):
    """What is replaced when the process of one rank is lost (Megatron Bridge, ``granularity``)."""

    RANK = "rank"
    NODE = "node"


@dataclass(frozen=True)
class InProcessOptions:
    """Options of ``outlast.resilient``, by the names of NVRx ``inprocess.Wrapper`` and Megatron Bridge.

    Args:
        enabled: off: the function is called once, and a fault restarts the workers.
        hang_timeout: seconds without a heartbeat after which a rank is hung (NVRx: soft_timeout); None:
            the launcher's timeouts.
        hard_timeout: seconds after the last heartbeat at which a rank that stays in its function is killed;
            1.5 times ``hang_timeout`` (NVRx: 60 and 90), at least 10 s more.
        barrier_timeout: seconds that a rank waits for the restart before it ends its process; 120 (NVRx), or
            as long as others may take to leave, if that is longer.
        max_iterations: restarts of the run after which a rank gives up (Megatron Bridge); None: no limit
            besides the launcher's budgets.
        granularity: "rank": a lost process is replaced; "node": all processes of its node are.
    """

    enabled: bool = True
    hang_timeout: float | None = None
    hard_timeout: float | None = None
    barrier_timeout: float | None = None
    max_iterations: int | None = None
    granularity: str = Granularity.RANK.value

    @property
    def patience(self) -> float:
        """Seconds that a rank has to leave its function."""
        soft = HANG_TIMEOUT if self.hang_timeout is None else self.hang_timeout
        if self.hard_timeout is not None:
            return self.hard_timeout - soft
        return max((HARD_TO_SOFT - 1.0) * soft, LEAST_PATIENCE)

    @property
    def gate_patience(self) -> float:
        """Seconds that a rank waits at the re-entry barrier."""
        if self.barrier_timeout is not None:
            return self.barrier_timeout
        return max(BARRIER_TIMEOUT, longest(self.patience))

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        for name in ("hang_timeout", "hard_timeout", "barrier_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                found.append(f"{name}: {value} is not a positive number of seconds")
        if not found and self.patience <= 0:
            found.append(f"hard_timeout: {self.hard_timeout} is not more than hang_timeout")
        if self.max_iterations is not None and self.max_iterations < 1:
            found.append(f"max_iterations: {self.max_iterations} is not a positive number")
        if self.granularity not in [one.value for one in Granularity]:
            found.append(f"granularity: found {self.granularity!r}, expected rank or node")
        return tuple(found)


def longest(patience: float) -> float:
    """Return the longest wait in seconds for a worker that has ``patience`` to leave and to clean up."""
    return 2 * patience + KILL_PATIENCE


@dataclass(frozen=True)
class Called:
    """A worker that is kept, as the restart begins.

    Args:
        patience: seconds that it has to reach the barrier.
        waits: it is there already.
    """

    patience: float
    waits: bool = False


@dataclass(frozen=True)
class Unwinds:
    """A worker has left its function and cleans up."""

    seat: int


@dataclass(frozen=True)
class Waits:
    """A worker has reached the barrier."""

    seat: int


@dataclass(frozen=True)
class Stuck:
    """A worker sleeps and cannot be interrupted: neither the abort of its groups nor a signal wakes it.

    Args:
        seat: of the worker.
        place: the Python frame that it is in.
    """

    seat: int
    place: str = ""


@dataclass(frozen=True)
class Leaves:
    """A worker leaves its function for good; its process has to end."""

    seat: int


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended."""

    seat: int


Event = Unwinds | Waits | Stuck | Leaves | Ended


@dataclass(frozen=True)
class Kill:
    """End a worker."""

    seat: int
    reason: str


@dataclass(frozen=True)
class Refill:
    """Fork another worker for a seat."""

    seat: int


@dataclass(frozen=True)
class Enter:
    """Restart all waiting workers."""

    seats: tuple[int, ...]


Order = Kill | Refill | Enter


class Stage(Enum):
    """The stage of a seat."""

    CALLED = "called"
    WAITING = "waiting"
    KILLED = "killed"
    GONE = "gone"


@dataclass
class _Seat:
    stage: Stage
    until: float


class Reentry:
    """One restart on one node.

    Args:
        called: the workers that are kept, by seat (local rank).
        granularity: whether the others are kept when one is lost.
        unwinding: seconds that a worker has from leaving its function to the barrier.
        now: monotonic seconds.
    """

    def __init__(
        self, called: Mapping[int, Called], granularity: Granularity, unwinding: float, now: float
    ) -> None:
        self._granularity = granularity
        self._unwinding = unwinding
        self._seats = {
            seat: _Seat(Stage.WAITING if one.waits else Stage.CALLED, now + one.patience)
            for seat, one in called.items()
        }
        self._entered = False

    @property
    def kept(self) -> tuple[int, ...]:
        """Seats whose worker is kept."""
        return tuple(seat for seat, one in self._seats.items() if one.stage is not Stage.GONE)

    @property
    def over(self) -> bool:
        """Whether all kept workers wait, so that they can restart."""
        return self._entered

    def stage(self, seat: int) -> Stage | None:
        """Return the stage of a seat; None: its worker was never kept."""
        found = self._seats.get(seat)
        return None if found is None else found.stage

    def handle(self, event: Event, now: float) -> tuple[Order, ...]:
        """Handle an event of a worker."""
        found = self._seats.get(event.seat)
        if found is None:
            return ()
        if isinstance(event, Ended):
            return tuple(self._lost(event.seat, found, now))
        if isinstance(event, Leaves):
            if found.stage in (Stage.KILLED, Stage.GONE):
                return ()
            self._entered = False
            return (self._kill(event.seat, found, "it left its function for good", now),)
        if found.stage is Stage.CALLED:
            if isinstance(event, Waits):
                found.stage = Stage.WAITING
            elif isinstance(event, Stuck):
                where = f", in {event.place}" if event.place else ""
                return (self._kill(event.seat, found, f"it sleeps and cannot be interrupted{where}", now),)
            else:
                found.until = max(found.until, now + self._unwinding)
        return self._let_in()

    def tick(self, now: float) -> tuple[Order, ...]:
        """Do what is due."""
        orders: list[Order] = []
        for seat, one in self._seats.items():
            if now < one.until:
                continue
            if one.stage is Stage.CALLED:
                orders.append(self._kill(seat, one, "it did not leave its function in time", now))
            elif one.stage is Stage.KILLED:
                orders += self._lost(seat, one, now)
        return tuple(orders) or self._let_in()

    def deadline(self) -> float | None:
        """Return when :meth:`tick` has something to do; None: never."""
        timed = (Stage.CALLED, Stage.KILLED)
        return min((one.until for one in self._seats.values() if one.stage in timed), default=None)

    def _kill(self, seat: int, one: _Seat, reason: str, now: float) -> Kill:
        one.stage, one.until = Stage.KILLED, now + KILL_PATIENCE
        return Kill(seat, reason)

    def _lost(self, seat: int, one: _Seat, now: float) -> Iterator[Order]:
        if one.stage is Stage.GONE:
            return
        one.stage, self._entered = Stage.GONE, False
        yield Refill(seat)
        if self._granularity is Granularity.NODE:
            for other, there in self._seats.items():
                if there.stage in (Stage.CALLED, Stage.WAITING):
                    yield self._kill(other, there, "its node lost a rank, and granularity is node", now)
        yield from self._let_in()

    def _let_in(self) -> tuple[Order, ...]:
        """Return the order to restart, once, when every seat waits or is gone."""
        stages = {one.stage for one in self._seats.values()}
        if self._entered or stages - {Stage.WAITING, Stage.GONE}:
            return ()
        self._entered = True
        waiting = tuple(seat for seat, one in self._seats.items() if one.stage is Stage.WAITING)
        return (Enter(waiting),) if waiting else ()


class Gates:
    """The re-entry barriers of all nodes, as the leader knows them.

    Args:
        letters: seconds that the messages of an answer may take.
    """

    def __init__(self, letters: float) -> None:
        self._letters = letters
        self._able: dict[str, bool | None] = {}
        self._patience: dict[str, float] = {}

    def told(self, node: str, offer: NodeStatus) -> None:
        """Handle the report of a node about its ranks."""
        self._able[node], self._patience[node] = offer.able, offer.patience

    def able(self, fault: Fault, nodes: Iterable[str]) -> bool | None:
        """Say whether the living ranks of nodes can restart in process.

        Args:
            fault: it says so of its own node, later than that node's last word.
            nodes: those with ranks that are there.

        Returns:
            None: nobody speaks of it. A node without a living rank is no obstacle: its ranks are forked.
        """
        words = [True if node == fault.node and fault.reenters else self._able.get(node) for node in nodes]
        return None if True not in words else False not in words

    def patience(self, nodes: Iterable[str]) -> float:
        """Return the seconds within which the ranks of nodes are at the barrier, or are ended."""
        return max((self._patience.get(node, 0.0) for node in nodes), default=0.0) + self._letters


def late(silent: Iterable[str]) -> str:
    """Return the reason for nodes whose ranks did not reach the barrier in time."""
    return f"{some(sorted(silent))} did not bring the ranks to the re-entry barrier in time"
