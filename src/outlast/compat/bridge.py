"""Megatron Bridge's options of resiliency, field by field, and what they are in outlast.

Each class has the names and defaults of Bridge at 067f987; each function turns one into options of outlast. A
field that cannot take effect has to keep its default: ConfigError lists all others, with what to use.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outlast import settings
from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.tools import listing
from outlast.compat.straggler_callback import NVRxStragglerDetectionConfig
from outlast.config import CheckpointOptions, NumericsOptions, PreemptionOptions, RerunOptions
from outlast.errors import ConfigError, RunFolderUnusable, UsageError

__all__ = [
    "CheckpointConfig",
    "FaultToleranceConfig",
    "InProcessRestartConfig",
    "NVRxStragglerDetectionConfig",
    "RerunStateMachineConfig",
    "get_iteration_from_checkpoint",
    "guard_options",
    "preemption_options",
    "resilient_arguments",
    "run_options",
    "start_arguments",
]
_FOREIGN = re.compile(
    r"^iter_([0-9]+)$|^step_([0-9]+)$|(?:^|-)step=([0-9]+)(?:-|$)"  # Megatron-LM, KempnerForge, NeMo
)
_FAULT_TYPES = ("rank_hung", "rank_killed", "random")


@dataclass(kw_only=True)
class FaultToleranceConfig:
    """Hang detection and simulated faults (``cfg.ft``)."""

    enable_ft_package: bool = False
    calc_ft_timeouts: bool = False
    simulate_fault: bool = False
    simulated_fault_type: str = "random"
    simulated_fault_rank: int | None = None
    simulated_fault_base_delay: int = 0


def run_options(config: FaultToleranceConfig) -> list[str]:
    """Return the words between ``outlast run`` and the script that mean the same.

    Without ``enable_ft_package`` nothing is watched. With ``simulate_fault`` the script runs below
    :mod:`outlast.chaos.inprocess`, so these words come last.

    Raises:
        ConfigError: a field has no effect.
    """
    problems = []
    if not config.enable_ft_package:
        others = sorted(_changed(config) - {"enable_ft_package"})
        problems += [f"{name}: has no effect with enable_ft_package off; switch that on" for name in others]
    elif not config.simulate_fault:
        others = sorted(name for name in _changed(config) if name.startswith("simulated_"))
        problems += [f"{name}: has no effect with simulate_fault off; switch that on" for name in others]
    if config.simulated_fault_type not in _FAULT_TYPES:
        expected = ", ".join(_FAULT_TYPES)
        problems.append(f"simulated_fault_type: found {config.simulated_fault_type!r}, expected {expected}")
    _refuse(config, problems)
    if not config.enable_ft_package:
        timeouts = ("initial-rank-heartbeat", "rank-heartbeat", "rank-out-of-section")
        return ["--no-ft-calc-ft-timeouts", *(f"--ft-{name}-timeout=off" for name in timeouts)]
    words = ["--ft-calc-ft-timeouts" if config.calc_ft_timeouts else "--no-ft-calc-ft-timeouts"]
    if config.simulate_fault:
        words += ["-m", "outlast.chaos.inprocess", "--", f"--fault={config.simulated_fault_type}"]
        words += [f"--base-delay={config.simulated_fault_base_delay}"]
        rank = config.simulated_fault_rank
        words += [] if rank is None else [f"--rank={rank}"]
    return words


@dataclass(kw_only=True)
class InProcessRestartConfig:
    """In-process restart (``cfg.inprocess_restart``)."""

    enabled: bool = False
    max_iterations: int | None = None
    monitor_thread_interval: float = 1.0
    monitor_process_interval: float = 1.0
    progress_watchdog_interval: float = 1.0
    heartbeat_interval: float = 30.0
    soft_timeout: float = 60.0
    hard_timeout: float = 90.0
    heartbeat_timeout: float = 60.0
    barrier_timeout: float = 120.0
    completion_timeout: float = 120.0
    last_call_wait: float = 1.0
    termination_grace_time: float = 1.0
    granularity: str = "node"
    active_world_size: int | None = None
    empty_cuda_cache: bool = True
    max_rank_faults: int | None = None
    monitor_process_logdir: str | None = None


_NO_MONITOR = "there is no monitor: the agent looks every --ft-workload-check-interval seconds"
_NO_RING = "ranks do not watch each other; outlast run --ping-timeout is the silence of a lost node"
_INPROCESS = {
    "monitor_thread_interval": _NO_MONITOR,
    "monitor_process_interval": _NO_MONITOR,
    "progress_watchdog_interval": _NO_MONITOR,
    "heartbeat_interval": _NO_RING,
    "heartbeat_timeout": _NO_RING,
    "completion_timeout": "a rank that hangs while others have returned is found by its own timeout",
    "last_call_wait": "the agent does not wait to collect faults",
    "termination_grace_time": "a rank that does not leave is killed at hard_timeout",
    "max_rank_faults": "set max_iterations, or outlast run --max-restarts",
    "monitor_process_logdir": "the launcher writes events.jsonl in the run folder",
}


def resilient_arguments(config: InProcessRestartConfig) -> dict[str, Any]:
    """Return what :func:`outlast.resilient` takes: ``@outlast.resilient(**resilient_arguments(config))``.

    Raises:
        ConfigError: a field has no effect.
    """
    problems = list(_without_effect(config, _INPROCESS))
    world = settings.worker_context().world_size
    if config.active_world_size not in (None, world):
        problems.append(
            f"active_world_size: found {config.active_world_size} of {world} ranks; all ranks train, and"
            " spares are nodes: outlast run --spares"
        )
    _refuse(config, problems)
    if not config.enabled:
        return {"enabled": False}
    return {
        "enabled": True,
        "hang_timeout": config.soft_timeout,
        "hard_timeout": config.hard_timeout,
        "barrier_timeout": config.barrier_timeout,
        "max_iterations": config.max_iterations,
        "granularity": config.granularity,
        "finalize": [_empty_cuda_cache] if config.empty_cuda_cache else [],
    }


def _empty_cuda_cache(_: object) -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


@dataclass(kw_only=True)
class RerunStateMachineConfig:
    """Checks of the loss, and reruns (``cfg.rerun_state_machine``)."""

    error_injection_rate: int = 0
    error_injection_type: str = "transient_error"
    rerun_mode: str = "disabled"
    check_for_nan_in_loss: bool = True
    check_for_spiky_loss: bool = False
    spiky_loss_factor: float = 10.0


_INJECTION = "multiply the loss by NaN in one step of the script, or flip a bit with outlast chaos inject"
_RERUN = {"error_injection_rate": _INJECTION, "error_injection_type": _INJECTION}


def guard_options(config: RerunStateMachineConfig) -> tuple[NumericsOptions, RerunOptions]:
    """Return the options of a Guard, and those of its RerunStateMachine.

    After a NaN the step is rerun with ``rerun_mode`` "validate_results", else every rank raises; with
    "disabled" the guard takes no ``reruns``. A spike is reported. ``spiky_loss_factor`` counts from the
    median of the latest steps, not from the largest of the first hundred. Gradients are checked as outlast
    does by default.

    Raises:
        ConfigError: a field has no effect.
    """
    problems = list(_without_effect(config, _RERUN))
    floor = NumericsOptions.spike_floor
    if config.check_for_spiky_loss and not config.spiky_loss_factor > 1:
        problems.append(f"spiky_loss_factor: {config.spiky_loss_factor} times the median would be no spike")
    if not config.check_for_spiky_loss and _changed(config) & {"spiky_loss_factor"}:
        problems.append("spiky_loss_factor: has no effect with check_for_spiky_loss off; switch that on")
    if config.rerun_mode == "validate_results" and not config.check_for_nan_in_loss:
        problems.append(
            "rerun_mode: validate_results has no effect with check_for_nan_in_loss off; switch that on, or"
            ' rerun_mode="disabled"'
        )
    reruns = RerunOptions(rerun_mode=config.rerun_mode)
    _refuse(config, [*problems, *reruns.problems()])
    chosen: dict[str, Any] = {"check_for_nan_in_loss": config.check_for_nan_in_loss}
    if config.check_for_nan_in_loss:
        chosen["nan_in_loss_action"] = "rerun" if config.rerun_mode == "validate_results" else "raise"
    if config.check_for_spiky_loss:
        chosen |= {"check_for_spiky_loss": True, "spike_factor": (config.spiky_loss_factor - 1) / floor}
    return NumericsOptions(**chosen), reruns


@dataclass(kw_only=True)
class CheckpointConfig:
    """What ``cfg.checkpoint`` says about saving and resuming; formats and conversion are left out."""

    save: str | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    most_recent_k: int | None = -1
    save_optim: bool = True
    save_rng: bool = True
    load: str | None = None
    load_optim: bool = True
    load_rng: bool = True
    ckpt_step: int | None = None
    exit_on_missing_checkpoint: bool = False
    ckpt_format: str = "torch_dist"
    async_save: bool = False
    use_persistent_ckpt_worker: bool = True
    async_strategy: str = "nvrx"
    fully_parallel_save: bool = True
    fully_parallel_load: bool = False
    ckpt_assume_constant_structure: bool = False
    dist_ckpt_strictness: str = "assume_ok_unexpected"
    non_persistent_save_interval: int | None = None
    non_persistent_ckpt_type: str | None = None
    non_persistent_global_ckpt_dir: str | None = None
    non_persistent_local_ckpt_dir: str | None = None
    non_persistent_local_ckpt_algo: str = "fully_parallel"
    replication: bool = False
    replication_jump: int | None = None
    replication_factor: int = 2


_REGISTER = "what session.restore registers is saved and loaded; random states always"
_WRITER = "one checkpoint writer for each node writes, and is started once"
_CHECKPOINTS = {
    "save_retain_interval": "CheckpointOptions(global_url=..., keep_ancestors=...) keeps older ones",
    "save_optim": _REGISTER,
    "save_rng": _REGISTER,
    "load_optim": _REGISTER,
    "load_rng": _REGISTER,
    "ckpt_step": "the newest trusted copy is loaded; outlast ckpt quarantine sets newer ones aside",
    "exit_on_missing_checkpoint": "session.restore returns 0 where there is none; check that",
    "ckpt_format": "copies have a format of outlast; outlast ckpt export writes other ones",
    "use_persistent_ckpt_worker": _WRITER,
    "async_strategy": _WRITER,
    "fully_parallel_load": "what all ranks need is always read from the disk once",
    "ckpt_assume_constant_structure": "what is saved is found out at each save",
    "dist_ckpt_strictness": "names that do not fit are an error that lists them",
    "non_persistent_global_ckpt_dir": "CheckpointOptions(global_url=...) is the tier that outlives a cluster",
}


def start_arguments(config: CheckpointConfig) -> dict[str, Any]:
    """Return what :func:`outlast.start` takes: ``outlast.start(**start_arguments(config))``.

    Raises:
        ConfigError: a field has no effect; among them the default of ``most_recent_k``, which keeps all
            checkpoints.
    """
    problems = [*_without_effect(config, _CHECKPOINTS), *_unknown_kinds(config)]
    if config.most_recent_k is None or config.most_recent_k < 2:
        problems.append(
            f"most_recent_k: found {config.most_recent_k}; a run keeps at least 2 checkpoints, and not all of"
            " them: set it, such as most_recent_k=3"
        )
    if config.load not in (None, config.save):
        problems.append(
            f"load: found {config.load}, and save is {config.save}; a run resumes from its own folder, and"
            " outlast ckpt import takes a checkpoint of another one over"
        )
    _refuse(config, problems)
    options = CheckpointOptions(
        save_interval=config.save_interval,
        keep_last_n=config.most_recent_k or 0,
        async_save=config.async_save,
        ckpt_fully_parallel_save=config.fully_parallel_save
        and config.non_persistent_local_ckpt_algo == "fully_parallel",
        non_persistent_save_interval=config.non_persistent_save_interval,
        non_persistent_local_ckpt_dir=config.non_persistent_local_ckpt_dir or "",
        replication=config.replication,
        replication_jump=config.replication_jump,
        replication_factor=config.replication_factor,
    )
    _refuse(config, options.problems())
    return {"run_dir": config.save, "checkpoints": options}


def _unknown_kinds(config: CheckpointConfig) -> Iterator[str]:
    if config.non_persistent_ckpt_type not in (None, "local", "in_memory"):
        yield (
            f"non_persistent_ckpt_type: found {config.non_persistent_ckpt_type!r}, expected local or"
            " in_memory: such checkpoints are in the memory of the nodes; save_interval is for others"
        )
    if config.non_persistent_local_ckpt_algo not in ("fully_parallel", "atomic"):
        yield (
            f"non_persistent_local_ckpt_algo: found {config.non_persistent_local_ckpt_algo!r}, expected"
            " fully_parallel or atomic"
        )


def preemption_options(
    exit_signal_handler: bool = False,
    exit_signal: int = signal.SIGTERM,
    exit_signal_handler_for_dataloader: bool = False,
) -> PreemptionOptions:
    """Return the options of preemption for three fields of ``cfg.train``: ``outlast.start(preemption=...)``.

    Raises:
        ConfigError: a field has no effect, or the signal cannot announce an end.
    """
    problems = []
    if not exit_signal_handler and (exit_signal != signal.SIGTERM or exit_signal_handler_for_dataloader):
        problems.append("exit_signal_handler: is off, so exit_signal and the loader's handler have no effect")
    found = PreemptionOptions(enable_exit_handler=False)
    if exit_signal_handler:
        name = signal.Signals(exit_signal).name
        found = PreemptionOptions(
            exit_signals=[name], enable_exit_handler_for_data_loader=exit_signal_handler_for_dataloader
        )
        problems += found.problems()
    if problems:
        raise ConfigError("cfg.train", tuple(problems))
    return found


def _changed(config: Any) -> set[str]:
    """Return the fields that differ from their defaults."""
    return {spec.name for spec in fields(config) if getattr(config, spec.name) != spec.default}


def _without_effect(config: Any, cures: Mapping[str, str]) -> Iterator[str]:
    for name in (spec.name for spec in fields(config) if spec.name in cures):
        if name in _changed(config):
            yield f"{name}: found {getattr(config, name)!r}, which has no effect: {cures[name]}"


def _refuse(config: Any, problems: Any) -> None:
    if problems:
        raise ConfigError(type(config).__name__, tuple(problems))


def get_iteration_from_checkpoint(path: str) -> int:
    """Return the completed steps of a checkpoint, or of the newest whole one of a run; 0: the run has none.

    No tensor is read: a load may find that it is damaged, and take an older one.

    Args:
        path: of a copy (``step-000000120.g7``) in any folder; of a checkpoint of Megatron-LM, NeMo or
            KempnerForge, of which nothing but the name is read; of a run folder or a folder of copies.

    Raises:
        UsageError: there is no such folder, or the copy is not whole.
    """
    folder = Path(path)
    if folder.is_dir() and parse_copy_name(folder.name) is not None:
        copy = inspect(DirectoryTier(folder.parent), folder.name, None)
        if copy.state is not CopyState.WHOLE:
            raise UsageError(
                f"{path} is {copy.state.value}: {copy.reason}; name another copy, or the run folder"
            )
        return copy.step
    foreign = _FOREIGN.search(folder.name)
    if foreign is not None and folder.is_dir() and not (folder / "run.json").exists():
        return int(next(filter(None, foreign.groups())))
    target = listing.find(path)
    there = [item for item in listing.items(target) if not item.aside]
    with suppress(OSError, RunFolderUnusable):
        there += listing.staged(target)
    found = (listing.look(item).copy for item in there)
    return max((copy.step for copy in found if copy.state is CopyState.WHOLE), default=0)
