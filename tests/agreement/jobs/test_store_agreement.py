"""Ranks that agree on a step to vote after: threads over a store of torch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from torch.distributed import HashStore

from outlast.agreement.worker.store_agreement import StoreAgreement
from outlast.ports import ExchangeFailed

PATIENCE = 60.0


@dataclass
class Rank:
    """One rank: trains steps of its own lengths, and notes after which steps it would vote."""

    store: HashStore
    number: int
    world: int
    seconds: list[float]
    wants: threading.Event = field(default_factory=threading.Event)
    met: list[int] = field(default_factory=list)
    error: ExchangeFailed | None = None
    completed: int = 0

    def __post_init__(self) -> None:
        self.agreement = StoreAgreement(self.store, self.number, self.world, 3, self.wants.is_set)
        self.thread = threading.Thread(target=self.train)
        self.at_gate = threading.Event()  # it waits there before the step of this index, until it may go on
        self.go_on = threading.Event()
        self.gate = -1

    def train(self) -> None:
        self.agreement.begin(0)
        try:
            for step, seconds in enumerate(self.seconds, 1):
                if step == self.gate:
                    self.at_gate.set()
                    assert self.go_on.wait(PATIENCE)
                time.sleep(seconds)
                self.completed = step
                if self.agreement.due(step):
                    self.met.append(step)
                    self.wants.clear()
                    self.agreement.begin(step)
        except ExchangeFailed as error:
            self.error = error
        self.agreement.close()


@contextmanager
def training(*ranks: Rank) -> Iterator[None]:
    for rank in ranks:
        rank.thread.start()
    yield
    for rank in ranks:
        rank.thread.join(PATIENCE)
        assert not rank.thread.is_alive(), f"rank {rank.number} after step {rank.completed}"


def ranks(*seconds: list[float]) -> list[Rank]:
    store = HashStore()
    return [Rank(store, number, len(seconds), each) for number, each in enumerate(seconds)]


def test_ranks_of_different_speeds_vote_after_the_same_steps(seed: int) -> None:
    draw = random.Random(seed)
    found = ranks(*([draw.choice((0.0, 0.001, 0.01)) for _ in range(600)] for _ in range(4)))
    with training(*found):
        for _ in range(3):
            asking = draw.choice(found)
            asking.wants.set()
            end = time.monotonic() + PATIENCE
            while asking.wants.is_set() and asking.thread.is_alive() and time.monotonic() < end:
                time.sleep(0.001)
    assert not any(rank.error for rank in found)
    assert found[0].met, "somebody was heard"
    assert [rank.met for rank in found] == [found[0].met] * 4


def test_a_rank_in_a_long_step_is_waited_for_and_votes_after_it() -> None:
    slow, quick = ranks([0.0] * 20, [0.0] * 20)
    slow.gate = 5
    with training(slow, quick):
        assert slow.at_gate.wait(PATIENCE)
        quick.thread.join(PATIENCE)  # it has done its steps, and is in nobody's way
        slow.wants.set()
        slow.go_on.set()
    assert slow.completed == 20
    assert slow.met == quick.met == []


def test_a_request_within_a_long_step_is_met_after_that_step() -> None:
    asking, other = ranks([0.0] * 20, [0.0] * 20)
    asking.gate = other.gate = 5
    with training(asking, other):
        assert asking.at_gate.wait(PATIENCE)
        assert other.at_gate.wait(PATIENCE)
        asking.wants.set()
        end = time.monotonic() + PATIENCE
        while not asking.store.check(["outlast/3/votes/1/1/meet"]) and time.monotonic() < end:
            time.sleep(0.001)
        asking.go_on.set()
        other.go_on.set()
    assert asking.met == other.met == [5]


def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    failing, waiting = ranks([0.0] * 20, [0.0] * 20)
    waiting.gate = 5
    waiting.wants.set()
    with training(waiting):
        assert waiting.at_gate.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while not waiting.store.check(["outlast/3/votes/1/1/completed/1"]) and time.monotonic() < end:
            time.sleep(0.001)
        failing.agreement.begin(0)
        failing.agreement.fail("ValueError: a batch")
        waiting.go_on.set()
    assert waiting.completed == 5
    assert "rank 0 failed: ValueError: a batch" in str(waiting.error)


@pytest.mark.parametrize("world", [1, 3])
def test_without_a_request_nobody_votes(world: int) -> None:
    found = ranks(*([0.0] * 50 for _ in range(world)))
    with training(*found):
        pass
    assert all(rank.completed == 50 and not rank.met for rank in found)
