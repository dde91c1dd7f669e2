"""What the optimizer and the script rely on comes back: memory order, places, identity; or it is refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from outlast.checkpoint.load.reshard import open_part
from outlast.checkpoint.policy.manifest import Identity, copy_name, in_order, is_dense
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointMismatch, NoUsableCheckpoint, UsageError
from tests.support.jobs import DEADLINE, checkpointer
from tests.support.memory_nodes import Node

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


@pytest.mark.parametrize("staging", ["", "eager", "lazy"])
def test_a_fused_optimizer_goes_on_in_the_memory_order_that_it_had(
    staging: str, node: Node, tmp_path: Path
) -> None:
    """From disk without a checkpoint writer; through the memory tier and from it."""
    first, whole, resumed = Net(0), Net(0), Net(1)
    whole.train(1, 2, 3, 4)
    first.train(1, 2)
    if staging:
        saver = node.join(first, staging=staging)  # type: ignore[arg-type]
        assert saver.stage(Order(1, True, "a test"), first.state)
        assert saver.durable(1)
        node.join(resumed, 2, staging=staging)  # type: ignore[arg-type]
        assert "memory" in node.loaded().reason
    else:
        save(node.durable, first.state)
        load(node.durable, resumed.state)
    assert resumed.content() == first.content()
    resumed.train(3, 4)
    assert resumed.content() == whole.content()

    copy = node.durable / copy_name(1, 1)
    document = json.loads((copy / "rank-00000-of-00001.json").read_text())
    strides = {key: one.get("strides") for key, one in document["shard"]["tensors"].items()}
    assert strides["optimizer.state.0.exp_avg"] == list(first.model[0].weight.stride())
    assert strides["model.0.bias"] is None
    plain = load_file(copy / "rank-00000-of-00001.safetensors")
    assert torch.equal(
        plain["optimizer.state.0.exp_avg"], next(iter(first.optimizer.state.values()))["exp_avg"]
    )


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
        received.fill(folder, other.state)
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
        assert document["shard"]["tensors"]["box.t"]["strides"] == [1, 2]
        document["shard"]["tensors"]["box.t"]["strides"] = strides

    forge(tmp_path / copy_name(1, 1), change)
    with pytest.raises(NoUsableCheckpoint, match="strides"):
        load(tmp_path, state)


def shadows() -> tuple[dict[str, Any], list[Any]]:
    """Return a dict of all kinds of places, and the script's own references."""
    one, two, three = torch.zeros(2), torch.zeros(3, 2).t(), torch.zeros(2)
    array, octets, names = numpy.zeros((2, 2)), bytearray(4), {0}
    ordered = OrderedDict(a=[torch.zeros(1)])
    box = {
        "shadow": (one, two, ("text", (three,))),
        "again": [one, {"one": one}],
        "arrays": (array, [array]),
        "others": [octets, names, ordered],
    }
    return box, [one, two, three, array, octets, names, ordered, ordered["a"], ordered["a"][0], box["shadow"]]


def test_the_references_of_the_script_see_what_is_restored(tmp_path: Path) -> None:
    box, (one, two, three, array, octets, names, ordered, _inner, last, _) = shadows()
    one += 1
    two += torch.arange(6).view(2, 3)
    three += 3
    array += 4
    octets[:] = b"abcd"
    names.add(5)
    ordered["b"] = 6
    last += 7
    save(tmp_path, {"box": box})

    live, own = shadows()
    load(tmp_path, {"box": live})
    assert torch.equal(own[0], one)
    assert torch.equal(own[1], two)
    assert torch.equal(own[2], three)
    assert numpy.array_equal(own[3], array)
    assert (own[4], own[5]) == (octets, names)
    assert own[6]["b"] == 6
    assert torch.equal(own[8], last)
    assert live["shadow"] is own[9]
    assert live["shadow"][0] is live["again"][0] is live["again"][1]["one"] is own[0]
    assert live["arrays"][0] is live["arrays"][1][0] is own[3]


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


def test_a_tensor_in_the_groups_of_an_optimizer_stays_the_one_it_is(tmp_path: Path) -> None:
    """A captured CUDA graph reads the learning rate where it was; see tests/gpu for the device."""

    def made(lr: float) -> tuple[Any, list[torch.Tensor]]:
        rates = [torch.tensor(lr), torch.tensor(2 * lr)]
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in rates]
        groups = [{"params": [one], "lr": rate} for one, rate in zip(weights, rates, strict=True)]
        return torch.optim.Adam(groups, betas=(torch.tensor(0.5), torch.tensor(0.75)), foreach=False), rates

    save(tmp_path, {"optimizer": made(0.5)[0]})
    optimizer, rates = made(0.1)
    load(tmp_path, {"optimizer": optimizer})
    assert [rate.item() for rate in rates] == [0.5, 1.0]
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


def test_groups_that_shared_a_rate_get_the_ones_that_they_had(tmp_path: Path) -> None:
    def made() -> Any:
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        return torch.optim.SGD([{"params": [one]} for one in weights], lr=torch.tensor(0.1))

    first, second = made(), made()
    first.param_groups[1]["lr"] = torch.tensor(0.5)
    save(tmp_path, {"optimizer": first})
    load(tmp_path, {"optimizer": second})
    assert [round(group["lr"].item(), 3) for group in second.param_groups] == [0.1, 0.5]


class Buffer(torch.nn.Module):
    def __init__(self, content: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("b", content)


UNWRITABLE: dict[str, Callable[[], object]] = {
    "box.t": lambda: {"t": torch.zeros(1).expand(4)},
    "box.list.1.0": lambda: {"list": [1, (torch.zeros(3, 1).expand(3, 2),)]},
    "box.u": lambda: {"u": torch.empty(4, dtype=torch.uint4)},
    "box.i": lambda: {"i": torch.empty(4, dtype=torch.int4)},
    "box.b": lambda: Buffer(torch.zeros(1).expand(4)),
    "box": lambda: torch.zeros(1).expand(4),
}


@pytest.mark.parametrize("named", UNWRITABLE)
def test_what_a_load_could_not_write_to_is_refused_at_the_save(named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=repr(named)):
        save(tmp_path, {"box": UNWRITABLE[named]()})


def test_an_object_of_the_users_may_save_what_is_expanded(tmp_path: Path) -> None:
    class Holder:
        got: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"t": torch.ones(1).expand(4)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.got = state["t"]

    holder = Holder()
    save(tmp_path, {"box": holder})
    load(tmp_path, {"box": holder})
    assert holder.got.tolist() == [1, 1, 1, 1]


class Growing(torch.nn.Module):
    """Takes buffers of any length, as the observers of quantization do."""

    most = 100

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        if len(state[prefix + "seen"]) <= self.most:
            self.seen = torch.zeros_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *more)


def test_a_buffer_that_has_grown_is_taken_where_the_module_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (torch.nn.Sequential(torch.nn.Linear(2, 2), Growing()) for _ in range(2))
    first[1].seen = torch.arange(5.0)
    save(tmp_path, {"model": first})
    load(tmp_path, {"model": second})
    assert second[1].seen.tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(Growing, "most", 3)
    third = torch.nn.Sequential(torch.nn.Linear(2, 2), Growing())
    with pytest.raises(CheckpointMismatch, match=r"1\.seen"):
        load(tmp_path, {"model": third})
    assert third[1].seen.tolist() == []


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_moments_of_a_live_optimizer_stay_the_tensors_that_they_are(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    """A captured graph reads them after a rollback, too."""
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
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
