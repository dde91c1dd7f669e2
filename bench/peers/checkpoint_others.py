"""NVRx, torchsnapshot and lm-resiliency for bench/checkpoint.py; each runs under an interpreter that has it.

NVRx copies only from GPUs; on a host without a GPU it would write the live tensors. Here a copy into
preallocated shared memory replaces the copy from the GPU, and counts as the time of the call.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from peers.checkpoint_raw import State, sync
from peers.checkpoint_systems import PATIENCE, System

if not torch.cuda.is_available():
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


class _Kept:
    """A copy of the state in shared memory, made once and filled again."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.tree = _mapped(state.tree(), lambda one: torch.empty_like(one).share_memory_())

    def fill(self) -> dict[str, Any]:
        """Copy the state; return the copy."""
        _fill(self.tree, self._state.tree())
        return self.tree


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value.detach())
    if isinstance(value, dict):
        return type(value)((key, _mapped(each, change)) for key, each in value.items())
    return [_mapped(each, change) for each in value] if isinstance(value, list) else value


def _fill(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, dict):
        for key, each in target.items():
            _fill(each, source[key])


class NvrxAsync(System):
    """NVRx's persistent writer process, in the format of torch DCP; it syncs its files, not the metadata."""

    note = "NVRx has no copy from the CPU: the script's counts; the metadata is synced by the script"

    def start(self) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        self._queue = AsyncCallsQueue(persistent=True)
        self._kept = _Kept(self.state)

    def save(self, step: int) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )

        content = {f"rank{self.rank}": self._kept.fill()}
        self.place(step).mkdir(exist_ok=True)
        writer = FileSystemWriterAsync(self.place(step), thread_count=1)
        planned = save_state_dict_async_plan(_flat(content), writer, None)
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = [lambda: save_state_dict_async_finalize(*planned)]
        self._queue.schedule_async_request(AsyncRequest(function, arguments, finalize, {}, preload))

    def finish(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._queue.get_num_unfinalized_calls() and time.monotonic() < deadline:
            self._queue.maybe_finalize_async_calls(blocking=False)
            time.sleep(0.002)
        if self.rank == 0:
            sync([self.place(step) / ".metadata"])

    def load(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(_flat(self.own()), checkpoint_id=self.place(step))

    def close(self) -> None:
        self._queue.close()


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(content)[0]


class NvrxLocal(System):
    """NVRx's LocalCheckpointManager on the disk, asynchronous; the script syncs, NVRx does not."""

    note = "NVRx has no copy from the CPU: the script's counts; NVRx does not sync: the script does"

    def start(self) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            LocalCheckpointManager,
        )

        self._queue = AsyncCallsQueue(persistent=False)
        self._kept = _Kept(self.state)
        self._manager = LocalCheckpointManager(self.folder / "local")

    def save(self, step: int) -> None:
        from peers.checkpoint_nvrx_state import OnHost

        request = self._manager.save(OnHost(self._kept.fill()), step, is_async=True)
        self._queue.schedule_async_request(request)

    def finish(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._queue.get_num_unfinalized_calls() and time.monotonic() < deadline:
            self._queue.maybe_finalize_async_calls(blocking=False)
            time.sleep(0.002)
        sync(self.files(step))

    def load(self, step: int) -> None:
        if self._manager.find_latest() != step:
            raise SystemExit(f"NVRx finds another step than {step}")
        content = self._manager.load()[0].state_dict
        for name, holder in self.state.holders().items():
            holder.load_state_dict(content[name])

    def files(self, step: int) -> list[Path]:
        return list((self.folder / "local").rglob(f"iter_{step:07d}_{self.rank}_local.pt"))

    def forget(self, step: int) -> None:
        """Leave it to NVRx."""

    def close(self) -> None:
        self._queue.close()


class Snapshot(System):
    """torchsnapshot.Snapshot.async_take; the script syncs, torchsnapshot does not."""

    note = "torchsnapshot does not sync: the script does, within the total"

    def save(self, step: int) -> None:
        import torchsnapshot

        self._pending = torchsnapshot.Snapshot.async_take(str(self.place(step)), self.state.holders())

    def finish(self, step: int) -> None:
        self._snapshot = self._pending.wait()
        sync([path for path in self.place(step).rglob("*") if path.is_file()])

    def load(self, step: int) -> None:  # noqa: ARG002 - the snapshot knows
        self._snapshot.restore(self.state.holders())


class Resiliency(System):
    """lm-resiliency's in-memory manager, flushed to its node-local disk after each save; it syncs."""

    note = "loads from disk by its own DiskSerializer; load() prefers the copy in its process"

    def start(self) -> None:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        config = InMemoryCkptConfig(
            disk_flush_interval=0,
            disk_folder=str(self.folder / "local"),
            run_id="bench",
            verify_integrity=True,
            pin_memory=False,
        )
        self._manager = InMemoryCheckpointManager(config)

    def save(self, step: int) -> None:
        self._manager.save(self.state.tree(), step)

    def fence(self) -> None:
        self._manager.maybe_wait()

    def finish(self, step: int) -> None:
        self._manager.flush_to_disk(step)
        self._manager._disk.wait()

    def load(self, step: int) -> None:
        from lm_resiliency.checkpointing.state_dict import unflatten

        found = self._manager._disk.load(step)
        if found is None:
            raise SystemExit(f"lm-resiliency does not load step {step}")
        self._put(unflatten(*found[:2]))

    def load_from_memory(self) -> bool:
        found = self._manager.load()
        if found is not None:
            self._put(found[0])
        return found is not None

    def _put(self, content: dict[str, Any]) -> None:
        for name, holder in self.state.holders().items():
            holder.load_state_dict(content[name])

    def files(self, step: int) -> list[Path]:
        return list((self.folder / "local").rglob(f"step-{step}/rank-{self.rank}.pt"))

    def forget(self, step: int) -> None:
        for path in self.files(step):
            path.unlink()

    def close(self) -> None:
        self._manager.close()


SYSTEMS: dict[str, type[System]] = {
    "nvrx-async": NvrxAsync,
    "nvrx-local": NvrxLocal,
    "torchsnapshot": Snapshot,
    "lm-resiliency": Resiliency,
}
