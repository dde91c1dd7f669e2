"""What a leader makes of the reports of all nodes: verdicts, records of times, and what is to be done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from outlast.parallelism.policy.shares import FULL_SPEED, MOST_SLOW, Slow
from outlast.stragglers.policy.benchmark import Benchmarks
from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.gathering import Gathering, TimingReport
from outlast.stragglers.policy.measuring import PARTS
from outlast.stragglers.policy.options import StragglerAction, StragglerOptions
from outlast.stragglers.policy.rows import (
    BENCHMARK,
    LAST_MICRO_STEP,
    MICRO_STEP,
    Kind,
    Place,
    Row,
    State,
    Verdict,
)

LATEST = 4  # windows from which it is told what a late rank is late with
NOT_DIVIDED = "; micro-batches stay as they are, since the script does not measure them with outlast.Batches"
SAME_SPEED = 0.15  # relative change of a slow rank's speed, below which shares stay
TIMES_EVERY = 10.0  # seconds between two records of times, where no verdict asks for one
MOST_TOLD = 200  # ranks of a record of times: those that are furthest from the median


@dataclass(frozen=True)
class RankTimes:
    """How long each rank was busy in a step.

    Args:
        step: the last one of the window.
        typical: the median over ranks, in seconds.
        ratios: of each rank to that.
    """

    step: int
    typical: float
    ratios: Mapping[int, float]


@dataclass(frozen=True)
class Noticed:
    """A verdict about a rank, and the step at which it was given."""

    verdict: Verdict
    step: int


@dataclass(frozen=True)
class Wanted:
    """What the verdicts ask for at the next save.

    Args:
        action: REPLACE or STOP.
        node: that is to be replaced, or of the slow rank.
        reason: one sentence.
    """

    action: StragglerAction
    node: str
    reason: str


def places_of(
    options: StragglerOptions, nodes: Mapping[str, Sequence[int]], devices: Mapping[str, str] | None = None
) -> dict[int, Place]:
    """Return where each rank runs and which work it has, in Megatron-LM's default order of ranks.

    Args:
        options: the sizes of the axes.
        nodes: the ranks of each node.
        devices: the model of each node's devices; they count only where that of every node is known.
    """
    world = sum(map(len, nodes.values()))
    block = max(1, math.ceil(world / options.pipeline_stages))
    told = devices or {}
    known = all(told.get(node) for node in nodes)

    def place(rank: int, node: str) -> Place:
        above = rank % block // options.tensor_parallel
        context, rest = above % options.context_parallel, above // options.context_parallel
        coordinates = (context, rest % options.expert_parallel)
        return Place(rank, node, told[node] if known else "", rank // block, coordinates)

    return {rank: place(rank, node) for node, ranks in nodes.items() for rank in ranks}


def busy_times(step: int, rows: Iterable[Row]) -> RankTimes | None:
    """Return how long each rank was busy in a step of a window; None: nothing was measured."""
    spent: dict[int, float] = {}
    steps = 1
    for row in rows:
        if row.section == PARTS[0]:
            steps = max(steps, row.count)
        spent[row.rank] = spent.get(row.rank, 0.0) + row.total - row.waiting
    known = {rank: one / steps for rank, one in spent.items() if math.isfinite(one)}
    typical = median(known.values()) if known else 0.0
    if typical <= 0:
        return None
    ratios = {rank: one / typical for rank, one in known.items()}
    told = sorted(ratios, key=lambda rank: (-abs(ratios[rank] - 1.0), rank))[:MOST_TOLD]
    return RankTimes(step, typical, {rank: ratios[rank] for rank in sorted(told)})


def _found_before(place: Place, section: str, speed: int) -> Verdict:
    """Return the verdict of an earlier leader about a rank that computes slowly."""
    slowdown = FULL_SPEED / max(1, speed)
    reason = f"rank {place.rank} on {place.node} takes {slowdown:.2f} times as long, an earlier leader found"
    return Verdict(
        rank=place.rank,
        node=place.node,
        kind=Kind.COMPUTE,
        section=section,
        slowdown=slowdown,
        share_of_steps=math.nan,
        confidence=math.nan,
        job_slowdown=1.0,
        windows=0,
        reason=reason,
        state=State.ON,
    )


class Excess:
    """What the ranks were busy with in the latest windows, by kind."""

    def __init__(self) -> None:
        self._latest: deque[dict[int, dict[Kind, float]]] = deque(maxlen=LATEST)

    def add(self, rows: Iterable[Row]) -> None:
        """Add the rows of a window."""
        spent: dict[int, dict[Kind, float]] = {}
        for row in rows:
            kinds = spent.setdefault(row.rank, {})
            kinds[row.kind] = kinds.get(row.kind, 0.0) + row.total - row.waiting
        self._latest.append(spent)

    def kind(self, rank: int, peers: Sequence[int]) -> Kind:
        """Return the kind of most of what a rank spends beyond the median of its peers; OTHER: none."""
        excess: dict[Kind, float] = {}
        for spent in self._latest:
            others = [spent[one] for one in peers if one != rank and one in spent]
            for kind, seconds in spent.get(rank, {}).items() if others else ():
                usual = median(one.get(kind, 0.0) for one in others)
                excess[kind] = excess.get(kind, 0.0) + seconds - usual
        whole = sum(one for one in excess.values() if one > 0)
        most = max(excess, key=lambda kind: excess[kind], default=Kind.OTHER)
        return most if whole > 0 and excess[most] > whole / 2 else Kind.OTHER


class StragglerWatch:
    """Compares the ranks of one generation after another.

    Args:
        options: of the table ``[stragglers]``.
        signs: returns other signs that a node is sick, each in a few words.
    """

    def __init__(self, options: StragglerOptions, signs: Callable[[str, float], Sequence[str]]) -> None:
        self._options = options
        self._signs = signs
        self.begin(0, {})

    def begin(
        self, generation: int, nodes: Mapping[str, Sequence[int]], devices: Mapping[str, str] | None = None
    ) -> None:
        """Compare the ranks of a generation; what was known of older ones is dropped, for ranks move.

        Args:
            generation: its number.
            nodes: the ranks of each.
            devices: the model of the devices of each; None: all are alike.
        """
        self._generation = generation
        self._places = places_of(self._options, nodes, devices)
        self._gathering, self._straggling = Gathering(self._places), Straggling(self._options.window)
        self._excess, self._benchmarks = Excess(), Benchmarks()
        self._slow: dict[tuple[int, str], Verdict] = {}  # by rank and section
        self._divides = False  # the ranks take their shares from outlast.Batches
        self._speeds: dict[int, int] = {}  # of the slow ranks, by which micro-batches should be divided
        self._resumed = False
        self._told_at = -math.inf

    def resume(self, shares: Slow, now: float) -> None:
        """Go on with the shares in force, once for each :meth:`begin`.

        The ranks that are slow by them stay so until their times say otherwise.

        Args:
            shares: the slow ranks by whose speeds micro-batches are divided.
            now: in seconds of a monotonic clock.
        """
        if self._resumed:
            return
        self._resumed = True
        for rank, speed in shares:
            if rank in self._places and rank not in self._speeds:
                self._divides = True
                self._speeds[rank] = speed
                for section in (MICRO_STEP, LAST_MICRO_STEP):
                    self._straggling.presume(_found_before(self._places[rank], section, speed), now)

    def take(self, report: TimingReport, now: float, node: str = "") -> list[Noticed | RankTimes]:
        """Take what the ranks of a node measured, and return what is to be written down.

        Args:
            report: of the node.
            now: in seconds of a monotonic clock.
            node: that reports; ranks of others in its report are ignored. "": any.
        """
        if report.generation != self._generation:
            return []
        ours = (one for one in report.windows if one.rank in self._places)
        mine = (one for one in ours if not node or self._places[one.rank].node == node)
        found: list[Noticed | RankTimes] = []
        for window, told in self._gathering.take(mine):
            step = window * self._options.window
            self._benchmarks.take(told, self._places)
            rows = [row for row in told if row.section != BENCHMARK]
            if {one.rank for one in rows} == self._places.keys():
                self._straggling.again(window)
            self._excess.add(rows)
            self._divides = self._divides or any(one.section == LAST_MICRO_STEP for one in rows)
            judged = self._straggling.observe(window, rows, self._places, now)
            verdicts = [self._explained(one) for one in judged]
            for one in verdicts:
                if one.state is State.ON:
                    self._slow[one.rank, one.section] = one
                elif one.state is State.UNKNOWN and not one.section:
                    self._slow = {key: kept for key, kept in self._slow.items() if key[0] != one.rank}
                else:
                    self._slow.pop((one.rank, one.section), None)
            self._weigh()
            times = busy_times(step, rows)
            if times is not None and (verdicts or now - self._told_at >= TIMES_EVERY):
                self._told_at = now
                found.append(times)
            found += [Noticed(one, step) for one in verdicts]
        return found

    def _explained(self, one: Verdict) -> Verdict:
        """Return a verdict about a rank that is late, with what it is late with, and why nothing follows."""
        if one.state is State.ON and self.rebalances:
            one = replace(one, reason=one.reason + ("" if self._divides else NOT_DIVIDED))
        if one.section or one.state is not State.ON:
            return one
        group = self._places[one.rank].group
        peers = [rank for rank, place in self._places.items() if place.group == group]
        kind = self._excess.kind(one.rank, peers)
        words = "" if kind is Kind.OTHER else f"; most of it is {kind.value}"
        return replace(one, kind=kind, reason=one.reason + words)

    @property
    def rebalances(self) -> bool:
        """The options ask for micro-batches that are divided by the speeds of the ranks."""
        return self._options.action == StragglerAction.REBALANCE.value

    @property
    def slow(self) -> Slow:
        """The slow ranks by whose speeds micro-batches should be divided; empty: even shares."""
        return tuple(sorted(self._speeds.items()))

    def _weigh(self) -> None:
        """Note the speeds of the ranks that compute slowly, where micro-batches can be taken from them.

        Only the time of one micro-batch counts: shares do not change it.
        """
        if not self.rebalances or not self._divides:
            return
        found: dict[int, int] = {}
        for one in self._straggling.slow:
            if one.section in (MICRO_STEP, LAST_MICRO_STEP) and len(found) < MOST_SLOW:
                found.setdefault(one.rank, round(FULL_SPEED / min(max(1.0, one.slowdown), FULL_SPEED)))
        self._speeds = {
            rank: self._speeds[rank] if abs(speed - self._speeds.get(rank, 0)) < SAME_SPEED * speed else speed
            for rank, speed in found.items()
        }

    def wanted(self, wall: float) -> Wanted | None:
        """Return what the options ask for at the next save; None: nothing.

        Args:
            wall: seconds since the epoch.
        """
        action = StragglerAction(self._options.action)
        if action in (StragglerAction.LOG, StragglerAction.REBALANCE):
            return None
        for one in sorted(self._slow.values(), key=lambda verdict: -verdict.slowdown):
            if action is StragglerAction.STOP:
                return Wanted(action, one.node, one.reason)
            sign = self._sign(one, wall)
            if sign:
                return Wanted(action, one.node, f"{one.reason}; second sign: {sign}")
        return None

    def _sign(self, found: Verdict, wall: float) -> str:
        """Return another sign that the node of a slow rank is sick; "": there is none."""
        signs = self._signs(found.node, wall)
        return signs[-1] if signs else self._benchmarks.sign(found)

    def asks_benchmark(self, now: float, wall: float) -> str:
        """Return why all ranks are to compute the same product now; "": they need not.

        Args:
            now: in seconds of a monotonic clock.
            wall: seconds since the epoch.
        """
        if self._options.action != StragglerAction.REPLACE.value:
            return ""
        alone = [one for one in self._slow.values() if not self._sign(one, wall)]
        if not alone or not self._benchmarks.ask(now):
            return ""
        words = "no second sign says that its node is sick: every rank computes the same product after a step"
        return f"rank {alone[0].rank} on {alone[0].node} is slow, and {words}"
