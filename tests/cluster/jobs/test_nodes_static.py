"""torchrun's static command, word for word: ports, node ranks, and nodes that are not alike."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outlast.worker.store_host import listener_at
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


@pytest.mark.parametrize("backwards", [False, True])
def test_the_static_command_works_word_for_word_and_ranks_follow_the_node_ranks(
    nodes: Nodes, backwards: bool
) -> None:
    script = nodes.script("env://", 1)
    for rank in (1, 0) if backwards else (0, 1):
        nodes.static(rank, "--nproc-per-node=2", *script, f"--node={rank}", "--", "--rdzv-id=x")
    assert nodes.finish() == [0, 0], nodes.consoles()
    for rank in range(4):
        for generation in (1, 2):
            found = nodes.saw(rank, generation)
            assert found["sum"] == 10
            assert found["arguments"] == [f"--node={rank // 2}", "--", "--rdzv-id=x"]
            seen = found["environment"]
            assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("localhost", str(nodes.port))
            assert (seen["GROUP_RANK"], seen["LOCAL_RANK"]) == (str(rank // 2), str(rank % 2))


def test_nodes_may_have_different_numbers_of_ranks(nodes: Nodes) -> None:
    script = nodes.script("env://", 1)
    nodes.static(0, "--nproc-per-node=1", *script)
    nodes.static(1, "--nproc-per-node=2", *script)
    assert nodes.finish() == [0, 0], nodes.consoles()
    for rank, group in enumerate((0, 1, 1)):
        found = nodes.saw(rank, 2)
        seen = found["environment"]
        assert (found["sum"], seen["GROUP_RANK"], seen["WORLD_SIZE"]) == (6, str(group), "3")
        assert seen["LOCAL_WORLD_SIZE"] == ("1", "2")[group]


@pytest.mark.parametrize("cold", [(), ("--no-zygote",)])
@pytest.mark.parametrize("several", [False, True])
def test_a_script_that_names_the_port_itself_works_also_after_a_restart(
    nodes: Nodes, cold: tuple[str, ...], several: bool
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
    assert f"--master-port={nodes.port}: Address already in use on this host" in nodes.console(0)


def test_a_second_node_of_one_rank_is_refused(nodes: Nodes) -> None:
    script = nodes.script("env://", 0)
    nodes.static(0, *script, nnodes=3)
    nodes.static(1, *script, nnodes=3)
    nodes.static(1, "--node-name=twin", *script, nnodes=3)
    until(lambda: 93 in [one.poll() for one in nodes.started], nodes.consoles)
    at = [one.poll() for one in nodes.started].index(93)
    assert at > 0
    assert "has joined with --node-rank=1 and is alive" in nodes.console(at)


def test_a_port_that_the_store_before_still_has_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        timer = threading.Timer(0.3, before.close)
        timer.start()
        listener, why = listener_at("127.0.0.1", port, port, patience=DEADLINE)
        timer.join()
    with listener:
        assert (listener.getsockname()[1], why) == (port, "")


def test_a_port_that_stays_taken_is_given_up_in_time_and_another_one_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        listener, why = listener_at("127.0.0.1", port, port, patience=0.2)
        with listener:
            assert listener.getsockname()[1] not in (0, port)
            assert "Address already in use" in why
