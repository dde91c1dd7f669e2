"""Trains with OutlastTrainer in the working folder, with several kinds of data.

arguments: the kind of data, "fatal" or "quiet": whether the process is killed within an epoch
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler
from transformers import TrainerCallback, TrainingArguments

from outlast.integrations.transformers import OutlastTrainer

COUNT, FATAL, SAVED = 24, 9, 8  # an epoch has 6 steps


def sample(index: int) -> dict[str, torch.Tensor]:
    length = 3 + index * 7 % 5
    return {
        "input_ids": torch.full((length,), index),
        "x": torch.tensor([index / COUNT, 1.0]),
        "labels": index,
    }


class Samples(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= COUNT:  # the sampler by length iterates over it
            raise IndexError(index)
        return sample(index)


class Stream(IterableDataset):
    """Has no length: the Trainer takes all epochs for one."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(sample, torch.randperm(COUNT).tolist())


class Own(Sampler):
    """Draws from python's generator."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(COUNT), COUNT))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(2, 1), torch.nn.Dropout(0.3)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(labels.tolist())
        return {"loss": self.drop(self.layer(x)).square().mean()}


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == FATAL:
            deadline = time.monotonic() + 60
            while not [*Path.cwd().glob(f"outlast-runs/*/checkpoints/step-{SAVED:09}*")]:
                assert time.monotonic() < deadline, [*Path.cwd().rglob("step-*")]
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class Kept(OutlastTrainer):
    kind = ""

    def _get_train_sampler(self, *args):
        return Own() if self.kind == "persistent" else super()._get_train_sampler(*args)


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    labels = torch.tensor([one["labels"] for one in samples], dtype=torch.float32)
    return {"x": torch.stack([one["x"] for one in samples]), "labels": labels}


def train(kind: str, fatal: bool) -> None:
    torch.set_num_threads(1)
    Kept.kind = kind
    options = {"persistent": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}}
    options["by length"] = {"train_sampling_strategy": "group_by_length"}
    args = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        max_steps=18,
        save_steps=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-2,
        remove_unused_columns=False,
        **options.get(kind, {}),
    )
    torch.manual_seed(2)
    model = Net()
    data = Stream() if kind == "stream" else Samples()
    trainer = Kept(
        model, args, train_dataset=data, data_collator=collate, callbacks=[Kill()] if fatal else []
    )
    trainer.train(resume_from_checkpoint="outlast")
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    end = {"weights": digest.hexdigest(), "seen": model.seen, "step": trainer.state.global_step}
    Path("end").write_text(json.dumps(end))


train(sys.argv[1], sys.argv[2] == "fatal")
