"""Trains with OutlastTrainer to a step, on as many ranks as there are.

arguments: folder of results, the last step
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from outlast.integrations.transformers import OutlastTrainer

folder, steps = Path(sys.argv[1]), int(sys.argv[2])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


class Traced(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        with open(folder / f"steps-{os.environ['RANK']}", "a") as file:
            print(state.global_step, file=file)


torch.manual_seed(0)
data = [{"x": torch.randn(3), "labels": torch.tensor(float(i))} for i in range(40)]
args = TrainingArguments(
    str(folder / "hf"),
    per_device_train_batch_size=2,
    max_steps=steps,
    save_steps=4,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = OutlastTrainer(Net(), args, train_dataset=data, callbacks=[Traced()])
trainer.train(resume_from_checkpoint="outlast")
