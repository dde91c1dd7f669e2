"""guard: cost of a guard with its vote and the heartbeat for each step, over gloo, on the CPU.

Batches of the kinds alternate (ABBA) in the same processes. Times are those of rank 0 ("cpu": of its main
thread). "plain" trains a small model. "torch" adds the calls of torch that any guard needs (copy of the
loss, norms of the gradients, one transfer to the host), written in the simplest way: the parameters are
listed again in each step. "reduced" adds an all-reduce of as many numbers as the guard's. "guarded" is
session, heartbeat, guard and vote; its difference to "reduced" is the cost of our own Python. "lean" is the
least that we know: parameters listed once, the loss copied into existing memory, norms, one transfer, and the
all-reduce; the difference of "guarded" to it is the stricter figure. Then the scan alone: bytes per second of
the ways to read gradients.

    python bench/guard.py --ranks 1 2 --out guard.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import figures

ROOT = Path(__file__).resolve().parent.parent
MICRO = 1e6
PATIENCE = 900.0
KINDS = ("plain", "torch", "reduced", "guarded", "lean")
COMPARED = (
    ("torch", "plain"),
    ("reduced", "torch"),
    ("guarded", "reduced"),
    ("guarded", "lean"),
    ("lean", "plain"),
)
SIZES = {"1 MiB in 4": (1, 4), "1 MiB in 256": (1, 256), "256 MiB in 16": (256, 16)}
Turn = tuple[float, float]  # CPU and wall seconds a step


class Job:
    """One rank's model, and a session with a guard for it."""

    def __init__(self, folder: str, layers: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import outlast
        from outlast.numerics.policy import tally

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        module = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(layers)))
        self.world = dist.get_world_size()
        self.model = DistributedDataParallel(module) if self.world > 1 else module
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        self.batch = torch.randn(4, 32)
        self.guard = outlast.Guard(self.model, self.optimizer)
        never = outlast.CheckpointOptions(save_interval=10**9, non_persistent_save_interval=10**9)
        self.session = outlast.start(folder, checkpoints=never)
        self.session.restore(model=self.model, optimizer=self.optimizer, guard=self.guard)
        self.row = torch.zeros(tally.WIDTH, dtype=torch.float64)
        self.parameters = list(self.model.parameters())
        self.room = torch.zeros(())
        self.group = dist.new_group(backend="gloo")

    def backward(self) -> Any:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self) -> None:
        self.backward()
        self.update()

    def torch(self) -> None:
        import torch

        loss = self.backward().detach().to(torch.float32, copy=True).reshape(())
        norms = torch._foreach_norm([one.grad for one in self.model.parameters()], 2)
        torch.stack([*norms, loss]).tolist()
        self.update()

    def reduced(self) -> None:
        import torch.distributed as dist

        self.torch()
        if self.world > 1:
            dist.all_reduce(self.row, dist.ReduceOp.SUM, self.group)

    def lean(self) -> None:
        import torch
        import torch.distributed as dist

        self.room.copy_(self.backward().detach())
        norms = torch._foreach_norm([one.grad for one in self.parameters], 2)
        torch.stack([*norms, self.room]).tolist()
        if self.world > 1:
            dist.all_reduce(self.row, dist.ReduceOp.SUM, self.group)
        self.update()

    def turn(self, kind: str, steps: int) -> Turn:
        """Return the time of a step, measured over a batch."""
        if kind == "guarded":
            return self.turn_guarded(steps)
        step: Callable[[], None] = getattr(self, kind)
        step()
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(steps):
            step()
        return (time.thread_time() - cpu) / steps, (time.perf_counter() - wall) / steps

    def turn_guarded(self, steps: int) -> Turn:
        guard, cpu, wall = self.guard, 0.0, 0.0
        last = self.session.completed_steps + steps
        for step in self.session.steps(last + 1):
            if step == last:  # a loop's last step is followed by a save
                taken = (time.thread_time() - cpu) / steps, (time.perf_counter() - wall) / steps
            elif step == last - steps:
                cpu, wall = time.thread_time(), time.perf_counter()
            while guard.should_run_forward_backward():
                guard.validate(self.backward())
            assert guard.accepted
            self.update()
        return taken

    def reductions(self, kind: str, steps: int) -> float:
        """Return the all-reduces for each step."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.turn(kind, steps)
        found = sum(one.name == "c10d::allreduce_" for one in profiler.events())
        before = kind == "guarded" and self.world > 1  # a loop begins with a vote
        return round((found - before) / (steps + 1), 2)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return rank 0's times by kind, and the reductions for each step."""
    import torch.distributed as dist

    found: dict[str, Any] = {kind: [] for kind in KINDS}
    job = Job(os.environ["BENCH_FOLDER"], options.layers)
    for kind in figures.abba(KINDS, options.rounds):
        dist.barrier()
        found[kind].append(job.turn(kind, options.steps))
    counts = {kind: job.reductions(kind, 50) for kind in ("plain", "guarded")}
    job.session.close()
    dist.destroy_process_group()
    return {"turns": found, "reductions": counts}


