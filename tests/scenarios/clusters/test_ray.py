"""Agents on a real Ray cluster of several nodes: started, replaced, stopped, and never left behind.

The agents are those of a program that stands on PATH as ``outlast``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import SCRIPTS, until
from tests.support.ports import free_port
from tests.support.processes import is_alive

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="ray is not installed: pip install ray")
pytestmark = [
    pytest.mark.leaves("outlast-ray-"),  # of a killed node
    pytest.mark.timeout(420),
    # Ray's test cluster drops its processes' objects without waiting for them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]

STAND_IN = SCRIPTS / "outlast_on_ray.py"
MEMORY = 80 * 1024 * 1024  # bytes; the least that an object store takes


def _begun(head: dict[str, Any]) -> Any:
    """Return a cluster with its head, which Ray gives 30 s to start; a busy machine gets three times that."""
    for left in (2, 1, 0):
        found = ray_cluster.Cluster()
        try:
            found.add_node(**head)
        except Exception as error:
            found.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
        else:
            return found
    raise AssertionError


class Machines:
    """A Ray cluster of two nodes beside its head, each with one processor."""

    def __init__(self, folder: Path, **head: Any) -> None:
        program = folder / "outlast"
        ours = f'exec "{sys.executable}" -m outlast "$@"'
        program.write_text(
            f'#!/bin/sh\n[ "$1" = ray ] && {ours}\nexec "{sys.executable}" "{STAND_IN}" "$@"\n'
        )
        program.chmod(0o755)
        given = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False, **head}
        self._cluster = _begun(given)
        self.nodes = [self.add(), self.add()]

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=MEMORY)

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    started = Machines(programs)
    yield started
    started.close()


class Job:
    """A job of two nodes that ``outlast ray run`` drives."""

    def __init__(self, machines: Machines, folder: Path, *options: str) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        given = ("--nnodes=1:2", f"--run-dir={self.folder}", f"--address={machines.address}", *options)
        command = [sys.executable, "-m", "outlast", "ray", "run", *given, "--", "train.py", "--lr=1"]
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def agent(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"agent-{rank}.json"
        until(path.exists, f"the agent of node {rank}:\n{self.output}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def tell(self, rank: int, code: int) -> None:
        (self.folder / f"do-{rank}").write_text(str(code))

    def code(self) -> int:
        until(lambda: self.process.poll() is not None, f"the end of the job:\n{self.output}")
        assert self.process.returncode is not None
        return self.process.returncode

    def gone(self, rank: int) -> None:
        pid = self.agent(rank)["pid"]
        until(lambda: not is_alive(pid), f"the end of process {pid}")


@pytest.mark.long
def test_agents_start_on_a_node_each_and_their_end_is_the_job_s(machines: Machines, tmp_path: Path) -> None:
    job = Job(machines, tmp_path)
    first, second = job.agent(0), job.agent(1)
    assert first["endpoint"] == second["endpoint"]
    assert (first["token"], first["mode"]) == (second["token"], 0o600)
    assert len(first["token"]) == 64
    assert first["session"] == first["pid"] != second["pid"]
    assert first["words"][:3] == ["run", "--nnodes=1:2", "--spares=0"]
    assert first["words"][-3:] == ["--ft-workers-stop-timeout=90", "train.py", "--lr=1"]
    job.tell(0, 0)
    job.tell(1, 0)
    assert job.code() == 0


@pytest.mark.long
def test_a_node_that_is_lost_is_replaced(machines: Machines, tmp_path: Path) -> None:
    job = Job(machines, tmp_path)
    before = [job.agent(0), job.agent(1)]
    machines.remove(machines.nodes[0])
    until(lambda: sum(is_alive(one["pid"]) for one in before) == 1, "the end of one agent")
    machines.add()
    joined = job.agent(2)
    assert joined["endpoint"] == before[0]["endpoint"]
    assert joined["token"] == before[0]["token"]
    stayed = next(rank for rank in (0, 1) if is_alive(before[rank]["pid"]))
    for rank in (stayed, 2):
        job.tell(rank, 0)
    assert job.code() == 0


def test_a_final_exit_code_ends_all_agents(machines: Machines, tmp_path: Path) -> None:
    job = Job(machines, tmp_path)
    job.agent(0), job.agent(1)
    job.tell(1, 93)
    assert job.code() == 93
    assert (job.folder / "term-0").exists()


@pytest.mark.long
def test_a_notice_reaches_the_agents(machines: Machines, tmp_path: Path) -> None:
    job = Job(machines, tmp_path)
    job.agent(0), job.agent(1)
    job.process.send_signal(signal.SIGTERM)
    assert job.code() == 143
    assert {one.name for one in job.folder.glob("term-*")} == {"term-0", "term-1"}


@pytest.mark.long
def test_no_agent_outlives_a_killed_driver(machines: Machines, tmp_path: Path) -> None:
    job = Job(machines, tmp_path)
    job.agent(0), job.agent(1)
    job.process.kill()
    job.gone(0)
    job.gone(1)


@pytest.mark.long
def test_too_few_nodes_are_told(machines: Machines, tmp_path: Path) -> None:
    job = Job(machines, tmp_path, "--spares=1", "--placement-timeout=1")
    assert job.code() == 1
    assert "--nnodes" in job.output
    assert "--spares" in job.output


@pytest.mark.long
def test_a_job_is_handed_over_to_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="ray has no dashboard here: pip install 'ray[default]'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    port = free_port()
    run = tmp_path / "run"
    run.mkdir()
    (run / "do-0").write_text("93")
    machines = Machines(tmp_path, include_dashboard=True, dashboard_port=port)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: status(f"{url}/api/version"), "the dashboard")
        options = [f"--address={url}", "--nnodes=1", f"--run-dir={run}"]
        command = [sys.executable, "-m", "outlast", "ray", "submit", *options, "--", "train.py", "a b"]
        submitted = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
        job = f"{url}/api/jobs/{submitted.stdout.strip()}"
        until(lambda: status(job).get("status") in ("FAILED", "SUCCEEDED"), "the end of the job")
        assert "93" in status(job)["message"]
        assert json.loads((run / "agent-0.json").read_text())["words"][-2:] == ["train.py", "a b"]
    finally:
        machines.close()


def status(url: str) -> dict[str, Any]:
    """Return what the dashboard says, nothing while it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except OSError:
        return {}
