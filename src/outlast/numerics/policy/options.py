"""The table ``[numerics]``: what a guard looks for in losses and gradients, and what it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum


class Check(str, Enum):
    """What is looked for; of two that call for the same action the one that comes first is reported."""

    NAN_IN_LOSS = "nan_in_loss"
    NAN_IN_GRAD = "nan_in_grad"
    SPIKY_LOSS = "spiky_loss"
    SPIKY_GRAD_NORM = "spiky_grad_norm"
    RANK_OUTLIER = "rank_outlier"


class Action(str, Enum):
    """What is done about a finding; warn, skip and raise are KempnerForge's."""

    WARN = "warn"  # write it into the event log; the optimizer runs
    SKIP = "skip"  # the optimizer does not run, the batch counts as used
    RERUN = "rerun"  # repeat the step
    ROLLBACK = "rollback"  # load an older checkpoint
    RAISE = "raise"


SPIKES = (Check.SPIKY_LOSS, Check.SPIKY_GRAD_NORM, Check.RANK_OUTLIER)
_BUDGETS = ("max_consecutive", "max_rollbacks")
_SPIKE_OPTIONS = ("spike_window", "spike_warmup", "spike_factor", "spike_floor")


@dataclass(frozen=True)
class NumericsOptions:
    """What a guard looks for in losses and gradients, and what it does.

    Args:
        check_for_nan_in_loss: a loss that is not finite (Megatron's name; on there, too).
        check_for_nan_in_grad: gradients that are not finite (Megatron's name; on there, too).
        check_for_spiky_loss: a loss far above the sliding median (Megatron's name; off there, too).
        check_for_spiky_grad_norm: the same of the norm of all gradients.
        check_for_rank_outlier: losses of the ranks that are further apart than they were lately.
        nan_in_loss_action: "warn", "skip", "rerun", "rollback" or "raise".
        nan_in_grad_action: the same.
        spiky_loss_action: the same.
        spiky_grad_norm_action: the same.
        rank_outlier_action: the same.
        max_consecutive: bad steps in a row after which the next action is taken: warn, skip, rollback
            (KempnerForge, 5).
        max_rollbacks: rollbacks without progress in between; then all ranks raise.
        spike_window: steps that the median is taken of.
        spike_warmup: steps before anything is a spike.
        spike_factor: spreads (scaled MAD) above the median that are still no spike.
        spike_floor: the least spread, as a share of the median.
    """

    check_for_nan_in_loss: bool = True
    check_for_nan_in_grad: bool = True
    check_for_spiky_loss: bool = False
    check_for_spiky_grad_norm: bool = False
    check_for_rank_outlier: bool = False
    nan_in_loss_action: str = "skip"
    nan_in_grad_action: str = "skip"
    spiky_loss_action: str = "warn"
    spiky_grad_norm_action: str = "warn"
    rank_outlier_action: str = "warn"
    max_consecutive: int = 5
    max_rollbacks: int = 2
    spike_window: int = 128
    spike_warmup: int = 32
    spike_factor: float = 10.0
    spike_floor: float = 0.02

    def checks(self, check: Check) -> bool:
        """Say whether something is looked for."""
        return bool(getattr(self, f"check_for_{check.value}"))

    def action(self, check: Check) -> Action:
        """Return what is done about a finding at first."""
        return Action(getattr(self, f"{check.value}_action"))

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        expected = ", ".join(action.value for action in Action)
        for check in Check:
            name = f"{check.value}_action"
            if getattr(self, name) not in set(Action):
                found.append(f"{name}: found {getattr(self, name)!r}, expected one of {expected}")
        for name, least in (("max_consecutive", 1), ("max_rollbacks", 0), ("spike_warmup", 3)):
            if getattr(self, name) < least:
                found.append(f"{name}: {getattr(self, name)} is too few; at least {least}")
        if self.spike_window < self.spike_warmup:
            found.append(
                f"spike_window: {self.spike_window} steps are never the {self.spike_warmup} of spike_warmup"
            )
        for name in ("spike_factor", "spike_floor"):
            if not 0 < getattr(self, name) < math.inf:
                found.append(f"{name}: {getattr(self, name)} is not a positive number")
        return (*found, *self._without_effect())

    def _without_effect(self) -> Iterator[str]:
        changed = [spec.name for spec in fields(self) if getattr(self, spec.name) != spec.default]
        for check in Check:
            if f"{check.value}_action" in changed and not self.checks(check):
                yield f"{check.value}_action: has no effect with check_for_{check.value} off"
        if not any(map(self.checks, Check)):
            yield "check_for_...: all are off, so a guard has no effect; leave it out"
        elif not any(map(self.checks, SPIKES)):
            for name in changed:
                if name in _SPIKE_OPTIONS:
                    yield f"{name}: has no effect with every check for spikes and outliers off"
        actions = {getattr(self, f"{check.value}_action") for check in Check if self.checks(check)}
        if actions == {Action.RAISE}:
            for name in changed:
                if name in _BUDGETS:
                    yield f"{name}: has no effect where every check raises at once"
