"""Several fits in one script, in one folder of checkpoints and in another; lightning_folds.py FOLDER.

The last fit is killed once. Each prints its name, the step at which it began, and the number of its batches.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from outlast.errors import UsageError
from outlast.integrations.lightning import OutlastCheckpointIO

folder = Path(sys.argv[1])


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Traced(pl.Callback):
    def __init__(self, kill: int) -> None:
        self.began, self.trained, self.kill = -1, 0, kill

    def on_train_batch_start(self, trainer, *_):
        self.began = trainer.global_step if self.began < 0 else self.began
        if trainer.global_step == self.kill and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.trained += 1


def fit(name: str, place: str, model: Model, *, steps: int, kill: int = -1, plugins=None) -> None:
    traced = Traced(kill)
    keeper = ModelCheckpoint(folder / place, save_last=True, every_n_train_steps=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[keeper, traced],
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    refused = ""
    try:
        trainer.fit(model, torch.utils.data.DataLoader(torch.ones(100, 2)), ckpt_path="last")
    except UsageError as error:
        refused = str(error)
    print("fit", name, traced.began, traced.trained, "refused" if "dirpath" in refused else "", flush=True)


first = Model()
fit("first", "one", first, steps=8)
fit("longer", "one", first, steps=12)
fit("other", "one", Model(), steps=12)
fit("verified", "one", Model(), steps=12, plugins=[OutlastCheckpointIO()])
fit("own", "two", Model(), steps=12, kill=10)
