"""The past of one rank in one section, from the first window in which it was slow."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from outlast.stragglers.policy.limits import Chance, Limits


@dataclass(frozen=True)
class Standing:
    """What the latest windows say of a rank.

    Args:
        windows: that were looked at.
        slow: of them.
        ratio: mean over them.
        chance: bound on how often healthy ranks look like this.
    """

    windows: int
    slow: int
    ratio: float
    chance: float


class Track:
    """Whether a rank is a straggler in a section: on after several slow windows, off after several others.

    It is one when chance explains neither the slow windows in a row nor those among the latest ones.
    """

    def __init__(self, limits: Limits) -> None:
        self.on = False
        self.since = 0.0
        self._limits = limits
        self._ratios: deque[float] = deque(maxlen=limits.latest)
        self._slow: deque[bool] = deque(maxlen=limits.latest)
        self._span = 0  # windows that turned it on

    @property
    def slow(self) -> bool:
        """The latest window was slow."""
        return bool(self._slow) and self._slow[-1]

    @property
    def run(self) -> int:
        """The slow windows up to the latest, in a row."""
        length = 0
        for slow in reversed(self._slow):
            if not slow:
                break
            length += 1
        return length

    @property
    def over(self) -> bool:
        """Nothing is left to remember."""
        return not self.on and not any(self._slow)

    def add(self, ratio: float, slow: bool, now: float) -> None:
        """Note a window."""
        if slow and not any(self._slow):
            self.since = now
        self._ratios.append(ratio)
        self._slow.append(slow)

    def stands(self, chance: Chance, tests: int) -> Standing:
        """Return what the windows say; sets ``on``.

        Args:
            chance: that a healthy rank is slow in a window.
            tests: ranks times sections that are looked at in a window.
        """
        if self.on:
            found = self._over(self._span, chance, tests)
            self.on = found.ratio > self._limits.off
            return found
        found = self._over(self.run, chance, tests)
        if not self._convicts(found):
            found = self._over(len(self._slow), chance, tests)
        if self._convicts(found):
            self.on, self._span = True, found.windows
        return found

    def _over(self, windows: int, chance: Chance, tests: int) -> Standing:
        windows = max(1, min(windows, len(self._slow)))
        latest = list(self._slow)[-windows:]
        slow = sum(latest)
        turns = sum(now and not before for before, now in zip([False, *latest], latest, strict=False))
        # Not all in a row: they could be any of the latest ones.
        choices = 1 if slow == windows else math.comb(self._limits.latest, slow)
        ratio = sum(list(self._ratios)[-windows:]) / windows
        return Standing(windows, slow, ratio, chance.of_healthy(slow, turns, tests * choices))

    def _convicts(self, found: Standing) -> bool:
        limits = self._limits
        return (
            self.slow
            and found.slow >= limits.windows
            and found.ratio >= limits.on
            and found.chance <= limits.false_alarms / 2  # two ways to be found
        )
