"""On two nodes no collective of ours is in a healthy step; saves, stops and faults come all the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.agreement.policy.steps import Stage, Want
from outlast.ipc.heartbeat_page import HeartbeatPage
from tests.support.launching import Run, running, runtime_folders, until
from tests.support.ports import free_port
from tests.support.ranks import copies, lines


class Job:
    """Agents on this host, with one rank each and one run folder."""

    def __init__(self, root: Path, steps: int, *words: str, nodes: int = 2, least: int = 2) -> None:
        self.folder, self.trace = root / "run", root / "trace"
        self.nodes = range(nodes)
        options = (
            "--nnodes",
            f"{least}:{nodes}",
            "--rdzv-endpoint",
            f"127.0.0.1:{free_port()}",
            "--rdzv-id",
            root.name,
        )
        self.agents = []
        for number in self.nodes:
            run = Run(
                *(self.folder, "healthy.py", str(self.trace), str(steps), *words),
                options=(*options, "--node-name", f"n{number}"),
            )
            run.output = root / f"n{number}.console"
            self.agents.append(run)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for agent in self.agents:
                stack.enter_context(running(agent))
            yield

    def console(self) -> str:
        return "\n".join(agent.console() for agent in self.agents)

    def records(self, kind: str, *of: int) -> list[dict[str, Any]]:
        found = [self.folder / "nodes" / f"n{number}" / "events.jsonl" for number in of or self.nodes]
        return [one for path in found if path.exists() for one in lines(path) if one["kind"] == kind]

    def pages(self, number: int) -> list[Path]:
        """Return the pages of the ranks of a node."""
        process = self.agents[number].process
        assert process is not None
        return [page for folder in runtime_folders(process.pid) for page in folder.glob("heartbeat-*")]

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.trace / f"rank-{rank}"
        return lines(path) if path.exists() else []

    def trained(self, steps: int) -> bool:
        return all(len(self.lines(rank)) >= steps for rank in self.nodes)

    def ours(self) -> set[int]:
        """Return how many collectives were ours in a step, of all steps of all ranks."""
        found = [line for rank in self.nodes for line in self.lines(rank) if "step" in line]
        assert all(line["training"] > 0 for line in found), "they are counted"
        return {line["all"] - line["training"] for line in found}


def test_saves_by_time_and_by_request_are_of_one_step_on_both_nodes_without_a_vote(tmp_path: Path) -> None:
    job = Job(tmp_path, 120, "seconds=0.5", "save@1@5")
    with job.running():
        assert [agent.finish() for agent in job.agents] == [0, 0], job.console()
    assert all(len(job.lines(rank)) == 120 for rank in job.nodes)
    assert job.ours() == {0}
    assert copies(job.folder)[-1] == 120
    saved = job.records("saved")
    assert "every 0.5 s" in {one["reason"] for one in saved}, saved
    asked = {one["step"] for one in saved if one["reason"] == "a rank asked for it"}
    assert len(asked) == 1, saved
    assert asked.pop() > 6, "it is ahead of every rank"


def test_a_notice_on_one_node_ends_both_after_one_step_without_a_vote(tmp_path: Path) -> None:
    job = Job(tmp_path, 100_000)
    with job.running():
        until(lambda: job.trained(20), lambda: f"steps; {job.console()}")
        process = job.agents[1].process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        codes = [agent.finish() for agent in job.agents]
    assert codes == [128 + signal.SIGTERM] * 2, job.console()
    ended = {job.lines(rank)[-1]["ended"] for rank in job.nodes}
    assert ended == {copies(job.folder)[-1]}, job.console()
    assert job.ours() == {0}


@pytest.mark.parametrize("dead", [0, 2], ids=["leader", "node"])
def test_a_node_killed_between_proposal_and_commit_ends_in_a_restart(tmp_path: Path, dead: int) -> None:
    job = Job(tmp_path, 300, "save@1@5", nodes=3)
    with job.running():
        until(lambda: job.trained(20) and copies(job.folder), lambda: f"steps; {job.console()}")
        (saved,) = copies(job.folder)
        until(lambda: job.trained(saved + 5), lambda: f"more steps; {job.console()}")
        until(
            lambda: all(job.records("generation_started", number) for number in job.nodes),
            "the records of the start",  # another thread of each agent writes them
        )
        pids = [job.records("generation_started", number)[0]["pids"][0] for number in job.nodes]
        agents = [agent.process for agent in job.agents]
        os.kill(pids[2], signal.SIGSTOP)  # it answers no proposal
        (page,) = job.pages(1)
        rank = int(page.name.rpartition("-")[2])
        (job.trace / f"ask-{rank}").touch()
        assert agents[dead] is not None

        def proposed() -> int:
            said = HeartbeatPage.open(page).agreement.read()
            asks = said is not None and said.stage is Stage.PROPOSED and bool(said.wants & Want.SAVE)
            return said.step if said is not None and asks else 0

        before = until(proposed, lambda: f"a proposal; {job.console()}")
        (job.trace / f"ask-{rank}").unlink()
        os.kill(agents[dead].pid, signal.SIGKILL)
        codes = [agent.finish() for at, agent in enumerate(job.agents) if at != dead]
    assert codes == [0, 0], job.console()
    loaded = {one["step"] for one in job.records("loaded") if one["generation"] > 1}
    (step,) = loaded  # a copy in memory may be newer than the one on disk
    assert saved <= step < before, job.console()
    assert copies(job.folder)[-1] == 300
