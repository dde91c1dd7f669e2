"""When a rank counts as slow: the limits, with the reason for each, and what chance alone would do."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_TURNED = 0.5  # windows; no chance is ever zero


@dataclass(frozen=True)
class Limits:
    """The limits of the decider; none of them was fitted to a trace.

    Args:
        ratio: to its peers from which a window counts as slow; machines of one model differ by 1 to 2 %.
        seconds: a step that it must cost at least; clocks and schedulers add microseconds to milliseconds.
        unmeasured: seconds of a step that it must cost where its peers take less than ``seconds``: no ratio
            tells there, and a disturbance of one rank takes some milliseconds.
        share: of the step that it must cost at least; nothing is worth doing below.
        deviations: robust standard deviations between a rank and its peers in a slow window, by level; a
            normally distributed time exceeds them once in 740 and once in 15 windows. The lower level finds
            what noise hides in single windows, in more of them.
        first: chance of such a window that is assumed before anything is known, by level.
        share_of_alarms: the part of ``false_alarms`` that each level may use up.
        most: ranks of a group that reach no more than the lower level in one window: the slowest ones.
        on, off: mean ratio that begins and ends a finding; apart, so that it does not flicker.
        windows: slow ones that a finding needs at least; two could be one disturbance across their border.
        latest: windows that are looked back on, for a rank that is slow in some of them.
        false_alarms: bound on what is expected of healthy ranks in a window of the whole job, so that
            100,000 windows are expected to give at most a tenth of an alarm.
        moves: changes between windows that must be known before small groups are judged; the estimate of
            their spread is then right within a fifth.
        missing: windows without times of a rank in a section after which a finding there is withdrawn; three
            times their usual distance where a section is entered more rarely.
    """

    ratio: float = 1.05
    seconds: float = 0.001
    unmeasured: float = 0.005
    share: float = 0.01
    deviations: tuple[float, ...] = (3.0, 1.5)
    first: tuple[float, ...] = (0.01, 0.1)
    share_of_alarms: tuple[float, ...] = (0.9, 0.1)
    most: int = 8
    on: float = 1.10
    off: float = 1.04
    windows: int = 3
    latest: int = 20
    false_alarms: float = 1e-6
    moves: int = 30
    missing: int = 10


@dataclass
class Seen:
    """Windows in which ranks turned slow, and what became of them.

    Args:
        turned: windows in which one turned slow.
        stayed: later ones in which it still was, of the ranks that recovered.
        ended: recoveries.
    """

    turned: float
    stayed: float = 0.0
    ended: float = 0.0

    def recovered(self, after: int) -> None:
        """Count a rank that was slow for so many windows and is so no longer."""
        self.stayed += after - 1
        self.ended += 1


class Chance:
    """How often a healthy rank is slow for a window, and stays so, as observed in this job.

    A window in which a rank turns slow counts, one in which it stays slow does not: a true straggler
    counts once. Staying slow is learned from the ranks that recovered. Turning slow begins with ``first``
    as if seen in 100 windows, which is more than the limits let pass; staying so with the same.

    Args:
        first: assumed before anything is known.
    """

    _KEPT = 100_000  # windows of ranks; older ones lose weight, so that another workload is learned
    _DOUBT = 10  # recoveries as if seen, so that a single one says little

    def __init__(self, first: float = 0.01) -> None:
        self._windows = 100.0
        self._seen = Seen(turned=first * self._windows)

    def turns(self, own: Seen | None = None) -> float:
        """Return the probability that a healthy rank turns slow in a window.

        Args:
            own: what a rank itself brought in.
        """
        turned = self._seen.turned - (own.turned if own else 0.0)
        return min(max(turned, _LEAST_TURNED) / self._windows, 1.0)

    def stays(self, own: Seen | None = None) -> float:
        """Return the probability that it is slow in the next window, too."""
        stayed = max(self._seen.stayed - (own.stayed if own else 0.0), 0.0)
        ended = max(self._seen.ended - (own.ended if own else 0.0), 0.0)
        return max(self.turns(own), stayed / (stayed + ended + self._DOUBT))

    def count(self, turned: int, windows: int) -> None:
        """Count the ranks that turned slow, of those that were not slow before."""
        self._seen.turned += turned
        self._windows += windows
        if self._windows > self._KEPT:
            self._windows /= 2
            self._seen = Seen(self._seen.turned / 2, self._seen.stayed / 2, self._seen.ended / 2)

    def recovered(self, after: int) -> None:
        """Count a rank that was slow for so many windows and is so no longer."""
        self._seen.recovered(after)

    def of_healthy(self, slow: int, turns: int, ways: int, own: Seen | None = None) -> float:
        """Return a bound on how often healthy ranks are slow in ``slow`` windows, ``turns`` times anew.

        Args:
            ways: the ranks and sections that are looked at, times the choices of the windows (union bound).
            own: what the rank itself brought in; a rank that is slow now and then is no example of health.
        """
        return min(1.0, ways * self.turns(own) ** turns * self.stays(own) ** (slow - turns))
