"""Reading whole safetensors files, or parts of tensors; every chunk is verified before it is used.

While one thread waits for the disk others digest. Pages in the page cache are read from there; the rest is
read with O_DIRECT, which saves a copy and as much host memory again. A file that the page cache holds is
read twice rather than copied through new memory, which takes the kernel longer to provide.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from outlast.checkpoint.content.digest import chunk_digest, read_digests
from outlast.checkpoint.content.memory import allocate, as_tensor, block_of, in_threads
from outlast.checkpoint.policy.manifest import CHUNK_BYTES, DIGEST_BYTES, Shard, TensorEntry
from outlast.checkpoint.policy.sharing import differing as differing_chunks
from outlast.checkpoint.tiers.tier import CopyFolder, read_exactly
from outlast.fields import Damage, DamagedCopy
from outlast.parallelism.policy.slices import Part, blocks, cover, extent, place_in, strides_of

_READERS = 4
_UNIT_BYTES = 4 << 20  # what a thread reads at a time from the disk
_DIRECT_BYTES = 4 << 20  # what is smaller goes through the page cache
_BLOCK_BYTES = 4096  # what O_DIRECT wants addresses, sizes and places in a file to be multiples of
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}
_LACKING = 16  # of which one page may be missing in a file that is read twice
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the only one that mincore defines


def padded(nbytes: int) -> int:
    """Return how much memory :func:`read_verified` needs for a file of a size."""
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def read_verified(folder: CopyFolder, shard: Shard, digests: bytes, target: memoryview, threads: int) -> None:
    """Read a safetensors file and verify every byte of it.

    Args:
        folder: the copy.
        shard: the file.
        digests: of its chunks.
        target: memory that begins at a page, as large as :func:`padded` says; after an error nothing in there
            is worth anything.
        threads: that digest; a few more read, since they mostly wait for the disk.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
        OSError: the file system refused.
    """
    with folder.open(shard.file, shard.nbytes) as (descriptor, _), _opened(descriptor, shard) as file:

        def read(unit: int) -> None:
            begin = unit * _UNIT_BYTES
            end = min(begin + _UNIT_BYTES, shard.nbytes)
            file.read(target, begin, end)
            verify_chunks(shard, digests, target[begin:end], begin)

        in_threads(lambda: read, -(-shard.nbytes // _UNIT_BYTES), max(_READERS, threads))


def verify_chunks(shard: Shard, digests: bytes, content: memoryview, begin: int) -> None:
    """Compare the digests of whole chunks of a file.

    Args:
        shard: the file.
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
            raise DamagedCopy(Damage(shard.file, expected, found.hex()))


