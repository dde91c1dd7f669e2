"""What a step needs to be run again: batches, random states, buffers; and what ranks hand each other."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outlast.errors import UsageError
from outlast.rerun.worker.data import RerunDataIterator, StepState, iterators
from outlast.rerun.worker.swap import Parcel, digest, unpack


def test_a_rewind_gives_the_same_batches_and_an_advance_lets_them_go() -> None:
    data = RerunDataIterator(iter(range(10)))
    assert [next(data), next(data)] == [0, 1]
    data.rewind()
    assert [next(data), next(data), next(data)] == [0, 1, 2]
    data.advance()
    assert data.drawn == ()
    assert next(data) == 3


def test_what_was_not_drawn_again_is_drawn_by_the_next_step_and_swapped_batches_count_as_drawn() -> None:
    data = RerunDataIterator(iter(range(10)))
    assert [next(data), next(data)] == [0, 1]
    data.rewind()
    assert next(data) == 0
    data.advance()
    assert [next(data), next(data)] == [1, 2]
    data.rewind()
    data.swap([("a", None), ("b", None)])
    assert list(data) == ["a", "b"]
    data.advance()
    assert next(data) == 3


def test_a_script_that_changes_its_batch_does_not_change_the_rerun() -> None:
    data = RerunDataIterator([{"x": [1, 2]}])
    first = next(data)
    first["x"].append(3)
    del first["x"]
    data.rewind()
    assert next(data) == {"x": [1, 2]}


class Loader:
    """A loader that knows its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_keeps_its_place_in_checkpoints() -> None:
    data = RerunDataIterator(Loader())
    assert [next(data), next(data), next(data)] == [0, 1, 2]
    data.rewind()
    assert next(data) == 0
    other = RerunDataIterator(Loader())
    other.load_state_dict(data.state_dict())
    assert [next(other) for _ in range(3)] == [1, 2, 3]


def test_a_place_that_no_loader_takes_is_refused() -> None:
    data = RerunDataIterator(Loader())
    next(data)
    with pytest.raises(UsageError, match=r"range\b.*\bload_state_dict"):
        RerunDataIterator(range(3)).load_state_dict(data.state_dict())


def test_an_iterator_that_cannot_go_back_is_refused() -> None:
    with pytest.raises(UsageError, match="list_iterator"):
        iterators(iter([1]))
    assert iterators(None) == ()
    one = RerunDataIterator([1])
    assert iterators([one, one]) == (one, one)


class Counted:
    """Something that a forward pass changes."""

    def __init__(self) -> None:
        self.seen = [0]

    def state_dict(self) -> dict[str, list[int]]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.seen = state["seen"]


def test_a_step_that_is_put_back_computes_the_same_again(seed: int) -> None:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)]
    model = torch.nn.Sequential(*layers)
    model.register_buffer("table", torch.arange(8.0), persistent=False)
    model.register_buffer("count", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    also = Counted()
    state = StepState(model, optimizer, [also])
    batch = torch.randn(4, 8)

    def step() -> tuple[Any, ...]:
        also.seen[0] += 1
        model.count = model.count + 1  # another tensor in the buffer's place
        loss = model(batch * random.random()).sum() + torch.rand(())
        loss.backward()
        gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        return loss.item(), digest(gradients), digest(model.buffers()), list(also.seen)

    for cleared in (True, False):
        optimizer.zero_grad(set_to_none=cleared)
        before = digest(one.grad for one in model.parameters())
        state.keep()
        first = step()
        state.put_back()
        assert digest(one.grad for one in model.parameters()) == before
        assert step() == first


def test_what_is_not_put_back_would_be_seen(seed: int) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Dropout(0.5)
    state = StepState(model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    state.keep()
    first = model(torch.ones(64))
    assert not torch.equal(model(torch.ones(64)), first)
    state.put_back()
    assert torch.equal(model(torch.ones(64)), first)


@pytest.mark.parametrize(
    "value",
    [
        {"x": torch.arange(6).reshape(2, 3), "y": (torch.tensor(1.5), [None, True, "text", 3])},
        [torch.zeros(0, 4), torch.tensor([1 + 2j]), torch.ones(3, dtype=torch.bfloat16), b"bytes"],
        {1: torch.tensor([True, False]), "strided": torch.arange(8)[::2]},
        (),
    ],
)
def test_a_parcel_arrives_as_it_was(value: Any) -> None:
    parcel = Parcel(value)
    found = unpack(json.loads(parcel.form), parcel.content)

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return one.dtype is other.dtype and torch.equal(one, other)
        if isinstance(one, dict):
            return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
        if isinstance(one, (list, tuple)):
            return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
        return bool(one == other)

    assert same(value, found)


def test_what_no_other_rank_can_have_is_named() -> None:
    with pytest.raises(TypeError, match=r"\bobject\b"):
        Parcel([object()])


def test_one_bit_changes_a_digest() -> None:
    one = torch.randn(1000)
    other = one.clone()
    other.view(torch.int32)[500] ^= 1
    assert digest([one]) != digest([other])
    assert digest([one, None]) != digest([None, one])
