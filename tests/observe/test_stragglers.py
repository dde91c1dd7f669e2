"""``outlast stragglers``: what it says of an event log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outlast import cli
from outlast.observe.recorder import Recorder
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import Record, StepTimes, StragglerSeen


def seen(
    step: int, state: str, rank: int = 2, section: str = "forward", generation: int = 1
) -> StragglerSeen:
    reason = f"rank {rank} takes 2.00 times as long as its 3 peers"
    return StragglerSeen(
        *(0.0, float(step), generation, step, rank, "n1", state, "compute", section),
        *(2.0, 1.5, 1.0, 0.999, 4, reason),
    )


def times(step: int, slow: float, ranks: int = 4) -> StepTimes:
    ratios = {str(rank): slow if rank == 2 else 1.0 for rank in range(ranks)}
    return StepTimes(0.0, float(step), 1, step, 0.25, ratios)


def told(
    folder: Path, capsys: pytest.CaptureFixture[str], *records: Record, words: tuple[str, ...] = ()
) -> str:
    recorder = Recorder(RunFolder(folder).events)
    for one in records:
        recorder.record(one)
    assert cli.main(["stragglers", str(folder), *words]) == 0
    return capsys.readouterr().out


def test_a_slow_rank_is_told_with_its_stretch_and_the_heat_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = told(
        tmp_path, capsys, times(10, 1.0), seen(20, "on"), times(20, 2.0), seen(40, "off"), times(40, 1.0)
    )
    assert re.search(r"rank 2 .*n1 .*step 20.*step 40.*compute.*forward", found)
    assert "1.50" in found
    (row,) = (line for line in found.splitlines() if line.startswith("  rank 2 "))
    assert row.split() in (
        ["rank", "2", "·█·", "2.00", "at", "most"],
        ["rank", "2", "-#-", "2.00", "at", "most"],
    )
    assert "250 ms" in found


def test_a_rank_that_is_still_slow_is_told_so_and_one_of_a_new_generation_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(tmp_path, capsys, seen(20, "on"), seen(5, "on", generation=2), times(20, 2.0))
    assert re.search("step 20.*generation 1", found)
    assert re.search("step 5 .*compute", found)


def test_a_large_run_fits_on_a_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(tmp_path, capsys, *(times(step, 2.0, ranks=200) for step in range(0, 3000, 10)))
    assert len([line for line in found.splitlines() if line.startswith("  rank ")]) == 32
    assert "168" in found
    assert max(map(len, found.splitlines())) < 200


def test_programs_get_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(tmp_path, capsys, seen(20, "on"), times(20, 2.0), words=("--json",)))
    (one,) = found["stragglers"]
    assert (one["rank"], one["since"], one["until"], one["activity"]) == (2, 20, -1, "compute")
    assert found["times"][0]["ratios"]["2"] == 2.0
