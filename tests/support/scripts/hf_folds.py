"""Trains one model after the other with Transformers' Trainer; hf_folds.py NAMED|PLAIN [MARK].

With MARK the process kills itself once in the second training.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from outlast.integrations.transformers import OutlastTrainer

named = sys.argv[1] == "NAMED"
mark = Path(sys.argv[2]) if len(sys.argv) > 2 else None


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        found = self.line(x).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


class Counting(TrainerCallback):
    def __init__(self, fold: int) -> None:
        self.fold, self.trained = fold, 0

    def on_step_end(self, args, state, control, **_):
        self.trained += 1
        if self.fold == 1 and state.global_step == 5 and mark is not None and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


for fold in range(3):
    torch.manual_seed(fold)
    counting = Counting(fold)
    trainer = OutlastTrainer(
        model=Net(),
        args=TrainingArguments(
            f"out-{fold}",
            per_device_train_batch_size=4,
            max_steps=8 - fold,
            save_steps=3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"x": torch.randn(3), "labels": torch.tensor(float(at))} for at in range(40)],
        callbacks=[counting],
    )
    if named:
        trainer.training_name = f"fold-{fold}"
    trainer.train(resume_from_checkpoint="outlast")
    state = trainer.model.line.weight.double().sum().item().hex()
    drawn = torch.rand(1).item().hex()
    print("fold", fold, trainer.state.global_step, counting.trained, state, drawn, flush=True)
