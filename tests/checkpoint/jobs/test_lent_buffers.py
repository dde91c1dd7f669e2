"""A rank's own file on disk is loaded through a buffer, which the next save finds with its pages."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.content import memory
from outlast.checkpoint.content.memory import Loan
from outlast.checkpoint.load import reading
from outlast.checkpoint.load.reading import padded
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.save import buffers
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.tiers.memory_folder import pool_of
from outlast.recovery.policy.events import Note, Quarantined
from tests.checkpoint.jobs.test_memory_full import fill
from tests.support.jobs import Job
from tests.support.launching import until
from tests.support.memory_nodes import Node, flip, remove, train_and_save
from tests.support.mounts import mounted, needs_root

FILE = "rank-00000-of-00001.safetensors"
POOL = pool_of(FILE)
MIB = 1 << 20
BLOCK = 512

pytestmark = needs_root


class Private:
    """Bytes of files for which private memory was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        allocate = reading.allocate

        def made(nbytes: int) -> object:
            self.sizes.append(nbytes)
            return allocate(nbytes)

        monkeypatch.setattr(reading, "allocate", made)


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Private:
    monkeypatch.setattr(buffers, "_LENDS", 1)
    return Private(monkeypatch)


@pytest.fixture
def small(node: Node) -> Iterator[Path]:
    """Give the memory folder a file system of its own."""
    node.memory.root.mkdir()
    with mounted(node.memory.root, "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs"):
        yield node.memory.root


def job(seed: int = 9) -> Job:
    return Job(seed, 300)


def saved(node: Node, steps: int = 1) -> dict[int, bytes]:
    """Save steps to disk, and lose what is in memory."""
    training = job(0)
    saver = node.join(training)
    content = train_and_save(saver, training, range(1, steps + 1), lambda _: True)
    until((node.durable / copy_name(steps, 1)).exists, f"step {steps} on disk")
    node.cut_off(saver)
    for one in (node.stage.tier.folder, node.stage.pool):
        if one.exists():
            remove(one)
    return content


def pool(node: Node) -> list[Path]:
    """Return the buffers that are free, the one that is being made included."""
    return node.stage.free(POOL)


def test_the_buffer_of_a_load_is_that_of_the_next_save(node: Node, small: Path, private: Private) -> None:
    content = saved(node)
    saver = node.join(live := job(), generation=2)
    assert (node.loaded().step, live.content()) == (1, content[1])
    assert private.sizes == []
    (free,) = pool(node)
    status = free.stat()
    nbytes = (node.durable / copy_name(1, 1) / FILE).stat().st_size
    assert not free.name.startswith(".")
    assert (status.st_size, status.st_blocks * BLOCK >= nbytes) == (nbytes, True)
    train_and_save(saver, live, range(2, 3), lambda _: False)
    assert (node.in_memory(2, 2) / FILE).stat().st_ino == status.st_ino
    assert live.content() != content[1]


def test_a_load_of_a_damaged_file_leaves_the_buffer_to_the_next_copy(
    node: Node, small: Path, private: Private
) -> None:
    content = saved(node, 2)
    flip(node.durable / copy_name(2, 1) / FILE, -1)
    node.join(live := job(), generation=2)
    assert (node.loaded().step, live.content()) == (1, content[1])
    assert [one.checkpoint for one in node.records if isinstance(one, Quarantined)] == [copy_name(2, 1)]
    assert (len(pool(node)), private.sizes) == (1, [])


