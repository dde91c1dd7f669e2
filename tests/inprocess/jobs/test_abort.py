"""Pending collectives are woken however a peer is missing, and nothing else in the process is touched."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from outlast.inprocess.worker import abort
from outlast.inprocess.worker.abort import (
    Remaining,
    Woken,
    abort_process_groups,
    destroy_process_groups,
    device_threads,
    devices_left,
)
from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS

PATIENCE = timedelta(seconds=DEADLINE)


def serve() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


class Waiting:
    """Ranks of which all but the last wait for the last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store, self.next = serve(), serve()
        self.processes: list[warm.Warm] = []

    def start(self, world: int, wait_in: str, hosts: str = "") -> Waiting:
        return self.run(world, "aborting.py", str(self.next.port), wait_in, hosts)

    def run(self, world: int, script: str, *words: str) -> Waiting:
        command = [str(SCRIPTS / script), str(self.store.port), *words]
        path = os.pathsep.join(filter(None, [str(SCRIPTS.parents[2]), os.environ.get("PYTHONPATH", "")]))
        for rank in range(world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            with open(self.folder / f"output-{rank}", "ab") as output:
                self.processes.append(warm.start(command, output, output, place))
        return self

    def get(self, key: str, ranks: range) -> list[str]:
        try:
            self.store.wait([f"{key}-{rank}" for rank in ranks])
        except RuntimeError:
            outputs = [path.read_text(errors="replace") for path in sorted(self.folder.glob("output-*"))]
            raise AssertionError(f"no {key} from ranks {ranks}; output:\n" + "\n".join(outputs)) from None
        return [self.store.get(f"{key}-{rank}").decode() for rank in ranks]

    def abort(self, *ranks: int) -> None:
        for rank in ranks:
            self.store.set(f"abort-{rank}", "now")

    def stop(self) -> None:
        self.store.set("end", "now")
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    ranks = Waiting(tmp_path)
    yield ranks
    ranks.stop()


def check(waiting: Waiting, survivors: range) -> None:
    for told in waiting.get("result", survivors):
        result = json.loads(told)
        assert result["raised"] != "nothing"
        assert len(result["groups"]) == 2
        assert result["failed"] == []
        assert result["store"] == "here"
        assert result["bystanders"] == dict.fromkeys(("before", "between", "after", "new"), True)
        assert result["sum"] == sum(survivors)


@pytest.mark.parametrize(
    ("world", "wait_in"),
    [
        (2, "all_reduce"),
        (3, "recv"),
        *(
            pytest.param(4, wait_in, marks=pytest.mark.long)
            for wait_in in ("barrier", "monitored_barrier", "work")
        ),
    ],
)
def test_what_waits_for_a_rank_that_is_elsewhere_is_woken(waiting: Waiting, world: int, wait_in: str) -> None:
    survivors = range(world - 1)
    waiting.start(world, wait_in).get("pending", range(world))
    waiting.abort(*survivors)
    check(waiting, survivors)


@pytest.mark.parametrize(("number", "hosts"), [(signal.SIGKILL, "hosts"), (signal.SIGSTOP, "")])
def test_no_abort_waits_for_a_peer(waiting: Waiting, number: int, hosts: str) -> None:
    survivors = range(2)
    waiting.start(3, "all_reduce", hosts).get("pending", range(3))

    waiting.processes[2].send_signal(number)
    waiting.abort(*survivors)

    check(waiting, survivors)


def established(process: int) -> int:
    """How many TCP connections of a process are open in both directions."""
    folder = Path(f"/proc/{process}")
    inodes = set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the listing
            inodes.add(os.readlink(descriptor).removeprefix("socket:").strip("[]"))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in (folder / "net" / name).read_text().splitlines()
    ]
    return sum(words[3] == "01" and words[9] in inodes for words in lines)


@pytest.mark.parametrize("aborts", ["", "twice"])
def test_the_connections_of_a_peer_do_not_break_while_it_may_still_send(
    waiting: Waiting, aborts: str
) -> None:
    """A send that begins as its connection breaks is lost without an error, and waited for."""
    waiting.start(2, "recv", aborts).get("pending", range(2))
    before = established(waiting.processes[1].pid)

    waiting.abort(0)

    check(waiting, range(1))
    assert before >= 3
    assert established(waiting.processes[1].pid) >= before  # some may not have been made yet


@pytest.mark.long
def test_two_hundred_rounds_leave_nothing_behind(waiting: Waiting) -> None:
    waiting.run(2, "abort_rounds.py", "200")

    for rank, process in enumerate(waiting.processes):
        output = waiting.folder / f"output-{rank}"
        assert process.wait(DEADLINE) == 0, output.read_text()
        measured = json.loads(output.read_text().splitlines()[-1])
        early, late = measured[4], measured[-1]
        assert late["round"] == 199
        assert late["files"] <= early["files"] + 4  # the last model may hold its group's device
        assert late["threads"] <= early["threads"] + 3
        assert late["resident"] - early["resident"] < 16 << 20


def test_a_group_that_was_not_finished_leaves_no_name_behind() -> None:
    with pytest.raises(RuntimeError):
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.5)
        )

    destroy_process_groups()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.distributed_c10d._get_default_group().group_name == "0"
    finally:
        destroy_process_groups()


