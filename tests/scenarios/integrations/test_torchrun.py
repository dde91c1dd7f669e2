"""torchrun's own agent with our rendezvous, for real: ``torchrun --rdzv-backend=outlast``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.rendezvous import registry

from tests.support.launching import DEADLINE, until

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("torchrun_worker.py")
pytestmark = pytest.mark.timeout(600)
GROUP = '[project.entry-points."torchrun.handlers"]'


def entry_point() -> str:
    """Return what ``pyproject.toml`` registers, as an installed package has it."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    return lines[lines.index(GROUP) + 1].replace('"', "")


class Torchruns:
    """torchrun agents of one job on this host; nodes are told apart by their names."""

    def __init__(self, folder: Path, nnodes: str, *args: str) -> None:
        self.folder, self._nnodes, self._args = folder, nnodes, args
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._site = folder / "site"
        registered = self._site / "outlast_of_this_tree-0.dist-info"
        registered.mkdir(parents=True)
        (registered / "METADATA").write_text("Metadata-Version: 2.1\nName: of-this-tree\nVersion: 0\n")
        (registered / "entry_points.txt").write_text(f"[torchrun.handlers]\n{entry_point()}\n")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._seen = 0

    def start(self, *nodes: str, conf: str = "", **environment: str) -> Torchruns:
        paths = [str(self._site), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        for node in nodes:
            settings = f"node_name={node},keep_alive_interval=10{conf}"
            command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=outlast"]
            command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job", f"--nnodes={self._nnodes}"]
            command += [f"--rdzv-conf={settings}", "--max-restarts=1", str(WORKER), str(self.folder)]
            variables = {"PYTHONPATH": ":".join(filter(None, paths)), "NODE": node, **environment}
            with open(self.output(node), "ab") as file:
                self.agents[node] = subprocess.Popen(
                    [*command, *self._args], stdout=file, stderr=file, env={**os.environ, **variables}
                )
        return self

    def output(self, node: str) -> Path:
        return self.folder / f"{node}.out"

    def _starts(self) -> list[dict[str, Any]]:
        path = self.folder / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def generation(self, world: int) -> dict[str, dict[str, Any]]:
        """Wait for the next generation, which has so many ranks; return its workers by node."""
        try:
            until(lambda: len(self._starts()) >= self._seen + world, f"{world} workers")
        except AssertionError as error:
            said = "\n".join(self.output(node).read_text()[-2000:] for node in self.agents)
            raise AssertionError(f"{error}; after {self._starts()}:\n{said}") from None
        new = self._starts()[self._seen : self._seen + world]
        self._seen += world
        assert {one["WORLD_SIZE"] for one in new} == {str(world)}, new
        assert sorted(int(one["RANK"]) for one in new) == list(range(world))
        assert len({one["MASTER_PORT"] for one in new}) == 1
        return {one["node"]: one for one in new}

    def kill(self, node: str) -> None:
        self.agents[node].kill()
        self.agents.pop(node).wait()

    def end(self) -> None:
        """Let the workers finish; no other one was started since the last generation."""
        (self.folder / "go").touch()
        codes = {node: agent.wait(DEADLINE) for node, agent in self.agents.items()}
        assert set(codes.values()) == {0}, [self.output(node).read_text()[-2000:] for node in codes]
        assert len(self._starts()) == self._seen

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            try:
                agent.wait(30)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def listened_to(pid: int) -> list[int]:
    found = psutil.Process(pid).net_connections()
    return [one.laddr.port for one in found if one.status == psutil.CONN_LISTEN]


@pytest.fixture
def torchruns(tmp_path: Path) -> Iterator[Callable[..., Torchruns]]:
    if not hasattr(registry, "_register_out_of_tree_handlers"):
        pytest.skip("this torchrun does not look for backends of packages")
    made: list[Torchruns] = []

    def make(*args: str) -> Torchruns:
        made.append(Torchruns(tmp_path, *args))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.long
def test_a_stranger_at_the_endpoint_is_waited_for(torchruns: Callable[..., Torchruns]) -> None:
    job = torchruns("2", "sum")
    with socket.create_server(("127.0.0.1", job.port)) as stranger:
        job.start("a", "b")
        stranger.settimeout(DEADLINE)
        asking = [stranger.accept()[0] for _ in range(2)]  # both have begun, and each has asked once
    for connection in asking:
        connection.close()
    job.generation(2)
    job.end()


@pytest.mark.long
def test_two_nodes_restart_once_each_in_a_store_of_its_own(torchruns: Callable[..., Torchruns]) -> None:
    job = torchruns("2", "sum").start("a", "b")
    first = job.generation(2)
    assert {one["TORCHELASTIC_USE_AGENT_STORE"] for one in first.values()} == {"True"}
    os.kill(first["b"]["pid"], signal.SIGKILL)
    second = job.generation(2)
    assert second["a"]["MASTER_PORT"] != first["a"]["MASTER_PORT"]
    assert {one["sum"] for one in (*first.values(), *second.values())} == {"3"}
    job.end()


@pytest.mark.long
def test_three_nodes_go_on_without_one_and_grow_back(torchruns: Callable[..., Torchruns]) -> None:
    job = torchruns("2:3").start("a", "b", "c")
    first = job.generation(3)
    os.kill(first["b"]["pid"], signal.SIGKILL)
    second = job.generation(3)
    bootstrap_node = min(second, key=lambda node: int(second[node]["RANK"]))
    job.kill(bootstrap_node)  # it may coordinate, and it serves the store
    assert bootstrap_node not in job.generation(2)
    job.start(bootstrap_node)
    assert set(job.generation(3)) == {"a", "b", "c"}
    job.end()


@pytest.mark.long
def test_a_spare_takes_the_seat_of_a_lost_node(torchruns: Callable[..., Torchruns]) -> None:
    job = torchruns("2").start("a", "b", "c", conf=",spares=1")
    first = job.generation(2)
    assert len(first) == 2
    # Before the spare has joined there are two nodes, of which only the leader votes; it listens.
    lost = next(one for one in first if job.port not in listened_to(job.agents[one].pid))
    job.kill(lost)
    assert lost not in job.generation(2)
    job.end()


@pytest.mark.long
def test_a_spare_ends_with_the_job(torchruns: Callable[..., Torchruns]) -> None:
    job = torchruns("1").start("a", conf=",spares=1", LOGLEVEL="INFO")
    job.generation(1)
    job.start("the-spare", conf=",spares=1")
    until(lambda: "the-spare" in job.output("a").read_text(), "its arrival")
    spare = job.agents.pop("the-spare")
    job.end()
    assert spare.wait(DEADLINE) == 0, job.output("the-spare").read_text()[-2000:]


def test_when_torchrun_gives_up_the_job_ends_on_every_node(torchruns: Callable[..., Torchruns]) -> None:
    job = torchruns("2").start("a", "b")
    os.kill(job.generation(2)["b"]["pid"], signal.SIGKILL)
    os.kill(job.generation(2)["b"]["pid"], signal.SIGKILL)  # --max-restarts=1
    assert [job.agents[node].wait(DEADLINE) for node in ("a", "b")] == [1, 1]
    assert "RendezvousClosedError" in job.output("a").read_text()
    assert "ChildFailedError" in job.output("b").read_text()


@pytest.mark.long
def test_a_node_with_another_token_is_turned_away(
    torchruns: Callable[..., Torchruns], tmp_path: Path
) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name * 8)
    job = torchruns("1:2").start("a", conf=f",token_file={tmp_path / 'right'},last_call_timeout=1")
    job.generation(1)
    job.start("b", conf=f",token_file={tmp_path / 'wrong'}")
    assert job.agents.pop("b").wait(DEADLINE) == 1
    assert "RendezvousError" in job.output("b").read_text()
    job.end()
