"""A small training with one rank on each node for bench/nodes.py, written for torchrun and for outlast.

One linear layer, 4 KiB of gradients in one all-reduce, and a sleep instead of computation, so that
four nodes fit on two cores. Batches depend only on seed, step, rank and world. Every
completed step is a line in the shared folder, with CLOCK_MONOTONIC, which all hosts share here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEED, WIDTH, BATCH = 1, 32, 4


class Trace:
    """The completed steps of this process, and which processes belong together."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        group = torch.tensor([time.monotonic_ns()])
        dist.broadcast(group, 0)
        self.same = {"rank": self.rank, "world": self.world, "group": int(group), "pid": os.getpid()}
        self.file = (folder / f"{socket.gethostname()}.jsonl").open("a", buffering=1)

    def write(self, step: int) -> None:
        self.file.write(json.dumps({"step": step, "clock": time.monotonic(), **self.same}) + "\n")


class Plain:
    """Typical code for torchrun: torch.save at an interval, loaded after a restart."""

    def __init__(self, options: argparse.Namespace, parts: dict[str, Any]) -> None:
        self.options, self.parts, self.path = options, parts, options.folder / "checkpoint.pt"
        self.first = 0
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            self.first = state["step"]
            for name, part in parts.items():
                part.load_state_dict(state[name])

    def steps(self) -> Iterator[int]:
        for step in range(self.first, self.options.steps):
            yield step
            if dist.get_rank() == 0 and (step + 1) % self.options.save_interval == 0:
                saved = {"step": step + 1, **{name: part.state_dict() for name, part in self.parts.items()}}
                temporary = self.path.with_name(f"checkpoint-{socket.gethostname()}-{os.getpid()}.tmp")
                torch.save(saved, temporary)
                os.replace(temporary, self.path)


def train(options: argparse.Namespace, session: Any) -> None:
    torch.manual_seed(SEED)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trace = Trace(options.folder / "trace")
    if session is None:
        steps = Plain(options, {"model": model, "optimizer": optimizer}).steps()
    else:
        session.restore(model=model, optimizer=optimizer)
        steps = session.steps(options.steps)
    for step in steps:
        numbers = torch.Generator().manual_seed(SEED + step * trace.world + trace.rank)
        loss = model(torch.randn(BATCH, WIDTH, generator=numbers)).square().mean()
        loss.backward()
        time.sleep(options.nap)
        dist.all_reduce(model.weight.grad)
        model.weight.grad /= trace.world
        optimizer.step()
        optimizer.zero_grad()
        trace.write(step)
    if trace.rank == 0:
        digest = hashlib.sha256(bytes(model.weight.detach().flatten().view(torch.uint8).tolist()))
        (options.folder / "digest").write_text(digest.hexdigest())
        print("digest", digest.hexdigest(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="shared by the nodes; has a folder trace/")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--nap", type=float, default=0.04, help="seconds a step")
    parser.add_argument("--plain", action="store_true", help="without outlast")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        session = None
        if not options.plain:
            import outlast

            session = stack.enter_context(outlast.start(save_interval=options.save_interval))
        dist.init_process_group("gloo")
        train(options, session)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
