"""rebalance: throughput of four ranks, of which one computes at half speed, with even and rebalanced shares.

A micro-batch is a sleep, so that the ranks of a busy host are equally fast; the job is
tests/support/scripts/uneven.py over gloo. The same job runs with each action, "log" and "rebalance", in turn.
One JSON line a run: seconds of a step before the rank is slow, and at the end. The last line is the summary:
what the slow rank costs, how much of that is won back, and how much could be (28 micro-batches on ranks of
speeds 1, 1, 0.5, 1).

    python bench/rebalance.py --rounds 3 --out rebalance.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "scripts" / "uneven.py"
RANKS, SLOW, GLOBAL_BATCH, MICRO_BATCH = 4, 2, 56, 2
SECONDS = 0.02  # of a micro-batch
FROM, STEPS, LAST = 20, 140, 30
ACTIONS = ("log", "rebalance")


def run(action: str) -> dict[str, Any]:
    """Run one job; return the seconds of its steps, and the shares at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "outlast.toml").write_text(f'[stragglers]\naction = "{action}"\n')
        (folder / "out").mkdir()
        options = [f"--nproc-per-node={RANKS}", f"--run-dir={folder}/run", f"--config={folder}/outlast.toml"]
        words = (STEPS, GLOBAL_BATCH, MICRO_BATCH, SLOW, FROM, 0, SECONDS)
        line = [sys.executable, "-m", "outlast", "run", *options, str(SCRIPT), f"{folder}/out"]
        subprocess.run([*line, *map(str, words)], check=True, capture_output=True, timeout=600)
        ranks = [
            [json.loads(text) for text in (folder / "out" / f"{rank}.jsonl").read_text().splitlines()]
            for rank in range(RANKS)
        ]
    taken = [max(one["seconds"] for one in step) for step in zip(*ranks, strict=True)]
    return {
        "action": action,
        "healthy": statistics.median(taken[5:FROM]),
        "slow": statistics.median(taken[-LAST:]),
        "shares": [rank[-1]["shares"] for rank in ranks],
        "load": os.getloadavg()[0],
    }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of throughput relative to healthy ranks, and the part of the loss that is won back."""
    relative = {
        action: [one["healthy"] / one["slow"] for one in found if one["action"] == action]
        for action in ACTIONS
    }
    even, rebalanced = (statistics.median(relative[action]) for action in ACTIONS)
    most = (RANKS - 0.5) / RANKS
    return {
        "even": even,
        "rebalanced": rebalanced,
        "spread": {action: [min(some), max(some)] for action, some in relative.items()},
        "most": most,
        "won_back_of_what_can_be": (rebalanced - even) / (most - even),
        "won_back_of_all": (rebalanced - even) / (1 - even),
    }


def main() -> None:
    """Run the jobs in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = []
    for _ in range(given.rounds):
        for action in ACTIONS:
            found.append(run(action))
            print(json.dumps(found[-1]), flush=True)
    found.append(summary(found))
    print(json.dumps(found[-1]))
    if given.out is not None:
        given.out.write_text("".join(json.dumps(one) + "\n" for one in found))


if __name__ == "__main__":
    main()
