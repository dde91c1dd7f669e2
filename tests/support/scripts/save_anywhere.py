"""Train, and call session.save at some place; save_anywhere.py RUN WHERE TIER [STATE-OF-KILL] [RANK].

RUN is "-" where a launcher names the folder. TIER is "disk", "memory" (each step is saved there) or "direct"
(async_save is off). With a file STATE-OF-KILL the process kills itself two steps after the call, once. With
RANK that rank alone calls it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import outlast

run_dir, where, tier = sys.argv[1:4]
mark = Path(sys.argv[4]) if len(sys.argv) > 4 and sys.argv[4] else None
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
calls = len(sys.argv) < 6 or int(sys.argv[5]) == rank
TOTAL, AT, KILL_AT = (12 if world == 1 else 60), 5, 7
accumulates = 4 if "accumulates" in where else 1  # micro-batches for each step of the optimizer
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
average = {"weight": model[0].weight.detach().clone()}
seen: dict[str, list[int]] = {"samples": []}
batches = outlast.Batches([torch.full((4,), float(one)) for one in range(40)], 4 * world, 4, seed=3)
options = {
    "disk": outlast.CheckpointOptions(non_persistent_save_interval=10**6),
    "memory": outlast.CheckpointOptions(non_persistent_save_interval=1),
    "direct": outlast.CheckpointOptions(async_save=False, timeout=30.0),
}


class Loader:
    """Has a place of its own in data, as a stateful loader has."""

    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> int:
        self.place += 1
        return self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


loader = Loader()


def train(step: int, session: Any) -> None:
    if where in ("first", "twice") and step == AT and calls:
        session.save()
    shift = next(loader)
    (micro,) = next(batches)
    if where == "own_fetched" and step == AT and calls:
        session.save()
    seen["samples"].extend(micro.samples)
    with micro.sync(model):
        (model(micro.data + shift).square().mean() * micro.weight).backward()
    if world > 1:
        for one in model.parameters():
            dist.all_reduce(one.grad)
    if (step + 1) % accumulates == 0:
        optimizer.step()
        optimizer.zero_grad()
    if where in ("middle", "own_middle") and step == AT and calls:
        session.save()
    if where == "wait" and step == AT:
        session.save(wait=True)
    scheduler.step()
    average["weight"].mul_(0.9).add_(model[0].weight.detach(), alpha=0.1)
    if where in ("last", "twice") and step == AT and calls:
        session.save()
    if world > 1:
        time.sleep(0.05)  # ranks agree beside training, and the test wants to see it before the end
    saved = world == 1 or list(Path(os.environ.get("OUTLAST_RUN_DIR", ".")).glob("checkpoints/step-*"))
    if mark is not None and step >= KILL_AT and saved and rank == 0 and not mark.exists():
        mark.touch()
        while tier == "disk" and world == 1 and not list(Path(run_dir).glob("checkpoints/step-*")):
            time.sleep(0.01)  # the writer is beside training
        os.kill(os.getpid(), signal.SIGKILL)


def loop(session: Any) -> None:
    if where == "after":
        for step in session.steps(AT + 1):
            train(step, session)
        assert not calls or session.save(wait=True)
    if where == "changed":
        for step in session.steps(AT + 1):
            train(step, session)
        average["weight"].zero_()
        session.save()
    if where == "break":
        for step in session.steps(TOTAL):
            train(step, session)
            if step == AT:
                break
        session.save()
    if where == "caught":
        try:
            for step in session.steps(TOTAL):
                train(step, session)
                if step == AT:
                    raise RuntimeError("of a step")
        except RuntimeError:
            session.save()
    if not where.startswith("own"):
        for step in session.steps(TOTAL):
            train(step, session)
        return
    done = session.completed_steps
    while done < TOTAL and not session.should_stop:
        train(done, session)
        done = session.step_done(done + 1)
        if done == AT + 1 and where in ("own", "own_twice") and calls:
            assert session.save(wait=True)
            assert where == "own" or session.save()


if world > 1:
    dist.init_process_group("gloo")
folder = None if run_dir == "-" else run_dir
with outlast.start(folder, save_interval=10**6, checkpoints=options[tier]) as session:
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
    restored = session.restore(**parts, batches=batches, loader=loader, seen=seen)
    if where == "before" and calls:
        assert session.save(wait=True)
    loop(session)
digest = hashlib.sha256()
for one in (*model.state_dict().values(), average["weight"]):
    digest.update(one.detach().numpy().tobytes())
line = {"restored": restored, "state": digest.hexdigest(), "samples": seen["samples"], "place": loader.place}
print(f"ended {json.dumps(line)}", flush=True)
if world > 1:
    dist.destroy_process_group()
