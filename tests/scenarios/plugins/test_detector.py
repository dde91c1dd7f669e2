"""A detector of another package restarts a real job; one that fails is disabled, and the job goes on."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.launching import Run, running
from tests.support.plugging import documented, install

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace: apt-get install strace")
WAITING = "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"


def waiting(folder: Path) -> Run:
    """Return a job of one rank, which ends with 0 as soon as there is a file ``go``."""
    words = ("-c", WAITING, str(folder / "go"))
    return Run(folder / "run", sys.executable, *words, options=("--no-python",))


def test_a_fault_of_a_registered_detector_restarts_the_job(tmp_path: Path) -> None:
    smoke = documented("add-a-detector.md", "Smoke")
    path = install(tmp_path / "site", "outlast.detectors", "smoke", smoke, "Smoke")
    flag = tmp_path / "flag"
    with running(waiting(tmp_path), PYTHONPATH=path, SMOKE_FLAG=str(flag)) as run:
        run.pids(1)
        flag.touch()
        run.pids(2)
        (tmp_path / "go").touch()
        assert run.finish() == 0, run.console()
    fault, action = run.records("fault_seen")[0], run.records("action_taken")[0]
    assert (fault["rank"], str(flag) in fault["reason"]) == (0, True)
    assert fault["evidence"]["detector"] == "smoke"
    assert action["action"] == "restart-in-job"


def test_a_detector_that_raises_is_disabled_and_the_job_goes_on(tmp_path: Path) -> None:
    source = "class Broken:\n    name = 'broken'\n    def poll(self, now, node):\n        return 1 / 0\n"
    path = install(tmp_path / "site", "outlast.detectors", "broken", source, "Broken")
    with running(waiting(tmp_path), PYTHONPATH=path) as run:
        run.until(lambda: "ZeroDivisionError" in run.console())
        (tmp_path / "go").touch()
        assert run.finish() == 0, run.console()
    assert run.records("fault_seen") == []


@needs_strace
def test_a_detector_for_which_no_thread_can_be_started_is_disabled_and_the_job_goes_on(
    tmp_path: Path,
) -> None:
    source = "class Idle:\n    name = 'idle'\n    def poll(self, now, node):\n        return ()\n"
    path = install(tmp_path / "site", "outlast.detectors", "idle", source, "Idle")
    run = waiting(tmp_path)
    run.command[:0] = [
        "strace",
        "-o",
        os.devnull,
        "-e",
        "inject=clone3:error=EAGAIN",
    ]  # of threads, not forks
    with running(run, PYTHONPATH=path):
        run.until(lambda: any("idle" in one["reason"] for one in run.records("note")))
        (tmp_path / "go").touch()
        assert run.finish() == 0, run.console()
