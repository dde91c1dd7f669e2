"""When the memory of buffers is registered and given up, on a double of the driver; the files are real."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outlast.checkpoint.content import memory
from outlast.checkpoint.content.memory import address_of, as_tensor
from outlast.checkpoint.save import buffers as module
from outlast.checkpoint.save.buffers import Buffer, Buffers, Mapping
from outlast.checkpoint.tiers.memory_folder import Stage
from tests.support.jobs import DEADLINE
from tests.support.launching import until

_PAGE = mmap.PAGESIZE


class Driver:
    """Knows what is registered, and refuses parts of which it knows a byte already."""

    def __init__(self) -> None:
        self.parts: dict[int, int] = {}
        self.log: list[str] = []
        self.room = 1 << 60
        self.device = -1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 1
        assert not any(
            address < begin + size and begin < address + nbytes for begin, size in self.parts.items()
        )
        if sum(self.parts.values()) + nbytes > self.room:
            return 2
        self.parts[address] = nbytes
        self.log.append(f"register on {self.device}")
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the driver's name
        del self.parts[address]
        self.log.append("unregister")
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()

    @contextlib.contextmanager
    def on(device: int) -> Iterator[None]:
        found.device = device
        yield

    doubles = {
        "cudart": lambda: found,
        "device": on,
        "is_initialized": lambda: True,
        "current_device": lambda: 3,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(module, "WINDOW", 2 * _PAGE)
    return found


def test_memory_is_registered_once_in_parts_and_given_up_before_it_is_unmapped(driver: Driver) -> None:
    memory = Mapping(-1, 5 * _PAGE)
    begin = address_of(memory)
    memory.register(None)  # no device is in use yet
    assert not driver.parts
    memory.register(3)
    memory.register(3)
    assert driver.parts == {begin: 2 * _PAGE, begin + 2 * _PAGE: 2 * _PAGE, begin + 4 * _PAGE: _PAGE}
    assert driver.log == ["register on 3"] * 3
    image = as_tensor(memory)
    del memory
    assert driver.parts  # while a tensor is on it
    del image
    assert not driver.parts


def test_memory_that_the_driver_does_not_take_as_a_whole_is_used_all_the_same(driver: Driver) -> None:
    driver.room = 3 * _PAGE
    memory = Mapping(-1, 5 * _PAGE)
    memory.register(0)
    assert len(driver.parts) == 1
    memory[-1] = 7
    del memory
    assert not driver.parts


@pytest.fixture
def buffers(tmp_path: Path) -> Iterator[Callable[[int], Buffers]]:
    """Make buffers, of which there are so many at most; they are closed at the end."""
    made: list[Buffers] = []

    def make(limit: int) -> Buffers:
        stage = Stage(tmp_path, private=True)
        stage.make()
        made.append(Buffers(stage, "session", "rank-00000-of-00001.safetensors", limit))
        return made[-1]

    yield make
    for one in made:
        one.close()
        until(lambda one=one: not one._beside, "the end of its thread")


def claimed(buffers: Buffers, copy: str, nbytes: int) -> Buffer:
    found = buffers.claim(copy, nbytes, 5.0, lambda: None)
    assert found is not None
    assert found.path.stat().st_size == nbytes
    return found


def test_nothing_is_registered_of_what_is_cut_off_a_file(
    driver: Driver, buffers: Callable[[int], Buffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate = os.ftruncate
    mapped: list[int] = []

    def cut(descriptor: int, nbytes: int) -> None:
        if nbytes < os.fstat(descriptor).st_size:
            assert all(begin + size <= mapped[0] + nbytes for begin, size in driver.parts.items())
            driver.log.append("cut")
        truncate(descriptor, nbytes)

    monkeypatch.setattr(os, "ftruncate", cut)
    pool = buffers(1)
    pool.prepare(5 * _PAGE)  # before the rank has used a device
    assert not driver.parts
    kept = {5: 5, 3: 2, 4: 4}  # pages that are registered of a buffer of so many
    for pages, registered in kept.items():
        buffer = claimed(pool, "step-1", pages * _PAGE)
        mapped[:] = [address_of(buffer.memory)]
        assert sum(driver.parts.values()) == registered * _PAGE
        pool.give_back(buffer)
        del buffer
    grown = ["unregister", *["register on 3"] * 2]
    assert driver.log == [*["register on 3"] * 3, *["unregister"] * 2, "cut", *grown]


def hidden(buffers: Buffers) -> list[Path]:
    return list(buffers._pool.glob(".*"))


def test_a_save_waits_for_a_buffer_only_where_there_is_no_other(
    buffers: Callable[[int], Buffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that makes buffers rests for years after each window, until a save waits."""
    monkeypatch.setattr(module, "_AT_ONCE", 0)
    monkeypatch.setattr(module, "_REST", 1e9)
    monkeypatch.setattr(memory, "_PAGES_BYTES", _PAGE)
    pool = buffers(2)
    pool.prepare_beside(2 * _PAGE)
    until(lambda: hidden(pool), "the first buffer")
    assert not pool.ready
    first = claimed(pool, "step-1", 2 * _PAGE)
    until(lambda: hidden(pool), "the second buffer")
    assert not pool.ready
    pool.give_back(first)
    assert pool.ready
    assert claimed(pool, "step-2", 2 * _PAGE).memory is first.memory
    assert hidden(pool)
    assert pool.claim("step-3", 2 * _PAGE, 1e-9, lambda: None) is None, "it waits for no longer than it may"
    assert claimed(pool, "step-3", 2 * _PAGE).memory is not first.memory
    assert pool.claim("step-4", 2 * _PAGE, 0.0, lambda: None) is None


