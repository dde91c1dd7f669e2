"""The status line: below all other lines of a terminal, and gone without a trace."""

from __future__ import annotations

import fcntl
import os
import random
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outlast.launcher.output import status
from outlast.launcher.output.screen import Screen
from outlast.observe.policy.now import CheckpointNow, Now, State

WITHIN = 60.0
NOW = Now("id", State.TRAINING, step=350, rate=48.2, total=10_000, heard=100.0, generation=3)


class Display:
    """What a terminal shows, of the few controls that are used here."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.lines = [""]
        self.column = 0
        self.raw = b""

    def read(self, patience: float = 0.2) -> list[str]:
        while select.select([self._master], [], [], patience)[0]:
            chunk = os.read(self._master, 1 << 16)
            self.raw += chunk
            self._take(chunk.decode())
        return self.lines

    def _take(self, text: str) -> None:
        for part in text.replace("\x1b[K", "\0"):
            line = self.lines[-1]
            if part == "\0":
                self.lines[-1] = line[: self.column]
            elif part == "\r":
                self.column = 0
            elif part == "\n":
                self.lines.append("")
                self.column = 0
            else:
                self.lines[-1] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1

    def until(self, last: str) -> None:
        deadline = time.monotonic() + WITHIN
        while self.read()[-1] != last:
            assert time.monotonic() < deadline, self.lines


@pytest.fixture
def terminal() -> Iterator[tuple[int, Display]]:
    master, slave = os.openpty()
    modes = termios.tcgetattr(slave)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    yield slave, Display(master)
    os.close(slave)
    os.close(master)


def settle(screen: Screen) -> None:
    while screen.waiting:
        assert screen.wait(WITHIN)


def test_the_line_is_below_the_others_and_goes_without_a_trace(terminal: tuple[int, Display]) -> None:
    slave, shown = terminal
    screen = Screen()
    screen.status(slave, b"step 1")
    shown.until("step 1")
    screen.show(slave, b"a log\n")
    screen.status(slave, b"2")
    shown.until("2")
    assert shown.lines == ["a log", "2"]
    screen.status(slave, b"")
    settle(screen)
    assert shown.read() == ["a log", ""]


def test_a_line_that_a_rank_has_not_finished_is_not_written_over(terminal: tuple[int, Display]) -> None:
    slave, shown = terminal
    screen = Screen()
    screen.show(slave, b"10%")
    screen.status(slave, b"step 1")
    shown.until("10%")
    screen.show(slave, b"\r20%")
    settle(screen)
    assert shown.read() == ["20%"]
    screen.status(slave, b"")
    settle(screen)
    assert shown.read() == ["20%"]
    screen.status(slave, b"step 2")
    screen.show(slave, b"\n")
    shown.until("step 2")
    assert shown.lines == ["20%", "step 2"]


def test_whatever_is_written_stays_as_it_would_be_without_a_status(
    terminal: tuple[int, Display], seed: int
) -> None:
    slave, shown = terminal
    draws, screen, texts = random.Random(seed), Screen(), []
    for at in range(400):
        if draws.random() < 0.4:
            screen.status(slave, draws.choice([b"", b"step %d" % at, b"s"]))
        else:
            text, said = draws.choice([b"line\n", b"part", b"\rover", b"a\nb\n", b"\n"]), draws.random() < 0.5
            (screen.say if said else screen.show)(slave, text)
            begins = not b"".join(texts) or texts[-1].endswith(b"\n")
            texts.append(text if begins or not said else b"\n" + text)
    screen.status(slave, b"step")
    screen.status(slave, b"")
    settle(screen)
    plain = Display(-1)
    plain._take(b"".join(texts).decode())
    assert shown.read() == plain.lines


@pytest.mark.parametrize("width", [39, 60, 79, 120, 200])
def test_a_line_fits_the_terminal(width: int) -> None:
    now = replace(NOW, actions={"restart-in-job": 2}, checkpoints=(CheckpointNow("disk", 300, 80.0),))
    told = status.line(now, 100.0, width)
    assert len(told) <= width
    full = status.line(now, 100.0, 200)
    assert re.search(r"350 .*10000.*48\.2.*3 min 20 s.*\b2 .*300.*20 s", full)
    assert full.startswith(told)
    assert (told == full) == (width >= len(full))


def test_a_recovery_is_told_and_nothing_before_the_first_step() -> None:
    told = status.line(replace(NOW, state=State.RECOVERING, total=0), 100.0, 80)
    assert told.endswith("350, recovering")
    assert status.line(replace(NOW, step=-1), 100.0, 80) == ""


STEPS = """
import os, signal, subprocess, sys
from types import SimpleNamespace
from outlast.launcher.output.screen import Screen
from outlast.launcher.output.status import StatusLine
from outlast.observe.policy.now import Now, State

logs = SimpleNamespace(logs=SimpleNamespace(redirects=None, tee=None))
signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # as the shell that puts a job into the background
screen, step = Screen(), 0
view = lambda: Now("id", State.TRAINING, step=step)
line = StatusLine(screen, view, logs, {"TERM": "xterm"})
other = subprocess.Popen(["sleep", "60"], preexec_fn=os.setpgrp)
for step, group in ((1, os.getpgrp()), (2, other.pid), (3, os.getpgrp())):
    os.tcsetpgrp(2, group)
    line.look(10.0 * step)
    if step == 2:
        screen.show(2, b"a log\\n")
    sys.stdin.readline()
other.kill()
"""


def test_a_job_in_the_background_leaves_the_line_of_the_prompt_alone(terminal: tuple[int, Display]) -> None:
    slave, shown = terminal
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", STEPS],
        stdin=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "COLUMNS": "30"},  # of the shell's, not of this terminal
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(2, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - it starts no threads
    ) as job:
        try:
            shown.until("[outlast] step 1")
            os.write(slave, b"\n$ ")  # the shell prompts
            shown.until("$ ")
            _go_on(job)
            shown.until("")
            assert shown.lines[-2] == "$ a log"
            _go_on(job)
            shown.until("[outlast] step 3")
            _go_on(job)
            assert job.wait(WITHIN) == 0
        finally:
            job.kill()
    assert b"step 2" not in shown.raw


def _go_on(job: subprocess.Popen[bytes]) -> None:
    assert job.stdin is not None
    job.stdin.write(b"\n")
    job.stdin.flush()
