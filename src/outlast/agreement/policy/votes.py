"""A vote of all ranks after a step: each rank's vote as numbers, and the action that their maximum means.

A vote is a row of numbers of which every rank gets the maximum, so one reduction carries it and all ranks
draw the same conclusion: a flag is up when it is up anywhere, and the least time left is a maximum of
negatives. With a guard, flags are reduced with the numbers of a step instead
(:mod:`outlast.numerics.policy.tally`), and this row follows where a rank was told to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

TIERS = ("global", "local", "memory")
_UNKNOWN = -1.0  # less than any measured time


class Flag(Enum):
    """What a rank may ask of all of them."""

    PREEMPTED = "preempted"  # a notice came: save and leave
    SAVE = "save"
    STOP = "stop"  # save and end the loop
    MISMATCH = "rerun mismatch"  # the step, done again, came to something else


@dataclass(frozen=True)
class Vote:
    """A rank's vote, or what all of them come to.

    Args:
        flags: those that are up.
        left: seconds until the job is expected to end; infinite: nobody asked this rank to end.
        seconds: the longest that a save to a tier took; a tier that is not named was not measured.
        limit: seconds until the rank must have exited; infinite: there is no limit, or nobody asked it to.
        lowest: before a loop, the fewest steps that a rank has completed; infinite: within one.
        highest: before a loop, the most steps that a rank has completed; negative infinity: within one.
    """

    flags: frozenset[Flag] = frozenset()
    left: float = math.inf
    seconds: Mapping[str, float] = field(default_factory=dict)
    limit: float = math.inf
    lowest: float = math.inf
    highest: float = -math.inf

    def numbers(self) -> list[float]:
        """Return the row of which the maximum over ranks is taken."""
        times = (self.seconds.get(tier, _UNKNOWN) for tier in TIERS)
        flags = (float(flag in self.flags) for flag in Flag)
        return [-self.left, -self.limit, -self.lowest, self.highest, *times, *flags]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Vote:
        """Return the vote that a row of numbers means."""
        left, limit, lowest, highest, *rest = numbers
        times, flags = rest[: len(TIERS)], rest[len(TIERS) :]
        return cls(
            frozenset(flag for flag, up in zip(Flag, flags, strict=True) if up > 0),
            -left,
            {tier: taken for tier, taken in zip(TIERS, times, strict=True) if taken >= 0},
            -limit,
            -lowest,
            highest,
        )


class Reading(NamedTuple):
    """What a rank has measured in a step.

    Args:
        loss: the mean of what it validated; None: it validated nothing.
        norm: of its share of the gradients, see :mod:`outlast.numerics.policy.numerics`; None: it has none.
        above: a term that tells how far apart ranks are, see :class:`outlast.numerics.policy.tally.Spacing`;
            0: none.
        below: another one.
    """

    loss: float | None = None
    norm: float | None = None
    above: float = 0.0
    below: float = 0.0


class StepOutcome(Enum):
    """What follows a step; of several wishes, the one that comes last here counts."""

    GO_ON = "go on"
    SAVE = "save"
    STOP = "save and end the loop"
    ROLL_BACK = "load an older checkpoint and go on from there"
    GIVE_BACK = "save, end the loop and exit"


@dataclass(frozen=True)
class StepAction:
    """What all ranks do after the same step.

    Args:
        do: which.
        reason: one sentence; empty where there is nothing to do.
        vote: of all ranks.
        hold: with SAVE: they wait at the step for the generation that follows.
    """

    do: StepOutcome
    reason: str
    vote: Vote
    hold: bool = False


def action_of(vote: Vote) -> StepAction:
    """Return what the maximum of all votes means; equal on every rank, since that is."""
    if Flag.PREEMPTED in vote.flags:
        return StepAction(StepOutcome.GIVE_BACK, "a rank was told that the job ends soon", vote)
    if Flag.STOP in vote.flags:
        return StepAction(StepOutcome.STOP, "a rank asked to stop", vote)
    if Flag.SAVE in vote.flags:
        return StepAction(StepOutcome.SAVE, "a rank asked for it", vote)
    return StepAction(StepOutcome.GO_ON, "", vote)
