"""Train on two ranks in a resilient function that keeps something outside; rank 1 raises once or twice.

reusing.py TRACE TIMES [model] [group] [threads]

TIMES: so many generations fail, at step 2, before anything is saved. model: it is built outside. group: so is
the process group. threads: the function begins one, and a process, and ends neither.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import outlast
from outlast.config import CheckpointOptions
from outlast.inprocess import CallWrapper

trace, times, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
rank = int(os.environ["RANK"])


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


if "group" in words:
    dist.init_process_group("gloo")
outside = build() if "model" in words else None


@outlast.resilient
def train(call: CallWrapper) -> torch.nn.Module:
    if "threads" in words:
        threading.Thread(target=time.sleep, args=(3600,), name="left behind", daemon=True).start()
        multiprocessing.Process(target=time.sleep, args=(3600,), name="child", daemon=True).start()
    options = CheckpointOptions(save_interval=1000, non_persistent_save_interval=1000)
    with outlast.start(checkpoints=options) as session:
        dist.init_process_group("gloo")
        inner = outside or build()
        model = torch.nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.restore(model=model, optimizer=optimizer)
        for step in session.steps(6):
            model(torch.full((2, 8), float(step + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step, rank) == (2, 1) and int(os.environ["OUTLAST_GENERATION"]) <= times:
                raise RuntimeError(f"boom {os.environ['OUTLAST_GENERATION']}")
        dist.destroy_process_group()
    return inner


weights = train().weight.detach().double().sum().item().hex()
(trace / f"rank-{rank}").write_text(weights)
