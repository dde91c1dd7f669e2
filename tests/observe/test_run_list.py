"""The list of runs, and errors that name the runs nearby."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from outlast import cli
from outlast.observe import runs
from outlast.observe.recorder import Recorder
from outlast.recovery.policy.events import FirstStep, RunStarted

DATA = Path(__file__).parent / "data"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, one of several nodes, a folder that is none, and a run of which only run.json is there."""
    folder = tmp_path / "outlast-runs"
    for name in ("older", "notes", "new"):
        (folder / name).mkdir(parents=True)
    shutil.copy(DATA / "eventful.jsonl", folder / "older" / "events.jsonl")
    shutil.copytree(DATA / "three-nodes", folder / "nodes")
    (folder / "new" / "run.json").write_text('{"run_id": "abc", "format": 1}')
    os.utime(folder / "older" / "events.jsonl", (1, 1))
    for log in folder.glob("nodes/nodes/*/events.jsonl"):
        os.utime(log, (2, 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_runs_are_listed_newest_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "outlast-runs/" in line]
    assert [row[0] for row in rows] == ["outlast-runs/new", "outlast-runs/nodes", "outlast-runs/older"]
    assert rows[0][1:6] == ["abc", "-", "0", "-", "-"]
    assert rows[1][1:4] == ["job1", "500", "2"]
    assert rows[2][1:5] == ["9c41d07ab2e5", "500", "2", "41.0%"]
    assert rows[2][-1] == "0"


def test_the_list_for_programs_has_the_same(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["folder"], one["step"], one["restarts"]) for one in found] == [
        ("outlast-runs/new", -1, 0),
        ("outlast-runs/nodes", 500, 2),
        ("outlast-runs/older", 500, 2),
    ]
    assert found[0]["goodput"] is None
    assert found[2]["goodput"] == 47.25 / 115.25


def test_the_step_of_a_script_that_reports_none_is_marked(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(place / "outlast-runs" / "new" / "events.jsonl")
    recorder.record(RunStarted(1.0, 1.0, 1, "abc", "n", 1, "b", ("t.py",), 1, ""))
    recorder.record(FirstStep(2.0, 2.0, 1, 40, {}, "counted"))
    assert cli.main(["report"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if " abc " in line]
    assert ["abc 40 counted 0 " in row for row in rows] == [True]
    assert cli.main(["report", "--json"]) == 0
    found = {one["run_id"]: (one["step"], one["source"]) for one in json.loads(capsys.readouterr().out)}
    assert found["abc"] == (40, "counted")
    assert found["9c41d07ab2e5"] == (500, "")


def test_a_run_folder_lists_itself(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place / "outlast-runs" / "older")
    assert cli.main(["report", "--json"]) == 0
    assert [one["folder"] for one in json.loads(capsys.readouterr().out)] == ["."]


def test_where_no_run_is_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report"], ["top"], ["stragglers"], ["ckpt", "ls"]], ids=" ".join)
def test_an_error_about_a_missing_run_names_the_runs_nearby(
    words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "outlast-runs/oldre"]) == 2
    said = capsys.readouterr().err
    assert "outlast-runs/new, outlast-runs/nodes, outlast-runs/older\n" in said


def test_an_error_names_a_few_of_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs.nearby(tmp_path / "missing") == ""
    for number in range(8):
        (tmp_path / f"r{number}").mkdir()
        (tmp_path / f"r{number}" / "run.json").write_text("{}")
        os.utime(tmp_path / f"r{number}" / "run.json", (number, number))
    assert "r7, r6, r5, r4, r3 and 3" in runs.nearby(tmp_path / "missing")
