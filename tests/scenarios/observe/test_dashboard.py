"""``outlast dashboard``: a real server on logs that grow, and strangers who ask it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the dashboard's extra is not installed")
pytest.importorskip("uvicorn", reason="the dashboard's extra is not installed")

from tests.support.dashboards import EVENTFUL, FAULT, HEALTHY, WITHIN, Server, append, parsed, served
from tests.support.launching import Run, running, until


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    found = tmp_path / "train"
    rank = found / "logs" / "gen-0001" / "rank-00002"
    rank.mkdir(parents=True)
    (rank / "stderr.log").write_text("Traceback: boom <b>\n")
    append(found / "events.jsonl", HEALTHY)
    return found


def listened(server: Server, path: str) -> Iterator[dict[str, str]]:
    """Yield the sections that a stream sends."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN)
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def test_a_fault_is_sent_to_an_open_page_with_the_log_of_its_rank_when_its_line_is_whole(
    run_dir: Path,
) -> None:
    with served(run_dir) as server:
        status, page = server.ask("/")
        assert status == 200
        tree = parsed(page)
        body = next(tree.iter("body"))
        since = f"{body.attrib['data-events']}?since={body.attrib['data-version']}"
        stream = listened(server, since)
        append(run_dir / "events.jsonl", [FAULT[0], FAULT[1][:60]])
        whole = listened(server, "/events")
        assert "crash" not in next(whole)["incidents"]
        whole.close()
        append(run_dir / "events.jsonl", [FAULT[1][60:]])
        found: dict[str, str] = {}
        deadline = time.monotonic() + WITHIN
        while "rank 2" not in found.get("incidents", ""):
            assert time.monotonic() < deadline
            found.update(next(stream))
        stream.close()
        assert "checkpoints" not in found  # it did not change
        assert "crash" in found["now"]
        assert '<a href="/run/0/log/1/stderr">' in found["incidents"]
        assert server.ask("/run/0/log/1/stderr") == (200, "Traceback: boom <b>\n")
        assert server.ask("/?" + "a=1&" * 30)[0] == 400
        for path in ("/run/0/log/1/stdout", "/run/0/log/2/stderr", "/run/1/log/1/stderr", "/run/0/log/1/x"):
            assert server.ask(path)[0] == 404


@pytest.mark.long
def test_a_run_without_news_is_shown_anew_every_5_s(tmp_path: Path) -> None:
    """Its age is all that changes; between the first and the third page a span of 5 s has passed."""
    records = [json.loads(line) for line in HEALTHY]
    later = time.time() - 100.0 - records[-1]["time"]
    lines = [json.dumps({**one, "time": one["time"] + later}).encode() + b"\n" for one in records]
    append(tmp_path / "events.jsonl", lines)
    with served(tmp_path) as server:
        stream, ages = listened(server, "/events"), list[int]()
        while len(ages) < 3:
            age = re.search(r"(\d+) min (\d+) s", next(stream).get("now", ""))
            ages += [60 * int(age[1]) + int(age[2])] if age else []
        stream.close()
    assert ages[2] - ages[0] >= 5


def test_runs_of_a_folder_are_side_by_side_new_ones_appear_and_one_that_vanishes_stays(run_dir: Path) -> None:
    other = run_dir.parent / "other"
    with served(run_dir.parent) as server:
        assert "41.0%" not in server.ask("/")[1]
        other.mkdir()
        shutil.copy(EVENTFUL, other / "events.jsonl")
        until(lambda: "41.0%" in server.ask("/")[1], "the other run", WITHIN)
        tree = parsed(server.ask("/")[1])
        links = [one.attrib["href"] for one in tree.iter("a") if one.attrib["href"].startswith("/run/")]
        assert links == ["/run/0", "/run/1"]
        assert "41.0%" in server.ask("/run/1")[1]
        assert 'class="state bad"' not in server.ask("/run/1")[1]
        assert server.ask("/run/2")[0] == 404
        assert set(next(listened(server, "/events"))) == {"run-0", "run-1"}
        shutil.rmtree(other)
        until(lambda: 'class="state bad"' in server.ask("/run/1")[1], "the trouble", WITHIN)
        assert "41.0%" in server.ask("/run/1")[1]


def test_only_reading_only_under_a_name_of_this_host_and_nothing_else_is_allowed_to_a_page(
    run_dir: Path,
) -> None:
    with served(run_dir) as server:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert server.ask("/", method)[0] == 405
        assert server.ask("/", "HEAD")[0] == 200
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "",
            "[::1",
            "[::1]evil",
        ):
            assert server.ask("/", Host=host)[0] == 421, host
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8265", "192.0.2.7:80"):
            assert server.ask("/", Host=host)[0] == 200
        assert server.ask("/events", Sec_Fetch_Site="cross-site")[0] == 403
        for path in ("/run/0/log/1/..%2f..%2fsecret", "/../etc/passwd", "/run/-1", "/run/x", "/events/7"):
            assert server.ask(path)[0] == 404
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN)
        with closing(connection):
            connection.request("GET", "/")
            headers = connection.getresponse().headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers
    assert headers["cache-control"] == "no-store"


