"""Train over gloo with reruns; write each step, and at the end what the model came to.

rerunning.py TRACE RUN_DIR STEPS [once|stays|batch|leave@RANK@STEP] [rerun=JSON] [interval=STEPS] [hold=PATH]
    [noise] [alone]

RANK -1: all. once: the loss is no number in the first attempt. stays: on this rank's device, with whatever
data. batch: the batch is poisoned. leave: no batch is run. noise: the model does not compute the same twice.
Each rank names a device of its own, after what DEVICES says of the node; stays@DEVICE@STEP: on that one.
hold: no step is begun before PATH exists. alone: no rank can compute the data of another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast.config import NumericsOptions, RerunOptions
from outlast.rerun import RerunDataIterator, RerunStateMachine

trace, run_dir, total, words = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
named = dict(word.split("=", 1) for word in words if "=" in word)
rank = int(os.environ["RANK"])
device = f"{os.environ.get('DEVICES', 'GPU')}-{rank}"
trace.mkdir(parents=True, exist_ok=True)
log = open(trace / f"rank-{rank}", "a", buffering=1)  # noqa: SIM115


def write(**line: object) -> None:
    log.write(json.dumps(line) + "\n")


def planned(what: str, step: int) -> bool:
    return f"{what}@{rank}@{step}" in words or f"{what}@-1@{step}" in words


def batches(begin: int) -> Iterator[torch.Tensor]:
    for step in range(begin, total):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        yield batch * float("nan") if planned("batch", step) else batch


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with outlast.start(run_dir, save_interval=int(named.get("interval", "100000"))) as session:
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(16, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(16, 3),
        ]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), broadcast_buffers=False)
        torch.manual_seed(1 + rank)
        groups = [dist.new_group([one]) for one in range(dist.get_world_size())] if "alone" in words else []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        reruns = RerunStateMachine(
            model,
            optimizer,
            RerunOptions(**json.loads(named.get("rerun", "{}"))),
            identity=lambda: device,
            data_parallel_group=groups[rank] if groups else None,
        )
        checks = NumericsOptions(nan_in_loss_action="rerun", nan_in_grad_action="rerun")
        guard = outlast.Guard(model, optimizer, checks, reruns)
        began = session.restore(model=model, optimizer=optimizer, guard=guard)
        write(restored=began)
        while "hold" in named and not Path(named["hold"]).exists():
            time.sleep(0.05)
        data = RerunDataIterator(batches(began))
        for step in session.steps(total):
            attempts = 0
            while guard.should_run_forward_backward(data):
                batch = next(data)
                if planned("leave", step):
                    continue
                loss = model(batch).square().mean()
                if "noise" in words:
                    loss = loss * (1 + int.from_bytes(os.urandom(2), "big") * 1e-7)
                broken = planned("stays", step) or f"stays@{device}@{step}" in words
                if broken or (planned("once", step) and attempts == 0):
                    loss = loss * float("nan")
                loss.backward()
                guard.validate(loss)
                attempts += 1
            if guard.accepted:
                optimizer.step()
            optimizer.zero_grad()
            write(step=step, attempts=attempts, accepted=guard.accepted)
        content = [one.detach().double().sum().item().hex() for one in model.parameters()]
        statistics = [one.double().sum().item().hex() for one in model.buffers()]
        quantiles = {name: vars(one) for name, one in reruns.stats.items()}
        write(ended=session.completed_steps, content=content, statistics=statistics, stats=quantiles)
    dist.destroy_process_group()


main()
