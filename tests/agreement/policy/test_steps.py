"""All ranks act after the same step, whatever is late, lost, reordered or dead, and every request ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.steps import (
    Answer,
    Move,
    NodeCoordinator,
    Proposal,
    RankEnded,
    RanksSeen,
    Stage,
    Status,
    StepCoordinator,
    StepParticipant,
    TellRanks,
    Want,
)
from outlast.agreement.policy.votes import Flag
from outlast.parallelism.policy.shares import Slow
from tests.agreement.policy.builders import RANK_OPS, Build, OneNode, Op, at, play

PROPOSED, WITHDRAWN, COMMITTED = Stage.PROPOSED, Stage.WITHDRAWN, Stage.COMMITTED
SAVE, STOP, HELD = Want.SAVE, Want.STOP, Want.SAVE | Want.HOLD
SLOW: Slow = ((1, 500),)
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(RANK_OPS), st.integers(0, 3), st.integers(0, 199)), min_size=20, max_size=120
)


@given(SCHEDULES, st.integers(1, 4), st.booleans())
def test_ranks_act_after_the_same_step_and_every_request_ends(
    ops: list[Op], ranks: int, coupled: bool
) -> None:
    assert play(OneNode(ranks, coupled, Build()), ops) == []


# The coordinator

Event = Status | RankEnded | Callable[[StepCoordinator], Any]


def ask(wants: Want) -> Event:
    return lambda found: found.ask(wants)


def rebalance(slow: Slow) -> Event:
    return lambda found: found.rebalance(slow)


def recall(*said: Proposal) -> Event:
    def recalled(found: StepCoordinator) -> None:
        for one in said:
            found.recall(one)

    return recalled


def release(found: StepCoordinator) -> list[Proposal]:
    return found.release()


def then(event: Event, *told: Any, **state: Any) -> tuple[Event, tuple[Any, ...], dict[str, Any]]:
    """Return an event, what ranks are told (number, stage, step, wants, round), and what is known then."""
    return event, told, state


def committed(wants: Want) -> list[Any]:
    """Return how one rank commits to act on wants after step 8."""
    return [
        then(at(0, 6, wants=wants), 1, PROPOSED, 8, wants, open=True),
        then(at(0, 7, 2, answered=1, wants=wants), 1, COMMITTED, 8, wants, open=False, wanted=True),
    ]


def divided(number: int, slow: Slow = SLOW) -> Proposal:
    return Proposal(number, COMMITTED, 1, 9, Want.REBALANCE, slow=slow)


@pytest.mark.parametrize(
    ("ranks", "script"),
    [
        pytest.param(
            2,
            [
                then(at(1, 6), silent={0}, shares=None, open=False),
                then(at(0, 6), silent=frozenset(), shares=(), open=False),
            ],
            id="nobody asks",
        ),
        pytest.param(
            2,
            [then(at(0, 6, wants=SAVE)), then(at(1, 7), 1, PROPOSED, 9, SAVE, 1)],
            id="ahead of the furthest",
        ),
        pytest.param(1, [then(at(0, 6, wants=Want.DUE), 1, PROPOSED, 8)], id="due"),
        pytest.param(1, [then(at(0, 6, wants=Want.PREEMPTED), 1, PROPOSED, 7)], id="time is short"),
        pytest.param(
            1,
            [
                then(at(0, 6, wants=SAVE), 1, PROPOSED, 8),
                then(at(0, 20, 2, wants=SAVE, answered=1, passed=True), 2, PROPOSED, 24),
                then(at(0, 24, 3, wants=SAVE, answered=1, passed=True), 3, PROPOSED, 32),  # it was not heard
            ],
            id="a rank has passed the step",
        ),
        pytest.param(
            2,
            [
                then(at(0, 6, wants=SAVE)),
                then(at(1, 6), 1, PROPOSED, 8),
                then(at(0, 8, 2, wants=SAVE, answered=1)),  # it waits after the step, as promised
                then(at(1, 8, 2), 2, PROPOSED, 12),
            ],
            id="a rank reaches the step unasked",
        ),
        pytest.param(
            2,
            [
                then(at(0, 6, wants=SAVE), outside=False),
                then(at(1, 6), 1, PROPOSED, 8),
                then(at(1, 6, 2, round=2), 1, WITHDRAWN, 8, outside=True),
                then(at(0, 6, 2, round=2, wants=SAVE)),
                then(at(0, 6, 3, round=3), outside=True),
                then(at(1, 6, 3, round=3), outside=False),
            ],
            id="a rank leaves the loop",
        ),
        pytest.param(
            1,
            [
                then(at(0, 6, 2)),
                then(at(0, 5, 2, wants=SAVE)),
                then(at(0, 5, 1, wants=SAVE)),
                then(at(1, 5, 3, wants=SAVE), wanted=False),
                then(at(0, 6, 3, wants=SAVE), 1, PROPOSED, 8),
            ],
            id="twice, late, from a stranger",
        ),
        pytest.param(
            1,
            [
                then(at(0, 6, wants=SAVE), 1, PROPOSED, 8),
                then(RankEnded(0), 1, WITHDRAWN, 8),
                then(at(0, 7, 2, wants=SAVE)),
            ],
            id="a rank has ended",
        ),
        pytest.param(
            2,
            [
                then(at(0, 6, wants=SAVE)),
                then(at(1, 6), 1, PROPOSED, 8),
                then(at(1, 6, 2, round=3), 1, WITHDRAWN, 8, open=False),
                then(at(0, 6, 2, wants=SAVE)),
                then(at(0, 8, 3, round=3, wants=SAVE), 2, PROPOSED, 10, SAVE, 3),
            ],
            id="ranks part",
        ),
        pytest.param(
            1,
            [
                *committed(SAVE),
                then(ask(STOP), held=None),
                then(at(0, 8, 3, wants=SAVE)),
                then(at(0, 8, 4, round=3), 2, PROPOSED, 10, STOP, 3),
            ],
            id="after a commit once all have left its round",
        ),
        pytest.param(1, [*committed(SAVE), then(at(0, 8, 3, round=3))], id="after a commit nobody asks"),
        pytest.param(
            1,
            [
                then(ask(SAVE), wanted=True),
                then(at(0, 6), 1, PROPOSED, 8, SAVE),
                then(ask(Want.BENCHMARK)),
                then(at(0, 7, 2, answered=1), 1, COMMITTED, 8, SAVE | Want.BENCHMARK, wanted=False),
            ],
            id="the coordinator asks until it is committed",
        ),
        pytest.param(1, [then(at(0, 6)), then(ask(SAVE), 1, PROPOSED, 8)], id="the coordinator asks at once"),
        pytest.param(
            1,
            [
                then(at(0, 6)),
                then(ask(HELD), 1, PROPOSED, 8, held=None),
                then(at(0, 7, 2, answered=1), 1, COMMITTED, 8, held=8),
                then(ask(HELD), held=None),  # another hold is asked for
            ],
            id="hold",
        ),
        pytest.param(
            1,
            [
                *committed(HELD),
                then(release),  # they have not left the round of the commit
                then(at(0, 8, 3, round=3), 2, WITHDRAWN, 8, held=None),
                then(at(0, 9, 4, round=3)),  # they are released once
                then(ask(SAVE), 3, PROPOSED, 11, SAVE),
                then(at(0, 10, 5, round=3, answered=3), 3, COMMITTED, 11, SAVE),
                then(at(0, 11, 6, round=5)),  # the release was for what was committed before
            ],
            id="release",
        ),
        pytest.param(
            1, [then(ask(HELD)), then(release, wanted=False), then(at(0, 6))], id="release before the commit"
        ),
        pytest.param(
            1, [*committed(SAVE), then(release), then(at(0, 8, 3, round=3))], id="release without a hold"
        ),
        pytest.param(
            1,
            [
                then(recall(Proposal(1, PROPOSED, 1, 9, HELD))),
                then(release),
                then(ask(HELD)),
                then(at(0, 8, answered=1), 1, COMMITTED, 9, HELD),
                then(at(0, 9, 2, round=3), held=9),  # the release was of an earlier hold
            ],
            id="a hold after a release",
        ),
        pytest.param(
            1,
            [
                then(rebalance(SLOW), wanted=True),
                then(at(0, 6), 1, PROPOSED, 8, Want.REBALANCE, shares=()),
                then(at(0, 7, 2, answered=1), 1, COMMITTED, 8, shares=SLOW, wanted=False),
                then(at(0, 8, 3, round=3, wants=SAVE), 2, PROPOSED, 10, SAVE, shares=SLOW),
            ],
            id="shares",
        ),
        pytest.param(
            1,
            [
                then(recall(Proposal(1, COMMITTED, 1, 9, HELD))),
                then(rebalance(SLOW), wanted=False),
                then(recall(Proposal(2, WITHDRAWN, 1, 9, HELD)), wanted=True),
            ],
            id="no shares while ranks hold",
        ),
        pytest.param(
            1,
            [
                then(recall(divided(5), divided(4, slow=()), divided(5, slow=())), current=divided(5)),
                then(at(0, 9, round=3), shares=SLOW),
            ],
            id="the newest of what earlier coordinators have told counts",
        ),
        pytest.param(
            1,
            [
                then(recall(Proposal(4, PROPOSED, 1, 9, SAVE))),
                then(at(0, 9, wants=SAVE, answered=4, passed=True), 5, PROPOSED, 13),
            ],
            id="an open proposal of an earlier coordinator was passed",
        ),
    ],
)
def test_what_all_ranks_are_told(ranks: int, script: list[Any]) -> None:
    found = StepCoordinator(range(ranks))
    for event, told, state in script:
        said = found.handle(event) if isinstance(event, Status | RankEnded) else event(found)
        now = [(one.number, one.stage, one.step, one.wants, one.round)[: len(told)] for one in said or ()]
        assert now == ([told] if told else []), event
        assert {name: getattr(found, name) for name in state} == state, event


def test_what_is_committed_is_all_requests_the_least_time_and_the_longest_save() -> None:
    found = StepCoordinator((0, 1))
    found.handle(at(0, 6, wants=SAVE))
    found.handle(at(1, 6))
    found.handle(at(0, 6, 2, answered=1, wants=SAVE, seconds={"local": 3.0}))
    quick = at(1, 6, 2, answered=1, wants=Want.PREEMPTED, ends=50.0, limit=60.0)
    (said,) = found.handle(replace(quick, seconds={"local": 1.0, "memory": 0.5}))
    both = SAVE | Want.PREEMPTED
    assert said == Proposal(1, COMMITTED, 1, 8, both, 50.0, 60.0, {"local": 3.0, "memory": 0.5})
    vote = said.vote(40.0)
    assert (vote.flags, vote.left, vote.limit) == (frozenset({Flag.SAVE, Flag.PREEMPTED}), 10.0, 20.0)


def test_wants_are_bits_of_which_ranks_send_any_set() -> None:
    values = [int(want) for want in Want.__members__.values()]
    assert all(value.bit_count() == 1 for value in values)
    assert len(set(values)) == len(values)


def test_what_is_told_later_has_the_higher_ticket() -> None:
    stages = (PROPOSED, WITHDRAWN, COMMITTED)
    tickets = [Proposal(number, stage, 1, 9).ticket for number in (1, 2, 3) for stage in stages]
    assert tickets == sorted(set(tickets))


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("wants", [Want.REBALANCE, Want.REBALANCE | SAVE, SAVE])
def test_micro_batches_are_divided_anew_from_a_commit_of_it_on(stage: Stage, wants: Want) -> None:
    anew = stage is COMMITTED and Want.REBALANCE in wants
    assert Proposal(1, stage, 1, 9, wants, slow=SLOW, before=()).shares == (SLOW if anew else ())


def test_a_node_coordinates_one_generation_after_another() -> None:
    found = NodeCoordinator()
    found.rebalance(SLOW)
    seen = RanksSeen(1, (at(0, 6, wants=SAVE), at(1, 7)))
    assert found.look(seen) == [TellRanks(1, Proposal(1, PROPOSED, 1, 9, SAVE))]
    assert found.look(seen) == [], "it was told"
    promised = RanksSeen(1, (at(0, 8, 2, wants=SAVE, answered=1), at(1, 8, 2, answered=1)))
    (told,) = found.look(promised)
    assert (told.said.number, told.said.stage) == (1, COMMITTED)
    stops = Proposal(1, PROPOSED, 1, 5, STOP)
    assert found.look(RanksSeen(2, (at(0, 3, wants=STOP),))) == [TellRanks(2, stops)]
    found.rebalance(SLOW)
    ended = RanksSeen(2, (at(0, 3, 2, wants=STOP),), ended=(0,))
    assert found.look(ended) == [TellRanks(2, replace(stops, stage=WITHDRAWN))]
    found.look(RanksSeen(3, (at(0, 6),)))
    found.rebalance(SLOW)
    (told,) = found.look(RanksSeen(3, (at(0, 6, 2),)))
    assert (told.said.wants, told.said.slow, told.said.before) == (Want.REBALANCE, SLOW, ())


# A rank

SAID = Proposal(3, PROPOSED, 1, 9, SAVE)
DONE, BACK = replace(SAID, stage=COMMITTED), replace(SAID, stage=WITHDRAWN)
PROMISE, PASSED = [Answer(3, False)], [Answer(3, True)]
GO_ON, WAIT, ACT = Move.GO_ON, Move.WAIT, Move.ACT


@pytest.mark.parametrize(
    ("script", "moves"),
    [
        pytest.param([], {100: GO_ON}, id="nothing told"),
        pytest.param([(SAID, 7, PROMISE)], {7: GO_ON, 8: GO_ON, 9: WAIT}, id="promised"),
        pytest.param([(SAID, 9, PROMISE)], {9: WAIT}, id="promised at the step"),
        pytest.param([(SAID, 10, PASSED)], {10: GO_ON}, id="passed"),
        pytest.param([(SAID, 7, PROMISE), (DONE, 9, [])], {8: GO_ON, 9: ACT}, id="committed"),
        pytest.param([(SAID, 7, PROMISE), (BACK, 9, [])], {9: GO_ON}, id="taken back"),
        pytest.param(
            [(SAID, 7, PROMISE), (SAID, 10, []), (replace(SAID, number=2), 7, [])], {9: WAIT}, id="old"
        ),
        pytest.param([(SAID, 7, PROMISE), (DONE, 9, []), (SAID, 9, [])], {9: ACT}, id="committed, then late"),
        pytest.param([(DONE, 9, [])], {9: GO_ON}, id="committed without a promise"),
        pytest.param([(SAID, 7, PROMISE), (replace(DONE, number=4), 9, [])], {9: GO_ON}, id="another commit"),
        pytest.param([(SAID, 10, PASSED), (DONE, 10, [])], {10: GO_ON}, id="committed after it passed"),
        pytest.param([(replace(SAID, round=3), 7, [])], {9: GO_ON}, id="another round"),
        pytest.param(
            [(SAID, 7, PROMISE), (replace(DONE, round=5), 9, [])], {9: WAIT}, id="commit of another round"
        ),
        pytest.param([(SAID, 7, PROMISE), (3, 7, None)], {9: GO_ON}, id="a new round"),
        pytest.param([(replace(SAID, number=0), 0, [Answer(0, False)])], {0: GO_ON}, id="any number is news"),
    ],
)
def test_a_rank_promises_waits_at_the_step_and_acts_when_it_is_committed(
    script: list[Any], moves: dict[int, Move]
) -> None:
    found = StepParticipant()
    assert found.hear(replace(SAID, number=0), 0) == [], "it is in no loop yet"
    found = StepParticipant()
    found.begin(1)
    for said, step, answers in script:
        if isinstance(said, Proposal):
            assert found.hear(said, step) == answers
        else:
            found.begin(said)
    assert {step: found.move(step) for step in moves} == moves
    assert found.committed == (DONE if ACT in moves.values() else None)


# Planted bugs


class TakesAnyAnswer(StepCoordinator):
    """Takes it for a promise that a rank has gone on already."""

    def handle(self, event: Status | RankEnded) -> list[Proposal]:
        return super().handle(replace(event, passed=False) if isinstance(event, Status) else event)


class WaitsForNobody(StepParticipant):
    """Goes on after the step for which it has given its promise."""

    def move(self, step: int) -> Move:
        found = super().move(step)
        return GO_ON if found is WAIT else found


class ForgetsRounds(StepParticipant):
    """Heeds what was told in another round."""

    def begin(self, round_: int) -> None:
        self.mine = round_
        super().begin(round_)

    def hear(self, said: Proposal, step: int) -> list[Answer]:
        return super().hear(replace(said, round=self.mine), step)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Build(coordinator=TakesAnyAnswer), "goes on after step"),
        (Build(part=WaitsForNobody), "act apart"),
        (Build(part=ForgetsRounds), "act"),
    ],
)
def test_a_planted_bug_is_found(build: Build, words: str, seed: int) -> None:
    for number in range(20_000):
        draw = random.Random(seed + number)
        ops = [(draw.choice(RANK_OPS), draw.randrange(4), draw.randrange(200)) for _ in range(100)]
        bad = play(OneNode(draw.randint(2, 4), draw.random() < 0.5, build), ops)
        if any(words in one for one in bad):
            return
    pytest.fail(f"{build} was not found")
