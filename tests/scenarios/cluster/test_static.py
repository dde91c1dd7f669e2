"""torchrun's static command, word for word: ports, node ranks, and nodes that are not alike."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DEADLINE, SCRIPTS, until
from tests.support.ports import free_port


def _free_port() -> int:
    """Return a port that is free, and the one 100 below it, too."""
    while True:
        port = free_port()
        with socket.socket() as other, suppress(OSError):
            other.bind(("127.0.0.1", port - 100))
            return port


class Nodes:
    """Launchers that are started in one folder, as by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace = folder / "trace"
        self.trace.mkdir()
        self.port = _free_port()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, **environment: str) -> None:
        with open(self.folder / f"console-{len(self.started)}", "wb") as file:
            self.started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "outlast", "run", *words],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=self.folder,
                    env={**os.environ, **environment},
                )
            )

    def static(self, rank: int, *words: str, nnodes: int = 2, **environment: str) -> None:
        """Start a node as torchrun's users do."""
        where = ("--master-addr=localhost", f"--master-port={self.port}")
        self.start(f"--nnodes={nnodes}", f"--node-rank={rank}", *where, *words, **environment)

    def script(self, method: str, dying: int, *more: str) -> tuple[str, ...]:
        return str(SCRIPTS / "meeting.py"), str(self.trace), method, str(dying), *more

    def finish(self) -> list[int]:
        try:
            return [one.wait(DEADLINE) for one in self.started]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.consoles()) from None

    def console(self, at: int) -> str:
        return (self.folder / f"console-{at}").read_text(errors="replace")

    def consoles(self) -> str:
        return "\n".join(f"--- {at}\n{self.console(at)}" for at in range(len(self.started)))

    def saw(self, rank: int, generation: int = 1) -> dict[str, Any]:
        path = self.trace / f"rank-{rank}.g{generation}.json"
        assert path.exists(), self.consoles()
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def stop(self) -> None:
        for one in self.started:
            if one.poll() is None:
                one.send_signal(signal.SIGKILL)
                one.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path)
    yield found
    found.stop()


def test_the_static_command_works_word_for_word_for_nodes_that_are_not_alike(nodes: Nodes) -> None:
    script = nodes.script("env://", 1)
    for rank in (1, 0):
        nodes.static(rank, f"--nproc-per-node={1 + rank}", *script, f"--node={rank}", "--", "--rdzv-id=x")
    assert nodes.finish() == [0, 0], nodes.consoles()
    for rank, (node, local, size) in enumerate(((0, 0, 1), (1, 0, 2), (1, 1, 2))):
        for generation in (1, 2):
            found = nodes.saw(rank, generation)
            assert found["sum"] == 6
            assert found["arguments"] == [f"--node={node}", "--", "--rdzv-id=x"]
            seen = found["environment"]
            assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("localhost", str(nodes.port))
            assert (seen["GROUP_RANK"], seen["LOCAL_RANK"]) == (f"{node}", f"{local}")
            assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("3", f"{size}")


@pytest.mark.parametrize(
    ("several", "cold"),
    [
        (True, ()),
        pytest.param(False, (), marks=pytest.mark.long),
        pytest.param(True, ("--no-zygote",), marks=pytest.mark.long),
        pytest.param(False, ("--no-zygote",), marks=pytest.mark.long),
    ],
)
def test_a_script_that_names_the_port_itself_works_also_after_a_restart(
    nodes: Nodes, several: bool, cold: tuple[str, ...]
) -> None:
    script = nodes.script(f"tcp://localhost:{nodes.port}", 1)
    for rank in range(1 + several):
        nodes.static(rank, "--nproc-per-node=2", *cold, *script, nnodes=1 + several)
    assert nodes.finish() == [0] * (1 + several), nodes.consoles()
    served = {nodes.saw(rank, 2)["environment"]["TORCHELASTIC_USE_AGENT_STORE"] for rank in (0, 1)}
    assert served == {str(not cold)}


def test_a_port_that_is_taken_is_refused_before_anything_starts(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", nodes.port)):
        nodes.static(0, *nodes.script("env://", 0), nnodes=1)
        assert nodes.finish() == [2]
    assert f"--master-port={nodes.port}" in nodes.console(0)


def test_a_second_node_of_one_rank_is_refused(nodes: Nodes) -> None:
    script = nodes.script("env://", 0)
    nodes.static(0, *script, nnodes=3)
    nodes.static(1, *script, nnodes=3)
    nodes.static(1, "--node-name=twin", *script, nnodes=3)
    until(lambda: 93 in [one.poll() for one in nodes.started], nodes.consoles)
    at = [one.poll() for one in nodes.started].index(93)
    assert at > 0
    assert "--node-rank=1" in nodes.console(at).splitlines()[-1]
