"""Reading whole safetensors files, or parts of tensors; every chunk is verified before it is used.

While one thread waits for the disk others digest. Of a whole file, pages in the page cache are read from
there; the rest is read with O_DIRECT, which saves a copy and as much host memory again.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from outlast.checkpoint.content.digest import chunk_digest, read_digests
from outlast.checkpoint.content.memory import Key, Loan, allocate, as_tensor, block_of, in_threads
from outlast.checkpoint.policy.manifest import CHUNK_BYTES, DIGEST_BYTES, FileEntry
from outlast.checkpoint.policy.table import TensorEntry
from outlast.checkpoint.tiers.tier import CopyFolder, read_exactly
from outlast.fields import Damage, DamagedCopy
from outlast.parallelism.policy.slices import Part, blocks, extent, place_in, strides_of

Lend = Callable[[str, int], Loan | None]

_MEMORY = "/dev/shm"
_READERS = 4
_UNIT_BYTES = 4 << 20  # what a thread reads at a time from the disk
_AT_A_TIME = 16 << 20  # how much of a file is in memory at a time where parts of tensors are read
_DIRECT_BYTES = 4 << 20  # what is smaller goes through the page cache
_BLOCK_BYTES = 4096  # what O_DIRECT wants addresses, sizes and places in a file to be multiples of
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the only one that mincore defines


def padded(nbytes: int) -> int:
    """Return the size of a file, rounded up to whole blocks of O_DIRECT."""
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def memory_for(folder: CopyFolder, entry: FileEntry, lend: Lend) -> Loan:
    """Return memory for a safetensors file, whose content is valid once :func:`read_verified` has returned.

    Args:
        folder: the copy; its files in the node's memory are mapped, the others are to be read. A write to
            what is mapped does not change the file.
        entry: of the file, in the manifest.
        lend: returns memory for a file, given its name and size; if it returns None, private memory is used.

    Raises:
        DamagedCopy: the file is missing, no regular file, or of another size.
        OSError: the file system refused.
    """
    if folder.is_near(entry.name):
        with folder.open(entry.name, entry.nbytes) as (descriptor, _), suppress(OSError, ValueError):
            if os.fstat(descriptor).st_dev == os.stat(_MEMORY).st_dev:
                return Loan(mmap.mmap(descriptor, entry.nbytes, flags=mmap.MAP_PRIVATE), is_filled=True)
    return lend(entry.name, entry.nbytes) or Loan(allocate(padded(entry.nbytes)))


def read_verified(
    folder: CopyFolder,
    entry: FileEntry,
    digests: bytes,
    loan: Loan,
    threads: int,
    part: tuple[int, int] | None = None,
) -> None:
    """Read a safetensors file, or a part of it, to its place in memory, and verify every byte of it.

    Args:
        folder: the copy.
        entry: of the file, in the manifest.
        digests: of its chunks.
        loan: memory for the whole file, from the start of a page. If it has the size that :func:`padded`
            returns, the end, too, is read past the page cache. After an error the content is undefined. Of
            a mapped file the content is there, and only verified.
        threads: that digest; a few more read, since they mostly wait for the disk.
        part: its begin, a multiple of the size of a chunk, and its end: another one, or that of the file.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
        OSError: the file system refused, or there are no pages.
    """
    first, last = part or (0, entry.nbytes)
    content = memoryview(loan.memory)
    with _opened(folder, entry, digests, whole=not loan.is_filled) as file:

        def read(unit: int) -> None:
            begin = first + unit * _UNIT_BYTES
            end = min(begin + _UNIT_BYTES, last)
            if loan.is_filled:
                file.verify(content[begin:end], begin)
            else:
                loan.reserve(begin, end - begin)
                file.read(content[begin:], begin, end)

        count = -(-(last - first) // _UNIT_BYTES)
        in_threads(lambda: read, count, threads if loan.is_filled else max(_READERS, threads))


class _File:
    """An open safetensors file; its chunks are verified as they are read.

    Args:
        descriptor: of the file.
        direct: of the same file, opened past the page cache; -1: all is read through it.
        entry: of the file, in the manifest.
        digests: of its chunks.
    """

    def __init__(self, descriptor: int, direct: int, entry: FileEntry, digests: bytes) -> None:
        self.digests = digests
        self._descriptor = descriptor
        self._direct = direct
        self._entry = entry
        self._cached = _cached(descriptor, entry.nbytes) if direct >= 0 else b""
        self._window: mmap.mmap | None = None
        self._first = self._last = 0  # the bytes of the file that are in the window

    def read(self, target: memoryview, begin: int, end: int) -> None:
        """Read whole chunks, up to a place in the file or its end, to the begin of a target.

        Raises:
            DamagedCopy: names the first bytes that are not as they were saved; or the file ends before.
            OSError: the file system refused.
        """
        size = end - begin
        if not self._read_direct(target[: padded(size)], begin, end):
            read_exactly(self._descriptor, target[:size], begin, self._entry.name)
        self.verify(target[:size], begin)

    def verify(self, content: memoryview, begin: int) -> None:
        """Compare the digests of whole chunks.

        Args:
            content: the chunks.
            begin: where the first of them begins in the file.

        Raises:
            DamagedCopy: names the first bytes that are not as they were saved.
        """
        edges = [*range(0, len(content), CHUNK_BYTES), len(content)]
        for number, (low, high) in enumerate(itertools.pairwise(edges), begin // CHUNK_BYTES):
            found = chunk_digest(content[low:high])
            known = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if found != known:
                expected = f"digest {known.hex()} of bytes {begin + low} to {begin + high}"
                raise DamagedCopy(Damage(self._entry.name, expected, found.hex()))

    def octets(self, begin: int, end: int) -> torch.Tensor:
        """Return some bytes of the file; valid until the next call.

        Raises:
            DamagedCopy: a chunk in which they lie is not as it was saved.
            OSError: the file system refused.
        """
        first, last = begin // CHUNK_BYTES * CHUNK_BYTES, -(-end // CHUNK_BYTES) * CHUNK_BYTES
        last = min(last, self._entry.nbytes)
        if self._window is None:
            self._window = allocate(min(_AT_A_TIME, self._entry.nbytes) + 2 * CHUNK_BYTES)
        if first < self._first or last > self._last:
            view, start = memoryview(self._window), first - self._first
            kept = max(self._last - first, 0) if start >= 0 else 0
            if kept:  # the next tensor begins as a rule in the chunk in which the last one ended
                view[:kept] = bytes(view[start : start + kept])
            self._first = self._last = first
            self.read(view[kept:], first + kept, last)
            self._last = last
        return as_tensor(self._window)[begin - self._first : end - self._first]

    def _read_direct(self, target: memoryview, begin: int, end: int) -> bool:
        """Read past the page cache; return False if that is impossible, or the page cache has most of it."""
        if self._direct < 0 or begin % _BLOCK_BYTES or self._holds(begin, end):
            return False
        try:
            return os.preadv(self._direct, [target], begin) >= end - begin
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return False

    def _holds(self, begin: int, end: int) -> bool:
        """Return whether the page cache has most of a range."""
        pages = self._cached[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
        return 2 * pages.count(0) < len(pages)


@contextmanager
def _opened(folder: CopyFolder, entry: FileEntry, digests: bytes, whole: bool = False) -> Iterator[_File]:
    """Open a file; past the page cache, too, if it is to be read as a whole."""
    with folder.open(entry.name, entry.nbytes) as (descriptor, _), ExitStack() as stack:
        direct = -1
        if whole and entry.nbytes >= _DIRECT_BYTES and hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # refused: the page cache serves every file system
                direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                stack.callback(os.close, direct)
        yield _File(descriptor, direct, entry, digests)


def _cached(descriptor: int, nbytes: int) -> bytes:
    """Return for each page of a file whether the page cache has it: 0 is no.

    Nothing is read through the mapping, so a file that shrinks meanwhile does no harm.
    """
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    try:
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE)
    except (OSError, ValueError):
        return bytes(found)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found)
    return bytes(found).translate(_LOWEST_BIT)


class Stored(NamedTuple):
    """A part of a tensor in a file.

    Args:
        source: number of the file: a rank, or behind the ranks one that all ranks share.
        file: the file, in the manifest.
        entry: where in the file it is.
    """

    source: int
    file: FileEntry
    entry: TensorEntry


@dataclass(frozen=True)
class Target:
    """Memory for a part of a tensor.

    Args:
        part: where in the whole it is.
        octets: where its bytes go, in the order of the file until :meth:`put_in_order` is called.
        dtype: of its elements.
        strides: of its elements in the end, without gaps; None: the order of the file.
    """

    part: Part
    octets: torch.Tensor
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a tensor."""
        plain = self.octets.view(self.dtype).view(self.part.shape)
        return plain if self.strides is None else plain.as_strided(plain.shape, self.strides)

    def put_in_order(self) -> None:
        """Bring the elements from the order of a file into that of the strides, in the same memory."""
        if self.strides is not None and self.octets.numel():
            width = self.dtype.itemsize
            steps = [step * width for step in self.strides]
            shape = (*self.part.shape, width)
            ordered = self.octets.as_strided(shape, (*steps, 1), self.octets.storage_offset())
            ordered.copy_(self.octets.clone().view(shape))


