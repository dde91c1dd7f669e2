"""Scripts without a session: their own checkpoints, what they announce, and what is decided and reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DEADLINE, SCRIPTS, Run, running


def launch(tmp_path: Path, how: str, *options: str, steps: int = 100, life: int = 22) -> Run:
    kept = tmp_path / "kept"
    kept.mkdir()
    arguments = (str(kept), str(steps), str(life), how)
    options = ("--nproc-per-node", "1", *options)
    return Run(tmp_path / "run", "own_checkpoints.py", *arguments, options=options)


def reported(run: Run) -> dict[str, Any]:
    command = [sys.executable, "-m", "outlast", "report", str(run.folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "how", ["announce", *(pytest.param(one, marks=pytest.mark.long) for one in ("late", "steps"))]
)
def test_a_job_that_gets_on_by_its_own_checkpoints_is_not_ended(tmp_path: Path, how: str) -> None:
    """Each life is killed after 22 steps of its own, four times: at 22, 42, 62 and 82."""
    with running(launch(tmp_path, how, "--max-restarts", "1")) as run:
        assert run.finish() == 0, run.console()
    assert (tmp_path / "kept" / "done-0").read_text() == "100"
    faults = run.records("fault_seen")
    assert len(faults) == 4, faults
    if how != "late":
        assert [one["step"] for one in faults] == [22, 42, 62, 82]
        assert [one["steps_lost"] for one in reported(run)["incidents"]] == [2, 2, 2, 2]
    assert all(one["source"] != "counted" for one in faults[how == "late" :])


def test_a_script_that_says_nothing_has_as_many_restarts_as_torchrun_gives_it(tmp_path: Path) -> None:
    """The same fault at the same step of each process is no reason to give up."""
    with running(launch(tmp_path, "quiet", "--max-restarts", "3", steps=70)) as run:
        assert run.finish() == 0, run.console()
    assert len(run.records("fault_seen")) == 3
    found = reported(run)
    assert (found["goodput"], found["seconds"]["lost_work"], found["steps_unknown"]) == (None, None, True)
    assert [one["steps_lost"] for one in found["incidents"]] == [None] * 3


def test_a_script_that_says_nothing_and_whose_restarts_are_spent_may_be_queued_again(tmp_path: Path) -> None:
    with running(launch(tmp_path, "quiet", "--max-restarts", "2")) as run:
        assert run.finish() == 1, run.console()
    assert len(run.records("fault_seen")) == 3


def test_the_same_fault_at_the_same_announced_step_ends_the_job(tmp_path: Path) -> None:
    """With lives of 12 steps no checkpoint is ever reached: step 12 fails each time."""
    with running(launch(tmp_path, "announce", "--max-restarts", "9", life=12)) as run:
        assert run.finish() == 93, run.console()
    assert {one["step"] for one in run.records("fault_seen")} == {12}


def test_garbage_that_is_due_is_collected_before_the_first_step_and_not_in_it(tmp_path: Path) -> None:
    orders, answers = tmp_path / "orders", tmp_path / "answers"
    orders.write_text("imports\nbegin 0\ndue\nstep_done 1\nend\n")
    words = (str(orders), str(answers))
    with running(
        Run(tmp_path / "run", "announced_loop.py", *words, options=("--nproc-per-node", "1"))
    ) as run:
        assert run.finish() == 0, run.console()
    due = dict(line.split()[:2] for line in answers.read_text().splitlines())
    assert (due["imports"], due["due"]) == ("True", "False")


LONG_END = """
import atexit, time
atexit.register(time.sleep, 9)  # runs after what is registered later
import outlast
for step in range(1, 400):
    time.sleep(0.005)
    outlast.progress(step)
"""


def test_a_long_end_of_the_interpreter_is_no_hang(tmp_path: Path) -> None:
    """The timeouts that short steps have taught do not apply to it."""
    script = tmp_path / "long_end.py"
    script.write_text(LONG_END)
    options = ("--nproc-per-node", "1", "--ft-workload-check-interval", "0.5")
    with running(Run(tmp_path / "run", str(script), options=options)) as run:
        assert run.finish() == 0, run.console()
    assert run.records("fault_seen") == []
    assert list((run.folder / "incidents").glob("*")) == []


LONG_LAST_WORDS = """
import pathlib, sys, time
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
for step in range(20):
    time.sleep(0.1)
    before = time.monotonic()
    optimizer.step()
    after = time.monotonic()
time.sleep(2)
pathlib.Path(sys.argv[1]).write_text(f"{before} {after}")
"""


def test_a_script_stops_after_its_last_step_and_not_where_progress_was_written_last(tmp_path: Path) -> None:
    script, times = tmp_path / "script.py", tmp_path / "times"
    script.write_text(LONG_LAST_WORDS)
    with running(Run(tmp_path / "run", str(script), str(times), options=("--nproc-per-node", "1"))) as run:
        assert run.finish() == 0, run.console()
    before, after = map(float, times.read_text().split())
    last = run.records("progress")[-1]
    assert (last["step"], last["source"], before <= last["clock"] <= after) == (20, "counted", True)
    (started,), (ended,) = run.records("run_started"), run.records("run_ended")
    stopping = reported(run)["seconds"]["stopping"]
    assert ended["clock"] - after - 0.001 <= stopping <= ended["clock"] - before + 0.001
    assert started["clock"] < last["clock"] < ended["clock"] - 2


def test_without_a_launcher_nothing_happens(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "own_checkpoints.py"), str(tmp_path), "20", "0", "announce"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={"RANK": "0", "PATH": "/bin"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ODD = """
import outlast
for odd in ({odd}):
    try:
        outlast.progress(*odd)
    except outlast.errors.UsageError as error:
        assert "outlast.progress" in str(error), error
    else:
        raise AssertionError(odd)
"""


def test_what_is_no_step_is_refused_everywhere() -> None:
    odd = "(-1,), (float('nan'),), (1.0,), (True,), ('7',), (None,), (1 << 62,), (3, 1), (3, None)"
    script = f"import outlast.errors\n{ODD.format(odd=odd)}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("first", "second"),
    [("outlast.start()", "outlast.progress(1)"), ("outlast.progress(1)", "outlast.start()")],
)
def test_a_session_and_announcements_exclude_each_other(tmp_path: Path, first: str, second: str) -> None:
    script = tmp_path / "both.py"
    script.write_text(f"import outlast\nkept = {first}\n{second}\n")
    with running(Run(tmp_path / "run", str(script), options=("--nproc-per-node", "1"))) as run:
        assert run.finish() == 93, run.console()
    (fault,) = run.records("fault_seen")
    assert second.partition("(")[0] in fault["signature"]
