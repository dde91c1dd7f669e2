"""Jobs for the deciders: simulated with noise, with exact times, and as a leader hears of their ranks."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.limits import Limits
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import Kind, Place, Row, State, Verdict
from outlast.stragglers.policy.watch import Noticed, RankTimes, StragglerWatch

STEPS = 5
WHOLE = {"data": 0.02, "forward": 0.30, "backward": 0.50, "reduce": 0.05}  # seconds of a step, healthy
KINDS = {"data": Kind.DATA, "reduce": Kind.COMMUNICATION}
ONSET = 12  # windows of health before a rank turns slow
Told = Sequence[tuple[int, Verdict]]
Slow = Callable[[int, int, str], float]  # rank, window, section: by how much its time is multiplied


def nobody(rank: int, window: int, section: str) -> float:
    return 1.0


def slow(which: int, factor: float, section: str = "forward", since: int = 0) -> Slow:
    """Return a job in which one rank is slow in one section."""
    return lambda rank, window, name: factor if rank == which and name == section and window >= since else 1.0


@dataclass
class Fleet:
    """Ranks in pipeline stages that wait for each other at the end of a step.

    Args:
        noise: standard deviation of a step's times, relative.
        stages: work of each stage, relative; ranks are divided evenly.
        tells_waiting: the time in "reduce" is told apart into work and waiting.
    """

    ranks: int
    seed: int = 0
    noise: float = 0.02
    stages: Sequence[float] = (1.0,)
    slow: Slow = nobody
    tells_waiting: bool = True
    whole: Mapping[str, float] = field(default_factory=lambda: dict(WHOLE))

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        each = self.ranks // len(self.stages)
        self.places = {
            rank: Place(rank, f"n{rank // 8}", stage=min(rank // each, len(self.stages) - 1))
            for rank in range(self.ranks)
        }

    def window(self, number: int) -> list[Row]:
        """Return the rows of a window."""
        busy = {
            rank: {
                name: sum(
                    seconds
                    * self.stages[place.stage]
                    * self.slow(rank, number, name)
                    * max(0.05, self._random.gauss(1, self.noise))
                    for _ in range(STEPS)
                )
                for name, seconds in self.whole.items()
            }
            for rank, place in self.places.items()
        }
        latest = max(sum(of_rank.values()) for of_rank in busy.values())
        rows = []
        for rank, of_rank in busy.items():
            waits = latest - sum(of_rank.values())
            for name, seconds in of_rank.items():
                waiting = waits if name == "reduce" else 0.0
                total = seconds + waiting
                told = waiting if self.tells_waiting or name != "reduce" else math.nan
                each = total / STEPS
                kind = KINDS.get(name, Kind.COMPUTE)
                rows.append(Row(rank, name, kind, number, STEPS, each, each, each, total, told))
        return rows

    def watch(
        self,
        windows: int,
        decider: Straggling | None = None,
        first: int = 0,
        change: Callable[[int, Row], Row | None] = lambda _, row: row,
    ) -> Told:
        """Return the verdicts of a decider, with the number of the window.

        Args:
            change: what becomes of a row, by the number of the window.
        """
        decider, told = decider or Straggling(STEPS), []
        for number in range(first, first + windows):
            rows = [one for row in self.window(number) if (one := change(number, row)) is not None]
            told += [(number, one) for one in decider.observe(number, rows, self.places, number * 5.0)]
        return told


def named(told: Told) -> set[tuple[int, str]]:
    """Return the ranks and sections that were ever found slow."""
    return {(verdict.rank, verdict.section) for _, verdict in told if verdict.state is State.ON}


# Exact times

RANKS = 16  # the least number that are judged from the first window on
AT_ONCE = Limits(windows=1, false_alarms=1e9)  # a slow window is enough
Times = Sequence[float | None]  # of each rank; None: it does not enter the section


class Job:
    """A decider that is shown windows.

    Args:
        ranks: of the job, all with equal work.
        steps: of a window, and how often each section is entered.
        node: of all ranks.
    """

    def __init__(
        self, ranks: int = RANKS, limits: Limits | None = None, steps: int = 1, node: str = "n0"
    ) -> None:
        self.decider = Straggling(steps, limits)
        self.places = {rank: Place(rank, node) for rank in range(ranks)}
        self.window, self.now, self._steps = 0, 0.0, steps

    def see(self, waits: Sequence[float] | None = None, **sections: Times) -> list[Verdict]:
        """Show the next window, one second after the one before, and return what has changed.

        Args:
            waits: seconds that ranks wait in "reduce", beyond its times.
            sections: seconds of an entry.
        """
        rows = []
        for section, times in sections.items():
            for rank, each in enumerate(times):
                if each is not None:
                    waiting = waits[rank] if waits and section == "reduce" else 0.0
                    figures = (each, each, each, each * self._steps + waiting, waiting)
                    kind = KINDS.get(section, Kind.COMPUTE)
                    rows.append(Row(rank, section, kind, self.window, self._steps, *figures))
        found = self.decider.observe(self.window, rows, self.places, self.now)
        self.window, self.now = self.window + 1, self.now + 1.0
        return found

    def told(self, windows: int, waits: Sequence[float] | None = None, **sections: Times) -> list[str]:
        """Show equal windows; return the state, rank and section of each verdict, after its window."""
        return [
            f"{self.window - 1} {brief(one)}" for _ in range(windows) for one in self.see(waits, **sections)
        ]


def brief(one: Verdict) -> str:
    return f"{one.state.value} {one.rank} {one.section}".rstrip()


def full(one: Verdict) -> str:
    return (
        f"{brief(one)} | {one.node} {one.kind.value} x{one.slowdown:.4g} share {one.share_of_steps:.3g} "
        f"chance {1 - one.confidence:.3g} job x{one.job_slowdown:.4g} windows {one.windows}"
    )


def words(of: Verdict) -> set[str]:
    """Return the words of a reason, so that a test can ask for names and numbers."""
    return set(re.split(r"[ ,;:()]+", of.reason))


def but(usual: float | Times, **others: float | None) -> list[float | None]:
    """Return times of 16 ranks, those of ``r3`` and so on apart."""
    times = list(usual) if isinstance(usual, Sequence) else [usual] * RANKS
    for name, seconds in others.items():
        times[int(name[1:])] = seconds
    return times


# What a leader hears

NODES = {"a": range(4), "b": range(4, 8)}


def times(section: str, each: float, kind: Kind = Kind.COMPUTE, waiting: float = 0.0) -> SectionTimes:
    return SectionTimes(section, kind, 4, each, each, each, each * 4 + waiting, waiting)


def watching(
    action: str = "log", signs: Mapping[str, str] | None = None, nodes: Mapping[str, range] = NODES
) -> StragglerWatch:
    """Return a watch that knows of one sign for each of some nodes."""
    told = signs or {}
    watch = StragglerWatch(
        StragglerOptions(action=action), lambda node, _: [told[node]] if node in told else []
    )
    watch.begin(1, nodes)
    return watch


def fed(
    watch: StragglerWatch,
    ends: Iterable[int],
    sections: Callable[[int, int], Iterable[SectionTimes]],
    ranks: Iterable[int] = range(8),
    generation: int = 1,
) -> list[Noticed | RankTimes]:
    """Show windows of some ranks, a second each: the sections by rank and end of the window."""
    found: list[Noticed | RankTimes] = []
    for end in ends:
        windows = (RankWindow(rank, end, tuple(sections(rank, end))) for rank in ranks)
        found += watch.take(TimingReport(generation, tuple(windows)), float(end))
    return found


def shown(
    watch: StragglerWatch,
    ends: Iterable[int],
    slow: Mapping[int, float],
    names: Sequence[str] = ("step",),
    generation: int = 1,
) -> list[Noticed | RankTimes]:
    """Show windows in which some of eight ranks take longer."""
    return fed(
        watch,
        ends,
        lambda rank, _: [times(name, 0.1 * slow.get(rank, 1.0)) for name in names],
        generation=generation,
    )


def slowed(
    watch: StragglerWatch, slow: Mapping[int, float], names: Sequence[str] = ("step",)
) -> list[Noticed | RankTimes]:
    """Show 20 windows of health and 39 in which some ranks are slow."""
    return shown(watch, range(1, 21), {}, names) + shown(watch, range(21, 60), slow, names)


def verdicts(found: Iterable[Noticed | RankTimes]) -> list[Verdict]:
    return [one.verdict for one in found if isinstance(one, Noticed)]
