"""Files are read and verified the same however their bytes come: past the page cache, through it, mapped."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outlast.checkpoint.content.digest import chunk_digests, combined
from outlast.checkpoint.content.memory import Loan, allocate, in_threads
from outlast.checkpoint.load import reading
from outlast.checkpoint.load.reading import memory_for, padded, read_verified
from outlast.checkpoint.load.restorer import Restored, Restorer
from outlast.checkpoint.policy.manifest import FileEntry, copy_name
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from outlast.fields import DamagedCopy
from outlast.recovery.policy.events import Record
from tests.support.jobs import Job, checkpointer, save_steps

FILE = "rank-00000-of-00001.safetensors"
NAME = copy_name(1, 1)
SHM = Path("/dev/shm")
needs_shm = pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no /dev/shm")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[CopyFolder]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield CopyFolder(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading_from(folder: Path, entry: FileEntry, digests: bytes) -> Iterator[reading._File]:
    with opened(folder) as copy, reading._opened(copy, entry, digests, whole=True) as file:
        yield file


def private(nbytes: int) -> Loan:
    return Loan(allocate(nbytes))


def write(folder: Path, nbytes: int, dice: random.Random) -> tuple[bytes, FileEntry, bytes]:
    content = dice.randbytes(nbytes)
    (folder / FILE).write_bytes(content)
    digests = chunk_digests(content)
    return content, FileEntry(FILE, nbytes, combined(digests)), digests


def forget(path: Path) -> None:
    """Have the page cache drop a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4095, (9 << 20) + 1, 9 << 20, (5 << 20) + 4097])
def test_a_file_of_any_size_is_read_whole(nbytes: int, cold: bool, tmp_path: Path, seed: int) -> None:
    content, entry, digests = write(tmp_path, nbytes, random.Random(seed))
    if cold:
        forget(tmp_path / FILE)
    loan = private(padded(nbytes))
    with opened(tmp_path) as folder:
        read_verified(folder, entry, digests, loan, 2)
    assert loan.memory[:nbytes] == content


@pytest.mark.parametrize("cold", [True, False])
def test_the_first_damaged_chunk_is_named(cold: bool, tmp_path: Path, seed: int) -> None:
    content, entry, digests = write(tmp_path, (20 << 20) + 5, random.Random(seed))
    harmed = bytearray(content)
    for place in ((6 << 20) + 17, 13 << 20, (20 << 20) + 4):
        harmed[place] ^= 4
    (tmp_path / FILE).write_bytes(harmed)
    if cold:
        forget(tmp_path / FILE)
    with opened(tmp_path) as folder, pytest.raises(DamagedCopy, match=r"6291456.*7340032"):
        read_verified(folder, entry, digests, private(padded(entry.nbytes)), 2)


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path, seed: int) -> None:
    _, entry, digests = write(tmp_path, 6 << 20, random.Random(seed))
    with reading_from(tmp_path, entry, digests) as file:
        os.truncate(tmp_path / FILE, (5 << 20) + 100)
        with pytest.raises(DamagedCopy, match="5242880"):
            file.read(memoryview(allocate(1 << 20)), 5 << 20, 6 << 20)


def test_a_file_that_refuses_reads_past_the_page_cache_is_read_through_it(tmp_path: Path, seed: int) -> None:
    """O_DIRECT refuses places in memory that are no multiples of the disk's block: EINVAL."""
    content, entry, digests = write(tmp_path, 6 << 20, random.Random(seed))
    forget(tmp_path / FILE)
    target = memoryview(allocate(2 << 20))[1:]
    with reading_from(tmp_path, entry, digests) as file:
        file.read(target, 1 << 20, 2 << 20)
    assert bytes(target[: 1 << 20]) == content[1 << 20 : 2 << 20]


@needs_shm
def test_what_the_page_cache_holds_is_read_from_it(tmp_path: Path, seed: int) -> None:
    """A tmpfs file is all page cache, whether or not it may be opened past it."""
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        content, entry, digests = write(Path(name), (6 << 20) + 3, random.Random(seed))
        with reading_from(Path(name), entry, digests) as file:
            assert file._direct < 0 or file._holds(0, entry.nbytes)
        loan = private(padded(entry.nbytes))
        with opened(Path(name)) as folder:
            read_verified(folder, entry, digests, loan, 2)
        assert loan.memory[: entry.nbytes] == content


def test_the_first_failure_is_raised_and_nothing_is_begun_after_it() -> None:
    begun: list[int] = []
    late = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 3:
            assert late.wait(30)
            raise ValueError("first")
        if number == 4:
            late.set()
            raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        in_threads(lambda: work, 1000, 2)
    assert len(begun) <= 6


