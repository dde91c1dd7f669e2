"""What an agent that cannot take part says: one line that names the cause, and an exit code that fits."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from outlast.cluster.rpc.handshake import PROTOCOL
from tests.support.agents import Agents, agents
from tests.support.posts import DEADLINE

_TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Return a job whose first node waits for two more, so that none of those that follow is one too many."""
    with agents(tmp_path_factory.mktemp("waiting"), "3:3") as found:
        found.settings["--rdzv-conf"] = "join_timeout=3600"  # for all that follow, however long they take
        found.start("n0")
        found.until_said("n0", "this node is the leader")
        yield found
        assert found.agents["n0"].poll() is None, f"the job has ended:\n{found.console('n0')}"


def _last(found: Agents, name: str) -> str:
    """Return the last line that an agent has shown."""
    return found.console(name).strip().splitlines()[-1]


def _other_version(folder: Path) -> dict[str, str]:
    """Return the environment of an outlast that is of another version."""
    about = folder / "outlast-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outlast\nVersion: 99.0\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize(
    ("name", "settings", "options", "words"),
    [
        ("nodes", {"nnodes": "1:3"}, (), "its options say nnodes=1:3, the job's say nnodes=3:3"),
        (
            "option",
            {},
            ("--max-restarts", "7"),
            "its options say fault_tolerance.max_restarts=7, the job's say the default",
        ),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(
    waiting: Agents, name: str, settings: Mapping[str, Any], options: tuple[str, ...], words: str
) -> None:
    waiting.start(name, options=options, **settings)
    assert waiting.finish(name) == {name: 93}
    assert words in _last(waiting, name)
    waiting.until_said("n0", words)


def test_a_node_of_another_job_is_told_so(waiting: Agents, tmp_path: Path) -> None:
    token = str(waiting.run / "token")
    waiting.start("else", rdzv_id="other", run_dir=str(tmp_path / "run"), token_file=token)
    assert waiting.finish("else") == {"else": 93}
    assert f"its run id is other, the job's is {waiting.job}" in _last(waiting, "else")


def test_a_job_whose_port_another_one_has_is_told_so(waiting: Agents, tmp_path: Path) -> None:
    with agents(tmp_path / "second", "1:2") as second:
        second.start("n0", rdzv_endpoint=waiting.settings["--rdzv-endpoint"])
        assert second.finish("n0") == {"n0": 93}
        assert "do not have the same token (--token-file)" in _last(second, "n0")
        second.nothing_left()


def test_a_node_with_another_version_is_told_which(waiting: Agents, tmp_path: Path) -> None:
    waiting.start("old", environment=_other_version(tmp_path))
    assert waiting.finish("old") == {"old": 93}
    assert "its version of outlast is 99.0, the job's is" in _last(waiting, "old")


def test_a_node_whose_job_has_another_protocol_is_told_both(tmp_path: Path) -> None:
    def answer(line: ServerConnection) -> None:
        line.recv(DEADLINE)
        line.send('{"protocol": 1, "version": "0.0.1"}')
        with suppress(ConnectionClosed):
            line.recv(DEADLINE)

    with (
        serve(answer, "127.0.0.1", 0, compression=None) as server,
        agents(tmp_path / "old", "1:2") as found,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.start("n1", rdzv_endpoint=f"127.0.0.1:{server.socket.getsockname()[1]}")
        assert found.finish("n1") == {"n1": 93}
        version = metadata.version("outlast")
        words = f"protocol {PROTOCOL} (outlast {version}) expected, 1 (outlast 0.0.1) found"
        assert words in _last(found, "n1")
        server.shutdown()


def test_a_node_with_another_token_is_told_so(waiting: Agents, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(_TOKEN)
    waiting.start("stranger", token_file=str(tmp_path / "token"))
    assert waiting.finish("stranger") == {"stranger": 93}
    words = "does not take this node: the two sides do not have the same token (--token-file)"
    assert words in _last(waiting, "stranger")


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"token_file": "/nowhere/token"}, 2, "--token-file=/nowhere/token: No such file or directory"),
        (
            {"token_file": "/dev/null"},
            2,
            "--token-file=/dev/null: a regular file is expected",
        ),
        ({"rdzv_endpoint": "no-such-host.invalid:29400"}, 2, "host 'no-such-host.invalid' does not resolve"),
        ({"rdzv_endpoint": "127.0.0.1:0"}, 2, "--rdzv-endpoint=127.0.0.1:0: HOST:PORT expected"),
        ({"rdzv_endpoint": ""}, 2, "--rdzv-endpoint: needed with several nodes"),
        ({"rdzv_id": "other"}, 73, "asked for 'other'"),
    ],
)
def test_a_command_line_that_cannot_work_starts_nothing(
    waiting: Agents, settings: Mapping[str, Any], code: int, words: str
) -> None:
    waiting.start("wrong", **settings)
    assert waiting.finish("wrong") == {"wrong": code}
    assert words in _last(waiting, "wrong")


