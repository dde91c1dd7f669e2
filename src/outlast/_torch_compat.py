"""Every private or version-dependent touch of torch; torch is imported when a function is called."""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, dtype
    from torch.distributed.distributed_c10d import ProcessGroup, Store
    from torch.nn import Module

_GLOO_PATIENCE = 1.0


def default_store() -> Store | None:
    """Return the store of the default process group; None when there is no group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store: Store = _get_default_store()
    return store


def own_store() -> Store | None:
    """Return the store of the default process group over a connection of one's own; None: there is no group.

    A client waits with its lock held, so who waits on another thread needs one that nobody else uses. Before
    torch 2.5 there is no way to one: others then wait up to a second for the lock.
    """
    store = default_store()
    return store.clone() if store is not None and hasattr(store, "clone") else store


@functools.cache
def let_gloo_finish_at_exit() -> None:
    """See to it that gloo's threads have let go of the last collective before the interpreter ends.

    To let go of a tensor they take the interpreter's lock; one that asks for it while the interpreter ends is
    unwound, and the process aborts (pytorch/pytorch#190489): SIGABRT for a rank that is done.
    """
    atexit.register(_let_gloo_finish)


def _let_gloo_finish() -> None:
    quiet, end = 0, time.monotonic() + _GLOO_PATIENCE
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.001)  # lets go of the lock
        quiet = 0 if any(map(_runs_gloo, Path("/proc/self/task").glob("*/stat"))) else quiet + 1


def _runs_gloo(stat: Path) -> bool:
    try:
        found = stat.read_text()
    except OSError:  # the thread has ended
        return False
    return "(pt_gloo_runloop) R" in found


def gpu_sleep(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many clock cycles of the device; returns at once."""
    import torch

    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def takes_plainly(module: Module) -> bool:
    """Say whether a module and all in it give and take their states as torch's own do, without hooks."""
    methods = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
    return all(
        all(getattr(type(one), name).__module__.startswith("torch.nn.") for name in methods)
        and not vars(one).keys() & set(methods)
        and not (one._state_dict_hooks or one._state_dict_pre_hooks or one._load_state_dict_pre_hooks)
        for one in module.modules()
    )


def norms_of(tensors: Sequence[Tensor], kind: dtype | None) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor, still on its device; sums are made in ``kind``, None: in its own."""
    import torch

    found: Sequence[Tensor] = torch._foreach_norm(tensors, 2, dtype=kind)  # type: ignore[arg-type]
    return found


def groups_by_backend() -> dict[str, list[ProcessGroup]]:
    """Return this process's groups by backend; one with several is under each of them."""
    import torch.distributed as dist

    found: dict[str, list[ProcessGroup]] = {}
    if not dist.is_available() or not dist.is_initialized():
        return found
    from torch.distributed.distributed_c10d import _world

    for group in list(_world.pg_map):
        names = {group._get_backend(device).name() for device in group._device_types}
        for name in sorted(names):
            found.setdefault(name.lower(), []).append(group)
    return found


def forget_half_made_groups() -> None:
    """Let the next default group have the name that it has in a new process.

    Groups are named by a count that only the end of the default group resets. One whose making failed has
    used up a name, and a rank whose names differ from the others' never meets them.
    """
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized():
        return
    from torch._C._distributed_c10d import _unregister_all_process_groups
    from torch.distributed.distributed_c10d import _world

    _world.pg_map.clear()
    _world.pg_names.clear()
    _world.pg_group_ranks.clear()
    _world.pg_backend_config.clear()
    _world.pg_to_tag.clear()
    _world.tags_to_pg.clear()
    _world.pg_coalesce_state.clear()
    _unregister_all_process_groups()
    _world.group_count = 0


def abort_nccl(group: ProcessGroup) -> None:
    """Abort the communicators of a group's NCCL backend; blocks as long as NCCL does."""
    import torch

    backend = group._get_backend(torch.device("cuda"))
    getattr(backend, "abort" if hasattr(backend, "abort") else "_abort")()  # _abort until torch 2.5


def device_uuid(index: int) -> str:
    """Return a CUDA device's UUID; its name and index where torch does not tell it."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    found = getattr(properties, "uuid", None)
    return f"GPU-{found}" if found is not None else f"{properties.name} number {index}"


def persistent_buffers(module: Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Return where a module and all in it hold the buffers that are part of their states, by name."""
    return [
        (one._buffers, name)
        for one in module.modules()
        for name, buffer in one._buffers.items()
        if buffer is not None and name not in one._non_persistent_buffers_set
    ]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of the same forms, in few kernels where torch can."""
    import torch

    if targets:
        torch._foreach_copy_(targets, sources)
