"""What all ranks of a world saved in a copy: their JSON files, and where each tensor's parts are."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from outlast.checkpoint.content.typed_json import dtype_of
from outlast.checkpoint.loading.pieces import Stored, replicas
from outlast.checkpoint.tiers.inventory import read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.core.fields import Damage, DamagedCopy
from outlast.core.manifest import Manifest, Shard, TensorEntry


class World:
    """The saved world; its JSON files are read and verified, none of its tensors is.

    Args:
        folder: the copy.
        manifest: its manifest.

    Raises:
        DamagedCopy: a byte is not as it was committed, or the folder lacks a rank's file.
        CheckpointMismatch: a newer version wrote it.
        OSError: the file system refused.
    """

    def __init__(self, folder: CopyFolder, manifest: Manifest) -> None:
        self.manifest = manifest
        self.shared: dict[int, Shard] = {}
        ranks = range(manifest.world_size)
        self.files = {rank: read_rank_file(folder, manifest, rank, self.shared) for rank in ranks}
        self.stored: dict[str, list[Stored]] = {}
        taken: set[tuple[str, int]] = set()
        for rank, file in self.files.items():
            for key, entry in file.tensors.items():
                _require_size(file.shard.file, key, entry)
                source = self.source(rank, key)
                if (key, source) not in taken:
                    taken.add((key, source))
                    self.stored.setdefault(key, []).append(Stored(source, entry))

    def source(self, rank: int, key: str) -> int:
        """Return the number, as in :attr:`shards`, of the file in which a rank has a tensor."""
        shared = self.files[rank].borrowed.get(key) if rank in self.files else None
        return rank if shared is None else self.manifest.world_size + shared

    @property
    def shards(self) -> dict[int, Shard]:
        """What each rank says of its safetensors file; behind them the files that all ranks share."""
        first = self.manifest.world_size
        shared = {first + number: shard for number, shard in self.shared.items()}
        return {rank: file.shard for rank, file in self.files.items()} | shared

    def named(self, source: int) -> str:
        """Return whose file of :attr:`shards` it is, for messages."""
        first = self.manifest.world_size
        return (
            f"rank {source}" if source < first else f"the ranks that share {self.shared[source - first].file}"
        )

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self.stored[key][0].entry.global_shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return dtype_of(self.stored[key][0].entry.dtype)

    def nbytes(self, key: str) -> int:
        """Return the bytes of a whole tensor."""
        return math.prod(self.shape(key)) * self.dtype(key).itemsize

    def in_parts(self, key: str) -> bool:
        """Say whether any rank has less than the whole of a tensor."""
        return any(each.entry.shape != each.entry.global_shape for each in self.stored[key])

    def disagreement(self, key: str) -> str:
        """Return how ranks disagree on the form of a tensor; empty when they do not."""
        first, *others = self.stored[key]
        for other in others:
            if form_of(other.entry) != form_of(first.entry):
                return (
                    f"{key} is {form_of(first.entry)} on {self.named(first.source)},"
                    f" {form_of(other.entry)} on {self.named(other.source)}"
                )
        return ""

    def pairs(self, keys: Collection[str], reader: int, readers: int) -> list[tuple[str, Stored, Stored]]:
        """Return which stored parts one reader is to compare; together the readers compare all.

        Args:
            keys: of tensors of which all that is stored at one place must be the same.
            reader: which reader.
            readers: how many there are.
        """
        found = []
        for key in keys:
            for first, *others in replicas(self.stored[key]).values():
                alike = [one for one in others if form_of(one.entry) == form_of(first.entry)]
                found += [(key, first, other) for other in alike if other.source % readers == reader]
        return found


def form_of(entry: TensorEntry) -> str:
    """Return type and shape of a whole tensor, for messages and for comparing."""
    return f"{entry.dtype}{list(entry.global_shape)}"


def _require_size(source: str, key: str, entry: TensorEntry) -> None:
    expected = math.prod(entry.shape) * dtype_of(entry.dtype, source).itemsize
    if expected != entry.nbytes:
        raise DamagedCopy(Damage(source, f"{key} of {expected} bytes", f"{entry.nbytes} bytes"))
