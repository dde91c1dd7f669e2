"""Agents that have not met yet: whom they wait for, how long, and how a signal ends them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.agents import Agents, certificate


def test_a_founder_killed_before_anybody_joined_founds_the_job_again(job: Callable[..., Agents]) -> None:
    found = job("2:2")
    found.start_founder()
    found.send("n0", signal.SIGSTOP)  # it has the port, and takes nobody in
    found.start("n1")
    found.until_seeks("n1")
    found.kill("n0")
    found.start("n0")
    found.until_commit(found.until_runs(2))
    found.order("exit:0 * *")
    assert found.finish() == {"n0": 0, "n1": 0}
    found.nothing_left()


def test_a_signal_reaches_a_leader_that_has_not_answered_yet(job: Callable[..., Agents]) -> None:
    found = job("3:3")
    found.start_founder()
    found.send("n0", signal.SIGSTOP)
    found.start("n1")
    found.until_seeks("n1")
    for times in (1, 2):  # as schedulers repeat it
        found.send("n1", signal.SIGTERM)
        found.until(lambda: found.said("n1", "15", "5 s") == times, "word of a signal")  # noqa: B023
    found.send("n0", signal.SIGCONT)
    assert found.finish() == {"n0": 143, "n1": 143}, found.consoles()
    found.nothing_left()


@pytest.mark.parametrize("second", [0, signal.SIGINT])
def test_an_agent_that_hears_nobody_is_ended_by_a_signal_and_at_once_by_a_second_one(
    job: Callable[..., Agents], second: int
) -> None:
    found = job("3:3")
    with socket.create_server(("127.0.0.1", found.port)):  # somebody is there, and never answers
        found.start("n1")
        found.until_seeks("n1")
        found.send("n1", signal.SIGTERM)
        found.until_said("n1", "15", "5 s")
        if second:
            found.send("n1", second)
        assert found.finish("n1") == {"n1": 128 + (second or signal.SIGTERM)}, found.consoles()
    found.nothing_left()


def test_a_stranger_at_the_endpoint_is_waited_for(job: Callable[..., Agents]) -> None:
    found = job("2:2")
    with socket.create_server(("127.0.0.1", found.port)):
        found.start("n0", "n1")
        for name in ("n0", "n1"):
            found.until_seeks(name)
    found.until_runs(2)
    for name in ("n0", "n1"):
        found.send(name, signal.SIGTERM)
    assert found.finish() == {"n0": 143, "n1": 143}
    found.nothing_left()


def test_an_agent_that_hears_no_leader_ends_when_its_time_is_over(job: Callable[..., Agents]) -> None:
    found = job("2:2")
    with socket.create_server(("127.0.0.1", found.port)):
        found.start("n0", rdzv_conf="join_timeout=2")
        assert found.finish() == {"n0": 1}
    assert "join_timeout" in found.console("n0").splitlines()[-1]
    found.nothing_left()


@pytest.mark.long
def test_a_node_that_was_turned_away_leaves_the_first_one_waiting_with_a_limit(
    job: Callable[..., Agents],
) -> None:
    found = job("2:2")
    found.settings["--rdzv-conf"] = "join_timeout=12"
    found.start_founder()
    found.start("n1", options=("--max-restarts", "7"))
    assert found.finish() == {"n0": 1, "n1": 93}, found.consoles()
    assert found.said("n0", "join_timeout", "12") == 1
    found.nothing_left()


@pytest.mark.long
def test_a_node_whose_leader_is_gone_for_good_ends_when_its_time_is_over(job: Callable[..., Agents]) -> None:
    found = job("2:2")
    found.settings["--rdzv-conf"] = "join_timeout=25"
    found.start_founder()
    found.start("n1")
    found.until_runs(2)
    found.kill("n0")
    assert found.finish("n1") == {"n1": 1}, found.consoles()
    assert found.said("n1", "join_timeout", "25") > 0
    found.nothing_left()


def test_agents_with_tls_run_a_job_and_one_without_is_not_heard(
    job: Callable[..., Agents], tmp_path: Path
) -> None:
    found = job("2:2", options=("--tls", certificate(tmp_path)))
    found.start_founder()
    tls, found.options = found.options, ()
    found.start("bare")
    found.until(
        lambda: found.said("bare", f"127.0.0.1:{found.port}", "TLS") or found.said("n0", "TLS"), "a refusal"
    )
    found.options = tls
    found.start("n1")
    found.until_runs(2)
    assert found.agents["bare"].poll() is None
    assert found.said("n0", "bare") == 0


def test_what_a_dead_launcher_left_may_go_while_another_one_looks(
    job: Callable[..., Agents], tmp_path: Path
) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    gone = Path("/dev/shm") / f"outlast-{dead}-00000000"
    gone.symlink_to(tmp_path / "gone")  # is listed, and is not there when it is looked at
    try:
        job("1:2").start_founder()
    finally:
        gone.unlink()
