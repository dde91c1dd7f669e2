"""When the memory of buffers is registered and given up, on a double of the driver; the files are real."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outlast.checkpoint.content import memory
from outlast.checkpoint.content.memory import address_of, as_tensor
from outlast.checkpoint.save import mapping
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.save.mapping import Mapping
from outlast.checkpoint.tiers.memory_folder import Stage

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
    monkeypatch.setattr(mapping, "WINDOW", 2 * _PAGE)
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


def test_a_file_is_not_cut_while_it_is_registered(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate = os.ftruncate

    def cut(descriptor: int, nbytes: int) -> None:
        if nbytes < os.fstat(descriptor).st_size:
            assert not driver.parts
            driver.log.append("cut")
        truncate(descriptor, nbytes)

    monkeypatch.setattr(os, "ftruncate", cut)
    stage = Stage(tmp_path, private=True)
    stage.make()
    buffers = Buffers(stage, "session", "rank-00000-of-00001.safetensors", 1)
    buffers.prepare(3 * _PAGE)  # before the rank has used a device
    assert not driver.parts
    for nbytes in (3 * _PAGE, _PAGE):
        buffer = buffers.claim("step-1", nbytes, 5.0, lambda: None)
        assert buffer is not None
        assert next(iter(driver.parts)) == address_of(buffer.memory)
        assert sum(driver.parts.values()) == nbytes
        buffers.give_back(buffer)
        del buffer
    assert driver.log == ["register on 3"] * 2 + ["unregister"] * 2 + ["cut", "register on 3"]


@pytest.mark.parametrize("known", [True, False], ids=["this kernel", "an older kernel"])
def test_all_pages_of_a_buffer_are_there_and_mapped(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PAGES_BYTES", 1 << 20)
    if not known:
        monkeypatch.setattr(memory, "_POPULATE_WRITE", 12345)  # EINVAL
    nbytes = (5 << 20) + 4097
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
        memory.populate(file.fileno(), mapped)
        assert os.fstat(file.fileno()).st_blocks * 512 >= nbytes
        begin = f"{memory.address_of(mapped):x}-"
        _, _, mine = Path("/proc/self/smaps").read_text().partition(f"\n{begin}")
        assert int(mine.partition("Rss:")[2].split()[0]) << 10 >= nbytes
