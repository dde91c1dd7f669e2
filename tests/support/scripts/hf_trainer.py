"""Trains a tiny GPT-2 with Transformers' Trainer: accumulation, a scheduler, dropout, an evaluation.

arguments: folder of results, "plain", "callback" or "outlast", the step at which rank 0 of the first
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

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

folder, way, fatal, pace = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank = int(os.environ.get("RANK", "0"))
generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Samples(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Traced(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if fatal and state.global_step == fatal and rank == 0 and generation == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **_):
        with open(folder / f"steps-{rank}", "a") as file:
            print(json.dumps({"generation": generation, "step": state.global_step}), file=file, flush=True)
        time.sleep(pace)


args = TrainingArguments(
    output_dir=str(folder / "hf"),
    use_cpu=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=2 if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0.3,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    save_steps=3,
    logging_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    report_to="none",
    disable_tqdm=True,
    dataloader_num_workers=0,
)
torch.manual_seed(7)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2))
callbacks: list[TrainerCallback] = [Traced()]
resume: object = get_last_checkpoint(args.output_dir) if Path(args.output_dir).exists() else None
kind = Trainer
if way == "callback":
    from outlast.integrations.transformers import OutlastCallback

    callbacks.append(OutlastCallback())
if way == "outlast":
    from outlast.integrations.transformers import OutlastTrainer

    kind, resume = OutlastTrainer, "outlast"
trainer = kind(
    model=model, args=args, train_dataset=Samples(44), eval_dataset=Samples(8), callbacks=callbacks
)
trainer.train(resume_from_checkpoint=resume)
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.contiguous().numpy().tobytes())
rate = trainer.lr_scheduler.get_last_lr() if trainer.lr_scheduler else []
said = {"weights": digest.hexdigest(), "step": trainer.state.global_step, "rate": rate}
said["evaluations"] = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
(folder / f"done-{rank}").write_text(json.dumps(said))
