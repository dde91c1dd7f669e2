"""campaigns: random kills and damage at random times, and what the next generation restores.

A campaign is one small job over several generations: ranks that save every step in memory and
some steps on disk, a checkpoint writer, and its owner (a separate process, as the agent is, or rank 0).
The seed draws the faults: ranks, writer and owner are killed, the writer is stopped, the memory folder is
removed, copies in memory and on disk are damaged (a bit, a page, the end, a file), at any time, at the
start of a step, or at the n-th event of a kind in the folders. The draws repeat with the seed; the exact
moment of a kill may differ between runs.

An oracle checks every restore. It knows the content of every step from a run without faults, what was
staged from the ranks, and which copies are intact from the code that damaged them. It requires: the content
is bitwise that of its step; the step is that of the newest intact copy, which before any damage is at
most one step older than the newest staged; a refusal only if no intact copy is left; a fresh start only if
no copy ever existed; at the end no process and nothing in memory is left. Prints a JSON line for each
campaign, and a table; exits with 1 if anything was wrong.

    python bench/campaigns.py --campaigns 300 --seed 1
    python bench/campaigns.py --planted 20 --seed 1    # planted bugs: each must be found in 20 campaigns
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import campaign_plants
import torch
from campaign_job import Setup, Training
from campaign_run import run

from outlast.ipc.processes import adopt_orphans, die_with_parent

Line = dict[str, Any]


def in_processes(jobs: Iterable[Callable[[], Line]], width: int) -> Iterator[Line]:
    """Run jobs, each in a fork of this process, several at a time; yield their results as they end."""
    waiting, running = list(jobs)[::-1], dict[int, tuple[int, bytearray]]()
    while waiting or running:
        while waiting and len(running) < width:
            reader, pid = _fork(waiting.pop())
            running[reader] = pid, bytearray()
        for reader in select.select(list(running), [], [])[0]:
            pid, content = running[reader]
            got = os.read(reader, 1 << 16)
            content += got
            if not got:
                os.close(reader)
                os.waitpid(pid, 0)
                del running[reader]
                yield json.loads(content or '{"verdict": "wrong: the campaign itself was killed"}')


def _fork(job: Callable[[], Line]) -> tuple[int, int]:
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, pid
    try:
        die_with_parent(parent)
        adopt_orphans()
        os.close(reader)
        line = job()
    except BaseException:  # noqa: BLE001 - the last frame of this process; its parent tells of it
        line = {"verdict": f"wrong: {traceback.format_exc()}"}
    with os.fdopen(writer, "wb") as file:
        file.write(json.dumps(line).encode())
    os._exit(0)


def planted(name: str, seeds: range, verbose: bool) -> Line:
    """Run campaigns with a planted bug until one fails in the way that this bug causes."""
    campaign_plants.plant(name)
    for seed in seeds:
        line = run(seed, verbose)
        if line["verdict"].startswith(tuple(f"wrong: {kind}" for kind in campaign_plants.SHOWS[name])):
            return {"record": "plant", "plant": name, "caught": seed, "verdict": line["verdict"][:300]}
    return {"record": "plant", "plant": name, "caught": None, "verdict": f"not caught in {seeds}"}


def table(lines: list[Line], seconds: float) -> str:
    """Return a table of the results."""
    rows = Counter(line["verdict"].partition(": ")[0] for line in lines)
    wrong = Counter(line["verdict"].split(": ")[1] for line in lines if line["verdict"].startswith("wrong"))
    again = Counter(steps for line in lines for steps in line.get("again", ()))
    calm = Counter(steps for line in lines for steps in line.get("again_undamaged", ()))
    told = [
        f"{len(lines)} campaigns in {seconds:.0f} s",
        *(f"  {count:4} {verdict}" for verdict, count in sorted(rows.items())),
        *(f"       {count:4} {verdict}" for verdict, count in wrong.most_common()),
        f"{again.total()} restores, by steps that were staged and had to be done again (without any damage):",
        *(f"  {steps:2} steps: {count:4} ({calm[steps]})" for steps, count in sorted(again.items())),
    ]
    bad = [str(line.get("seed")) for line in lines if line["verdict"].startswith("wrong")]
    return "\n".join([*told, *([f"wrong: --only {' '.join(bad)}"] if bad else [])])


def _warm_up() -> None:
    """Make torch import what it imports at a first step, so that forks need not."""
    torch.set_num_threads(1)
    setup = Setup.drawn(0, random.Random(0), Path(), Path())
    training = Training(setup, 0)
    training.train()
    training.digest()


def main() -> int:
    """Run campaigns, print the results, and say whether all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--campaigns", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the first campaign; the others follow it")
    parser.add_argument("--only", type=int, nargs="+", help="run the campaigns of these seeds alone")
    parser.add_argument("--planted", type=int, default=0, help="plant each bug for up to so many campaigns")
    parser.add_argument(
        "--plant", choices=campaign_plants.PLANTS, action="append", help="with --planted: this one"
    )
    parser.add_argument("--width", type=int, default=2, help="campaigns at a time")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    _warm_up()
    began = time.monotonic()
    if options.planted:
        seeds = range(options.seed, options.seed + options.planted)
        names = options.plant or campaign_plants.PLANTS
        jobs = [partial(planted, name, seeds, options.verbose) for name in names]
    else:
        chosen = options.only or range(options.seed, options.seed + options.campaigns)
        jobs = [partial(run, seed, options.verbose) for seed in chosen]
    lines = []
    for line in in_processes(jobs, options.width):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if options.planted:
        return 0 if all(line.get("caught") is not None for line in lines) else 1
    print(table(lines, time.monotonic() - began))
    return 1 if any(line["verdict"].startswith("wrong") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
