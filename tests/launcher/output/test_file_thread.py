"""The thread for files that may hang: a FIFO that nobody reads stands for them."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import pytest

from outlast.launcher.output.file_thread import PATIENCE, FileThread, Latest
from tests.support.launching import until


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_what_works_is_done_when_it_is_handed_over_and_in_order(tmp_path: Path) -> None:
    files, done = FileThread(tmp_path), list[int]()
    for number in range(100):
        assert files.hand(lambda number=number: done.append(number), patience=60.0)  # type: ignore[misc]
    assert done == list(range(100))
    assert files.trouble() == ""


def test_nothing_waits_for_what_hangs_and_of_a_file_only_the_newest_value_is_kept(fifo: Path) -> None:
    files, done = FileThread(fifo.parent), list[str]()
    assert not files.hand(lambda: done.append(str(fifo.write_text("held"))), patience=0.05)
    until(lambda: files.hangs(PATIENCE), "the time after which nothing waits")
    for value in ("old", "older", "newest"):
        assert not files.hand(lambda value=value: done.append(value), "state", 3600.0)  # type: ignore[misc]
    assert not files.hand(lambda: done.append("record"), patience=3600.0)
    assert until(files.trouble, "word of it")
    assert files.trouble() == ""
    assert fifo.read_text() == "held"
    assert files.settle(60.0)
    assert done == ["4", "newest", "record"]
    assert files.trouble()


def test_what_fails_does_not_end_the_thread(tmp_path: Path) -> None:
    files = FileThread(tmp_path)
    assert files.hand(lambda: (tmp_path / "none" / "file").write_text("x"), patience=60.0)
    assert files.settle(60.0)


def test_what_was_read_is_taken_once(tmp_path: Path) -> None:
    latest = Latest(FileThread(tmp_path), lambda: "found")
    assert latest.take() == []
    latest.ask(60.0)
    assert latest.take() == ["found"]
    assert latest.take() == []


def test_what_is_asked_of_a_file_system_that_hangs_is_a_default_and_waits_nowhere(fifo: Path) -> None:
    files = FileThread(fifo.parent)
    assert files.ask(lambda: 7, 0, 60.0) == 7
    assert files.ask(lambda: int("x"), 0, 60.0) == 0
    assert files.ask(fifo.read_text, "none", 0.05) == "none"
    until(lambda: files.hangs(PATIENCE), "the time after which nothing is asked")
    asked = list[int]()
    assert files.ask(lambda: asked.append(1), None, 3600.0) is None
    fifo.write_text("late")
    assert files.settle(60.0)
    assert asked == []


def test_all_waits_of_a_turn_are_no_longer_than_one(tmp_path: Path) -> None:
    files, done = FileThread(tmp_path), list[int]()

    def slow(number: int) -> None:
        time.sleep(PATIENCE / 4)
        done.append(number)

    for turn in range(2):
        files.turn()
        before = len(done)
        for number in range(10):
            files.hand(functools.partial(slow, 10 * turn + number))
        assert len(done) - before < 10
        assert files.ask(lambda: 7, 0) == 0, "this turn may wait no more"
    assert files.settle(120.0)
    assert done == list(range(20))
    files.turn()
    assert files.ask(lambda: 7, 0, 60.0) == 7
