"""Real launchers, real gloo groups, real signals: a run finishes, and its result is the fault-free one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, Run, is_gone, running, runtime_folders, until

STEPS = 60
FAILED, USAGE, DO_NOT_REQUEUE, INTERRUPTED = 1, 64, 93, 130  # exit codes


def counting(tmp_path: Path, *faults: str, options: tuple[str, ...] = (), steps: int = STEPS) -> Run:
    arguments = (str(tmp_path / "trace"), str(steps), "10", *faults)
    return Run(tmp_path / "run", "counting.py", *arguments, options=("--nproc-per-node", "2", *options))


def scripted(tmp_path: Path, text: str, *arguments: str, options: tuple[str, ...] = ()) -> Run:
    script = tmp_path / "train.py"
    script.write_text(text)
    return Run(tmp_path / "run", str(script), *arguments, options=options)


def finishes(run: Run, code: int = 0) -> Run:
    with running(run):
        assert run.finish(230) == code, run.console()
    return run


def sums(tmp_path: Path) -> dict[int, float]:
    """Return the running sum after each step; a step that was done twice must agree with itself."""
    found: dict[int, float] = {}
    for line in (tmp_path / "trace" / "rank-0").read_text().splitlines():
        one = json.loads(line)
        assert found.setdefault(one["step"], one["sum"]) == one["sum"], one
    return found


def expected(steps: int = STEPS) -> dict[int, float]:
    return {step: float((step + 1) ** 2) for step in range(steps)}


def actions(run: Run) -> list[str]:
    return [one["action"] for one in run.records("action_taken")]


BOOM = "RuntimeError: boom on rank"


@pytest.mark.parametrize(
    "ends",
    [
        [("SIGKILL", 1, "crash", "signal 9"), ("raise", 1, "error", f"{BOOM} 1")],
        pytest.param(
            [
                ("SIGSEGV", 0, "crash", "signal 11"),
                ("exit", 1, "error", "exit 7"),
                ("parting", 1, "error", f"{BOOM} 1"),
                ("late", 0, "error", f"{BOOM} 0"),
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["some", "more"],
)
def test_a_rank_that_ends_is_named_and_the_run_finishes(
    tmp_path: Path, ends: list[tuple[str, int, str, str]]
) -> None:
    """However it ends: one way in each generation, five steps after a save."""
    numbered = list(enumerate(ends, 1))
    faults = [f"{how}@{rank}@{10 * number + 5}@{number}" for number, (how, rank, _, _) in numbered]
    steps = 10 * len(ends) + 10
    run = finishes(counting(tmp_path, *faults, options=("--max-restarts", "9"), steps=steps))
    found = [(one["fault"], one["rank"], one["signature"]) for one in run.records("fault_seen")]
    assert found == [(kind, rank, signature) for _, rank, kind, signature in ends]
    assert all(signature.partition(" ")[2] in run.console() for _, _, signature in found)
    assert actions(run) == ["restart-in-job"] * len(ends) + ["stop"]
    assert [one["step"] for one in run.records("loaded")] == [10 * number for number, _ in numbered]
    assert sums(tmp_path) == expected(steps)
    assert not re.search(r"\d", run.records("run_ended")[-1]["reason"]), "no step was left out"
    assert run.process is not None
    assert runtime_folders(run.process.pid) == []


@pytest.mark.long
def test_a_rank_that_is_stopped_or_sleeps_is_blamed_and_not_the_one_that_waits_for_it(
    tmp_path: Path,
) -> None:
    options = ("--ft-rank-heartbeat-timeout", "8", "--ft-rank-section-timeouts", "step:8,outlast.warmup:8")
    run = finishes(counting(tmp_path, "SIGSTOP@1@25@1", "sleep@0@45@2", options=options))
    faults = run.records("fault_seen")
    assert [(one["fault"], one["rank"]) for one in faults] == [("hang", 1), ("hang", 0)], faults
    stacks = Path(faults[0]["evidence"]["stacks"])
    assert "all_reduce" in (stacks / "rank-00000.txt").read_text()
    assert sums(tmp_path) == expected()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("--ft-initial-rank-heartbeat-timeout", "20"),
        ("--ft-rank-section-timeouts", "setup:20,forward:60,step:90"),
    ],
    ids=["initial", "setup"],
)
def test_a_hang_before_the_first_heartbeat_is_found(tmp_path: Path, options: tuple[str, str]) -> None:
    run = finishes(counting(tmp_path, "early@1@0@1", options=options))
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"], fault["step"]) == ("hang", 1, -1), fault
    assert sums(tmp_path) == expected()
    sections = set(re.findall(r"rank_section_timeouts\.(\w+)", run.console()))
    assert sections == ({"forward"} if "setup" in options[1] else set()), "one that never opens is named"


def test_a_session_that_closes_without_a_step_is_not_hung(tmp_path: Path) -> None:
    """Its silence begins at the close: not at 0, which would make it as old as the host's uptime."""
    script = "import time, outlast\nwith outlast.start() as s: pass\ntime.sleep(3)\n"
    run = finishes(scripted(tmp_path, script, options=("--ft-rank-section-timeouts", "outlast.finishing:30")))
    assert run.records("fault_seen") == []


