"""A job of several nodes that is told to end: every rank saves one step, every agent ends alike, in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from outlast.checkpoint.tiers.memory_folder import default_root
from outlast.errors import ExitCode
from tests.support.launching import Run, is_gone, running, runtime_folders, until
from tests.support.ports import free_port
from tests.support.ranks import copies, lines

NODES = 3
STOPPED = 128 + signal.SIGTERM


class Job:
    """An agent for each node, all on this host, with one run folder."""

    def __init__(self, root: Path, *words: str) -> None:
        self.folder, self.trace = root / "run", root / "trace"
        where = f"127.0.0.1:{free_port()}"
        options = ("--nnodes", str(NODES), "--rdzv-endpoint", where, "--rdzv-id", root.name)
        options += ("--ft-workers-stop-timeout", "1")
        self.agents = []
        for number in range(NODES):
            arguments = (str(self.trace), str(self.folder), "100000", *words)
            run = Run(self.folder, "preempted.py", *arguments, options=(*options, f"--node-name=n{number}"))
            run.output = root / f"n{number}.console"
            self.agents.append(run)

    def console(self) -> str:
        return "\n".join(agent.console() for agent in self.agents)

    def lines(self, rank: int) -> list[dict[str, Any]]:
        return lines(self.trace / f"rank-{rank}")

    def train(self, steps: int) -> list[int]:
        """Wait until every rank has done so many steps more; return the pids of all workers."""
        begun = [len(self.lines(rank)) for rank in range(NODES)]
        until(
            lambda: all(len(self.lines(rank)) > begun[rank] + steps for rank in range(NODES)),
            f"steps; consoles:\n{self.console()}",
        )
        events = [self.folder / "nodes" / f"n{number}" / "events.jsonl" for number in range(NODES)]
        started = [one for path in events for one in lines(path) if one["kind"] == "generation_started"]
        assert len(started) >= NODES
        return [pid for one in started for pid in one["pids"]]

    def signal(self, *agents: int) -> None:
        for number in agents:
            process = self.agents[number].process
            assert process is not None
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def ended(self, code: int = STOPPED) -> int:
        """Return the step that every rank saved and ended at, once every agent has ended with one code."""
        assert [agent.finish() for agent in self.agents] == [code] * NODES, self.console()
        ends = [self.lines(rank)[-1] for rank in range(NODES)]
        assert all(end["preempted"] for end in ends), self.console()
        steps = {end["ended"] for end in ends} | {copies(self.folder)[-1]}
        assert len(steps) == 1, (ends, self.console())
        assert "a second signal came" not in self.console()
        return steps.pop()

    def left(self) -> list[Path]:
        """Return what agents and savers have left in memory."""
        agents = [path for one in self.agents if one.process for path in runtime_folders(one.process.pid)]
        run_id = json.loads((self.folder / "run.json").read_text())["run_id"]
        memory = [default_root(run_id, self.folder, f"n{number}") for number in range(NODES)]
        return [*agents, *(path for path in memory if path.exists())]


def test_a_rank_that_is_told_gives_the_job_back_without_a_fault(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with contextlib.ExitStack() as stack:
        for agent in job.agents:
            stack.enter_context(running(agent))
        os.kill(job.train(5)[1], signal.SIGTERM)
        job.ended(int(ExitCode.PREEMPTED))
    assert "gave the job back (exit code 75)" in job.console()
    assert "-> stop: the job was preempted" in job.console()
    logs = [one for path in job.folder.glob("nodes/*/events.jsonl") for one in lines(path)]
    assert [one for one in logs if one["kind"] == "fault_seen"] == []
    assert "FAULT" not in job.console()
    assert "error on n" not in job.console()


def test_a_job_of_several_nodes_is_given_back_whoever_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path, "slow=2")
    with contextlib.ExitStack() as stack:
        for agent in job.agents:
            stack.enter_context(running(agent))
        pids = job.train(5)
        (job.trace / "slow").touch()  # every rank saves after the job's end is on record
        job.signal(1)
        first = job.ended()
        assert all(map(is_gone, pids))
        assert job.left() == []
    (job.trace / "slow").unlink()
    with contextlib.ExitStack() as stack:
        for agent in job.agents:
            stack.enter_context(running(agent))
        pids = job.train(5)
        for number in (2, 0, 1, 1, 0, 2):
            job.signal(number)
            time.sleep(0.05)  # the skew that a scheduler has, and its repeats
        second = job.ended()
        assert all({"restored": first} in job.lines(rank) for rank in range(NODES)), job.console()
        assert second > first
        assert all(map(is_gone, pids))
        assert job.left() == []
