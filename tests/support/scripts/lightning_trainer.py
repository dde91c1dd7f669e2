"""Trains a tiny model with Lightning: accumulation, a scheduler, dropout, validation, a loader in mid-epoch.

arguments: folder of results, "plain", "explicit", "stored" or "both", the step at which rank 0 of the first
           generation is killed (0: none), the seconds that a step takes at least
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

folder, way, fatal, pace = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank = int(os.environ.get("RANK", "0"))
generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        return self.layers(batch).square().mean()

    def validation_step(self, batch, index):
        self.log("valid", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Loader:
    """Gives each rank its batches of an epoch; its place is part of a checkpoint."""

    def __init__(self, batches: int) -> None:
        self.batches, self.place, self.resumed = batches, 0, False

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        self.place, self.resumed = (self.place if self.resumed else 0), False
        while self.place < self.batches:
            self.place += 1
            yield torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * self.place + rank))

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place, self.resumed = state["place"], True


class Traced(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        if fatal and trainer.global_step == fatal and rank == 0 and generation == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, *_):
        with open(folder / f"steps-{rank}", "a") as file:
            print(json.dumps({"generation": generation, "step": trainer.global_step}), file=file, flush=True)
        time.sleep(pace)

    def on_save_checkpoint(self, *_):
        counts["saves"] += 1


def counted(parts, sent, *rest, **options):
    counts["gathered"] += sent.dtype is torch.uint8
    return gather(parts, sent, *rest, **options)


counts = {"saves": 0, "gathered": 0}
gather, dist.all_gather = dist.all_gather, counted
pl.seed_everything(7)
callbacks = [Traced(), ModelCheckpoint(folder / "kept", save_last=True, every_n_train_steps=3)]
options = {}
if way in ("explicit", "both"):
    from outlast.integrations.lightning import OutlastCallback

    callbacks.append(OutlastCallback())
if way in ("stored", "both"):
    from outlast.integrations.lightning import OutlastCheckpointIO

    options["plugins"] = [OutlastCheckpointIO()]
world = int(os.environ.get("WORLD_SIZE", "1"))
trainer = pl.Trainer(
    accelerator="cpu",
    devices=world,
    strategy="ddp" if world > 1 else "auto",
    max_epochs=2,
    accumulate_grad_batches=2,
    val_check_interval=8,
    limit_val_batches=2,
    callbacks=callbacks,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
    use_distributed_sampler=False,
    **options,
)
model = Model()
trainer.fit(model, Loader(16), Loader(4), ckpt_path="last")
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.contiguous().numpy().tobytes())
(folder / f"counts-{rank}").write_text(json.dumps(counts))
(folder / f"done-{rank}").write_text(json.dumps({"weights": digest.hexdigest(), "step": trainer.global_step}))
