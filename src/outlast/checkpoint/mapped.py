"""A file of the node's memory tier used where it is, without memory for another copy of it.

Nobody else writes these files, and while ranks load nobody stages. Afterwards the file becomes a buffer
again and is written over, so whatever is still in use by then is made private, page by page.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch

from outlast.checkpoint.tier import CopyFolder
from outlast.core.manifest import Shard

_MEMORY = "/dev/shm"


class MappedFile:
    """The content of a file, of which parts are lent as tensors.

    Args:
        memory: a private mapping: what is written to a tensor does not come to the file.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._lent: dict[int, tuple[int, int, weakref.ref[memoryview]]] = {}

    @property
    def content(self) -> memoryview:
        """All bytes of the file."""
        return memoryview(self._memory)

    def lend(self, begin: int, end: int) -> torch.Tensor:
        """Return a range as bytes in a tensor."""
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        octets = self.content[begin:end]
        found = torch.frombuffer(octets, dtype=torch.uint8)
        self._lent[found.data_ptr()] = (begin, end, weakref.ref(octets))  # lives as long as the storage does
        return found

    def lends(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is one that was lent."""
        return tensor.untyped_storage().data_ptr() in self._lent

    def part(self) -> int:
        """Make what is still in use private, and return how many bytes that are."""
        kept = [(begin, end) for begin, end, octets in self._lent.values() if octets() is not None]
        for begin, end in kept:
            for place in range(begin - begin % mmap.PAGESIZE, end, mmap.PAGESIZE):
                self._memory[place] = self._memory[place]
        return sum(end - begin for begin, end in kept)


def map_file(folder: CopyFolder, shard: Shard) -> MappedFile | None:
    """Map a rank's safetensors file; None when it must be read.

    Args:
        folder: a copy in the node's memory tier.
        shard: what the JSON file says of the file.

    Raises:
        DamagedCopy: the file is missing, no regular file, or of another size.
        OSError: the file system refused.
    """
    with folder.open(shard.file, shard.nbytes) as (descriptor, _):
        try:
            if os.fstat(descriptor).st_dev != os.stat(_MEMORY).st_dev:
                return None
            return MappedFile(mmap.mmap(descriptor, shard.nbytes, flags=mmap.MAP_PRIVATE))
        except (OSError, ValueError):
            return None
