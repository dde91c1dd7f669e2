"""When a state is saved: the interval of saves in memory, the step of the next save on disk, and which saves
are put off.

Saves in memory: the interval is J. W. Young's (1974), the square root of twice the cost over the rate of
faults. The loss is flat around it: twice or half of it costs a quarter more. The rate is estimated with a
Gamma prior. Each fault takes away part of the weight of all that was before it, so that the estimate follows
a change. It is not known when earlier restarts of the job came, so only the time that this process has run
counts as time without faults.

Saves on disk: a cadence in steps needs no agreement. For one in seconds, where the agent takes part, rank 0
asks for a save when its clock says so. Elsewhere it is turned into steps: at each save the ranks agree on
rank 0's seconds for each step, and every rank computes the same next step from that. Before anything was
measured they meet once after ``MEASURE_STEPS`` steps without saving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_STEPS = 10  # before anything was measured
NO_COST = 1e-3  # a save for which nobody waits still takes from the machine
FORGET = 0.65  # weight left after a fault; five faults at twelve times the rate are then followed
PRIOR_FAULTS = 0.5
PRIOR_MTBF = 21_600.0  # between Llama 3's 2.8 h at 16,384 GPUs and Meta's 7.9 h at 1,024
NORMAL_90 = 1.2815515655446004  # 90th percentile of the normal distribution


def fault_rate(restarts: int, seconds: float) -> float:
    """Return a rate of faults that is above the true one with a chance of 90 %.

    The percentile of the Gamma distribution by E. B. Wilson and M. M. Hilferty (1931): at most 2.5 % low
    with half a fault, 1 % with one.

    Args:
        restarts: of this job so far.
        seconds: since the last one.
    """
    faults, past = PRIOR_FAULTS, PRIOR_FAULTS * PRIOR_MTBF
    for _ in range(restarts):
        faults, past = FORGET * faults + 1, FORGET * past
    part = 1 / (9 * faults)
    return faults / (past + max(0.0, seconds)) * (1 - part + NORMAL_90 * math.sqrt(part)) ** 3


def best_steps(cost: float, step: float, rate: float) -> int:
    """Return the steps between two saves.

    Args:
        cost: seconds that training stands still for a save.
        step: seconds of a step.
        rate: faults a second.
    """
    return max(1, round(math.sqrt(2 * max(cost, NO_COST) / rate) / max(step, 1e-6)))


MEASURE_STEPS = 5
MOST_AHEAD = 200  # a rate measured over five steps must not put the first save far away


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
        self._by_clock = False
        self.measuring = seconds is not None

    def follow_clock(self) -> None:
        """Leave it to one rank's clock when a save is due by time: that rank then asks all for one."""
        self._by_clock, self.measuring = True, False

    def overdue(self, now: float) -> bool:
        """Return whether a save is due by this rank's clock, which counts."""
        return self._by_clock and self._seconds is not None and now - self._anchor[1] >= self._seconds

    @property
    def every_so_often(self) -> str:
        """The reason of a save that is due by time."""
        return f"every {self._seconds:g} s"

    def begin(self, step: int, now: float) -> None:
        """Start to count at a step that is on disk, or that nothing is on disk of."""
        self._anchor = (step, now)
        self._timed = step + MEASURE_STEPS

    def due(self, step: int) -> str:
        """Return why the ranks meet after this step; empty: they do not."""
        if self._interval is not None and step % self._interval == 0:
            return f"every {self._interval} steps"
        timed = self._seconds is not None and not self._by_clock and step >= self._timed
        return self.every_so_often if timed else ""

    def seconds_per_step(self, step: int, now: float) -> float:
        """Return what this rank has measured since the last meeting."""
        since, at = self._anchor
        return max((now - at) / max(step - since, 1), 1e-6)

    def settle(self, rate: float, step: int, now: float) -> None:
        """Compute the next step from the agreed seconds a step; a meeting ends here."""
        if self._seconds is not None and not self._by_clock:
            ahead = max(1, round(self._seconds / rate))
            self._timed = step + (min(ahead, MOST_AHEAD) if self.measuring else ahead)
        self._anchor = (step, now)
        self.measuring = False


PATIENCE = 60.0  # seconds for which a save is put off at most


@dataclass(frozen=True)
class Due:
    """A save that is due, and not made yet.

    Args:
        durable: it goes to disk, too.
        reason: one sentence for the event log.
        step: after which it was due.
        at: when it was due, by the clock of this rank.
    """

    durable: bool
    reason: str
    step: int
    at: float

    def since(self, step: int, now: float) -> str:
        """Return the reason of the save once it is made."""
        if step == self.step:
            return self.reason
        return f"{self.reason}; put off by {now - self.at:.1f} s from step {self.step}, for want of a buffer"


class PutOff:
    """Puts off saves until all ranks have a buffer with its pages; after the same step on all of them.

    The ranks compare whether they are ready; the first one chooses the step after which they do so again,
    twice as long after the save was due. Once as many saves were made as there are buffers, each save finds
    one that was used before, and nothing is compared any more.

    Args:
        buffers: of a rank, as set: nodes with too little memory have fewer.
        interval: steps between two saves on disk; None: they come by time.
        seconds: between two saves on disk; None: they come by steps.
    """

    def __init__(self, buffers: int, interval: int | None, seconds: float | None) -> None:
        self._left = buffers
        self._steps = math.inf if interval is None else interval
        self._patience = PATIENCE if seconds is None else min(PATIENCE, seconds)
        self._compares = 0
        self.due: Due | None = None

    def is_due(self, durable: bool, reason: str, step: int, now: float) -> None:
        """Note a save that is due; one on disk replaces one in memory."""
        due = self.due
        if due is None:
            self.due, self._compares = Due(durable, reason, step, now), step
        elif durable and not due.durable:
            self.due = Due(True, reason, due.step, due.at)

    def compares(self, step: int) -> bool:
        """Return whether the ranks compare whether they are ready after this step."""
        return self._left > 0 and step >= self._compares

    def answer(self, ready: bool, step: int, now: float) -> str:
        """Return whether this rank is ready, and in how many steps to compare again; 0: not again, save."""
        due = self.due
        assert due is not None, "something is due where ranks compare"
        passed, steps = now - due.at, step - due.step
        if passed >= self._patience or steps >= self._steps:
            return f"{int(ready)} 0"
        again = min(passed, self._patience - passed) * steps / max(passed, 1e-6)
        return f"{int(ready)} {max(1, round(min(again, self._steps - steps)))}"

    def compared(self, answers: list[str], step: int) -> None:
        """Note the answers of all ranks."""
        again = int(answers[0].partition(" ")[2])
        self._compares = step if all(one[0] == "1" for one in answers) else step + again

    def put_off(self, step: int) -> bool:
        """Return whether nothing is saved after this step, though it is due."""
        return self._left > 0 and step < self._compares

    def saved(self) -> None:
        """Note a save of all ranks."""
        self._left, self.due = max(0, self._left - 1), None

    def begin(self) -> None:
        """Go on from an older step: nothing is due."""
        self.due = None