def scan(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return seconds by size and by way to read gradients."""
    import torch

    torch.set_num_threads(options.threads)
    ways: dict[str, Callable[[list[Any]], object]] = {
        "foreach_norm": lambda grads: torch.stack(list(torch._foreach_norm(grads, 2))).tolist(),
        "vector_norm": lambda grads: torch.stack([torch.linalg.vector_norm(one) for one in grads]).tolist(),
        "sum": lambda grads: torch.stack([one.sum() for one in grads]).tolist(),
        "dot": lambda grads: torch.stack([torch.dot(one, one) for one in grads]).tolist(),
        "isfinite": lambda grads: torch.stack([torch.isfinite(one).all() for one in grads]).tolist(),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for size, (mebibytes, count) in SIZES.items():
        grads = [torch.randn((mebibytes << 18) // count) for _ in range(count)]
        found[size] = {way: [] for way in ways}
        for way in figures.abba(list(ways), options.rounds):
            began = time.perf_counter()
            ways[way](grads)
            found[size][way].append(time.perf_counter() - began)
    return found


def launch(arguments: list[str], ranks: int) -> Any:
    """Run ranks and return what rank 0 found."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        common = {**os.environ, **place, "PYTHONPATH": str(ROOT / "src"), "BENCH_FOLDER": folder + "/run"}
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        answers = [process.communicate(timeout=PATIENCE)[0] for process in started]
    line = next(line for line in answers[0].splitlines() if line.startswith("found "))
    return json.loads(line.partition(" ")[2])


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"n": len(values), "least": min(values), "low": low, "median": middle, "high": high}


def report(ranks: int, found: dict[str, Any], lines: figures.Lines) -> None:
    turns = found["turns"]
    for place, clock in enumerate(("cpu", "wall")):
        taken = {kind: [turn[place] * MICRO for turn in turns[kind]] for kind in KINDS}
        common = {"ranks": ranks, "clock": clock, "loadavg": os.getloadavg()[0]}
        for kind in KINDS:
            values, count = quartiles(taken[kind]), found["reductions"].get(kind)
            lines.write(
                {"record": "cost", **common, "kind": kind, "microseconds": values, "reductions": count}
            )
            figures.say(f"{ranks:>5} {clock:<5}{kind:<20}{_shown(values)}   {'' if count is None else count}")
        for kind, other in COMPARED:
            more = quartiles([a - b for a, b in zip(taken[kind], taken[other], strict=True)])
            lines.write({"record": "more", **common, "kind": kind, "than": other, "microseconds": more})
            figures.say(f"{ranks:>5} {clock:<5}{f'{kind} - {other}':<20}{_shown(more)}")


def _shown(values: dict[str, float]) -> str:
    return "".join(f"{values[name]:>9.1f}" for name in ("least", "low", "median", "high"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20, help="turns of each kind")
    parser.add_argument("--steps", type=int, default=200, help="of a batch")
    parser.add_argument("--layers", type=int, default=2, help="of the model, two parameters each")
    parser.add_argument("--threads", type=int, default=1, help="of the scan")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--measure", choices=["loop", "scan"], help="be a rank: measure, print, end")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.measure is not None:
        found = measure(options) if options.measure == "loop" else scan(options)
        figures.say("found " + json.dumps(found))
        return
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(seed=0))
    numbers = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    numbers += ["--layers", str(options.layers), "--threads", str(options.threads)]
    figures.say(
        "us a step: the least, quartiles, all-reduces a step; then by how much a turn takes more than another"
    )
    for ranks in options.ranks:
        report(ranks, launch(["--measure", "loop", *numbers], ranks), lines)
    figures.say(f"{'gradients':<16}{'way':<14}{'us':>10}{'GB/s':>8}")
    for size, ways in launch(["--measure", "scan", *numbers], 1).items():
        nbytes = SIZES[size][0] << 20
        for way, seconds in ways.items():
            values = quartiles([one * MICRO for one in seconds])
            rate = nbytes / values["median"] / 1000
            lines.write(
                {"record": "scan", "size": size, "way": way, "microseconds": values, "gb_per_s": rate}
            )
            figures.say(f"{size:<16}{way:<14}{values['median']:>10.1f}{rate:>8.2f}")


if __name__ == "__main__":
    main()
