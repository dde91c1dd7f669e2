"""A Ray job that cannot be is refused with all that is wrong; what is handed over is what was asked for."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from outlast.errors import ExitCode, UsageError
from outlast.integrations.ray import cli as ray_cli
from outlast.integrations.ray.driver import RayUnavailable

NEEDED = ["--nnodes=2:4", "--run-dir=/shared/gpt"]
SCRIPT = ["--", "train.py", "--lr", "1 e"]


class Dashboard:
    """Answers one kind of request: a new job."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.answer = 200
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.jobs.append({"path": self.path, **content})
                body = json.dumps({"submission_id": content["submission_id"]}).encode()
                self.send_response(owner.answer)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    found = Dashboard()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.server.shutdown()
    thread.join(10)
    found.server.server_close()


def test_submit_hands_over_the_command_that_runs_it(
    dashboard: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--spares=1", "--gpus=8", "--lead=300", f"--address={dashboard.url}/"]
    assert ray_cli.main(["submit", *NEEDED, *options, *SCRIPT]) == ExitCode.OK
    job = dashboard.jobs[0]
    assert capsys.readouterr().out.strip() == job["submission_id"]
    assert job["submission_id"].startswith("gpt-")
    assert job["path"] == "/api/jobs/"
    words = shlex.split(job["entrypoint"])
    assert words[:3] == ["outlast", "ray", "run"]
    assert {*NEEDED, "--name=gpt", "--spares=1", "--gpus=8", "--lead=300"} <= set(words)
    assert words[-4:] == SCRIPT
    again = ray_cli._job(ray_cli._parser().parse_args(words[2 : words.index("--")]), words[-3:])
    assert (again.bundles, again.nodes, again.gpus, again.lead) == (5, (2, 4), 8, 300.0)
    assert again.words(3, "10.0.0.7:1234") == (
        *("outlast", "run", "--nnodes=2:4", "--spares=1", "--nproc-per-node=8", "--rdzv-id=gpt"),
        *("--rdzv-endpoint=10.0.0.7:1234", "--node-rank=3", "--token-file={token-file}"),
        *("--run-dir=/shared/gpt", "--ft-workers-stop-timeout=270", "train.py", "--lr", "1 e"),
    )


def test_a_refusal_is_told(dashboard: Dashboard) -> None:
    dashboard.answer = 500
    with pytest.raises(RayUnavailable, match="refused with 500"):
        ray_cli.main(["submit", *NEEDED, f"--address={dashboard.url}", *SCRIPT])


def test_a_dashboard_that_is_not_there_is_told() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(RayUnavailable, match="shows whether gpt-"):
            ray_cli.main(["submit", *NEEDED, f"--address={address}", *SCRIPT])


def test_without_ray_the_way_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    with pytest.raises(RayUnavailable, match="pip install"):
        ray_cli.main(["run", *NEEDED, *SCRIPT])


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--nnodes=4:2", "--nnodes=4:2"),
        ("--spares=-1", "--spares=-1"),
        ("--gpus=-1", "--gpus=-1"),
        ("--cpus=0", "--cpus=0"),
        ("--lead=10", "--lead=10"),
        ("--placement-timeout=0", "--placement-timeout=0"),
        ("--max-node-restarts=-1", "--max-node-restarts=-1"),
        ("--run-dir=gpt", "expected an absolute path"),
    ],
)
def test_an_option_that_cannot_take_effect_is_an_error(option: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        ray_cli.main(["run", *NEEDED, option, *SCRIPT])


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([], "nothing to run"),
        (["--", "--node-rank=1", "train.py"], "it cannot be given twice"),
        (["--", "--no-such", "train.py"], "unknown option"),
    ],
)
def test_a_wrong_command_line_is_an_error(command: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        ray_cli.main(["run", *NEEDED, *command])


def test_submit_needs_the_dashboard() -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        ray_cli.main(["submit", "--address=auto", *NEEDED, *SCRIPT])
