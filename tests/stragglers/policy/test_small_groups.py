"""Waiting in collectives of few ranks: who waits less there than its peers need not be late.

A simulated job: pipeline stages and sequences of unequal length, gradients that are reduced within a stage,
embedding gradients that the first and the last stage share in pairs, and a norm over all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.rows import Kind, Place, Row, State

STEPS, WINDOWS = 2, 34
TRANSFER = {"grads-reduce-scatter": 0.04, "embedding-grads-all-reduce": 0.03, "clip": 0.004, "gather": 0.01}


@dataclass(frozen=True)
class Job:
    """A job of pipeline stages.

    Args:
        stages: work of each stage, in seconds of a step.
        width: pipelines, which are data-parallel.
        spread: standard deviation of the length of a sequence, relative.
        late: seconds that the last stage needs before the embedding gradients; no section has them.
        spared: pipelines of which the last stage does not need them.
        unmeasured: all ranks meet behind the embedding gradients, and no section has that.
        slow: a rank, and the seconds of each step that it loses before it reduces gradients; no section has
            them.
    """

    stages: Sequence[float]
    width: int
    spread: float = 0.02
    late: float = 0.0
    spared: frozenset[int] = frozenset()
    unmeasured: bool = False
    slow: tuple[int, float] | None = None
    seed: int = 0

    @property
    def places(self) -> dict[int, Place]:
        """The places of the ranks."""
        return {
            stage * self.width + at: Place(stage * self.width + at, f"n{at}", stage=stage)
            for stage in range(len(self.stages))
            for at in range(self.width)
        }

    def rows(self, window: int) -> list[Row]:
        """Return the rows of a window."""
        dice = random.Random(f"{self.seed} {window}")
        totals: dict[tuple[int, str], float] = {}
        for _ in range(STEPS):
            for key, seconds in self._step(dice).items():
                totals[key] = totals.get(key, 0.0) + seconds
        found = []
        for (rank, name), total in sorted(totals.items()):
            kind = Kind.COMPUTE if name == "compute" else Kind.COMMUNICATION
            waiting = 0.0 if kind is Kind.COMPUTE else float("nan")
            each = total / STEPS
            found.append(Row(rank, name, kind, window, STEPS, each, each, each, total, waiting))
        return found

    def _step(self, dice: random.Random) -> dict[tuple[int, str], float]:
        width, last = self.width, len(self.stages) - 1
        clock: dict[int, float] = {}
        found: dict[tuple[int, str], float] = {}
        for at in range(width):
            length = max(0.3, dice.gauss(1, self.spread))
            busy = [stage * length * max(0.5, dice.gauss(1, 0.01)) for stage in self.stages]
            for stage, seconds in enumerate(busy):
                rank = stage * width + at
                found[rank, "compute"] = seconds
                name = "backward-recv" if stage < last else "forward-recv"
                found[rank, name] = max(busy) - seconds + 0.02
                clock[rank] = max(busy) + 0.02 + self._lost(rank)

        def meet(name: str, groups: Sequence[Sequence[int]]) -> None:
            for group in groups:
                end = max(clock[rank] for rank in group) + TRANSFER[name]
                for rank in group:
                    found[rank, name] = end - clock[rank] + abs(dice.gauss(0, 1e-4))
                    clock[rank] = end

        within = [range(stage * width, (stage + 1) * width) for stage in range(last + 1)]
        meet("grads-reduce-scatter", within)
        for at in range(width):
            if at not in self.spared:
                clock[last * width + at] += self.late
        meet("embedding-grads-all-reduce", [(at, last * width + at) for at in range(width)])
        if self.unmeasured:
            clock = dict.fromkeys(clock, max(clock.values()))
        meet("clip", [sorted(clock)])
        meet("gather", within)
        return found

    def _lost(self, rank: int) -> float:
        return self.slow[1] if self.slow is not None and self.slow[0] == rank else 0.0


def named(job: Job) -> set[int]:
    """Return the ranks that were ever found slow."""
    decider = Straggling(STEPS)
    return {
        verdict.rank
        for window in range(WINDOWS)
        for verdict in decider.observe(window, job.rows(window), job.places, window * 2.5 * STEPS)
        if verdict.state is State.ON
    }


JOBS = {
    "stages": st.lists(st.floats(0.6, 1.6), min_size=2, max_size=4),
    "width": st.integers(4, 8),
    "spread": st.floats(0.0, 0.1),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(**JOBS, late=st.floats(0.2, 1.5), unmeasured=st.booleans(), data=st.data())
def test_nobody_is_named_where_stages_sequences_and_small_groups_explain_the_waiting(
    stages: list[float],
    width: int,
    spread: float,
    seed: int,
    late: float,
    unmeasured: bool,
    data: st.DataObject,
) -> None:
    spared = data.draw(st.frozensets(st.integers(0, width - 1), max_size=(width - 1) // 2))
    assert named(Job(stages, width, spread, late, spared, unmeasured, seed=seed)) == set()


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(**JOBS, lost=st.floats(0.4, 1.0), data=st.data())
def test_one_rank_that_keeps_the_others_waiting_is_named_and_no_other(
    stages: list[float], width: int, spread: float, seed: int, lost: float, data: st.DataObject
) -> None:
    """It loses more of each step than unequal sequences move, at a place that no section has."""
    rank = data.draw(st.integers(0, width * len(stages) - 1))
    lost *= max(stages)
    job = Job(stages, width, min(spread, 0.05), slow=(rank, lost), seed=seed)
    assert named(job) == {rank}


@pytest.mark.parametrize(
    "job",
    [
        Job((1.0, 1.6), 4, 0.1, 1.7, frozenset({0}), unmeasured=True),
        Job((1.0, 1.6), 32, 0.1, 1.7, frozenset({0}), unmeasured=True),
        Job((0.954, 0.91, 1.504, 1.1), 5, 0.0793, 0.506, frozenset({0, 1}), seed=300),
    ],
    ids=["a pair that meets earlier", "of 32", "half of its peers have less to do"],
)
def test_a_rank_is_not_late_because_others_have_less_to_do(job: Job) -> None:
    assert named(job) == set()
