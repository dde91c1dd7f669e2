"""The past of one rank in one section, from the first window in which it was slow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outlast.stragglers.policy.limits import Chance, Limits, Seen


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

    It is one when chance explains neither the slow windows in a row nor those among the latest ones, at one
    of the levels of :attr:`.limits.Limits.deviations`. A window of a level is also one of the lower levels.

    Args:
        limits: when it is on.
        since: it is on from the outset, found by an earlier leader at this time; None: it is not.
    """

    def __init__(self, limits: Limits, since: float | None = None) -> None:
        self.since = 0.0 if since is None else since
        self.seen = 0  # window of the detector in which the latest times came
        self._limits = limits
        self._ratios: deque[float] = deque(maxlen=limits.latest)
        self._reached: deque[int] = deque(maxlen=limits.latest)  # how many of the levels
        # windows and level that turned it on
        self._found: tuple[int, int] | None = None if since is None else (limits.windows, 0)

    @property
    def on(self) -> bool:
        """The rank is a straggler."""
        return self._found is not None

    def slow(self, level: int = 0) -> bool:
        """Say whether the latest window was slow: level 0 is the strictest."""
        return bool(self._reached) and self._is(level)(self._reached[-1])

    def run(self, level: int) -> int:
        """Return the slow windows up to the latest, in a row."""
        return next(
            (at for at, one in enumerate(reversed(self._reached)) if not self._is(level)(one)),
            len(self._reached),
        )

    @property
    def over(self) -> bool:
        """Nothing is left to remember."""
        return not self.on and not any(self._reached)

    def add(self, ratio: float, reached: int, now: float) -> None:
        """Note a window.

        Args:
            ratio: to the peers.
            reached: how many of the levels.
            now: in seconds.
        """
        if reached and not any(self._reached):
            self.since = now
        self._ratios.append(ratio)
        self._reached.append(reached)

    def stands(self, chances: Sequence[Chance], tests: int) -> Standing:
        """Return what the windows say; sets ``on``.

        Args:
            chances: that a healthy rank is slow in a window, by level.
            tests: ranks times sections that are looked at in a window.
        """
        if self._found is not None:
            found = self._over(*self._found, chances, tests)
            if found.ratio <= self._limits.off:
                self._found = None
            return found
        judged: list[Standing] = []
        for level, share in enumerate(self._limits.share_of_alarms):
            bound = self._limits.false_alarms * share / 2  # two ways to be found
            for windows in (self.run(level), len(self._reached)):
                judged.append(self._over(windows, level, chances, tests))
                if self._convicts(judged[-1], level, bound):
                    self._found = judged[-1].windows, level
                    return judged[-1]
        return judged[0]

    def _is(self, level: int) -> Callable[[int], bool]:
        least = len(self._limits.deviations) - level
        return lambda reached: reached >= least

    def _over(self, windows: int, level: int, chances: Sequence[Chance], tests: int) -> Standing:
        windows = max(1, min(windows, len(self._reached)))
        every = [self._is(level)(one) for one in self._reached]
        latest = every[-windows:]
        slow, turns = sum(latest), _turns(latest)
        # Not all in a row: they could be any of the latest ones.
        choices = 1 if slow == windows else math.comb(self._limits.latest, slow)
        ratio = sum(list(self._ratios)[-windows:]) / windows
        own = _own(every) if level else None
        chance = chances[level].of_healthy(slow, turns, tests * choices, own)
        return Standing(windows, slow, ratio, chance)

    def _convicts(self, found: Standing, level: int, bound: float) -> bool:
        limits = self._limits
        return (
            self.slow(level)
            and found.slow >= limits.windows
            and found.ratio >= limits.on
            and found.chance <= bound
        )


def _turns(slow: Sequence[bool]) -> int:
    return sum(now and not before for before, now in zip([False, *slow], slow, strict=False))


def _own(slow: Sequence[bool]) -> Seen:
    """Return what a rank brought into the chances with its latest windows."""
    own, run = Seen(turned=_turns(slow)), 0
    for one in slow:
        if run and not one:
            own.recovered(run)
        run = run + 1 if one else 0
    return own
