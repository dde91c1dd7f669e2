"""Real launchers, real gloo groups, real signals: a run finishes, and its result is the fault-free one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.errors import ExitCode
from tests.support.launching import DEADLINE, Run, is_gone, running, runtime_folders, until

STEPS = 60


def counting(tmp_path: Path, *faults: str, options: tuple[str, ...] = (), steps: int = STEPS) -> Run:
    arguments = (str(tmp_path / "trace"), str(steps), "10", *faults)
    return Run(tmp_path / "run", "counting.py", *arguments, options=("--nproc-per-node", "2", *options))


def sums(tmp_path: Path, rank: int = 0) -> dict[int, float]:
    """Return the running sum after each step; a step that was done twice must agree with itself."""
    found: dict[int, float] = {}
    for line in (tmp_path / "trace" / f"rank-{rank}").read_text().splitlines():
        one = json.loads(line)
        assert found.setdefault(one["step"], one["sum"]) == one["sum"], one
    return found


def expected(steps: int = STEPS) -> dict[int, float]:
    total, found = 0.0, {}
    for step in range(steps):
        total += 2 * step + 1
        found[step] = total
    return found


ENDS = (
    ("SIGKILL", 1, "crash", "signal 9 (SIGKILL)"),
    ("SIGSEGV", 0, "crash", "signal 11 (SIGSEGV)"),
    ("raise", 1, "error", "RuntimeError: boom on rank 1"),
    ("exit", 1, "error", "status 7"),
    ("parting", 1, "error", "RuntimeError: boom on rank 1"),
    ("late", 0, "error", "RuntimeError: boom on rank 0"),
)


@pytest.mark.timeout(420)
def test_a_rank_that_ends_is_named_and_the_run_finishes(tmp_path: Path) -> None:
    """However it ends: one way in each generation, five steps after a save."""
    numbered = list(enumerate(ENDS, 1))
    ends = [f"{how}@{rank}@{10 * number + 5}@{number}" for number, (how, rank, _, _) in numbered]
    steps = 10 * len(ENDS) + 10
    with running(counting(tmp_path, *ends, options=("--max-restarts", "9"), steps=steps)) as run:
        assert run.finish(230) == 0, run.console()
    faults = run.records("fault_seen")
    assert [(one["fault"], one["rank"]) for one in faults] == [(kind, at) for _, at, kind, _ in ENDS], faults
    kinds = [one["action"] for one in run.records("action_taken")]
    assert kinds == ["restart-in-job"] * len(ENDS) + ["stop"]
    assert [one["step"] for one in run.records("loaded")] == [10 * number for number, _ in numbered]
    assert sums(tmp_path) == expected(steps)
    for fault, (_, _, _, words) in zip(faults, ENDS, strict=True):
        assert words in fault["reason"]
        assert words in run.console()
    assert runtime_folders(run.process.pid) == []


def test_a_rank_that_is_stopped_or_sleeps_is_blamed_and_not_the_one_that_waits_for_it(
    tmp_path: Path,
) -> None:
    options = ("--ft-rank-heartbeat-timeout", "8", "--ft-rank-section-timeouts", "step:8,outlast.warmup:8")
    with running(counting(tmp_path, "SIGSTOP@1@25@1", "sleep@0@45@2", options=options)) as run:
        assert run.finish() == 0, run.console()
    faults = run.records("fault_seen")
    assert [(one["fault"], one["rank"]) for one in faults] == [("hang", 1), ("hang", 0)], faults
    stacks = Path(faults[0]["evidence"]["stacks"])
    assert "all_reduce" in (stacks / "rank-00000.txt").read_text()
    assert sums(tmp_path) == expected()


def test_a_hang_before_the_first_heartbeat_is_found(tmp_path: Path) -> None:
    options = ("--ft-initial-rank-heartbeat-timeout", "20")
    with running(counting(tmp_path, "early@1@0@1", options=options)) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"], fault["step"]) == ("hang", 1, -1), fault
    assert "Did not get initial heartbeat. Waited" in fault["reason"]
    assert sums(tmp_path) == expected()


def test_a_session_that_closes_without_a_step_is_not_hung(tmp_path: Path) -> None:
    """Its silence begins at the close: not at 0, which would make it as old as the host's uptime."""
    script = tmp_path / "closes.py"
    script.write_text("import time, outlast\nwith outlast.start() as s: pass\ntime.sleep(3)\n")
    options = ("--ft-rank-section-timeouts", "outlast.finishing:30")
    with running(Run(tmp_path / "run", str(script), options=options)) as run:
        assert run.finish() == 0, run.console()
    assert run.records("fault_seen") == []