def test_the_same_error_at_the_same_step_ends_the_job(tmp_path: Path) -> None:
    run = finishes(counting(tmp_path, "raise@1@25@0"), DO_NOT_REQUEUE)
    assert actions(run) == ["restart-in-job", "restart-in-job", "stop"]
    assert [one["step"] for one in run.records("loaded")] == [20, 10]
    assert f"{BOOM} 1" in run.console()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import a_module_that_does_not_exist\n", "ModuleNotFoundError"),
        ("class Model:\n    def __init__(self, width): ...\n\n\nModel(widht=3)\n", "TypeError"),
    ],
    ids=["import", "call"],
)
def test_an_error_in_the_program_costs_one_start(tmp_path: Path, script: str, error: str) -> None:
    run = finishes(scripted(tmp_path, script, options=("--nproc-per-node", "2")), DO_NOT_REQUEUE)
    assert len(run.records("generation_started")) == 1
    assert actions(run) == ["stop"]
    assert error in run.console()


def test_a_second_run_is_refused_and_workers_die_with_a_killed_agent_and_a_rerun_goes_on(
    tmp_path: Path,
) -> None:
    with running(counting(tmp_path, steps=100_000)) as run:
        run.wait_step(35)
        assert run.process is not None
        agent, pids = run.process.pid, run.pids()
        second = subprocess.run(run.command, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert second.returncode == USAGE
        assert str(agent) in second.stderr
        os.kill(agent, signal.SIGKILL)
        until(lambda: all(map(is_gone, pids)), "the workers to end with their agent")
        until(lambda: not runtime_folders(agent), "the runtime folder to go")
    again = finishes(counting(tmp_path))
    assert again.records("loaded")[-1]["step"] >= 30
    assert {step: value for step, value in sums(tmp_path).items() if step < STEPS} == expected()


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with running(counting(tmp_path, steps=100_000)) as run:
        run.wait_step(5)
        pids = run.pids()
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == INTERRUPTED, run.console()
    assert all(map(is_gone, pids))
    assert runtime_folders(run.process.pid) == []


@pytest.mark.long
def test_a_finished_run_has_nothing_to_do_and_fewer_ranks_go_on_where_it_ended(tmp_path: Path) -> None:
    for _ in range(2):
        finishes(counting(tmp_path))
    assert sums(tmp_path) == expected()
    run = finishes(counting(tmp_path, options=("--nproc-per-node", "1"), steps=STEPS + 10))
    assert [one["step"] for one in run.records("loaded")] == [STEPS, STEPS]


FAILS_AFTER_ITS_LOOP = """
import outlast, torch

model = torch.nn.Linear(1, 1)
with outlast.start(save_interval=2) as session:
    session.restore(model=model)
    for _ in session.steps(6):
        loss = model(torch.ones(1)).sum()
print(loss)
"""


@pytest.mark.long
def test_a_finished_run_that_is_started_again_and_raises_after_its_loop_blames_no_checkpoint(
    tmp_path: Path,
) -> None:
    run = scripted(tmp_path, FAILS_AFTER_ITS_LOOP)
    for code in (0, DO_NOT_REQUEUE):
        finishes(run, code)
    assert {one["step"] for one in run.records("loaded")} == {6}
    assert {one["trust"] for one in run.records("trust_changed")} <= {"proven"}


@pytest.mark.long
def test_a_job_that_is_done_refills_the_restarts_and_a_launch_without_any_says_so(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    script = f"import os\nif os.path.exists({str(bad)!r}):\n    raise RuntimeError('boom')\n"
    run, restarts = scripted(tmp_path, script, options=("--max-restarts", "1")), 0
    for fails, begins_spent in ((True, False), (True, True), (False, True), (True, False)):
        bad.touch() if fails else bad.unlink(missing_ok=True)
        run.output.unlink(missing_ok=True)
        finishes(run, FAILED if fails else 0)
        assert ("--run-dir" in run.console()) is begins_spent, run.console()
        before, restarts = restarts, actions(run).count("restart-in-job")
        assert restarts - before == (fails and not begins_spent)
