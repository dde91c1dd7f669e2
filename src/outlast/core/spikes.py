"""When a number of training is far above what it was lately: a sliding median and the spread round it.

The spread is the median absolute deviation (MAD), which single outliers do not move, unlike a standard
deviation or a largest value (Megatron-LM's spiky loss check keeps the maximum of the first 100 samples for
ever; late in training, when the loss is a fifth of that, nothing is a spike any more).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NORMAL = 1.4826  # MAD to standard deviation of a normal distribution (Rousseeuw and Croux, 1993)
_UNITS = 300  # of a reach; e to the power of twice as many is still a float64 when 10^47 ranks add it up
_LEAST_REACH = 1e-9  # of the centre, where ranks were always alike
_TINY = 1e-300
_ROUNDING = 1e-9  # units, by which sums of equal terms may be off


@dataclass(frozen=True)
class Limit:
    """What counts as a spike.

    Args:
        size: values that are remembered.
        warmup: values without which nothing is a spike.
        factor: spreads above the median that are still none.
        floor: the least spread, as a share of the median.
    """

    size: int
    warmup: int
    factor: float
    floor: float


class Window:
    """The latest values of one number, in their order and sorted.

    Args:
        limit: what counts as a spike.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> list[float]:
        """The values, the oldest first."""
        return list(self._values)

    @property
    def median(self) -> float:
        """Of the values, of which there is one at least."""
        return _middle(self._sorted)

    @property
    def spread(self) -> float:
        """The MAD, scaled to a standard deviation, and not below the floor."""
        median = self.median
        deviation = _middle(sorted(abs(one - median) for one in self._sorted))
        return max(NORMAL * deviation, self._limit.floor * abs(median))

    @property
    def reach(self) -> float:
        """What no usual value is beyond: the limit for spikes, or the largest value if that is more."""
        return max(self.median + self._limit.factor * self.spread, self._sorted[-1])

    def spikes(self, value: float) -> bool:
        """Say whether a value is a spike; where nothing ever moved there is no measure for one."""
        limit = self._limit
        if len(self._values) < limit.warmup:
            return False
        above, median = value - self.median, self.median
        if above <= limit.factor * limit.floor * abs(median):  # spares the MAD in nearly every step
            return False
        return above > limit.factor * self.spread > 0

    def add(self, value: float) -> None:
        """Remember a finite value, and forget the oldest when there are too many."""
        if len(self._values) == self._limit.size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    def replace(self, values: Iterable[float]) -> None:
        """Remember these values instead, the newest of them if there are too many."""
        self._values = deque(map(float, values), maxlen=None)
        while len(self._values) > self._limit.size:
            self._values.popleft()
        self._sorted = sorted(self._values)


class Spacing:
    """How far apart the numbers of many ranks are, from two sums over ranks.

    With terms e^x and e^-x, x being a rank's number less a centre in small units, the logarithms of the means
    of both tell the range, whatever the centre. They tell it from below, by 2 ln(n) units at most: with the
    unit of a 300th of the reach, at 4 ranks 1 % of the reach and at 100,000 ranks 8 %.

    Args:
        centre: near the numbers; equal on every rank.
        window: of how far apart the ranks were lately.
    """

    def __init__(self, centre: float, window: Window) -> None:
        self._centre = centre
        self._unit = max(window.reach, _LEAST_REACH * abs(centre), _TINY) / _UNITS

    def terms(self, value: float) -> tuple[float, float]:
        """Return what a rank adds; infinite beyond two reaches from the centre, where nothing can be told."""
        x = (value - self._centre) / self._unit
        return (math.exp(x), math.exp(-x)) if abs(x) <= 2 * _UNITS else (math.inf, math.inf)

    def apart(self, count: int, above: float, below: float) -> float | None:
        """Return the range of the numbers of so many ranks, None where the sums do not tell it."""
        if count < 2 or not (0 < above < math.inf and 0 < below < math.inf):
            return None
        told = math.log(above / count) + math.log(below / count)
        return told * self._unit if told > _ROUNDING else 0.0


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
