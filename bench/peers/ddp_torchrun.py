"""The example's training as written for torchrun: torch.save at an interval, loaded after a restart.

Model, data and step are those of examples/train_gpt.py. bench/recovery.py runs it under torchrun
and, with ``--nvrx``, under NVRx's ft_launcher; then it sends a heartbeat to its monitor at each step.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402 - the first statement takes the time
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt  # noqa: E402
from torch.nn import functional  # noqa: E402

IMPORTED = time.monotonic()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--marks", type=Path, required=True, help="file that times are appended to")
    parser.add_argument("--nvrx", action="store_true")
    return parser.parse_args()


def mark(path: Path, **marks: float) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "marks": marks}) + "\n")


def monitor(wanted: bool) -> Any:
    if not wanted:
        return None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    client = monitor(options.nvrx)
    rank = dist.get_rank()
    windows = train_gpt.Windows(options.seed, rank, dist.get_world_size())
    trace = train_gpt.Trace(options.trace, rank)
    model, optimizer, scheduler = train_gpt.build(options, rank)
    group = time.monotonic()
    state: dict[str, Any] = {"step": 0}
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if options.checkpoint.exists():
        state = torch.load(options.checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    loaded = time.monotonic()
    for step in range(state["step"], options.steps):
        ids, inputs, targets = windows.batch(step)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        trace.write(step, loss.item(), ids)
        if client is not None:
            client.send_heartbeat()
        if step == state["step"]:
            mark(options.marks, started=STARTED, imported=IMPORTED, group=group, loaded=loaded)
        if rank == 0 and (step + 1) % options.save_interval == 0:
            saved = {"step": step + 1, **{name: part.state_dict() for name, part in parts.items()}}
            temporary = options.checkpoint.with_suffix(".tmp")
            torch.save(saved, temporary)
            os.replace(temporary, options.checkpoint)
    if client is not None:
        client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
