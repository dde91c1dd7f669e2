"""Trains with Lightning and torchdata's StatefulDataLoader, and writes which samples each step had.

arguments: folder of results, the steps at which rank 1 is killed, one in each generation
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast.integrations.lightning import OutlastCheckpointIO

folder, fatal = Path(sys.argv[1]), [*map(int, sys.argv[2].split(",")), -1, -1, -1]
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Samples(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(4) + index / 40


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.3))

    def training_step(self, batch, index):
        step = self.trainer.global_step
        if rank == 1 and step == fatal[generation]:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(folder / f"samples-{rank}", "a") as file:
            print(json.dumps([step, batch[0].tolist()]), file=file)
        return self.layers(batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return StatefulDataLoader(Samples(), batch_size=4, shuffle=True)


pl.seed_everything(1)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    logger=False,
    plugins=[OutlastCheckpointIO()],
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_last=True)],
)
model = Model()
trainer.fit(model, Data(), ckpt_path="last")
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.contiguous().numpy().tobytes())
(folder / f"done-{rank}").write_text(digest.hexdigest())
