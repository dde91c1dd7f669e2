"""Processes as the agent holds them: their codes are their own, and no other process is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.ipc.processes import Child, children_of, is_tracker, start, start_ticks, tree_of
from outlast.launcher.workers.cleaner import Cleaner, Leftovers
from outlast.launcher.workers.processes import Family, Worker, wait_for_end
from tests.support.launching import is_gone, until

MARK = f"OUTLAST_TEST_MARK={os.getpid()}"
FAMILY = "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"


def ended_with(code: int) -> int:
    """Return the pid of a child that has ended and was not waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.fixture
def others() -> tuple[int, ...]:
    """Return the children of this process that other tests use, too."""
    return tuple(children_of(os.getpid()))


@pytest.fixture
def cleaner(tmp_path: Path, others: tuple[int, ...]) -> Iterator[Cleaner]:
    (tmp_path / "runtime").mkdir()
    found = Cleaner(tmp_path / "runtime", MARK)
    yield found
    found.dismiss()


@pytest.fixture
def keep(cleaner: Cleaner, others: tuple[int, ...]) -> tuple[int, ...]:
    return (cleaner.pid, *others)


@pytest.fixture
def family(cleaner: Cleaner) -> Family:
    return Family(cleaner)


def rest(family: Family, keep: tuple[int, ...]) -> None:
    """Have a family do its work until nothing is left."""

    def rests() -> bool:
        family.tick(keep, (), owed=False)
        return family.at_rest

    until(rests, "the family to be at rest")


@pytest.mark.parametrize("code", [0, 3])
def test_the_code_of_a_child_is_taken_by_its_descriptor_and_kept(code: int) -> None:
    worker = Worker(7, ended_with(code))
    assert worker.exit_code is None
    assert wait_for_end([worker], 60.0) == []
    assert [worker.poll(), worker.poll(), worker.exit_code] == [code] * 3
    assert not worker.send(signal.SIGTERM), "nobody has its number any more, or another process"
    worker.close()


def test_a_process_that_was_reaped_elsewhere_has_not_finished_well() -> None:
    pid = ended_with(0)
    os.waitpid(pid, 0)
    worker = Worker(0, pid)
    assert wait_for_end([worker], 60.0) == []
    assert worker.poll() == -signal.SIGKILL
    worker.close()


def test_a_child_that_lives_has_no_code_and_a_killed_one_the_signal() -> None:
    child = Child(start(["sleep", "1000"]))
    assert child.poll() is None
    assert child.wait(0.01) is None
    assert child.send(signal.SIGKILL)
    assert child.wait(60.0) == -signal.SIGKILL
    child.close()


def test_a_tree_is_a_process_with_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY]) as parent:
        (below,) = until(lambda: list(children_of(parent.pid)), "a child of the child")
        assert tree_of(parent.pid) == {parent.pid, below}
        assert tree_of(os.getpid()) >= {os.getpid(), parent.pid, below}
        for pid in (below, parent.pid):
            os.kill(pid, signal.SIGKILL)
    assert tree_of(parent.pid) == {parent.pid}


def test_what_is_dropped_is_killed_with_what_it_has_started(family: Family, keep: tuple[int, ...]) -> None:
    kept, dropped = (Child(start(["sleep", "1000"])) for _ in range(2))
    parent = Child(start([sys.executable, "-c", FAMILY], start_new_session=True))
    below = until(lambda: list(children_of(parent.pid)), "a child of the child")
    for child in (kept, dropped, parent):
        family.hold(child)
    family.drop(dropped)
    family.drop(parent)
    assert not family.at_rest
    rest(family, keep)
    assert [dropped.exit_code, parent.exit_code] == [-signal.SIGKILL] * 2
    until(lambda: all(map(is_gone, below)), "the end of the child's child")
    assert kept.poll() is None
    family.drop(kept)
    rest(family, keep)


def test_strays_are_killed_unless_they_are_kept_or_may_be_wanted(
    family: Family, keep: tuple[int, ...]
) -> None:
    stray, kept, grouped = (Child(start(["sleep", "1000"], start_new_session=True)) for _ in range(3))
    family.sweep()
    family.tick((), (), owed=True)
    assert not family.at_rest
    assert stray.poll() is None, "it may be what the zygote tells of next"

    def swept() -> bool:
        family.tick((*keep, kept.pid), (grouped.pid,), owed=False)
        return family.at_rest

    until(swept, "the stray to be gone")
    assert stray.poll() == -signal.SIGKILL
    assert [kept.poll(), grouped.poll()] == [None, None]
    family.end(keep)
    assert [kept.poll(), grouped.poll()] == [-signal.SIGKILL] * 2


