"""What a rank writes into a page, a line, a file or a socket of its agent: it ends the rank at most."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from outlast.agreement.policy.steps import Want
from outlast.config import FaultToleranceOptions
from outlast.hang.agent.evidence import stacks_of
from outlast.hang.policy.timeouts import Timeouts
from outlast.inprocess import barrier
from outlast.inprocess.barrier import Gate
from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage, HeartbeatReader
from outlast.launcher.output.logs import failure_of, keep_error
from outlast.launcher.workers.script_sets import ScriptSets
from outlast.recovery.policy.events import StartedAgain
from outlast.stragglers.agent import TimesOfRanks
from tests.support.launching import until

ODD_WORDS = (0, 1, -1, 99, 1 << 40, 1 << 62, -1 << 63, (1 << 63) - 1)
ODD_TIMES = (0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"), 5e-324)


def page_of(folder: Path) -> HeartbeatReader:
    return HeartbeatReader(folder / "page", rank=3, generation=2, spawned=time.monotonic() - 60.0)


def read_all(reader: HeartbeatReader) -> None:
    """Read everything that an agent reads, and check what it relies on."""
    found = reader.read()
    assert (found.rank, found.generation) == (3, 2)
    assert min(found.step + 1, found.beats) >= 0
    numbers = [found.beat, found.closed, *found.marks.values(), *(opened for _, opened in found.sections)]
    assert all(abs(one) < 1e10 for one in numbers)
    assert reader.leaves() >= -1e10
    assert reader.given_back in (True, False)
    status = reader.agreement.read()
    assert (status.who, status.wants & ~status.wants) == (3, Want(0))
    assert min(status.round, status.step + 1) >= 0
    assert not any(math.isnan(one) for one in (status.ends, status.limit, *status.seconds.values()))
    assert all(0 <= one <= time.monotonic() for one in (each.longest for each in reader.durations().values()))
    assert all(isinstance(one, str) for one in (*reader.names(), *map(reader.name, (-1, 0, 40, 1 << 60))))
    times = TimesOfRanks(1)
    times.begin(2, {3: reader})
    times.look(0.0)


def test_whatever_stands_in_a_page_is_read_without_an_error(tmp_path: Path, seed: int) -> None:
    dice, reader = random.Random(seed), page_of(tmp_path)
    descriptor = os.open(reader.path, os.O_RDWR)
    untouched = os.pread(descriptor, PAGE_BYTES, 0)
    page = HeartbeatPage.open(reader.path)
    page.learning = True
    for step in range(20):
        with page.section("forward"), page.section("inner"):
            page.heartbeat(step)
    whole = os.pread(descriptor, PAGE_BYTES, 0)
    for turn in range(600):
        content = bytearray(dice.choice((untouched, whole)))
        for _ in range(dice.choice((1, 3, 50))):
            word = dice.choice((dice.randrange(256), dice.randrange(PAGE_BYTES // 8)))
            view = memoryview(content)[8 * word : 8 * word + 8]
            view.cast("q")[0] = dice.choice((*ODD_WORDS, dice.getrandbits(63)))
            if dice.random() < 0.5:
                view.cast("d")[0] = dice.choice(ODD_TIMES)
        if turn % 50 == 0:
            content = bytearray(dice.randbytes(PAGE_BYTES))
        os.pwrite(descriptor, content, 0)
        read_all(reader)
    os.pwrite(descriptor, whole, 0)
    assert reader.read().step == 19
    os.close(descriptor)
    reader.close()


@pytest.mark.parametrize("size", [0, 1, 129, 4096, 70_000, PAGE_BYTES - 1])
def test_a_page_that_its_rank_cuts_off_says_nothing_new(tmp_path: Path, size: int) -> None:
    reader = page_of(tmp_path)
    page = HeartbeatPage.open(reader.path)
    page.heartbeat(7)
    before = reader.read()
    os.truncate(reader.path, size)
    read_all(reader)
    assert reader.read().step == before.step == 7
    reader.agreement.ask_save()
    reader.close()
    assert not reader.path.exists()


@pytest.mark.parametrize("planted", ["file", "fifo", "folder", "link"])
def test_what_a_rank_has_put_in_the_place_of_the_next_page_is_replaced(tmp_path: Path, planted: str) -> None:
    path, elsewhere = tmp_path / "page", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    match planted:
        case "file":
            path.write_text("x")
        case "fifo":
            os.mkfifo(path)
        case "folder":
            (path / "inner").mkdir(parents=True)
        case "link":
            path.symlink_to(elsewhere)
    reader = page_of(tmp_path)
    read_all(reader)
    reader.close()
    assert elsewhere.read_text() == "mine"


def test_no_duration_is_longer_than_its_page_is_old(tmp_path: Path) -> None:
    reader = page_of(tmp_path)
    page = HeartbeatPage.open(reader.path)
    page.learning = True
    for step in range(100):
        with page.section("forward"):
            pass
        page.heartbeat(step)
    timeouts = Timeouts(FaultToleranceOptions())
    assert timeouts.learn(reader.durations())["forward"] < 1e3
    page.doubles[page.section("forward").longest] = 1e308
    timeouts.learn(reader.durations())
    assert timeouts.limit("forward") < 1e3
    reader.close()


ERRORS = (
    '{"message": {"message": "told", "extraInfo": [1]}}',
    '{"message": {"message": "told", "extraInfo": {"exit_code": 1e999, "monotonic": NaN}}}',
    '{"message": {"message": "told", "extraInfo": {"ranks": [1e999, -1, "x"], "agreed": -1e300}}}',
    '{"message": {"message": "told", "extraInfo": {"ranks": 5, "exit_code": {}, "monotonic": []}}}',
    '{"message": {"message": "told", "extraInfo": {"exit_code": "%s"}}}' % ("9" * 400),
    '{"message": "told"}',
)


@pytest.mark.parametrize("content", ERRORS)
def test_a_field_of_an_error_file_that_makes_no_sense_counts_as_missing(tmp_path: Path, content: str) -> None:
    (tmp_path / "error").write_text(content)
    found = failure_of(tmp_path / "error", None)
    assert found is not None
    assert (found.message, found.exit_code, found.clock) == ("told", 0, 0.0)
    assert all(type(one) is int and one >= 0 for one in found.ranks)


def test_an_error_file_of_any_kind_is_read_and_moved_without_waiting(tmp_path: Path) -> None:
    path, kept = tmp_path / "error", tmp_path / "kept"
    for make in (lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to("/dev/zero")):
        make()
        assert failure_of(path, None) is None
        with pytest.raises(OSError, match=str(path)):
            keep_error(path, kept)
        assert not os.path.lexists(path)
    for content in ("[" * 100_000, "\x00", "", "3", '{"message": {}}'):
        path.write_text(content)
        assert failure_of(path, None) is None
        keep_error(path, kept)
        assert kept.read_text() == content


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        "[" * 100_000,
        '{"A\\u0000": "x"}',
        '{"A": 5}',
        '{"=": "x"}',
        '{"": "x"}',
        '{"A": "\\ud800"}',
        "NaN",
    ],
)
def test_variables_that_no_process_can_have_are_not_taken(tmp_path: Path, content: str) -> None:
    sets, path = ScriptSets({"HOME": "/"}), tmp_path / "environment"
    path.write_text(content)
    again = StartedAgain(time=1.0, clock=1.0, generation=1, rank=0, variables=(), reason="it says so")
    assert sets.take(again, path) == ("it says so", False)
    assert sets.environment == {"HOME": "/"}
    assert not path.exists()
    path.write_text('{"A": "\\udc80", "HOME": null}')
    assert sets.take(again, path) == ("", True)
    assert sets.environment == {"A": "\udc80"}


def test_lines_at_the_gate_that_no_worker_sends_are_passed_over(tmp_path: Path, seed: int) -> None:
    dice, gate = random.Random(seed), Gate(tmp_path / "gate")
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(os.fspath(gate.path))
    values = (None, True, 3, -1, 1e308, float("inf"), float("nan"), 10**400, "x", [1], {}, "inside")
    fields = ("say", "generation", "granularity", "patience", "silence", "place")
    for _ in range(300):
        said = {name: dice.choice(values) for name in dice.sample(fields, dice.randrange(7))}
        content = dice.choice((json.dumps(said)[: dice.randrange(1, 200)], json.dumps(said), "[" * 9_999))
        line.send(content.encode())
        for _, found in gate.messages():
            assert isinstance(found.what, str)
            assert 0 <= found.generation < 1 << 53
            assert 0 <= found.patience < 1e9
            assert found.silence is None or 0 <= found.silence < 1e9
    line.send(b'{"say": "waits", "generation": 4}')
    assert [(found.what, found.generation) for _, found in gate.messages()] == [("waits", 4)]
    line.close()
    gate.close()


def test_a_crowd_at_the_gate_does_not_take_the_place_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barrier, "for_strangers", lambda most, share: 4)
    gate, pids = Gate(tmp_path / "gate"), []
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.connect(os.fspath(gate.path))
    ours.send(b'{"say": "waits", "generation": 4}')
    assert len(list(gate.messages())) == 1
    for _ in range(9):  # a worker is known by its pid
        child = subprocess.Popen([sys.executable, "-c", CROWD, os.fspath(gate.path)], stdin=subprocess.PIPE)
        pids.append(child)
        until(lambda: list(gate.messages()) or len(gate._lines) > 1, "its connection")
    until(lambda: len(gate._lines) <= 4, "room")
    gate.tell(os.getpid(), {"say": "release"})
    assert json.loads(ours.recv(100)) == {"say": "release"}
    for child in pids:
        child.kill()
        child.communicate()
    ours.close()
    gate.close()


CROWD = """
import socket, sys
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(sys.argv[1])
sys.stdin.read()
"""


def test_one_worker_that_sends_without_end_does_not_hold_its_agent(tmp_path: Path) -> None:
    gate, over = Gate(tmp_path / "gate"), threading.Event()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(os.fspath(gate.path))

    def flood() -> None:
        with line, suppress(OSError):
            while not over.is_set():
                line.send(b'{"say": "waits"}')

    list(gate.messages())
    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    assert sum(len(list(gate.messages())) for _ in range(3)) <= 3 * 64
    over.set()
    gate.close()
    thread.join()


@pytest.mark.parametrize(
    "text", ["    " + "f (" * 300_000, "    f (" + "a" * 900_000, 'File "' * 200_000, "Thread \n" * 200_000]
)
def test_stacks_of_any_form_are_looked_at_in_little_time(text: str) -> None:
    began = time.process_time()
    stacks_of(text)
    assert time.process_time() - began < 20.0  # it took minutes
