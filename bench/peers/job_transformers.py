"""A Transformers Trainer job for bench/frameworks.py: a tiny GPT-2 from a configuration."""

import os
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

FOLDER, RANK = sys.argv[1], os.environ["RANK"]


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        tokens = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Trace(TrainerCallback):
    def on_step_end(self, _, state, *__, **___):
        with open(f"{FOLDER}/trace-{RANK}", "a") as file:
            file.write(f"{os.getpid()} {state.global_step} {time.monotonic()}\n")


config = GPT2Config(
    vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
arguments = TrainingArguments(
    output_dir=f"{FOLDER}/checkpoints",
    max_steps=100_000,
    per_device_train_batch_size=2,
    save_steps=20,
    save_total_limit=2,
    logging_steps=50,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Data(), callbacks=[Trace()])
folder = str(arguments.output_dir)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if os.path.isdir(folder) else None)
