"""every_step: cost of a checkpoint in memory after every step.

The example's model, wide enough that a step takes 100 ms or more, trains in blocks of steps. A saves
nothing; B stages every step, and a checkpoint writer commits each to the memory tier. Blocks alternate
as A B B A. Each pair gives one ratio; the result is the median of the ratios.

    python bench/every_step.py --pairs 10 --out every_step.jsonl
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import figures

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.01  # slower by at most that share
MIN_STEP = 0.1


def build(batch: int) -> tuple[dict[str, object], Callable[[int], None]]:
    """Return the training state, and a function that does one step."""
    import torch
    from torch.nn import functional

    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt

    torch.manual_seed(0)
    model = train_gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = train_gpt.Windows(0, 0, 1)
    train_gpt.BATCH = batch

    def step(number: int) -> None:
        _, inputs, targets = windows.batch(number)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


def join(folder: Path, staging: str, saver: Any) -> Any:
    """Return a checkpointer of one rank that saves through the memory tier."""
    from outlast.checkpoint.checkpointer import Checkpointer, Identity
    from outlast.checkpoint.tiers.memory_folder import MemoryFolder, default_root
    from outlast.config import CheckpointOptions
    from outlast.ipc.exchange import SoloExchange, SystemClock

    settings = CheckpointOptions(staging=staging)
    identity = Identity("bench", 1, 0, 1)
    memory = MemoryFolder(default_root(f"bench-{os.getpid()}", folder))
    about = (identity, SoloExchange(), settings, SystemClock(), lambda _: None)
    return Checkpointer(folder / "checkpoints", *about, memory, saver.ensure)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the pairs and return what was measured."""
    from outlast.checkpoint.save.staging import Order
    from outlast.checkpoint.tiers.memory_folder import default_root
    from outlast.checkpoint.writer_process import SaverProcess

    state, step = build(options.batch)
    saver = SaverProcess(default_root(f"bench-{os.getpid()}", folder), "", folder / "events.jsonl")
    checkpointer = join(folder, options.staging, saver)
    checkpointer.restore(state)
    done, stood_still = 0, []

    def block(saving: bool) -> float:
        nonlocal done
        began = time.perf_counter()
        for _ in range(options.steps):
            step(done)
            done += 1
            if saving:
                at = time.perf_counter()
                assert checkpointer.stage(Order(done, False, "bench"), state)
                stood_still.append(time.perf_counter() - at)
        return (time.perf_counter() - began) / options.steps

    for saving in (False, True, True):
        block(saving)
    stood_still.clear()
    ratios, plain = [], []
    for number in range(options.pairs):
        if number % 2 == 0:
            a, b = block(False), block(True)
        else:
            b, a = block(True), block(False)
        ratios.append(b / a)
        plain.append(a)
        figures.say(f"  pair {number}: {a * 1e3:.1f} ms a step without, {b / a - 1:+.2%} with")
    saver.hang_up()
    while not saver.ended():
        time.sleep(0.05)
    nbytes = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*.safetensors"))
    return {
        "staging": options.staging,
        "step": statistics.median(plain),
        "slower": statistics.median(ratios) - 1,
        "quartiles": [value - 1 for value in statistics.quantiles(ratios, n=4)],
        "stood_still": statistics.median(stood_still),
        "nbytes": nbytes,
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Measure, print, and say whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps a block")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--staging", choices=("eager", "lazy"), default="eager")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(0))
    lines.write({"record": "every_step", **found})
    met = found["slower"] <= GOAL and found["step"] >= MIN_STEP
    low, _, high = found["quartiles"]
    figures.say(
        f"{found['staging']}: {found['step'] * 1e3:.0f} ms a step, {found['nbytes'] / 1e6:.1f} MB a"
        f" checkpoint: {found['slower']:+.2%} (quartiles {low:+.2%} to {high:+.2%})\n"
        f"the call took {found['stood_still'] * 1e3:.2f} ms; load {found['load']:.1f};"
        f" goal {GOAL:+.0%}: {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