def restore_near(
    durable: Path, memory: Path, state: dict[str, object], records: list[Record]
) -> Restored | None:
    """Restore with a memory tier but without a saver."""
    around = checkpointer(durable, generation=2, records=records)._around
    around = dataclasses.replace(around, memory=DirectoryTier(memory, "memory"))
    return Restorer(around, state, ()).restore()


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


def scribble(memory: Path) -> None:
    """Write over a file and cut it, as a rank does that stages something else into it."""
    path = memory / NAME / FILE
    with path.open("r+b") as file:
        file.write(b"\xee" * path.stat().st_size)
    os.truncate(path, 1)


@needs_shm
@pytest.mark.parametrize("steps", [0, 2])
def test_what_was_loaded_from_memory_outlives_the_buffer(steps: int, shared: Path, tmp_path: Path) -> None:
    """An optimizer that has stepped is given the content in place, a new one new memory."""
    content = save_steps(shared, 1)
    job = Job(5)
    job.train(steps)
    held = [one["exp_avg"] for one in job.optimizer.state.values()]
    assert restore_near(tmp_path, shared, job.state, []) is not None
    scribble(shared)
    assert job.content() == content[1]
    now = [one["exp_avg"] for one in job.optimizer.state.values()]
    assert all(one is other for one, other in zip(held, now, strict=False))
    assert all(one.data_ptr() % 64 == 0 for one in now)


class Keeper(torch.nn.Module):
    """A module that keeps what it is given, against torch's custom."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3000.0))

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        self.table = state_dict[f"{prefix}table"]


class Holder:
    """A holder of its own kind, which keeps what it is given."""

    def __init__(self) -> None:
        self.content: dict[str, object] = {"a": torch.ones(5000), "b": [(torch.ones(0), torch.ones(()))]}

    def state_dict(self) -> dict[str, object]:
        return self.content

    def load_state_dict(self, content: dict[str, object]) -> None:
        self.content = content


class Remembering(torch.nn.Linear):
    """A module of torch's kind whose extra state is a tensor, which grows, and which it keeps."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.memory: torch.Tensor | None = None

    def get_extra_state(self) -> torch.Tensor | None:
        return self.memory

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        self.memory = state


@needs_shm
def test_whoever_keeps_what_it_is_given_keeps_it_unchanged(shared: Path, tmp_path: Path) -> None:
    remembering = Remembering()
    remembering.memory = torch.full((5000,), 3.0)
    shown = {
        "remembering": remembering,
        "keeper": Keeper(),
        "holder": Holder(),
        "box": {"x": torch.ones(7), "y": [torch.ones(3)]},
    }
    checkpointer(shared).save(1, shown, "a test")
    live = {"remembering": Remembering(), "keeper": Keeper(), "holder": Holder(), "box": {}}
    live["keeper"].table.zero_()  # type: ignore[attr-defined]
    assert restore_near(tmp_path, shared, live, []) is not None  # type: ignore[arg-type]
    scribble(shared)
    assert torch.equal(live["remembering"].memory, torch.full((5000,), 3.0))  # type: ignore[attr-defined]
    assert torch.equal(live["keeper"].table, torch.arange(3000.0))  # type: ignore[attr-defined]
    assert torch.equal(live["holder"].content["a"], torch.ones(5000))  # type: ignore[attr-defined]
    (empty, scalar) = live["holder"].content["b"][0]  # type: ignore[attr-defined]
    assert (empty.shape, scalar.item()) == ((0,), 1.0)
    assert torch.equal(live["box"]["x"], torch.ones(7))  # type: ignore[index]
    assert torch.equal(live["box"]["y"][0], torch.ones(3))  # type: ignore[index]


@needs_shm
@pytest.mark.parametrize("size", [0, 2000])
def test_a_file_in_memory_that_shrank_gives_way_to_the_disk(size: int, shared: Path, tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1)
    save_steps(shared, 1)
    os.truncate(shared / NAME / FILE, size)
    job, records = Job(9), list[Record]()
    restored = restore_near(tmp_path, shared, job.state, records)
    assert restored is not None
    assert job.content() == content[1]


def test_a_memory_tier_on_disk_is_read_and_not_mapped(tmp_path: Path, seed: int) -> None:
    _, entry, _ = write(tmp_path, 9000, random.Random(seed))
    if tmp_path.stat().st_dev == SHM.stat().st_dev:
        pytest.skip("the temporary folder is in memory, too")
    with DirectoryTier(tmp_path.parent, private=True).open(tmp_path.name) as folder:
        assert folder.is_near(entry.name)
        assert not memory_for(folder, entry, lambda *_: None).is_filled
