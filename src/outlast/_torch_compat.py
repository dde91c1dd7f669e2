"""Every private or version-dependent touch of torch; torch is imported when a function is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_CYCLES_PER_SECOND = 2_000_000_000  # above the clock rate of any GPU so far: a sleep is never too short


def default_store() -> Store | None:
    """Return the store of the default process group; None when there is no group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store: Store = _get_default_store()
    return store


def gpu_sleep(seconds: float) -> None:
    """Keep the current CUDA stream busy for at least that long; returns at once."""
    import torch

    torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
