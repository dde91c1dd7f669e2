"""A Lightning Trainer for bench/trainers.py: a small model, steps of a given length; rank 0 times them.

arguments: folder of results, way, number of steps, seconds that a step sleeps, steps between checkpoints
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

folder, way = Path(sys.argv[1]), sys.argv[2]
steps, length, save = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
RANK = int(os.environ["RANK"])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Loader:
    """Gives each rank its batches; its place is part of a checkpoint."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.place += 1
            yield torch.randn(8, 128, generator=torch.Generator().manual_seed(100 * self.place + RANK))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Timed(Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(length)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


timed = Timed()
kept = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=save)
callbacks: list[Callback] = [timed, kept]
options: dict[str, Any] = {}
if way != "plain":
    from outlast.integrations.lightning import OutlastCallback, OutlastCheckpointIO

    callbacks.append(OutlastCallback())
    options = {"plugins": [OutlastCheckpointIO()]} if way == "storage" else {}
torch.manual_seed(0)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_steps=steps,
    callbacks=callbacks,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
    use_distributed_sampler=False,
    **options,
)
trainer.fit(Module(), Loader(), ckpt_path="last")
if RANK == 0:
    seconds = [after - before for before, after in pairwise(timed.ends)]
    (folder / "seconds.json").write_text(json.dumps(seconds))
dist.barrier()
if way == "plain":
    os._exit(0)  # an exit of torch 2.13 with gloo aborts now and then ("terminate called")
