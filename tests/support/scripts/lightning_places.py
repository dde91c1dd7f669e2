"""Fits of Lightning that are left at a step and go on in another Trainer, with many kinds of loaders.

arguments: a folder, the kinds of loaders; prints one line of JSON with what each fit has trained on
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast.integrations.lightning import OutlastCallback, OutlastCheckpointIO

COUNT, EPOCHS = 22, 3
warnings.filterwarnings("ignore")


class Samples(Dataset):
    """Draws from the global generator, as augmentations do."""

    def __init__(self, draws: bool = True) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.randn(3) * 0.1 if self.draws else torch.zeros(3)
        return index, noise + index / COUNT


class Stream(IterableDataset):
    """Has no length and no state."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index in torch.randperm(COUNT).tolist():
            yield index, torch.full((3,), index / COUNT)


class Placed(IterableDataset):
    """Keeps its own place over epochs, which the generators know nothing of."""

    def __init__(self) -> None:
        self.epoch, self.rest = 0, list[int]()

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        if not self.rest:
            self.epoch += 1
            self.rest = random.Random(self.epoch).sample(range(COUNT), COUNT)
        while self.rest:
            index = self.rest.pop(0)
            yield index, torch.full((3,), index / COUNT)

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "rest": list(self.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.rest = state["epoch"], list(state["rest"])


class Own(Sampler):
    """Draws from python's generator."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(COUNT), COUNT))


def loader(kind: str) -> DataLoader:
    weights = torch.arange(1.0, COUNT + 1)
    return {
        "shuffled": lambda: DataLoader(Samples(), 4, shuffle=True),
        "generator": lambda: DataLoader(
            Samples(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
        ),
        "weighted": lambda: DataLoader(Samples(), 4, sampler=WeightedRandomSampler(weights, COUNT)),
        "own sampler": lambda: DataLoader(Samples(), 4, sampler=Own()),
        "stream": lambda: DataLoader(Stream(), 4),
        "workers": lambda: DataLoader(Samples(), 4, shuffle=True, num_workers=1),
        "persistent": lambda: DataLoader(
            Samples(draws=False), 4, shuffle=True, num_workers=1, persistent_workers=True
        ),
        "torchdata": lambda: StatefulDataLoader(Samples(), 4, shuffle=True),
        "torchdata, workers": lambda: StatefulDataLoader(Samples(), 4, shuffle=True, num_workers=1),
        "torchdata, placed": lambda: StatefulDataLoader(Placed(), 4),
    }[kind]()


class Data(pl.LightningDataModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> DataLoader:
        return loader(self.kind)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Samples(), 8)


class Model(pl.LightningModule):
    def __init__(self, seen: dict[int, list[int]]) -> None:
        super().__init__()
        self.seen = seen
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))

    def training_step(self, batch, index):
        self.seen[self.trainer.global_step] = batch[0].tolist()
        return self.layers(batch[1]).square().mean()

    def validation_step(self, batch, index):
        self.log("valid", self.layers(batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Left(Exception):
    """The fit is left."""


class Leave(pl.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.at:
            raise Left


def fit(folder: Path, kind: str, seen: dict[int, list[int]], leave: int) -> str:
    pl.seed_everything(4, verbose=False)
    keeper = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[keeper, Leave(leave), OutlastCallback()],
        plugins=[OutlastCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(seen)
    try:
        trainer.fit(model, Data(kind), ckpt_path="last")
    except Left:
        return ""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


for kind in sys.argv[2:]:
    found = {}
    for leaves in ((), (3, 9), (7,)):  # an epoch has 6 steps: within epochs, and after the last batch of one
        folder = Path(sys.argv[1], kind, "-".join(map(str, leaves)))
        seen: dict[int, list[int]] = {}
        for leave in leaves:
            fit(folder, kind, seen, leave)
        weights = fit(folder, kind, seen, -1)
        found[str(leaves)] = [weights, [seen.get(step) for step in range(EPOCHS * 6)]]
    print("RESULT", json.dumps({"kind": kind, "found": found}), flush=True)
