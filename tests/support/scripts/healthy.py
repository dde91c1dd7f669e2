"""Train with DDP over gloo, and write after each step how many collectives of each kind there have been.

healthy.py TRACE STEPS [guard] [seconds=N] [save@RANK@STEP]

guard: with a guard's loop. seconds: between two saves. save: that rank asks for a save in that step.
A rank also asks for a save once TRACE/ask-RANK is there, from a thread, whatever its main thread does.
A line has the collectives of the step: of training (in the default group, within the step) and of all groups
from the end of one step to the end of the next.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast

trace, steps, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
named = dict(word.split("=", 1) for word in words if "=" in word)
rank = int(os.environ["RANK"])
CPU = torch.device("cpu")


def collectives() -> tuple[int, int]:
    """Return how many this rank has begun so far: in the default group, in all."""
    groups = list(dist.distributed_c10d._world.pg_map)
    numbers = [group._get_backend(CPU)._get_sequence_number_for_group() for group in groups]
    return numbers[groups.index(dist.group.WORLD)], sum(numbers)


def ask(session: outlast.Session) -> None:
    """Ask for a save once a file says so."""
    while not (trace / f"ask-{rank}").exists():
        time.sleep(0.02)
    session.save_soon()


def main() -> None:
    torch.set_num_threads(1)
    trace.mkdir(parents=True, exist_ok=True)
    log = open(trace / f"rank-{rank}", "a", buffering=1)  # noqa: SIM115
    seconds = float(named["seconds"]) if "seconds" in named else None
    interval = None if seconds else 100_000
    with outlast.start(save_interval=interval, save_interval_seconds=seconds) as session:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(16, 16), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        guard = outlast.Guard(model, optimizer) if "guard" in words else None
        state = {"model": model, "optimizer": optimizer} | ({"guard": guard} if guard else {})
        session.restore(**state)
        threading.Thread(target=ask, args=(session,), daemon=True).start()
        of_training, before = 0, 0
        for step in session.steps(steps):
            now = collectives()[1]
            if before:
                line = {"step": step - 1, "training": of_training, "all": now - before}
                log.write(json.dumps(line) + "\n")
            before = now
            while guard is None or guard.should_run_forward_backward():
                began = collectives()[0]
                optimizer.zero_grad()
                loss = model(torch.randn(4, 16)).square().mean()
                loss.backward()
                of_training = collectives()[0] - began
                if guard is None:
                    break
                guard.validate(loss)
            optimizer.step()
            if f"save@{rank}@{step}" in words:
                session.save_soon()
            time.sleep(0.02)
        log.write(json.dumps({"ended": session.completed_steps}) + "\n")
        dist.destroy_process_group()


main()
