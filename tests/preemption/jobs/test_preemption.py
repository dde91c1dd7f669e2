"""A job that is told to end: real ranks, real signals; every rank saves the same step, and exits in time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ExitCode
from tests.checkpoint.jobs.test_global import use_s3
from tests.support.launching import DEADLINE, SCRIPTS, Run, is_gone, running, until
from tests.support.ranks import Ranks, copies, lines, ranks
from tests.support.s3_bucket import Bucket, proxy, s3_server

GIVEN_BACK = [int(ExitCode.PREEMPTED)] * 2


def same_step(job: Ranks) -> int:
    """Return the step that both ranks saved and ended at."""
    ends = [job.lines(rank)[-1] for rank in (0, 1)]
    assert all(end["preempted"] for end in ends), job.output()
    assert ends[0]["ended"] == ends[1]["ended"] == copies(job.run)[-1], job.output()
    return int(ends[0]["ended"])


def losses(trace: Path) -> dict[tuple[int, int], str]:
    return {
        (rank, line["step"]): line["loss"]
        for rank in (0, 1)
        for line in lines(trace / f"rank-{rank}")
        if "loss" in line
    }


def test_a_signal_to_one_rank_is_heeded_by_all(tmp_path: Path) -> None:
    with ranks(tmp_path) as job:
        job.reach(5)
        job.send(1)
        assert job.finish() == GIVEN_BACK, job.output()
        assert same_step(job) > 5
    assert "Received SIGTERM on rank 1 — requesting graceful shutdown; Forced exit in 600s" in job.output()
    assert "Graceful shutdown complete" in job.output()


@pytest.mark.parametrize("slow", [(0, 1), (1,)], ids=["all", "one"])
def test_quick_steps_that_turned_slow_cost_two_steps(tmp_path: Path, slow: tuple[int, ...]) -> None:
    with ranks(tmp_path, "pace=0", "drag=2") as job:
        job.reach(200)
        for rank in slow:
            (job.trace / f"drag-{rank}").touch()
        until(lambda: any("drags" in line for line in job.lines(1)), f"slow steps; output:\n{job.output()}")
        under_way = max(line["step"] for rank in (0, 1) for line in job.lines(rank) if "step" in line)
        job.send(1)
        assert job.finish() == GIVEN_BACK, job.output()
        assert under_way < same_step(job) <= under_way + 2, "that step and the next one at most"


def test_sigint_is_a_notice_where_the_user_wants_it_to_be(tmp_path: Path) -> None:
    config = json.dumps({"exit_signals": ["SIGINT"]})
    with ranks(tmp_path, f"config={config}") as job:
        job.reach(5)
        job.send(1, number=signal.SIGINT)
        assert job.finish() == GIVEN_BACK, job.output()
        assert same_step(job) > 5
    assert "Received SIGINT on rank 1 — requesting graceful shutdown" in job.output()
    assert "KeyboardInterrupt" not in job.output()


def test_a_launcher_that_is_interrupted_gives_the_job_back_where_sigint_is_a_notice(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[preemption]\nexit_signals = ["SIGINT"]\n')
    arguments = (str(tmp_path / "trace"), str(tmp_path / "run"), "100000")
    run = Run(
        tmp_path / "run", "preempted.py", *arguments, options=("--nproc-per-node=2", f"--config={config}")
    )
    with running(run):
        until(lambda: len(losses(tmp_path / "trace")) > 10, f"steps; console:\n{run.console()}")
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT, run.console()
    ends = [lines(tmp_path / "trace" / f"rank-{rank}")[-1] for rank in (0, 1)]
    assert ends[0]["ended"] == ends[1]["ended"] == copies(run.folder)[-1], run.console()


def test_signals_that_come_apart_and_again_give_one_save(tmp_path: Path) -> None:
    with ranks(tmp_path, "memory", "size=30000000") as job:
        job.reach(5)
        job.send(0)
        time.sleep(0.3)  # the skew that ranks with a flag of their own do not survive
        job.send(1)
        for _ in range(3):
            job.send_to_all()
        job.send_to_all(signal.SIGUSR1)
        assert job.finish() == GIVEN_BACK, job.output()
        same_step(job)
    assert len(copies(job.run)) == 1
    assert 1 <= job.output().count("requesting graceful shutdown") <= 2


def test_signals_until_the_very_end_do_not_change_the_exit_code(tmp_path: Path) -> None:
    with ranks(tmp_path, "memory") as job:
        job.reach(5)
        job.send_to_all()
        until(lambda: "Graceful shutdown complete" in job.output(), "the save")
        while any(process.poll() is None for process in job.processes):
            for process in job.processes:
                process.send_signal(signal.SIGTERM)
            select.select([], [], [], 0.005)  # a scheduler is not a storm
        assert job.finish() == GIVEN_BACK, job.output()


def test_what_goes_on_after_it_is_what_would_have_been_without_it(tmp_path: Path) -> None:
    steps = 40
    with ranks(tmp_path / "whole", "pace=0", steps=steps) as job:
        assert job.finish() == [0, 0], job.output()
        whole = losses(job.trace)
        content = [job.lines(rank)[-1]["content"] for rank in (0, 1)]
    assert len(whole) == 2 * steps
    with ranks(tmp_path / "cut", steps=steps) as job:
        job.reach(6)
        job.send(0)
        assert job.finish() == GIVEN_BACK, job.output()
        ended = same_step(job)
    assert ended < steps
    with ranks(tmp_path / "cut", "pace=0", steps=steps) as job:
        assert job.finish() == [0, 0], job.output()
        assert {"restored": ended} in job.lines()
        assert [job.lines(rank)[-1]["content"] for rank in (0, 1)] == content
    assert losses(job.trace) == whole


def test_a_signal_before_torch_is_there_is_not_lost(tmp_path: Path) -> None:
    with ranks(tmp_path, "early", cold=True) as job:
        until(lambda: all((job.trace / f"early-{rank}").exists() for rank in (0, 1)), "the handlers")
        job.send(0)
        until(lambda: "requesting graceful shutdown" in job.output(), "word of the signal")
        (job.trace / "go").touch()
        assert job.finish() == GIVEN_BACK, job.output()
        assert job.lines()[-1]["ended"] == 0
    assert "nothing is lost" in job.output()


def test_workers_of_a_dataloader_live_until_the_state_is_saved(tmp_path: Path) -> None:
    with ranks(tmp_path, "loader", steps=2000) as job:
        job.reach(5)
        assert len(list(job.trace.glob("worker-*"))) == 4
        job.send_to_all()
        assert job.finish() == GIVEN_BACK, job.output()
        same_step(job)
        workers = [int(path.name.rpartition("-")[2]) for path in job.trace.glob("worker-*")]
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the workers")


def test_a_worker_of_a_dataloader_that_dies_costs_no_saved_step(tmp_path: Path) -> None:
    unshielded = json.dumps({"enable_exit_handler_for_data_loader": False})
    with ranks(tmp_path, "loader", "memory", f"config={unshielded}", steps=2000) as job:
        job.reach(5)
        job.send_to_all()
        codes = job.finish()
        assert set(codes) <= {int(ExitCode.PREEMPTED)}, job.output()
        assert copies(job.run)[-1] >= 5


def test_workers_that_die_one_after_another_before_the_rank_is_signalled_cost_no_saved_step(
    tmp_path: Path,
) -> None:
    with ranks(tmp_path, "memory", "lose@0@60", "lose@1@60") as job:
        assert job.finish() == GIVEN_BACK, job.output()
        assert 0 < copies(job.run)[-1] <= 61
    assert "ranks cannot agree: ConnectionResetError" in job.output()


def test_a_hung_group_keeps_what_is_staged(tmp_path: Path) -> None:
    config = json.dumps({"preempt_time": 8.0})
    with ranks(tmp_path, "memory", "hang@1@7", f"config={config}") as job:
        until(lambda: {"hangs": 7} in job.lines(1), "the hang")
        job.send_to_all()
        assert job.finish() == GIVEN_BACK, job.output()
    assert "ranks did not agree in time: their group may hang" in job.output()
    assert copies(job.run) == [7]


def test_a_stopped_rank_costs_the_others_no_more_than_the_deadline(tmp_path: Path) -> None:
    config = json.dumps({"preempt_time": 8.0})
    with ranks(tmp_path, "memory", f"config={config}") as job:
        job.reach(5)
        job.send(1, number=signal.SIGSTOP)
        job.send(0)
        assert job.processes[0].wait(DEADLINE) == ExitCode.PREEMPTED, job.output()
        job.send(1, number=signal.SIGCONT)
    assert copies(job.run)[-1] >= 5


@pytest.mark.parametrize(("slow", "measured"), [(4.0, True), (60.0, False)])
def test_a_tier_that_is_slower_than_the_lead_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: float, measured: bool
) -> None:
    """The global tier is an object store whose last write takes its time."""

    def hold_up(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("COMMIT"):
            time.sleep(slow)

    with s3_server() as server, proxy(server, hold_up) as (front, _):
        use_s3(monkeypatch, front)
        bucket = Bucket(server)
        bucket.create()
        where = {"global_url": bucket.url, "global_options": {"allow_http": "true"}}
        given = {"preempt_time": 9.0, "margin": 5.0}
        words = [f"config={json.dumps(given)}", f"checkpoints={json.dumps(where)}"]
        with ranks(tmp_path, *words, "interval=3" if measured else "interval=100000") as job:
            job.reach(6)
            if measured:
                until(lambda: any("COMMIT" in path for path in bucket.paths()), "the first copy there")
                until(lambda: "a save to the global tier takes" in job.output(), "word of the time it took")
            job.send(0)
            assert job.finish() == GIVEN_BACK, job.output()
            same_step(job)
    if measured:
        assert "saving emergency checkpoint to the local tier: it takes" in job.output()
    else:
        assert "is durable in the local tier only" in job.output()


def test_under_a_launcher_the_job_is_given_back_whoever_is_told(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "trace"), str(tmp_path / "run"), "100000")
    run = Run(tmp_path / "run", "preempted.py", *arguments, options=("--nproc-per-node", "2"))
    with running(run):
        until(lambda: len(losses(tmp_path / "trace")) > 10, f"steps; console:\n{run.console()}")
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == ExitCode.PREEMPTED, run.console()
    (ended,) = run.records("run_ended")
    assert "preempted" in ended["reason"]
    assert run.records("fault_seen") == []
    assert [one["action"] for one in run.records("action_taken")] == ["stop"]
    said = [line for line in run.console().splitlines() if line.startswith("[outlast]")]
    (given,) = (at for at, line in enumerate(said) if "gave the job back (exit code 75)" in line)
    assert "  -> stop: the job was preempted" in said[given + 1], run.console()
    assert "FAULT" not in run.console()
    assert "  log: " not in run.console()
    assert copies(run.folder)[-1] == lines(tmp_path / "trace" / "rank-0")[-1]["ended"]


def test_a_launcher_waits_for_ranks_that_save_and_is_deaf_to_repeats(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "trace"), str(tmp_path / "run"), "100000", "slow=4")
    options = ("--nproc-per-node", "2", "--ft-workers-stop-timeout", "3")
    run = Run(tmp_path / "run", "preempted.py", *arguments, options=options)
    with running(run):
        until(lambda: len(losses(tmp_path / "trace")) > 10, f"steps; console:\n{run.console()}")
        assert run.process is not None
        (tmp_path / "trace" / "slow").touch()
        for _ in range(3):
            run.process.send_signal(signal.SIGTERM)
        until(lambda: "saving emergency checkpoint" in run.console(), "the save")
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM, run.console()
    ends = [lines(tmp_path / "trace" / f"rank-{rank}")[-1] for rank in (0, 1)]
    assert ends[0]["ended"] == ends[1]["ended"] == copies(run.folder)[-1], run.console()


def test_a_launcher_waits_for_a_loop_of_its_own_as_long_as_its_handler_says(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "trace"), str(tmp_path / "run"), "5", "100", "linger")
    options = ("--nproc-per-node", "2", "--ft-workers-stop-timeout", "1")
    run = Run(tmp_path / "run", "handler_loop.py", *arguments, options=options)
    with running(run):
        until(lambda: len(lines(tmp_path / "trace" / "rank-0")) > 10, f"steps; console:\n{run.console()}")
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM, run.console()
    limits = [line for line in run.console().splitlines() if "[outlast]" in line and "they have" in line]
    assert len(limits) == 1, limits
    assert "signal 15 goes to the workers, which save and end by themselves; they have " in limits[0]
    for rank in (0, 1):
        assert lines(tmp_path / "trace" / f"rank-{rank}")[-1] == {"finished": True}, run.console()


def test_under_torchrun(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += [str(SCRIPTS / "preempted.py"), str(trace), str(folder), "100000"]
    with open(tmp_path / "output", "wb") as output:
        torchrun = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        until(lambda: len(losses(trace)) > 10, "steps")
        torchrun.send_signal(signal.SIGTERM)
        torchrun.wait(DEADLINE)
    finally:
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
    ends: list[dict[str, Any]] = [lines(trace / f"rank-{rank}")[-1] for rank in (0, 1)]
    assert ends[0]["ended"] == ends[1]["ended"] == copies(folder)[-1], (tmp_path / "output").read_text()


def test_a_notice_file_and_a_grace_period_are_heeded(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    with ranks(tmp_path, f"config={json.dumps({'notice_file': str(notice)})}") as job:
        job.reach(5)
        (tmp_path / "written").write_text("30")
        (tmp_path / "written").rename(notice)
        assert job.finish() == GIVEN_BACK, job.output()
        same_step(job)
    assert f"notice file {notice} ends this job in" in job.output()


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
    assert "Graceful shutdown timed out — forcing exit" in job.output()


def test_without_handlers_a_signal_ends_a_rank_as_ever(tmp_path: Path) -> None:
    with ranks(tmp_path, f"config={json.dumps({'enable_exit_handler': False})}") as job:
        job.reach(5)
        job.send(0, 1)
        assert job.finish() == [-signal.SIGTERM] * 2, job.output()


HELD = """
import sys, time
import torch, outlast
from pathlib import Path

model = torch.nn.Linear(2, 2)
with outlast.start(save_interval=1) as session:
    session.restore(model=model)
    for step in session.steps(3):
        Path(sys.argv[1]).touch()
        while step == 1:
            time.sleep(0.1)
"""


def test_a_rank_that_is_stopped_while_it_gives_the_job_back_is_not_waited_for(tmp_path: Path) -> None:
    """It has ten minutes by default, and would use them all."""
    script, there = tmp_path / "held.py", tmp_path / "there"
    script.write_text(HELD)
    run = Run(
        tmp_path / "run",
        str(script),
        str(there),
        options=("--nproc-per-node=1", "--ft-workers-stop-timeout=2"),
    )
    with running(run):
        assert run.process is not None
        (rank,) = run.pids()
        until(lambda: run.records("saved"), run.console)
        run.process.send_signal(signal.SIGTERM)
        until(lambda: [one for one in run.records("note") if "graceful" in one["reason"]], run.console)
        os.kill(rank, signal.SIGSTOP)
        assert run.finish() == 143, run.console()
    assert is_gone(rank)
