"""Ranks that agree on a step to vote after: threads over a store of torch."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from outlast.agreement.worker.store_agreement import StoreAgreement
from outlast.ports import ExchangeFailed
from tests.agreement.jobs.training import PATIENCE, Trainee, all_at_gate, open_gate, started, until

SHORT = [0.0] * 20


class Rank(Trainee):
    """A rank that notes after which steps it would vote."""

    def __init__(self, store: HashStore, number: int, world: int, seconds: Sequence[float]) -> None:
        super().__init__(seconds)
        self.store, self.wants = store, threading.Event()
        self.agreement = StoreAgreement(store, number, world, 3, self.wants.is_set)
        self.met: list[int] = []
        self.error: ExchangeFailed | None = None

    def begin(self) -> None:
        self.agreement.begin(0)

    def after(self, step: int) -> None:
        if self.error is not None:
            return
        try:
            due = self.agreement.due(step)
        except ExchangeFailed as error:
            self.error = error
            return
        if due:
            self.met.append(step)
            self.wants.clear()
            self.agreement.begin(step)

    def end(self) -> None:
        self.agreement.close()


def ranks(*seconds: Sequence[float]) -> list[Rank]:
    store = HashStore()
    return [Rank(store, number, len(seconds), each) for number, each in enumerate(seconds)]


def test_ranks_of_different_speeds_vote_after_the_same_steps(seed: int) -> None:
    draw = random.Random(seed)
    found = ranks(*([draw.choice((0.0, 0.001, 0.01)) for _ in range(600)] for _ in range(4)))
    with started(*found):
        for _ in range(3):
            asking = draw.choice(found)
            asking.wants.set()
            until(lambda rank=asking: not rank.wants.is_set() or not rank.thread.is_alive())
    assert not any(rank.error for rank in found)
    assert found[0].met, "somebody was heard"
    assert [rank.met for rank in found] == [found[0].met] * 4


def test_nobody_waits_for_a_rank_that_has_done_its_steps() -> None:
    slow, quick = ranks(SHORT, SHORT)
    slow.gate = 5
    with started(slow, quick):
        all_at_gate([slow])
        quick.thread.join(PATIENCE)
        slow.wants.set()
        open_gate(slow)
    assert slow.completed == 20
    assert slow.met == quick.met == []


def test_a_request_within_a_long_step_is_met_after_that_step() -> None:
    asking, other = found = ranks(SHORT, SHORT)
    asking.gate = other.gate = 5
    with started(*found):
        all_at_gate(found)
        asking.wants.set()
        until(lambda: asking.store.check(["outlast/3/votes/1/1/meet"]))
        open_gate(*found)
    assert asking.met == other.met == [5]


def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    failing, waiting = ranks(SHORT, SHORT)
    waiting.gate = 5
    waiting.wants.set()
    with started(waiting):
        all_at_gate([waiting])
        until(lambda: waiting.store.check(["outlast/3/votes/1/1/completed/1"]))
        failing.agreement.begin(0)
        failing.agreement.fail("ValueError: a batch")
        open_gate(waiting)
    assert waiting.met == []
    assert "rank 0" in str(waiting.error)
    assert "ValueError: a batch" in str(waiting.error)


@pytest.mark.parametrize("world", [1, 3])
def test_without_a_request_nobody_votes(world: int) -> None:
    found = ranks(*([0.0] * 50 for _ in range(world)))
    with started(*found):
        pass
    assert all(rank.completed == 50 and not rank.met for rank in found)
