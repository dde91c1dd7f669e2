"""Train over gloo with a guard in the loop; write each step, and at the end what the model came to.

guarded.py TRACE RUN_DIR STEPS [nan|inf|large|far|leave|stop|wait@RANK@STEP[-STEP]] [sharded] [micro=N]
    [numerics=JSON] [interval=STEPS] [norms] [count] [bare] [past] [memory] [hang@RANK@STEP] [config=JSON]

RANK -1: all. nan: the loss of a micro-batch is none. inf: the loss is finite, the gradients are not. large:
these are finite, their squares are not. far: the loss is said to be a hundred times what it is. leave: no
batch is run. stop: the rank asks to stop. wait: a pause, so that signals can be sent. sharded: FSDP2.
norms: write the norm of the gradients, too. count: count the collectives of some steps. bare: no guard, no
votes. past: step 3 goes past the guard. memory: save every step in memory. hang: sleep after that step if
it was done before. config: of preemption.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast.compat import ShutdownHandler
from outlast.config import NumericsOptions, PreemptionOptions

trace, run_dir, total, words = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
named = dict(word.split("=", 1) for word in words if "=" in word)
rank = int(os.environ["RANK"])
trace.mkdir(parents=True, exist_ok=True)
log = open(trace / f"rank-{rank}", "a", buffering=1)  # noqa: SIM115
COUNTED = range(10, 30)


def write(**line: object) -> None:
    log.write(json.dumps(line) + "\n")


def planned(what: str, step: int) -> bool:
    for word in words:
        kind, *place = word.split("@")
        if kind == what and int(place[0]) in (rank, -1):
            first, _, last = place[1].partition("-")
            if int(first) <= step <= int(last or first):
                return True
    return False


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    if "sharded" not in words:
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def loss_of(model: torch.nn.Module, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    found = model(torch.randn(4, 16, generator=generator))
    if planned("inf", step):
        found.register_hook(lambda gradient: gradient * float("inf"))
    if planned("large", step):
        found.register_hook(lambda gradient: gradient * 1e25)
    loss = found.square().mean()
    return loss * float("nan") if planned("nan", step) and part == 0 else loss


def train(model: torch.nn.Module, step: int, guard: outlast.Guard | None) -> None:
    for part in range(int(named.get("micro", "1"))):
        loss = loss_of(model, step, part)
        loss.backward()
        if guard is not None:
            guard.validate(loss * 100 if planned("far", step) else loss)


def true_norm(model: torch.nn.Module) -> float:
    """Return the norm of all gradients from whole gradients."""
    whole = [one.grad for one in model.parameters() if one.grad is not None]
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in whole]
    return float(torch.stack([one.double().norm() for one in whole]).norm())


class Counter:
    """Counts the collectives of some steps."""

    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def begin(self, step: int) -> None:
        if "count" in words and step == COUNTED.start:
            self.profiler.start()

    def end(self, step: int) -> None:
        if "count" in words and step == COUNTED.stop - 1:
            self.profiler.stop()
            found = [one.name for one in self.profiler.events() if one.name.startswith("c10d::")]
            write(collectives={name: found.count(name) for name in set(found)})


def run_step(model: torch.nn.Module, step: int, guard: outlast.Guard | None) -> bool:
    """Run forward and backward; return whether the optimizer is to run."""
    if guard is None or ("past" in words and step == 3):
        train(model, step, None)
        return True
    while guard.should_run_forward_backward():
        if not planned("leave", step):
            train(model, step, guard)
    if "norms" in words:
        write(norm=guard.grad_norm, true_norm=true_norm(model), loss=guard.loss)
    return guard.accepted


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "bare" in words:
        ShutdownHandler(options=PreemptionOptions(enable_exit_handler=False)).register()
    elif "config" in named:
        ShutdownHandler(options=PreemptionOptions(**json.loads(named["config"]))).register()
    each = outlast.CheckpointOptions(non_persistent_save_interval=1 if "memory" in words else None)
    with outlast.start(
        run_dir, save_interval=int(named.get("interval", "100000")), checkpoints=each
    ) as session:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = NumericsOptions(**json.loads(named.get("numerics", "{}")))
        guard = None if "bare" in words else outlast.Guard(model, optimizer, options)
        state = {} if guard is None else {"guard": guard}
        write(restored=session.restore(model=model, optimizer=optimizer, **state))
        counter, furthest = Counter(), -1
        for step in session.steps(total):
            counter.begin(step)
            accepted = run_step(model, step, guard)
            if accepted:
                optimizer.step()
            optimizer.zero_grad()
            counter.end(step)
            write(step=step, accepted=accepted)
            if planned("hang", step) and step < furthest:
                write(hangs=step)
                time.sleep(3600)
            furthest = max(furthest, step)
            if planned("stop", step):
                session.stop_soon()
            if planned("wait", step):
                time.sleep(0.02)
        values = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
        finite = all(bool(torch.isfinite(one).all()) for one in values)
        content = [one.detach().double().sum().item().hex() for one in values]
        write(ended=session.completed_steps, content=content, finite=finite, preempted=session.preempted)
    dist.destroy_process_group()


main()
