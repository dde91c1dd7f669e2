"""NeMo's names: parameters and defaults, and what is refused."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from outlast.errors import UsageError

pytest.importorskip("lightning", reason="lightning: not installed; the extra `frameworks` brings it")
nemo = importlib.import_module("outlast.compat.nemo")


def fault_tolerance(*given: object, **named: object) -> Callable[[], object]:
    return lambda: nemo.FaultToleranceCallback(*given, **named)


FIRE = {"fault_type": "fire", "base_delay": 1}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (fault_tolerance(True, False), "--no-ft-calc-ft-timeouts"),
        (fault_tolerance(True, calculate_timeout=False), "--no-ft-calc-ft-timeouts"),
        (fault_tolerance(False), "calculate_timeouts"),
        (fault_tolerance(False, True, calculate_timeout=True), "calculate_timeouts"),
        (fault_tolerance(autoresume=True, calculate_timeout=True), "FAULT_TOL_FINISHED_FLAG_FILE"),
        (fault_tolerance(True, True), "FAULT_TOL_FINISHED_FLAG_FILE"),
        (fault_tolerance(False, True, simulated_fault_params=FIRE), "fire.*random, rank_killed, rank_hung"),
        (lambda: nemo.PreemptionCallback(sig=signal.SIGKILL), "SIGKILL.*SIGTERM"),
        (lambda: nemo.LocalCheckpointCallback(every_n_train_steps=1, async_save=True), "async_save"),
        (nemo.LocalCheckpointCallback, "every_n_train_steps"),
        (lambda: nemo.LocalCheckpointCallback(1, timedelta(1)), "train_time_interval"),
        (lambda: nemo.LocalCheckpointCallback(0), "0"),
        (lambda: nemo.get_global_step_from_global_checkpoint_path("/a/last.ckpt"), "/a/last.ckpt"),
    ],
)
def test_what_cannot_take_effect_is_refused(
    make: Callable[[], object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAULT_TOL_FINISHED_FLAG_FILE", raising=False)
    with pytest.raises(UsageError, match=named):
        make()


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


def test_the_step_is_read_from_a_name_a_file_and_through_links(tmp_path: Path) -> None:
    long = "model_name--val_loss=0.00-step=120-consumed_samples=80.0-last"
    for name in ("llama--1.90-120-30720", "llama--1.90-120-30720/weights", long, "gpt-3--2.5-120-9"):
        assert nemo.get_global_step_from_global_checkpoint_path(f"/results/{name}") == 120
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
