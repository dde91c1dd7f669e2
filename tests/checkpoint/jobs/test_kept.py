"""What the optimizer and the script rely on comes back: memory order, places, identity; or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.load.reshard import open_part
from outlast.checkpoint.policy.manifest import Identity, copy_name
from outlast.checkpoint.policy.table import in_order, is_dense
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.errors import NoUsableCheckpoint
from tests.support.jobs import DEADLINE, checkpointer

DIRECT = CheckpointOptions(timeout=DEADLINE, async_save=False)
LAST = torch.channels_last


def save(folder: Path, state: dict[str, object]) -> None:
    assert checkpointer(folder, settings=DIRECT).save(1, state, "a test")


def load(folder: Path, state: dict[str, object]) -> None:
    assert checkpointer(folder, generation=2, settings=DIRECT).restore(state) is not None


class Net:
    """A network of convolutions, one with a single channel, and its optimizer."""

    def __init__(self, seed: int, order: torch.memory_format = LAST, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(4, 8, 3), torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.Conv2d(8, 2, 3)
        ).to(memory_format=order)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **{"fused": True, **options})
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}

    def train(self, *steps: int) -> None:
        for step in steps:
            data = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(data).square().mean().backward()
            self.optimizer.step()

    def content(self) -> list[Any]:
        moments = [one[name] for one in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [(one.tolist(), one.stride()) for one in (*self.model.parameters(), *moments)]


def test_moments_follow_parameters_whose_memory_order_has_changed(tmp_path: Path) -> None:
    first, resumed = Net(0), Net(1, torch.contiguous_format)
    first.train(1, 2)
    save(tmp_path, first.state)
    load(tmp_path, resumed.state)
    for param, state in resumed.optimizer.state.items():
        assert state["exp_avg"].stride() == param.stride()
    assert [numbers for numbers, _ in resumed.content()] == [numbers for numbers, _ in first.content()]


def test_ranks_of_another_world_get_the_memory_order(tmp_path: Path) -> None:
    first, other = Net(0), Net(1)
    first.train(1)
    save(tmp_path, first.state)
    name = copy_name(1, 1)
    with DirectoryTier(tmp_path).open(name) as folder:
        _, commit = read_manifest(folder, name)
        received = open_part(folder, name, commit, Identity("run-a", 2, 1, 2), other.state)
        received.fill()
    for saved, live in zip(
        received.saved["optimizer"]["state"].values(), first.optimizer.state.values(), strict=True
    ):
        assert saved["exp_avg"].stride() == live["exp_avg"].stride()
        assert torch.equal(saved["exp_avg"], live["exp_avg"])


shapes = st.lists(st.integers(0, 4), max_size=5)


@given(shapes, st.randoms())
def test_strides_of_any_permutation_are_dense_and_others_are_not(shape: list[int], dice: Any) -> None:
    tensor = torch.empty(shape)
    assert in_order(shape) == tensor.stride()
    order = list(range(len(shape)))
    dice.shuffle(order)
    permuted = tensor.permute(order)
    assert is_dense(permuted.shape, permuted.stride())
    if tensor.numel() > 1:
        assert not is_dense(shape, [2 * step for step in in_order(shape)])
        assert not is_dense(shape, [0] * len(shape))


@pytest.mark.parametrize(
    "strides", [[1, 1], [0, 1], [-1, 1], [3, 2], [2**62, 1], [3], [True, 3], "31", [3.0, 1]]
)
def test_strides_with_gaps_are_damage(strides: Any, tmp_path: Path) -> None:
    from tests.checkpoint.jobs.test_forged_copies import forge

    state: dict[str, object] = {"box": {"t": torch.zeros(3, 2).t()}}
    save(tmp_path, state)

    def change(document: Any, manifest: Any) -> None:
        assert document["tensors"]["box.t"]["strides"] == [1, 2]
        document["tensors"]["box.t"]["strides"] = strides

    forge(tmp_path / copy_name(1, 1), change)
    with pytest.raises(NoUsableCheckpoint, match="strides"):
        load(tmp_path, state)


def test_a_tensor_at_two_places_stays_one_where_only_one_is_live(tmp_path: Path) -> None:
    one = torch.ones(2)
    save(tmp_path, {"box": {"first": None, "pair": (one, 1), "list": [one]}})
    own = torch.zeros(2)
    live: dict[str, Any] = {"first": None, "pair": None, "list": [own]}
    load(tmp_path, {"box": live})
    assert live["pair"][0] is own
    assert own.tolist() == [1, 1]


def test_one_live_tensor_at_two_places_does_not_take_two_contents(tmp_path: Path) -> None:
    save(tmp_path, {"box": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}})
    own = torch.zeros(2)
    live = {"a": own, "b": own}
    load(tmp_path, {"box": live})
    assert (live["a"].tolist(), live["b"].tolist()) == ([1, 1], [2, 2])
    assert live["a"] is own


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels"])
def test_the_moments_of_a_live_optimizer_stay_the_tensors_that_they_are(
    tmp_path: Path, options: dict[str, bool], form: torch.memory_format
) -> None:
    """A captured graph reads them after a rollback, too."""
    values = torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=form)
    parameter = torch.nn.Parameter(values)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)

    def step() -> None:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    held = dict(optimizer.state[parameter])
    then = {name: value.clone() for name, value in held.items()}
    saver = checkpointer(tmp_path)
    assert saver.save(1, {"parameter": parameter.data, "optimizer": optimizer}, "a test")
    step()
    assert saver.restore({"parameter": parameter.data, "optimizer": optimizer}, ()) is not None
    for name, value in optimizer.state[parameter].items():
        assert value is held[name]
        assert torch.equal(value, then[name])
