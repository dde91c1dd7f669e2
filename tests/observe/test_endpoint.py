"""Metrics over HTTP: what is answered, what is refused, and that strangers on the port stop nobody."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast import cli
from outlast.errors import UsageError
from outlast.observe.metrics import endpoint
from outlast.observe.metrics.endpoint import Endpoint
from tests.observe.test_metrics import DATA, WITHIN, parsed


@contextlib.contextmanager
def served(text: Callable[[], str]) -> Iterator[str]:
    """Serve a text; yield its address."""
    listener = endpoint.listen(("127.0.0.1", 0))
    found = endpoint.url(listener)
    one = Endpoint(listener, text)
    one.start()
    try:
        yield found
    finally:
        one.close()
        assert "metrics" not in [thread.name for thread in threading.enumerate()]


def got(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WITHIN) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def exchanged(url: str, request: bytes) -> bytes:
    """Send bytes as they are; return all that comes back."""
    port = int(url.split(":")[2].split("/", maxsplit=1)[0])
    with socket.create_connection(("127.0.0.1", port), WITHIN) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"405 "),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"405 "),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 "),
        (b"GET /../etc/passwd HTTP/1.0\r\n\r\n", b"404 "),
        (b"\x16\x03\x01\x02\x00 \xff\r\n\r\n", b"400 "),
        (b"GET /metrics HTTP/2\r\n\r\n", b"400 "),
        (b"GET /metrics\r\n\r\n", b"400 "),
        (b"x" * (endpoint.MOST_BYTES + 1), b"431 "),
    ],
)
def test_other_requests_are_refused(request_: bytes, status: bytes) -> None:
    with served(lambda: "told\n") as url:
        assert exchanged(url, request_).startswith(b"HTTP/1.1 " + status)
        assert got(url) == (200, "told\n")


def test_clients_that_say_nothing_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE", 3600.0)
    with served(lambda: "told\n") as url, contextlib.ExitStack() as silent:
        port = int(url.split(":")[2].split("/")[0])
        for at in range(3 * endpoint.MOST_CONNECTIONS):
            client = silent.enter_context(socket.create_connection(("127.0.0.1", port), WITHIN))
            client.sendall(b"GET " * (at % 2))
        assert got(url) == (200, "told\n")


def test_what_goes_wrong_is_told_and_later_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FRESH", 0.0)
    results: list[Exception | str] = [UsageError("no log"), ValueError("odd"), "a \udc80 b\n"]

    def text() -> str:
        if isinstance(found := results.pop(0), Exception):
            raise found
        return found

    with served(text) as url:
        assert got(url) == (503, "no log\n")
        status, said = got(url)
        assert (status, "odd" in said) == (500, True)
        assert got(url) == (200, "a ? b\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [("9400", ("127.0.0.1", 9400)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:65535", ("::1", 65535))],
)
def test_an_address_is_a_port_perhaps_with_a_host(text: str, found: tuple[str, int]) -> None:
    assert endpoint.address(text) == found


@pytest.mark.parametrize("text", ["", ":9400", "host", "host:", "1:65536", "1:-1", "1:\u0661"])
def test_what_is_no_address_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="PORT"):
        endpoint.address(text)


def test_a_job_whose_metrics_have_an_impossible_address_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    with endpoint.serving("a..b:9100", tmp_path, "", said.append):
        pass
    assert ["a..b:9100" in line for line in said] == [True]


def test_an_address_that_cannot_be_used_is_an_error_with_a_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(DATA / "eventful.jsonl", tmp_path / "events.jsonl")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["metrics", str(tmp_path), "--listen", str(port)]) == 2
    assert re.search(f"127.0.0.1:{port}.*Address already in use", capsys.readouterr().err)
    assert cli.main(["metrics", str(tmp_path), "--listen", "192.0.2.1:0"]) == 2
    assert "192.0.2.1" in capsys.readouterr().err
    assert cli.main(["metrics", str(tmp_path), "--listen", "0", "--textfile", "/x.prom"]) == 2


def test_runs_are_served_until_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    lines = (DATA / "eventful.jsonl").read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:6]))
    command = [sys.executable, "-m", "outlast", "metrics", str(tmp_path), "--listen", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = re.search(r"(http://\S+/metrics)\n", server.stderr.readline())
            assert said is not None
            assert parsed(got(said[1])[1])["outlast_checkpoint_step"] == {("9c41d07ab2e5", "disk"): 100}
            with open(log, "ab") as file:
                file.write(b"".join(lines[6:]))
            deadline = time.monotonic() + WITHIN
            while parsed(got(said[1])[1])["outlast_checkpoint_step"] != {("9c41d07ab2e5", "disk"): 500}:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            server.send_signal(signal.SIGINT)
            assert server.wait(WITHIN) == 0
        finally:
            server.kill()
