"""megatron-core's distributed checkpoints with digests: verified where they are loaded.

A checkpoint stays in megatron-core's own format (``torch_dist``), which its own strategies read, too. It has
digests of each slice, of ``common.pt`` and of ``metadata.json``; they are written last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as theirs
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from outlast.errors import UsageError
from outlast.integrations.dcp import OutlastStorageInPlace, OutlastStorageReader

_FORMAT = ("torch_dist", 1)


class OutlastSaveStrategy(theirs.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A strategy for ``dist_checkpointing.save`` that writes digests.

    ``dist_checkpointing.save(state, folder, OutlastSaveStrategy())``; the folder is on a file system that all
    ranks share, and each save has one of its own. It fits into ``FullyParallelSaveStrategyWrapper``.
    """

    def __init__(self) -> None:
        super().__init__(*_FORMAT)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write what this rank holds; megatron-core has written ``common.pt`` before."""
        if dist.get_rank() == 0:  # as megatron-core will once more, byte for byte
            Path(checkpoint_dir, CONFIG_FNAME).unlink(missing_ok=True)
        grouped, *_ = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save(
            theirs.mcore_to_pyt_state_dict(grouped, False),
            storage_writer=_Writer(checkpoint_dir, (COMMON_STATE_FNAME, CONFIG_FNAME)),
            planner=theirs.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    def async_save(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: the digests are written by the ranks.

        Raises:
            UsageError: always.
        """
        del args, kwargs
        raise UsageError("OutlastSaveStrategy: async_sharded_save=True is not supported; leave it out")


class OutlastLoadStrategy(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """A strategy for ``dist_checkpointing.load`` that verifies what it reads, and ``common.pt``.

    ``dist_checkpointing.load(state, folder, OutlastLoadStrategy())``. A checkpoint without digests is loaded
    unverified, with a warning.
    """

    def load(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | os.PathLike[str],
        *args: object,  # noqa: ARG002 - megatron-core's newer versions name an async strategy
    ) -> Any:
        """Return the loaded shards.

        Raises:
            CheckpointException: something is not what was written.
        """
        tensors = [one for one in nested_values(sharded_state_dict) if isinstance(one, ShardedTensor)]
        grouped, nesting, renamed = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        found = theirs.mcore_to_pyt_state_dict(grouped, True)
        planner = theirs.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                one.key: one for one in tensors if one.allow_shape_mismatch
            },
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        load(found, storage_reader=_Reader(checkpoint_dir), planner=planner)
        plain = {name: theirs._unwrap_pyt_sharded_tensor(value) for name, value in found.items()}
        loaded = theirs._replace_sharded_keys_with_state_dict_keys(plain, nesting, renamed)
        theirs._restore_dict_types(loaded, sharded_state_dict)
        return loaded


class _Writer(OutlastStorageInPlace):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save_config(CheckpointingConfig(*_FORMAT), str(self.checkpoint_id))
        super().finish(metadata, results)


class _Reader(OutlastStorageReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        found = super().read_metadata(*args, **kwargs)
        for name in (COMMON_STATE_FNAME, CONFIG_FNAME):
            self.verify(name)
        return found
