"""Worlds of forked ranks, one after the other: each saves to a folder, or loads what an earlier one saved.

resharding.py FOLDER WORLD...

A world is LAYOUT:RANKS:DEED, "fsdp:4:save". It prints what each of its ranks has in the end.
"""

from __future__ import annotations

import hashlib
import json
import os
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

from outlast import _torch_compat
from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.content.state import apply, require_fit
from outlast.checkpoint.load import reshard
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import StoreExchange, SystemClock

WIDTH, HIDDEN, STEPS = 5, 6, 3  # no number of ranks divides all of them
NAME = copy_name(STEPS, 1)


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


def train(called: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    loss = torch.zeros(())
    for _ in range(steps):
        loss = called(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def load(folder: Path, identity: Identity, state: dict[str, object]) -> reshard.Received:
    with DirectoryTier(folder).open(NAME) as copy:
        received = reshard.open_part(copy, NAME, read_manifest(copy, NAME)[1], identity, state)
        require_fit(state, received.saved, received.kinds, received.parameters)
        landing = received.fill(copy, state)
    if landing is not None:
        landing.land()
        landing.close()
    left: list[Any] = [None] * identity.world_size
    dist.all_gather_object(left, received.left)
    reshard.require_claimed(left)
    apply(state, received.saved, received.random, received.parameters)
    return received


def live(folder: Path, rank: int, layout: str, ranks: int, deed: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(folder / f"store-{layout}-{ranks}-{deed}"), ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    model, called = build(layout, ranks, seed=0 if deed == "save" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    torch.manual_seed(3)
    if deed == "save":
        train(called, optimizer, STEPS)
        inner = _torch_compat.default_store()
        assert inner is not None
        saver = Checkpointer(
            folder,
            Identity("run-a", 1, rank, ranks),
            StoreExchange(inner, rank, ranks, 1),
            CheckpointOptions(timeout=60.0),
            SystemClock(),
            lambda _: None,
        )
        assert saver.save(STEPS, state, "a test", {"sample": 17} if rank == 0 else None)
        return {"content": content(model, optimizer)}
    received = load(folder, Identity("run-a", 2, rank, ranks), state)
    found = content(model, optimizer)
    loss = train(called, optimizer, 1)
    return {"content": found, "cursor": received.cursor, "loss": loss}


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
                answer = {"error": f"{type(error).__name__}: {error}"}
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
