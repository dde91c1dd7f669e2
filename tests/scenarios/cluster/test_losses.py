"""A job of three nodes that needs two of them: what it loses, and that it goes on each time.

The tests of a class share a job. Each begins with all three nodes in one generation, and may be run alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.agents import Agents, agents
from tests.support.processes import break_connections, main_thread_stopped

NAMES = ("n0", "n1", "n2")


@pytest.fixture(scope="class")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    options = ("--max-restarts", "100", "--ping-timeout", "4")
    with agents(tmp_path_factory.mktemp("losses") / "job", "2:3", options=options) as found:
        found.start_founder()
        found.start("n1", "n2")
        yield found


@pytest.fixture
def first(job: Agents) -> int:
    """Return the generation that all nodes are in."""
    for name, agent in job.agents.items():
        if agent.poll() is not None:
            job.start(name)
    generation = job.until_runs(3, after=max((one for one in job.generations() if one), default=1) - 1)
    job.until_commit(generation)
    return generation


def others(name: str) -> list[str]:
    return [one for one in NAMES if one != name]


def follower(job: Agents, which: int) -> str:
    """Return a node that does not lead; one that causes most of the faults of a job would be excluded."""
    return others(job.leader())[which]


@pytest.mark.shares
class TestNodes:
    def test_workers_killed_on_two_nodes_at_once_cost_one_generation(self, job: Agents, first: int) -> None:
        pids = job.ranks(first, 3)
        for rank in (1, 2):
            with contextlib.suppress(ProcessLookupError):  # the first death is known so soon on a busy host
                os.kill(pids[rank], signal.SIGKILL)
        job.until_commit(job.until_runs(3, after=first))
        assert job.generations()[-1] == first + 1, job.consoles()

    def test_a_killed_agent_costs_one_generation_and_the_job_grows_when_it_is_back(
        self, job: Agents, first: int
    ) -> None:
        name = follower(job, 0)
        job.kill(name)
        smaller = job.until_runs(2, after=first)
        job.until_commit(smaller)
        assert job.lost(name, first - 1)
        job.start(name)
        job.until_commit(job.until_runs(3, after=smaller))
        assert job.generations()[-1] == first + 2, job.consoles()

    def test_an_agent_that_is_busy_is_not_lost_and_one_that_is_stopped_is_until_it_is_back(
        self, job: Agents, first: int
    ) -> None:
        name, leader = follower(job, 1), job.leader()
        with main_thread_stopped(job.agents[name].pid):
            job.until_said(leader, name, "busy")
        assert job.generations()[-1] == first
        job.send(name, signal.SIGSTOP)
        smaller = job.until_runs(2, after=first)
        job.send(name, signal.SIGCONT)
        job.until_commit(job.until_runs(3, after=smaller))
        assert job.generations()[-1] == first + 2, job.consoles()


@pytest.mark.shares
class TestLeaders:
    def test_a_leader_killed_while_a_generation_forms_is_succeeded(self, job: Agents, first: int) -> None:
        leader = job.leader()
        ordered = len(job.records(leader, "action_taken"))
        (rank,) = {*job.ranks(first, 3).values()} & {*job.tree(leader)}
        os.kill(rank, signal.SIGKILL)
        job.until(lambda: len(job.records(leader, "action_taken")) > ordered, "the order to restart")
        job.kill(leader)
        job.until_commit(job.until_runs(2, after=first))
        assert job.leader() != leader

    def test_a_stopped_leaders_node_commits_nothing_when_it_wakes_up(self, job: Agents, first: int) -> None:
        leader = job.leader()
        tree = job.tree(leader)
        for pid in tree:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        smaller = job.until_runs(2, after=first)
        job.until_commit(smaller)
        assert job.commits()[-1]["node"] != leader
        for pid in tree:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        job.until_commit(job.until_runs(3, after=smaller))
        committed = [one["generation"] for one in job.commits()]
        assert committed == sorted(committed), job.consoles()

    def test_the_same_commands_go_on_with_a_younger_generation_when_all_agents_were_killed(
        self, job: Agents, first: int
    ) -> None:
        for name in NAMES:
            job.kill(name)
        job.start("n1", "n2", "n0")
        job.until_commit(job.until_runs(3, after=first))

    def test_the_job_ends_everywhere_and_the_same_commands_find_it_complete(
        self, job: Agents, first: int
    ) -> None:
        job.order("exit:0 * *")
        assert job.finish() == dict.fromkeys(NAMES, 0), job.consoles()
        job.nothing_left()
        job.start_founder()
        job.start("n1", "n2")
        assert job.finish() == dict.fromkeys(NAMES, 0), job.consoles()
        assert job.generations()[-1] == first + 1
        job.nothing_left()


def test_a_job_that_needs_both_nodes_keeps_them_when_connections_break_and_takes_back_a_stopped_one(
    tmp_path: Path,
) -> None:
    options = ("--max-restarts", "9", "--ping-timeout", "4")
    with agents(tmp_path / "job", "2:2", options=options) as job:
        job.start_founder()
        job.start("n1")
        first = job.until_runs(2)
        for _ in range(3):
            job.until(lambda: break_connections(job.agents["n1"].pid), "connections")
            before = len(job.commits())
            job.until(lambda past=before: len(job.commits()) > past + 5, "commits")
        assert job.generations()[-1] == first, job.consoles()
        job.send("n1", signal.SIGSTOP)
        job.until(lambda: job.lost("n1", first - 1), "the loss")
        job.send("n1", signal.SIGCONT)
        job.until_commit(job.until_runs(2, after=first))
        assert job.generations()[-1] == first + 1, job.consoles()
