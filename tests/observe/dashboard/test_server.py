"""``outlast dashboard`` and saved pages: what is refused, and what a page without a server has."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the dashboard's extra is not installed")
pytest.importorskip("uvicorn", reason="the dashboard's extra is not installed")

from outlast import cli
from tests.support.dashboards import HEALTHY, LINES, WITHIN, append, parsed


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    found = tmp_path / "train"
    rank = found / "logs" / "gen-0001" / "rank-00002"
    rank.mkdir(parents=True)
    (rank / "stderr.log").write_text("Traceback: boom <b>\n")
    append(found / "events.jsonl", HEALTHY)
    return found


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--host", "0.0.0.0", "--token-file", "{good}", "--act-token-file", "{good}"], "0.0.0.0"),
        (["--token-file", "{good}", "--act-token-file", "{good}"], "--token-file"),
        (["--host", "0.0.0.0"], "--token-file"),
        (["--token-file", "{short}"], "short"),
        (["--token-file", "{open}"], "open"),
        (["--token-file", "/nowhere"], "No such file"),
        (["--port", "{taken}"], "--port"),
    ],
)
def test_what_cannot_be_served_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
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
        places = {name: str(tmp_path / name) for name in ("short", "open", "good")}
        places["taken"] = taken.getsockname()[1]
        given = [one.format_map(places) for one in options]
        assert cli.main(["dashboard", str(run_dir), *given]) == 2
    assert named in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_without_the_extra_the_command_says_how_to_install_it(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError(name='starlette')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "outlast", "dashboard", str(run_dir)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WITHIN, check=False
    )
    assert done.returncode == 2
    assert "pip install 'outlast[dashboard]'" in done.stderr


def test_the_saved_page_is_whole_and_has_the_end_of_the_log(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(run_dir / "events.jsonl", LINES[10:])
    saved = tmp_path / "page.html"
    assert cli.main(["report", str(run_dir), "--html", str(saved)]) == 0
    tree = parsed(saved.read_text("utf-8"))
    words = "".join(tree.itertext())
    assert "Traceback: boom <b>" in words
    assert "41.0%" in words
    assert next(tree.iter("body")).attrib["data-events"] == ""
    assert cli.main(["report", str(run_dir), "--html", str(tmp_path)]) == 2
    assert cli.main(["report", "--html", str(saved)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "train"]
