"""What is saved comes back in every bit, here and in the readers that others have."""

from __future__ import annotations

import io
import json
import math
import pickle
import random
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from outlast.checkpoint.policy.manifest import copy_name
from outlast.errors import UsageError
from outlast.recovery.policy.events import Loaded, Record, Saved
from tests.support.jobs import Job, checkpointer

DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# torch has names of types that no tensor has yet (uint3), and quantized ones, which are refused.
PLAIN = sorted(
    (each for each in DTYPES if not re.search(r"torch\.(q|bits|u?int[1-7]$)", str(each))),
    key=str,
)


def stored_file(folder: Path, step: int) -> Path:
    return folder / copy_name(step, 1) / "rank-00000-of-00001.safetensors"


def octets(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """AdamW, a scheduler and dropout: model, moments, learning rate and random states all count."""
    records: list[Record] = []
    job = Job(0)
    job.train(3)
    numpy.random.seed(5)
    assert checkpointer(tmp_path, records=records).save(3, job.state, "a test", {"epoch": (1, 2.5)})
    expected = (job.train(5), random.random(), numpy.random.rand(), job.content())
    other = Job(99)
    other.train(1)
    restored = checkpointer(tmp_path, generation=2, records=records).restore(other.state)
    assert restored is not None
    assert (restored.step, restored.name, restored.cursor) == (3, copy_name(3, 1), {"epoch": (1, 2.5)})
    assert (other.train(5), random.random(), numpy.random.rand(), other.content()) == expected
    assert other.scheduler.get_last_lr() == job.scheduler.get_last_lr()
    saved, loaded = records
    assert isinstance(saved, Saved)
    assert isinstance(loaded, Loaded)
    assert (saved.reason, loaded.reason) == ("a test", "the newest of 1 copies, from local")
    assert loaded.nbytes == restored.nbytes == stored_file(tmp_path, 3).stat().st_size


def test_nothing_saved_is_a_fresh_start(tmp_path: Path) -> None:
    assert checkpointer(tmp_path / "none").restore(Job(0).state) is None
    (tmp_path / ".tmp-step-000000010.g1-abcd").mkdir()
    assert checkpointer(tmp_path).restore(Job(0).state) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_of_every_type_comes_back_in_every_shape(
    dtype: torch.dtype, tmp_path: Path, seed: int
) -> None:
    dice, contents, box = random.Random(seed), {}, {"pad": torch.arange(3, dtype=torch.int8)}
    for shape in [(), (0,), (3, 0), (5,), (3, 7)]:
        content = dice.randbytes(math.prod(shape) * dtype.itemsize)
        if dtype is torch.bool:
            content = bytes(byte & 1 for byte in content)
        contents[str(shape)] = content
        box[str(shape)] = torch.tensor(list(content), dtype=torch.uint8).view(dtype).reshape(shape)
    assert checkpointer(tmp_path).save(1, {"box": box}, "a test")
    back: dict[str, Any] = {}
    checkpointer(tmp_path).restore({"box": back})
    for name, content in contents.items():
        assert (back[name].dtype, str(tuple(back[name].shape))) == (dtype, name)
        assert octets(back[name]) == content
    assert octets(back["pad"]) == b"\0\1\2"
    assert set(load_file(stored_file(tmp_path, 1))) == {f"box.{key}" for key in box}
    shard = json.loads(stored_file(tmp_path, 1).with_suffix(".json").read_text())["shard"]
    assert all(
        shard["tensors"][f"box.{key}"]["range"][0] % each.element_size() == 0 for key, each in box.items()
    )


def test_other_views_of_memory_are_saved_by_their_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    box = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(base[1]),
    }
    assert checkpointer(tmp_path).save(1, {"box": box}, "a test")
    back: dict[str, Any] = {}
    checkpointer(tmp_path).restore({"box": back})
    for key, value in box.items():
        assert torch.equal(back[key], value), key
    assert back["transposed"].stride() == base.t().stride()
    assert back["strided"].is_contiguous()


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    def tied(seed: int) -> torch.nn.ModuleDict:
        torch.manual_seed(seed)
        parts = torch.nn.ModuleDict(
            {"in": torch.nn.Embedding(10, 4), "out": torch.nn.Linear(4, 10, bias=False)}
        )
        parts["out"].weight = parts["in"].weight
        return parts

    model = tied(0)
    shared = torch.zeros(3)
    assert checkpointer(tmp_path).save(1, {"model": model, "box": {"a": shared, "b": shared}}, "a test")
    assert set(load_file(stored_file(tmp_path, 1))) == {"model.in.weight", "box.a"}
    document = json.loads(stored_file(tmp_path, 1).with_suffix(".json").read_text())
    assert document["shard"]["aliases"] == {"model.out.weight": "model.in.weight", "box.b": "box.a"}
    other, box = tied(1), dict[str, Any]()
    checkpointer(tmp_path).restore({"model": other, "box": box})
    assert torch.equal(other["in"].weight, model["in"].weight)  # type: ignore[arg-type]
    assert other["out"].weight is other["in"].weight
    assert box["a"] is box["b"]


