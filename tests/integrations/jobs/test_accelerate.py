"""A script with accelerate under the launcher: killed, preempted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from outlast.errors import ExitCode
from tests.support.frameworks import job, lines_of, needs, reached
from tests.support.launching import running, until

pytestmark = needs("accelerate")
SCRIPT = "accelerated.py"


def test_steps_are_counted_over_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with running(job(folder, SCRIPT, "", fatal=8)) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert fault["step"] in (7, 8)  # of the slowest rank
    assert fault["source"] != "counted"
    assert {one["step"] for one in run.records("script_saved")} == {3, 6, 9, 12}
    assert (folder / "done-1").read_text() == "12"


def test_a_save_that_raised_is_not_reported(tmp_path: Path) -> None:
    with running(job(tmp_path / "job", SCRIPT, "fails")) as run:
        assert run.finish() == 0, run.console()
    assert [one["step"] for one in run.records("script_saved")] == [3, 9, 12]
    assert "the save at step 6 was not completed" in run.console()


def test_a_preempted_script_saves_and_leaves_its_loop(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "", pace=0.3)
    with running(run):
        until(reached(folder / "steps-0", 4), run.console)
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == int(ExitCode.PREEMPTED), run.console()
    last = [int(lines_of(folder / f"steps-{rank}")[-1]) for rank in (0, 1)]
    assert last[0] == last[1] < 12
    assert (folder / f"step-{last[0]:03}" / "outlast_step.json").exists()
