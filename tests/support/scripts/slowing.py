"""Trains over gloo; from a step on one rank takes twice as long in one part of a step.

    slowing.py HOW SLOW_RANK FROM STEPS PART

HOW is ``session`` (sections of a session) or ``plain`` (only outlast.progress); PART is compute,
communication, data, none, or noise: all ranks are healthy, each part of a step varies by a tenth (lognormal),
and one in a hundred takes three times as long. All parts sleep, so that the ranks of a busy host are
equally fast.
"""

import contextlib
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import outlast

HOW, SLOW, FROM, STEPS, PART = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
SECONDS = {"compute": 0.05, "communication": 0.02, "data": 0.03}
rank = int(os.environ["RANK"])
now = 0
noise = random.Random(rank)


def work(part: str) -> None:
    factor = 2.0 if part == PART and rank == SLOW and now >= FROM else 1.0
    if PART == "noise":
        factor = noise.lognormvariate(0, 0.1) * (3 if noise.random() < 0.01 else 1)
    time.sleep(SECONDS[part] * factor)


class Samples(Dataset):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, at: int) -> torch.Tensor:
        work("data")
        return torch.ones(16)


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce as DDP does, with a part of this rank's own before."""
    work("communication")
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step(batches, section) -> None:
    with section("data"):
        batch = next(batches)
    with section("forward"):
        work("compute")
        loss = model(batch).square().mean()
    with section("gradients, reduced"):
        loss.backward()
    optimizer.step()


batches = iter(DataLoader(Samples(), batch_size=1))
if HOW == "session":
    with outlast.start(save_interval=1_000_000) as session:
        session.restore(model=model, optimizer=optimizer)
        for at in session.steps(STEPS):
            now = at
            step(batches, session.section)
else:
    for at in range(STEPS):
        now = at
        step(batches, contextlib.nullcontext)
        outlast.progress(at + 1)
dist.destroy_process_group()
