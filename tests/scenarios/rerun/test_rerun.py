"""Reruns in real ranks: all ranks do a step again together, and what is transient leaves no trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DEADLINE, SCRIPTS, Run, running
from tests.support.ranks import Ranks, ranks

STEPS = 12


def options(**values: object) -> str:
    return f"rerun={json.dumps(values)}"


def run(folder: Path, *words: str, steps: int = STEPS, ends: int = 0) -> Ranks:
    """Run to the end."""
    with ranks(folder, *words, steps=steps, script="rerunning.py") as job:
        assert job.finish() == [ends, ends], job.output()
        return job


def incident(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "incidents").glob("rerun-step-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def tried(folder: Path) -> list[str]:
    return [one["remedy"] for one in incident(folder)["attempts"]]


def attempts(job: Ranks, rank: int) -> dict[int, int]:
    return {one["step"]: one["attempts"] for one in job.lines(rank) if "step" in one}


def contents(job: Ranks, *names: str) -> list[list[Any]]:
    """Return of each rank what parameters and running statistics came to."""
    return [[job.lines(rank)[-1][name] for name in names or ("content", "statistics")] for rank in (0, 1)]


def test_a_transient_fault_leaves_no_trace_but_its_record(tmp_path: Path) -> None:
    without = run(tmp_path / "without")
    tracker = tmp_path / "tracker"
    job = run(tmp_path / "bad", "once@1@7", options(result_rejected_tracker_filename=str(tracker)))
    assert contents(job) == contents(without)
    for rank in (0, 1):
        assert {step for step, count in attempts(job, rank).items() if count > 1} == {7}
    found = incident(job.run)
    assert (found["verdict"], found["culprit"], found["step"]) == ("transient", "GPU-1", 7)
    assert not (without.run / "incidents").exists()
    (line,) = tracker.read_text().splitlines()
    assert {"device=GPU-1", "rank=1", "iteration=7"} <= set(line.split())


def test_a_poisoned_batch_follows_its_data_and_is_left_out_now_and_in_every_replay(tmp_path: Path) -> None:
    skip = options(rejected_action="skip_batch")
    without = run(tmp_path / "without", "leave@-1@7")
    job = run(tmp_path / "bad", "batch@0@7", skip)
    found = incident(job.run)
    assert (found["verdict"], found["rejected_on"]) == ("data or model", ["GPU-0", "GPU-1"])
    assert contents(job, "content") == contents(without, "content")

    short = run(tmp_path / "short", "batch@0@7", skip, "interval=5", steps=6)
    (short.run / "incidents").mkdir()
    (short.run / "incidents" / "rerun-step-000000007.json").write_text(json.dumps(found))
    again = run(tmp_path / "short", "batch@0@7", skip, "interval=5")
    assert again.lines(0)[-1]["ended"] == STEPS
    assert attempts(again, 0)[7] == 1
    assert contents(again) == contents(job)


def test_a_device_that_is_always_wrong_is_convicted_and_the_job_ends(tmp_path: Path) -> None:
    job = run(tmp_path, "stays@1@7", ends=1)
    found = incident(job.run)
    assert (found["verdict"], found["culprit"]) == ("persistent", "GPU-1")
    assert tried(job.run) == ["rerun the step", "swap the data of two ranks", "stop"]
    assert "ResultRejected" in job.output()


def test_what_was_tried_is_not_tried_again_by_the_next_process(tmp_path: Path) -> None:
    first = tried(run(tmp_path, "batch@0@7", ends=1).run)
    assert tried(run(tmp_path, "batch@0@7", options(megatron_exit_codes=True), ends=17).run) == first


def test_a_model_that_is_not_deterministic_is_not_convicted(tmp_path: Path) -> None:
    job = run(tmp_path / "strict", "once@1@7", "noise")
    found = incident(job.run)
    assert (found["verdict"], found["culprit"]) == ("inconclusive", "")
    assert job.lines(0)[-1]["ended"] == STEPS
    tolerant = run(tmp_path / "tolerant", "once@1@7", "noise", options(tolerance=0.02))
    assert incident(tolerant.run)["verdict"] == "transient"


@pytest.mark.parametrize("noise", [(), ("noise",)], ids=["deterministic", "noise"])
def test_differences_of_two_runs_are_reported(tmp_path: Path, noise: tuple[str, ...]) -> None:
    job = run(tmp_path / "stats", options(rerun_mode="report_determinism_stats"), *noise)
    found = job.lines(0)[-1]["stats"]["loss"]
    assert found["count"] == 2 * STEPS
    assert set(attempts(job, 1).values()) == {2}
    if noise:
        assert 0 < found["p50"] <= found["p90"] <= found["most"] < 0.01
    else:
        assert found["same"] == found["count"]
        assert contents(job) == contents(run(tmp_path / "without"))


def lazily(folder: Path, *words: str) -> dict[str, Any]:
    """Return what a run came to whose data the global generators make when it is drawn."""
    command = [sys.executable, str(SCRIPTS / "lazy_data.py"), str(folder), "8", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_a_rerun_on_data_that_is_drawn_lazily_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    without, struck = lazily(tmp_path / "without"), lazily(tmp_path / "struck", "ray@3")
    assert (struck["weights"], struck["next"]) == (without["weights"], without["next"])
    stats = lazily(tmp_path / "run", "mode=report_determinism_stats")["stats"]
    assert stats == {"loss": [0.0, 0.0], "gradients": [0.0, 0.0]}


# Under a launcher: what they cannot settle within a step becomes a fault, and the verdict stays


def launch(tmp_path: Path, *words: str, script: str = "suspecting.py", table: str = "") -> Run:
    config = tmp_path / "outlast.toml"
    config.write_text(f"[checkpoints]\nasync_save = false\n[rerun]\n{table}\n")
    options = ("--nproc-per-node", "1", "--config", str(config))
    return Run(tmp_path / "run", script, "40", "10", *words, options=options)


def test_a_copy_is_suspected_before_the_device_and_named_when_another_one_does(tmp_path: Path) -> None:
    with running(launch(tmp_path, "20@1")) as job:
        assert job.finish() == 0, job.console()
    assert [one["step"] for one in job.records("loaded")] == [20, 10]
    assert tried(job.folder) == ["rerun the step", "load another copy"]
    found, copy = incident(job.folder), "memory/step-000000020.g1"
    assert (found["step"], found["verdict"], found["culprit"]) == (23, "bad checkpoint", copy)
    suspects = [one["checkpoint"] for one in job.records("trust_changed") if one["trust"] == "suspect"]
    assert copy in suspects


def test_a_result_that_stays_rejected_ends_the_job_without_a_restart(tmp_path: Path) -> None:
    with running(launch(tmp_path, "batch@7")) as job:
        assert job.finish() == 93, job.console()
    assert len(job.records("generation_started")) == 1
    assert incident(job.folder)["verdict"] == "inconclusive"
    assert "ResultRejected" in job.console()


@pytest.mark.long
def test_the_launchers_table_wins_and_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    table = 'rejected_action = "skip_batch"'
    for name in ("skips", "without"):
        (tmp_path / name).mkdir()
    with running(launch(tmp_path / "skips", "batch@7", table=table)) as job:
        assert job.finish() == 0, job.console()
    assert incident(job.folder)["skipped"]
    with running(launch(tmp_path / "without", script="poisoned.py", table=table)) as job:
        assert job.finish() != 0
    assert "[rerun]" in job.console()
    assert "rejected_action" in job.console()
