"""KempnerForge's detector of losses and gradients that are not finite, for scripts that call it already.

:class:`outlast.Guard` does the same with one reduction a step, before the optimizer runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outlast.checkpoint.policy.manifest import some
from outlast.errors import NonFinite
from outlast.numerics.worker.numerics import bad_gradients

_LOG = logging.getLogger("outlast")
_ACTIONS = ("warn", "skip", "raise")
_PATIENCE = timedelta(seconds=1800)  # torch's own for gloo


@dataclass
class NaNState:
    """The counts of a detector.

    Args:
        consecutive_nans: bad losses in a row.
        total_nans: bad losses in all.
        last_good_loss: of this rank.
        last_good_step: when that was.
        nan_steps: the newest bad steps.
    """

    consecutive_nans: int = 0
    total_nans: int = 0
    last_good_loss: float = math.inf
    last_good_step: int = 0
    nan_steps: list[int] = field(default_factory=list)


class NonFiniteStep(NonFinite, RuntimeError):
    """NonFinite that is also a RuntimeError, which KempnerForge raises."""


class NaNDetector:
    """Counts bad steps, equally on all ranks; every rank creates one and makes the same calls.

    Args:
        action: "warn"; "skip": the script leaves the optimizer out when a check returns False; "raise": on
            every rank.
        max_consecutive: bad losses in a row after which ``should_rollback`` is true.
        max_history: newest bad steps that are kept.

    Raises:
        ValueError: the action is none of these, or a number is below 1.
    """

    def __init__(self, action: str = "warn", max_consecutive: int = 5, max_history: int = 100) -> None:
        if action not in _ACTIONS:
            raise ValueError(f"Invalid NaN action: {action!r} (expected {'/'.join(_ACTIONS)})")
        for name, value in (("max_consecutive", max_consecutive), ("max_history", max_history)):
            if value < 1:
                raise ValueError(f"outlast.NaNDetector: {name}: found {value}, expected at least 1")
        self.action = action
        self.max_consecutive = max_consecutive
        self.max_history = max_history
        self.state = NaNState()
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None

    def check_loss(self, loss: float | torch.Tensor, step: int) -> bool:
        """Return whether the loss is finite on every rank.

        Raises:
            NonFinite: it is not, and the action is "raise"; a RuntimeError, too.
        """
        own, state = float(loss), self.state
        ranks = self._bad_ranks(not math.isfinite(own))
        if not ranks:
            state.consecutive_nans, state.last_good_loss, state.last_good_step = 0, own, step
            return True
        state.consecutive_nans += 1
        state.total_nans += 1
        state.nan_steps = [*state.nan_steps, step][-self.max_history :]
        self._complain(
            f"NaN/Inf loss at step {step} on rank {some(ranks)} (consecutive={state.consecutive_nans},"
            f" total={state.total_nans}, last_good_loss={state.last_good_loss:.4f} at step"
            f" {state.last_good_step})",
            NonFiniteStep(f"the loss of rank {some(ranks)}", own, step),
        )
        return False

    def check_gradients(self, model: torch.nn.Module, step: int) -> bool:
        """Return whether all gradients are finite on every rank; before the optimizer runs.

        Raises:
            NonFinite: one is not, and the action is "raise"; a RuntimeError, too.
        """
        names = bad_gradients(model)
        ranks = self._bad_ranks(bool(names))
        if not ranks:
            return True
        where = f"in {some(names)}" if names else "on another rank"
        self._complain(
            f"NaN/Inf gradient {where} at step {step}, on rank {some(ranks)}",
            NonFiniteStep(f"a gradient of rank {some(ranks)}", math.nan, step),
        )
        return False

    def _bad_ranks(self, bad: bool) -> list[int]:
        """Return the ranks that report a bad number; equal on all ranks."""
        if self._group is None:
            return [0] if bad else []
        row = torch.zeros(dist.get_world_size(), dtype=torch.uint8)
        row[dist.get_rank()] = bad
        work = dist.all_reduce(row, dist.ReduceOp.MAX, self._group, async_op=True)
        work.wait(_PATIENCE)
        found: list[int] = row.nonzero().flatten().tolist()
        return found

    def _complain(self, text: str, error: NonFiniteStep) -> None:
        if self.action == "raise":
            error.args = (text,)
            raise error
        _LOG.warning("%s%s", text, "; the optimizer is to be left out" if self.action == "skip" else "")

    @property
    def should_rollback(self) -> bool:
        """Whether ``max_consecutive`` losses in a row were bad."""
        return self.state.consecutive_nans >= self.max_consecutive

    def reset(self) -> None:
        """Reset the counts, as after a rollback."""
        self.state = NaNState()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from a checkpoint."""
        self.state = NaNState(**{**state, "nan_steps": list(state["nan_steps"])[-self.max_history :]})
