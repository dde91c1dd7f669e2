"""What becomes of 2,000 simulated jobs with drawn faults, as it was recorded: a net for rewrites of policies.

A seed draws a job (nodes, spares, steps) and what befalls it: workers that die, agents that are killed and
start again, nodes that lose power, are stopped, busy or cut off, connections that are reset. What is compared
is what a user sees: whether and how the job ended, the newest step on disk, generations, restarts, nodes that
stay out. A difference is explained in the commit that records anew, or it is a defect:

    python -m tests.simulation.test_outcomes       # records anew, and prints what has changed
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.fleet import FAULTS, Fleet

RECORDED = Path(__file__).parent / "data" / "outcomes.json.gz"
SEEDS = 2_000
PARTS = 20
QUICK = 2  # parts that every run of the suite plays; `make test-all` plays all
_LIMIT = 240.0  # simulated seconds


def play(seed: int) -> dict[str, Any]:
    """Return what becomes of a seed's job."""
    dice = random.Random(f"outcome {seed}")
    most = dice.randint(1, 4)
    least, spares = dice.randint(1, most), dice.choice((0, 0, 1, 2))
    steps = dice.randrange(60, 400)
    fleet = Fleet(most + spares, least, most, spares=spares, seed=seed, steps=steps)
    fleet.shared = dice.random() < 0.8
    due: list[tuple[float, str, str]] = []
    for _ in range(dice.choice((0, 1, 1, 2, 3, 4, 6))):
        at = fleet.now + dice.uniform(0.0, steps * 0.1 + 5.0)
        due.append((at, dice.choice(FAULTS), dice.choice(list(fleet.nodes))))
    due.sort()
    undo: list[tuple[float, str, str]] = []
    end = fleet.now + _LIMIT
    while fleet.now < end and (undo or fleet.lives()):
        fleet.run(min([fleet.now + 0.5, *(at for at, *_ in (*due, *undo) if at > fleet.now)]))
        while due and due[0][0] <= fleet.now:
            _, what, name = due.pop(0)
            if fleet.befall(what, name):
                undo.append((fleet.now + dice.choice((2.0, 4.0, 7.0, 12.0, 20.0)), what, name))
        for one in [one for one in undo if one[0] <= fleet.now]:
            undo.remove(one)
            fleet.mend(*one[1:])
        fleet.leave()
    return fleet.outcome()


def part(number: int) -> list[dict[str, Any]]:
    """Return the outcomes of a part of the seeds."""
    return [play(seed) for seed in range(number, SEEDS, PARTS)]


EACH_PART = [pytest.param(at, marks=[] if at < QUICK else pytest.mark.long) for at in range(PARTS)]


@pytest.mark.parametrize("number", EACH_PART)
def test_what_becomes_of_a_job_is_as_it_was_recorded(number: int) -> None:
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))
    for seed, found in zip(range(number, SEEDS, PARTS), part(number), strict=True):
        assert found == recorded[seed], f"seed {seed}"


def main() -> None:
    """Record anew."""
    before = json.loads(gzip.decompress(RECORDED.read_bytes())) if RECORDED.exists() else []
    with Pool() as pool:
        parts = pool.map(part, range(PARTS))
    found = [parts[seed % PARTS][seed // PARTS] for seed in range(SEEDS)]
    for seed, (one, other) in enumerate(zip(before, found, strict=False)):
        if one != other:
            changed = {key: (one.get(key), other[key]) for key in other if one.get(key) != other[key]}
            sys.stdout.write(f"seed {seed}: {changed}\n")
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
