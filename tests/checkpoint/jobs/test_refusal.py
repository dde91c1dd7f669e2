"""What cannot be kept is refused before anything is written; what does not fit, before it is loaded."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyStatus, Mark
from outlast.errors import CheckpointMismatch, NoUsableCheckpoint, UsageError
from outlast.ports import Exchange
from outlast.recovery.policy.events import Record
from tests.support.jobs import Job, checkpointer, kinds, save_steps, together


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
        (torch.nn.parameter.UninitializedParameter(), "has no shape yet"),
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
    job.model[0].weight = torch.nn.Parameter(torch.zeros(8, 8).as_subclass(Scaled))
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
            r"in no rank's live state: model\.2\.bias, model\.2\.weight",
        ),
        (
            lambda state: state.update(optimizer=torch.optim.SGD(Job(0).model.parameters())),
            "AdamW in the checkpoint",
        ),
        (
            lambda state: state.update(optimizer=torch.optim.AdamW(Job(0).model[0].parameters())),
            r"\[4\] in the che",
        ),
        (
            lambda state: state.update(optimizer=torch.optim.AdamW(Job(0).model.double().parameters())),
            r"its parameter 0 is model\.0\.weight float32\[8, 8\] in the checkpoint, float64\[8, 8\]",
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


def two_layers() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    for one in model.parameters():
        torch.nn.init.ones_(one)  # alike on all ranks
    return model


class Wrapping(torch.nn.Module):
    """Puts a word into the names, as DistributedDataParallel does."""

    def __init__(self) -> None:
        super().__init__()
        self.module = two_layers()


def compiled_layer() -> torch.nn.Module:
    model: Any = two_layers()
    model[0] = torch.compile(model[0], backend="eager")
    return model  # type: ignore[no-any-return]


def with_buffer() -> torch.nn.Module:
    model = two_layers()
    model.register_buffer("extra", torch.zeros(3))
    return model


def renamed() -> torch.nn.Module:
    return torch.nn.Sequential(OrderedDict(zip("ab", two_layers().children(), strict=True)))


@pytest.mark.parametrize(
    ("saved", "live", "named"),
    [
        (
            two_layers,
            lambda: torch.compile(two_layers(), backend="eager"),
            ("m.0.bias", "_orig_mod", "compile"),
        ),
        (
            lambda: torch.compile(two_layers(), backend="eager"),
            two_layers,
            ("m.0.bias", "_orig_mod", "compile"),
        ),
        (two_layers, compiled_layer, ("m.0.bias", "m.0._orig_mod.bias", "compile")),
        (Wrapping, two_layers, ("m.module.0.bias", "m.0.bias", "DistributedDataParallel")),
        (two_layers, Wrapping, ("m.module.0.bias", "m.0.bias", "DistributedDataParallel")),
        (two_layers, with_buffer, ("m.extra", "this job only", "added")),
        (with_buffer, two_layers, ("m.extra", "removed")),
        (two_layers, renamed, ("m.0.bias", "m.a.bias", "renamed")),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_changed_model_is_refused_by_names_and_cause(
    saved: Any, live: Any, named: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    """And not by the number of ranks, or by what other ranks would need, which is the same."""

    def save(exchange: Exchange) -> bool:
        return checkpointer(tmp_path, exchange=exchange).save(1, {"m": saved()}, "a test")

    def load(exchange: Exchange) -> Any:
        return checkpointer(tmp_path, exchange=exchange, generation=2).restore({"m": live()})

    assert together(ranks, save) == [True] * ranks
    for error in together(ranks, load):
        assert isinstance(error, CheckpointMismatch)
        assert all(one in str(error) for one in named), error
        assert "saved by" not in str(error)
        assert "DTensor" not in str(error)


def test_optimizers_in_a_list_are_to_be_registered_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"state\['box\.0'\].*AdamW.*under a name of its own"):
        checkpointer(tmp_path).save(1, {"box": [Job(0).optimizer]}, "a test")


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch(tmp_path: Path) -> None:
    saved = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"'m\.0\.weight'\].*pass a batch"):
        checkpointer(tmp_path).save(1, {"m": saved}, "a test")
    saved(torch.ones(1, 3))
    assert checkpointer(tmp_path).save(1, {"m": saved}, "a test")
    live = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"'m'\]: 0\.weight.*pass a batch"):
        checkpointer(tmp_path, generation=2).restore({"m": live})
    live(torch.ones(1, 3))
    assert checkpointer(tmp_path, generation=2).restore({"m": live}) is not None


def test_an_optimizer_whose_state_must_be_gathered_first_is_refused(tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    with pytest.raises(UsageError, match=r"'o'\]: a ZeroRedundancyOptimizer .*consolidate_state_dict"):
        checkpointer(tmp_path).save(1, {"o": optimizer}, "a test")


def test_a_live_value_that_cannot_be_restored_in_place_is_refused(tmp_path: Path) -> None:
    assert checkpointer(tmp_path).save(1, {"epoch": {"n": 3}}, "a test")
    with pytest.raises(UsageError, match="cannot be restored in place"):
        checkpointer(tmp_path).restore({"epoch": 0})


def test_where_every_copy_that_the_run_had_is_gone_nothing_starts_anew(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    marks = [Mark(f"local/{copy_name(step, 1)}", CopyStatus.DURABLE).to_text() for step in (1, 2)]
    job = Job(77)
    (tmp_path / copy_name(2, 1)).rename(tmp_path / "elsewhere")
    found = checkpointer(tmp_path, generation=2).restore(job.state, marks)
    assert found is not None
    assert (found.step, job.content()) == (1, content[1]), "one of them is there"
    (tmp_path / copy_name(1, 1)).rename(tmp_path / "elsewhere-1")
    before = job.content()
    names = f"{copy_name(1, 1)}, {copy_name(2, 1)}"
    with pytest.raises(NoUsableCheckpoint, match=rf"{names}, .* is there any more.*--run-dir") as refused:
        checkpointer(tmp_path, generation=3).restore(job.state, marks)
    assert str(tmp_path) in str(refused.value)
    assert job.content() == before
    assert checkpointer(tmp_path, generation=3).restore(job.state) is None, "the run knows of none"
