"""Reruns in real ranks: all ranks do a step again together, and what is transient leaves no trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DEADLINE, SCRIPTS
from tests.support.ranks import Ranks, ranks

SCRIPT = "rerunning.py"
STEPS = 12


def options(**values: object) -> str:
    return f"rerun={json.dumps(values)}"


def run(folder: Path, *words: str, steps: int = STEPS, ends: int = 0) -> Ranks:
    """Run to the end."""
    with ranks(folder, *words, steps=steps, script=SCRIPT) as job:
        assert job.finish() == [ends, ends], job.output()
        return job


def incident(job: Ranks) -> dict[str, Any]:
    (path,) = (job.run / "incidents").iterdir()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def attempts(job: Ranks, rank: int) -> dict[int, int]:
    return {one["step"]: one["attempts"] for one in job.lines(rank) if "step" in one}


def contents(job: Ranks) -> list[tuple[list[str], list[str]]]:
    """Return of each rank what parameters and running statistics came to."""
    return [(one["content"], one["statistics"]) for one in (job.lines(rank)[-1] for rank in (0, 1))]


def test_a_transient_fault_leaves_no_trace_but_its_record(tmp_path: Path) -> None:
    without = run(tmp_path / "without")
    job = run(tmp_path / "bad", "once@1@7")
    assert contents(job) == contents(without)
    for rank in (0, 1):
        assert {step for step, count in attempts(job, rank).items() if count > 1} == {7}
    found = incident(job)
    assert (found["verdict"], found["culprit"], found["step"]) == ("transient", "GPU-1", 7)
    assert not (without.run / "incidents").exists()


def test_a_poisoned_batch_follows_its_data_and_is_left_out_now_and_in_every_replay(tmp_path: Path) -> None:
    skip = options(rejected_action="skip_batch")
    without = run(tmp_path / "without", "leave@-1@7")
    job = run(tmp_path / "bad", "batch@0@7", skip)
    found = incident(job)
    assert (found["verdict"], found["rejected_on"]) == ("data or model", ["GPU-0", "GPU-1"])
    assert [one["content"] for one in (job.lines(0)[-1], job.lines(1)[-1])] == [
        one["content"] for one in (without.lines(0)[-1], without.lines(1)[-1])
    ]

    short = run(tmp_path / "short", "batch@0@7", skip, "interval=5", steps=6)
    (short.run / "incidents").mkdir()
    path = short.run / "incidents" / "rerun-step-000000007.json"
    path.write_text(json.dumps(found))
    again = run(tmp_path / "short", "batch@0@7", skip, "interval=5")
    assert again.lines(0)[-1]["ended"] == STEPS
    assert attempts(again, 0)[7] == 1
    assert contents(again) == contents(job)


def test_a_device_that_is_always_wrong_is_convicted_and_the_job_ends(tmp_path: Path) -> None:
    job = run(tmp_path, "stays@1@7", ends=1)
    found = incident(job)
    assert (found["verdict"], found["culprit"]) == ("persistent", "GPU-1")
    assert [one["remedy"] for one in found["attempts"]] == [
        "rerun the step",
        "swap the data of two ranks",
        "stop",
    ]
    assert "ResultRejected: the loss of rank 1 is nan in step 7 (persistent)" in job.output()


def test_what_was_tried_is_not_tried_again_by_the_next_process(tmp_path: Path) -> None:
    first = run(tmp_path, "batch@0@7", ends=1)
    tried = len(incident(first)["attempts"])
    second = run(tmp_path, "batch@0@7", ends=1)
    assert len(incident(second)["attempts"]) == tried
    assert "the fault occurred again" in second.output()


def test_exit_codes_of_megatron_are_an_option(tmp_path: Path) -> None:
    run(tmp_path, "batch@0@7", options(megatron_exit_codes=True), ends=17)


def test_a_line_is_tracked_for_each_rejected_result(tmp_path: Path) -> None:
    tracker = tmp_path / "tracker"
    run(tmp_path / "job", "once@1@7", options(result_rejected_tracker_filename=str(tracker)))
    (line,) = tracker.read_text().splitlines()
    assert " device=GPU-1 " in line
    assert " rank=1 iteration=7 status=" in line


def test_a_model_that_is_not_deterministic_is_explained_and_not_convicted(tmp_path: Path) -> None:
    job = run(tmp_path, "once@1@7", "noise")
    found = incident(job)
    assert (found["verdict"], found["culprit"]) == ("inconclusive", "")
    assert "not deterministic" in found["reason"]
    assert job.lines(0)[-1]["ended"] == STEPS


@pytest.mark.parametrize("noise", [(), ("noise",)], ids=["deterministic", "noise"])
def test_differences_of_two_runs_are_reported(tmp_path: Path, noise: tuple[str, ...]) -> None:
    stats = options(rerun_mode="report_determinism_stats")
    job = run(tmp_path / "stats", stats, *noise)
    found = job.lines(0)[-1]["stats"]["loss"]
    assert found["count"] == 2 * STEPS
    assert set(attempts(job, 1).values()) == {2}
    if noise:
        assert 0 < found["p50"] <= found["p90"] <= found["most"] < 0.01
        tolerant = run(tmp_path / "tolerant", "once@1@7", *noise, options(tolerance=0.02))
        assert incident(tolerant)["verdict"] == "transient"
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


def test_a_rerun_on_data_that_is_drawn_lazily_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    without = lazily(tmp_path / "without")
    struck = lazily(tmp_path / "struck", "ray@3")
    assert (struck["weights"], struck["next"]) == (without["weights"], without["next"])


def test_a_deterministic_model_is_measured_as_one_on_data_that_is_drawn_lazily(tmp_path: Path) -> None:
    found = lazily(tmp_path / "run", "mode=report_determinism_stats")
    assert found["stats"] == {"loss": [0.0, 0.0], "gradients": [0.0, 0.0]}
