"""Host memory for whole shards."""

from __future__ import annotations

import ctypes
import mmap

import torch

ALIGNMENT = 64  # bytes; that of torch's own allocator: kernels may round differently on other addresses
_HUGE_BYTES = 2 << 20


def allocate(nbytes: int) -> mmap.mmap:
    """Return private zeroed memory of at least one byte, in huge pages where the kernel grants them.

    First writes into ordinary pages run at a tenth of the memory's speed; for a load, which
    always writes into new memory, that would be most of its time.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return memory  # a kernel without huge pages: slower, nothing else
    return memory


def aligned(nbytes: int) -> tuple[memoryview, int]:
    """Return memory that begins at a huge page, and its address, which is valid as long as the memory is.

    Past the page cache a disk reads into huge pages almost twice as fast as into ordinary ones.
    """
    memory = allocate(nbytes + _HUGE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    offset = -address % _HUGE_BYTES
    return memoryview(memory)[offset : offset + nbytes], address + offset


def as_tensor(memory: mmap.mmap) -> torch.Tensor:
    """Return the memory as bytes in a tensor that shares and keeps it."""
    return torch.frombuffer(memory, dtype=torch.uint8)