def test_tensors_that_are_there_are_filled_in_place(tmp_path: Path) -> None:
    assert checkpointer(tmp_path).save(
        1, {"t": torch.full((3,), 7.0), "box": {"list": [torch.ones(2), 5]}}, "a test"
    )
    tensor, inner = torch.zeros(3), torch.zeros(2)
    box: dict[str, Any] = {"list": [inner, 1], "gone": 1}
    checkpointer(tmp_path).restore({"t": tensor, "box": box})
    assert tensor.tolist() == [7.0] * 3
    assert box["list"][0] is inner
    assert (inner.tolist(), box["list"][1], list(box)) == ([1.0, 1.0], 5, ["list"])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[3],
        ),
    ],
)
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop]
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_the_schedulers_and_optimizers_of_torch_go_on_as_they_would_have(
    schedule: Any, optimizer: Any, tmp_path: Path
) -> None:
    def build() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        made = optimizer([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1)
        return model, made, schedule(made)

    def train(model: Any, made: Any, scheduler: Any) -> list[Any]:
        for _ in range(3):
            model(torch.randn(2, 3)).square().sum().backward()
            made.step()
            made.zero_grad()
            scheduler.step()
        return [model.weight.tolist(), model.bias.tolist(), scheduler.get_last_lr()]

    first, second = build(), build()
    train(*first)
    names = ("model", "optimizer", "scheduler")
    assert checkpointer(tmp_path).save(3, dict(zip(names, first, strict=True)), "a test")
    expected = train(*first)
    checkpointer(tmp_path).restore(dict(zip(names, second, strict=True)))
    assert train(*second) == expected


def test_the_versions_of_a_modules_layers_are_kept(tmp_path: Path) -> None:
    class Box:
        def __init__(self) -> None:
            self.content: Any = None

        def state_dict(self) -> Any:
            return torch.nn.BatchNorm1d(3).state_dict()

        def load_state_dict(self, content: Any) -> None:
            self.content = content

    box = Box()
    assert checkpointer(tmp_path).save(1, {"box": box}, "a test")
    checkpointer(tmp_path).restore({"box": box})
    assert type(box.content) is OrderedDict
    assert box.content._metadata == torch.nn.BatchNorm1d(3).state_dict()._metadata


class Wide(torch.optim.Optimizer):
    """Keeps float32 and whole numbers of bfloat16 parameters, in containers too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            of_it = self.state[one]
            of_it["moment"] = of_it.get("moment", torch.zeros(one.shape)) + one.grad.float() / 3
            of_it["codes"] = torch.full(one.shape, 201, dtype=torch.uint8)
            of_it["more"] = {"scale": [torch.full((2,), 1 / 3, dtype=torch.float64)]}


@pytest.mark.parametrize("steps", [0, 1], ids=["new", "has stepped"])
def test_what_an_optimizer_keeps_has_its_own_type_and_not_the_parameters(tmp_path: Path, steps: int) -> None:
    def made(steps: int) -> tuple[torch.nn.Module, Wide]:
        model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        optimizer = Wide(model.parameters())
        for _ in range(steps):
            for one in model.parameters():
                one.grad = torch.ones_like(one)
            optimizer.step()
        return model, optimizer

    model, optimizer = made(2)
    assert checkpointer(tmp_path).save(1, {"model": model, "optimizer": optimizer}, "a test")
    other, loaded = made(steps)
    checkpointer(tmp_path, generation=2).restore({"model": other, "optimizer": loaded})
    expected, found = optimizer.state_dict()["state"], loaded.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, entries in expected.items():
        for name in ("moment", "codes"):
            assert found[number][name].dtype is entries[name].dtype
            assert octets(found[number][name]) == octets(entries[name])
        (was,), (now,) = entries["more"]["scale"], found[number]["more"]["scale"]
        assert now.dtype is torch.float64
        assert octets(now) == octets(was)


class Scaled(torch.nn.Module):
    """Gives its history as bytes in a tensor, and an empty one while there is none: so Transformer Engine."""

    def __init__(self, history: list[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.history = history

    def get_extra_state(self) -> torch.Tensor:
        if not self.history:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.history)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = pickle.loads(state.numpy().tobytes()) if state.numel() else []


@pytest.mark.parametrize("saved", [[], [1.0], [0.5] * 9])
@pytest.mark.parametrize("live", [[], [2.0], [7.0] * 9])
def test_the_extra_state_of_a_module_may_have_any_size(
    tmp_path: Path, saved: list[float], live: list[float]
) -> None:
    module, other = (torch.nn.Sequential(Scaled(list(one))) for one in (saved, live))
    assert checkpointer(tmp_path).save(1, {"model": module}, "a test")
    checkpointer(tmp_path, generation=2).restore({"model": other})
    assert other[0].history == saved


def test_an_extra_state_that_is_a_file_in_memory_is_refused_by_name(tmp_path: Path) -> None:
    class Older(Scaled):
        def get_extra_state(self) -> Any:
            return io.BytesIO(b"1.0")

    with pytest.raises(UsageError, match=r"model\.0\._extra_state.*_io\.BytesIO has no form without pickle"):
        checkpointer(tmp_path).save(1, {"model": torch.nn.Sequential(Older([]))}, "a test")


def test_keys_that_read_alike_do_not_collide(tmp_path: Path) -> None:
    box = {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}, 0: torch.ones(2), "0": torch.zeros(2)}
    assert checkpointer(tmp_path).save(1, {"box": box, "__metadata__": torch.ones(1)}, "a test")
    back: dict[Any, Any] = {}
    live = torch.zeros(1)
    checkpointer(tmp_path).restore({"box": back, "__metadata__": live})
    assert (back["a"]["b.c"].item(), back["a.b"]["c"].item(), live.item()) == (1.0, 0.0, 1.0)
    assert (back[0].tolist(), back["0"].tolist()) == ([1.0, 1.0], [0.0, 0.0])
    assert len(load_file(stored_file(tmp_path, 1))) == 5


def test_stock_safetensors_reads_every_tensor(tmp_path: Path) -> None:
    job = Job(0)
    job.train()
    assert checkpointer(tmp_path).save(1, job.state, "a test")
    found = load_file(stored_file(tmp_path, 1))
    for key, tensor in job.model.state_dict().items():
        assert torch.equal(found[f"model.{key}"], tensor)
    for index, moments in job.optimizer.state_dict()["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(found[f"optimizer.state.{index}.{name}"], tensor)


@pytest.mark.filterwarnings("ignore")  # DCP warns about itself
def test_stock_dcp_reads_it_at_world_size_one(tmp_path: Path) -> None:
    job, other = Job(0), Job(1)
    job.train()
    assert checkpointer(tmp_path).save(1, job.state, "a test")
    moments = {
        index: {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for index, state in job.optimizer.state_dict()["state"].items()
    }
    wanted = {"model": other.model.state_dict(), "optimizer": {"state": moments}}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(tmp_path / copy_name(1, 1))))
    for key, tensor in job.model.state_dict().items():
        assert torch.equal(wanted["model"][key], tensor)
    for index, state in job.optimizer.state_dict()["state"].items():
        for name, tensor in state.items():
            assert torch.equal(moments[index][name], tensor)
