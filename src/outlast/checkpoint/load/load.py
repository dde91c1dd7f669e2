"""Reading one copy: what it says of itself, then a rank's bytes, each verified before it is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outlast.checkpoint.content.format import ALIGNMENT, allocate, as_tensor
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.content.state import tensors_in
from outlast.checkpoint.content.typed_json import Decoder, dtype_of, references
from outlast.checkpoint.load.in_place import (
    FromFile,
    FromMapping,
    InPlaceLoad,
    MappedFile,
    map_file,
    places_for,
)
from outlast.checkpoint.load.reading import HeldFile, Room, hold, read_verified, verify_mapped
from outlast.checkpoint.policy.manifest import MANIFEST, Identity, Manifest, Shard, TensorEntry, rank_files
from outlast.checkpoint.tiers.inventory import evidence, read_manifest, read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.fields import Damage, DamagedCopy


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
        mapped: the files that lend them where they already are, in the node's memory tier; empty: none does.
    """

    manifest: Manifest
    rank_file: RankFile
    saved: dict[str, Any]
    random: dict[str, Any]
    cursor: Any
    memory: dict[str, torch.Tensor]
    mapped: tuple[MappedFile, ...]


def open_rank(folder: CopyFolder, name: str, commit: str, identity: Identity, near: bool = False) -> Opened:
    """Read and verify all of a rank's part but the tensors.

    Args:
        folder: the copy.
        name: its name.
        commit: the manifest digest that the ranks agreed on.
        identity: this rank.
        near: the copy is in the memory tier of this node: its file is used where it is.

    Raises:
        DamagedCopy: a byte is not as it was committed.
        CheckpointMismatch: a newer version wrote it.
        OSError: the file system refused.
    """
    manifest, digest = read_manifest(folder, name)
    require_same(manifest, digest, commit)
    document = rank_files(identity.rank, manifest.world_size)[1]
    rank_file = read_rank_file(folder, manifest, identity.rank)
    mapped = _map(folder, rank_file) if near and _aligned(rank_file) else ()
    memory = _lent(mapped, rank_file) if mapped else _reserve(rank_file)
    live = {key: _typed(memory[key], each, document) for key, each in rank_file.tensors.items()}
    decoder = Decoder(document, live)
    saved = {key: decoder.decode(value) for key, value in rank_file.values.items()}
    random, cursor = decoder.decode(rank_file.random), Decoder(MANIFEST, {}).decode(manifest.cursor)
    return Opened(manifest, rank_file, saved, random, cursor, memory, mapped)


def require_same(manifest: Manifest, digest: str, commit: str) -> None:
    """Check that a copy is the one that the ranks agreed on.

    Raises:
        DamagedCopy: it is another one.
    """
    found = evidence(manifest, digest)
    if found != commit:
        raise DamagedCopy(Damage(MANIFEST, f"{commit}, as all ranks saw it", found))


def _aligned(rank_file: RankFile) -> bool:
    """Say whether every tensor begins at a multiple of its elements' size; torch wants that."""
    return all(
        not entry.nbytes or entry.begin % (entry.nbytes // max(1, math.prod(entry.shape))) == 0
        for entry in rank_file.tensors.values()
    )


def _map(folder: CopyFolder, rank_file: RankFile) -> tuple[MappedFile, ...]:
    """Map all files of a rank; nothing is returned where one of them must be read."""
    found = [map_file(folder, shard) for shard in rank_file.shards]
    return tuple(one for one in found if one is not None) if None not in found else ()


def _lent(mapped: tuple[MappedFile, ...], rank_file: RankFile) -> dict[str, torch.Tensor]:
    return {
        key: file.lend(entry.begin, entry.end)
        for file, shard in zip(mapped, rank_file.shards, strict=True)
        for key, entry in shard.tensors.items()
    }


def _reserve(rank_file: RankFile) -> dict[str, torch.Tensor]:
    """Return memory for each tensor, by key.

    The tensors of one state object lie in one block, which is freed with the last of them: a
    model copies its out, an optimizer keeps them.
    """
    tensors = rank_file.tensors
    found: dict[str, torch.Tensor] = {}
    groups = [*(references(value) for value in rank_file.values.values()), set(tensors)]
    for group in groups:
        wanted = [key for key in tensors if key in group and key not in found]
        places, size = {}, 0
        for key in wanted:
            places[key] = size
            size += -(-tensors[key].nbytes // ALIGNMENT) * ALIGNMENT
        octets = as_tensor(allocate(size))
        for key, begin in places.items():
            found[key] = octets[begin : begin + tensors[key].nbytes]
    return found


def _typed(octets: torch.Tensor, entry: TensorEntry, source: str) -> torch.Tensor:
    try:
        return octets.view(dtype_of(entry.dtype, source)).view(entry.shape)
    except RuntimeError as error:
        raise DamagedCopy(Damage(source, f"a tensor of {entry.nbytes} bytes", str(error))) from error


def read_tensors(folder: CopyFolder, opened: Opened, state: Mapping[str, object]) -> InPlaceLoad | None:
    """Verify every byte of a rank's safetensors files, and read them but for what is still to land.

    Args:
        folder: the copy.
        opened: what was read of it before.
        state: live objects whose tensors may be written to when it lands; they stay untouched here.

    Returns:
        What brings the rest to the live objects; None when nothing is left.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
        OSError: the file system refused.
    """
    shards, memory = opened.rank_file.shards, opened.memory
    if opened.mapped:
        for shard, file in zip(shards, opened.mapped, strict=True):
            verify_mapped(shard, file.content)
        return FromMapping(state, opened.saved, opened.mapped)
    places = places_for(state, opened.saved)
    straight = {one.data_ptr(): places[id(one)] for _, one in tensors_in(opened.saved) if id(one) in places}
    waiting: list[tuple[HeldFile, list[Room]]] = []
    landing: dict[int, torch.Tensor] = {}
    for shard in shards:
        addresses = {key: memory[key].data_ptr() for key in shard.tensors}
        live = {key: straight[at].data_ptr() for key, at in addresses.items() if at in straight}
        held = hold(folder, shard) if live else None
        if held is None:
            read_verified(folder, shard, _rooms(shard, addresses))
            continue
        held.verify(_rooms(shard, {key: at for key, at in addresses.items() if at not in straight}))
        waiting.append((held, _rooms(shard, live)))
        landing |= {addresses[key]: straight[addresses[key]] for key in live}
    if not waiting:
        return None
    stands = {id(one) for _, one in tensors_in(opened.saved) if one.data_ptr() in landing}
    return FromFile(opened.saved, {at: one for at, one in places.items() if at in stands}, waiting)


def _rooms(shard: Shard, addresses: Mapping[str, int]) -> list[Room]:
    entries = shard.tensors
    return [Room(entries[key].begin, entries[key].end, address) for key, address in addresses.items()]
