"""Reading one copy: what it says of itself, then a rank's bytes, each verified before it is believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outlast.checkpoint.digest import chunk_digest, combined, file_digest
from outlast.checkpoint.format import RankFile, parse_rank_file
from outlast.checkpoint.inventory import evidence, read_manifest
from outlast.checkpoint.memory import allocate, as_tensor
from outlast.checkpoint.tier import CopyFolder, read_exactly
from outlast.checkpoint.typed_json import Decoder, dtype_of, references
from outlast.core.fields import Damage, DamagedCopy
from outlast.core.manifest import MANIFEST, Identity, Manifest, TensorEntry, rank_files

_ALIGNMENT = 64  # that of torch's own allocator; kernels may round differently on other addresses


@dataclass(frozen=True)
class Room:
    """Memory for one tensor, seen by torch and seen by a reader of files."""

    octets: torch.Tensor
    view: memoryview


@dataclass(frozen=True)
class Opened:
    """A rank's part of a copy, its values built but its tensors not read yet.

    Args:
        manifest: of the copy.
        rank_file: this rank's JSON file.
        saved: each state object's content, by name; tensors are still empty memory.
        random: the random states.
        cursor: the data cursor.
        memory: where the tensors' bytes go, by key.
    """

    manifest: Manifest
    rank_file: RankFile
    saved: dict[str, Any]
    random: dict[str, Any]
    cursor: Any
    memory: dict[str, Room]


def open_rank(folder: CopyFolder, name: str, commit: str, identity: Identity) -> Opened:
    """Read and verify all of a rank's part but the tensors.

    Args:
        folder: the copy.
        name: its name.
        commit: the manifest digest that the ranks agreed on.
        identity: this rank.

    Raises:
        DamagedCopy: a byte is not as it was committed.
        CheckpointMismatch: a newer version wrote it.
        OSError: the file system refused.
    """
    manifest, digest = read_manifest(folder, name)
    require_same(manifest, digest, commit)
    tensors, document = rank_files(identity.rank, manifest.world_size)
    entry = manifest.file(document)
    content = folder.read(document, entry.nbytes)
    _require_digest(document, entry.digest, file_digest(content))
    writer = Identity(manifest.run_id, manifest.generation, identity.rank, manifest.world_size)
    rank_file = parse_rank_file(content, manifest.step, writer)
    entry = manifest.file(tensors)
    _require_digest(f"{document}, digests of {tensors}", entry.digest, combined(rank_file.shard.digests))
    if (rank_file.shard.file, rank_file.shard.nbytes) != (tensors, entry.nbytes):
        raise DamagedCopy(Damage(document, f"{tensors} of {entry.nbytes} bytes", rank_file.shard.file))
    memory = _reserve(rank_file)
    live = {key: _typed(memory[key].octets, each, document) for key, each in rank_file.shard.tensors.items()}
    decoder = Decoder(document, live)
    saved = {key: decoder.decode(value) for key, value in rank_file.values.items()}
    random, cursor = decoder.decode(rank_file.random), Decoder(MANIFEST, {}).decode(manifest.cursor)
    return Opened(manifest, rank_file, saved, random, cursor, memory)


def require_same(manifest: Manifest, digest: str, commit: str) -> None:
    """Check that a copy is the one that the ranks agreed on.

    Raises:
        DamagedCopy: it is another one.
    """
    found = evidence(manifest, digest)
    if found != commit:
        raise DamagedCopy(Damage(MANIFEST, f"{commit}, as all ranks saw it", found))


def _require_digest(what: str, expected: str, found: str) -> None:
    if expected != found:
        raise DamagedCopy(Damage(what, f"digest {expected}", found))


def _reserve(rank_file: RankFile) -> dict[str, Room]:
    """Return memory for each tensor, by key.

    The tensors of one state object lie in one block, which is freed with the last of them: a
    model copies its out, an optimizer keeps them.
    """
    tensors = rank_file.shard.tensors
    found: dict[str, Room] = {}
    groups = [*(references(value) for value in rank_file.values.values()), set(tensors)]
    for group in groups:
        wanted = [key for key in tensors if key in group and key not in found]
        places, size = {}, 0
        for key in wanted:
            places[key] = size
            size += -(-tensors[key].nbytes // _ALIGNMENT) * _ALIGNMENT
        block = allocate(size)
        octets, view = as_tensor(block), memoryview(block)
        for key, begin in places.items():
            end = begin + tensors[key].nbytes
            found[key] = Room(octets[begin:end], view[begin:end])
    return found


def _typed(octets: torch.Tensor, entry: TensorEntry, source: str) -> torch.Tensor:
    try:
        return octets.view(dtype_of(entry.dtype, source)).view(entry.shape)
    except RuntimeError as error:
        raise DamagedCopy(Damage(source, f"a tensor of {entry.nbytes} bytes", str(error))) from error


def read_tensors(folder: CopyFolder, opened: Opened) -> None:
    """Read a rank's safetensors file, every byte of it, and verify each chunk before it is copied.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
        OSError: the file system refused.
    """
    shard = opened.rank_file.shard
    parts = sorted((entry.begin, entry.end, opened.memory[key].view) for key, entry in shard.tensors.items())
    scratch = memoryview(allocate(shard.chunk_bytes))
    place = 0
    with folder.open(shard.file, shard.nbytes) as (descriptor, _):
        for number, digest in enumerate(shard.digests):
            begin = number * shard.chunk_bytes
            end = min(begin + shard.chunk_bytes, shard.nbytes)
            chunk = scratch[: end - begin]
            read_exactly(descriptor, chunk, begin, shard.file)
            found = chunk_digest(chunk)
            if found != digest:
                raise DamagedCopy(Damage(shard.file, f"digest {digest} of bytes {begin} to {end}", found))
            place = _deal(chunk, begin, parts, place)


def _deal(chunk: memoryview, begin: int, parts: list[tuple[int, int, memoryview]], place: int) -> int:
    """Copy a chunk to the tensors that lie in it, and return the place of the first one not complete."""
    end = begin + len(chunk)
    while place < len(parts):
        first, last, target = parts[place]
        if first >= end:
            break
        low, high = max(first, begin), min(last, end)
        target[low - first : high - first] = chunk[low - begin : high - begin]
        if last > end:
            break
        place += 1
    return place
