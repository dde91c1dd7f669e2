"""The trace of a run: JSON that Perfetto reads, whose slices add up to the report."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from outlast import cli
from outlast.observe import report
from outlast.observe.policy import goodput

DATA = Path(__file__).parent / "data"
CLOSE = 1e-5  # seconds; times are written as microseconds


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_bytes((DATA / "eventful.jsonl").read_bytes())
    return tmp_path


def traced(run_dir: Path, target: Path) -> dict[str, list[dict[str, Any]]]:
    """Write a trace; return its events by the name of their track, slices in the order of the file."""
    assert cli.main(["report", str(run_dir), "--trace", str(target)]) == 0
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for one in json.loads(target.read_text())["traceEvents"]:
        where = (one["pid"], one["tid"])
        if one["name"] == "process_name":
            processes[one["pid"]] = one["args"]["name"]
        elif one["name"] == "thread_name":
            names[where] = f"{processes[one['pid']]}: {one['args']['name']}"
        else:
            found[names.get(where, one["name"])].append(one)
    return found


def seconds(slices: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for one in slices:
        found[one["name"]] += one["dur"] / 1e6
    return found


@pytest.mark.parametrize("log", ["eventful", "three-nodes"])
def test_the_slices_add_up_to_the_report_and_overlap_only_where_one_holds_the_other(
    log: str, run_dir: Path, tmp_path: Path
) -> None:
    run = DATA / log if (DATA / log).is_dir() else run_dir
    found = traced(run, tmp_path / "trace.json")
    ledger = goodput.fold(report.read_log(run).records)
    spent = seconds(found["job: where the time went"])
    assert sum(spent.values()) == pytest.approx(ledger.wall, abs=CLOSE)
    for category, length in ledger.seconds.items():
        assert spent.get(category.value, 0.0) == pytest.approx(length, abs=CLOSE)
    assert len(found["job: generations"]) == ledger.generations
    counters = found.pop("step")
    assert all(one["ph"] == "C" for one in counters)
    for slices in found.values():
        open_until: list[float] = []
        for one in slices:
            while open_until and open_until[-1] <= one["ts"] + 1:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 1  # a microsecond
            assert 0 <= one["ts"] <= one["ts"] + one["dur"] <= ledger.wall * 1e6 + 1
            open_until.append(one["ts"] + one["dur"])


def test_an_incident_is_on_the_track_of_its_rank_and_holds_the_parts_of_its_recovery(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced(run_dir, tmp_path / "trace.json")
    assert "https://ui.perfetto.dev" in capsys.readouterr().out
    hang = next(one for one in goodput.fold(report.read_log(run_dir).records).incidents if one.kind == "hang")
    slices = found[f"node {hang.node}: rank {hang.rank}"]
    at = next(index for index, one in enumerate(slices) if one["name"] == f"hang: {hang.action}")
    assert slices[at]["dur"] / 1e6 == pytest.approx(hang.running_again_after, abs=CLOSE)
    assert slices[at]["args"]["reason"] == hang.reason
    parts = seconds(slices[at + 1 : at + 2 + len(hang.phases)])
    assert parts == pytest.approx({"detect": hang.detected_after, **hang.phases}, abs=CLOSE)
    assert sum(parts.values()) == pytest.approx(hang.running_again_after, abs=CLOSE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "x.json"], "--trace"),
        (["RUN", "--trace", "/nowhere/x.json"], "No such file or directory"),
    ],
)
def test_a_trace_that_cannot_be_written_is_an_error(
    words: list[str], said: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", *(str(run_dir) if one == "RUN" else one for one in words)]) == 2
    assert said in capsys.readouterr().err
