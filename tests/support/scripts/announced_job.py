"""Trains on several nodes as a framework does, which saves by its own means where it is told to.

arguments: folder, steps. The folder gets ``saved`` with the step of the checkpoint, ``began.gG`` with the
step that a generation began at, and ``rank-R-of-W.gG`` with the pid after its second step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from outlast.integrations.announcing import AnnouncedLoop

folder, steps, generation = Path(sys.argv[1]), int(sys.argv[2]), os.environ["OUTLAST_GENERATION"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
began = int((folder / "saved").read_text()) if (folder / "saved").exists() else 0
with AnnouncedLoop("a framework") as loop:
    loop.begin(began)
    for step in range(began + 1, steps + 1):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
        loop.step_done(step)
        if loop.should_save:
            if rank == 0:
                (folder / "saving").write_text(str(step))
                (folder / "saving").rename(folder / "saved")
            loop.saved(step)
        if loop.should_stop:
            break
        if step == began + 2:
            (folder / f"began.g{generation}").write_text(str(began))
            (folder / f"rank-{rank}-of-{world}.g{generation}").write_text(str(os.getpid()))
dist.destroy_process_group()
