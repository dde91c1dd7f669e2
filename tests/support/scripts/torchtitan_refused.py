"""Ways to use torchtitan's checkpoints that would not be exact, and what a folder of checkpoints may hold.

arguments: folder of results
"""

# ruff: noqa: E402 - what torchtitan asks of a GPU is replaced before it is imported
from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.checkpoint import CheckpointManager

from outlast.errors import NoUsableCheckpoint, UsageError
from outlast.integrations.torchtitan import OutlastCheckpointManager, checkpoints

folder = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Trainer:
    """What torchtitan's has for a checkpoint."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Another(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass


def manager(kind: Any = OutlastCheckpointManager, number: float = 0.0, **options: Any) -> Any:
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(layer.weight, number)
    return kind.Config(**{"enable": True, "interval": 1, **options}).build(
        dataloader=None,
        model_parts=[layer],
        optimizers=Trainer(),
        lr_schedulers=Trainer(),
        states={"train_state": Trainer()},
        sd_adapter=None,
        base_folder=str(folder),
    )


def refused(words: str, **options: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        manager(**options)


refused("checkpoint.enable=False", enable=False)
refused("checkpoint.load_only=True", load_only=True)
refused("checkpoint.exclude_from_loading=['dataloader']", exclude_from_loading=["dataloader"])
refused("async_mode", async_mode="async_with_pinned_mem")
refused("checkpoint.folder='gs://bucket/run'", folder="gs://bucket/run")
with pytest.raises(UsageError, match=r"Another.*CheckpointManager"):
    checkpoints(Another.Config())
with pytest.raises(UsageError, match="load_step=3"):
    manager().load(step=3)

# A folder of torchtitan's own, and one whose only checkpoint is damaged, are no reason to begin anew.
manager(CheckpointManager, folder="theirs").save(1)
with pytest.raises(NoUsableCheckpoint, match=r"theirs.*step-1"):
    manager(folder="theirs").load()
begun = manager(folder="mine", initial_load_path=str(folder / "theirs" / "step-1"))
assert begun.load()
manager(folder="broken").save(1)
(data, *_) = (folder / "broken" / "step-1").glob("*.distcp")
data.write_bytes(data.read_bytes()[:-1])
with pytest.raises(NoUsableCheckpoint, match=r"broken.*step-1"):
    manager(folder="broken").load()

# The last checkpoint has weights alone, so a run that was killed after it goes on from the one before.
run = manager(folder="run", number=1.0)
for step, last in ((1, False), (2, False), (3, True)):
    run.states["train_state"].step = step
    run.save(step, last_step=last)
(folder / "run" / "step-2").rename(folder / "run" / "step-2.before")  # killed between the renames of a save
(folder / "run" / "step-4.part").mkdir()
again = manager(folder="run")
assert again.load()
assert again.states["train_state"].step == 2
assert again.states["model"].model[0].weight.unique().tolist() == [1.0]
assert sorted(one.name for one in (folder / "run").iterdir()) == ["step-1", "step-2", "step-3"]
found = dict.fromkeys(("weight",), torch.zeros(4, 4))
dcp.load(found, checkpoint_id=str(folder / "run" / "step-3"))  # torch's own reader
assert found["weight"].unique().tolist() == [1.0]

# A seed has weights alone, and training begins from it.
manager(folder="seed", number=2.0).save(0, last_step=True)
seeded = manager(folder="seed")
assert seeded.load()
assert seeded.states["model"].model[0].weight.unique().tolist() == [2.0]
