"""Trains in a function that NVRx's Wrapper restarts, with a plug-in of each kind and checkpoints of its own.

arguments: folder, steps, restarts that are allowed, [raise@rank@step@iteration]

It knows nothing of outlast.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.nn.parallel import DistributedDataParallel

folder, total, allowed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rank, kept = int(os.environ["RANK"]), folder / "checkpoint.pt"
torch.set_num_threads(1)


def write(kind: str, **more: object) -> None:
    with open(folder / f"rank-{rank}", "a") as log:
        log.write(json.dumps({"kind": kind, "pid": os.getpid(), **more}) + "\n")


class Note:
    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        write(type(self).__name__, iteration=state.iteration, rank=state.rank, world=state.world_size)
        return state


class Begins(Note, inprocess.initialize.Initialize):
    pass


class Aborts(Note, inprocess.abort.Abort):
    pass


class Completes(Note, inprocess.completion.Completion):
    pass


class Leaves(Note, inprocess.terminate.Terminate):
    pass


@inprocess.Wrapper(
    initialize=inprocess.Compose(Begins(), inprocess.initialize.RetryController(max_iterations=allowed + 1)),
    abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), Aborts()),
    finalize=inprocess.finalize.ThreadedFinalize(timedelta(seconds=60), write, ("finalized",)),
    health_check=inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=60)),
    completion=Completes(),
    terminate=Leaves(),
    soft_timeout=timedelta(seconds=60),
    hard_timeout=timedelta(seconds=90),
    barrier_timeout=timedelta(seconds=120),
)
def train(steps: int, call: inprocess.CallWrapper | None = None) -> str:
    assert call is not None
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if kept.exists():
        found = torch.load(kept)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = found["done"]
    write("trains", done=done, iteration=call.iteration)
    while done < steps:
        if f"raise@{rank}@{done}@{call.iteration}" in sys.argv:
            raise RuntimeError(f"boom at {done}")
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * done + rank))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % 5 == 0:
            if rank == 0:
                whole = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "done": done,
                }
                torch.save(whole, folder / "part")
                with call.atomic():
                    os.replace(folder / "part", kept)
            dist.barrier()
    dist.destroy_process_group()
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()


write("done", digest=train(total))