def test_a_second_agent_under_a_name_is_refused_whether_or_not_it_shares_the_run_folder(
    waiting: Agents, tmp_path: Path
) -> None:
    waiting.start("twin")
    waiting.until_said("n0", "twin has joined")
    first = waiting.agents["twin"]
    waiting.start("twin")
    assert waiting.finish("twin") == {"twin": 64}
    assert f"held by another run (pid {first.pid})" in _last(waiting, "twin")
    waiting.start("twin", run_dir=str(tmp_path / "run"), token_file=str(waiting.run / "token"))
    assert waiting.finish("twin") == {"twin": 93}
    assert "has joined under this name and is alive; each node has a name of its own" in _last(
        waiting, "twin"
    )
    first.kill()
    first.wait()
    waiting.until_said("n0", "twin is lost")


def test_one_node_more_than_is_wanted_is_told_so(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "1:1", spares=1) as found:
        found.start("n0", "n1")
        found.until_runs(1)
        found.until(lambda: any(found.said(name, "has joined") == 2 for name in ("n0", "n1")), "a spare")
        found.start("n2")
        assert found.finish("n2") == {"n2": 93}
        assert "1 active and 1 spare nodes are all that is wanted" in _last(found, "n2")
        found.order("exit:0 * *")
        assert found.finish("n0", "n1") == {"n0": 0, "n1": 0}
        found.nothing_left()


def test_a_port_that_belongs_to_something_else_ends_the_agent_when_its_time_is_over(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2") as found, socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        found.start(
            "n0",
            rdzv_endpoint=f"127.0.0.1:{stranger.getsockname()[1]}",
            rdzv_conf="join_timeout=2",
        )
        assert found.finish() == {"n0": 1}
        assert "no leader was heard for 2 seconds (--rdzv-conf join_timeout)" in _last(found, "n0")
        found.nothing_left()


def test_a_node_that_was_turned_away_leaves_the_first_one_waiting_with_a_limit(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2") as found:
        found.settings["--rdzv-conf"] = "join_timeout=30"
        found.start("n0")
        found.until_said("n0", "this node is the leader")
        found.start("n1", options=("--max-restarts", "7"))
        assert found.finish() == {"n0": 1, "n1": 93}, found.consoles()
        assert "1 node(s) for 30 s, at least 2 needed (--nnodes); the job ends" in _last(found, "n0")
        assert found.said("n0", "the job waits for nodes until 30 s are over (--rdzv-conf join_timeout)") == 1
        found.nothing_left()


def test_a_node_whose_leader_is_gone_for_good_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2") as found:
        found.settings["--rdzv-conf"] = "join_timeout=25"
        found.start("n0")
        found.until_said("n0", "this node is the leader")
        found.start("n1")
        found.until_runs(2)
        found.kill("n0")
        found.until_said("n1", "this node looks for one until 25 s are over (--rdzv-conf join_timeout)")
        assert found.finish("n1") == {"n1": 1}, found.consoles()
        assert "no leader was heard for 25 seconds (--rdzv-conf join_timeout)" in _last(found, "n1")
        found.nothing_left()


def test_a_signal_before_anybody_was_met_ends_an_agent(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2") as found, socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        found.start("n0", rdzv_endpoint=f"127.0.0.1:{stranger.getsockname()[1]}")
        found.until_said("n0", "agents meet at")
        found.send("n0", signal.SIGTERM)
        assert found.finish() == {"n0": 143}
        found.nothing_left()


def test_a_stranger_at_the_endpoint_is_waited_for(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2") as found:
        with socket.create_server(("127.0.0.1", found.port)):
            found.start("n0", "n1")
            for name in ("n0", "n1"):
                found.until_said(name, "agents meet at")
        found.until_runs(2)
        assert sum(found.said(name, "where agents meet, is free now") for name in ("n0", "n1")) == 1
        for name in ("n0", "n1"):
            found.send(name, signal.SIGTERM)
        assert found.finish() == {"n0": 143, "n1": 143}
        found.nothing_left()


def test_what_a_dead_launcher_left_may_go_while_another_one_looks(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    gone = Path("/dev/shm") / f"outlast-{dead}-00000000"
    gone.symlink_to(tmp_path / "gone")  # is listed, and is not there when it is looked at
    try:
        with agents(tmp_path / "job", "1:2") as found:
            found.start("n0")
            found.until_said("n0", "this node is the leader")
    finally:
        gone.unlink()
