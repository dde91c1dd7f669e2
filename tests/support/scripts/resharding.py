"""Worlds of forked ranks, one after the other: each saves to a run, or loads what an earlier one saved.

resharding.py FOLDER WORLD...

A world is LAYOUT:RANKS:DEED, "fsdp:4:save". It prints what each rank has in the end. With "save+own" and
"load+own" each rank has a number of its own, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import outlast

WIDTH, HIDDEN, STEPS = 5, 6, 3  # no number of ranks divides all of them


def build(layout: str, ranks: int, seed: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the model as its state is saved, and as it is called."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, 2), torch.nn.LayerNorm(2)
    )
    if layout == "plain":
        return model, model
    if layout == "ddp":
        return model, DistributedDataParallel(model)
    if layout == "fsdp":
        return model, fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    if layout == "hsdp":
        names = ("replicas", "parts")
        return model, fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names))
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, fully_shard(model, mesh=mesh["dp"])


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    content = bytes(whole.contiguous().reshape(-1).view(torch.uint8).tolist())
    return hashlib.sha256(f"{whole.dtype}{list(whole.shape)}".encode() + content).hexdigest()


def content(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {f"model.{key}": digest(tensor) for key, tensor in model.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{key}": digest(tensor) for key, tensor in entries.items()}
    return found


def train(called: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = called(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def live(folder: Path, rank: int, layout: str, ranks: int, deed: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    meeting = dist.FileStore(str(folder / f"store-{layout}-{ranks}-{deed}"), ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    saves, own = deed.startswith("save"), deed.endswith("own")
    model, called = build(layout, ranks, seed=0 if saves else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = {"sample": 17 if saves else 0}
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "place": place}
    if own:
        state["own"] = {"number": torch.full((2,), float(rank) if saves else -1.0)}
    torch.manual_seed(3)
    if layout == "ddp":  # no random state differs between ranks; a fork has a new one of random's
        random.seed(3)
    options = outlast.CheckpointOptions(async_save=False, timeout=60.0)
    with outlast.start(str(folder / "run"), save_interval=10**6, checkpoints=options) as session:
        restored = session.restore(**state)
        while saves and session.completed_steps < STEPS:
            train(called, optimizer)
            session.step_done(session.completed_steps + 1)
        assert not saves or session.save()
        found = content(model, optimizer)
        if own:
            found["own"] = str(state["own"]["number"].tolist())
        more = {"restored": restored, "place": place, "loss": 0.0 if saves else train(called, optimizer)}
    return {"content": found, **more}


def run(folder: Path, layout: str, ranks: int, deed: str) -> list[Any]:
    """Fork the ranks of one world and return what each said."""
    pipes = []
    for rank in range(ranks):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                answer = live(folder, rank, layout, ranks, deed)
            except BaseException as error:  # noqa: BLE001 - the last frame of this process
                traceback.print_exc()
                answer = {"error": type(error).__name__, "text": str(error)}
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
    answers = []
    for reader in pipes:
        with open(reader, "rb") as stream:
            answers.append(json.loads(stream.read() or b'"died"'))
    for _ in range(ranks):
        os.wait()
    return answers


def main() -> None:
    folder = Path(sys.argv[1])
    for world in sys.argv[2:]:
        layout, ranks, deed = world.split(":")
        print(json.dumps(run(folder, layout, int(ranks), deed)), flush=True)


if __name__ == "__main__":
    main()
