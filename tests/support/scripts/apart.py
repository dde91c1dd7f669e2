"""Train 60 short steps so that timeouts are learned; then some ranks are busy while the others wait for them.

arguments: trace folder, ranks (joined by commas), sleep or compute, seconds
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import outlast

trace, busy, what, seconds = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], float(sys.argv[4])
rank, generation = int(os.environ["RANK"]), int(os.environ["OUTLAST_GENERATION"])
torch.set_num_threads(1)


def compute() -> None:
    """Compute in a stack that is another one at every look."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        deeper(int(3 * passed) % 50)


def deeper(frames: int) -> int:
    return deeper(frames - 1) if frames else sum(index * index for index in range(10_000))


with outlast.start(save_interval=10_000) as session:
    dist.init_process_group("gloo")
    session.restore(model=torch.nn.Linear(2, 2))
    (trace / f"rank-{rank}-of-{dist.get_world_size()}.g{generation}").write_text(f"{os.getpid()}\n")
    for step in session.steps(80):
        if generation == 1 and step == 60 and str(rank) in busy:
            compute() if what == "compute" else time.sleep(seconds)
        time.sleep(0.01)
        dist.all_reduce(torch.ones(10))
