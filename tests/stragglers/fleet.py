"""A simulated job: windows of its ranks, with noise and with ranks that are slow on purpose."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.rows import Kind, Place, Row, State, Verdict

STEPS = 5
WHOLE = {"data": 0.02, "forward": 0.30, "backward": 0.50, "reduce": 0.05}  # seconds of a step, healthy
KINDS = {"data": Kind.DATA, "reduce": Kind.COMMUNICATION}
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
        self, windows: int, decider: Straggling | None = None, first: int = 0
    ) -> list[tuple[int, Verdict]]:
        """Return what a decider says, with the number of the window."""
        decider = decider or Straggling(STEPS)
        return [
            (number, verdict)
            for number in range(first, first + windows)
            for verdict in decider.observe(number, self.window(number), self.places, number * 5.0)
        ]


def named(told: Sequence[tuple[int, Verdict]]) -> set[tuple[int, str]]:
    """Return the ranks and sections that were ever found slow."""
    return {(verdict.rank, verdict.section) for _, verdict in told if verdict.state is State.ON}
