"""vote: cost of a vote after a step, with steps of several lengths, over gloo.

Each rank trains steps of a given length (a sleep, then an all-reduce of 4 KB, as in data-parallel training)
without a vote, as in a session (a thread looks for a request in the store, and there is none), and with a
vote after every step. Batches of the three alternate (ABCCBA) in the same processes; times are rank 0's.

    python bench/vote.py --ranks 2 4 --out vote.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers import figures

ROOT = Path(__file__).resolve().parent.parent
MICRO = 1e6
PATIENCE = 600.0
KINDS = ("no vote", "as a session", "every step")


def measure(rounds: int, steps: int, seconds: float) -> dict[str, list[float]]:
    """Return rank 0's seconds for each step, by kind, one for each batch."""
    import torch
    import torch.distributed as dist

    from outlast import _torch_compat
    from outlast.agreement.worker.store_agreement import StoreAgreement
    from outlast.agreement.worker.vote import should_shutdown

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradient = torch.zeros(1000)

    def train() -> None:
        time.sleep(seconds)
        dist.all_reduce(gradient)

    store = _torch_compat.own_store()
    assert store is not None
    agreement = StoreAgreement(store, dist.get_rank(), dist.get_world_size(), 0, lambda: False)
    every_step = should_shutdown()
    done = 0
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind in figures.abba(KINDS, rounds):
        if kind == KINDS[1]:
            agreement.begin(done)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            train()
            done += 1
            if kind == KINDS[1]:
                agreement.due(done)
            elif kind == KINDS[2]:
                every_step(False)
        found[kind].append((time.perf_counter() - began) / steps)
        if kind == KINDS[1]:
            agreement.end()
    every_step(False)
    dist.destroy_process_group()
    return found


def launch(ranks: int, options: argparse.Namespace, seconds: float) -> dict[str, list[float]]:
    """Measure with some ranks."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    steps = max(20, min(options.steps, int(options.batch_seconds / max(seconds, 1e-4))))
    command = [sys.executable, __file__, "--measure", str(seconds), "--steps", str(steps)]
    command += ["--rounds", str(options.rounds)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common = {**os.environ, **place, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    answers = [process.communicate(timeout=PATIENCE)[0] for process in started]
    line = next(line for line in answers[0].splitlines() if line.startswith("found "))
    found: dict[str, list[float]] = json.loads(line.partition(" ")[2])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--lengths", type=float, nargs="+", default=[0.0, 0.02, 0.1], help="of a step, in seconds"
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind, in pairs")
    parser.add_argument("--steps", type=int, default=500, help="of a batch, at most")
    parser.add_argument("--batch-seconds", type=float, default=1.5, help="of a batch, about")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--measure", type=float, help="be a rank; its step's length in seconds")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.measure is not None:
        found = measure(options.rounds, options.steps, options.measure)
        figures.say("found " + json.dumps(found))
        return
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(seed=0))
    figures.say(f"{'ranks':>5} {'step':>7}  {'kind':<14}{'us/step':>10}{'more':>9}{'%':>7}{'  loadavg':>9}")
    for ranks in options.ranks:
        for seconds in options.lengths:
            found = launch(ranks, options, seconds)
            without = statistics.median(found["no vote"])
            for kind in KINDS:
                middle = statistics.median(found[kind])
                more = middle - without
                lines.write(
                    {
                        "record": "cost",
                        "ranks": ranks,
                        "step_seconds": seconds,
                        "kind": kind,
                        "microseconds": figures.summary([value * MICRO for value in found[kind]]),
                        "more_microseconds": more * MICRO,
                        "loadavg": os.getloadavg()[0],
                    }
                )
                share = 100 * more / without
                figures.say(
                    f"{ranks:>5} {seconds:>7.3f}  {kind:<14}{middle * MICRO:>10.1f}{more * MICRO:>9.1f}"
                    f"{share:>7.2f}{os.getloadavg()[0]:>9.1f}"
                )


if __name__ == "__main__":
    main()
