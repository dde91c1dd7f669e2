"""Megatron Bridge's options: fields and defaults as there, and what they are in outlast."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import outlast
from outlast.compat import bridge
from outlast.compat.bridge import (
    CheckpointConfig,
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    RerunStateMachineConfig,
)
from outlast.config import CheckpointOptions, InProcessOptions, NumericsOptions, PreemptionOptions
from outlast.errors import ConfigError
from outlast.launcher.command.parser import parse
from outlast.rerun import RerunStateMachine
from tests.source_tree import ROOT

KINDS = (FaultToleranceConfig, InProcessRestartConfig, RerunStateMachineConfig)
KINDS += (NVRxStragglerDetectionConfig, CheckpointConfig)
PAGES = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("reference/from-other-systems.md", "how-to/in-process-restart.md")
)
KEPT = {"save": "/run", "most_recent_k": 3}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_is_in_the_tables(kind: type) -> None:
    assert [spec.name for spec in fields(kind) if not re.search(rf"\b{spec.name}\b", PAGES)] == []


def test_hang_detection_is_off_unless_asked_for() -> None:
    given, problems = parse([*bridge.run_options(FaultToleranceConfig()), "train.py"], {})
    assert problems == []
    assert given.ft_rank_heartbeat_timeout == given.ft_initial_rank_heartbeat_timeout == float("inf")
    assert given.ft_calc_ft_timeouts is False
    assert given.training_script == "train.py"


def test_a_simulated_fault_runs_the_script_below_the_one_that_makes_it() -> None:
    config = FaultToleranceConfig(
        enable_ft_package=True,
        calc_ft_timeouts=True,
        simulate_fault=True,
        simulated_fault_type="rank_hung",
        simulated_fault_rank=3,
        simulated_fault_base_delay=20,
    )
    given, problems = parse(["--nproc-per-node=8", *bridge.run_options(config), "train.py", "--lr=1"], {})
    assert problems == []
    assert given.ft_calc_ft_timeouts is True
    assert (given.module, given.training_script) == (True, "outlast.chaos.inprocess")
    faults = ["--fault=rank_hung", "--base-delay=20", "--rank=3"]
    assert given.training_script_args == ["--", *faults, "train.py", "--lr=1"]


def test_in_process_restart_keeps_their_times() -> None:
    found = bridge.resilient_arguments(InProcessRestartConfig(enabled=True, max_iterations=4))
    (empty_cache,) = found.pop("finalize")
    assert InProcessOptions(**found) == InProcessOptions(
        hang_timeout=60.0, hard_timeout=90.0, barrier_timeout=120.0, max_iterations=4, granularity="node"
    )
    empty_cache(None)
    assert outlast.resilient(**found, finalize=[empty_cache])(lambda: None) is not None
    off = outlast.resilient(**bridge.resilient_arguments(InProcessRestartConfig()))
    assert off(lambda: 7)() == 7
    assert bridge.resilient_arguments(InProcessRestartConfig(enabled=True, active_world_size=1))["enabled"]


@pytest.mark.parametrize("mode", ["disabled", "validate_results", "report_determinism_stats"])
def test_each_mode_makes_a_guard(mode: str) -> None:
    checks, options = bridge.guard_options(RerunStateMachineConfig(rerun_mode=mode))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    reruns = None if mode == "disabled" else RerunStateMachine(model, optimizer, options)
    assert outlast.Guard(model, optimizer, checks, reruns).options == checks
    assert checks.nan_in_loss_action == ("rerun" if mode == "validate_results" else "raise")


def test_a_factor_of_a_spike_is_converted() -> None:
    config = RerunStateMachineConfig(check_for_spiky_loss=True)
    checks, _ = bridge.guard_options(config)
    assert checks.spike_factor * checks.spike_floor == pytest.approx(9), "ten times the median"
    no_nan = replace(config, check_for_nan_in_loss=False)
    assert bridge.guard_options(no_nan)[0] == NumericsOptions(
        check_for_nan_in_loss=False, check_for_spiky_loss=True, spike_factor=checks.spike_factor
    )


def test_checkpoints_of_both_tiers() -> None:
    plain = bridge.start_arguments(CheckpointConfig(**KEPT, save_interval=100))
    assert plain == {
        "run_dir": "/run",
        "checkpoints": CheckpointOptions(
            save_interval=100, keep_last_n=3, async_save=False, replication=False
        ),
    }
    assert plain["checkpoints"].problems() == ()
    local = CheckpointConfig(
        **KEPT,
        load="/run",
        async_save=True,
        non_persistent_ckpt_type="local",
        non_persistent_save_interval=10,
        non_persistent_local_ckpt_dir="/disk",
        non_persistent_local_ckpt_algo="atomic",
        replication=True,
        replication_jump=8,
    )
    assert bridge.start_arguments(local)["checkpoints"] == CheckpointOptions(
        non_persistent_save_interval=10,
        non_persistent_local_ckpt_dir="/disk",
        ckpt_fully_parallel_save=False,
        replication_jump=8,
    )


def test_preemption_is_off_unless_it_is_asked_for() -> None:
    assert bridge.preemption_options() == PreemptionOptions(enable_exit_handler=False)
    asked = bridge.preemption_options(True, signal.SIGUSR2)
    assert asked == PreemptionOptions(exit_signals=["SIGUSR2"], enable_exit_handler_for_data_loader=False)


TURNS: dict[type, Callable[[Any], object]] = {
    FaultToleranceConfig: bridge.run_options,
    InProcessRestartConfig: bridge.resilient_arguments,
    RerunStateMachineConfig: bridge.guard_options,
    CheckpointConfig: bridge.start_arguments,
}


def given(kind: type, **changes: object) -> Callable[[], object]:
    return lambda: TURNS[kind](kind(**changes))


FAULTS = {"enable_ft_package": True, "simulate_fault": True, "simulated_fault_type": "fire"}
WITHOUT_EFFECT = {
    **{"monitor_thread_interval": 2.0, "heartbeat_interval": 10.0, "heartbeat_timeout": 10.0},
    **{"completion_timeout": 10.0, "last_call_wait": 0.0, "termination_grace_time": 5.0},
    **{"active_world_size": 6, "max_rank_faults": 2, "monitor_process_logdir": "/log"},
}
NO_ASYNC = {"non_persistent_save_interval": 10}
ELSEWHERE = {"load": "/old", "ckpt_step": 7, "non_persistent_ckpt_type": "global"}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            given(FaultToleranceConfig, calc_ft_timeouts=True, simulate_fault=True),
            ["calc_ft_timeouts", "simulate_fault", "enable_ft_package"],
        ),
        (
            given(FaultToleranceConfig, enable_ft_package=True, simulated_fault_rank=1),
            ["simulated_fault_rank", "simulate_fault"],
        ),
        (given(FaultToleranceConfig, **FAULTS), ["'fire'", "rank_hung, rank_killed, random"]),
        *(
            (given(InProcessRestartConfig, enabled=True, **{name: value}), [name])
            for name, value in WITHOUT_EFFECT.items()
        ),
        (
            given(RerunStateMachineConfig, error_injection_rate=5, rerun_mode="stats"),
            ["error_injection_rate", "5", "rerun_mode", "'stats'"],
        ),
        (given(RerunStateMachineConfig, spiky_loss_factor=3.0), ["check_for_spiky_loss"]),
        (
            given(RerunStateMachineConfig, rerun_mode="validate_results", check_for_nan_in_loss=False),
            ["validate_results"],
        ),
        (
            given(CheckpointConfig, **ELSEWHERE),
            ["most_recent_k", "-1", "load", "/old", "local", "in_memory"],
        ),
        (given(CheckpointConfig, **KEPT, **NO_ASYNC), [*NO_ASYNC, "async_save"]),
        (given(CheckpointConfig, **KEPT, async_save=True, replication_factor=3), ["replication_factor"]),
        (lambda: bridge.preemption_options(exit_signal=signal.SIGUSR1), ["exit_signal_handler"]),
        (lambda: bridge.preemption_options(True, signal.SIGKILL), ["SIGKILL"]),
    ],
)
def test_what_cannot_take_effect_is_refused(make: Callable[[], object], named: list[str]) -> None:
    with pytest.raises(ConfigError) as found:
        make()
    assert [one for one in named if one not in str(found.value)] == []
