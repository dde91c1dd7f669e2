"""A state that is captured again and again is captured as if it were the first time, whatever has changed."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from outlast.checkpoint.content import codecs, state
from outlast.checkpoint.content.state import Captured, Capturer, capture
from outlast.checkpoint.save.staging import Fingerprint
from tests.support.changes import CHANGES, Run

STEPS = 60


class Anew:
    """Makes its tensors whenever it is asked."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.arange(3.0), "at": [1, 2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def shown(captured: Captured) -> list[Any]:
    """Return what is to be equal; texts tell 1, 1.0 and true apart."""
    forms = [
        (key, one.data_ptr(), one.shape, one.stride(), one.dtype, one.is_conj(), one.is_neg())
        for key, one in captured.tensors.items()
    ]
    values = (captured.values, captured.kinds, captured.aliases, captured.parameters, captured.flags)
    pieces = [(key, one.global_shape, one.part, one.cuts) for key, one in captured.pieces.items()]
    return [forms, pieces, *map(repr, values)]


def disagreements(seed: int) -> list[str]:
    """Change a state in many ways; return after which change the capture was not as the first time."""
    dice = random.Random(seed)
    run, capturer = Run(dice), Capturer()
    before = capturer.capture(run.state)
    found = []
    for _ in range(STEPS):
        change = dice.choice(CHANGES)
        getattr(run, change)()
        now, fresh = capturer.capture(run.state), capture(run.state)
        if shown(now) != shown(fresh) or (now.form is before.form and shown(now)[0] != shown(before)[0]):
            found.append(change)
        before = now
    return found


@pytest.mark.parametrize("part", range(10))
def test_whatever_changes_a_state_is_captured_as_if_for_the_first_time(seed: int, part: int) -> None:
    for number in range(10 * part, 10 * part + 10):
        assert disagreements(seed + number) == []


