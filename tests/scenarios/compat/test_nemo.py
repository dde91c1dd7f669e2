"""NeMo's callbacks under the launcher: a simulated fault, a kill between two saves, a signal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.frameworks import alone, job, needs, reached
from tests.support.launching import Run, running

pytestmark = needs("lightning")
SCRIPT = "nemo_trainer.py"


def weights(folder: Path) -> list[str]:
    found = [json.loads((folder / f"done-{rank}").read_text()) for rank in (0, 1)]
    assert [one["step"] for one in found] == [16, 16]
    return [one["weights"] for one in found]


def test_local_checkpoints_in_one_process(tmp_path: Path) -> None:
    done = alone(tmp_path, "nemo_local.py", "")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_killed_job_goes_on_from_its_local_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    undisturbed = running(job(tmp_path / "quiet", SCRIPT, "local"))
    with running(job(folder, SCRIPT, "local", fatal=5)) as run, undisturbed as quiet:
        assert run.finish() == 0, run.console()
        assert quiet.finish() == 0, quiet.console()
    assert len(run.records("fault_seen")) == 1
    saved = {one["step"] for one in quiet.records("script_saved")}
    assert saved >= {3, 6}, "the Trainer's own"
    assert not saved & {1, 2, 4, 5, 7}, "a local one is lost with its node"
    assert weights(folder) == weights(tmp_path / "quiet")


@pytest.mark.long
def test_the_documented_example_survives_a_kill(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2")
    with running(Run(tmp_path / "run", "nemo_documented.py", str(tmp_path), options=options)) as run:
        assert run.finish() == 0, run.console()
    assert len(run.records("fault_seen")) == 1
    for rank in (0, 1):
        began = [int(line) for line in (tmp_path / f"began-{rank}").read_text().split()]
        assert len(began) == 2
        assert began[0] == 0
        assert began[1] in (5, 6), "a local checkpoint, not the Trainer's of step 4"
        assert (tmp_path / f"ended-{rank}").read_text() == "10"


@pytest.mark.long
def test_a_simulated_fault_hits_the_first_start_and_the_end_is_flagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flag = tmp_path / "job", tmp_path / "finished"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    with running(job(folder, SCRIPT, "killed", pace=0.2)) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["rank"], fault["fault"]) == (1, "crash")
    assert "[FaultToleranceCallback@rank0]" in run.console()
    assert flag.exists()


ONE_BATCH = """
import lightning.pytorch as pl
import sys
import torch
from outlast.compat.nemo import FaultToleranceCallback

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.trainer.global_step >= int(sys.argv[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pl.Trainer(
    accelerator="cpu", devices=1, max_steps=30, min_epochs=0, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[FaultToleranceCallback(True, True)]
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(40, 2)))
print("done:", trainer.global_step)
"""


@pytest.mark.parametrize(
    ("batches", "flagged"), [("1", True), pytest.param("2", False, marks=pytest.mark.long)]
)
def test_a_fit_of_one_batch_has_nothing_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: str, flagged: bool
) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    (tmp_path / "fit.py").write_text(ONE_BATCH)
    with running(Run(tmp_path / "run", str(tmp_path / "fit.py"), batches)) as run:
        assert run.finish() == 0, run.console()
    assert f"done: {batches}\n" in run.console()
    assert (tmp_path / "finished").exists() == flagged


def test_the_signal_of_the_callback_saves_and_ends_the_job(tmp_path: Path) -> None:
    folder, run = tmp_path / "job", job(tmp_path / "job", SCRIPT, "quiet", pace=0.3)
    with running(run):
        run.until(reached(folder / "steps-0", 8))
        os.kill(run.pids()[1], signal.SIGUSR2)
        assert run.finish() == 75, run.console()
    step = json.loads((folder / "steps-0").read_text().splitlines()[-1])["step"]
    assert torch.load(folder / "kept" / "last.ckpt", weights_only=False)["global_step"] == step


@pytest.mark.long
def test_without_the_launcher_it_is_refused(tmp_path: Path) -> None:
    done = alone(tmp_path / "job", SCRIPT, "quiet")
    assert done.returncode != 0
    assert "FaultToleranceCallback" in done.stderr
