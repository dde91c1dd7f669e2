"""Whether a slow rank is slow at a product that every rank computes, too: a sign that its node is sick.

Steps may be slow because of what a rank was given to do. The product is the same on every rank, so a rank
that takes longer for it than ranks of other nodes with the same device runs on a slower machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from outlast.stragglers.policy.limits import Limits
from outlast.stragglers.policy.rows import BENCHMARK, Place, Row, Verdict

MOST_ASKED = 3  # times in a generation: it takes up to 2 s, in which no rank trains
ASK_EVERY = 60.0  # seconds
_EXPLAINED = 0.5  # of a rank's excess in its steps, that it has to have in the product as well


class Benchmarks:
    """What the ranks of a generation took for the product."""

    def __init__(self) -> None:
        self._asked = 0
        self._asked_at = -math.inf
        self._ratios: dict[int, tuple[float, int]] = {}  # of a rank to ranks of other nodes, and how many

    def ask(self, now: float) -> bool:
        """Return whether the ranks are to compute the product now, and count it.

        Args:
            now: in seconds of a monotonic clock.
        """
        due = self._asked < MOST_ASKED and now - self._asked_at >= ASK_EVERY
        if due:
            self._asked, self._asked_at = self._asked + 1, now
        return due

    def take(self, rows: Iterable[Row], places: Mapping[int, Place]) -> None:
        """Take what ranks took, and compare each with those of other nodes that have the same device.

        Args:
            rows: of a window.
            places: of the ranks.
        """
        taken = {
            row.rank: row.median
            for row in rows
            if row.section == BENCHMARK and row.rank in places and 0 < row.median < math.inf
        }
        for rank, seconds in taken.items():
            mine = places[rank]
            elsewhere = [
                other
                for one, other in taken.items()
                if places[one].node != mine.node and places[one].device == mine.device
            ]
            if elsewhere:
                self._ratios[rank] = seconds / median(elsewhere), len(elsewhere)

    def sign(self, found: Verdict) -> str:
        """Return, in a few words, that the product says the same as a verdict; "": not, or it is not known.

        It does where the rank's excess in it is at least half of that in its steps, and would be enough for
        a finding.
        """
        known = self._ratios.get(found.rank)
        if known is None:
            return ""
        ratio, number = known
        if ratio < max(Limits().on, 1.0 + _EXPLAINED * (found.slowdown - 1.0)):
            return ""
        ranks = f"{number} rank{'s' if number > 1 else ''} of other nodes"
        return f"it takes {ratio:.2f} times as long as {ranks} for the same product"
