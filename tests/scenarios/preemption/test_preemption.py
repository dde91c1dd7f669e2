"""A job that is told to end: real ranks, real signals; every rank saves the same step, and exits in time."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DEADLINE, SCRIPTS, Run, is_gone, running, runtime_folders, until
from tests.support.ranks import Ranks, copies, lines, ranks

PREEMPTED, INTERRUPTED, TERMINATED = 75, 130, 143  # exit codes
GIVEN_BACK = [PREEMPTED] * 2


def config(**options: object) -> str:
    return f"config={json.dumps(options)}"


def given_back(job: Ranks) -> int:
    """Return the step that both ranks saved and ended at, once they have."""
    assert job.finish() == GIVEN_BACK, job.output()
    ends = [job.lines(rank)[-1] for rank in (0, 1)]
    assert all(end["preempted"] for end in ends), job.output()
    assert ends[0]["ended"] == ends[1]["ended"] == copies(job.run)[-1], job.output()
    return int(ends[0]["ended"])


def losses(trace: Path) -> dict[tuple[int, int], str]:
    found = {rank: lines(trace / f"rank-{rank}") for rank in (0, 1)}
    return {(rank, one["step"]): one["loss"] for rank in found for one in found[rank] if "loss" in one}


# Ranks without a launcher


@pytest.mark.parametrize("slow", [(1,), pytest.param((0, 1), marks=pytest.mark.long)], ids=["one", "all"])
def test_quick_steps_that_turned_slow_cost_two_steps(tmp_path: Path, slow: tuple[int, ...]) -> None:
    with ranks(tmp_path, "pace=0", "drag=2") as job:
        job.reach(200)
        for rank in slow:
            (job.trace / f"drag-{rank}").touch()
        until(lambda: any("drags" in line for line in job.lines(1)), job.output)
        under_way = max(line["step"] for rank in (0, 1) for line in job.lines(rank) if "step" in line)
        job.send(1)
        assert under_way < given_back(job) <= under_way + 2, "that step and the next one at most"


def test_sigint_is_a_notice_where_the_user_wants_it_to_be(tmp_path: Path) -> None:
    with ranks(tmp_path, config(exit_signals=["SIGINT"])) as job:
        job.reach(5)
        job.send(1, number=signal.SIGINT)
        assert given_back(job) > 5
    assert "SIGINT" in job.output()
    assert "KeyboardInterrupt" not in job.output()


def test_signals_that_come_apart_and_again_give_one_save(tmp_path: Path) -> None:
    with ranks(tmp_path, "memory", "size=30000000") as job:
        job.reach(5)
        job.send(0)
        time.sleep(0.3)  # the skew that ranks with a flag of their own do not survive
        job.send(1)
        for _ in range(3):
            job.send_to_all()
        job.send_to_all(signal.SIGUSR1)
        given_back(job)
    assert len(copies(job.run)) == 1
    assert 1 <= job.output().count("600s") <= 2, "each rank reports one notice at most"


def test_signals_until_the_very_end_do_not_change_the_exit_code(tmp_path: Path) -> None:
    with ranks(tmp_path, "memory") as job:
        job.reach(5)
        job.send_to_all()
        until(lambda: copies(job.run), "the save")
        while any(process.poll() is None for process in job.processes):
            for process in job.processes:
                process.send_signal(signal.SIGTERM)
            select.select([], [], [], 0.005)  # a scheduler is not a storm
        given_back(job)


def test_what_goes_on_after_a_signal_to_one_rank_is_what_would_have_been_without_it(tmp_path: Path) -> None:
    steps = 40
    with ranks(tmp_path / "whole", "pace=0", steps=steps) as job:
        assert job.finish() == [0, 0], job.output()
        whole = losses(job.trace)
        content = [job.lines(rank)[-1]["content"] for rank in (0, 1)]
    assert len(whole) == 2 * steps
    with ranks(tmp_path / "cut", steps=steps) as job:
        job.reach(6)
        job.send(1)
        ended = given_back(job)
    assert 6 < ended < steps
    with ranks(tmp_path / "cut", "pace=0", steps=steps) as job:
        assert job.finish() == [0, 0], job.output()
        assert {"restored": ended} in job.lines()
        assert [job.lines(rank)[-1]["content"] for rank in (0, 1)] == content
    assert losses(job.trace) == whole


@pytest.mark.long
def test_a_signal_before_torch_is_there_is_not_lost(tmp_path: Path) -> None:
    with ranks(tmp_path, "early", cold=True) as job:
        until(lambda: all((job.trace / f"early-{rank}").exists() for rank in (0, 1)), "the handlers")
        job.send(0)
        until(lambda: "SIGTERM" in job.output(), "word of the signal")
        (job.trace / "go").touch()
        assert job.finish() == GIVEN_BACK, job.output()
        assert job.lines()[-1]["ended"] == 0


def test_workers_of_a_dataloader_live_until_the_state_is_saved(tmp_path: Path) -> None:
    with ranks(tmp_path, "loader", steps=2000) as job:
        job.reach(5)
        assert len(list(job.trace.glob("worker-*"))) == 4
        job.send_to_all()
        given_back(job)
        workers = [int(path.name.rpartition("-")[2]) for path in job.trace.glob("worker-*")]
        until(lambda: all(map(is_gone, workers)), "the end of the workers")


def test_a_worker_of_a_dataloader_that_dies_costs_no_saved_step(tmp_path: Path) -> None:
    with ranks(tmp_path, "loader", "memory", config(enable_exit_handler_for_data_loader=False)) as job:
        job.reach(5)
        job.send_to_all()
        assert job.finish() == GIVEN_BACK, job.output()
        assert copies(job.run)[-1] >= 5


def test_workers_that_die_one_after_another_before_the_rank_is_signalled_cost_no_saved_step(
    tmp_path: Path,
) -> None:
    with ranks(tmp_path, "memory", "lose@0@60", "lose@1@60") as job:
        assert job.finish() == GIVEN_BACK, job.output()
        assert 0 < copies(job.run)[-1] <= 61
    assert "ConnectionResetError" in job.output()


def test_a_hung_group_keeps_what_is_staged(tmp_path: Path) -> None:
    with ranks(tmp_path, "memory", "hang@1@7", config(preempt_time=8.0)) as job:
        until(lambda: {"hangs": 7} in job.lines(1), "the hang")
        job.send_to_all()
        assert job.finish() == GIVEN_BACK, job.output()
    assert copies(job.run) == [7]


def test_a_stopped_rank_costs_the_others_no_more_than_the_deadline(tmp_path: Path) -> None:
    with ranks(tmp_path, "memory", config(preempt_time=8.0)) as job:
        job.reach(5)
        job.send(1, number=signal.SIGSTOP)
        job.send(0)
        assert job.processes[0].wait(DEADLINE) == PREEMPTED, job.output()
        job.send(1, number=signal.SIGCONT)
    assert copies(job.run)[-1] >= 5


def test_a_notice_file_and_a_grace_period_are_heeded(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    with ranks(tmp_path, config(notice_file=str(notice))) as job:
        job.reach(5)
        (tmp_path / "written").write_text("30")
        (tmp_path / "written").rename(notice)
        given_back(job)
    assert str(notice) in job.output()


def test_one_rank_may_ask_all_of_them_to_save_and_to_stop(tmp_path: Path) -> None:
    with ranks(tmp_path, "save@1@5", "stop@0@60") as job:
        assert job.finish() == [0, 0], job.output()
        ends = [job.lines(rank)[-1] for rank in (0, 1)]
    assert ends[0]["ended"] == ends[1]["ended"] == copies(job.run)[-1] >= 61
    assert not ends[0]["preempted"]
    assert 6 <= copies(job.run)[0] < 60


def test_a_loop_of_its_own_ends_at_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path, script="handler_loop.py") as job:
        job.reach(5)
        job.send(1)
        assert job.finish() == [0, 0], job.output()
        first, second = (job.lines(rank)[-1] for rank in (0, 1))
    assert first["ended"] == second["ended"] > 5
    assert (first["requested"], second["requested"]) == (False, True)
    assert (first["signal"], second["signal"]) == (None, "SIGTERM")


def test_a_loop_that_hangs_on_its_way_out_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with ranks(tmp_path, "5", "hang", script="handler_loop.py") as job:
        job.reach(5)
        job.send(0, 1)
        assert job.finish() == [1, 1], job.output()


def test_without_handlers_a_signal_ends_a_rank_as_ever(tmp_path: Path) -> None:
    with ranks(tmp_path, config(enable_exit_handler=False)) as job:
        job.reach(5)
        job.send(0, 1)
        assert job.finish() == [-signal.SIGTERM] * 2, job.output()


# Under a launcher


def launched(
    tmp_path: Path, *words: str, script: str = "preempted.py", steps: str = "100000", **options: object
) -> Run:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    arguments = (str(tmp_path / "trace"), str(tmp_path / "run"), steps, *words)
    return Run(tmp_path / "run", script, *arguments, options=("--nproc-per-node=2", *given))


def trains(tmp_path: Path, run: Run) -> subprocess.Popen[bytes]:
    """Return the launcher once its ranks have done some steps."""
    run.until(lambda: len(lines(tmp_path / "trace" / "rank-0")) > 10)
    assert run.process is not None
    return run.process


def check_same_step(tmp_path: Path, console: str) -> None:
    ends: list[dict[str, Any]] = [lines(tmp_path / "trace" / f"rank-{rank}")[-1] for rank in (0, 1)]
    assert ends[0]["ended"] == ends[1]["ended"] == copies(tmp_path / "run")[-1], console


def test_the_job_is_given_back_without_a_fault_when_a_rank_is_told(tmp_path: Path) -> None:
    with running(launched(tmp_path)) as run:
        trains(tmp_path, run)
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == PREEMPTED, run.console()
    assert [one["exit_code"] for one in run.records("run_ended")] == [PREEMPTED]
    assert run.records("fault_seen") == []
    assert [one["action"] for one in run.records("action_taken")] == ["stop"]
    check_same_step(tmp_path, run.console())


def test_a_launcher_waits_for_ranks_that_save_and_is_deaf_to_repeats(tmp_path: Path) -> None:
    with running(launched(tmp_path, "slow=4", ft_workers_stop_timeout=3)) as run:
        process, pids = trains(tmp_path, run), run.pids()
        (tmp_path / "trace" / "slow").touch()
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        run.until((tmp_path / "trace" / "saving-0").exists)
        process.send_signal(signal.SIGTERM)
        assert run.finish() == TERMINATED, run.console()
    check_same_step(tmp_path, run.console())
    (ended,) = run.records("run_ended")
    assert list(map(int, re.findall(r"\d+", ended["reason"]))) == [
        signal.SIGTERM,
        copies(tmp_path / "run")[-1],
    ]
    assert all(map(is_gone, pids))
    assert runtime_folders(process.pid) == []


@pytest.mark.long
def test_a_launcher_that_is_interrupted_gives_the_job_back_where_sigint_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[preemption]\nexit_signals = ["SIGINT"]\n')
    with running(launched(tmp_path, config=tmp_path / "config.toml")) as run:
        trains(tmp_path, run).send_signal(signal.SIGINT)
        assert run.finish() == INTERRUPTED, run.console()
    check_same_step(tmp_path, run.console())


@pytest.mark.long
def test_a_launcher_waits_for_a_loop_of_its_own_as_long_as_its_handler_says(tmp_path: Path) -> None:
    how = {"script": "handler_loop.py", "steps": "5", "ft_workers_stop_timeout": 1}
    with running(launched(tmp_path, "100", "linger", **how)) as run:
        trains(tmp_path, run).send_signal(signal.SIGTERM)
        assert run.finish() == TERMINATED, run.console()
    for rank in (0, 1):
        assert lines(tmp_path / "trace" / f"rank-{rank}")[-1] == {"finished": True}, run.console()


HELD = """
import sys, time
import torch, outlast

