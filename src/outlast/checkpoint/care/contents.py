"""What two copies of the same step hold, compared byte by byte; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xxhash import xxh3_64

from outlast.checkpoint.care.listing import Item
from outlast.checkpoint.content.digest import CHUNK_BYTES
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.tiers.inventory import read_manifest, read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder, read_exactly
from outlast.core.manifest import Manifest, TensorEntry


def differences(one: Item, other: Item) -> Iterator[str]:
    """Yield what differs between two copies, a phrase each; random states aside.

    Raises:
        DamagedCopy: a file is not as it was committed.
        OSError: the file system refused.
    """
    with one.tier.open(one.name) as left, other.tier.open(other.name) as right:
        mine, others = read_manifest(left, one.name)[0], read_manifest(right, other.name)[0]
        if mine.world_size != others.world_size:
            yield f"{mine.world_size} and {others.world_size} ranks"
            return
        for rank in range(mine.world_size):
            yield from _of_rank(rank, (left, right), (mine, others))


def _of_rank(rank: int, folders: tuple[CopyFolder, ...], manifests: tuple[Manifest, ...]) -> Iterator[str]:
    files = [read_rank_file(folder, one, rank) for folder, one in zip(folders, manifests, strict=True)]
    left, right = files
    unlike = sorted(left.tensors.keys() ^ right.tensors.keys())
    if unlike:
        yield f"rank {rank}: only one has {unlike[0]}"
    for key in sorted(left.tensors.keys() & right.tensors.keys()):
        entries = (left.tensors[key], right.tensors[key])
        found = [_digest(folder, file, key) for folder, file in zip(folders, files, strict=True)]
        if _form(entries[0]) != _form(entries[1]):
            yield f"rank {rank}: {key} is of another type, shape or place"
        elif found[0] != found[1]:
            yield f"rank {rank}: {key} (digest {found[0]}, in the replay {found[1]})"
    states = [file.values for file in files]
    names = sorted(name for name in states[0].keys() | states[1].keys() if _unequal(states, name))
    if names:
        yield f"rank {rank}: what is no tensor in {', '.join(names)}"


def _unequal(states: list[dict[str, Any]], name: str) -> bool:
    return bool(states[0].get(name) != states[1].get(name))


def _form(entry: TensorEntry) -> tuple[Any, ...]:
    return entry.dtype, entry.shape, entry.global_shape, entry.offsets


def _digest(folder: CopyFolder, rank_file: RankFile, key: str) -> str:
    """Return the digest of a tensor's bytes, read in pieces."""
    file, entry = next((one.file, one.tensors[key]) for one in rank_file.shards if key in one.tensors)
    state = xxh3_64()
    piece = memoryview(bytearray(8 * CHUNK_BYTES))
    with folder.open(file) as (descriptor, _):
        for begin in range(entry.begin, entry.end, len(piece)):
            part = piece[: min(len(piece), entry.end - begin)]
            read_exactly(descriptor, part, begin, file)
            state.update(part)
    found: str = state.hexdigest()
    return found
