"""What is saved comes back in every bit, here and in the readers that others have."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from outlast.checkpoint.typed_json import Decoder, Encoder
from outlast.core.errors import CheckpointMismatch, UsageError
from outlast.core.events import Loaded, Record, Saved
from outlast.core.manifest import DamagedCopy, copy_name
from tests.process.jobs import Job, checkpointer, kinds, save_steps

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
    numpy.random.seed(5)  # noqa: NPY002 - the global generator is what is tested
    assert checkpointer(tmp_path, records=records).save(3, job.state, "a test", {"epoch": (1, 2.5)})
    expected = (job.train(5), random.random(), numpy.random.rand(), job.content())  # noqa: NPY002
    other = Job(99)
    other.train(1)
    restored = checkpointer(tmp_path, generation=2, records=records).restore(other.state)
    assert restored is not None
    assert (restored.step, restored.name, restored.cursor) == (3, copy_name(3, 1), {"epoch": (1, 2.5)})
    assert (other.train(5), random.random(), numpy.random.rand(), other.content()) == expected  # noqa: NPY002
    assert other.scheduler.get_last_lr() == job.scheduler.get_last_lr()
    saved, loaded = records
    assert isinstance(saved, Saved)
    assert isinstance(loaded, Loaded)
    assert (saved.reason, loaded.reason) == ("a test", "the newest of 1 copies")
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
    for shape, content in contents.items():
        assert (back[shape].dtype, str(tuple(back[shape].shape))) == (dtype, shape)
        assert octets(back[shape]) == content
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
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(base[1]),
    }
    assert checkpointer(tmp_path).save(1, {"box": box}, "a test")
    back: dict[str, Any] = {}
    checkpointer(tmp_path).restore({"box": back})
    for key, value in box.items():
        assert torch.equal(back[key], value), key
        assert back[key].is_contiguous()


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    def tied(seed: int) -> torch.nn.ModuleDict:
        torch.manual_seed(seed)
        parts = torch.nn.ModuleDict(
            {"in": torch.nn.Embedding(10, 4), "out": torch.nn.Linear(4, 10, bias=False)}
        )
        parts["out"].weight = parts["in"].weight  # type: ignore[assignment]
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


def test_keys_that_read_alike_do_not_collide(tmp_path: Path) -> None:
    box = {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}, 0: torch.ones(2), "0": torch.zeros(2)}
    assert checkpointer(tmp_path).save(1, {"box": box, "__metadata__": torch.ones(1)}, "a test")
    back: dict[Any, Any] = {}
    live = torch.zeros(1)
    checkpointer(tmp_path).restore({"box": back, "__metadata__": live})
    assert (back["a"]["b.c"].item(), back["a.b"]["c"].item(), live.item()) == (1.0, 0.0, 1.0)
    assert (back[0].tolist(), back["0"].tolist()) == ([1.0, 1.0], [0.0, 0.0])
    assert len(load_file(stored_file(tmp_path, 1))) == 5


# Readers that others have.


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


# Typed JSON.

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3])]),
)
keys = st.one_of(
    st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)), st.booleans()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(0, 5), max_size=3).map(Counter),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(max_size=2), max_size=3),
    ),
    max_leaves=12,
)


def through_json(value: object) -> Any:
    text = json.dumps(Encoder().encode(value, ("x",)), allow_nan=False).encode()
    return Decoder("x.json", {}).decode(json.loads(text))


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            same(a, b) for a, b in zip([*left, *left.values()], [*right, *right.values()], strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) and (
        type(left) is not float or math.copysign(1, left) == math.copysign(1, right)
    )


@given(values)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    assert same(through_json(value), value)


def test_a_number_of_any_size_comes_back() -> None:
    assert through_json([10**5000, -(10**5000)]) == [10**5000, -(10**5000)]


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000000, 0xFFF0000000000000]
)
def test_numbers_that_json_does_not_know_keep_their_bits(bits: int) -> None:
    value = struct.unpack(">d", struct.pack(">Q", bits))[0]
    assert struct.unpack(">Q", struct.pack(">d", through_json(value)))[0] == bits


@pytest.mark.parametrize(
    "value",
    [
        numpy.float32(1.5),
        numpy.int64(-3),
        numpy.bool_(True),
        numpy.datetime64("2026-01-01"),
        numpy.arange(6, dtype=">i4").reshape(2, 3),
        numpy.zeros((0, 3)),
        numpy.array("text"),
        numpy.array(2.0),
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    ],
    ids=repr,
)
def test_numpy_comes_back_with_its_types(value: Any) -> None:
    back = through_json(value)
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert numpy.array_equal(back, value)


def test_a_dict_that_looks_like_a_tag_is_a_dict() -> None:
    for value in ({"tensor": "model.weight"}, {"tuple": [1]}, {"dict": {"tensor": "x"}}):
        assert through_json(value) == value


class Custom:
    pass


class Text(str):
    pass


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (Custom(), "Custom has no form without pickle"),
        (Text("x"), "Text has no form without pickle"),
        (lambda: 1, "function has no form"),
        (numpy.array([Custom()]), "numpy array of object"),
        (numpy.float64, "type has no form"),
        (torch.zeros(2).to_sparse(), "has the layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "is on the meta device"),
        (torch.nn.parameter.UninitializedParameter(), "UninitializedParameter; copying its bytes would lose"),
        (1j, "complex has no form"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(leaf: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"state\['box.deep.0'\].*" + why):
        checkpointer(tmp_path).save(1, {"box": {"deep": [leaf]}}, "a test")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")  # torch's quantized tensors are deprecated
def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(UsageError, match=r"state\['t'\] is quantized"):
        checkpointer(tmp_path).save(1, {"t": tensor}, "a test")


def test_a_subclass_of_tensor_is_refused_by_name_and_type(tmp_path: Path) -> None:
    class Scaled(torch.Tensor):
        pass

    job = Job(0)
    job.model[0].weight = torch.nn.Parameter(torch.zeros(8, 8).as_subclass(Scaled))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"state\['model\.0\.weight'\] is a .*Scaled"):
        checkpointer(tmp_path).save(1, job.state, "a test")


def test_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        checkpointer(tmp_path).save(1, {"box": {"loop": loop}}, "a test")


def test_what_could_not_be_put_back_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"state\['epoch'\]: a int cannot be restored in place"):
        checkpointer(tmp_path).save(1, {"epoch": 3}, "a test")


@pytest.mark.parametrize(
    "value",
    [
        {"nonsense": 1},
        {},
        {"tuple": 3},
        {"bytes": "%"},
        {"torch.dtype": "float99"},
        {"tensor": "gone"},
        {"int": "x"},
    ],
)
def test_json_that_is_not_typed_is_damage(value: object) -> None:
    with pytest.raises(DamagedCopy):
        Decoder("x.json", {}).decode(value)


# What does not fit.


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("scheduler"), "'scheduler' is in the checkpoint only"),
        (lambda state: state.update(ema={}), "'ema' is in this job only"),
        (
            lambda state: state.update(model=Job(0, width=9).model),
            r"0.weight is float32\[8, 8\] in the checkpoint",
        ),
        (
            lambda state: state.update(model=Job(0).model.half()),
            r"float32\[8, 8\] in the checkpoint, float16",
        ),
        (
            lambda state: state.update(model=Job(0).model[:2]),
            r"2\.weight float32\[8, 8\] is in the checkpoint only",
        ),
        (
            lambda state: state.update(optimizer=torch.optim.SGD(Job(0).model.parameters())),
            "AdamW in the checkpoint",
        ),
        (
            lambda state: state.update(optimizer=torch.optim.AdamW(Job(0).model[0].parameters())),
            r"\[4\] in the che",
        ),
        (lambda state: state.update(scheduler={}), "CosineAnnealingLR in the checkpoint, none here"),
    ],
)
def test_another_model_is_refused_by_what_differs_and_nothing_is_touched(
    change: Any, why: str, tmp_path: Path
) -> None:
    records: list[Record] = []
    save_steps(tmp_path, 1, 2)
    other = Job(5)
    state = other.state
    change(state)
    before = other.content()
    with pytest.raises(CheckpointMismatch, match=rf"step-000000002\.g1 is sound but does not fit.*{why}"):
        checkpointer(tmp_path, records=records).restore(state)
    assert other.content() == before
    assert kinds(records) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [copy_name(1, 1), copy_name(2, 1)]


def test_a_live_value_that_cannot_be_restored_in_place_is_refused(tmp_path: Path) -> None:
    assert checkpointer(tmp_path).save(1, {"epoch": {"n": 3}}, "a test")
    with pytest.raises(UsageError, match="cannot be restored in place"):
        checkpointer(tmp_path).restore({"epoch": 0})
