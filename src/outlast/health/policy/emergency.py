"""When to save before a failure, and when to give up a node before it dies.

A save costs C seconds of training; a failure within the horizon loses the L seconds of work since the newest
copy that survives it. So a save is worth it where ``p * L > C``, that is ``p > C / L``: with 5 s and half an
hour, from 0.3 % on. A node is drained by a hard rule, or where a failure is likelier than not, since a
replacement costs a restart.

Of the tiers that survive the failure the cheapest is taken. A copy in the memory of the node survives the
loss of a rank or a device, but not of the node.

The filter of Megatron_GpuFailureRecoveryMechanism, :func:`should_emergency_save`, is an option besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from outlast.health.policy.monitor import Risk

THRESHOLD_FRAC = 0.25  # Megatron_GpuFailureRecoveryMechanism, CHECKPOINT_GAP_THRESHOLD
DRAIN_AT = 0.5
_SAVES, _SAVE_EVERY = 3.0, 1200.0  # at once, and seconds for one more: a false sign must not save all day
_PATIENCE = 600.0  # seconds for what was ordered; then it is ordered again


def should_emergency_save(
    iteration: int, last_checkpoint_iter: int, save_interval: int, threshold_frac: float = THRESHOLD_FRAC
) -> bool:
    """Return whether the last checkpoint is at least ``int(threshold_frac * save_interval)`` steps old."""
    return iteration - last_checkpoint_iter >= int(threshold_frac * save_interval)


def worth_it(probability: float, cost: float, loss: float) -> bool:
    """Return whether a save of so many seconds is worth it against a loss of so many."""
    return probability * loss > cost


@dataclass(frozen=True)
class Tier:
    """A place for a copy.

    Args:
        name: of the tier.
        cost: seconds for which training stands still.
        survives: the loss of the node.
        age: seconds of work since the newest copy there.
    """

    name: str
    cost: float
    survives: bool
    age: float


@dataclass(frozen=True)
class Work:
    """How far the job is.

    Args:
        generation: that runs.
        step: completed steps.
        saved: steps of the newest copy; -1: there is none.
        tiers: from the cheapest to the dearest.
    """

    generation: int
    step: int
    saved: int
    tiers: Sequence[Tier]


class Do(Enum):
    """What is done."""

    SAVE = "save"
    DRAIN = "drain"


@dataclass(frozen=True)
class Decision:
    """An order with its reason; ``tier``: for a save."""

    do: Do
    reason: str
    tier: str = ""


@dataclass(frozen=True)
class Filter:
    """The seed's filter: no save before a share of the interval is over."""

    save_interval: int
    threshold_frac: float = THRESHOLD_FRAC


class Emergency:
    """Decides for one node; one save at a time. A drain is ordered with the save, and carried out after it.

    Args:
        drain_at: probability from which on a node is drained; a hard rule does so in any case.
        filter_: the seed's; None: cost alone decides.
    """

    def __init__(self, drain_at: float = DRAIN_AT, filter_: Filter | None = None) -> None:
        self._drain_at = drain_at
        self._filter = filter_
        self._tokens, self._tokens_at = _SAVES, 0.0
        self._asked: tuple[int, int, float] | None = None  # generation, step, when
        self._drained = (-1, 0.0)  # generation and time of the last order to give the node up

    def decide(self, risk: Risk, work: Work, now: float) -> list[Decision]:
        """Return what to do about the risk of the node; called whenever it changes, and every few seconds.

        Args:
            risk: of the node.
            work: how far the job is.
            now: wall time, in seconds.
        """
        self._refill(now)
        if work.step < 0:
            return []
        doomed = self.doomed(risk)
        found = []
        tier = None if self._is_saving(work, now) else self._tier(risk, work, doomed)
        if tier is not None and self._tokens >= 1:
            self._tokens -= 1
            self._asked = (work.generation, work.step, now)
            words = f"{risk.probability:.2%} > {tier.cost:.2g} s / {tier.age:.0f} s of work"
            found.append(Decision(Do.SAVE, f"{words}; {_why(risk)}", tier.name))
        if doomed and not (self._drained[0] == work.generation and 0 <= now - self._drained[1] < _PATIENCE):
            self._drained = (work.generation, now)
            found.append(Decision(Do.DRAIN, _why(risk)))
        return found

    def doomed(self, risk: Risk) -> bool:
        """Return whether the node is to be drained."""
        return risk.hard or risk.probability >= self._drain_at

    def _refill(self, now: float) -> None:
        gained = max(0.0, now - self._tokens_at) / _SAVE_EVERY
        self._tokens, self._tokens_at = min(_SAVES, self._tokens + gained), now

    def _is_saving(self, work: Work, now: float) -> bool:
        """Say whether a save that was asked for is still to come."""
        asked = self._asked
        if asked is None or asked[0] != work.generation:
            return False
        return work.saved < asked[1] and 0 <= now - asked[2] < _PATIENCE

    def _tier(self, risk: Risk, work: Work, doomed: bool) -> Tier | None:
        """Return the cheapest tier that survives and is worth its cost; None: there is none."""
        if self._filter is not None and not should_emergency_save(
            work.step, max(0, work.saved), self._filter.save_interval, self._filter.threshold_frac
        ):
            return None
        if work.saved >= work.step:
            return None
        needed = [one for one in work.tiers if one.survives or not doomed]
        good = [one for one in needed if worth_it(risk.probability, one.cost, one.age)]
        return min(good, key=lambda one: one.cost, default=None)


def _why(risk: Risk) -> str:
    return "; ".join(risk.reasons[:3]) or "no reason is known"
