"""Trains twelve steps of a DeepSpeed engine, two micro-batches each; it saves itself after each third step.

arguments: folder of results, WAY (plain; announced: as docs/how-to/deepspeed.md has it), the step after which
           rank 0 of the first generation is killed (0: none), the seconds that a step takes at least
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each start looks for a compiler
folder, way, fatal, pace = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rank, checkpoints = int(os.environ["RANK"]), folder / "checkpoints"
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": 2},
}
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.load_checkpoint(checkpoints)


class Alone:
    """Nobody is told and nobody asks."""

    should_save = should_stop = False

    def step_done(self, step: int) -> None:
        """Tell nobody."""

    saved = step_done


asks: Any = contextlib.nullcontext(Alone())
if way == "announced":
    from outlast.integrations.announcing import AnnouncedLoop

    asks = AnnouncedLoop()
with asks as job:
    batch = 2 * engine.global_steps
    while engine.global_steps < 12:
        draws = torch.Generator().manual_seed(100 * batch + rank)
        batch += 1
        engine.backward(engine(torch.randn(2, 4, generator=draws)).square().mean())
        engine.step()
        if engine.was_step_applied():
            done = engine.global_steps
            with open(folder / f"steps-{rank}", "a") as file:
                print(json.dumps({"step": done}), file=file, flush=True)
            job.step_done(done)
            if done % 3 == 0 or job.should_save:
                engine.save_checkpoint(checkpoints)
                job.saved(done)
            if job.should_stop:
                break
            if fatal == done and first and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pace)
octets = b"".join(one.detach().numpy().tobytes() for one in engine.module.parameters())
ended = {"step": engine.global_steps, "weights": hashlib.sha256(octets).hexdigest()}
(folder / f"done-{rank}").write_text(json.dumps(ended))
