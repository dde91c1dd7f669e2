"""Batches of several ranks side by side: samples, weights, state, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import outlast
from outlast.parallelism.policy.shares import Slow
from outlast.parallelism.worker import Batches, MicroBatch, batches_of
from outlast.settings import WorkerContext


class Numbers(Dataset[int]):
    """Each item is its own number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: int) -> int:
        return at


Steps = Callable[[list[Batches]], list[list[MicroBatch]]]


@pytest.fixture
def step_of(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Take a step on every rank, each of which is known by its environment as under torchrun."""

    def take(ranks: list[Batches]) -> list[list[MicroBatch]]:
        monkeypatch.setenv("WORLD_SIZE", str(len(ranks)))
        found = []
        for rank, batches in enumerate(ranks):
            monkeypatch.setenv("RANK", str(rank))
            found.append(next(batches))
        return found

    return take


def ranks(world: int, size: int, batch: int, micro: int, **options: Any) -> list[Batches]:
    return [Batches(Numbers(size), batch, micro, **options) for _ in range(world)]


def test_samples_weights_and_the_last_of_each_rank(step_of: Steps) -> None:
    found = step_of(ranks(3, 10, 10, 3, seed=None))
    assert [[one.samples for one in mine] for mine in found] == [[(0, 1, 2), (3, 4, 5)], [(6, 7, 8)], [(9,)]]
    assert [[one.last for one in mine] for mine in found] == [[False, True], [True], [True]]
    assert [one.weight for mine in found for one in mine] == pytest.approx([0.9, 0.9, 0.9, 0.3])
    assert torch.equal(found[2][0].data, torch.tensor([9]))


def test_a_rank_without_samples_takes_part_with_weight_zero(step_of: Steps) -> None:
    found = step_of(ranks(3, 2, 2, 1, seed=None))
    (filler,) = found[2]
    assert (filler.samples, filler.weight, filler.last) == ((), 0.0, True)
    assert torch.equal(filler.data, torch.tensor([0]))
    assert [one[0].weight for one in found] == [1.5, 1.5, 0.0]


def test_gradients_are_weighed_by_tokens(step_of: Steps) -> None:
    lengths = [5, 1, 1, 1]
    by_number = step_of(ranks(2, 4, 4, 1, seed=None, tokens=lengths))
    assert [one.weight for mine in by_number for one in mine] == [1.25, 0.25, 0.25, 0.25]
    (counted,) = step_of(ranks(1, 4, 4, 1, seed=None, tokens=lambda data: lengths[int(data)]))
    assert [one.weight for one in counted] == [0.625, 0.125, 0.125, 0.125]


@pytest.mark.parametrize(
    ("workers", "worlds"),
    [(0, [(3, (), 2), (2, ((1, 500),), 2), (1, (), 1), (4, ((0, 250),), 2)]), (1, [(2, (), 3), (1, (), 4)])],
    ids=["here", "in a process"],
)
def test_a_job_goes_on_at_the_exact_sample_in_another_world(
    step_of: Steps, workers: int, worlds: list[tuple[int, Slow, int]]
) -> None:
    taken: Counter[int] = Counter()
    state = Batches(Numbers(37), 6, 2, seed=5).state_dict()
    for world, slow, steps in worlds:
        found = ranks(world, 37, 6, 2, seed=5, num_workers=workers)
        for one in found:
            one.load_state_dict(state)
        step_of(found)  # ranks are known from here on
        for one in found:
            one.load_state_dict(state)
            one.rebalance(slow)
        for _ in range(steps):
            for micro in itertools.chain(*step_of(found)):
                assert tuple(micro.data.tolist()) == micro.samples or not micro.samples
                taken.update(micro.samples)
        states = [one.state_dict() for one in found]
        state = states[0]
        assert states == [state] * world
    assert taken == Counter(range(37))
    assert (state["epoch"], state["taken"]) == (0, 37)


def test_shares_follow_the_speeds_and_are_even_again(step_of: Steps) -> None:
    found = ranks(4, 56, 56, 2)
    step_of(found)
    assert found[0].shares == (7, 7, 7, 7)
    assert [one.rebalance(((2, 500),)) for one in found] == [(8, 8, 4, 8)] * 4
    assert [len(one) for one in step_of(found)] == [8, 8, 4, 8]
    assert found[1].rebalance(()) == (7, 7, 7, 7)


def test_a_second_session_of_a_generation_keeps_the_shares(step_of: Steps) -> None:
    """The ranks agreed on them through the agent, which does not ask again for what is so already."""
    found = ranks(4, 56, 56, 2)
    step_of(found)
    shares = []
    for generation, slow in ((3, ((2, 500),)), (3, None), (4, None)):
        for one in found:
            one.measure(contextlib.nullcontext, contextlib.nullcontext, generation)
            if slow is not None:
                one.rebalance(slow)
        shares.append(found[0].shares)
    assert shares == [(8, 8, 4, 8), (8, 8, 4, 8), (7, 7, 7, 7)]


def test_the_random_state_of_the_script_stays(step_of: Steps) -> None:
    before = torch.get_rng_state()
    step_of(ranks(1, 8, 4, 2, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("size", "seed", "named"), [(11, 0, "size.*10.*11"), (10, 1, "seed.*0.*1")], ids=["data set", "seed"]
)
def test_another_data_set_or_seed_is_refused_and_other_batches_are_not(
    size: int, seed: int, named: str
) -> None:
    state = Batches(Numbers(10), 4, 2).state_dict()
    Batches(Numbers(10), 6, 3).load_state_dict(state)
    with pytest.raises(outlast.CheckpointMismatch, match=named):
        Batches(Numbers(size), 4, 2, seed=seed).load_state_dict(state)


def test_rebalancing_needs_batches_of_all_ranks_in_the_state() -> None:
    context = WorkerContext(world_size=2, stragglers={"action": "rebalance"})
    batches = Batches(Numbers(8), 4, 2)
    assert batches_of({"model": object(), "batches": batches}, context) is batches
    for count, state in (
        (0, {"model": object()}),
        (2, {"train": batches, "test": Batches(Numbers(8), 4, 2)}),
    ):
        with pytest.raises(outlast.UsageError, match=str(count)):
            batches_of(state, context)
    assert batches_of({}, WorkerContext()) is None


class Endless(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(outlast.UsageError, match="dataset"):
        Batches(Endless(), 4, 2)
    with pytest.raises(outlast.UsageError, match=r"shuffle.*micro_batch: 8.*tokens: .*1.*10"):
        Batches(Numbers(10), 4, 8, tokens=[1], shuffle=True)


class Model(torch.nn.Linear):
    """Knows whether its gradients are reduced."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.reduced: list[bool] = []

    def set_requires_gradient_sync(self, reduces: bool) -> None:
        self.reduced.append(reduces)


def test_gradients_are_reduced_for_the_last_one_only(step_of: Steps) -> None:
    model = Model()
    (mine,) = step_of(ranks(1, 6, 6, 2))
    for micro in mine:
        with micro.sync(model):
            pass
    assert model.reduced == [False, False, True]


class FailsOnce(Numbers):
    """An item cannot be read the first time."""

    def __init__(self, size: int, at: int) -> None:
        super().__init__(size)
        self._at = at

    def __getitem__(self, at: int) -> int:
        if at == self._at:
            self._at = -1
            raise OSError("not read")
        return at


def test_a_step_that_could_not_be_read_is_read_again_from_its_beginning(step_of: Steps) -> None:
    found = [Batches(FailsOnce(40, 13), 8, 2, seed=None)]
    step_of(found)
    with pytest.raises(OSError, match="not read"):
        step_of(found)
    for micro in step_of(found)[0]:
        assert tuple(micro.data.tolist()) == micro.samples
