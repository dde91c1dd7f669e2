"""Real jobs on outlast.Batches: every sample once and exact gradients, in any world and with any shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from outlast.observe import recorder
from outlast.recovery.policy.events import Note

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "uneven.py"
PATIENCE = 200.0


def ran(folder: Path, ranks: int, *words: object, config: str = "", samples: int = 1000) -> str:
    """Run the script to its end, and return its output."""
    (folder / "out").mkdir(exist_ok=True)
    options = [f"--nproc-per-node={ranks}", "--run-dir", str(folder / "run")]
    if config:
        (folder / "outlast.toml").write_text(config)
        options += ["--config", str(folder / "outlast.toml")]
    line = [sys.executable, "-m", "outlast", "run", *options, str(SCRIPT), str(folder / "out")]
    done = subprocess.run(
        [*line, *map(str, words)],
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SAMPLES": str(samples)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "out").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def shares_told(folder: Path) -> list[str]:
    """Return what the event log says of shares."""
    records = recorder.read(folder / "run" / "events.jsonl").records
    return [one.reason for one in records if isinstance(one, Note) and "ranks take" in one.reason]


def test_every_sample_once_and_exact_gradients_across_worlds(tmp_path: Path) -> None:
    samples, batch = 50, 14  # steps of 14, 14, 14 and 8 samples
    for ranks, steps in ((3, 2), (1, 3), (4, 8)):
        ran(tmp_path, ranks, steps, batch, 2, samples=samples)
    found = lines_of(tmp_path)
    assert {(one["step"], one["world"]) for one in found} == {
        *((step, 3) for step in (0, 1)),
        (2, 1),
        *((step, 4) for step in range(3, 8)),
    }
    taken = Counter((one["epoch"], sample) for one in found for sample in one["samples"])
    assert taken == Counter((epoch, sample) for epoch in (0, 1) for sample in range(samples))
    assert max(one["inexact"] for one in found) < 1e-12


def test_a_slow_rank_gets_fewer_micro_batches_until_it_is_fast_again(tmp_path: Path) -> None:
    config = '[stragglers]\naction = "rebalance"\n'
    output = ran(tmp_path, 4, 100_000, 24, 2, 2, 5, 5, 0.04, config=config, samples=240)
    found, told = lines_of(tmp_path), shares_told(tmp_path)
    assert told, output
    assert "rank 2 has" in told[0]
    assert "3, 3, 3, 3 micro-batches" in told[-1]
    by_step: dict[int, list[int]] = {}
    for one in found:  # files are in the order of ranks
        by_step.setdefault(one["step"], []).append(one["shares"])
    assert by_step[4] == [3, 3, 3, 3]
    assert min(shares[2] for shares in by_step.values()) in (1, 2)  # 1 where the host is busy, too
    assert {sum(shares) for shares in by_step.values()} == {12}
    taken = Counter((one["epoch"], sample) for one in found for sample in one["samples"])
    assert set(taken.values()) == {1}
    assert sum(taken.values()) == 24 * len(by_step)
    assert max(one.get("inexact", 0.0) for one in found) < 1e-12
