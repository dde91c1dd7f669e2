"""``outlast dashboard``: a real server on logs that grow, and strangers who ask it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the dashboard's extra is not installed")
pytest.importorskip("uvicorn", reason="the dashboard's extra is not installed")

from outlast import cli
from outlast.observe.requests import Request, What, take
from outlast.observe.run_folder import RunFolder
from tests.observe.dashboard.pages import (
    EVENTFUL,
    FAULT,
    HEALTHY,
    LINES,
    WITHIN,
    Server,
    append,
    parsed,
    served,
)
from tests.support.launching import until


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


def test_a_fault_is_sent_to_an_open_page_with_the_log_of_its_rank(run_dir: Path) -> None:
    with served(run_dir) as server:
        status, page = server.ask("/")
        assert status == 200
        tree = parsed(page)
        assert "No incidents." in "".join(tree.itertext())
        body = next(tree.iter("body"))
        since = f"{body.attrib['data-events']}?since={body.attrib['data-version']}"
        stream = listened(server, since)
        append(run_dir / "events.jsonl", FAULT)
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


def test_a_half_written_line_is_shown_when_it_is_whole(run_dir: Path) -> None:
    with served(run_dir) as server:
        append(run_dir / "events.jsonl", [FAULT[0], FAULT[1][:60]])
        stream = listened(server, "/events")
        assert "No incidents." in next(stream)["incidents"]
        append(run_dir / "events.jsonl", [FAULT[1][60:]])
        while "rank 2" not in next(stream).get("incidents", ""):
            pass
        stream.close()
        page = server.ask("/")[1]
        assert "torn" not in page


def test_a_run_of_a_newer_version_is_shown_with_what_can_be_read(run_dir: Path) -> None:
    append(run_dir / "events.jsonl", [b'{"v":2,"kind":"saved","time":1.0}\n', b"no JSON\n"])
    with served(run_dir) as server:
        page = server.ask("/")[1]
    assert "1 lines are of a newer outlast" in page
    assert "1 lines are torn" in page


def test_runs_of_a_folder_are_side_by_side_and_new_ones_appear(run_dir: Path) -> None:
    with served(run_dir.parent) as server:
        assert "ended, exit code 0" not in server.ask("/")[1]
        other = run_dir.parent / "other"
        other.mkdir()
        shutil.copy(EVENTFUL, other / "events.jsonl")
        deadline = time.monotonic() + WITHIN
        while "ended, exit code 0" not in (page := server.ask("/")[1]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        tree = parsed(page)
        links = [one.attrib["href"] for one in tree.iter("a") if one.attrib["href"].startswith("/run/")]
        assert links == ["/run/0", "/run/1"]
        assert "Goodput 41.0%" in server.ask("/run/1")[1]
        assert server.ask("/run/2")[0] == 404
        assert set(next(listened(server, "/events"))) == {"run-0", "run-1"}


def test_a_log_that_vanishes_leaves_the_page_and_says_so(run_dir: Path) -> None:
    shutil.copy(EVENTFUL, run_dir / "events.jsonl")
    with served(run_dir) as server:
        assert "Goodput 41.0%" in server.ask("/")[1]
        shutil.rmtree(run_dir)
        deadline = time.monotonic() + WITHIN
        while "no event log is there" not in (page := server.ask("/")[1]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert "Goodput 41.0%" in page


def test_only_reading_and_only_under_a_name_of_this_host(run_dir: Path) -> None:
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


def test_every_answer_forbids_what_a_page_does_not_need(run_dir: Path) -> None:
    with served(run_dir) as server:
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
        deadline = time.monotonic() + WITHIN
        while server.ask("/")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)


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
            assert status == 400
            assert "the field what with save, drain or stop is expected; nothing was asked" in said
        assert post(path="/run/1/request", Authorization=MAY_ACT)[0] == 404
        assert post(path="/", Authorization=MAY_ACT)[0] == 405
        assert server.ask("/run/0/request", Authorization=MAY_ACT)[0] == 405
        assert server.ask("/", "DELETE", Authorization=MAY_ACT)[0] == 405
        status, said = post(Authorization=MAY_ACT)
        assert (status, "no launcher runs here; nothing was asked" in said) == (409, True)
        assert "Requests" not in server.ask("/", Authorization="Bearer correct-horse-battery")[1]
        page = server.ask("/", Authorization=MAY_ACT)[1]
        assert [one.attrib["action"] for one in parsed(page).iter("form")] == ["/run/0/request"] * 3


def test_a_request_reaches_the_launcher(run_dir: Path, act: Path) -> None:
    folder = RunFolder(run_dir)
    folder.claim()
    with served("--act-token-file", act, run_dir) as server, ThreadPoolExecutor(1) as thread:
        assert "Requests" not in server.ask("/")[1], "everybody may read, and not act"
        origin = f"http://127.0.0.1:{server.port}"
        answer = thread.submit(
            lambda: server.ask("/run/0/request", "POST", "what=save", Authorization=MAY_ACT, Origin=origin)
        )
        taken = until(lambda: take(folder.request), "a request")
        assert isinstance(taken, Request)
        assert taken.what is What.SAVE
        assert answer.result() == (200, f"{run_dir}: taken: save. The event log says what follows.")
    folder.release()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0", "--token-file", "{good}", "--act-token-file", "{good}"], "in plain text"),
        (["--token-file", "{good}", "--act-token-file", "{good}"], "the same token as in --token-file"),
        (["--host", "0.0.0.0"], "--token-file FILE is needed"),
        (["--token-file", "{short}"], "the token has 3 characters"),
        (["--token-file", "{open}"], "others may read it"),
        (["--token-file", "/nowhere"], "No such file"),
        (["--port", "{taken}"], "choose another one with --port"),
    ],
)
def test_what_cannot_be_served_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    for name, content, mode in (
        ("short", "abc", 0o600),
        ("open", "x" * 20, 0o644),
        ("good", "x" * 20, 0o600),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        named = {name: str(tmp_path / name) for name in ("short", "open", "good")}
        named["taken"] = taken.getsockname()[1]
        given = [one.format_map(named) for one in options]
        assert cli.main(["dashboard", str(run_dir), *given]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", str(tmp_path)]) == 2
    assert "no run folder is there or in it" in capsys.readouterr().err


def test_without_the_extra_the_command_says_how_to_install_it(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError(name='starlette')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "outlast", "dashboard", str(run_dir)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WITHIN, check=False
    )
    assert done.returncode == 2
    assert "starlette is needed for the dashboard: pip install 'outlast[dashboard]'" in done.stderr


def test_the_saved_page_is_whole_and_has_the_end_of_the_log(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(run_dir / "events.jsonl", LINES[10:])
    saved = tmp_path / "page.html"
    assert cli.main(["report", str(run_dir), "--html", str(saved)]) == 0
    tree = parsed(saved.read_text("utf-8"))
    words = "".join(tree.itertext())
    assert "Traceback: boom <b>" in words
    assert "Goodput 41.0%" in words
    assert next(tree.iter("body")).attrib["data-events"] == ""
    assert cli.main(["report", str(run_dir), "--html", str(tmp_path)]) == 2
    assert "the page was not written" in capsys.readouterr().err
    assert cli.main(["report", "--html", str(saved)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "train"]
