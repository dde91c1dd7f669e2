"""NVRx's names on several ranks over gloo: the scores are gathered, and all ranks stop together."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from tests.support.ranks import ranks


def run(folder: Path, which: str, world: int, steps: int) -> list[dict[str, Any]]:
    with ranks(folder, which, script="straggling.py", steps=steps, world=world) as job:
        assert job.finish() == [0] * world, job.output()
        return [job.lines(rank)[0] for rank in range(world)]


def test_rank_0_gets_the_scores_of_all_ranks(tmp_path: Path) -> None:
    first, second, third = run(tmp_path, "gathered", 3, 5)
    assert (second["report"], third["report"]) == ({}, {})
    report = first["report"]
    assert report["slow"] == [1]
    assert report["gpu"]["1"] < 0.75
    assert set(report["sections"]) == {"work", "host", "only here"}
    assert report["sections"]["work"]["1"] < 0.75
    assert all(math.isnan(score) for score in report["sections"]["only here"].values())
    assert report["individual"]["work"] == {"0": 1.0, "1": 1.0, "2": 1.0}
    assert report["nodes"] == {"0": "node-0", "1": "node-1", "2": "node-2"}
    assert report["kernels"] == ["work"]


def test_or_each_rank_its_own(tmp_path: Path) -> None:
    first, second = run(tmp_path, "own", 2, 5)
    assert list(first["report"]["gpu"]) == ["0"]
    assert list(second["report"]["gpu"]) == ["1"]
    assert (first["report"]["slow"], second["report"]["slow"]) == ([], [1])


def test_bridges_loop_reports_and_stops_on_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    first, second = run(tmp_path, "manager", 2, 200)
    assert first["report"]["stop"]
    assert second["report"]["stop"]
    # 16 times of steps need 17 steps; then every step ends an interval of a millisecond.
    assert first["report"]["done"] == second["report"]["done"] == 17
    text = "\n".join(first["lines"])
    for pattern in (
        r"report_interval=0\.001s",
        r"\{StragglerId\(rank=1, node='[^']+'\)\}",
        r"GPU relative performance:\n  Rank=1 Node=\S+ Score=0\.\d\d\n  Rank=0 Node=\S+ Score=1\.00\n",
        r"GPU individual performance:\n  Rank=0 Node=\S+ Score=1\.00\n",
        r"gpu_relative_perf scores: \{'gpu_relative_perf/min': 0\.\d+, 'gpu_relative_perf/median': 0\.\d+, "
        r"'gpu_relative_perf/max': 1\.0\}",
    ):
        assert re.search(pattern, text), (pattern, text)
    assert [sorted(one) for one in first["report"]["figures"]] == [
        [f"gpu_{kind}_perf/{end}" for end in ("max", "median", "min")] for kind in ("relative", "individual")
    ]
    assert second["report"]["figures"] == []


def test_kernels_are_compared_where_every_rank_has_them(tmp_path: Path) -> None:
    first, second = run(tmp_path, "kernels", 2, 9)
    report = first["report"]
    assert report["kernels"] == {"aten::add": 5.0}  # each second entry of "work", which sleeps besides
    assert report["slow"] == [1]
    assert report["gpu"]["0"] == 1.0
    assert report["individual"] == {"0": 1.0, "1": 1.0}
    assert second["report"] == {}


def test_sections_are_compared_where_a_rank_has_no_kernels(tmp_path: Path) -> None:
    (first, _) = run(tmp_path, "kernels-some", 2, 9)
    assert first["report"]["kernels"] == {"work": 5.0}
    assert first["report"]["slow"] == [1]
