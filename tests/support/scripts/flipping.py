"""Train on ranks that hold the same; on one of them a bit flips. Each writes what its tripwire said.

flipping.py FOLDER WORLD STEPS [flip=RANK@STEP] [model|optimizer|mesh|apart] [action=raise] [interval=N]

model: a bit of a parameter flips. optimizer: of a moment. mesh: two by two ranks, replicated and sharded.
apart: every rank has other parameters from the beginning. The ranks are forks, so torch is imported once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from outlast.config import TripwireOptions
from outlast.consistency import Tripwire
from outlast.errors import ReplicasDiffer

folder, world, steps, words = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
named = dict(word.split("=", 1) for word in words if "=" in word)
flipped, at = map(int, named.get("flip", "-1@-1").split("@"))


def flip(tensor: torch.Tensor) -> None:
    """Change the lowest bit of an element in place, behind torch's back."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[7] ^= 1


def on_mesh() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (world // 2, 2))
    model = torch.nn.Module()
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    model.part = torch.nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
    model.same = torch.nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Replicate()]))
    return model


def train(rank: int) -> dict[str, object]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(rank if "apart" in words else 0)
    inner = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 32))
    model = on_mesh() if "mesh" in words else inner
    if not {"mesh", "apart"} & set(words):
        model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters())
    records: list[object] = []
    options = TripwireOptions(
        tripwire_interval=int(named.get("interval", "2")),
        tripwire_action=named.get("action", "warn"),
        tripwire_optimizer="optimizer" in words,
    )
    tripwire = Tripwire({"model": model, "optimizer": optimizer}, options, record=records.append)
    said: dict[str, object] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tripwire.begin(0)
            for step in range(steps):
                if not {"mesh", "apart"} & set(words):
                    data = torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
                    model(data).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if (rank, step) == (flipped, at):
                    parameter = model.part.to_local() if "mesh" in words else inner[0].weight
                    flip(optimizer.state[parameter]["exp_avg"] if "optimizer" in words else parameter.data)
                tripwire.after(step + 1)
            tripwire.close()
        except ReplicasDiffer as error:
            said = {"raised": str(error), "ranks": error.ranks, "step": error.step, "agreed": error.agreed}
    own = [str(one.message) for one in caught if str(one.message).startswith("outlast")]
    return {**said, "warnings": own, "records": [dataclasses.asdict(one) for one in records]}


children = []
for rank in range(world):
    child = os.fork()
    if not child:
        try:
            (folder / f"rank-{rank}").write_text(json.dumps(train(rank)))
            sys.stdout.flush()
        finally:
            os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