def test_a_timeout_of_the_setup_is_kept_and_one_of_a_section_that_never_opens_is_said(tmp_path: Path) -> None:
    options = ("--ft-rank-section-timeouts", "setup:20,forward:60,step:90")
    with running(counting(tmp_path, "early@1@0@1", options=options)) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"], fault["step"]) == ("hang", 1, -1), fault
    assert "Section 'setup' has been open for" in fault["reason"]
    assert "rank_section_timeouts.forward: no rank of this node has opened this section" in run.console()
    assert "rank_section_timeouts.setup:" not in run.console()
    assert "rank_section_timeouts.step:" not in run.console()


def test_the_same_error_at_the_same_step_ends_the_job(tmp_path: Path) -> None:
    with running(counting(tmp_path, "raise@1@25@0")) as run:
        assert run.finish() == 93, run.console()
    kinds = [one["action"] for one in run.records("action_taken")]
    assert kinds[-1] == "stop", kinds
    assert len(kinds) <= 3, kinds
    assert "RuntimeError: boom on rank 1" in run.console()


def test_an_import_error_is_not_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import a_module_that_does_not_exist\n")
    with running(Run(tmp_path / "run", str(script), options=("--nproc-per-node", "2"))) as run:
        assert run.finish() == 93, run.console()
    assert len(run.records("generation_started")) == 1
    assert "ModuleNotFoundError" in run.console()


def test_a_second_run_is_refused_and_workers_die_with_a_killed_agent_and_a_rerun_goes_on(
    tmp_path: Path,
) -> None:
    with running(counting(tmp_path, steps=100_000)) as run:
        run.wait_step(35)
        second = subprocess.run(run.command, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert second.returncode == 64
        assert str(run.process.pid) in second.stderr
        pids = run.pids()
        os.kill(run.process.pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, pids)), "the workers to end with their agent")
        until(lambda: not runtime_folders(run.process.pid), "the runtime folder to go")
    again = counting(tmp_path)
    with running(again):
        assert again.finish() == 0, again.console()
    loaded = again.records("loaded")
    assert loaded[-1]["step"] >= 30
    assert {step: value for step, value in sums(tmp_path).items() if step < STEPS} == expected()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(tmp_path: Path, number: int, status: int) -> None:
    with running(counting(tmp_path, steps=100_000)) as run:
        run.wait_step(5)
        pids = run.pids()
        run.process.send_signal(number)
        assert run.finish() == status, run.console()
    assert all(map(is_gone, pids))
    assert runtime_folders(run.process.pid) == []


def test_a_finished_run_has_nothing_to_do_and_fewer_ranks_go_on_where_it_ended(tmp_path: Path) -> None:
    for _ in range(2):
        with running(counting(tmp_path)) as run:
            assert run.finish() == 0, run.console()
    assert sums(tmp_path) == expected()
    other = counting(tmp_path, options=("--nproc-per-node", "1"), steps=STEPS + 10)
    with running(other):
        assert other.finish() == 0, other.console()
    assert [one["step"] for one in run.records("loaded")] == [STEPS, STEPS]
    assert any("random states follow from the checkpoint" in one["reason"] for one in run.records("note"))


def test_the_launcher_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['outlast', 'run', '--help']\n"
        "import outlast.cli\n"
        "try: outlast.cli.main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "import outlast.launcher.agent\n"
        "assert not {'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


FAILS_AFTER_ITS_LOOP = """
import outlast, torch

model = torch.nn.Linear(1, 1)
with outlast.start(save_interval=2) as session:
    session.restore(model=model)
    for _ in session.steps(6):
        loss = model(torch.ones(1)).sum()
print(loss)
"""


def test_a_finished_run_that_is_started_again_and_raises_after_its_loop_blames_no_checkpoint(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_AFTER_ITS_LOOP)
    run = Run(tmp_path / "run", str(script), options=("--nproc-per-node", "1"))
    for code in (0, int(ExitCode.DO_NOT_REQUEUE)):
        with running(run):
            assert run.finish() == code, run.console()
    assert {one["step"] for one in run.records("loaded")} == {6}
    assert [one for one in run.records("trust_changed") if one["trust"] != "proven"] == []
    assert "the run was complete" in run.records("action_taken")[-1]["reason"]


def test_a_job_that_is_done_refills_the_restarts_and_a_launch_without_any_says_so(tmp_path: Path) -> None:
    script, bad = tmp_path / "plain.py", tmp_path / "bad"
    script.write_text(f"import os\nif os.path.exists({str(bad)!r}):\n    raise RuntimeError('boom')\n")
    bad.touch()
    run = Run(tmp_path / "run", str(script), options=("--max-restarts", "1"))
    spent = "earlier launches of this run have used 1 of 1 restarts (--max-restarts) for error (Runtime"
    for fails, begins_spent in ((True, False), (True, True), (False, True), (True, False)):
        bad.touch() if fails else bad.unlink()
        run.output.unlink(missing_ok=True)
        with running(run):
            assert run.finish() == int(fails), run.console()
        assert (spent in run.console()) is begins_spent, run.console()
        assert ("-> restart-in-job: restart 1 of 1" in run.console()) is (fails and not begins_spent)
