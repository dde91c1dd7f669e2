"""A job of several nodes on a real Slurm: what is lost is replaced, and what cannot be is asked for again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import SCRIPTS, until
from tests.support.ranks import lines
from tests.support.slurm_cluster import SlurmCluster, missing

PREEMPTED = SCRIPTS / "preempted.py"
TRAINING = SCRIPTS / "allocated_nodes.py"
OUTLAST = (sys.executable, "-m", "outlast")
pytestmark = [
    pytest.mark.leaves("/dev/shm/outlast-"),  # of a node that went down
    pytest.mark.skipif(bool(missing()), reason=missing() or "a cluster can be started"),
    pytest.mark.timeout(420),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3) as started:
        yield started


class Together:
    """A job of three nodes, one of them a spare."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, *words: str, script: tuple[str, ...] = ()
    ) -> None:
        self.cluster, self.run, self.finish = cluster, folder / "run", folder / "finish"
        script = script or (str(TRAINING), str(self.finish))
        given = (*words, "--run-dir", str(self.run), "--max-restarts=9", *script)
        self.id = cluster.ask(*OUTLAST, "slurm", "submit", "--lead=60", "--nodes=3", "--", *given).strip()

    def output(self) -> str:
        path = self.run / f"slurm-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wanted(self, what: str) -> Callable[[], str]:
        """Return what says, once it is clear that it did not come, what there is instead."""

        def say() -> str:
            states = [self.cluster.ask(*words, check=False) for words in (["sinfo", "-lN"], ["squeue", "-l"])]
            return "\n".join([f"{what}:", *states, self.output()])

        return say

    def restored(self) -> list[tuple[int, int]]:
        """Return world size and step of each time that rank 0 began."""
        return [(int(w), int(s)) for w, s in re.findall(r"rank 0 of (\d+) restored (\d+)", self.output())]

    def waits(self, times: int) -> None:
        until(lambda: len(self.restored()) >= times, self.wanted(f"rank 0 to begin {times} times"))
        self.advances()

    def advances(self) -> None:
        before = self.output().count("step ")
        until(lambda: self.output().count("step ") > before + 8, self.wanted("steps in"))

    def records(self, kind: str, **fields: str) -> list[dict[str, Any]]:
        """Return what is in the event logs of all nodes of a kind, and with these fields."""
        found = [one for path in self.run.glob("nodes/*/events.jsonl") for one in lines(path)]
        return [one for one in found if {"kind": kind, **fields}.items() <= one.items()]

    def agent(self, node: str) -> int:
        return int(self.records("run_started", node=node)[-1]["pid"])

    def ranks(self, node: str) -> list[int]:
        """Return the pids of a node's ranks."""
        log = self.run / "nodes" / node / "events.jsonl"
        started = [one for one in lines(log) if one["kind"] == "generation_started"]
        return [int(pid) for pid in started[-1]["pids"]]

    def active(self) -> list[str]:
        return sorted(path.parents[2].name for path in self.run.glob("nodes/*/logs/gen-0001/rank-*"))

    def ends(self) -> dict[str, str]:
        self.finish.touch()
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        until(lambda: self.cluster.job(self.id)["JobState"] in over, self.wanted("the end"))
        return self.cluster.job(self.id)


def test_a_spare_of_the_allocation_takes_the_place_of_a_killed_agent(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Together(cluster, tmp_path, "--nnodes=2", "--spares=1")
    job.waits(1)
    assert len(job.active()) == 2
    lost = job.active()[-1]
    os.kill(job.agent(lost), signal.SIGKILL)
    job.waits(2)
    until(lambda: len(job.records("run_started", node=lost)) == 2, job.wanted("its next start"))
    assert [world for world, _ in job.restored()] == [2, 2]
    ended = job.ends()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")


def test_a_node_that_goes_down_costs_no_allocation(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Together(cluster, tmp_path, "--nnodes=1:2", "--spares=1")
    job.waits(1)
    batch = cluster.job(job.id)["BatchHost"]
    node = next(name for name in job.active() if name != batch)  # the loss of a spare is no fault
    until(lambda: job.records("saved"), job.wanted("a copy on disk"))
    try:
        cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=a test")
        until(lambda: job.records("fault_seen", fault="lost", node=node), job.wanted(f"the loss of {node}"))
        job.advances()
        assert cluster.job(job.id)["JobState"] == "RUNNING"
        ended = job.ends()
    finally:
        cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        memory = json.loads((job.run / "nodes" / node / "memory.json").read_text())["memory"]
        shutil.rmtree(memory, ignore_errors=True)  # a node that is down has killed the saver, too
    assert ended["Restarts"] == "0"


def test_a_requeue_by_hand_goes_on_from_the_newest_step(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Together(cluster, tmp_path, "--nnodes=2", "--spares=1")
    job.waits(1)
    cluster.ask("scontrol", "requeue", job.id)
    job.waits(2)
    assert job.restored()[1][1] > 0
    ended = job.ends()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")


def test_a_signal_that_reaches_one_node_before_the_other_is_one_save_of_both(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    script = (str(PREEMPTED), str(trace), str(tmp_path / "run"), "400", "pace=0.05")
    job = Together(cluster, tmp_path, "--nnodes=2", "--spares=1", script=script)
    until(lambda: all(len(lines(trace / f"rank-{rank}")) > 10 for rank in (0, 1)), job.wanted("steps"))
    pids = {node: job.ranks(node) for node in job.active()}
    assert [len(found) for found in pids.values()] == [1, 1]
    (first,), (second,) = pids.values()
    os.kill(first, signal.SIGTERM)
    until(lambda: "SIGTERM" in job.output(), job.wanted("word of the signal"))
    with contextlib.suppress(ProcessLookupError):  # both may have saved by now: that is what the vote is for
        os.kill(second, signal.SIGTERM)
    until(lambda: "allocation 2" in job.output(), job.wanted("the next allocation"))
    (trace / "hurry").touch()
    assert job.ends()["JobState"] == "COMPLETED", job.output()
    told = [lines(trace / f"rank-{rank}") for rank in (0, 1)]
    ends = [next(one["ended"] for one in mine if "ended" in one) for mine in told]
    begun = [[one["restored"] for one in mine if "restored" in one] for mine in told]
    assert begun == [[0, ends[0]], [0, ends[1]]], job.output()
    assert ends[0] == ends[1] >= 10  # the first line of a trace is no step
