"""Train on a device, and leave a digest at the end: on_device.py DEVICE FOLDER WHAT

restarts: DDP over gloo; a rank of the first generation kills itself.
states: one rank with bfloat16, FSDP2, a fused AdamW and dropout kills itself. calm: the same without a fault.
hang: a rank sleeps, and the others wait where they read a number of the device.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast._torch_compat import gpu_sleep

STEPS, FAULT_AT, CULPRIT = 60, 45, 1
device, folder, what = torch.device(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
rank, generation = int(os.environ["RANK"]), int(os.environ["OUTLAST_GENERATION"])
torch.set_num_threads(1)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(*layers).to(device)
    if what not in ("states", "calm"):
        wrapped = DistributedDataParallel(model)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    model.to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    options = {"fused": True, "capturable": device.type == "cuda"}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def strike() -> None:
    if what in ("restarts", "states") and rank == min(CULPRIT, dist.get_world_size() - 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        if rank == CULPRIT:
            time.sleep(3600)
        number = torch.ones(1, device=device)
        if device.type == "cuda":
            gpu_sleep(10**13)  # as a kernel of NCCL that waits for a peer
        else:
            dist.all_reduce(number)
        number.item()


def octets(value: object) -> bytes:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return repr(value).encode()


with outlast.start(save_interval=10) as session:
    both = device.type == "cuda" and what in ("states", "calm")
    dist.init_process_group("cpu:gloo,cuda:nccl" if both else "gloo")
    model, optimizer = training()
    torch.manual_seed(rank)
    kind = next(model.parameters()).dtype
    session.restore(model=model, optimizer=optimizer)
    for step in session.steps(STEPS):
        if generation == 1 and step == FAULT_AT:
            strike()
        loss = model(torch.randn(8, 64, device=device, dtype=kind)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256()
    for one in model.state_dict().values():
        found.update(octets(one))
    for state in optimizer.state.values():
        for name in sorted(state):
            found.update(octets(state[name]))
    found.update(octets(torch.randn(8, device=device)))
    (folder / f"digest-{rank}").write_text(found.hexdigest())
    dist.destroy_process_group()