def verify_mapped(shard: Shard, digests: bytes, content: memoryview, threads: int) -> None:
    """Compare the digests of all chunks of a file that is in memory, in several threads.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
    """

    def work(number: int) -> None:
        begin = number * CHUNK_BYTES
        verify_chunks(shard, digests, content[begin : begin + CHUNK_BYTES], begin)

    in_threads(lambda: work, len(digests) // DIGEST_BYTES, threads)


class _File:
    """An open file, and the same file opened past the page cache."""

    def __init__(self, descriptor: int, direct: int, shard: Shard) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._file = shard.file
        self._cached = _cached(descriptor, shard.nbytes) if direct >= 0 else b""

    def read(self, target: memoryview, begin: int, end: int) -> None:
        """Read a range to its place in memory that begins at a page.

        Raises:
            DamagedCopy: the file ends before.
            OSError: the file system refused.
        """
        if self._direct >= 0 and begin % _BLOCK_BYTES == 0 and not self._holds(begin, end):
            try:
                if os.preadv(self._direct, [target[begin : padded(end)]], begin) >= end - begin:
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
def _opened(descriptor: int, shard: Shard) -> Iterator[_File]:
    direct = -1
    if shard.nbytes >= _DIRECT_BYTES and hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # refused: the page cache serves every file system
            direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield _File(descriptor, direct, shard)
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


@dataclass(frozen=True)
class Stored:
    """A part of a tensor in a file.

    Args:
        source: whose file: a rank, or behind the ranks one that all ranks share; see :class:`World`.
        entry: what the rank's JSON file says of it.
    """

    source: int
    entry: TensorEntry

    @property
    def part(self) -> Part:
        """Where in the whole it is."""
        return Part(self.entry.offsets, self.entry.shape)


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
        return self.stored.entry.nbytes // self.stored.part.numel


def reserve(wanted: Mapping[str, tuple[Part, int]]) -> dict[str, Target]:
    """Return memory for parts of tensors, in one block, which is freed with the last of them.

    Args:
        wanted: part and bytes of an element, by key.
    """
    octets = block_of({key: part.numel * itemsize for key, (part, itemsize) in wanted.items()})
    return {key: Target(part, octets[key]) for key, (part, _) in wanted.items()}


def replicas(stored: Sequence[Stored]) -> dict[Part, list[Stored]]:
    """Group what is stored of a tensor by its place: the members of a group hold the same elements."""
    groups: dict[Part, list[Stored]] = {}
    for each in stored:
        groups.setdefault(each.part, []).append(each)
    return groups


def moves_to(target: Target, stored: Sequence[Stored], reader: int) -> tuple[list[Move], str]:
    """Find what to read for a target.

    Args:
        target: what to fill.
        stored: all that is stored of the tensor.
        reader: the rank that reads; of equal parts each reader takes another one.

    Returns:
        What to read, and why it is not all; empty when it is.
    """
    groups = [group for part, group in replicas(stored).items() if part.numel]
    chosen = [group[reader % len(group)] for group in groups]
    whole = Part.whole(stored[0].entry.global_shape)
    if sum(each.part.numel for each in chosen) > whole.numel:
        return [], "is stored in parts that overlap"
    taken, missing = cover(target.part, [each.part for each in chosen])
    if missing:
        return [], f"is not complete: no rank stored {list(missing[0].shape)} at {list(missing[0].offsets)}"
    return [Move(chosen[place], part, target) for place, part in taken], ""


class _VerifiedFile:
    """An open safetensors file whose chunks are verified as they are read."""

    def __init__(self, descriptor: int, shard: Shard, digests: bytes) -> None:
        self._descriptor = descriptor
        self._shard = shard
        self.digests = digests
        memory = allocate(min(_AT_A_TIME, shard.nbytes) + 2 * CHUNK_BYTES)
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
        shard, size = self._shard, CHUNK_BYTES
        kept = max(self._last - first, 0) if first >= self._first else 0
        if kept:  # the next tensor begins as a rule in the chunk in which the last one ended
            start = (first - self._first) * size
            self._view[: kept * size] = bytes(self._view[start : start + kept * size])
        self._first = self._last = first
        for number in range(first + kept, last):
            begin, end = number * size, min((number + 1) * size, shard.nbytes)
            chunk = self._view[begin - first * size : end - first * size]
            read_exactly(self._descriptor, chunk, begin, shard.file)
            verify_chunks(shard, self.digests, chunk, begin)
        self._last = last


@contextmanager
def _opened_file(folder: CopyFolder, shard: Shard) -> Iterator[_VerifiedFile]:
    digests = read_digests(folder, shard)
    with folder.open(shard.file, shard.nbytes) as (descriptor, _):
        yield _VerifiedFile(descriptor, shard, digests)


def carry_out(folder: CopyFolder, shards: Mapping[int, Shard], moves: Sequence[Move]) -> None:
    """Read parts to where they go.

    Args:
        folder: the copy.
        shards: what the JSON files say of the safetensors files, by source.
        moves: what to read.

    Raises:
        DamagedCopy: a byte is not as it was saved.
        OSError: the file system refused.
    """
    by_source: dict[int, list[Move]] = {}
    for move in moves:
        by_source.setdefault(move.stored.source, []).append(move)
    for source, wanted in sorted(by_source.items()):
        with _opened_file(folder, shards[source]) as file:
            for move in sorted(wanted, key=lambda each: each.stored.entry.begin):
                for block in blocks(move.part, move.stored.part, max(1, _AT_A_TIME // move.itemsize)):
                    _copy(file, move, block)


def _copy(file: _VerifiedFile, move: Move, block: Part) -> None:
    width, stored, target = move.itemsize, move.stored, move.target
    begin = stored.entry.begin + place_in(block, stored.part) * width
    octets = file.read(begin, begin + extent(block, stored.part) * width)
    shape = (*block.shape, width)
    here = [step * width for step in strides_of(stored.part.shape)]
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
    folder: CopyFolder, shards: Mapping[int, Shard], pairs: Sequence[tuple[str, Stored, Stored]]
) -> list[tuple[str, int, int]]:
    """Return which of the pairs of stored parts do not hold the same bytes.

    Chunks with one digest at one place of both files are the same; only others are read.

    Args:
        folder: the copy.
        shards: what the JSON files say of the safetensors files, by source.
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
        with _opened_file(folder, shards[left]) as first, _opened_file(folder, shards[right]) as second:
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
    first, last = here.begin // CHUNK_BYTES, -(-here.end // CHUNK_BYTES)
    unlike = differing_chunks(*(each[first * DIGEST_BYTES : last * DIGEST_BYTES] for each in (one, other)))
    for begin in ((first + number) * CHUNK_BYTES for number in unlike):
        yield max(here.begin, begin), min(here.end, begin + CHUNK_BYTES)
