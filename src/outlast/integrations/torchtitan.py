"""torchtitan's checkpoints with digests: whole, verified, and announced to ``outlast run``.

``--override.imports outlast.integrations.torchtitan.checkpoints`` puts our checkpoint manager in the place of
torchtitan's own. Checkpoints stay in its folders and in torch's format.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from outlast.errors import NoUsableCheckpoint, UsageError
from outlast.integrations.announcing import AnnouncedLoop, SaveState, require
from outlast.integrations.dcp import OutlastStorageReader, OutlastStorageWriter, newest_whole, settle

require("torchtitan", (0, 3), "outlast.integrations.torchtitan")

from torchtitan.components.checkpointer.base import (  # noqa: E402 - a version that is too old has no such module
    MODEL,
    TRAIN_STATE,
    BaseCheckpointManager,
)
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402
from torchtitan.tools.utils import GarbageCollection  # noqa: E402

_NAME = re.compile(r"step-(\d+)")
_SEED = "step-0"  # of create_seed_checkpoint: weights alone


class OutlastCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's CheckpointManager with digests, which reports steps and saves to ``outlast run``.

    ``checkpoint=OutlastCheckpointManager.Config(enable=True)`` in a function of a ``config_registry``, or
    :func:`checkpoints` as an override. When the job is told to end, all ranks save after the same step, and
    the processes exit with 75.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """As torchtitan's; what would not be resumed, or not be exact, is refused when it is built."""

    def __init__(self, config: Config, **parts: Any) -> None:
        _refuse(config)
        super().__init__(config, **parts)
        self._loop = AnnouncedLoop(type(self).__name__)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save with digests; what is exported for Hugging Face is written as torchtitan writes it."""
        if to_hf:
            written: Future[Any] | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return written
        writer = OutlastStorageWriter(checkpoint_id)
        with torch.no_grad():
            if async_mode == AsyncMode.ASYNC:
                under_way: Any = async_save(state_dict, storage_writer=writer, process_group=self.pg)
                return under_way  # type: ignore[no-any-return]
            save(state_dict, storage_writer=writer)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load, verified.

        Raises:
            CheckpointException: something is not what was written.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=OutlastStorageReader(checkpoint_id))
        self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise UsageError(
                f"checkpoint.load_step={step}: every restart would go back to it; leave it out, and the"
                " newest whole checkpoint is loaded. To begin from this one, give"
                " checkpoint.initial_load_path, with initial_load_model_only=False, and another"
                " checkpoint.folder"
            )
        loaded = bool(super()._load())
        self._loop.begin(self.states[TRAIN_STATE].step)
        return loaded

    def _find_load_step(self, folder: str = "") -> int:
        place = Path(folder or self.folder)
        if dist.get_rank() == 0:
            settle(place)
        newest = newest_whole(place, _goes_on)
        if newest is not None:
            return int(newest.name.rpartition("-")[2])
        names = os.listdir(place) if place.is_dir() else []
        left = [name for name in sorted(names) if _NAME.fullmatch(name)]
        if left:
            raise NoUsableCheckpoint(
                f"{place}: found {', '.join(left)}, expected one that is whole, with digests and the state of"
                " the training; nothing was loaded. To begin from one that was written without outlast, give"
                " it as checkpoint.initial_load_path, and another checkpoint.folder; to begin anew, move the"
                " folder away"
            )
        return -1

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step > 0:  # else a seed is made, and nothing trained
            self._loop.step_done(curr_step)
        saved = bool(super()._save(curr_step, last_step))
        if saved:
            self._loop.saved(curr_step, _outcome(self.save_future))
        if self._loop.should_stop:
            self.close()
        return saved

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return bool(super()._should_save(curr_step, last_step)) or self._loop.should_save

    def _close(self) -> None:
        super()._close()
        loop = getattr(self, "_loop", None)
        if loop is None:
            return
        if sys.exc_info()[0] is not None:
            loop.forget()
            return
        self.maybe_wait_for_saving()
        loop.end()


@override(target=BaseCheckpointManager.Config, description="checkpoints with digests")  # type: ignore[untyped-decorator]
def checkpoints(config: Any) -> OutlastCheckpointManager.Config:
    """Take our checkpoint manager for torchtitan's.

    Raises:
        UsageError: the configuration has another one than torchtitan's own.
    """
    if type(config) not in (CheckpointManager.Config, OutlastCheckpointManager.Config):
        raise UsageError(
            f"{__name__}.checkpoints: found a checkpoint of {type(config)._owner.__name__}, expected"
            " CheckpointManager; have the configuration's `checkpoint` be CheckpointManager.Config, or leave"
            " the override out"
        )
    found: OutlastCheckpointManager.Config = derive(config, OutlastCheckpointManager.Config)
    return found


def _refuse(config: Any) -> None:
    """Raise for what would not be resumed, or not be exact."""
    wrong = {
        "enable=False: nothing would be saved; give enable=True, or leave outlast's manager out": (
            not config.enable
        ),
        "load_only=True: nothing would be saved, so every restart would begin anew; leave it out": (
            config.load_only
        ),
        f"exclude_from_loading={config.exclude_from_loading!r}: every restart would leave it out, too; leave"
        " the option out; initial_load_path takes the weights alone": bool(config.exclude_from_loading),
        "async_mode='async_with_pinned_mem': its process does not say when the digests are written; give"
        " async_mode='async' or 'disabled'": config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM,
        f"folder={config.folder!r}: found a URL, expected a path of a file system that all ranks share": (
            filesystem.is_remote(config.folder)
        ),
    }
    found = [f"checkpoint.{text}" for text, there in wrong.items() if there]
    if found:
        raise UsageError("; ".join(found))


def _goes_on(checkpoint: Path) -> bool:
    """Say whether a training can go on from a checkpoint: torchtitan's last one may have weights alone."""
    if checkpoint.name == _SEED:
        return True
    names = OutlastStorageReader(checkpoint).read_metadata().state_dict_metadata
    return any(name.startswith(f"{TRAIN_STATE}.") for name in names)


def _outcome(under_way: Future[Any] | None) -> Callable[[], SaveState]:
    """Return what says how far a save is."""

    def found() -> SaveState:
        if under_way is None:
            return SaveState.COMPLETED
        if not under_way.done():
            return SaveState.UNDER_WAY
        return SaveState.LOST if under_way.exception() else SaveState.COMPLETED

    return found
