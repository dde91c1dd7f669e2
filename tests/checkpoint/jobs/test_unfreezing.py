"""Parameter groups that an optimizer gets while it trains: a resumed run has them again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from outlast.checkpoint.policy.manifest import place_of
from tests.support.jobs import checkpointer


class Tuned:
    """A model of two layers; the optimizer has the second one, and both once it is unfrozen."""

    def __init__(self, unfrozen: bool = False, named: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        self._named = named
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.params(1), lr=1e-2)
        if unfrozen:
            self.unfreeze()

    def params(self, layer: int) -> list[Any]:
        return list(self.model[layer].named_parameters() if self._named else self.model[layer].parameters())

    def unfreeze(self) -> None:
        self.model[0].requires_grad_(True)
        self.optimizer.add_param_group({"params": self.params(0), "lr": 1e-3})

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def groups(self) -> list[tuple[float, int]]:
        trained = [one for one in self.model.parameters() if one.requires_grad]
        assert len(trained) == sum(len(group["params"]) for group in self.optimizer.param_groups)
        return [(group["lr"], len(group["params"])) for group in self.optimizer.param_groups]

    def train(self) -> None:
        self.model(torch.ones(4, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def content(self) -> Any:
        found = self.optimizer.state_dict()
        for group in found["param_groups"]:
            group["param_names"] = dict.fromkeys(group.get("param_names", ()), 0)
        return self.model.state_dict(), found


ONE, BOTH = [(1e-2, 2)], [(1e-2, 2), (1e-3, 2)]


def saved(folder: Path, named: bool = False) -> tuple[Any, Any]:
    """Save a step before and one after unfreezing; return what was saved."""
    job, saver = Tuned(named=named), checkpointer(folder)
    assert saver.restore(job.state) is None
    job.train()
    saver.save(1, job.state, "test")
    before = copy.deepcopy(job.content())
    job.unfreeze()
    job.train()
    saver.save(2, job.state, "test")
    after = copy.deepcopy(job.content())
    return before, after


def test_groups_of_a_copy_that_proves_damaged_are_taken_back(tmp_path: Path) -> None:
    before, _ = saved(tmp_path)
    (shard,) = tmp_path.glob("step-000000002*/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    job = Tuned()
    found = checkpointer(tmp_path, generation=2).restore(job.state)
    assert found is not None
    assert found.step == 1
    torch.testing.assert_close(job.content(), before, rtol=0, atol=0)
    assert job.groups == ONE
    job.unfreeze()
    assert job.groups == BOTH


def test_a_rollback_beyond_the_unfreezing_takes_the_groups_back(tmp_path: Path) -> None:
    before, _ = saved(tmp_path)
    job, loader = Tuned(), checkpointer(tmp_path, generation=2)
    assert loader.restore(job.state) is not None
    assert job.groups == BOTH
    loader.put_away([name for name in loader.names() if place_of(name)[0] == 2], "test")
    found = loader.restore(job.state)
    assert found is not None
    assert found.step == 1
    torch.testing.assert_close(job.content(), before, rtol=0, atol=0)
    assert job.groups == ONE
    job.unfreeze()
    job.train()
