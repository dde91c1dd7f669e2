"""The report of a job of three nodes, from logs of a real run: n1's worker was killed, then n2's agent, which
coordinated; n2 was started again, and the job grew back.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from outlast import cli
from outlast.observe import report

DATA = Path(__file__).parent / "data"
RUN = DATA / "three-nodes"


def reported(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert report.report(run_dir, as_json=True) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_job_has_one_account(capsys: pytest.CaptureFixture[str]) -> None:
    found = reported(RUN, capsys)
    assert (found["run_id"], found["launches"], found["generations"]) == ("job1", 1, 4)
    assert found["end"] == {"exit_code": 0, "reason": "every rank finished"}
    incidents = found["incidents"]
    assert isinstance(incidents, list)
    assert [(one["kind"], one["node"], one["generation"], one["steps_lost"]) for one in incidents] == [
        ("crash", "n1", 1, 2),
        ("lost", "n2", 2, 0),
    ]
    assert all(one["running_again_after"] < 1 for one in incidents)
    checkpoints = found["checkpoints"]
    assert isinstance(checkpoints, dict)
    assert (checkpoints["committed"], checkpoints["last_step"]) == (50, 500)
    seconds = found["seconds"]
    assert isinstance(seconds, dict)
    assert sum(seconds.values()) == found["wall"]
    assert seconds["down"] == 0
    assert seconds["training"] > found["wall"] / 2


def test_the_order_of_the_logs_does_not_matter_nor_that_of_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for at, name in enumerate(("n2", "n0", "n1")):
        shutil.copytree(RUN / "nodes" / name, tmp_path / "nodes" / f"x{at}")
    other, same = reported(tmp_path, capsys), reported(RUN, capsys)
    assert {key: other[key] for key in ("launches", "generations", "wall")} == {
        key: same[key] for key in ("launches", "generations", "wall")
    }


def test_people_see_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert cli.main(["report", str(RUN)]) == 0
    printed = capsys.readouterr().out
    assert re.search("job1.* 1 .* 4 ", printed)
    assert "n2" in printed


def test_a_torn_line_of_any_node_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    for name in ("n0", "n1"):
        with open(tmp_path / "run" / "nodes" / name / "events.jsonl", "a", encoding="utf-8") as file:
            file.write('{"v":1,"kind":"pro\n')
    assert reported(tmp_path / "run", capsys)["lines_skipped"] == 2


def test_a_folder_in_which_the_job_ran_on_one_node_before_tells_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    shutil.copy(DATA / "eventful.jsonl", tmp_path / "run" / "events.jsonl")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(DATA / "eventful.jsonl", alone / "events.jsonl")
    together, before = reported(tmp_path / "run", capsys), reported(alone, capsys)
    assert isinstance(before["launches"], int)
    assert together["launches"] == before["launches"] + 1
