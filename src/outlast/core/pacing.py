"""Which step is saved next, equal on every rank though no two ranks share a clock.

A cadence in steps needs no agreement. A cadence in seconds is turned into steps: at each
save the ranks agree on rank 0's seconds a step (they meet there anyway), and from that every
rank computes the same next step. Before anything was measured they meet once after
``MEASURE_STEPS`` steps without saving.
"""

from __future__ import annotations

MEASURE_STEPS = 5
FIRST_STEPS = 200  # a rate measured over five steps must not put the first save far away


class NextSave:
    """Knows the step after which the next save is due.

    Args:
        interval: steps between two saves; saves fall on its multiples, as Megatron's do.
        seconds: seconds between the end of one save and the next one.
    """

    def __init__(self, interval: int | None, seconds: float | None) -> None:
        self._interval = interval
        self._seconds = seconds
        self._anchor = (0, 0.0)
        self._timed = 0
        self.measuring = seconds is not None
        self.reason = ""

    def begin(self, step: int, now: float) -> None:
        """Start to count at a step that is on disk, or that nothing is on disk of."""
        self._anchor = (step, now)
        self._timed = step + MEASURE_STEPS

    def due(self, step: int) -> bool:
        """Say whether the ranks meet after this step; ``reason`` says for what."""
        if self._interval is not None and step % self._interval == 0:
            self.reason = f"every {self._interval} steps"
            return True
        if self._seconds is not None and step >= self._timed:
            self.reason = f"every {self._seconds:g} s"
            return True
        return False

    def seconds_per_step(self, step: int, now: float) -> float:
        """Return what this rank has measured since the last meeting."""
        since, at = self._anchor
        return max((now - at) / max(step - since, 1), 1e-6)

    def settle(self, rate: float, step: int, now: float) -> None:
        """Compute the next step from the agreed seconds a step; a meeting ends here."""
        if self._seconds is not None:
            ahead = max(1, round(self._seconds / rate))
            self._timed = step + (min(ahead, FIRST_STEPS) if self.measuring else ahead)
        self._anchor = (step, now)
        self.measuring = False
