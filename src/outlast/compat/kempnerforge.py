"""A detector of losses and gradients that are not finite, for loops of their own, by KempnerForge's names.

:class:`outlast.Guard` does the same with one reduction a step and before the optimizer runs; this one is for
scripts that have the calls already.

KempnerForge's ShutdownHandler, over what hears notices in this process.

What a script may ask about the Slurm job that it is in, by KempnerForge's names.

Works under any launcher. Outside of Slurm every question has an answer, too.
"""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast import settings
from outlast.checkpoint.policy.manifest import parse_copy_name, some
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import Preemption
from outlast.errors import NonFinite, UsageError
from outlast.numerics.worker.numerics import bad_gradients
from outlast.preemption.worker import PreemptionHandler, install

_LOG = logging.getLogger("outlast")
_ACTIONS = ("warn", "skip", "raise")
_PATIENCE = timedelta(seconds=1800)  # torch's own for gloo


@dataclass
class NaNState:
    """What a detector has seen.

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
    """A number that is not finite, also as the error that KempnerForge raises."""


class NaNDetector:
    """Counts bad steps, equal on every rank; each rank makes one at the same time, and the same calls.

    Args:
        action: "warn"; "skip": the script leaves the optimizer out when a check returns False; "raise": on
            every rank.
        max_consecutive: bad losses in a row after which ``should_rollback`` is true.
        max_history: bad steps that are remembered, the newest.

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
        """Return the ranks that say so, to all of them."""
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
        """Whether so many losses in a row were bad that an older checkpoint is called for."""
        return self.state.consecutive_nans >= self.max_consecutive

    def reset(self) -> None:
        """Forget everything, as after a rollback."""
        self.state = NaNState()

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, for the checkpoint."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.state = NaNState(**{**state, "nan_steps": list(state["nan_steps"])[-self.max_history :]})


