"""Reading parts of tensors from the files of several ranks; each chunk is verified before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outlast.checkpoint.content.digest import chunk_digest
from outlast.checkpoint.content.memory import ALIGNMENT, allocate, as_tensor
from outlast.checkpoint.tiers.tier import CopyFolder, read_exactly
from outlast.core.fields import Damage, DamagedCopy
from outlast.core.manifest import Shard, TensorEntry
from outlast.core.reslice import Part, blocks, cover, extent, place_in, strides_of

_BLOCK_BYTES = 16 << 20  # how much of a file is in memory at a time


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

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory as a tensor."""
        return self.octets.view(dtype).view(self.part.shape)


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
    places, size = {}, 0
    for key, (part, itemsize) in wanted.items():
        nbytes = part.numel * itemsize
        places[key] = (size, size + nbytes)
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    octets = as_tensor(allocate(size))
    return {key: Target(wanted[key][0], octets[begin:end]) for key, (begin, end) in places.items()}


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

    def __init__(self, descriptor: int, shard: Shard) -> None:
        self._descriptor = descriptor
        self._shard = shard
        memory = allocate(min(_BLOCK_BYTES, shard.nbytes) + 2 * shard.chunk_bytes)
        self._octets, self._view = as_tensor(memory), memoryview(memory)
        self._first = self._last = 0  # the chunks in memory

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return bytes of the file; valid until the next call.

        Raises:
            DamagedCopy: a chunk in which they lie is not as it was saved.
            OSError: the file system refused.
        """
        size = self._shard.chunk_bytes
        first, last = begin // size, -(-end // size)
        if first < self._first or last > self._last:
            self._load(first, last)
        offset = begin - self._first * size
        return self._octets[offset : offset + end - begin]

    def _load(self, first: int, last: int) -> None:
        shard, size = self._shard, self._shard.chunk_bytes
        kept = max(self._last - first, 0) if first >= self._first else 0
        if kept:  # the next tensor begins as a rule in the chunk in which the last one ended
            start = (first - self._first) * size
            self._view[: kept * size] = bytes(self._view[start : start + kept * size])
        self._first = self._last = first
        for number in range(first + kept, last):
            begin, end = number * size, min((number + 1) * size, shard.nbytes)
            chunk = self._view[begin - first * size : end - first * size]
            read_exactly(self._descriptor, chunk, begin, shard.file)
            found = chunk_digest(chunk)
            if found != shard.digests[number]:
                expected = f"digest {shard.digests[number]} of bytes {begin} to {end}"
                raise DamagedCopy(Damage(shard.file, expected, found))
        self._last = last


@contextmanager
def _opened(folder: CopyFolder, shard: Shard) -> Iterator[_VerifiedFile]:
    with folder.open(shard.file, shard.nbytes) as (descriptor, _):
        yield _VerifiedFile(descriptor, shard)


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
        with _opened(folder, shards[source]) as file:
            for move in sorted(wanted, key=lambda each: each.stored.entry.begin):
                for block in blocks(move.part, move.stored.part, max(1, _BLOCK_BYTES // move.itemsize)):
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
        with _opened(folder, shards[left]) as first, _opened(folder, shards[right]) as second:
            for key, here, there in sorted(entries, key=lambda each: each[1].begin):
                for begin, end in _doubtful(shards[left], shards[right], here, there):
                    moved = there.begin - here.begin
                    if not torch.equal(first.read(begin, end), second.read(begin + moved, end + moved)):
                        found.append((key, left, right))
                        break
    return found


def _doubtful(one: Shard, other: Shard, here: TensorEntry, there: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the ranges of ``one`` in which a tensor is not known to be the same in both."""
    size = one.chunk_bytes
    if here.begin != there.begin or other.chunk_bytes != size:
        for begin in range(here.begin, here.end, _BLOCK_BYTES):
            yield begin, min(begin + _BLOCK_BYTES, here.end)
        return
    for number in range(here.begin // size, -(-here.end // size)):
        if one.digests[number] != other.digests[number]:
            yield max(here.begin, number * size), min(here.end, (number + 1) * size)
