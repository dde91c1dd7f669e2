"""Ways to use Transformers' Trainer that would train on wrong data, or options without an effect."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import outlast
from outlast.integrations.transformers import OutlastTrainer, OutlastTrainerMixin


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


class Restores(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **_):
        with outlast.start() as session:
            state.global_step = session.restore(model=model)


class Overrides(Trainer):
    def _save_checkpoint(self, *args, **options):
        super()._save_checkpoint(*args, **options)


class Mixed(OutlastTrainerMixin, Overrides):
    pass


def refused(words, kind=OutlastTrainer, resume="outlast", callbacks=(), evaluated=None, **options):
    options = {"output_dir": "hf", "use_cpu": True, "report_to": "none", "max_steps": 2, **options}
    data = [{"x": torch.ones(1)}] * 4
    trainer = kind(
        model=Model(),
        args=TrainingArguments(**options),
        train_dataset=data,
        eval_dataset=evaluated,
        callbacks=list(callbacks),
    )
    with pytest.raises(outlast.UsageError, match=re.escape(words)):
        trainer.train(resume_from_checkpoint=resume)


refused('trainer.train(resume_from_checkpoint="outlast")', Trainer, None, [Restores()])
refused("__main__.Overrides", Mixed)
refused("ignore_data_skip", ignore_data_skip=True)


class Keeps(OutlastTrainer):
    checkpoint_options = outlast.CheckpointOptions(keep_last_n=5)


refused("save_total_limit", Keeps, save_total_limit=2)
refused("save_only_model", save_only_model=True)
data = [{"x": torch.ones(1)}] * 4
best = {"eval_strategy": "steps", "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True}
refused("load_best_model_at_end", evaluated=data, **best)


def kept(limit: int) -> int:
    """Train seven steps, each saved; return how many checkpoints stay."""
    options = {"output_dir": "hf", "use_cpu": True, "report_to": "none", "max_steps": 7}
    args = TrainingArguments(**options, save_steps=1, save_total_limit=limit)
    trainer = OutlastTrainer(model=Model(), args=args, train_dataset=data * 2)
    trainer.training_name = f"kept-{limit}"
    trainer.train(resume_from_checkpoint="outlast")
    (folder,) = Path().glob(f"outlast-runs/*/checkpoints/{trainer.training_name}")
    most, end = max(limit, 2), time.monotonic() + 60
    while len(names := list(folder.glob("step-*"))) > most and time.monotonic() < end:
        time.sleep(0.05)  # they are removed after the commit
    return len(names)


assert kept(1) == 2
assert kept(5) == 5
