"""Host memory for whole shards."""

from __future__ import annotations

import mmap

import torch


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


def as_tensor(memory: mmap.mmap) -> torch.Tensor:
    """Return the memory as bytes in a tensor that shares and keeps it."""
    return torch.frombuffer(memory, dtype=torch.uint8)
