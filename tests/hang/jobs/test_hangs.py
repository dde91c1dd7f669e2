"""Timeouts that were learned convict on evidence: real jobs that pause, and real jobs that hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import Run, running, until

BENCH = Path(__file__).resolve().parents[3] / "bench" / "hang.py"


def played(tmp_path: Path, kind: str) -> dict[str, object]:
    """Play one kind of the benchmark; return what came of it."""
    out = tmp_path / "out.jsonl"
    command = [sys.executable, str(BENCH), "--kinds", kind, "--pause", "5", "--out", str(out)]
    subprocess.run(command, check=False, timeout=400, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return next(one for one in records if one["record"] == "kind")


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "kind",
    ["evaluation_of_rank_0", "sleep_of_all", "frozen_disk_torch_save", "stopped_saver", "cpu_limited"],
)
def test_a_rank_that_computes_or_waits_for_storage_is_not_hung(tmp_path: Path, kind: str) -> None:
    found = played(tmp_path, kind)
    if found.get("skipped"):
        pytest.skip(str(found["said"]))
    assert found["right"], found["said"]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("kind", "basis"),
    [
        ("endless_polls", "collective sequence numbers"),
        ("mismatched_collectives", "collective sequence numbers"),
        ("native_with_lock_held", "stacks"),
        ("stopped", "process state"),
        ("lock_alone", "process state"),
    ],
)
def test_a_hang_is_found_and_its_culprit_named_on_the_best_evidence(
    tmp_path: Path, kind: str, basis: str
) -> None:
    found = played(tmp_path, kind)
    assert found["right"], found["said"]
    assert found["basis"] == basis
    assert f"(by {basis})" in str(found["said"])


@pytest.mark.timeout(420)
def test_hangs_of_one_job_are_decided_by_the_flight_recorder_one_after_the_other(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, str(BENCH), "--tries", "2", "--side-by-side", "4", "--out", str(out)]
    assert subprocess.run(command, check=False, timeout=400, stdout=subprocess.DEVNULL).returncode == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = {one["kind"]: one["by_flight_recorder"] for one in records if one["record"] == "tries"}
    assert found == {"late": 2, "ahead": 2, "deadlock": 2, "stopped": 0}


def test_a_script_that_spawns_its_ranks_itself_is_told_the_cure(tmp_path: Path) -> None:
    with running(Run(tmp_path / "run", "spawning.py", options=("--nproc-per-node", "1"))) as run:
        words = "remove TORCHELASTIC_USE_AGENT_STORE from os.environ before mp.spawn"
        until(lambda: words in run.console(), lambda: f"the cure; console:\n{run.console()}")
    assert run.console().count(words) == 1
    cured = Run(tmp_path / "cured", "spawning.py", "cured", options=("--nproc-per-node", "1"))
    with running(cured):
        assert cured.finish() == 0, cured.console()
    assert "rank 1: [2.0, 2.0, 2.0]" in cured.console()
    assert words not in cured.console()
