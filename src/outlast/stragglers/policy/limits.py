"""When a rank counts as slow: the limits, with the reason for each, and what chance alone would do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of the decider; none of them was fitted to a trace.

    Args:
        ratio: to its peers from which a window counts as slow; machines of one model differ by 1 to 2 %.
        seconds: a step that it must cost at least; clocks and schedulers add microseconds to milliseconds.
        share: of the step that it must cost at least; nothing is worth doing below.
        deviations: robust standard deviations between a rank and its peers in a slow window; a usual one is
            exceeded once in 740 windows if times are normally distributed.
        on, off: mean ratio that begins and ends a finding; apart, so that it does not flicker.
        windows: slow ones that a finding needs at least; two could be one disturbance across their border.
        latest: windows that are looked back on, for a rank that is slow in some of them.
        false_alarms: bound on what is expected of healthy ranks in a window of the whole job, so that
            100,000 windows are expected to give at most a tenth of an alarm.
        moves: changes between windows that must be known before small groups are judged; the estimate of
            their spread is then right within a fifth.
    """

    ratio: float = 1.05
    seconds: float = 0.001
    share: float = 0.01
    deviations: float = 3.0
    on: float = 1.10
    off: float = 1.04
    windows: int = 3
    latest: int = 20
    false_alarms: float = 1e-6
    moves: int = 30


class Chance:
    """How often a healthy rank is slow for a window, and stays so, as observed in this job.

    A window in which a rank turns slow counts, one in which it stays slow does not: a true straggler
    counts once. Staying slow is learned from the ranks that recovered. Turning slow begins with 1 in 100
    as if seen in 100 windows, which is more than the limits let pass; staying so with the same.
    """

    _KEPT = 100_000  # windows of ranks; older ones lose weight, so that another workload is learned
    _DOUBT = 10  # recoveries as if seen, so that a single one says little

    def __init__(self) -> None:
        self._turned = 1.0
        self._windows = 100.0
        self._stayed = 0.0
        self._ended = 0.0

    @property
    def turns(self) -> float:
        """The probability that a healthy rank turns slow in a window."""
        return min(self._turned / self._windows, 1.0)

    @property
    def stays(self) -> float:
        """The probability that it is slow in the next window, too."""
        return max(self.turns, self._stayed / (self._stayed + self._ended + self._DOUBT))

    def count(self, turned: int, windows: int) -> None:
        """Count the ranks that turned slow, of those that were not slow before."""
        self._turned += turned
        self._windows += windows
        if self._windows > self._KEPT:
            self._turned /= 2
            self._windows /= 2
            self._stayed /= 2
            self._ended /= 2

    def recovered(self, after: int) -> None:
        """Count a rank that was slow for so many windows and is so no longer."""
        self._stayed += after - 1
        self._ended += 1

    def of_healthy(self, slow: int, turns: int, ways: int) -> float:
        """Return a bound on how often healthy ranks are slow in ``slow`` windows, ``turns`` times anew.

        Args:
            ways: the ranks and sections that are looked at, times the choices of the windows (union bound).
        """
        return min(1.0, ways * self.turns**turns * self.stays ** (slow - turns))
