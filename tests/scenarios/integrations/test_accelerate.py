"""A loop with accelerate under the launcher: announced, or with its state in a session."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.frameworks import alone, job, lines_of, needs, reached
from tests.support.launching import Run, running

pytestmark = needs("accelerate")
ANNOUNCED, RESUMED = "accelerated.py", "accelerate_resumed.py"
PREEMPTED = 75


@pytest.mark.parametrize(
    ("way", "fatal", "saved"),
    [("", 8, {3, 6, 9, 12}), pytest.param("fails", 0, {3, 9, 12}, marks=pytest.mark.long)],
)
def test_steps_and_saves_are_announced_but_none_that_raised(
    tmp_path: Path, way: str, fatal: int, saved: set[int]
) -> None:
    with running(job(tmp_path / "job", ANNOUNCED, way, fatal=fatal)) as run:
        assert run.finish() == 0, run.console()
    assert {one["step"] for one in run.records("script_saved")} == saved
    assert (tmp_path / "job" / "done-1").read_text() == "12"
    for fault in run.records("fault_seen"):
        assert fault["step"] in (7, 8)  # of the slowest rank
        assert fault["source"] != "counted"
    assert len(run.records("fault_seen")) == bool(fatal)


@pytest.mark.long
def test_a_preempted_script_saves_and_leaves_its_loop(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    run = job(folder, ANNOUNCED, "", pace=0.3)
    with running(run):
        run.until(reached(folder / "steps-0", 4))
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == PREEMPTED, run.console()
    last = [int(lines_of(folder / f"steps-{rank}")[-1]) for rank in (0, 1)]
    assert last[0] == last[1] < 12
    assert (folder / f"step-{last[0]:03}" / "outlast_step.json").exists()


@pytest.mark.long
def test_a_run_that_is_to_end_before_its_first_step_is_given_back(tmp_path: Path) -> None:
    run = job(tmp_path / "job", RESUMED, "asked")
    for code in (PREEMPTED, 0):
        with running(run):
            assert run.finish() == code, run.console()
    assert (tmp_path / "job" / "done-0").read_text() == (tmp_path / "job" / "done-1").read_text()


@pytest.mark.long
@pytest.mark.parametrize(("way", "ranks"), [("plain", 1), ("larger", 2)])
def test_data_that_are_divided_otherwise_within_an_epoch_are_refused(
    tmp_path: Path, way: str, ranks: int
) -> None:
    folder = tmp_path / "job"
    run = job(folder, RESUMED, "plain", fatal=6, options=("--max-restarts", "0"))
    with running(run):
        assert run.finish() != 0
    assert run.records("saved")
    options = ("--nproc-per-node", str(ranks), "--max-restarts", "0")
    with running(Run(folder / "run", RESUMED, str(folder), way, "0", "0.0", options=options)) as other:
        assert other.finish() != 0
    assert "UsageError" in other.records("fault_seen")[-1]["signature"]


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("nothing", "resume"),
        *(
            pytest.param(way, named, marks=pytest.mark.long)
            for way, named in {"unprepared": "prepared", "twice": "job.batches", "two-steps": "2"}.items()
        ),
        pytest.param("unnamed", "resume(name=", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, way: str, named: str) -> None:
    done = alone(tmp_path, "accelerate_refused.py", way)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr


@pytest.mark.long
def test_two_trainings_with_names_are_both_trained(tmp_path: Path) -> None:
    done = alone(tmp_path, "accelerate_refused.py", "named")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["trained 4"] * 2
    folders = {path.parent.name for path in (tmp_path / "outlast-runs").rglob("checkpoints/*/step-*")}
    assert folders == {"training-0", "training-1"}