@pytest.mark.parametrize("column", range(6))
def test_each_comparison_of_tensors_is_needed(
    seed: int, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = state._geometry

    def without(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
        found = geometry(tensors)
        return (*found[:column], *found[column + 1 :])

    monkeypatch.setattr(state, "_geometry", without)
    assert any(disagreements(seed + number) for number in range(100))


def test_a_state_that_keeps_its_form_is_not_taken_apart_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, capturer = Run(random.Random(0)), Capturer()
    for _ in range(2):
        run.step()
        capturer.capture(run.state)
    monkeypatch.setattr(state._Keys, "of", None)
    form = capturer.capture(run.state).form
    run.step()
    assert capturer.capture(run.state).form is form


def test_nothing_keeps_tensors_that_the_script_has_released() -> None:
    run, capturer = Run(random.Random(0)), Capturer()
    run.step()
    storages = [weakref.ref(one.untyped_storage()) for one in (run.box["x"], run.net.conv.weight)]
    pointers = [weakref.ref(one) for one in (run.box["x"], run.net.conv.weight)]
    capturer.capture(run.state)
    del run
    gc.collect()
    assert [one() for one in (*storages, *pointers)] == [None] * 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_captured_as_if_for_the_first_time(mesh: DeviceMesh) -> None:
    run = Run(random.Random(0))
    run.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(run.net, mesh=mesh)
    optimizer = torch.optim.Adam(run.net.parameters())
    local = torch.ones(4, 2)
    box: dict[str, Any] = {"part": DTensor.from_local(local, mesh, [Shard(0)])}
    state = {"net": run.net, "optimizer": optimizer, "box": box}
    capturer, forms = Capturer(), []

    def train() -> None:
        run.net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    changes: list[Callable[[], object]] = [
        train,
        train,
        train,
        lambda: box.update(part=DTensor.from_local(local, mesh, [Shard(1)])),
        lambda: box.update(part=DTensor.from_local(local, mesh, [Replicate()])),
        lambda: box.update(part=local),
    ]
    for change in changes:
        change()
        found = capturer.capture(state)
        forms.append(found.form)
        assert shown(found) == shown(capture(state))
    kept = [one is other for one, other in itertools.pairwise(forms)]
    assert kept == [True, True, False, False, False]


def test_a_tensor_that_a_thread_replaces_after_a_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that is kept is that of what was captured, not of what is there a moment later."""
    box: dict[str, Any] = {"t": [torch.ones(1)], "m": {"a": torch.ones(2), "b": torch.ones(1)}, "d": {"k": 1}}
    of = state._Keys.of
    changes: list[Callable[[], object]] = [
        lambda: box["t"].__setitem__(0, torch.ones(2, 3)),
        lambda: box["t"].append(torch.ones(1)),
        lambda: box["m"].update(c=box["m"].pop("a")),
        lambda: box.update(d={"k": torch.ones(1)}),
        lambda: box.update(t=(torch.ones(1),)),
    ]
    for change in changes:
        capturer = Capturer()

        def then(walk: Any, change: Callable[[], object] = change) -> Any:
            found = of(walk)
            change()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(state._Keys, "of", then)
            before = capturer.capture({"box": box})
        now = capturer.capture({"box": box})
        assert shown(now) == shown(capture({"box": box}))
        assert now.form is not before.form


def test_what_changed_in_between_is_told_alike_by_first_and_later_captures(mesh: DeviceMesh) -> None:
    local = torch.ones(4, 2)
    local.add_(1)
    state = {"box": {"part": DTensor.from_local(local, mesh, [Shard(0)]), "plain": torch.ones(2)}}
    capturer = Capturer()
    captures = [capturer.capture(state) for _ in range(2)]
    prints = [Fingerprint.of(one) for one in captures]
    assert [one.changed(other) for one in prints for other in captures] == [[]] * 4
    local.add_(1)
    assert [one.changed(capturer.capture(state)) for one in prints] == [["box.part"]] * 2


def test_parts_of_a_registered_type_keep_their_keys_while_they_keep_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    codecs.register_codec(torch.nn.Parameter, lambda one: {"value": one.detach()}, lambda one: one["value"])
    box: dict[str, Any] = {"p": torch.nn.Parameter(torch.ones(2)), "n": 1}
    capturer, forms = Capturer(), []
    for change in ({}, {"n": 2}, {"p": torch.nn.Parameter(torch.ones(2))}):
        box.update(change)
        found = capturer.capture({"box": box})
        forms.append(found.form)
        assert shown(found) == shown(capture({"box": box}))
    assert [one is other for one, other in itertools.pairwise(forms)] == [True, False]


def test_a_codec_that_makes_its_tensors_anew_is_asked_once_a_capture_and_those_of_one_walk_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def take_apart(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        alive.append(sum(one() is not None for one in made))
        found = torch.empty(1000 + len(made))  # of another size, and so at another address
        made.append(weakref.ref(found))
        return {"value": found}

    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    codecs.register_codec(torch.nn.Parameter, take_apart, lambda one: one["value"])
    capturer, box = Capturer(), {"p": torch.nn.Parameter(torch.ones(2))}
    for _ in range(5):
        capturer.capture({"box": box})
    assert len(made) == 5 + 1, "once, and once more where the first change of its form is found"
    assert alive == [0] * len(made)


class Basis:
    """Counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Basis.compared += 1
        return isinstance(other, Basis)

    __hash__ = None  # type: ignore[assignment]


def test_what_was_derived_from_an_equal_basis_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Basis, "compared", 0)
    derived, made = state.Derived[object](), []
    for basis in (Basis(), *[Basis()] * 3):
        made.append(derived.of(basis, object))
    assert (len(set(map(id, made))), Basis.compared) == (1, 1)
    assert derived.of(None, object) is not made[0]


def test_objects_that_make_their_tensors_anew_are_captured_each_time() -> None:
    capturer, state = Capturer(), {"anew": Anew(), "box": {"n": 0}}
    for number in range(20):
        state["box"]["n"] = number  # type: ignore[index]
        assert shown(capturer.capture(state))[1:] == shown(capture(state))[1:]


def test_a_tensor_in_the_place_of_a_value_is_found(seed: int) -> None:
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda box: box.update(n=torch.ones(1)),
        lambda box: box["list"].append(torch.ones(1)),
        lambda box: box.update(map={"a": torch.ones(1)}),
    ]
    for change in changes:
        box: dict[str, Any] = {"n": 1, "list": [1], "map": {"a": 1}}
        capturer = Capturer()
        capturer.capture({"box": box})
        change(box)
        assert len(capturer.capture({"box": box}).tensors) == 1, seed
