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


def test_what_is_not_available_is_named(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard.answer = 500
    with pytest.raises(RayUnavailable, match="500"):
        ray_cli.main(["submit", *NEEDED, f"--address={dashboard.url}", *SCRIPT])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(RayUnavailable, match=address):
            ray_cli.main(["submit", *NEEDED, f"--address={address}", *SCRIPT])
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    with pytest.raises(RayUnavailable, match="pip install"):
        ray_cli.main(["run", *NEEDED, *SCRIPT])


WRONG = ["--nnodes=4:2", "--spares=-1", "--gpus=-1", "--cpus=0", "--lead=10", "--placement-timeout=0"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        *(
            (["run", *NEEDED, one, *SCRIPT], one)
            for one in (*WRONG, "--max-node-restarts=-1", "--run-dir=gpt")
        ),
        (["run", *NEEDED], "train.py"),
        (["run", *NEEDED, "--", "--node-rank=1", "train.py"], "--node-rank"),
        (["run", *NEEDED, "--", "--no-such", "train.py"], "--no-such"),
        (["submit", "--address=auto", *NEEDED, *SCRIPT], "http://HOST:PORT"),
    ],
)
def test_what_cannot_take_effect_is_an_error(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        ray_cli.main(words)