def test_a_stranger_cannot_hold_the_server(run_dir: Path) -> None:
    with served(run_dir) as server, ExitStack() as stack:
        silent = socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN)
        stack.enter_context(closing(silent))
        assert server.ask("/" + "x" * 10_000)[0] == 414
        for _ in range(70):
            more = socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN)
            stack.enter_context(closing(more))
            more.sendall(b"GET / HTTP/1.1\r\n")
        assert server.ask("/")[0] == 503
        assert silent.recv(1) == b""  # nothing was asked for: the server has closed it
        until(lambda: server.ask("/")[0] == 200, "an answer", WITHIN)


def test_with_a_token_nothing_is_shown_without_it(run_dir: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct-horse-battery\n")
    token.chmod(0o600)
    with served("--token-file", token, run_dir) as server:
        for path in ("/", "/?token=", "/?token=wrong", "/events", "/run/0/log/1/stderr"):
            assert server.ask(path)[0] == 401
        assert server.ask("/", Authorization="Bearer wrong")[0] == 401
        assert server.ask("/", Authorization="Bearer correct-horse-battery")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN)
        with closing(connection):
            connection.request("GET", "//evil.example/?token=correct-horse-battery")
            answer = connection.getresponse()
            assert (answer.status, answer.headers["location"]) == (303, "/")
            cookie = answer.headers["set-cookie"]
        assert "correct-horse" not in cookie
        assert "HttpOnly" in cookie
        assert server.ask("/", Cookie=cookie.partition(";")[0])[0] == 200
        assert server.ask("/", Cookie='other={"a": 1}; ' + cookie.partition(";")[0])[0] == 200
        assert server.ask("/", Cookie=cookie.partition("=")[0] + "=x")[0] == 401


@pytest.fixture
def act(tmp_path: Path) -> Path:
    token = tmp_path / "act"
    token.write_text("staple-battery-correct\n")
    token.chmod(0o600)
    return token


MAY_ACT = "Bearer staple-battery-correct"


def test_only_who_has_the_token_for_it_may_ask_a_job_for_something(
    run_dir: Path, act: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("correct-horse-battery\n")
    token.chmod(0o600)
    with served("--token-file", token, "--act-token-file", act, run_dir) as server:

        def post(body: str = "what=save", path: str = "/run/0/request", **headers: str) -> tuple[int, str]:
            return server.ask(path, "POST", body, **headers)

        assert post()[0] == 401
        assert post(Authorization="Bearer wrong")[0] == 401
        assert post(Authorization="Bearer correct-horse-battery")[0] == 401
        for site in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "same-site"}):
            assert post(Authorization=MAY_ACT, **site)[0] == 403
        for body in ("", "what=format", "what=" + "x" * 2000, "\xff", "&" * 100):
            status, said = post(body, Authorization=MAY_ACT)
            assert (status, "save, drain" in said) == (400, True)
        assert post(path="/run/1/request", Authorization=MAY_ACT)[0] == 404
        assert post(path="/", Authorization=MAY_ACT)[0] == 405
        assert server.ask("/run/0/request", Authorization=MAY_ACT)[0] == 405
        assert server.ask("/", "DELETE", Authorization=MAY_ACT)[0] == 405
        assert post(Authorization=MAY_ACT)[0] == 409, "no launcher runs"
        assert "<form" not in server.ask("/", Authorization="Bearer correct-horse-battery")[1]
        page = server.ask("/", Authorization=MAY_ACT)[1]
        assert [one.attrib["action"] for one in parsed(page).iter("form")] == ["/run/0/request"] * 3


def test_a_request_reaches_the_launcher(tmp_path: Path, act: Path) -> None:
    run = Run(tmp_path / "run", "sleep", "600", options=("--no-python",))
    with running(run), ExitStack() as stack:
        run.pids()
        server = stack.enter_context(served("--act-token-file", act, run.folder))
        assert "<form" not in server.ask("/")[1], "everybody may read, and not act"
        origin = f"http://127.0.0.1:{server.port}"
        status, said = server.ask("/run/0/request", "POST", "what=stop", Authorization=MAY_ACT, Origin=origin)
        assert (status, "stop" in said) == (200, True)
        assert run.finish() == 143, run.console()
