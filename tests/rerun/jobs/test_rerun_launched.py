"""Reruns under a launcher: what they cannot settle within a step becomes a fault, and the verdict stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.launching import Run, running


def launch(tmp_path: Path, *words: str, script: str = "suspecting.py", table: str = "") -> Run:
    config = tmp_path / "outlast.toml"
    config.write_text(f"[checkpoints]\nasync_save = false\n[rerun]\n{table}\n")
    options = ("--nproc-per-node", "1", "--config", str(config))
    return Run(tmp_path / "run", script, "40", "10", *words, options=options)


def incident(run: Run) -> dict[str, Any]:
    (path,) = (run.folder / "incidents").glob("rerun-step-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_copy_is_suspected_before_the_device_and_named_when_another_one_does(tmp_path: Path) -> None:
    with running(launch(tmp_path, "20@1")) as run:
        assert run.finish() == 0, run.console()
    assert [one["step"] for one in run.records("loaded")] == [20, 10]
    found = incident(run)
    assert [one["remedy"] for one in found["attempts"]] == ["rerun the step", "load another copy"]
    assert (found["step"], found["verdict"]) == (23, "bad checkpoint")
    assert found["culprit"] == "local/step-000000020.g1"
    suspects = [one["checkpoint"] for one in run.records("trust_changed") if one["trust"] == "suspect"]
    assert "local/step-000000020.g1" in suspects


def test_a_result_that_stays_rejected_ends_the_job_without_a_restart(tmp_path: Path) -> None:
    with running(launch(tmp_path, "batch@7")) as run:
        assert run.finish() == 93, run.console()
    assert len(run.records("generation_started")) == 1
    assert incident(run)["verdict"] == "inconclusive"
    assert "ResultRejected" in run.console()


def test_the_launchers_table_wins_and_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    table = 'rejected_action = "skip_batch"'
    for name in ("skips", "without"):
        (tmp_path / name).mkdir()
    with running(launch(tmp_path / "skips", "batch@7", table=table)) as run:
        assert run.finish() == 0, run.console()
    assert incident(run)["skipped"]
    with running(launch(tmp_path / "without", script="poisoned.py", table=table)) as run:
        assert run.finish() != 0
    assert "table [rerun] (rejected_action) has no effect" in run.console()
