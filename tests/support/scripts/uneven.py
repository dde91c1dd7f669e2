"""Trains on outlast.Batches over gloo, and writes down samples, shares and how exact the gradients are.

    uneven.py OUT STEPS GLOBAL_BATCH MICRO_BATCH [SLOW_RANK FROM HEALS SECONDS]

Each rank appends a line for each step to OUT/<rank>.jsonl. A micro-batch takes SECONDS, from step FROM on
twice as long on SLOW_RANK. With HEALS above 0, that ends after as many steps with uneven shares, and the
script ends when they are even again. In the environment SAMPLES is the size of the data set, WORKERS the
number of processes that read it. OUT/<rank>.ends has their exit codes when they are terminated at the end.
"""

import json
import multiprocessing
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import outlast

OUT, STEPS, GLOBAL, MICRO = sys.argv[1], *map(int, sys.argv[2:5])
SLOW, FROM, HEALS = map(int, sys.argv[5:8]) if len(sys.argv) > 5 else (-1, 0, 0)
SECONDS = float(sys.argv[8]) if len(sys.argv) > 8 else 0.0
SIZE, WORKERS = int(os.environ.get("SAMPLES", "1000")), int(os.environ.get("WORKERS", "0"))


class Points(Dataset):
    """Points that only their numbers say."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([at % 7, at % 11, 1.0], dtype=torch.double), torch.tensor([at % 5.0]).double()


def loss_of(model: torch.nn.Module, data: list[torch.Tensor]) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().mean()


def inexact(model: DistributedDataParallel, numbers: list[int]) -> float:
    """Return how far the gradients are from those of the whole batch on one rank, relative to their size."""
    points = [Points()[one] for one in numbers]
    whole = [torch.stack(column) for column in zip(*points, strict=True)]
    expected = torch.autograd.grad(loss_of(model.module, whole), list(model.module.parameters()))
    pairs = zip(model.module.parameters(), expected, strict=True)
    return max(float((one.grad - other).abs().max() / (1 + other.abs().max())) for one, other in pairs)


torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(3, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
batches = outlast.Batches(Points(), GLOBAL, MICRO, num_workers=WORKERS)
uneven = 0

with open(f"{OUT}/{rank}.jsonl", "a") as log, outlast.start(save_interval=1_000_000) as session:
    session.restore(model=model, optimizer=optimizer, batches=batches)
    for step in session.steps(STEPS):
        began = time.monotonic()
        even = len(set(batches.shares)) == 1
        uneven += not even
        healed = 0 < HEALS <= uneven
        if healed and even:
            break
        mine = next(batches)
        for micro in mine:
            with micro.sync(model):
                time.sleep(SECONDS * (2 if rank == SLOW and step >= FROM and not healed else 1))
                (loss_of(model, micro.data) * micro.weight).backward()
        taken = [one for micro in mine for one in micro.samples]
        line = {"step": step, "epoch": batches.epoch, "samples": taken, "world": world, "shares": len(mine)}
        if not SECONDS or step % 10 == 0:
            everyone = [None] * world
            dist.all_gather_object(everyone, taken)
            line["inexact"] = inexact(model, [one for some in everyone for one in some])
        optimizer.step()
        optimizer.zero_grad()
        log.write(json.dumps({**line, "seconds": time.monotonic() - began}) + "\n")
        log.flush()
dist.destroy_process_group()
readers = multiprocessing.active_children()
for one in readers:
    one.terminate()
    one.join(60.0)
with open(f"{OUT}/{rank}.ends", "w") as file:
    json.dump([one.exitcode for one in readers], file)