class NobodyConnects(dist.Store):  # type: ignore[misc] # torch says nothing of the type
    """The store of two ranks of which the other has left its address and went away.

    That address has the highest port, so gloo waits for the other one to connect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}
        self.asked = threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        self.kept[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if key in self.kept:
            return self.kept[key]
        own = self.kept[f"{key[:-1]}0"]
        at = re.search(rb"\x02\x00(..)\x7f\x00\x00\x01", own, re.DOTALL)  # struct sockaddr_in
        if at is None:  # the host's name, in older versions
            return own
        self.asked.set()
        return own[: at.start(1)] + b"\xff\xff" + own[at.end(1) :]

    def wait(self, *_: object) -> None:
        """All keys are there."""


def test_a_group_whose_peer_never_connects_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair has no socket that could be shut down; an interrupt aborts until the function is left.

    The group may be complete before gloo reads that its connection has ended: what uses it then raises.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, raised = NobodyConnects(), queue.SimpleQueue[Exception]()

    def make() -> None:
        try:
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=2 * PATIENCE)
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            raised.put(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    assert store.asked.wait(DEADLINE)
    end = time.monotonic() + DEADLINE
    while thread.is_alive() and time.monotonic() < end:
        assert not abort_process_groups("a test").failed
        thread.join(0.1)

    assert re.search("closed by peer|reset by peer|Broken pipe", str(raised.get_nowait()))
    destroy_process_groups()


@pytest.fixture
def others() -> Iterator[int]:
    """A gloo group of one rank in this process; the number of devices that were there before."""
    before = devices_left().devices
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    end = time.monotonic() + DEADLINE
    while len(device_threads()) <= before and time.monotonic() < end:  # the thread has yet to name itself
        time.sleep(0.001)
    yield before
    destroy_process_groups()
    assert devices_left() == Remaining(before, 0)


@pytest.fixture
def others_that_listen() -> Iterator[None]:
    """What a server of the user's has: a listening socket in an epoll that nobody waits for just now."""
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.EpollSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        edge = select.epoll()
        edge.register(server, select.EPOLLIN | select.EPOLLET)
        yield
        edge.close()


@pytest.mark.usefixtures("others", "others_that_listen")
def test_the_epoll_of_a_gloo_thread_that_spins_is_found_by_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It spins while a socket has data of a collective that ended; no wait of it can be seen then."""
    known, wait_of, devices = abort._gloo_epolls(True), abort._epoll_of, device_threads()
    find = abort._epolls_nobody_waits_for
    of_other_tests = find() - known[0]
    monkeypatch.setattr(abort, "_epoll_of", lambda thread: None if thread in devices else wait_of(thread))
    monkeypatch.setattr(abort, "_epolls_nobody_waits_for", lambda: find() - of_other_tests)

    assert abort._epolls_nobody_waits_for() == known[0]
    assert abort._gloo_epolls(True) == known

    monkeypatch.setattr(abort, "_SEEN_WITHIN", 0.1)
    monkeypatch.setattr(abort, "_epolls_nobody_waits_for", lambda: {*known[0], 10**6})
    assert abort._gloo_epolls(True)[0] == set()  # one too many: none is touched


class Slow:
    """An abort that goes on for as long as the groups are not destroyed, or for a second."""

    name = "gloo"

    def __init__(self) -> None:
        self.began, self.destroyed = threading.Event(), threading.Event()
        self.overtaken = False

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> Woken:
        assert groups
        self.began.set()
        self.overtaken = self.destroyed.wait(1.0)
        return Woken()


def test_groups_that_another_thread_aborts_are_destroyed_when_it_is_done(others: int) -> None:
    """It refers to them: their devices would be there for as long as it goes on."""
    slow = Slow()
    thread = threading.Thread(target=abort_process_groups, args=("a test", (slow,)))
    thread.start()
    assert slow.began.wait(DEADLINE)

    destroy_process_groups()
    slow.destroyed.set()
    thread.join(DEADLINE)

    assert not slow.overtaken
    assert devices_left() == Remaining(others, 0)


def test_a_group_that_is_released_meanwhile_is_not_left(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [dist.group.WORLD]
    destroy_process_groups()
    monkeypatch.setattr(abort.time, "sleep", lambda _: held.clear())

    assert devices_left() == Remaining(others, 0)


def test_a_group_that_something_refers_to_is_waited_for_once(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [dist.group.WORLD]
    destroy_process_groups()

    found = devices_left()

    assert found == Remaining(others + 1, 0)
    assert found.why
    monkeypatch.setattr(abort.time, "sleep", lambda _: pytest.fail("it was there the last time already"))
    assert devices_left() == Remaining(others + 1, 0)
    monkeypatch.undo()
    held.clear()


def test_a_group_that_waits_for_a_peer_is_not_taken_for_one_that_is_referred_to(waiting: Waiting) -> None:
    waiting.run(2, "late.py")
    waiting.get("pending", range(2))
    assert waiting.get("left", range(1)) == ["1 devices, 1 waiting"]

    waiting.abort(1)

    assert waiting.get("left-then", range(1)) == ["0 devices, 0 waiting"]