def test_a_zombie_that_nobody_waits_for_is_reaped(family: Family, keep: tuple[int, ...]) -> None:
    pid = ended_with(0)

    def reaped() -> bool:
        family.tick(keep, (), owed=False)
        return pid not in children_of(os.getpid())

    until(reaped, "the zombie to be reaped")


def test_a_process_that_does_not_end_holds_nobody_up(
    family: Family, keep: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.launcher.workers.processes.KILL_PATIENCE", 0.05)
    monkeypatch.setattr(Child, "kill_tree", lambda _: None)
    stuck = Worker(3, start(["sleep", "1000"]))
    family.hold(stuck)
    family.drop(stuck)
    assert not family.ended
    told: list[Child] = []
    until(lambda: told.extend(family.tick(keep, (), owed=False)) or family.at_rest, "patience")
    assert told == [stuck]
    stuck.send(signal.SIGKILL)
    until(lambda: family.tick(keep, (), owed=False) or stuck.exit_code, "its end")
    assert stuck.exit_code == -signal.SIGKILL


SHARES = (
    "import sys, time; from multiprocessing import shared_memory\n"
    "memory = shared_memory.SharedMemory(sys.argv[1], create=True, size=64)\n"
    "print('made', flush=True); time.sleep(1000)"
)


@pytest.mark.parametrize("alone", [False, True])
def test_the_shared_memory_of_what_is_killed_is_removed(
    family: Family, keep: tuple[int, ...], alone: bool
) -> None:
    name, reader = f"outlast_test_{os.getpid()}", os.pipe()
    command = [sys.executable, "-c", SHARES, name]
    worker = Worker(0, start(command, stdout=reader[1], stderr=subprocess.DEVNULL, start_new_session=True))
    os.close(reader[1])
    with open(reader[0], "rb") as made:
        assert made.readline() == b"made\n"
    assert Path("/dev/shm", name).exists()
    until(lambda: any(map(is_tracker, tree_of(worker.pid))), "the tracker to begin")
    family.hold(worker)
    if alone:
        (tracker,) = filter(is_tracker, tree_of(worker.pid))
        os.kill(tracker, signal.SIGSTOP)
        worker.send(signal.SIGKILL)
        assert worker.wait(60.0) == -signal.SIGKILL
        family.sweep()
        family.tick(keep, (), owed=False)
        os.kill(tracker, signal.SIGCONT)
    family.drop(worker)
    family.sweep()
    rest(family, keep)
    assert not Path("/dev/shm", name).exists()


def test_a_cleaner_that_has_ended_is_replaced_and_knows_what_to_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runtime").mkdir()
    cleaner, first = Cleaner(tmp_path / "runtime", MARK), 0
    child = Child(start(["sleep", "1000"], start_new_session=True))
    cleaner.watch(child.pid)
    first = cleaner.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: cleaner.tend() or cleaner.pid not in (0, first), "another cleaner")
    os.close(cleaner._pipe)  # as if the agent had died
    assert child.wait(60.0) == -signal.SIGKILL
    assert cleaner._process is not None
    assert cleaner._process.wait(60.0) == 0
    assert not (tmp_path / "runtime").exists()


def test_a_stopped_cleaner_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    cleaner = Cleaner(tmp_path / "runtime", MARK)
    os.kill(cleaner.pid, signal.SIGSTOP)
    for number in range(10_000):  # more than a pipe takes
        cleaner.watch(number)
        cleaner.forget(number)
    began = time.monotonic()
    cleaner.dismiss()
    assert time.monotonic() - began < 60.0
    assert is_gone(cleaner.pid)
    assert not (tmp_path / "runtime").exists()


def test_what_has_the_mark_is_left_over_and_nothing_else() -> None:
    marked = dict([MARK.split("=", 1)])
    name = next(iter(marked))
    with contextlib.ExitStack() as stack:
        mine, daemon, other, named, old = (
            stack.enter_context(subprocess.Popen(["sleep", "1000"], env={**os.environ, **variables}, **how))
            for variables, how in (
                (marked, {}),
                (marked, {"start_new_session": True}),
                ({name: f"{marked[name]}0"}, {}),
                ({}, {"start_new_session": True}),
                ({}, {"start_new_session": True}),
            )
        )
        every = (mine, daemon, other, named, old)
        for one in every:
            stack.callback(one.kill)
        leftovers = Leftovers(MARK, {named.pid: start_ticks(named.pid), old.pid: start_ticks(old.pid) - 1})
        leftovers.kill()
        assert [one.wait(60.0) for one in (mine, daemon, named)] == [-signal.SIGKILL] * 3
        assert [one.poll() for one in (other, old)] == [None, None]
