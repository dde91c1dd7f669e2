"""Reading whole safetensors files, or parts of tensors; every chunk is verified before it is used.

While one thread waits for the disk others digest. Pages in the page cache are read from there; the rest is
read with O_DIRECT, which saves a copy and as much host memory again.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from outlast.checkpoint.content.digest import chunk_digest, read_digests
from outlast.checkpoint.content.memory import Loan, allocate, as_tensor, block_of, in_threads
from outlast.checkpoint.policy.manifest import CHUNK_BYTES, DIGEST_BYTES, FileEntry
from outlast.checkpoint.policy.table import TensorEntry
from outlast.checkpoint.tiers.tier import CopyFolder, read_exactly
from outlast.fields import Damage, DamagedCopy
from outlast.parallelism.policy.slices import Part, blocks, cover, extent, place_in, strides_of

Lend = Callable[[str, int], Loan | None]

_MEMORY = "/dev/shm"
_READERS = 4
_UNIT_BYTES = 4 << 20  # what a thread reads at a time from the disk
_DIRECT_BYTES = 4 << 20  # what is smaller goes through the page cache
_BLOCK_BYTES = 4096  # what O_DIRECT wants addresses, sizes and places in a file to be multiples of
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the only one that mincore defines


def padded(nbytes: int) -> int:
    """Return the size of a file, rounded up to whole blocks of O_DIRECT."""
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def read_verified(
    folder: CopyFolder,
    entry: FileEntry,
    digests: bytes,
    target: memoryview,
    threads: int,
    part: tuple[int, int] | None = None,
    reserve: Callable[[int, int], object] = lambda *_: None,
) -> None:
    """Read a safetensors file, or a part of it, to its place in memory, and verify every byte of it.

    Args:
        folder: the copy.
        entry: of the file, in the manifest.
        digests: of its chunks.
        target: memory for the whole file, from the start of a page. If it has the size that :func:`padded`
            returns, the end, too, is read past the page cache. After an error the content is undefined.
        threads: that digest; a few more read, since they mostly wait for the disk.
        part: its begin, a multiple of the size of a chunk, and its end: another one, or that of the file.
        reserve: allocates memory for a range; called with its begin and size before it is read.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
        OSError: the file system refused, or ``reserve`` did.
    """
    first, last = part or (0, entry.nbytes)
    with folder.open(entry.name, entry.nbytes) as (descriptor, _), _opened(descriptor, entry) as file:

        def read(unit: int) -> None:
            begin = first + unit * _UNIT_BYTES
            end = min(begin + _UNIT_BYTES, last)
            reserve(begin, end - begin)
            file.read(target, begin, end)
            verify_chunks(entry, digests, target[begin:end], begin)

        in_threads(lambda: read, -(-(last - first) // _UNIT_BYTES), max(_READERS, threads))


class Source:
    """The bytes of a safetensors file in memory. They are not valid before :meth:`fill`.

    Args:
        folder: the copy; its files in the node's memory are mapped, the others are read.
        entry: of the file, in the manifest.
        lend: returns memory for a file, given its name and size; if it returns None, private memory is used.

    Raises:
        DamagedCopy: the file is missing, no regular file, or of another size.
        OSError: the file system refused.
    """

    def __init__(self, folder: CopyFolder, entry: FileEntry, lend: Lend) -> None:
        self._entry = entry
        mapped = _map(folder, entry) if folder.is_near(entry.name) else None
        self._mapped = mapped is not None
        if mapped is not None:
            self._loan = Loan(mapped, lambda *_: None)
        else:
            lent = lend(entry.name, entry.nbytes)
            self._loan = lent or Loan(allocate(padded(entry.nbytes)), lambda *_: None)

    def fill(self, folder: CopyFolder, threads: int) -> None:
        """Verify every byte, after reading the file where it is not mapped.

        Args:
            folder: the copy.
            threads: that do so, the caller's included.

        Raises:
            DamagedCopy: names the first bytes that are not as they were saved.
            OSError: the file system refused.
        """
        content, digests = memoryview(self._loan.memory), read_digests(folder, self._entry)
        if self._mapped:
            verify_mapped(self._entry, digests, content, threads)
        else:
            read_verified(folder, self._entry, digests, content, threads, reserve=self._loan.reserve)

    def view(self, begin: int, end: int) -> torch.Tensor:
        """Return a range as a tensor of bytes. A write to it does not change the file of a copy."""
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(memoryview(self._loan.memory)[begin:end], dtype=torch.uint8)


def _map(folder: CopyFolder, entry: FileEntry) -> mmap.mmap | None:
    """Map a file; None where it must be read."""
    with folder.open(entry.name, entry.nbytes) as (descriptor, _):
        try:
            if os.fstat(descriptor).st_dev != os.stat(_MEMORY).st_dev:
                return None
            return mmap.mmap(descriptor, entry.nbytes, flags=mmap.MAP_PRIVATE)
        except (OSError, ValueError):
            return None


def write_at(descriptor: int, content: memoryview, begin: int) -> None:
    """Write bytes to a place in a file.

    Raises:
        OSError: the file system refused.
    """
    while content:
        done = os.pwrite(descriptor, content, begin)
        content, begin = content[done:], begin + done


def verify_chunks(entry: FileEntry, digests: bytes, content: memoryview, begin: int) -> None:
    """Compare the digests of whole chunks of a file.

    Args:
        entry: of the file, in the manifest.
        digests: of its chunks.
        content: the chunks.
        begin: where the first of them begins in the file.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
    """
    edges = [*range(0, len(content), CHUNK_BYTES), len(content)]
    for number, (low, high) in enumerate(itertools.pairwise(edges), begin // CHUNK_BYTES):
        found = chunk_digest(content[low:high])
        known = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if found != known:
            expected = f"digest {known.hex()} of bytes {begin + low} to {begin + high}"
            raise DamagedCopy(Damage(entry.name, expected, found.hex()))


def verify_mapped(entry: FileEntry, digests: bytes, content: memoryview, threads: int) -> None:
    """Compare the digests of all chunks of a file that is in memory, in several threads.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
    """

    def work(number: int) -> None:
        begin = number * CHUNK_BYTES
        verify_chunks(entry, digests, content[begin : begin + CHUNK_BYTES], begin)

    in_threads(lambda: work, len(digests) // DIGEST_BYTES, threads)


class _File:
    """An open file, and the same file opened past the page cache."""

    def __init__(self, descriptor: int, direct: int, entry: FileEntry) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._file = entry.name
        self._cached = _cached(descriptor, entry.nbytes) if direct >= 0 else b""

    def read(self, target: memoryview, begin: int, end: int) -> None:
        """Read a range to its place in memory for the whole file; see :func:`read_verified`.

        Raises:
            DamagedCopy: the file ends before.
            OSError: the file system refused.
        """
        if self._direct >= 0 and begin % _BLOCK_BYTES == 0 and not self._holds(begin, end):
            try:
                place = target[begin : padded(end)]
                if os.preadv(self._direct, [place], begin) >= end - begin:
                    return
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
        read_exactly(self._descriptor, target[begin:end], begin, self._file)

    def _holds(self, begin: int, end: int) -> bool:
        """Say whether the page cache has most of a range."""
        pages = self._cached[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
        return 2 * pages.count(0) < len(pages)


@contextmanager
def _opened(descriptor: int, entry: FileEntry) -> Iterator[_File]:
    direct = -1
    if entry.nbytes >= _DIRECT_BYTES and hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # refused: the page cache serves every file system
            direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield _File(descriptor, direct, entry)
    finally:
        if direct >= 0:
            os.close(direct)


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


_AT_A_TIME = 16 << 20  # how much of a file is in memory at a time


class Stored(NamedTuple):
    """A part of a tensor in a file.

    Args:
        source: number of the file: a rank, or behind the ranks one that all ranks share.
        entry: where in the file it is.
    """

    source: int
    entry: TensorEntry


class Held(NamedTuple):
    """A part of a tensor, and who has it.

    Args:
        part: where in the whole it is.
        sources: numbers of the files, see :class:`Stored`.
    """

    part: Part
    sources: Sequence[int]


@dataclass(frozen=True)
class Target:
    """Memory for a part of a tensor.

    Args:
        part: where in the whole it is.
        octets: where its bytes go, in order.
    """

    part: Part
    octets: torch.Tensor

    def typed(self, dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return the memory as a tensor."""
        plain = self.octets.view(dtype).view(self.part.shape)
        return plain if strides is None else plain.as_strided(plain.shape, strides)


