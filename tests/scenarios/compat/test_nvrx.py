"""A script that calls NVRx's client as Megatron-LM does, unchanged, under ``outlast run`` and torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, SCRIPTS, Run, running
from tests.support.ranks import lines

SCRIPT = str(SCRIPTS / "megatron_loop.py")
STEPS, WARMUP = "40", "3"
TIMEOUTS = "--ft-rank-section-timeouts=setup:600,checkpointing:420"


def job(folder: Path, *faults: str, timeouts: str = TIMEOUTS) -> Run:
    folder.mkdir()
    options = ("--nproc-per-node", "2", timeouts, "-m")
    arguments = (SCRIPT, str(folder), STEPS, WARMUP, *faults)
    return Run(folder / "run", "outlast.compat.nvrx", *arguments, options=options)


def ended(folder: Path) -> set[str]:
    return {(folder / f"ended-{rank}").read_text() for rank in (0, 1)}


def starts(folder: Path) -> list[int]:
    return [int(line.split()[0]) for line in (folder / "starts-0").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    with running(job(folder, "learn")) as run:
        assert run.finish() == 0, run.console()
    return run


def test_sections_are_opened_and_the_timeouts_in_force_are_saved(undisturbed: Run) -> None:
    folder = undisturbed.folder.parent
    state = json.loads((folder / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert state["calculated_sections"] == ["step"]
    assert state["section"].keys() == {"checkpointing", "setup", "step"}
    assert (state["section"]["setup"], state["section"]["checkpointing"]) == (600.0, 420.0)


@pytest.mark.long
def test_it_runs_under_torchrun_without_being_watched(tmp_path: Path, undisturbed: Run) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["outlast.compat.nvrx", SCRIPT, str(tmp_path), STEPS, WARMUP]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("RankMonitorClient") == 1
    assert ended(tmp_path) == ended(undisturbed.folder.parent)


def test_a_killed_rank_costs_the_steps_since_its_checkpoint(tmp_path: Path, undisturbed: Run) -> None:
    folder = tmp_path / "job"
    with running(job(folder, "kill@1@12@0")) as run:
        assert run.finish() == 0, run.console()
    assert starts(folder) == [0, 10]
    assert ended(folder) == ended(undisturbed.folder.parent)


@pytest.mark.long
def test_a_step_that_hangs_is_found_by_its_section(tmp_path: Path, undisturbed: Run) -> None:
    folder = tmp_path / "job"
    with running(job(folder, "stop@1@12@0", timeouts="--ft-rank-section-timeouts=step:6")) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("hang", 1)
    assert starts(folder) == [0, 10]
    assert ended(folder) == ended(undisturbed.folder.parent)


@pytest.mark.long
def test_a_preempted_job_goes_on_from_its_checkpoint(tmp_path: Path, undisturbed: Run) -> None:
    folder = tmp_path / "job"
    run = job(folder, "pace@0.2")
    with running(run):
        run.until((folder / "checkpoint.pt").exists)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM, run.console()
    with running(run):
        assert run.finish() == 0, run.console()
    begun, resumed = starts(folder)
    assert (begun, resumed % 5) == (0, 0)
    assert 0 < resumed < int(STEPS)
    assert ended(folder) == ended(undisturbed.folder.parent)


def wrapped(folder: Path, *faults: str, allowed: int = 3) -> Run:
    folder.mkdir()
    arguments = (str(SCRIPTS / "nvrx_wrapped.py"), str(folder), "20", str(allowed), *faults)
    return Run(folder / "run", "outlast.compat.nvrx", *arguments, options=("--nproc-per-node", "2", "-m"))


def test_a_wrapped_function_is_entered_again_in_the_same_processes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for folder, faults in zip(folders, ([], ["raise@1@12@0"]), strict=True):
        with running(wrapped(folder, *faults)) as run:
            assert run.finish() == 0, run.console()
    whole, both = ([lines(folder / f"rank-{rank}") for rank in (0, 1)] for folder in folders)
    assert [one[-1]["digest"] for one in both] == [one[-1]["digest"] for one in whole]
    for rank, said in enumerate(both):
        assert len({one["pid"] for one in said}) == 1
        assert [one["kind"] for one in said] == [
            *("Begins", "trains", "Aborts", "finalized"),
            *("Begins", "trains", "Completes", "Leaves", "done"),
        ]
        assert [one["done"] for one in said if one["kind"] == "trains"] == [0, 10]
        first = next(one for one in said if one["kind"] == "Begins")
        assert (first["rank"], first["world"], first["iteration"]) == (rank, 2, 0)


@pytest.mark.long
def test_a_retry_controller_ends_the_job_without_another_restart(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with running(wrapped(folder, "raise@0@3@0", "raise@0@4@1", allowed=0)) as run:
        assert run.finish() == 93, run.console()
    assert "RetryController" in run.console()
    assert [one["done"] for one in lines(folder / "rank-0") if one["kind"] == "trains"] == [0]
