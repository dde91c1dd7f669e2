"""Relative differences between two runs of the same step, and their quantiles."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_KEPT = 10_000


def relative_difference(one: float, other: float) -> float:
    """Return the relative difference of two numbers, from 0.0 (equal) to 2.0 (opposite signs).

    It is ``2 |a - b| / (|a| + |b|)``: Megatron-LM's formula (``rerun_state_machine.py``) but for the
    denominator, which there is ``|a + b|`` and zero for a and -a. Two NaN are the same, and so are two equal
    infinities; a finite number is infinitely far from one that is not.
    """
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    scale = max(abs(one), abs(other))
    one, other = one / scale, other / scale
    return 2 * abs(one - other) / (abs(one) + abs(other))


@dataclass(frozen=True)
class Quantiles:
    """Statistics of differences.

    Args:
        count: of differences.
        same: how many of them were zero.
        p50: median of the newest 10000.
        p90: 90th percentile, nearest rank.
        p99: 99th percentile, nearest rank.
        most: the largest of all.
    """

    count: int
    same: int
    p50: float
    p90: float
    p99: float
    most: float

    def __str__(self) -> str:
        shares = f"p50 {self.p50:.3g}, p90 {self.p90:.3g}, p99 {self.p99:.3g}, most {self.most:.3g}"
        return f"{self.same} of {self.count} equal; relative difference {shares}"


class QuickStats:
    """Collects relative differences (Megatron-LM's name)."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=_KEPT)
        self._count = self._same = 0
        self._most = 0.0

    def record(self, difference: float) -> None:
        """Add one difference."""
        self._kept.append(difference)
        self._count += 1
        self._same += difference == 0
        self._most = max(self._most, difference)

    def quantiles(self) -> Quantiles | None:
        """Return the statistics; None without any difference."""
        if not self._kept:
            return None
        ordered = sorted(self._kept)
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return Quantiles(self._count, self._same, p50, p90, p99, self._most)
