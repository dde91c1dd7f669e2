"""A job of several nodes that is told to end: every rank saves one step, every agent ends alike, in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Run, is_gone, running, runtime_folders, until
from tests.support.ports import free_port
from tests.support.ranks import copies, lines

NODES = range(3)
PREEMPTED, TERMINATED = 75, 143  # exit codes


class Job:
    """An agent for each node, all on this host, with one run folder."""

    def __init__(self, root: Path, *words: str) -> None:
        self.folder, self.trace = root / "run", root / "trace"
        options = (
            f"--nnodes={len(NODES)}",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            f"--rdzv-id={root.name}",
        )
        options += ("--ft-workers-stop-timeout=1",)
        arguments = (str(self.trace), str(self.folder), "100000", *words)
        self.agents = []
        for node in NODES:
            run = Run(self.folder, "preempted.py", *arguments, options=(*options, f"--node-name=n{node}"))
            run.output = root / f"n{node}.console"
            self.agents.append(run)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for agent in self.agents:
                stack.enter_context(running(agent))
            yield

    def console(self) -> str:
        return "\n".join(agent.console() for agent in self.agents)

    def lines(self, rank: int) -> list[dict[str, Any]]:
        return lines(self.trace / f"rank-{rank}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [one for path in self.folder.glob("nodes/*/events.jsonl") for one in lines(path)]
        return [one for one in found if one["kind"] == kind]

    def train(self, steps: int) -> list[int]:
        """Wait until every rank has done so many steps more; return the pids of all workers."""
        begun = [len(self.lines(rank)) for rank in NODES]
        until(lambda: all(len(self.lines(rank)) > begun[rank] + steps for rank in NODES), self.console)
        started = self.events("generation_started")
        assert len(started) >= len(NODES)
        return [pid for one in started for pid in one["pids"]]

    def signal(self, *agents: int) -> None:
        for node in agents:
            process = self.agents[node].process
            assert process is not None
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            time.sleep(0.05)  # the skew that a scheduler has

    def ended(self, code: int) -> int:
        """Return the step that every rank saved and ended at, once every agent has ended with one code."""
        assert [agent.finish() for agent in self.agents] == [code] * len(NODES), self.console()
        ends = [self.lines(rank)[-1] for rank in NODES]
        assert all(end["preempted"] for end in ends), self.console()
        (step,) = {end["ended"] for end in ends} | {copies(self.folder)[-1]}
        return step

    def left(self) -> list[Path]:
        """Return what agents and savers have left in memory."""
        agents = [path for one in self.agents if one.process for path in runtime_folders(one.process.pid)]
        run_id = json.loads((self.folder / "run.json").read_text())["run_id"]
        return [*agents, *Path("/dev/shm").glob(f"*{run_id}*")]


@pytest.mark.long
def test_a_job_of_several_nodes_is_given_back_whoever_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path, "slow=2")
    with job.running():
        pids = job.train(5)
        assert job.left()
        os.kill(pids[1], signal.SIGTERM)
        first = job.ended(PREEMPTED)
    assert job.events("fault_seen") == []
    assert all(map(is_gone, pids))
    assert job.left() == []
    with job.running():
        pids = job.train(5)
        (job.trace / "slow").touch()  # every rank saves after the job's end is on record
        job.signal(1)
        until(lambda: all((job.trace / f"saving-{rank}").exists() for rank in NODES), job.console)
        job.signal(2, 0, 1, 1, 0, 2)
        second = job.ended(TERMINATED)
    assert all({"restored": first} in job.lines(rank) for rank in NODES), job.console()
    assert second > first
    assert all(map(is_gone, pids))
    assert job.left() == []