def without_pages(monkeypatch: pytest.MonkeyPatch, why: int) -> list[int]:
    """Have the second reservation of a load fail; return the list of the reservations."""
    lend, begins = Buffers.lend, list[int]()

    def lent(self: Buffers, file: str, nbytes: int) -> Loan | None:
        loan = lend(self, file, nbytes)
        assert loan is not None

        def reserve(begin: int, size: int) -> None:
            begins.append(begin)
            if len(begins) > 1:
                raise OSError(why, os.strerror(why))
            loan.reserve(begin, size)

        return Loan(loan.memory, reserve)

    monkeypatch.setattr(Buffers, "lend", lent)
    return begins


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.ENOMEM, errno.EFAULT])
def test_without_pages_a_load_takes_private_memory_and_leaves_no_half_buffer(
    why: int, node: Node, small: Path, private: Private, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved(node)
    monkeypatch.setattr(reading, "_UNIT_BYTES", MIB)
    begins = without_pages(monkeypatch, why)
    node.join(live := job(), generation=2)
    assert (node.loaded().step, live.content()) == (1, content[1])
    assert len(begins) > 1
    assert private.sizes == [padded((node.durable / copy_name(1, 1) / FILE).stat().st_size)]
    assert pool(node) == []
    assert any(os.strerror(why) in one.reason for one in node.records if isinstance(one, Note))


def test_a_file_system_without_room_is_noticed_before_a_page_is_touched(
    node: Node, small: Path, private: Private, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a page for which there is no room would kill the rank."""
    content = saved(node)
    lend, take_back = Buffers.lend, Buffers.take_back

    def filled(self: Buffers, file: str, nbytes: int) -> Loan | None:
        loan = lend(self, file, nbytes)
        fill(small)
        return loan

    def emptied(self: Buffers) -> None:
        (small / "fill").unlink(missing_ok=True)
        take_back(self)

    monkeypatch.setattr(Buffers, "lend", filled)
    monkeypatch.setattr(Buffers, "take_back", emptied)
    node.join(live := job(), generation=2)
    assert (node.loaded().step, live.content()) == (1, content[1])
    assert (len(private.sizes), pool(node)) == (1, [])


@pytest.mark.parametrize(
    "case", ["all are in use", "another file", "small", "staged on a disk", "a memory folder on a disk"]
)
def test_nothing_is_lent(case: str, node: Node, small: Path, tmp_path: Path) -> None:
    stage = node.stage
    if "disk" in case:
        stage = type(node.stage)(tmp_path / "disk", private="memory" in case)
    stage.make()
    of = Buffers(stage, "s", FILE, 1)
    if case == "all are in use":
        (stage.tier.folder / copy_name(1, 1)).mkdir()
        (stage.tier.folder / copy_name(1, 1) / FILE).write_bytes(b"x")
    file = "alike-0.safetensors" if case == "another file" else FILE
    assert of.lend(file, 1000 if case == "small" else 64 * MIB) is None
    of.take_back()
    assert stage.free(POOL) == []


@pytest.mark.parametrize("left", ["b", ".b"], ids=["free", "of a maker that was killed"])
def test_a_buffer_that_is_there_is_lent(left: str, node: Node, small: Path) -> None:
    node.stage.make()
    of = Buffers(node.stage, "s", FILE, 1)
    place = node.stage.pool / POOL
    place.mkdir()
    (place / left).write_bytes(bytes(17 * MIB))
    inode = (place / left).stat().st_ino
    loan = of.lend(FILE, 16 * MIB)
    assert loan is not None
    assert [one.name[0] for one in node.stage.free(POOL)] == ["."], "no save takes it"
    loan.memory[:4] = b"abcd"
    of.take_back()
    (free,) = node.stage.free(POOL)
    assert (free.stat().st_ino, free.stat().st_size, free.name[0] == ".") == (inode, 16 * MIB, False)
    assert free.read_bytes()[:4] == b"abcd"
    assert of.lend(FILE, 16 * MIB) is not None, "once it is back it is lent again"
    assert (of.lend("alike-0.safetensors", 16 * MIB), of.lends) == (None, True), "another file ends no loan"
    again = of.lend(FILE, 16 * MIB)
    assert again is not None, "a second loan ends the first"
    again.memory[:1] = b"x"
    of.take_back()
    (free,) = node.stage.free(POOL)
    assert free.read_bytes()[:4] == b"xbcd"


def test_a_memory_folder_that_is_gone_ends_the_loan(node: Node, small: Path) -> None:
    node.stage.make()
    of = Buffers(node.stage, "s", FILE, 2)
    assert of.lend(FILE, 16 * MIB) is not None
    remove(node.stage.pool)
    of.take_back()
    assert of.lend(FILE, 16 * MIB) is None
    node.stage.make()
    assert of.lend(FILE, 16 * MIB) is not None
    of.take_back()


@pytest.mark.parametrize("gone", ["the pool", "the buffer"])
def test_a_load_goes_on_when_the_memory_folder_goes(
    gone: str, node: Node, small: Path, private: Private, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved(node, 2)
    lend = Buffers.lend

    def removed(self: Buffers, file: str, nbytes: int) -> Loan | None:
        loan = lend(self, file, nbytes)
        (hidden,) = node.stage.free(POOL)
        remove(node.stage.pool) if gone == "the pool" else hidden.unlink()
        return loan

    monkeypatch.setattr(Buffers, "lend", removed)
    node.join(live := job(), generation=2)
    assert (node.loaded().step, live.content(), len(private.sizes)) == (2, content[2], 1)


def test_a_job_that_goes_back_has_one_maker_of_buffers(
    node: Node, small: Path, private: Private, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that no save waits for makes its first buffer for years."""
    monkeypatch.setattr(buffers, "_REST", 1e9)
    monkeypatch.setattr(memory, "_PAGES_BYTES", mmap.PAGESIZE)
    saver = node.join(live := job())
    train_and_save(saver, live, range(1, 2), lambda _: True)
    until((node.durable / copy_name(1, 1)).exists, "step 1 on disk")
    for _ in range(2):
        saver.prepare(live.state)
        saver.restore(live.state)
    until(lambda: "buffers" not in [one.name for one in threading.enumerate()], "the end of those before")
    train_and_save(saver, live, range(2, 3), lambda _: False)
    node.in_memory(2, 1)
