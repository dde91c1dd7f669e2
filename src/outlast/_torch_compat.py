"""Every private or version-dependent touch of torch; torch is imported when a function is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def default_store() -> Store | None:
    """Return the store of the default process group; None when there is no group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store: Store = _get_default_store()
    return store


def gpu_sleep(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many clock cycles of the device; returns at once."""
    import torch

    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
