"""A console that nobody reads stops nobody, and one that is read shows everything in order."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.launcher.output.screen import MESSAGE_ROOM, Screen


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of one page: whoever writes more than that waits for a reader."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield reading, writing
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def read_all(reading: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += os.read(reading, 1 << 16)
    return found


def test_nobody_reads_and_nobody_waits(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    screen = Screen()
    texts = [b"%05d %s\n" % (at, b"x" * 1000) for at in range(200)]
    for text in texts:
        screen.show(writing, text)
    while screen.wait(0.05):  # until the pipe is full
        assert screen.waiting
    assert screen.waiting > 100_000
    assert read_all(reading, sum(map(len, texts))) == b"".join(texts)
    while screen.waiting:
        assert screen.wait(60)


def test_messages_and_logs_keep_their_order(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    screen = Screen()
    for at in range(500):
        (screen.say if at % 3 else screen.show)(writing, b"%d\n" % at)
    expected = b"".join(b"%d\n" % at for at in range(500))
    assert read_all(reading, len(expected)) == expected


def test_a_message_begins_a_line(pipe: tuple[int, int], tmp_path: Path) -> None:
    reading, writing = pipe
    screen = Screen()
    texts = [b"whole\n", b"10%", b"\r 20%\r", b"rest\n"]
    for text in texts:
        screen.show(writing, text)
        screen.say(writing, b"[outlast] one\n[outlast] two\n")
    said = b"[outlast] one\n[outlast] two\n"
    expected = b"whole\n" + said + b"10%\n" + said + b"\r 20%\r\n" + said + b"rest\n" + said
    assert read_all(reading, len(expected)) == expected
    with (
        open(tmp_path / "a", "wb") as one,
        open(tmp_path / "a", "ab") as same,
        open(tmp_path / "b", "wb") as b,
    ):
        screen.show(one.fileno(), b"30%")
        screen.say(b.fileno(), b"elsewhere\n")
        screen.say(same.fileno(), b"there\n")
        while screen.waiting:
            assert screen.wait(60)
    assert (tmp_path / "a").read_bytes() == b"30%\nthere\n"
    assert (tmp_path / "b").read_bytes() == b"elsewhere\n"


def test_messages_beyond_the_bound_are_counted(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    screen = Screen()
    message = b"m" * 1023 + b"\n"
    for _ in range(200):
        screen.say(writing, message)
    assert MESSAGE_ROOM // 1024 <= 200 - screen.dropped <= MESSAGE_ROOM // 1024 + 8
    read_all(reading, (200 - screen.dropped) * 1024)
    while screen.waiting:
        assert screen.wait(60)
    before = screen.dropped
    screen.say(writing, message)
    assert screen.dropped == before


def test_a_closed_console_swallows_everything(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    screen = Screen()
    screen.show(writing, b"one\n")
    while screen.waiting:
        assert screen.wait(60)
    assert screen.is_closed(writing)
    screen.say(writing, b"two\n")
    assert (screen.waiting, screen.dropped) == (0, 0)


def test_a_console_set_to_non_blocking_gets_everything(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    screen = Screen()
    screen.show(writing, b"z" * 100_000)
    assert read_all(reading, 100_000) == b"z" * 100_000


SHELL = "i=0; while [ $i -lt 9000 ]; do echo line $i of this rank; i=$((i+1)); done"


def launcher(tmp_path: Path, script: str, *options: str) -> subprocess.Popen[bytes]:
    words = ["--run-dir", str(tmp_path / "run"), "--no-python", *options, "/bin/sh", "-c", script]
    return subprocess.Popen(
        [sys.executable, "-m", "outlast", "run", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def notes(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    return [one["reason"] for one in map(json.loads, lines) if one["kind"] == "note"]


def test_a_launcher_whose_console_nobody_reads_ends_its_job(tmp_path: Path) -> None:
    with launcher(tmp_path, f"{SHELL}; exit 3", "--max-restarts=0") as run:
        try:
            status = run.wait(60)
        finally:
            run.kill()
        assert run.stdout is not None
        shown = run.stdout.read()
    assert status not in (0, -signal.SIGKILL)
    assert len(shown) < 200_000
    assert any(re.search(r"\d{5}", note) for note in notes(tmp_path)), notes(tmp_path)


def test_a_launcher_shows_all_of_a_long_log_before_it_ends(tmp_path: Path) -> None:
    with launcher(tmp_path, SHELL) as run:
        assert run.stdout is not None
        shown = run.stdout.read()
        assert run.wait(60) == 0
    lines = [line for line in shown.splitlines() if b"outlast" not in line]
    assert lines == [b"line %d of this rank" % at for at in range(9_000)]


def test_a_pipe_that_is_closed_early_does_not_end_the_job(tmp_path: Path) -> None:
    with launcher(tmp_path, SHELL) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.wait(60) == 0


def test_ranks_that_a_filter_hides_are_silent_though_their_streams_are_inherited(tmp_path: Path) -> None:
    words = ["--run-dir", str(tmp_path / "run"), "--no-python", "--nproc-per-node=2", "-r0", "-t0"]
    words += ["--local-ranks-filter=1", "/bin/sh", "-c", "echo I am $RANK; echo I am $RANK >&2"]
    done = subprocess.run(
        [sys.executable, "-m", "outlast", "run", *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout == "I am 1\n"
    assert "I am 0" not in done.stderr
    assert done.stderr.count("I am 1\n") == 1