def test_nothing_waits_without_an_end_for_a_buffer_whose_making_does_not_end(
    buffers: Callable[[int], Buffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.05)
    monkeypatch.setattr(module, "_LENDS", 1)
    monkeypatch.setattr(module, "is_memory", lambda _: True)
    pool = buffers(2)
    pool._making = True
    assert pool.lend("rank-00000-of-00001.safetensors", _PAGE) is None
    assert pool.claim("step-1", _PAGE, 0.05, lambda: None) is None
    pool.prepare(_PAGE)
    assert list(pool._pool.iterdir()) == []
    pool.close()
    pool._end_making()


def test_buffers_of_a_process_that_was_killed_are_used_again(
    driver: Driver, buffers: Callable[[int], Buffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is whole, and one was being made; a save may come before they are mapped and registered."""
    monkeypatch.setattr(module, "_AGAIN", 0.01)
    buffers(2).prepare(4 * _PAGE)
    pool = buffers(2)
    _, begun = pool._pool.iterdir()
    os.truncate(begun.rename(begun.with_name(f".{begun.name}")), _PAGE)
    inodes = {one.stat().st_ino for one in pool._pool.iterdir()}
    assert pool.ready
    pool.prepare_beside(4 * _PAGE)
    found = [claimed(pool, f"step-{step}", 4 * _PAGE) for step in range(2)]
    assert {one.path.stat().st_ino for one in found} == inodes
    assert all(one.path.stat().st_blocks * 512 == 4 * _PAGE for one in found)
    for one in found:
        pool.give_back(one)
    until(lambda: sum(driver.parts.values()) == 8 * _PAGE, "all memory to be registered")


def test_a_buffer_that_is_only_being_mapped_puts_no_save_off(
    buffers: Callable[[int], Buffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers(1).prepare(4 * _PAGE)
    monkeypatch.setattr(module, "_REST", 1e9)
    monkeypatch.setattr(module, "_AT_ONCE", 0)
    monkeypatch.setattr(memory, "_PAGES_BYTES", _PAGE)
    pool = buffers(1)
    pool.prepare_beside(4 * _PAGE)
    until(lambda: hidden(pool), "the thread to map it")
    assert pool.ready
    claimed(pool, "step-1", 4 * _PAGE)
    pool = buffers(2)
    pool.prepare_beside(4 * _PAGE)
    until(lambda: hidden(pool), "the thread to make another one")
    assert not pool.ready


def test_all_pages_of_a_buffer_are_there_and_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PAGES_BYTES", 1 << 20)
    nbytes = (5 << 20) + 4097
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
        memory.populate(file.fileno(), mapped)
        assert os.fstat(file.fileno()).st_blocks * 512 >= nbytes
        begin = f"{memory.address_of(mapped):x}-"
        _, _, mine = Path("/proc/self/smaps").read_text().partition(f"\n{begin}")
        assert int(mine.partition("Rss:")[2].split()[0]) << 10 >= nbytes


def test_a_descriptor_that_the_script_has_for_a_file_of_its_own_is_neither_used_nor_closed(
    buffers: Callable[[int], Buffers], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_PAGES_BYTES", 1 << 20)
    pool = buffers(1)
    with open(tmp_path / "theirs", "wb") as theirs, pool._opened(tmp_path / "ours") as (descriptor, _):
        os.ftruncate(descriptor, 3 << 20)
        mapped = mmap.mmap(descriptor, 3 << 20)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            memory.populate(descriptor, mapped, lambda _: os.dup2(theirs.fileno(), descriptor))
        assert os.fstat(theirs.fileno()).st_size == 0
    assert os.path.samefile(f"/proc/self/fd/{descriptor}", tmp_path / "theirs")
    os.close(descriptor)


_ENDS = """
import atexit, os, sys, time
from pathlib import Path
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.tiers.memory_folder import Stage

stage = Stage(Path(sys.argv[1]))
stage.make()
pool = Buffers(stage, "session", "rank-00000-of-00001.safetensors", 3)
atexit.register(lambda: print("makes" if pool._making else "rests"))
pool.prepare_beside(2 << 30)
while not pool._making:
    time.sleep(0.001)
if len(sys.argv) > 2:
    forked = os.fork()
    if forked:
        os.waitpid(forked, 0)
"""


@pytest.mark.parametrize(
    ("forks", "seen"),
    [([], ["rests"]), (["forks"], ["makes", "rests"])],
    ids=["alone", "with a process that it forked"],
)
def test_no_buffer_is_made_when_the_interpreter_ends(forks: list[str], seen: list[str]) -> None:
    """A thread that is in torch or in the driver then aborts the process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        words = [sys.executable, "-c", _ENDS, folder, *forks]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert done.stdout.split() == seen


def test_the_rest_of_a_buffer_is_not_registered_once_no_more_are_made(driver: Driver) -> None:
    memory = Mapping(-1, 6 * _PAGE)
    memory.register(0, lambda: len(driver.parts) < 2)
    assert len(driver.parts) == 2
    del memory
    assert not driver.parts
