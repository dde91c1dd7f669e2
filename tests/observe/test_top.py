"""``outlast top``: a page for terminals of any width, JSON, and one page where there is no terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outlast import cli
from outlast.launcher.output import status
from outlast.observe import top
from outlast.observe.policy.now import NodeNow, Now, NowFold, State
from outlast.observe.recorder import read
from outlast.recovery.policy.events import ActionTaken, FaultSeen, FirstStep

LOG = Path(__file__).parent / "data" / "eventful.jsonl"
LINES = LOG.read_bytes().splitlines(keepends=True)
WITHIN = 60.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    shutil.copy(LOG, tmp_path / "events.jsonl")
    return tmp_path


def sample() -> Now:
    told = NowFold()
    for record in read(LOG).records:
        told.take(record)
    return told.now()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    shown = top.lines(sample(), sample().heard + 5, width)
    assert max(map(len, shown)) <= width
    assert "9c41d07ab2e5" in shown[0]
    assert any("step 500" in line for line in shown)


def test_a_run_without_records_for_a_minute_is_told_as_that() -> None:
    now = replace(sample(), state=State.TRAINING, end=None, heard=1000.0)
    assert top.doing(now, 1030.0) == top.doing(replace(now, heard=2000.0), 1000.0) == "training"
    assert re.search("12 min 30 s.*training", top.doing(now, 1750.0))
    waits = replace(now, state=State.RECOVERING, starts_at=1010.0)
    assert "7 s" in top.doing(waits, 1003.0)
    assert "7 s" in status.line(replace(waits, step=-1), 1003.0, 80)


def test_four_thousand_nodes_fit_on_a_terminal_and_the_least_far_are_shown() -> None:
    nodes = tuple(NodeNow(f"node{at:04}", 4, 8, 500 - (at == 17), 0.0, at != 99, False) for at in range(4096))
    shown = top.lines(replace(sample(), nodes=nodes), 10.0, 60, height=30)
    assert len(shown) <= 30
    told = [line for line in shown if line.startswith("node")]
    assert [line.split()[0] for line in told[:2]] == ["node0099", "node0017"]
    assert str(4096 - len(told)) in shown[-1]


def test_what_a_script_printed_into_a_reason_cannot_steer_the_terminal() -> None:
    now = sample()
    assert now.incident is not None
    shown = top.lines(replace(now, incident=replace(now.incident, reason="\x1b[2Jgone\n\n")), 0.0, 80)
    assert all(line.isprintable() for line in shown)


@pytest.mark.parametrize("source", ["", "session", "announced", "counted"])
def test_a_counted_step_is_marked_wherever_it_is_shown(source: str) -> None:
    fold = NowFold()
    for record in (
        FirstStep(2.0, 2.0, 1, 7, {}, source),
        FaultSeen(3.0, 3.0, 1, "crash", "n0", 1, 22, 2.5, "rank 1 died", "", source=source),
        ActionTaken(3.0, 3.0, 1, "restart-in-job", 2, "newest", "restart 1 of 3"),
    ):
        fold.take(record)
    now = fold.now()
    shown = {line.split()[0]: "counted" in line for line in top.lines(now, 4.0, 200)}
    assert (shown["step"], shown["incident"]) == (source == "counted", source == "counted")
    assert ("counted" in status.line(now, 4.0, 200)) is (source == "counted")


def test_without_a_terminal_it_is_shown_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(run_dir)]) == 0
    assert "\x1b" not in (printed := capsys.readouterr().out)
    assert re.search("hang .*rank 1 .*n01 .*step 350", printed)
    assert cli.main(["top", "--json", str(run_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["state"], found["lines_skipped"]) == (500, "ended", 1)


def test_on_a_terminal_of_forty_columns_it_is_refreshed_until_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(b"".join(LINES[:4]))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 20, 40, 0, 0))
    command = [sys.executable, "-m", "outlast", "top", str(tmp_path), "--interval", "0.1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environment) as shown:
        os.close(slave)
        try:
            assert "step        52" in until(master, "step        52")
            with open(log, "ab") as file:
                file.write(b"".join(LINES[4:]))
            assert max(map(len, until(master, "exit code 0").splitlines()[1:-1])) <= 40 + len(
                "\x1b[H\x1b[K\x1b[J"
            )
            shown.send_signal(signal.SIGINT)
            assert shown.wait(WITHIN) == 0
        finally:
            shown.kill()
            os.close(master)


def until(terminal: int, text: str) -> str:
    """Read a terminal until it has shown a text."""
    deadline, seen = time.monotonic() + WITHIN, b""
    while text.encode() not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 1 << 16)
    return seen.decode()