@dataclass(frozen=True)
class Move:
    """A part that goes from a file to memory."""

    stored: Stored
    part: Part
    target: Target

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.stored.entry.nbytes // self.stored.entry.part.numel


def reserve(wanted: Mapping[str, tuple[Part, int]]) -> dict[str, Target]:
    """Return memory for parts of tensors, in one block, which is freed with the last of them.

    Args:
        wanted: part and bytes of an element, by key.
    """
    octets = block_of({key: part.numel * itemsize for key, (part, itemsize) in wanted.items()})
    return {key: Target(part, octets[key]) for key, (part, _) in wanted.items()}


def moves_to(
    target: Target, held: Sequence[Held], reader: int, entry_in: Callable[[int], TensorEntry]
) -> tuple[list[Move], str]:
    """Find what to read for a target.

    Args:
        target: what to fill.
        held: all parts of the tensor that overlap it.
        reader: the rank that reads; of equal parts each reader takes another one.
        entry_in: returns where the tensor is in a file.

    Returns:
        What to read, and why it is not all; empty when it is.
    """
    taken, missing = cover(target.part, [each.part for each in held])
    commons = (each.part.overlap(target.part) for each in held)
    if sum(common.numel for common in commons if common) > sum(part.numel for _, part in taken):
        return [], "is stored in parts that overlap"
    if missing:
        return [], f"is not complete: no rank stored {list(missing[0].shape)} at {list(missing[0].offsets)}"
    moves = []
    for place, part in taken:
        source = held[place].sources[reader % len(held[place].sources)]
        moves.append(Move(Stored(source, entry_in(source)), part, target))
    return moves, ""


