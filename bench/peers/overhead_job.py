"""The job of bench/overhead.py: DDP over gloo, with steps of given lengths; rank 0 writes what steps took.

overhead_job.py OUT KIND STEPS LENGTH [LENGTH ...]

KIND: plain, session or guard. Of each length in seconds there are STEPS steps in turn; the first tenth of
them is not measured. A step sleeps that long, then trains a small model.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
WIDTH = 256


def collectives() -> int:
    """Return how many collectives this rank has begun so far, in all groups."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_backend(CPU)._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


class Job:
    """A model and the measurements of its steps."""

    def __init__(self, steps: int, lengths: list[float]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.lengths = [length for length in lengths for _ in range(steps)]
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers), find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(8, WIDTH)
        self.begun: list[tuple[float, int]] = []  # when each step began, collectives until then

    def begin(self) -> None:
        self.begun.append((time.perf_counter(), collectives()))

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def found(self, steps: int) -> list[dict[str, float | list[float]]]:
        """Return seconds of the measured steps by length, and collectives a step."""
        answers: list[dict[str, float | list[float]]] = []
        for first in range(0, len(self.lengths), steps):
            measured = self.begun[first + steps // 10 : first + steps]
            seconds = [after[0] - before[0] for before, after in pairwise(measured)]
            count = (measured[-1][1] - measured[0][1]) / len(seconds)
            answers.append({"length": self.lengths[first], "seconds": seconds, "collectives": count})
        return answers


def run(kind: str, job: Job) -> None:
    """Do all steps; every system has the same loop but for what it adds."""
    with contextlib.ExitStack() as stack:
        steps: Iterator[int] | range = range(len(job.lengths))
        guard: Any = None
        if kind != "plain":
            import outlast

            session = stack.enter_context(outlast.start())
            guard = outlast.Guard(job.model, job.optimizer) if kind == "guard" else None
            session.register(model=job.model, optimizer=job.optimizer)
            session.restore(**({} if guard is None else {"guard": guard}))
            steps = session.steps(len(job.lengths))
        for step in steps:
            job.begin()
            time.sleep(job.lengths[step])
            if guard is None:
                job.backward()
            else:
                while guard.should_run_forward_backward():
                    guard.validate(job.backward())
            job.optimizer.step()


def main() -> None:
    out, kind, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    job = Job(steps, list(map(float, sys.argv[4:])))
    run(kind, job)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(job.found(steps)))
    dist.destroy_process_group()


main()
