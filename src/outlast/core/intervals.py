"""The best time between two checkpoints, from their cost and from how often faults come.

Seconds throughout. An interval is the work between two checkpoints and does not contain their cost. The loss
is flat around the best interval: twice or half of it costs a quarter more.

Formulae: J. W. Young (1974); J. T. Daly, "A higher order estimate of the optimum checkpoint interval" (2006);
A. Benoit et al., "Towards optimal multi-level checkpointing" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEWTON_STEPS = 64
FORGET = 0.65  # weight left after a fault; five faults at twelve times the rate are then followed
PRIOR_FAULTS = 0.5
PRIOR_MTBF = 21_600.0  # seconds; between Llama 3's 2.8 h at 16,384 GPUs and Meta's 7.9 h at 1,024
NORMAL_90 = 1.2815515655446004  # 90th percentile of the normal distribution


def young(cost: float, mtbf: float) -> float:
    """Return Young's interval, right where the cost is small against the mean time between faults."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Return Daly's interval of higher order."""
    if cost >= 2 * mtbf:
        return mtbf
    part = math.sqrt(cost / (2 * mtbf))
    return math.sqrt(2 * cost * mtbf) * (1 + part / 3 + part * part / 9) - cost


def exact(cost: float, mtbf: float) -> float:
    """Return the interval that is best in Daly's complete model, M (1 + W0(-exp(-C/M - 1))).

    Lambert's W0 is flat at its branch point, where C/M is small, so it is solved for y = ln(-W0):
    y - (e^y - 1) + C/M = 0. The left side rises and is concave for y < 0, and negative at the start, so
    Newton's steps come up from below and never pass the root.
    """
    if math.isinf(mtbf):
        return mtbf
    ratio = cost / mtbf
    y = -(ratio + math.sqrt(2 * ratio))
    for _ in range(NEWTON_STEPS):
        slope = -math.expm1(y)
        step = -(y + slope + ratio) / slope if slope > 0 else 0.0
        if y + step <= y:
            break
        y += step
    return -mtbf * math.expm1(y)


def ettr(interval: float, cost: float, mtbf: float, restart: float) -> float:
    """Return the share of wall time that becomes kept work, in Daly's complete model.

    Args:
        interval: seconds of work between two checkpoints.
        cost: seconds that training stands still for one.
        mtbf: mean time between faults, which come at any time, also while saving or restarting.
        restart: seconds from a fault until work goes on.
    """
    periods = (interval + cost) / mtbf
    if restart / mtbf + periods > 700:  # e ** 700 is about the largest float
        return 0.0
    return interval / mtbf / (math.exp(restart / mtbf) * math.expm1(periods))


def waste(interval: float, cost: float, mtbf: float, behind: float) -> float:
    """Return the seconds lost for each second of work, to first order, when saving goes on beside training.

    Args:
        interval: seconds of work between two checkpoints.
        cost: seconds that training stands still for one.
        mtbf: mean time between faults.
        behind: seconds lost at a fault besides half an interval: until the copy was durable, until the
            fault was noticed, until work goes on.
    """
    return cost / interval + (interval / 2 + behind) / mtbf


@dataclass(frozen=True)
class Level:
    """A tier as the plan sees it.

    Args:
        name: of the tier.
        cost: seconds that training stands still for a copy.
        rate: faults a second that this level survives and the one before it does not.
        restart: seconds of a recovery from it.
    """

    name: str
    cost: float
    rate: float
    restart: float


@dataclass(frozen=True)
class Plan:
    """Intervals for the levels that pay; the others are not among them.

    Args:
        best: name and seconds, of each level for itself.
        intervals: the same, each a whole multiple of the one before.
        overhead: seconds lost for each second of work with ``best``, recoveries left out.
        recovery: seconds of recoveries for each second of work.
    """

    best: tuple[tuple[str, float], ...]
    intervals: tuple[tuple[str, float], ...]
    overhead: float
    recovery: float

    @property
    def ettr(self) -> float:
        """Share of wall time that becomes kept work."""
        return 1 / (1 + self.overhead + self.recovery)


@dataclass(frozen=True)
class _Use:
    """A level with all the faults that it serves."""

    level: Level
    rate: float

    @property
    def best(self) -> float:
        return math.sqrt(2 * self.level.cost / self.rate)

    @property
    def overhead(self) -> float:
        return math.sqrt(2 * self.level.cost * self.rate)

    @property
    def recovery(self) -> float:
        return self.rate * self.level.restart


def multi_level(levels: Sequence[Level]) -> Plan:
    """Choose which levels are used and how often.

    A level that is left out gives its faults to the next one that is used. The best choice among the first
    levels that ends with a given one does not depend on what comes after it, so all subsets are compared
    in quadratic time.

    Args:
        levels: from the one that survives the fewest faults to the one that survives the most.
    """
    last = max((i for i, one in enumerate(levels) if one.rate > 0), default=-1)
    choices: list[tuple[float, int, tuple[_Use, ...]]] = [(0.0, 0, ())]
    for end, level in enumerate(levels):
        found = []
        for begin in range(end + 1):
            lost, count, uses = choices[begin]
            use = _Use(level, sum(one.rate for one in levels[begin : end + 1]))
            found.append((lost + use.overhead + use.recovery, count + 1, (*uses, use)))
        choices.append(min(found, key=lambda one: one[:2]))
    uses = min(choices[last + 1 :], key=lambda one: one[:2])[2]
    names = [use.level.name for use in uses]
    return Plan(
        tuple(zip(names, [use.best for use in uses], strict=True)),
        tuple(zip(names, _nested(uses), strict=True)),
        sum(use.overhead for use in uses),
        sum(use.recovery for use in uses),
    )


def _nested(uses: Sequence[_Use]) -> list[float]:
    """Return intervals of whole ratios, the first of them the best for these ratios."""
    multiples: list[int] = []
    for use in uses:
        before = multiples[-1] if multiples else 1
        multiples.append(before * max(1, round(use.best / (before * uses[0].best))))
    cost = sum(use.level.cost / each for use, each in zip(uses, multiples, strict=True))
    rate = sum(use.rate * each for use, each in zip(uses, multiples, strict=True))
    return [math.sqrt(2 * cost / rate) * each for each in multiples]


class RateEstimator:
    """How often faults of one level come, in the time that the job ran.

    A Gamma prior, ``faults`` in ``seconds``, grows with what is seen. Each fault takes away part of the
    weight of all that was before it, so that the estimate follows a change, and is never surer than some
    three faults make it.

    Args:
        prior_mtbf: expected seconds between two faults.
    """

    def __init__(self, prior_mtbf: float = PRIOR_MTBF) -> None:
        self._faults = PRIOR_FAULTS
        self._seconds = PRIOR_FAULTS * prior_mtbf
        self._quiet = 0.0

    def ran(self, seconds: float) -> None:
        """Take note of a time in which the job ran."""
        self._quiet += seconds

    def fault(self) -> None:
        """Take note of a fault, which ends a time without any."""
        self._faults = FORGET * self._faults + 1
        self._seconds = FORGET * self._seconds + self._quiet
        self._quiet = 0.0

    def mean(self) -> float:
        """Return the expected faults a second."""
        return self._faults / (self._seconds + self._quiet)

    def upper(self) -> float:
        """Return a rate above the true one with a chance of 90 %.

        The percentile of the Gamma distribution by E. B. Wilson and M. M. Hilferty (1931): at most 2.5 % low
        with half a fault, 1 % with one.
        """
        part = 1 / (9 * self._faults)
        return self.mean() * (1 - part + NORMAL_90 * math.sqrt(part)) ** 3

    def state(self) -> dict[str, float]:
        """Return what must outlive the process."""
        return {"faults": self._faults, "seconds": self._seconds, "quiet": self._quiet}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned; nothing is taken over when it raises.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours.
        """
        faults, seconds = positive_in(state["faults"]), positive_in(state["seconds"])
        self._quiet = seconds_in(state["quiet"])
        self._faults, self._seconds = faults, seconds


def seconds_in(value: object) -> float:
    """Return seconds out of a file.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def positive_in(value: object) -> float:
    """Return a number out of a file as :func:`seconds_in` does, but not zero."""
    if (found := seconds_in(value)) > 0:
        return found
    raise ValueError(f"{value!r} is not positive")
