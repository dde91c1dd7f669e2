"""Train a small model on each rank of a gloo group; on ranks for which FILE-RANK exists a bit flips, once.

replayed.py STEPS INTERVAL FILE@STEP [random]

random: the data are other ones each time, so no replay can equal the run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast

steps, interval = int(sys.argv[1]), int(sys.argv[2])
file, at = sys.argv[3].split("@")
trigger = Path(f"{file}-{os.environ['RANK']}")
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with outlast.start(save_interval=interval, checkpoints=outlast.CheckpointOptions(keep_last_n=100)) as session:
    session.restore(model=model, optimizer=optimizer)
    for step in session.steps(steps):
        seed = time.time_ns() if "random" in sys.argv else 1000 * step
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == int(at) and trigger.exists():
            trigger.unlink()
            with torch.no_grad():
                model.weight.view(torch.int32).view(-1)[7] ^= 1 << 16
dist.destroy_process_group()
