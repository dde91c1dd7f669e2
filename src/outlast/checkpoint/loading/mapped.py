"""A file of the node's memory tier used where it is, without memory for another copy of it.

Nobody else writes these files, and while ranks load nobody stages. Afterwards the file becomes a buffer
again and is written over, so whatever is still in use by then comes to other pages at the same addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.core.manifest import Shard

_MEMORY = "/dev/shm"
_MAY_MOVE, _TO_PLACE = 1, 2  # MREMAP_MAYMOVE, MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value


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
        """Give what is still in use memory of its own, at the same addresses; return how many bytes that are.

        Raises:
            OSError: there is no memory.
        """
        kept = sorted((begin, end) for begin, end, octets in self._lent.values() if octets() is not None)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        done = 0  # in whole pages; two tensors may share one
        for begin, end in kept:
            first = max(done, begin - begin % mmap.PAGESIZE)
            done = max(first, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
            if first < done:
                _replace(base + first, done - first)
        return sum(end - begin for begin, end in kept)


def _replace(address: int, nbytes: int) -> None:
    """Put copies in the place of mapped pages.

    Pages that a write made private are not enough: they, too, go when the file is cut.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(nbytes)
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = libc.mmap(None, size, access, kind, -1, ctypes.c_long(0))
    if copy == _FAILED:
        raise OSError(ctypes.get_errno(), f"no memory for {nbytes} bytes of what was loaded")
    ctypes.memmove(copy, address, nbytes)
    old, new = ctypes.c_void_p(copy), ctypes.c_void_p(address)
    if libc.mremap(old, size, size, _MAY_MOVE | _TO_PLACE, new) == _FAILED:
        raise OSError(ctypes.get_errno(), f"{nbytes} bytes of what was loaded cannot be put in their place")


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
