"""A Transformers Trainer for bench/trainers.py: a tiny GPT-2, steps of a given length; rank 0 times them.

arguments: folder of results, way, number of steps, seconds that a step sleeps, steps between checkpoints
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

folder, way = Path(sys.argv[1]), sys.argv[2]
steps, length, save = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Timed(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        time.sleep(length)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


args = TrainingArguments(
    output_dir=str(folder / "checkpoints"),
    use_cpu=True,
    max_steps=steps,
    per_device_train_batch_size=2,
    save_steps=save,
    logging_steps=50,
    report_to="none",
    disable_tqdm=True,
)
torch.manual_seed(0)
shape: dict[str, Any] = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
timed = Timed()
callbacks: list[TrainerCallback] = [timed]
kind, resume = Trainer, None
if way == "callback":
    from outlast.integrations.transformers import OutlastCallback

    callbacks.append(OutlastCallback())
if way == "storage":
    from outlast.integrations.transformers import OutlastTrainer

    kind, resume = OutlastTrainer, "outlast"
trainer = kind(model=model, args=args, train_dataset=Samples(), callbacks=callbacks)
trainer.train(resume_from_checkpoint=resume)
if trainer.is_world_process_zero():
    seconds = [after - before for before, after in pairwise(timed.ends)]
    (folder / "seconds.json").write_text(json.dumps(seconds))
dist.barrier()
if way == "plain":
    os._exit(0)  # an exit of torch 2.13 with gloo aborts now and then ("terminate called")