model = torch.nn.Linear(2, 2)
with outlast.start(save_interval=1) as session:
    session.restore(model=model)
    for step in session.steps(3):
        while step == 1:
            time.sleep(0.1)
"""


@pytest.mark.long
def test_a_rank_that_is_stopped_while_it_gives_the_job_back_is_not_waited_for(tmp_path: Path) -> None:
    """It has ten minutes by default, and would use them all."""
    script = tmp_path / "held.py"
    script.write_text(HELD)
    options = ("--nproc-per-node=1", "--ft-workers-stop-timeout=2")
    with running(Run(tmp_path / "run", str(script), options=options)) as run:
        assert run.process is not None
        (rank,) = run.pids()
        run.until(lambda: run.records("saved"))
        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: [one for one in run.records("note") if "600s" in one["reason"]])
        os.kill(rank, signal.SIGSTOP)
        assert run.finish() == TERMINATED, run.console()
    assert is_gone(rank)


@pytest.mark.long
def test_a_rank_that_is_stopped_before_the_notice_has_its_own_time_only(tmp_path: Path) -> None:
    """The others wait for its agreement for 56 s."""
    with running(launched(tmp_path, "interval=5", ft_workers_stop_timeout=2)) as run:
        process, (goes_on, stopped) = trains(tmp_path, run), run.pids()
        run.until(lambda: run.records("saved"))
        os.kill(stopped, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        until(lambda: is_gone(stopped), run.console, 30.0)
        if not is_gone(goes_on):
            process.send_signal(signal.SIGINT)
        assert run.finish() == TERMINATED, run.console()


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += [str(SCRIPTS / "preempted.py"), str(tmp_path / "trace"), str(tmp_path / "run"), "100000"]
    with open(tmp_path / "output", "wb") as output:
        torchrun = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        until(lambda: len(losses(tmp_path / "trace")) > 10, "steps")
        torchrun.send_signal(signal.SIGTERM)
        torchrun.wait(DEADLINE)
    finally:
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
    check_same_step(tmp_path, (tmp_path / "output").read_text())
