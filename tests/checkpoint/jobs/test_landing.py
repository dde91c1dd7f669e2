"""What was verified comes to the tensors that live objects have, or to memory of their own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from outlast.checkpoint.load import restorer
from outlast.checkpoint.load.landing import places_for
from outlast.checkpoint.policy.manifest import copy_name
from outlast.errors import ExitCode, OutlastError
from outlast.ipc.exchange import SoloExchange
from tests.support.jobs import Job, checkpointer, save_steps

FILE = "rank-00000-of-00001.safetensors"


class Harming(SoloExchange):
    """Lets a file come to harm when all ranks have verified theirs."""

    def __init__(self, harm: Callable[[], object]) -> None:
        super().__init__()
        self._harm = harm

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:
        if topic == "examined":
            self._harm()
        return list(super().gather(topic, value, timeout))


def addresses(job: Job) -> list[int]:
    moments = [one[name] for one in job.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [one.data_ptr() for one in (*job.model.parameters(), *moments)]


def test_live_tensors_are_loaded_where_they_are(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1)
    job = Job(5, 8)
    job.train(2)
    for generation in (2, 3):
        before = addresses(job)
        assert checkpointer(tmp_path, generation=generation).restore(job.state) is not None
        assert job.content() == content[1]
        assert addresses(job) == before
        job.train()


def test_what_a_new_optimizer_gets_has_memory_of_its_own(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1)
    job = Job(5)
    before = addresses(job)
    assert checkpointer(tmp_path, generation=2).restore(job.state) is not None
    assert job.content() == content[1]
    assert addresses(job)[: len(before)] == before
    assert all(address % 64 == 0 for address in addresses(job)[len(before) :])


@pytest.fixture
def mesh() -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Sharded(Job):
    """A job whose parameters are distributed."""

    def __init__(self, seed: int, mesh: Any) -> None:
        super().__init__(seed)
        for part in (self.model[0], self.model):
            fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)

    def tensors(self) -> list[torch.Tensor]:
        """Return the parts of this process: of the model, then of the moments."""
        moments = [one[name] for one in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        found = [*self.model.parameters(), *moments]
        assert all(isinstance(one, DTensor) for one in found)
        return [one.to_local().detach() for one in found]  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [0, 1])
def test_parts_of_distributed_tensors_are_loaded_where_they_are(
    tmp_path: Path, steps: int, mesh: Any
) -> None:
    first = Sharded(0, mesh)
    first.train(2)
    saver = checkpointer(tmp_path)
    saver.restore(first.state)
    saver.save(1, first.state, "a test")
    live = Sharded(5, mesh)
    live.train(steps)
    before = [one.data_ptr() for one in live.tensors()]
    made: list[torch.Size] = []
    empty_like = torch.empty_like

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        made.append(arguments[0].shape)
        return empty_like(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", counted)
        assert checkpointer(tmp_path, generation=2).restore(live.state) is not None
    assert made == []
    assert [one.data_ptr() for one in live.tensors()][: len(before)] == before
    for job in (first, live):
        torch.manual_seed(3)
        job.train(2)
    for one, other in zip(first.tensors(), live.tensors(), strict=True):
        assert torch.equal(one, other)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [flip, lambda path: os.truncate(path, 100)])
def test_a_file_that_changes_after_it_was_verified_changes_nothing(
    harm: Callable[[Path], object], tmp_path: Path
) -> None:
    content = save_steps(tmp_path, 1, 2)
    job = Job(5)
    job.train()
    path = tmp_path / copy_name(2, 1) / FILE
    exchange = Harming(lambda: harm(path))
    assert checkpointer(tmp_path, generation=2, exchange=exchange).restore(job.state) is not None
    assert job.content() == content[2]
    anew = Job(6)
    restored = checkpointer(tmp_path, generation=3).restore(anew.state)
    assert restored is not None
    assert (restored.step, anew.content()) == (1, content[1])


def test_where_no_memory_is_left_while_live_objects_change_the_generation_ends_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    save_steps(tmp_path, 1)
    monkeypatch.setattr(restorer, "land", refused)
    with pytest.raises(OutlastError, match="must not be used") as caught:
        checkpointer(tmp_path, generation=2).restore(Job(5).state)
    assert caught.value.exit_code is ExitCode.FAILED


def pairs(state: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Return the names of a model's tensors that go straight to it."""
    found = places_for(state, saved)
    return [name for name, one in saved["model"].items() if id(one) in found]


def twin() -> torch.nn.Module:
    return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in module.state_dict().items()}


def test_tensors_that_share_memory_here_and_did_not_when_they_were_saved_are_left_out() -> None:
    saved, live = copied(twin()), twin()
    live["b"].weight = live["a"].weight  # type: ignore[index]
    assert pairs({"model": live}, {"model": saved}) == ["a.bias", "b.bias"]
    flat = torch.zeros(12)
    live = twin()
    live["a"].weight.data = flat[:9].view(3, 3)  # type: ignore[index]
    live["b"].weight.data = flat[3:12].view(3, 3)  # type: ignore[index]
    assert pairs({"model": live}, {"model": saved}) == ["a.bias", "b.bias"]
    live["b"].weight.data = torch.ones(3, 3)  # type: ignore[index]
    assert len(pairs({"model": live}, {"model": saved})) == 4
    state = {"model": live, "box": {"x": flat[8:]}}
    assert "a.weight" not in pairs(state, {"model": saved, "box": {"x": torch.ones(4)}})


def test_what_two_objects_take_goes_straight_to_neither() -> None:
    live = twin()
    saved = copied(live)
    state = {"model": live, "box": [torch.ones(3)]}
    assert pairs(state, {"model": saved, "box": [saved["a.bias"]]}) == ["a.weight", "b.weight", "b.bias"]


class Scaled(torch.nn.Linear):
    """A module that changes what it is given."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_takes_its_state_in_its_own_way_is_given_a_copy() -> None:
    own = torch.nn.Sequential(Scaled(2, 2))
    assert pairs({"model": own}, {"model": copied(own)}) == []
    hooked = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert len(pairs({"model": hooked}, {"model": copied(hooked)})) == 2
    hooked[0].register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    assert pairs({"model": hooked}, {"model": copied(hooked)}) == []
    other = torch.nn.Linear(2, 2)
    other.state_dict = lambda *_, **__: {}  # type: ignore[assignment,method-assign]
    assert pairs({"model": other}, {"model": {}}) == []
