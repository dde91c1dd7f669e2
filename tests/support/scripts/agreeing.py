"""Train a small model on several nodes; rank 0 leaves a digest of every bit of it.

arguments: folder, steps, steps between two checkpoints (5), a slow rank (none), its first slow step (0), and
for how many milliseconds it sleeps in a slow step (200; others sleep for 20), and in torch.matmul (0)

The folder gets ``rank-R-of-W.gG`` with the pid after the second step of a generation, ``steps-R`` with a line
for each step that is begun, and ``digest`` at the end. No step is begun while there is a file ``hold`` in it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import outlast

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
interval = int(sys.argv[3]) if len(sys.argv) > 3 else 5
slow, slow_from, slow_for, sick_for = [*map(int, sys.argv[4:]), *(-1, 0, 200, 0)[len(sys.argv[4:]) :]]
torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mark = folder / f"rank-{rank}-of-{world}.g{os.environ['OUTLAST_GENERATION']}"
# DDP groups its gradients anew after the first iteration, unless it looks for unused parameters.
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = 0
multiply = torch.matmul


def slowly(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply as a sick device does."""
    time.sleep(sick_for / 1000)
    return multiply(left, right)


if rank == slow and sick_for:
    torch.matmul = slowly
with outlast.start(save_interval=interval) as session, open(folder / f"steps-{rank}", "a") as begun:
    session.restore(model=model, optimizer=optimizer)
    while (folder / "hold").exists():
        time.sleep(0.02)
    for step in session.steps(steps):
        print(step, file=begun, flush=True)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(4, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep((slow_for if rank == slow and step >= slow_from else 20) / 1000)
        done += 1
        if done == 2:
            mark.write_text(str(os.getpid()))
if rank == 0:
    bits = b"".join(bytes(one.detach().view(torch.uint8).flatten().tolist()) for one in model.parameters())
    (folder / "digest").write_text(hashlib.sha256(bits).hexdigest())
dist.destroy_process_group()