class _VerifiedFile:
    """An open safetensors file whose chunks are verified as they are read."""

    def __init__(self, descriptor: int, entry: FileEntry, digests: bytes) -> None:
        self._descriptor = descriptor
        self._entry = entry
        self.digests = digests
        memory = allocate(min(_AT_A_TIME, entry.nbytes) + 2 * CHUNK_BYTES)
        self._octets, self._view = as_tensor(memory), memoryview(memory)
        self._first = self._last = 0  # the chunks in memory

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return bytes of the file; valid until the next call.

        Raises:
            DamagedCopy: a chunk in which they lie is not as it was saved.
            OSError: the file system refused.
        """
        size = CHUNK_BYTES
        first, last = begin // size, -(-end // size)
        if first < self._first or last > self._last:
            self._load(first, last)
        offset = begin - self._first * size
        return self._octets[offset : offset + end - begin]

    def _load(self, first: int, last: int) -> None:
        entry, size = self._entry, CHUNK_BYTES
        kept = max(self._last - first, 0) if first >= self._first else 0
        if kept:  # the next tensor begins as a rule in the chunk in which the last one ended
            start = (first - self._first) * size
            self._view[: kept * size] = bytes(self._view[start : start + kept * size])
        self._first = self._last = first
        for number in range(first + kept, last):
            begin, end = number * size, min((number + 1) * size, entry.nbytes)
            chunk = self._view[begin - first * size : end - first * size]
            read_exactly(self._descriptor, chunk, begin, entry.name)
            verify_chunks(entry, self.digests, chunk, begin)
        self._last = last


@contextmanager
def _opened_file(folder: CopyFolder, entry: FileEntry) -> Iterator[_VerifiedFile]:
    digests = read_digests(folder, entry)
    with folder.open(entry.name, entry.nbytes) as (descriptor, _):
        yield _VerifiedFile(descriptor, entry, digests)


def carry_out(
    folder: CopyFolder, file_of: Callable[[int], FileEntry], moves: Sequence[Move], threads: int
) -> None:
    """Read parts to where they go.

    Args:
        folder: the copy.
        file_of: returns a safetensors file by its number.
        moves: what to read.
        threads: that read, the caller's included; each has a block of 16 MiB.

    Raises:
        DamagedCopy: a byte is not as it was saved.
        OSError: the file system refused.
    """
    runs: list[list[tuple[Move, Part]]] = []  # each of one file, in the order of its bytes
    most = max(_AT_A_TIME, sum(move.part.numel * move.itemsize for move in moves) // threads)
    source, size = -1, 0
    for move in sorted(moves, key=lambda each: (each.stored.source, each.stored.entry.begin)):
        for block in blocks(move.part, move.stored.entry.part, max(1, _AT_A_TIME // move.itemsize)):
            if source != move.stored.source or size >= most:
                runs.append([])
                source, size = move.stored.source, 0
            runs[-1].append((move, block))
            size += block.numel * move.itemsize

    def read(number: int) -> None:
        with _opened_file(folder, file_of(runs[number][0][0].stored.source)) as file:
            for move, block in runs[number]:
                _copy(file, move, block)

    in_threads(lambda: read, len(runs), threads)


def _copy(file: _VerifiedFile, move: Move, block: Part) -> None:
    width, entry, target = move.itemsize, move.stored.entry, move.target
    begin = entry.begin + place_in(block, entry.part) * width
    octets = file.read(begin, begin + extent(block, entry.part) * width)
    shape = (*block.shape, width)
    here = [step * width for step in strides_of(entry.shape)]
    there = [step * width for step in strides_of(target.part.shape)]
    place = target.octets.storage_offset() + place_in(block, target.part) * width
    goes = target.octets.as_strided(shape, (*there, 1), place)
    goes.copy_(octets.as_strided(shape, (*here, 1), octets.storage_offset()))


def put_in_order(octets: torch.Tensor, shape: Sequence[int], strides: Sequence[int] | None) -> None:
    """Bring the elements of a tensor from the order of a file into that of its strides, in one memory.

    Args:
        octets: its bytes, as they are in the file.
        shape: of the tensor.
        strides: without gaps; None: the order of the file.
    """
    if strides is None or not octets.numel():
        return
    width = octets.numel() // math.prod(shape)
    steps = [step * width for step in strides]
    ordered = octets.as_strided((*shape, width), (*steps, 1), octets.storage_offset())
    ordered.copy_(octets.clone().view(*shape, width))


def differing(
    folder: CopyFolder, file_of: Callable[[int], FileEntry], pairs: Sequence[tuple[str, Stored, Stored]]
) -> list[tuple[str, int, int]]:
    """Return which of the pairs of stored parts do not hold the same bytes.

    Chunks with one digest at one place of both files are the same; only others are read.

    Args:
        folder: the copy.
        file_of: returns a safetensors file by its number.
        pairs: a key and two stored parts of equal shape.

    Returns:
        Key and sources of each pair that differs.

    Raises:
        DamagedCopy: a byte that had to be read is not as it was saved.
        OSError: the file system refused.
    """
    found = []
    by_sources: dict[tuple[int, int], list[tuple[str, TensorEntry, TensorEntry]]] = {}
    for key, one, other in pairs:
        by_sources.setdefault((one.source, other.source), []).append((key, one.entry, other.entry))
    for (left, right), entries in sorted(by_sources.items()):
        with _opened_file(folder, file_of(left)) as first, _opened_file(folder, file_of(right)) as second:
            for key, here, there in sorted(entries, key=lambda each: each[1].begin):
                for begin, end in _doubtful(first.digests, second.digests, here, there):
                    moved = there.begin - here.begin
                    if not torch.equal(first.read(begin, end), second.read(begin + moved, end + moved)):
                        found.append((key, left, right))
                        break
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
