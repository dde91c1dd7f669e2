"""plan: time of the planner, throughput after lost nodes, and published rules for lost GPUs beside ours.

- time: seconds for a ranking of all layouts by number of devices, wall and processor; sizes are interleaved
- shrink: 64 nodes of 8, tp 8, pp 4, global batch 1024: share of the full throughput after the loss of nodes,
  with uneven micro-batches, with batches that must divide evenly, and the ideal
- seed: GPUs of one node are lost one by one. Three published rules of Megatron_GpuFailureRecoveryMechanism
  (its paper, section III.E; ``recovery_utils.py``; ``recover.py``) beside ours, for the model and batch of
  ``recover.py``. Megatron-LM refuses layouts that break its own rules; throughput is the planner's model's

    python bench/plan.py time shrink seed --out plan.jsonl
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers import figures

from outlast.parallelism.policy import memory, throughput
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node, divisors, problems
from outlast.parallelism.policy.limits import PRESETS, ModelLimits
from outlast.parallelism.policy.losses import after_losses
from outlast.parallelism.policy.memory import Training
from outlast.parallelism.policy.planner import Job, NoLayout, ranked_layouts
from outlast.parallelism.policy.throughput import Hardware

GIB = 1 << 30
NODE = Node(8, 80 * GIB)
ROUNDS = 30
SIZES = (
    (64, Layout(8, 2, 4)),
    (512, Layout(8, 4, 16)),
    (4096, Layout(8, 8, 64)),
    (16384, Layout(8, 16, 128)),
)
LOST = (0, 1, 2, 4, 8, 16, 32)
RECOVER_PY = ModelLimits("recover.py", 24, 2048, 16, 2048, 51200)  # its defaults; Megatron-LM's vocabulary
BATCH, MICRO = 32, 4


def planning_time() -> Iterator[dict[str, Any]]:
    """Yield the seconds of a ranking after the loss of one node."""
    taken: dict[int, list[float]] = {devices: [] for devices, _ in SIZES}
    worked: dict[int, list[float]] = {devices: [] for devices, _ in SIZES}
    found: dict[int, int] = {}
    for _ in range(ROUNDS):
        for devices, today in SIZES:
            job = Job(PRESETS["gpt3-175b"], 2048, Training(recompute=devices < 512), today)
            nodes = [NODE] * (devices // 8 - 1)
            began, used = time.perf_counter(), time.thread_time()
            found[devices] = len(ranked_layouts(job, nodes))
            worked[devices].append(time.thread_time() - used)
            taken[devices].append(time.perf_counter() - began)
    for devices, seconds in taken.items():
        load = os.getloadavg()[0]
        yield {
            "record": "time",
            "devices": devices,
            "layouts": found[devices],
            "load": load,
            "seconds": figures.summary(seconds),
            "processor_seconds": figures.summary(worked[devices]),
        }


def shrink() -> Iterator[dict[str, Any]]:
    """Yield the share of the full throughput for each number of lost nodes."""
    job = Job(PRESETS["gpt3-175b"], 1024, today=Layout(8, 4, 16), fixed=frozenset(("tp", "pp", "cp")))
    nodes = [NODE] * 64
    uneven = after_losses(job, nodes, LOST, "outlast")
    even = after_losses(replace(job, even=True), nodes, LOST, "outlast")
    for one, other in zip(uneven, even, strict=True):
        bubble = {
            name: (64 + 3) / (-(-1024 // row.best.layout.dp) + 3)
            for name, row in (("uneven", one), ("even", other))
            if row.best is not None
        }
        yield {
            "record": "shrink",
            "lost": one.lost,
            "layout": str(one.best.layout) if one.best else "none",
            "uneven": round(one.share, 3),
            "even": round(other.share, 3),
            "ideal": round(1 - one.lost / 64, 3),
            "bubble_alone": {name: round(share, 3) for name, share in bubble.items()},
        }


def rule_of_the_paper(gpus: int, today: Layout, model: ModelLimits) -> Layout:
    """Return the largest tp that divides heads and GPUs, then the pp that makes tp x pp all GPUs."""
    del today
    tp = max(one for one in divisors(gpus) if model.heads % one == 0)
    return Layout(tp, gpus // tp, 1)


def rule_of_recovery_utils(gpus: int, today: Layout, model: ModelLimits) -> Layout:
    """Return the layout on all GPUs whose tp and pp are nearest to today's."""
    options = [
        Layout(tp, pp, gpus // (tp * pp))
        for tp in divisors(model.hidden)
        for pp in divisors(model.layers)
        if model.heads % tp == 0 and gpus % (tp * pp) == 0
    ]
    return min(options, key=lambda one: abs(one.tp - today.tp) + abs(one.pp - today.pp))


def rule_of_recover(gpus: int, today: Layout, model: ModelLimits) -> Layout:
    """Return today's tp and pp where they have room; else powers of two, a large tp before a large pp."""
    del model
    if gpus >= today.tp * today.pp:
        return Layout(today.tp, today.pp, gpus // (today.tp * today.pp))
    powers = (1, 2, 4, 8)
    options = [(tp, pp) for tp in powers for pp in powers if tp * pp <= gpus and gpus % (tp * pp) == 0]
    tp, pp = max(options)
    return Layout(tp, pp, gpus // (tp * pp))


RULES = {
    "paper": rule_of_the_paper,
    "recovery_utils": rule_of_recovery_utils,
    "recover": rule_of_recover,
}


def refused(layout: Layout) -> str:
    """Return why Megatron-LM does not start in a layout; empty: it does."""
    wrong = problems(RECOVER_PY, layout)
    if BATCH % (MICRO * layout.dp):
        wrong.append(f"global batch {BATCH} % (micro-batch {MICRO} x dp {layout.dp})")
    return "; ".join(wrong)


def tokens_of(layout: Layout) -> float:
    """Return the tokens a second of a layout in the planner's model."""
    rank = memory.parameters_of_rank(RECOVER_PY, layout)
    times = throughput.pace((RECOVER_PY, Training(MICRO)), layout, rank, Hardware(), 8)
    return BATCH * RECOVER_PY.sequence / times.step(layout, -(-BATCH // (MICRO * layout.dp)))


def seed() -> Iterator[dict[str, Any]]:
    """Yield what each rule makes of the GPUs that are left."""
    for today in (Layout(2, 2, 2), Layout(2, 2, 1)):
        job = Job(RECOVER_PY, BATCH, Training(MICRO), today)
        full = tokens_of(today)
        for lost in range(today.ranks):
            gpus = today.ranks - lost
            record: dict[str, Any] = {"record": "seed", "today": str(today), "gpus": gpus}
            for name, rule in RULES.items():
                layout = rule(gpus, today, RECOVER_PY)
                why = refused(layout)
                share = 0.0 if why else round(tokens_of(layout) / full, 3)
                record[name] = {"layout": str(layout), "refused": why, "share": share}
            try:
                best = ranked_layouts(job, [Node(gpus, 32 * GIB)])[0]
                record["ours"] = {
                    "layout": str(best.layout),
                    "idle": best.idle,
                    "share": round(best.tokens / full, 3),
                    "reason": best.reason,
                }
            except NoLayout as error:
                record["ours"] = {"layout": "none", "refused": str(error), "share": 0.0}
            yield record


PARTS = {"time": planning_time, "shrink": shrink, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help="time, shrink, seed")
    parser.add_argument("--out", type=Path, help="append JSON lines")
    given = parser.parse_args()
    lines = figures.Lines(given.out)
    lines.write(figures.surroundings(0))
    for name in given.parts:
        for record in PARTS[name]():
            lines.write(record)
            figures.say(str(record))


if __name__ == "__main__":
    main()
