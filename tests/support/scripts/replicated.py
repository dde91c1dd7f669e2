"""Train with DDP and a BatchNorm whose statistics every rank has for itself, saving each step in memory.

replicated.py TRACE STEPS [kill=RANK@STEP] [hold=STEP]

kill: that rank of generation 1 ends itself with SIGKILL after that step. hold: wait after that step until
TRACE/go is there. Each rank leaves a digest of its last state.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from xxhash import xxh3_128

import outlast

trace, steps = Path(sys.argv[1]), int(sys.argv[2])
named = dict(word.split("=") for word in sys.argv[3:])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = int(os.environ["OUTLAST_GENERATION"])
killed, at = map(int, named.get("kill", "-1@-1").split("@"))
held = int(named.get("hold", "-9"))
trace.mkdir(parents=True, exist_ok=True)
(trace / f"rank-{rank}-of-{world}.g{generation}").write_text(str(os.getpid()))
torch.set_num_threads(1)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = xxh3_128()
    for one in [
        *model.state_dict().values(),
        *(one for each in optimizer.state.values() for one in each.values()),
    ]:
        found.update(one.detach().contiguous().numpy())
    return str(found.hexdigest())


def leave(name: str, text: str) -> None:
    (trace / f".{name}").write_text(text)
    (trace / f".{name}").replace(trace / name)


options = outlast.CheckpointOptions(save_interval=4, non_persistent_save_interval=1)
with outlast.start(checkpoints=options) as session:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = 20_000
    layers = [torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 16)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.restore(model=model, optimizer=optimizer)
    for step in session.steps(steps):
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (rank, step, generation) == (killed, at, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == held + 1:
            leave(f"held-{rank}.g{generation}", json.dumps({"step": step}))
            while not (trace / "go").exists():
                time.sleep(0.01)
    leave(f"final-{rank}", digest(model, optimizer))
    dist.destroy_process_group()