class ShutdownHandler:
    """Heeds signals from the moment it is registered, by KempnerForge's names; a session takes it over.

    Args:
        timeout_sec: seconds after a notice at which the process exits whatever happens; 0: no such limit.
        options: all of them; ``timeout_sec`` wins.
    """

    def __init__(self, timeout_sec: float = 600.0, options: Preemption | None = None) -> None:
        self._options = replace(options or Preemption(), timeout_sec=timeout_sec)
        self._listener: PreemptionHandler | None = None
        self._vote: Callable[[bool], bool] | None = None

    @property
    def shutdown_requested(self) -> bool:
        """Whether a notice has reached this process; ranks may differ in that."""
        if self._listener is None:
            return False
        self._listener.look()
        return self._listener.asked

    @property
    def signal_received(self) -> signal.Signals | None:
        """The first signal that was a notice."""
        number = 0 if self._listener is None else self._listener.first_signal
        return signal.Signals(number) if number else None

    def should_shutdown(self) -> bool:
        """Say whether any rank was told to stop, and the same on every rank; each calls it once a step.

        Where there is a process group, the answer is that to the ranks' last calls, so no rank is ever alone
        with it.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        if self._vote is None:
            from outlast.agreement.worker.vote import should_shutdown

            self._vote = should_shutdown()
        return self._vote(self.shutdown_requested)

    def register(self) -> None:
        """Put the handlers in place; on the main thread, before torch is imported if need be.

        Raises:
            UsageError: this is not the main thread, or an option makes no sense.
        """
        self._listener = install(self._options)
        if self._listener is None and self._options.enable_exit_handler:
            raise UsageError("ShutdownHandler.register: call it on the main thread; no signal is heeded now")

    def unregister(self) -> None:
        """Put the old handlers back, unless a notice has come: until the process ends they stay."""
        if self._listener is not None:
            self._listener.release()

    def finish(self) -> None:
        """Say that the script has saved; the process still ends by its deadline at the latest."""
        if self._listener is not None and self._listener.asked:
            self._listener.resign("Graceful shutdown complete")
        self.unregister()


__all__ = [
    "SLURMInfo",
    "get_slurm_info",
    "is_slurm_job",
    "is_slurm_requeue",
    "log_job_info",
    "resolve_resume_path",
]


@dataclass(frozen=True)
class SLURMInfo:
    """The job as its environment describes it.

    Args:
        ntasks_per_node: 1 where Slurm was not told; a list such as "2(x3)" counts its first number.
        restart_count: requeues so far.
        array_task_id: None outside of an array.
    """

    job_id: str
    job_name: str
    node_list: str
    num_nodes: int
    ntasks_per_node: int
    restart_count: int
    partition: str
    array_task_id: int | None

    @property
    def is_requeued(self) -> bool:
        """Say whether an earlier allocation of this job has run."""
        return self.restart_count > 0


def get_slurm_info() -> SLURMInfo | None:
    """Return what the environment says of the job; None outside of Slurm.

    Raises:
        UsageError: a variable that should hold a number does not.
    """
    variables = settings.inherited()
    if not variables.get("SLURM_JOB_ID"):
        return None

    def number(name: str, default: int) -> int:
        text = variables.get(name, "") or str(default)
        match = re.match(r"\d+", text)
        if match is None:
            raise UsageError(f"{name}={text!r}: expected a whole number, as Slurm sets it")
        return int(match[0])

    return SLURMInfo(
        job_id=variables["SLURM_JOB_ID"],
        job_name=variables.get("SLURM_JOB_NAME", ""),
        node_list=variables.get("SLURM_JOB_NODELIST", ""),
        num_nodes=number("SLURM_JOB_NUM_NODES" if "SLURM_JOB_NUM_NODES" in variables else "SLURM_NNODES", 1),
        ntasks_per_node=number("SLURM_NTASKS_PER_NODE", 1),
        restart_count=number("SLURM_RESTART_COUNT", 0),
        partition=variables.get("SLURM_JOB_PARTITION", ""),
        array_task_id=number("SLURM_ARRAY_TASK_ID", 0) if variables.get("SLURM_ARRAY_TASK_ID") else None,
    )


def is_slurm_job() -> bool:
    """Say whether this process runs inside a Slurm job."""
    return get_slurm_info() is not None


def is_slurm_requeue() -> bool:
    """Say whether an earlier allocation of this Slurm job has run."""
    info = get_slurm_info()
    return info is not None and info.is_requeued


def log_job_info() -> None:
    """Log the job in one line, and in a second one that it was requeued, on this module's logger."""
    info = get_slurm_info()
    if info is None:
        _LOG.info("Not running under SLURM")
        return
    _LOG.info(
        "SLURM job: id=%s, name=%s, nodes=%d, tasks/node=%d, partition=%s, restart_count=%d",
        info.job_id,
        info.job_name,
        info.num_nodes,
        info.ntasks_per_node,
        info.partition,
        info.restart_count,
    )
    if info.is_requeued:
        _LOG.info("Job was requeued (restart #%d) — will auto-resume", info.restart_count)


def resolve_resume_path(checkpoint_dir: str) -> Path | None:
    """Return the newest finished checkpoint in a folder, None where there is none.

    Looks for copies of outlast (in the folder, or in ``checkpoints`` below it), then for
    KempnerForge's layout: ``latest``, then the highest ``step_N``. Unlike there, a folder without
    the ``.metadata`` that torch writes last is passed over: its save did not finish. Nothing is
    read; ``session.restore`` verifies, this does not.
    """
    root = Path(checkpoint_dir)
    for folder in (root, root / "checkpoints"):
        tier = DirectoryTier(folder)
        for name in sorted(tier.names(), key=lambda name: parse_copy_name(name) or (-1, -1), reverse=True):
            if inspect(tier, name, None).state is CopyState.WHOLE:
                return folder / name
    steps = [(int(path.name[5:]), path) for path in root.glob("step_*") if path.name[5:].isdigit()]
    ordered = [root / "latest", *(path for _, path in sorted(steps, reverse=True))]
    for path in ordered:
        if path.is_dir() and any(path.rglob(".metadata")):
            return path.resolve() if path.name == "latest" else path
    return None
