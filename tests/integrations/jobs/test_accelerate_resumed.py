"""A loop with accelerate whose state a session keeps: killed, preempted, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outlast.errors import ExitCode
from tests.support.frameworks import alone, job, lines_of, needs, reached
from tests.support.launching import Run, running, until

pytestmark = needs("accelerate")
SCRIPT = "accelerate_resumed.py"


def finals(folder: Path) -> list[str]:
    return [(folder / f"done-{rank}").read_text() for rank in (0, 1)]


def steps(folder: Path) -> dict[str, str]:
    """Return what the last pass over each batch of rank 0 computed; a batch is known by its place."""
    return dict(line.rpartition(" ")[::2] for line in lines_of(folder / "steps-0"))


@pytest.mark.parametrize("way", ["plain", "seedable,workers"])
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path: Path, way: str) -> None:
    with running(job(tmp_path / "whole", SCRIPT, way)) as whole:
        assert whole.finish() == 0, whole.console()
    with running(job(tmp_path / "killed", SCRIPT, way, fatal=14)) as killed:
        assert killed.finish() == 0, killed.console()
    (loaded, *_) = (one for one in killed.records("loaded") if one["step"])
    assert 4 <= loaded["step"] <= 14  # within the first or second epoch
    assert finals(tmp_path / "killed") == finals(tmp_path / "whole")
    assert steps(tmp_path / "killed") == steps(tmp_path / "whole")


def test_a_preempted_run_goes_on_with_the_same_command(tmp_path: Path) -> None:
    with running(job(tmp_path / "whole", SCRIPT, "plain")) as whole:
        assert whole.finish() == 0, whole.console()
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "plain", pace=0.2)
    with running(run):
        until(reached(folder / "steps-0", 5), run.console)
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == int(ExitCode.PREEMPTED), run.console()
    assert not (folder / "done-0").exists()
    with running(run):
        assert run.finish() == 0, run.console()
    assert finals(folder) == finals(tmp_path / "whole")


def test_a_run_that_is_to_end_before_its_first_step_is_given_back(tmp_path: Path) -> None:
    run = job(tmp_path / "job", SCRIPT, "asked")
    with running(run):
        assert run.finish() == int(ExitCode.PREEMPTED), run.console()
    assert "went back" not in run.console()
    with running(run):
        assert run.finish() == 0, run.console()
    assert finals(tmp_path / "job")[0] == finals(tmp_path / "job")[1]


@pytest.mark.parametrize(
    ("way", "ranks", "said"),
    [
        ("plain", 1, "found a world of 1, expected 2 processes, as saved"),
        ("larger", 2, "found batches of 8 samples over all processes, expected 4"),
    ],
)
def test_data_that_are_divided_otherwise_within_an_epoch_are_refused(
    tmp_path: Path, way: str, ranks: int, said: str
) -> None:
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "plain", fatal=6, options=("--max-restarts", "0"))
    with running(run):
        assert run.finish() != 0
    assert run.records("saved")
    options = ("--nproc-per-node", str(ranks), "--max-restarts", "0")
    with running(Run(folder / "run", SCRIPT, str(folder), way, "0", "0.0", options=options)) as other:
        assert other.finish() != 0
        assert said in other.console()


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("nothing", "resume: no model was prepared"),
        ("unprepared", "the loader was not prepared"),
        ("twice", "job.batches is called twice in an epoch"),
        ("two-steps", "found 2 optimizer steps within one batch"),
        ("unnamed", 'resume(name="...")'),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, way: str, said: str) -> None:
    done = alone(tmp_path, "accelerate_refused.py", way)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_two_trainings_with_names_are_both_trained(tmp_path: Path) -> None:
    done = alone(tmp_path, "accelerate_refused.py", "named")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["trained 4"] * 2
    folders = {path.parent.name for path in (tmp_path / "outlast-runs").rglob("checkpoints/*/step-*")}
    assert folders == {"training-0", "training-1"}
