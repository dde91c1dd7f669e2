"""An agent that cannot take part ends at once, with its exit code and a last line that names the cause."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from tests.support.agents import Agents, agents

_DEADLINE = 60.0


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Return a job whose first node waits for two more, so that none of those that follow is one too many."""
    with agents(tmp_path_factory.mktemp("waiting"), "3:3") as found:
        found.settings["--rdzv-conf"] = "join_timeout=3600"  # for all that follow, however long they take
        found.start_founder()
        found.until_said("n0", "n0")
        yield found
        assert found.agents["n0"].poll() is None, f"the job has ended:\n{found.console('n0')}"


def _ends(found: Agents, name: str, code: int, *tokens: str) -> None:
    """See an agent end with a code, and with a line that names things."""
    assert found.finish(name) == {name: code}, found.console(name)
    last = found.console(name).strip().splitlines()[-1]
    assert [one for one in tokens if one not in last] == [], last


@pytest.mark.parametrize(
    ("settings", "options", "code", "tokens"),
    [
        ({"nnodes": "1:3"}, "", 93, "nnodes=1:3 nnodes=3:3"),
        ({}, "--max-restarts 7", 93, "max_restarts=7"),
        ({"rdzv_id": "other", "run_dir": "run", "token_file": "JOB"}, "", 93, "other JOBS"),
        ({"token_file": "token"}, "", 93, "--token-file"),
        ({"token_file": "/nowhere/token"}, "", 2, "--token-file=/nowhere/token"),
        ({"token_file": "/dev/null"}, "", 2, "--token-file=/dev/null"),
        ({"rdzv_endpoint": "no-such-host.invalid:29400"}, "", 2, "no-such-host.invalid"),
        ({"rdzv_endpoint": "127.0.0.1:0"}, "", 2, "--rdzv-endpoint=127.0.0.1:0"),
        ({"rdzv_endpoint": ""}, "", 2, "--rdzv-endpoint"),
        ({"rdzv_id": "other"}, "", 73, "other"),
    ],
    ids=["nodes", "option", "job", "token", "no-token", "device", "host", "port", "no-endpoint", "id"],
)
def test_a_node_that_does_not_fit_learns_why(
    waiting: Agents, tmp_path: Path, settings: Mapping[str, str], options: str, code: int, tokens: str
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    files = {
        "run": str(tmp_path / "run"),
        "token": str(tmp_path / "token"),
        "JOB": str(waiting.run / "token"),
    }
    given: dict[str, Any] = {name: files.get(value, value) for name, value in settings.items()}
    waiting.start("wrong", options=tuple(options.split()), **given)
    _ends(waiting, "wrong", code, *tokens.replace("JOBS", waiting.job).split())


def test_a_job_whose_port_another_one_has_is_refused(waiting: Agents, tmp_path: Path) -> None:
    with agents(tmp_path / "second", "1:2") as second:
        second.start("n0", rdzv_endpoint=waiting.settings["--rdzv-endpoint"])
        _ends(second, "n0", 93, "--token-file")
        second.nothing_left()


def test_a_node_with_another_version_learns_both(waiting: Agents, tmp_path: Path) -> None:
    about = tmp_path / "outlast-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outlast\nVersion: 99.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    waiting.start("old", environment={"PYTHONPATH": path})
    _ends(waiting, "old", 93, "99.0", metadata.version("outlast"))


def test_a_node_whose_job_has_another_protocol_learns_both(tmp_path: Path) -> None:
    def answer(line: ServerConnection) -> None:
        line.recv(_DEADLINE)
        line.send('{"protocol": 1, "version": "0.0.1"}')
        with suppress(ConnectionClosed):
            line.recv(_DEADLINE)

    with (
        serve(answer, "127.0.0.1", 0, compression=None) as server,
        agents(tmp_path / "old", "1:2") as found,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.start("n1", rdzv_endpoint=f"127.0.0.1:{server.socket.getsockname()[1]}")
        _ends(found, "n1", 93, "0.0.1", metadata.version("outlast"))
        server.shutdown()


def test_a_second_agent_under_a_name_is_refused_whether_or_not_it_shares_the_run_folder(
    waiting: Agents, tmp_path: Path
) -> None:
    waiting.start("twin")
    waiting.until_said("n0", "twin")
    first = waiting.agents["twin"]
    waiting.start("twin")
    _ends(waiting, "twin", 64, str(first.pid))
    waiting.start("twin", run_dir=str(tmp_path / "run"), token_file=str(waiting.run / "token"))
    _ends(waiting, "twin", 93, "twin")
    noted = waiting.said("n0", "twin")
    first.kill()
    first.wait()
    waiting.until(lambda: waiting.said("n0", "twin") > noted, "the loss of the first one")


def test_one_node_more_than_is_wanted_is_refused(job: Callable[..., Agents]) -> None:
    found = job("1:1", spares=1)
    found.start_founder()
    found.start("n1")
    found.until_runs(1)
    found.until_spare("n1")
    found.start("n2")
    _ends(found, "n2", 93, "--nnodes", "--spares")
    found.order("exit:0 * *")
    assert found.finish("n0", "n1") == {"n0": 0, "n1": 0}
    found.nothing_left()
