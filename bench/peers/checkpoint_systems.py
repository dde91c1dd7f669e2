"""outlast, torch.save and torch DCP with one interface to save and load, for bench/checkpoint.py."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from peers.checkpoint_raw import State, sync

PATIENCE = 120.0


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class System:
    """One system; ranks call the same methods in the same order.

    Args:
        state: this rank's.
        folder: of all ranks.
    """

    blocking = False  # nothing goes on after save()
    replicas = False  # all ranks hold the same
    note = ""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def start(self) -> None:
        """Prepare the job, once, before training."""

    def save(self, step: int) -> None:
        """Save; return when training may continue."""

    def fence(self) -> None:
        """Wait until the state may change."""

    def finish(self, step: int) -> None:
        """Wait until a step is on disk, and synced."""

    def load(self, step: int) -> None:
        """Load a step from disk into the live objects."""

    def load_from_memory(self) -> bool:
        """Load the newest state from host memory; False: it cannot."""
        return False

    def files(self, step: int) -> list[Path]:
        """Return the files of a step that this rank reads or writes."""
        return [path for path in self.place(step).rglob("*") if path.is_file()] if self.rank == 0 else []

    def place(self, step: int) -> Path:
        """Return the path of a step."""
        return self.folder / f"step-{step}"

    def forget(self, step: int) -> None:
        """Remove a step."""
        if self.rank == 0:
            shutil.rmtree(self.place(step), ignore_errors=True)

    def close(self) -> None:
        """End what was started."""

    def written(self, step: int) -> dict[str, int]:
        """Return the bytes of a step, and of buffers, by place."""
        return {"disk": _nbytes(self.place(step))}

    def own(self) -> dict[str, Any]:
        """Return the state under keys that no other rank has."""
        return {f"rank{self.rank}": self.state.tree()}


class Outlast(System):
    """Asynchronous saving through the memory tier, with a checkpoint writer."""

    staging = "eager"
    once = True

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        from outlast.checkpoint.tiers.memory_folder import default_root

        name = [f"bench-{os.getpid()}"]
        dist.broadcast_object_list(name, src=0)
        self.memory = default_root(name[0], folder)

    def start(self) -> None:
        from outlast.checkpoint.writer_process import SaverProcess

        self._saver = SaverProcess(self.memory, "", self.folder / "events.jsonl")
        ensure = self._saver.ensure if self.rank == 0 else lambda: None
        self._generation = 1
        self._ensure = ensure
        self._checkpointer = self._make(1)
        self._checkpointer.restore(self.state.holders())

    def _make(self, generation: int) -> Any:
        from outlast.checkpoint.checkpointer import Checkpointer
        from outlast.checkpoint.tiers.memory_folder import MemoryFolder
        from outlast.ipc.exchange import SystemClock

        folder, about = self.folder / "checkpoints", self._about(generation)
        return Checkpointer(
            folder, *about, SystemClock(), lambda _: None, MemoryFolder(self.memory), self._ensure
        )

    def _about(self, generation: int) -> tuple[Any, Any, Any]:
        """Return identity, exchange and settings."""
        from outlast.checkpoint.checkpointer import Identity
        from outlast.config import CheckpointOptions
        from outlast.ipc.exchange import SoloExchange, StoreExchange

        exchange: Any = SoloExchange()
        if self.world > 1:
            store = dist.distributed_c10d._get_default_store()
            exchange = StoreExchange(store, self.rank, self.world, generation)
        identity = Identity("bench", generation, self.rank, self.world)
        settings = CheckpointOptions(
            staging=self.staging, timeout=PATIENCE, ckpt_fully_parallel_save=self.once
        )
        return identity, exchange, settings

    def save(self, step: int) -> None:
        from outlast.checkpoint.save.staging import Order

        if not self._checkpointer.stage(Order(step, True, "bench"), self.state.holders()):
            raise SystemExit(f"step {step} was not staged")

    def finish(self, step: int) -> None:
        if not self._checkpointer.durable(step):
            raise SystemExit(f"step {step} did not come to disk")

    def place(self, step: int) -> Path:
        return next((self.folder / "checkpoints").glob(f"step-{step:09d}.*"))

    def written(self, step: int) -> dict[str, int]:
        copy = self.memory / "memory" / self.place(step).name
        return {"disk": _nbytes(self.place(step)), "memory": _nbytes(copy), "buffers": _nbytes(self.memory)}

    def forget(self, step: int) -> None:
        """Leave it to retention."""

    def load(self, step: int) -> None:
        from peers.disk_loads import load

        self._generation += 1
        restored = load(self.folder / "checkpoints", *self._about(self._generation), self.state.holders())
        if restored is None or restored.step != step:
            raise SystemExit(f"{restored} was loaded and step {step} was saved")

    def load_from_memory(self) -> bool:
        self._generation += 1
        return self._make(self._generation).restore(self.state.holders()) is not None

    def close(self) -> None:
        self._checkpointer.settle()
        dist.barrier()
        self._saver.hang_up()
        deadline = time.monotonic() + PATIENCE
        while not self._saver.ended() and time.monotonic() < deadline:
            time.sleep(0.02)


class OutlastLazy(Outlast):
    """The same, with the copy during the next forward and backward."""

    staging = "lazy"


class OutlastReplicas(Outlast):
    """The same under DDP: all ranks hold the same, and it is written once."""

    replicas = True


class OutlastReplicasEach(OutlastReplicas):
    """The same, but each rank writes all that it holds."""

    once = False


class OutlastBlocking(Outlast):
    """The same, and training waits for the disk: async_save = false."""

    blocking = True

    def save(self, step: int) -> None:
        super().save(step)
        super().finish(step)

    def finish(self, step: int) -> None:
        """It is."""


class TorchSave(System):
    """torch.save and torch.load, one file for each rank; the script syncs it, torch does not."""

    blocking = True
    note = "torch does not sync: the script does, within the total"

    def save(self, step: int) -> None:
        self.place(step).mkdir(exist_ok=True)
        torch.save(self.state.tree(), self._file(step))

    def finish(self, step: int) -> None:
        sync([self._file(step)])

    def load(self, step: int) -> None:
        content = torch.load(self._file(step), weights_only=True)
        for name, holder in self.state.holders().items():
            holder.load_state_dict(content[name])

    def files(self, step: int) -> list[Path]:
        return [self._file(step)]

    def _file(self, step: int) -> Path:
        return self.place(step) / f"rank{self.rank}.pt"


class Dcp(System):
    """torch DCP; its writer syncs."""

    blocking = True

    def save(self, step: int) -> None:
        dcp.save(self.own(), checkpoint_id=self.place(step))

    def load(self, step: int) -> None:
        dcp.load(self.own(), checkpoint_id=self.place(step))  # in place: all tensors are there


class DcpThread(Dcp):
    """torch DCP in a thread, with a reused stager, so that its memory is warm."""

    blocking = False
    kind = AsyncCheckpointerType.THREAD
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )

    def start(self) -> None:
        self._stager = DefaultStager(self.options)
        self._pending: Any = None

    def save(self, step: int) -> None:
        self._pending = dcp.async_save(
            self.own(),
            checkpoint_id=self.place(step),
            async_stager=self._stager,
            async_checkpointer_type=self.kind,
        )

    def fence(self) -> None:
        if hasattr(self._pending, "staging_completion"):
            self._pending.staging_completion.result()

    def finish(self, step: int) -> None:  # noqa: ARG002 - the future knows
        getattr(self._pending, "upload_completion", self._pending).result()

    def close(self) -> None:
        self._stager.close()


class DcpThreadLazy(DcpThread):
    """The same, staged in a thread while training continues."""

    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )


class DcpProcess(DcpThread):
    """torch DCP in a process, staged in reused shared memory."""

    kind = AsyncCheckpointerType.PROCESS
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )


SYSTEMS: dict[str, type[System]] = {
    "outlast": Outlast,
    "outlast-lazy": OutlastLazy,
    "outlast-blocking": OutlastBlocking,
    "outlast-replicas": OutlastReplicas,
    "outlast-replicas-each": OutlastReplicasEach,
    "torch.save": TorchSave,
    "dcp": Dcp,
    "dcp-thread": DcpThread,
    "dcp-thread-lazy": DcpThreadLazy,
    "dcp-process": DcpProcess,
}
