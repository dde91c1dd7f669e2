"""Real jobs on outlast.Batches: every sample once and exact gradients, in any world and with any shares."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Run, running
from tests.support.ranks import lines


def ran(
    folder: Path, ranks: int, *words: object, config: str = "", samples: int = 1000, workers: int = 0
) -> Run:
    """Run the script to its end."""
    (folder / "out").mkdir(exist_ok=True)
    (folder / "outlast.toml").write_text(config)
    options = (f"--nproc-per-node={ranks}", "--config", str(folder / "outlast.toml"))
    run = Run(folder / "run", "uneven.py", str(folder / "out"), *map(str, words), options=options)
    with running(run, SAMPLES=str(samples), WORKERS=str(workers)):
        assert run.finish() == 0, run.console()
    return run


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for file in sorted((folder / "out").glob("*.jsonl")) for line in lines(file)]


def taken(found: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """Return how often each sample of each epoch was taken; gradients were exact."""
    assert max(one.get("inexact", 0.0) for one in found) < 1e-12
    return Counter((one["epoch"], sample) for one in found for sample in one["samples"])


def test_every_sample_once_and_exact_gradients_across_worlds(tmp_path: Path) -> None:
    samples, batch = 50, 14  # steps of 14, 14, 14 and 8 samples
    for ranks, steps in ((3, 2), (1, 3), (4, 8)):
        ran(tmp_path, ranks, steps, batch, 2, samples=samples, workers=2 if ranks == 1 else 0)
        if ranks == 1:
            assert (tmp_path / "out" / "0.ends").read_text() == "[0, 0]", "they end as in a plain script"
    found = lines_of(tmp_path)
    worlds = {0: 3, 1: 3, 2: 1} | dict.fromkeys(range(3, 8), 4)
    assert {(one["step"], one["world"]) for one in found} == set(worlds.items())
    assert taken(found) == Counter((epoch, sample) for epoch in (0, 1) for sample in range(samples))


@pytest.mark.long
def test_a_slow_rank_gets_fewer_micro_batches_until_it_is_fast_again(tmp_path: Path) -> None:
    config = '[stragglers]\naction = "rebalance"\n'
    run = ran(tmp_path, 4, 100_000, 24, 2, 2, 5, 5, 0.04, config=config, samples=240)
    assert any("3, 3, 3, 3" in one["reason"] for one in run.records("note")), run.console()
    found = lines_of(tmp_path)
    by_step: dict[int, list[int]] = {}
    for one in found:  # files are in the order of ranks
        by_step.setdefault(one["step"], []).append(one["shares"])
    assert by_step[4] == [3, 3, 3, 3]
    assert min(shares[2] for shares in by_step.values()) in (1, 2)  # 1 where the host is busy, too
    assert {sum(shares) for shares in by_step.values()} == {12}
    counts = taken(found)
    assert set(counts.values()) == {1}
    assert sum(counts.values()) == 24 * len(by_step)
