"""Local checkpoints by NeMo's names: loaded, damaged, older than the Trainer's, of another attempt.

argument: a folder of results
"""

from __future__ import annotations

import logging
import resource
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from outlast.compat.nemo import LocalCheckpointCallback, update_trainer_local_checkpoint_io
from outlast.compat.nemo_local import LocalCheckpointIO
from outlast.errors import UsageError
from outlast.integrations.lightning import OutlastCheckpointIO

folder, ballast = Path(sys.argv[1]), 1
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["ballast"] = torch.zeros(ballast)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Crash(Exception):
    pass


class Traced(pl.Callback):
    began = 0

    def __init__(self, end: int) -> None:
        self.end = end

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.began = checkpoint["global_step"]

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.end:
            raise Crash


def iteration_of(path: str) -> int:
    return torch.load(path, weights_only=False)["global_step"]


def fit(end: int, local: LocalCheckpointCallback | None, plugin=None, told=iteration_of) -> int:
    """Train until a crash after a step; return the step of the checkpoint that it went on from."""
    traced = Traced(end)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        callbacks=[
            *filter(None, [local]),
            ModelCheckpoint(folder / "kept", save_last=True, every_n_train_steps=3),
            traced,
        ],
        plugins=plugin,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    update_trainer_local_checkpoint_io(trainer, str(folder), told)
    assert isinstance(trainer.strategy.checkpoint_io, LocalCheckpointIO) == (local is not None)
    data = torch.utils.data.DataLoader(torch.ones(40, 2))
    with pytest.raises(Crash):
        trainer.fit(Model(), data, ckpt_path="last")
    return traced.began


def untrue(path: str) -> int:
    return iteration_of(path) - 1


def files() -> list[str]:
    return sorted(path.name for path in folder.glob("local_ckpt/*/step=*"))


def damage(name: str) -> None:
    (path,) = folder.glob(f"local_ckpt/*/{name}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


rare = LocalCheckpointCallback(every_n_train_steps=100)
with pytest.raises(UsageError, match=r"get_global_ckpt_iteration_fn.* 2.* 3"):
    fit(4, rare, told=untrue)
shutil.rmtree(folder / "kept")
assert fit(5, LocalCheckpointCallback(every_n_train_steps=1)) == 0
assert files() == ["step=4.ckpt", "step=5.ckpt"], "two are kept"
assert fit(7, rare, OutlastCheckpointIO()) == 5, "the Trainer's is of step 3"
assert fit(7, rare) == 6, "the Trainer's is of step 6"

assert fit(8, LocalCheckpointCallback(every_n_train_steps=1)) == 6
assert files() == ["step=7.ckpt", "step=8.ckpt"]
damage("step=8.ckpt")
assert fit(8, rare) == 7, "the older one is whole"
assert files() == ["step=7.ckpt", "step=8.ckpt.stale"]
damage("step=7.ckpt")
assert fit(8, rare) == 6, "no local one is whole"

assert fit(8, LocalCheckpointCallback(train_time_interval=timedelta(0))) == 6
assert fit(8, None) == 6, "without the callback nothing is local"

damage("step=8.ckpt")
ballast, limits = 1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))  # a full disk: torch.save raises RuntimeError
assert fit(8, LocalCheckpointCallback(every_n_train_steps=1)) == 7, "the fit goes on"
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert files() == ["step=7.ckpt", "step=7.ckpt.stale", "step=8.ckpt.stale"]

tester = pl.Trainer(
    accelerator="cpu", callbacks=[rare], logger=False, enable_progress_bar=False, enable_model_summary=False
)
update_trainer_local_checkpoint_io(tester, str(folder), iteration_of)
stored = tester.strategy.checkpoint_io
stored.checkpoint_io.save_checkpoint({"global_step": 2}, folder / "best.ckpt")
assert stored.load_checkpoint(folder / "best.ckpt", weights_only=False) == {"global_step": 2}, "no fit"
(local,) = folder.glob("local_ckpt/*/step=7.ckpt")
local.with_name("step=9.ckpt").touch()
stored.leave_behind(0)
assert files() == ["step=8.ckpt.stale", "step=9.ckpt.stale"], "the newest two"

trainer = pl.Trainer(
    accelerator="cpu", callbacks=[LocalCheckpointCallback(every_n_train_steps=1)], logger=False
)
with pytest.raises(UsageError, match="update_trainer_local_checkpoint_io"):
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 2)))
with pytest.raises(UsageError, match="local_ckpt_algo='atomic'"):
    update_trainer_local_checkpoint_io(trainer, str(folder), iteration_of, local_ckpt_algo="atomic")
with pytest.raises(UsageError, match="speed=1"):
    update_trainer_local_checkpoint_io(trainer, str(folder), iteration_of, allow_cache=False, speed=1)
