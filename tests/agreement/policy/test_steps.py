"""All ranks act after the same step, whatever is late, lost, reordered or dead, and every request ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.steps import (
    Answer,
    Move,
    Proposal,
    RankEnded,
    Stage,
    Status,
    StepCoordinator,
    StepParticipant,
    Want,
)
from outlast.agreement.policy.votes import Flag
from tests.simulation.ranks import Rank, acted_apart

LAST_STEP = 400
FAIR_ROUNDS = 150
RECENT = 160  # of 200 messages so many are the newest


Op = tuple[str, int, int]
OPS = ("train", "train", "train", "look", "look", "hear", "hear", "tell", "tell", "deliver", "want", "die")


class World:
    """A coordinator and ranks; messages are delivered in any order, several times or never.

    ``coupled``: a step ends only when every rank has begun it, as with data-parallel training.
    """

    def __init__(
        self, ranks: int, coupled: bool, coordinator: type[StepCoordinator], part: type[StepParticipant]
    ) -> None:
        self.coordinator = coordinator(range(ranks))
        self.ranks = [Rank(number, part()) for number in range(ranks)]
        for rank in self.ranks:
            rank.part.begin(1)
        self.coupled = coupled
        self.said: list[Proposal] = []
        self.told: list[Status] = []
        self.died = False

    def do(self, op: Op) -> None:
        what, number, pick = op
        rank = self.ranks[number % len(self.ranks)]
        if rank.alive:
            getattr(self, what)(rank, pick)

    def look(self, rank: Rank, _: int) -> None:
        if rank.training:
            rank.look()

    def hear(self, rank: Rank, pick: int) -> None:
        if self.said:
            rank.said = self.said[-1 if pick < RECENT else pick % len(self.said)]

    def tell(self, rank: Rank, _: int) -> None:
        self.told.append(rank.status())

    def deliver(self, rank: Rank, pick: int) -> None:
        if pick < RECENT:
            self.tell(rank, pick)
        if self.told:
            self.said += self.coordinator.handle(self.told[-1 if pick < RECENT else pick % len(self.told)])

    def want(self, rank: Rank, pick: int) -> None:
        if rank.training:
            rank.wants |= list(Want)[pick % len(Want)]
        if pick % 3 == 0:
            self.coordinator.rebalance(((rank.number, 100 + pick),) if pick % 2 else ())

    def die(self, rank: Rank, pick: int) -> None:
        if pick % 4 == 0:
            rank.alive, self.died = False, True
            self.said += self.coordinator.handle(RankEnded(rank.number))

    def train(self, rank: Rank, _: int = 0) -> None:
        """Complete the step that is under way, and be after it."""
        if not rank.training or rank.left < rank.completed:
            return
        if self.coupled and any(other.left < rank.completed and other.alive for other in self.ranks):
            return
        rank.completed += 1
        if rank.completed >= LAST_STEP:  # of the loop, after which nobody acts
            rank.begin(rank.round + 1)
        else:
            rank.look()

    def settle(self) -> None:
        """Let everything arrive, in order, and all ranks train until every request has ended."""
        for turn in range(FAIR_ROUNDS):
            if turn > len(self.ranks) and not self.unserved():
                return
            for rank in self.ranks:
                if rank.alive:
                    self.deliver(rank, 0)
                self.hear(rank, 0)
            for rank in self.ranks:
                if rank.training and rank.left < rank.completed:
                    rank.look()
                elif rank.alive:
                    self.train(rank)

    def bad(self) -> list[str]:
        """Return what must not be."""
        return acted_apart(self.ranks)

    def unserved(self) -> list[str]:
        """Return which requests did not end, and which ranks wait, where no rank has died."""
        if self.died:
            return []
        found = [f"rank {one.number} wants {one.wants!r}" for one in self.ranks if one.wants and one.training]
        return found + [
            f"rank {one.number} waits after step {one.completed}"
            for one in self.ranks
            if one.training and one.left < one.completed
        ]


def play(
    ops: list[Op],
    ranks: int,
    coupled: bool,
    coordinator: type[StepCoordinator] = StepCoordinator,
    part: type[StepParticipant] = StepParticipant,
) -> tuple[World, list[str]]:
    world = World(ranks, coupled, coordinator, part)
    for op in ops:
        world.do(op)
    world.settle()
    return world, [*world.bad(), *world.unserved()]


SCHEDULES = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 3), st.integers(0, 199)), min_size=20, max_size=120
)


@given(SCHEDULES, st.integers(1, 4), st.booleans())
def test_ranks_act_after_the_same_step_and_every_request_ends(
    ops: list[Op], ranks: int, coupled: bool
) -> None:
    _, bad = play(ops, ranks, coupled)
    assert bad == []


def standing(rank: int, step: int, **more: Any) -> Status:
    return Status(rank, more.pop("serial", 1), 1, step, **more)


@pytest.mark.parametrize(("wants", "step"), [(Want.SAVE, 9), (Want.DUE, 9), (Want.PREEMPTED, 8)])
def test_the_step_is_ahead_of_the_rank_that_is_furthest(wants: Want, step: int) -> None:
    found = StepCoordinator((0, 1))
    assert found.handle(standing(0, 6, wants=wants)) == [], "nobody knows how far the other one is"
    assert found.handle(standing(1, 7)) == [Proposal(1, Stage.PROPOSED, 1, step, wants)]
    assert found.open


def test_a_rank_that_has_passed_the_step_gets_one_that_is_further_ahead() -> None:
    found = StepCoordinator((0,))
    (first,) = found.handle(standing(0, 6, wants=Want.SAVE))
    (second,) = found.handle(standing(0, 20, wants=Want.SAVE, serial=2, answered=1, passed=True))
    assert (first.step, second.step, second.number) == (8, 24, 2)
    (third,) = found.handle(standing(0, 24, wants=Want.SAVE, serial=3, answered=1, passed=True))
    assert third.step == 32, "it was not heard, and the step is over"


def test_what_is_committed_is_all_requests_the_least_time_and_the_longest_save() -> None:
    found = StepCoordinator((0, 1))
    found.handle(standing(0, 6, wants=Want.SAVE))
    found.handle(standing(1, 6))
    slow = standing(0, 6, serial=2, answered=1, wants=Want.SAVE, seconds={"local": 3.0})
    quick = standing(1, 6, serial=2, answered=1, wants=Want.PREEMPTED, ends=50.0, limit=60.0)
    assert found.handle(slow) == []
    (said,) = found.handle(replace(quick, seconds={"local": 1.0, "memory": 0.5}))
    both = Want.SAVE | Want.PREEMPTED
    assert said == Proposal(1, Stage.COMMITTED, 1, 8, both, 50.0, 60.0, {"local": 3.0, "memory": 0.5})
    vote = said.vote(40.0)
    assert (vote.flags, vote.left, vote.limit) == (frozenset({Flag.SAVE, Flag.PREEMPTED}), 10.0, 20.0)


def test_a_rank_of_no_loop_is_asked_nothing_and_nobody_waits_for_it() -> None:
    found = StepCoordinator((0, 1))
    found.handle(standing(0, 6, wants=Want.SAVE))
    found.handle(standing(1, 6))
    (said,) = found.handle(Status(1, 2, 2, 6))
    assert said.stage is Stage.WITHDRAWN
    assert found.handle(Status(0, 2, 2, 6, wants=Want.SAVE)) == []


class CommitsEarly(StepCoordinator):
    """Commits when one rank has promised."""

    def _weighed(self, current: Proposal) -> Proposal | None:
        if any(one.answered == current.number for one in self._known.values()):
            return replace(current, stage=Stage.COMMITTED)
        return super()._weighed(current)


class TakesAnyAnswer(StepCoordinator):
    """Takes it for a promise that a rank has gone on already."""

    def handle(self, event: Status | RankEnded) -> list[Proposal]:
        return super().handle(replace(event, passed=False) if isinstance(event, Status) else event)


class AwaitsEveryAnswer(StepCoordinator):
    """Waits for the answer of a rank that has gone on and needs the others to come to its next look."""

    def _weighed(self, current: Proposal) -> Proposal | None:
        hidden = {
            rank: one if one.answered == current.number else replace(one, step=-1)
            for rank, one in self._known.items()
        }
        known, self._known = self._known, hidden
        try:
            return super()._weighed(current)
        finally:
            self._known = known


class TakesItBack(StepCoordinator):
    """Withdraws what was committed when a rank dies."""

    def _next(self) -> Proposal | None:
        current = self.current
        if self._ended and current is not None and current.stage is Stage.COMMITTED:
            return replace(current, number=current.number + 1, stage=Stage.WITHDRAWN)
        return super()._next()


class ProposesTooSoon(StepCoordinator):
    """Proposes again while ranks have not acted upon what was committed."""

    def _in_round(self, round_: int) -> bool:
        return False


class WaitsForNobody(StepParticipant):
    """Goes on after the step for which it has given its promise."""

    def move(self, step: int) -> Move:
        found = super().move(step)
        return Move.GO_ON if found is Move.WAIT else found


class ActsOnProposals(StepParticipant):
    """Acts without a decision."""

    def move(self, step: int) -> Move:
        found = super().move(step)
        return Move.ACT if found is Move.WAIT else found


class ForgetsRounds(StepParticipant):
    """Heeds what was said in another round."""

    def hear(self, said: Proposal, step: int) -> list[Answer]:
        return super().hear(replace(said, round=self._round), step)


@pytest.mark.parametrize(
    ("coordinator", "part", "words"),
    [
        (CommitsEarly, StepParticipant, "goes on after step"),
        (TakesAnyAnswer, StepParticipant, "goes on after step"),
        (AwaitsEveryAnswer, StepParticipant, "waits after step"),
        (TakesItBack, StepParticipant, "goes on after step"),
        (ProposesTooSoon, StepParticipant, "act"),
        (StepCoordinator, WaitsForNobody, "act apart"),
        (StepCoordinator, ActsOnProposals, "act"),
        (StepCoordinator, ForgetsRounds, "act"),
    ],
)
def test_a_planted_bug_is_found(
    coordinator: type[StepCoordinator], part: type[StepParticipant], words: str, seed: int
) -> None:
    for number in range(20_000):
        draw = random.Random(seed + number)
        ops = [(draw.choice(OPS), draw.randrange(4), draw.randrange(200)) for _ in range(100)]
        _, bad = play(ops, draw.randint(2, 4), draw.random() < 0.5, coordinator, part)
        if any(words in one for one in bad):
            print(f"{coordinator.__name__}, {part.__name__}: found after {number + 1} schedules")
            return
    pytest.fail(f"{coordinator.__name__}, {part.__name__} was not found")


def test_ranks_that_hold_are_not_rebalanced() -> None:
    coordinator = StepCoordinator(["a"])
    coordinator.recall(Proposal(1, Stage.COMMITTED, 1, 9, Want.SAVE | Want.HOLD))
    coordinator.rebalance(((0, 500),))
    assert not coordinator.wanted
    coordinator.recall(Proposal(2, Stage.WITHDRAWN, 1, 9, Want.SAVE | Want.HOLD))
    assert coordinator.wanted


def test_a_hold_outlives_the_release_of_an_earlier_one() -> None:
    coordinator = StepCoordinator(["a"])
    coordinator.recall(Proposal(1, Stage.PROPOSED, 1, 9, Want.SAVE | Want.HOLD))
    coordinator.release()
    coordinator.ask(Want.SAVE | Want.HOLD)
    assert not coordinator._releases
