"""NeMo's names: parameters and defaults, and what is refused, with the sentence that says what to use."""

from __future__ import annotations

import importlib
import inspect
import signal
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from outlast.errors import UsageError

pytest.importorskip("lightning", reason="lightning: not installed; the extra `frameworks` brings it")
nemo = importlib.import_module("outlast.compat.nemo")
REQUIRED = inspect.Parameter.empty
PARAMETERS = {  # NVRx ptl_resiliency at d8686d9, NeMo 2.x; kwargs and private names left out
    "FaultToleranceCallback": {
        "autoresume": REQUIRED,
        "calculate_timeouts": None,
        "simulated_fault_params": None,
        "exp_dir": None,
        "logger_name": "nemo_logger.FaultToleranceCallback",
        "calculate_timeout": None,  # by the name in NeMo's guide
    },
    "PreemptionCallback": {"sig": None},
    "LocalCheckpointCallback": {
        "every_n_train_steps": None,
        "train_time_interval": None,
        "async_save": False,
    },
    "update_trainer_local_checkpoint_io": {
        "trainer": REQUIRED,
        "local_checkpoint_base_dir": REQUIRED,
        "get_global_ckpt_iteration_fn": REQUIRED,
    },
    "straggler_det_callback": {
        "straggler_report_time_interval": 300,
        "stop_if_detected_straggler": True,
        "gpu_relative_perf_threshold": 0.7,
        "gpu_individual_perf_threshold": 0.7,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_defaults_are_theirs(name: str) -> None:
    found = inspect.signature(getattr(nemo, name)).parameters.values()
    given = {one.name: one.default for one in found if one.kind is not one.VAR_KEYWORD}
    assert given == PARAMETERS[name]


def test_a_simulated_fault_has_their_fields() -> None:
    names = [spec.name for spec in fields(nemo.SimulatedFaultParams)]
    assert names == ["fault_type", "base_delay", "rand_delay", "rank_to_fail"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nemo.FaultToleranceCallback(True, False), "--no-ft-calc-ft-timeouts"),
        (lambda: nemo.FaultToleranceCallback(True, calculate_timeout=False), "--no-ft-calc-ft-timeouts"),
        (lambda: nemo.FaultToleranceCallback(False), "expected one of calculate_timeouts"),
        (
            lambda: nemo.FaultToleranceCallback(False, True, calculate_timeout=True),
            "expected one of calculate_timeouts",
        ),
        (
            lambda: nemo.FaultToleranceCallback(autoresume=True, calculate_timeout=True),
            "needs FAULT_TOL_FINISHED_FLAG_FILE",
        ),
        (lambda: nemo.FaultToleranceCallback(True, True), "needs FAULT_TOL_FINISHED_FLAG_FILE"),
        (
            lambda: nemo.FaultToleranceCallback(
                False, True, simulated_fault_params={"fault_type": "fire", "base_delay": 1}
            ),
            "found 'fire', expected one of random, rank_killed, rank_hung",
        ),
        (lambda: nemo.PreemptionCallback(sig=signal.SIGKILL), "found SIGKILL, expected some of SIGTERM"),
        (lambda: nemo.LocalCheckpointCallback(every_n_train_steps=1, async_save=True), "use a session"),
        (nemo.LocalCheckpointCallback, "expected one of"),
        (lambda: nemo.LocalCheckpointCallback(1, timedelta(1)), "expected one of"),
        (lambda: nemo.LocalCheckpointCallback(0), "0 is not a positive number of steps"),
        (lambda: nemo.get_global_step_from_global_checkpoint_path("/a/last.ckpt"), "llama--1.90-120-30720"),
    ],
)
def test_what_cannot_take_effect_is_refused(
    make: Callable[[], object], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAULT_TOL_FINISHED_FLAG_FILE", raising=False)
    with pytest.raises(UsageError) as found:
        make()
    assert sentence in str(found.value)


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.parametrize(("batches", "ended"), [(0, True), (1, True), (2, False)])
def test_a_fit_of_at_most_one_batch_has_nothing_left_to_do(
    batches: int, ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    trainer = importlib.import_module("lightning.pytorch").Trainer(
        accelerator="cpu", devices=1, max_steps=9, logger=False, default_root_dir=tmp_path
    )
    callback = nemo.FaultToleranceCallback(True, True)
    for index in range(batches):
        callback.on_train_batch_end(trainer, None, None, None, index)
    callback.teardown(trainer, None, "fit")
    assert (tmp_path / "finished").exists() == ended


@pytest.mark.parametrize(
    "name",
    [
        "llama--1.90-120-30720",
        "llama--1.90-120-30720/weights",
        "model_name--val_loss=0.00-step=120-consumed_samples=80.0-last",
        "gpt-3--2.5-120-9",
    ],
)
def test_the_step_is_read_from_a_name(name: str) -> None:
    assert nemo.get_global_step_from_global_checkpoint_path(f"/results/{name}") == 120


def test_the_step_is_read_from_a_file_and_through_links(tmp_path: Path) -> None:
    named, last = tmp_path / "llama--1.90-120-30720", tmp_path / "last.ckpt"
    (named / "weights").mkdir(parents=True)
    last.symlink_to(named)
    assert nemo.get_global_step_from_global_checkpoint_path(last) == 120
    assert nemo.get_global_step_from_global_checkpoint_path(last / "weights") == 120
    for step in (0, 7, 300, 70_000, 1 << 40):
        state = {"global_step": 1, "weight": torch.arange(1 << 16)}
        torch.save({"epoch": 3, "global_step": step, "state_dict": state}, tmp_path / "kept.ckpt")
        last.unlink()
        last.symlink_to("kept.ckpt")
        assert nemo.get_global_step_from_global_checkpoint_path(last) == step
    for content in (b"", b"PK", (tmp_path / "kept.ckpt").read_bytes()[:200]):
        (tmp_path / "kept.ckpt").write_bytes(content)
        with pytest.raises(UsageError):
            nemo.get_global_step_from_global_checkpoint_path(last)