class Move(NamedTuple):
    """A part that goes from a file to memory."""

    stored: Stored
    part: Part
    target: Target


def reserve(wanted: Mapping[Key, tuple[Part, torch.dtype, tuple[int, ...] | None]]) -> dict[Key, Target]:
    """Return memory for parts of tensors, in one block, which is freed with the last of them.

    Args:
        wanted: part, type and strides of each, as in :class:`Target`, by key.
    """
    octets = block_of({key: part.numel * dtype.itemsize for key, (part, dtype, _) in wanted.items()})
    return {key: Target(part, octets[key], dtype, order) for key, (part, dtype, order) in wanted.items()}


def carry_out(folder: CopyFolder, moves: Sequence[Move], threads: int) -> None:
    """Read parts to where they go.

    Args:
        folder: the copy.
        moves: what to read.
        threads: that read, the caller's included; each has a block of 16 MiB.

    Raises:
        DamagedCopy: a byte is not as it was saved.
        OSError: the file system refused.
    """
    runs: list[list[tuple[Move, Part]]] = []  # each of one file, in the order of its bytes
    nbytes = sum(move.part.numel * move.target.dtype.itemsize for move in moves)
    most, source, size = max(_AT_A_TIME, nbytes // threads), -1, 0
    for move in sorted(moves, key=lambda each: (each.stored.source, each.stored.entry.begin)):
        width = move.target.dtype.itemsize
        for block in blocks(move.part, move.stored.entry.part, max(1, _AT_A_TIME // width)):
            if source != move.stored.source or size >= most:
                runs.append([])
                source, size = move.stored.source, 0
            runs[-1].append((move, block))
            size += block.numel * width

    def read(number: int) -> None:
        entry = runs[number][0][0].stored.file
        with _opened(folder, entry, read_digests(folder, entry)) as file:
            for move, block in runs[number]:
                _copy(file, move, block)

    in_threads(lambda: read, len(runs), threads)


def _copy(file: _File, move: Move, block: Part) -> None:
    width, entry, target = move.target.dtype.itemsize, move.stored.entry, move.target
    begin = entry.begin + place_in(block, entry.part) * width
    octets = file.octets(begin, begin + extent(block, entry.part) * width)
    shape = (*block.shape, width)
    here = [step * width for step in strides_of(entry.shape)]
    there = [step * width for step in strides_of(target.part.shape)]
    place = target.octets.storage_offset() + place_in(block, target.part) * width
    goes = target.octets.as_strided(shape, (*there, 1), place)
    goes.copy_(octets.as_strided(shape, (*here, 1), octets.storage_offset()))


def differing(
    folder: CopyFolder, pairs: Sequence[tuple[str, Stored, Stored]]
) -> list[tuple[str, Stored, Stored]]:
    """Return those of the pairs of stored parts that do not hold the same bytes.

    Chunks with one digest at one place of both files are the same; only others are read.

    Args:
        folder: the copy.
        pairs: a key and two stored parts of equal shape.

    Raises:
        DamagedCopy: a byte that had to be read is not as it was saved.
        OSError: the file system refused.
    """
    found = []
    by_file = sorted(pairs, key=lambda pair: (pair[1].source, pair[2].source, pair[1].entry.begin))
    for files, same in itertools.groupby(by_file, key=lambda pair: (pair[1].file, pair[2].file)):
        with ExitStack() as stack:
            first, second = (
                stack.enter_context(_opened(folder, file, read_digests(folder, file))) for file in files
            )
            for pair in same:
                here, there = pair[1].entry, pair[2].entry
                moved = there.begin - here.begin
                if not all(
                    torch.equal(first.octets(begin, end), second.octets(begin + moved, end + moved))
                    for begin, end in _doubtful(first.digests, second.digests, here, there)
                ):
                    found.append(pair)
    return found


def _doubtful(one: bytes, other: bytes, here: TensorEntry, there: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file in which its digests do not show that another one has the same bytes."""
    if here.begin != there.begin:
        for begin in range(here.begin, here.end, _AT_A_TIME):
            yield begin, min(begin + _AT_A_TIME, here.end)
        return
    for number in range(here.begin // CHUNK_BYTES, -(-here.end // CHUNK_BYTES)):
        place = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        if one[place] != other[place]:
            begin = number * CHUNK_BYTES
            yield max(here.begin, begin), min(here.end, begin + CHUNK_BYTES)
