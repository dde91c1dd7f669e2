"""Scores of ranks as NVIDIA's resiliency extension (NVRx 0.6) defines them.

A score is the reference time over the rank's own: 1 is as fast as the reference, 0.5 takes twice as long.
The *relative* reference is the fastest rank, the *individual* one the fastest window of the rank so far.
Times are medians of a window, in any unit. These are NVRx's formulae with what is known to be wrong with them
(docs/explanation/stragglers.md); ``Straggling`` of ``detector`` decides by others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

THRESHOLD = 0.75  # below it a rank is a straggler; strictly
ESTIMATED_STEPS = 16  # times of steps from which the interval between reports is computed


@dataclass(frozen=True)
class Kernel:
    """The times of one kernel on one rank in a window.

    Args:
        weight: the time in all its calls.
    """

    median: float
    weight: float


def relative_references(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the smallest time of each name over all ranks; nan if a rank has none.

    Args:
        times: of each rank, by name of a section or kernel.
    """
    known = [name for name in times[0] if all(name in one for one in times)]
    least = {name: min(one[name] for one in times) for name in known}
    return {name: least.get(name, math.nan) for one in times for name in one}


def section_scores(times: Mapping[str, float], references: Mapping[str, float]) -> dict[str, float]:
    """Return the score of each section of a rank; nan without a reference, or if it took no time."""
    return {name: references[name] / own if own else math.nan for name, own in times.items()}


def gpu_score(kernels: Mapping[str, Kernel], references: Mapping[str, float]) -> float:
    """Return the mean score of a rank's kernels, weighted by the time in each; nan without any.

    A kernel that not all ranks ran has no reference and does not count.
    """
    compared = [(references[name] / one.median, one.weight) for name, one in kernels.items() if one.median]
    compared = [(score, weight) for score, weight in compared if not math.isnan(score)]
    whole = math.fsum(weight for _, weight in compared)
    return math.fsum(score * weight for score, weight in compared) / whole if whole else math.nan


class BestTimes:
    """The smallest time of each name on this rank so far, the present window included; it never grows."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}

    def references(self, times: Mapping[str, float]) -> Mapping[str, float]:
        """Return the references after a window."""
        for name, own in times.items():
            self._best[name] = min(own, self._best.get(name, math.inf))
        return self._best


def below(scores: Mapping[int, float], threshold: float) -> list[int]:
    """Return the ranks whose score is below; nan never is."""
    return [rank for rank, score in scores.items() if score < threshold]


def steps_between_reports(step_times: Sequence[float], interval: float) -> float:
    """Return how many steps of this rank fill the interval; the job takes the largest over its ranks.

    Args:
        step_times: of the first 16 steps, in seconds.
        interval: in seconds.
    """
    usual = median_low(step_times)
    return interval / usual if usual else math.inf


@dataclass(frozen=True)
class Tail:
    """The least, the median and the largest of the scores of all ranks; nan without scores."""

    least: float
    median: float
    largest: float


def tail(scores: Mapping[int, float]) -> Tail:
    """Return what goes to the trackers."""
    values = list(scores.values())
    if not values or any(math.isnan(one) for one in values):
        return Tail(math.nan, math.nan, math.nan)
    return Tail(min(values), median_low(values), max(values))


def report_lines(scores: Mapping[int, float], nodes: Mapping[int, str], shown: int) -> str:
    """Return the text of NVRx's report of one kind of scores.

    Args:
        nodes: by rank.
        shown: how many of the best and of the worst; all if there are not more than twice as many.
    """
    order = sorted(
        ((score, rank) for rank, score in scores.items()),
        key=lambda one: (-math.inf if math.isnan(one[0]) else one[0], one[1]),
        reverse=True,
    )

    def lines(some: Sequence[tuple[float, int]]) -> str:
        return "".join(f"  Rank={rank} Node={nodes[rank]} Score={score:.2f}\n" for score, rank in some)

    if len(order) <= 2 * shown:
        return lines(order[::-1])
    of = f"{shown}/{len(order)} ranks"
    worst, best = lines(order[-shown:][::-1]), lines(order[:shown])
    return f" Worst performing {of}:\n{worst} Best performing {of}:\n{best}"
