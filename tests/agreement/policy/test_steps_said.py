"""What a coordinator of steps says to the ranks, what a rank answers, and what it does then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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
from outlast.parallelism.policy.shares import Slow

SLOW: Slow = ((1, 500),)
HELD = Want.SAVE | Want.HOLD


def at(who: int, step: int, serial: int = 1, **more: Any) -> Status:
    return Status(who, serial, more.pop("round", 1), step, **more)


def committed(wants: Want) -> StepCoordinator:
    """Return the coordinator of one rank, which acts on wants after step 8 and has not left its round."""
    found = StepCoordinator((0,))
    found.handle(at(0, 6, wants=wants))
    (said,) = found.handle(at(0, 7, 2, answered=1, wants=wants))
    assert (said.stage, said.step, said.wants) == (Stage.COMMITTED, 8, wants)
    return found


def test_wants_are_bits_of_which_ranks_send_any_set() -> None:
    values = [int(want) for want in Want.__members__.values()]
    assert all(value.bit_count() == 1 for value in values)
    assert len(set(values)) == len(values)


def test_what_is_said_later_has_the_higher_ticket() -> None:
    said = [Proposal(number, stage, 1, 9) for number in (1, 2, 3) for stage in Stage]
    assert [one.stage for one in said[:3]] == [Stage.PROPOSED, Stage.WITHDRAWN, Stage.COMMITTED]
    tickets = [one.ticket for one in said]
    assert tickets == sorted(set(tickets))


@pytest.mark.parametrize("stage", [Stage.PROPOSED, Stage.WITHDRAWN, Stage.COMMITTED])
@pytest.mark.parametrize("wants", [Want.REBALANCE, Want.REBALANCE | Want.SAVE, Want.SAVE])
def test_micro_batches_are_divided_anew_from_a_commit_of_it_on(stage: Stage, wants: Want) -> None:
    said = Proposal(1, stage, 1, 9, wants, slow=SLOW, before=())
    anew = stage is Stage.COMMITTED and Want.REBALANCE in wants
    assert said.shares == (SLOW if anew else ())


def test_who_has_said_nothing_is_known_and_so_long_nothing_is_known_of_shares() -> None:
    found = StepCoordinator((0, 1))
    assert (found.silent, found.shares) == ({0, 1}, None)
    found.handle(at(1, 6))
    assert (found.silent, found.shares) == ({0}, None)
    found.handle(at(0, 6))
    assert (found.silent, found.shares) == (frozenset(), ())


def test_a_rank_outside_of_every_loop_is_known_once_all_have_spoken() -> None:
    found = StepCoordinator((0, 1))
    found.handle(at(0, 6, round=2))
    assert not found.outside
    found.handle(at(1, 6, round=1))
    assert found.outside
    found.handle(at(0, 6, 2, round=3))
    assert not found.outside


def test_a_status_that_comes_twice_or_late_or_from_a_stranger_changes_nothing() -> None:
    found = StepCoordinator((0,))
    found.handle(at(0, 6, 2))
    assert found.handle(at(0, 5, 2, wants=Want.SAVE)) == []
    assert found.handle(at(0, 5, 1, wants=Want.SAVE)) == []
    assert found.handle(at(1, 5, 3, wants=Want.SAVE)) == []
    assert not found.wanted
    (said,) = found.handle(at(0, 6, 3, wants=Want.SAVE))
    assert said.step == 8


def test_nothing_is_proposed_and_what_is_open_is_withdrawn_when_a_rank_has_ended() -> None:
    found = StepCoordinator((0,))
    found.handle(at(0, 6, wants=Want.SAVE))
    (said,) = found.handle(RankEnded(0))
    assert said.stage is Stage.WITHDRAWN
    assert found.handle(at(0, 7, 2, wants=Want.SAVE)) == []


def test_a_proposal_is_withdrawn_when_ranks_part() -> None:
    found = StepCoordinator((0, 1))
    found.handle(at(0, 6, wants=Want.SAVE))
    found.handle(at(1, 6))
    (said,) = found.handle(at(1, 6, 2, round=3))
    assert (said.number, said.stage) == (1, Stage.WITHDRAWN)
    assert not found.open
    assert found.handle(at(0, 6, 2, wants=Want.SAVE)) == [], "they are in different rounds"
    (said,) = found.handle(at(0, 8, 3, round=3, wants=Want.SAVE))
    assert (said.number, said.round, said.step) == (2, 3, 10)


def test_nothing_is_open_before_something_is_proposed_and_after_it_is_committed() -> None:
    found = StepCoordinator((0,))
    assert not found.open
    assert not committed(Want.SAVE).open


def test_nothing_follows_a_commit_until_every_rank_has_left_its_round_and_somebody_asks() -> None:
    found = committed(Want.SAVE)
    assert found.ask(Want.STOP) == []
    assert found.handle(at(0, 8, 3, wants=Want.SAVE)) == []
    (said,) = found.handle(at(0, 8, 4, round=3))
    assert (said.number, said.round, said.wants, said.step) == (2, 3, Want.STOP, 10)
    found = committed(Want.SAVE)
    assert found.handle(at(0, 8, 3, round=3)) == [], "nobody asks"


def test_what_the_coordinator_asks_for_is_asked_until_it_is_committed_and_once() -> None:
    found = StepCoordinator((0,))
    assert found.ask(Want.SAVE) == [], "the rank has not spoken"
    assert found.wanted
    (said,) = found.handle(at(0, 6))
    assert said.wants == Want.SAVE
    found.ask(Want.BENCHMARK)
    (said,) = found.handle(at(0, 7, 2, answered=1))
    assert (said.stage, said.wants) == (Stage.COMMITTED, Want.SAVE | Want.BENCHMARK)
    assert not found.wanted
    found = StepCoordinator((0,))
    found.handle(at(0, 6))
    (said,) = found.ask(Want.SAVE)
    assert said.stage is Stage.PROPOSED


def test_ranks_hold_after_a_commit_of_it_until_they_are_released() -> None:
    found = committed(Want.SAVE)
    assert found.held is None
    found = StepCoordinator((0,))
    found.handle(at(0, 6))
    found.ask(HELD)
    assert found.held is None, "it is only proposed"
    found.handle(at(0, 7, 2, answered=1))
    assert found.held == 8
    found.ask(HELD)
    assert found.held is None, "another hold is asked for"


def test_ranks_that_hold_go_on_when_they_are_released() -> None:
    found = committed(HELD)
    assert found.release() == [], "they have not left the round of the commit"
    (said,) = found.handle(at(0, 8, 3, round=3))
    assert (said.number, said.stage, said.step) == (2, Stage.WITHDRAWN, 8)
    assert found.held is None
    assert found.handle(at(0, 9, 4, round=3)) == [], "they are released once"
    (said,) = found.ask(Want.SAVE)
    found.handle(at(0, 10, 5, round=3, answered=said.number))
    assert found.current == replace(said, stage=Stage.COMMITTED)
    assert found.handle(at(0, 11, 6, round=5)) == [], "the release was for what was committed before"


def test_a_release_before_a_hold_is_committed_takes_the_request_back() -> None:
    found = StepCoordinator((0,))
    found.ask(HELD)
    assert found.release() == []
    assert not found.wanted
    assert found.handle(at(0, 6)) == []


def test_a_release_lets_nobody_go_on_who_does_not_hold() -> None:
    found = committed(Want.SAVE)
    assert found.release() == []
    assert found.handle(at(0, 8, 3, round=3)) == []


def test_shares_are_asked_for_until_they_are_in_force() -> None:
    found = StepCoordinator((0,))
    found.rebalance(SLOW)
    assert found.wanted
    (said,) = found.handle(at(0, 6))
    assert (said.wants, said.slow, said.before) == (Want.REBALANCE, SLOW, ())
    assert found.shares == ()
    (said,) = found.handle(at(0, 7, 2, answered=1))
    assert said.shares == found.shares == SLOW
    assert not found.wanted
    (said,) = found.handle(at(0, 8, 3, round=3, wants=Want.SAVE))
    assert said.shares == SLOW, "a save divides nothing anew"


def test_the_newest_of_what_earlier_coordinators_have_said_counts() -> None:
    found = StepCoordinator((0,))
    old, new = (Proposal(number, Stage.COMMITTED, 1, 9, Want.REBALANCE, slow=SLOW) for number in (4, 5))
    found.recall(new)
    found.recall(replace(old, slow=()))
    assert found.current == new
    found.recall(replace(new, slow=()))
    assert found.current == new, "it is no newer"
    found.handle(at(0, 9, round=3))
    assert found.shares == SLOW


def test_an_open_proposal_of_an_earlier_coordinator_that_was_passed_is_followed_by_one_further_on() -> None:
    found = StepCoordinator((0,))
    found.recall(Proposal(4, Stage.PROPOSED, 1, 9, Want.SAVE))
    (said,) = found.handle(at(0, 9, wants=Want.SAVE, answered=4, passed=True))
    assert (said.number, said.stage, said.step) == (5, Stage.PROPOSED, 13)


def test_a_rank_that_was_not_asked_and_reaches_the_step_gets_a_later_one() -> None:
    found = StepCoordinator((0, 1))
    found.handle(at(0, 6, wants=Want.SAVE))
    found.handle(at(1, 6))
    assert found.handle(at(0, 8, 2, wants=Want.SAVE, answered=1)) == [], (
        "it waits after the step, as promised"
    )
    (said,) = found.handle(at(1, 8, 2))
    assert (said.number, said.stage, said.step) == (2, Stage.PROPOSED, 12)


def test_a_node_coordinates_one_generation_after_another() -> None:
    found = NodeCoordinator()
    seen = RanksSeen(1, (at(0, 6, wants=Want.SAVE), at(1, 7)))
    (told,) = found.look(seen)
    assert told == TellRanks(1, Proposal(1, Stage.PROPOSED, 1, 9, Want.SAVE))
    assert found.look(seen) == [], "it was said"
    promised = RanksSeen(1, (at(0, 8, 2, wants=Want.SAVE, answered=1), at(1, 8, 2, answered=1)))
    (told,) = found.look(promised)
    assert (told.said.number, told.said.stage) == (1, Stage.COMMITTED)
    (told,) = found.look(RanksSeen(2, (at(0, 3, wants=Want.STOP),)))
    assert told == TellRanks(2, Proposal(1, Stage.PROPOSED, 1, 5, Want.STOP))
    found.rebalance(SLOW)
    assert found.look(RanksSeen(2, (at(0, 3, 2, wants=Want.STOP),), ended=(0,))) == [
        TellRanks(2, Proposal(1, Stage.WITHDRAWN, 1, 5, Want.STOP))
    ]


def test_a_node_asks_its_ranks_for_shares_and_nobody_while_it_has_none() -> None:
    found = NodeCoordinator()
    found.rebalance(SLOW)
    found.look(RanksSeen(0, (at(0, 6),)))
    found.rebalance(SLOW)
    (told,) = found.look(RanksSeen(0, (at(0, 6, 2),)))
    assert (told.said.wants, told.said.slow) == (Want.REBALANCE, SLOW)


SAID = Proposal(3, Stage.PROPOSED, 1, 9, Want.SAVE)
DONE = replace(SAID, stage=Stage.COMMITTED)
BACK = replace(SAID, stage=Stage.WITHDRAWN)


def rank(round_: int = 1) -> StepParticipant:
    found = StepParticipant()
    found.begin(round_)
    return found


@pytest.mark.parametrize(("step", "passed"), [(7, False), (9, False), (10, True)])
def test_a_rank_promises_a_step_that_it_has_not_gone_beyond(step: int, passed: bool) -> None:
    found = rank()
    assert found.hear(SAID, step) == [Answer(3, passed)]
    assert found.move(step) is (Move.WAIT if step == 9 else Move.GO_ON)


def test_a_rank_goes_on_to_the_step_waits_there_and_acts_when_it_is_committed() -> None:
    found = rank()
    assert found.move(100) is Move.GO_ON, "nothing was said"
    found.hear(SAID, 7)
    assert [found.move(step) for step in (7, 8, 9)] == [Move.GO_ON, Move.GO_ON, Move.WAIT]
    assert found.committed is None
    assert found.hear(DONE, 9) == []
    assert [found.move(step) for step in (8, 9)] == [Move.GO_ON, Move.ACT]
    assert found.committed == DONE


def test_a_rank_goes_on_when_what_it_promised_is_taken_back() -> None:
    found = rank()
    found.hear(SAID, 7)
    assert found.hear(BACK, 9) == []
    assert found.move(9) is Move.GO_ON
    assert found.committed is None


def test_a_rank_answers_what_it_has_heard_once() -> None:
    found = rank()
    assert found.hear(SAID, 7) == [Answer(3, False)]
    assert found.hear(SAID, 10) == []
    assert found.hear(replace(SAID, number=2), 7) == [], "it is older"
    assert found.move(9) is Move.WAIT
    found.hear(DONE, 9)
    assert found.hear(SAID, 9) == []
    assert found.move(9) is Move.ACT, "what comes late takes nothing back"


def test_a_commit_that_a_rank_has_not_promised_concerns_it_not() -> None:
    found = rank()
    found.hear(DONE, 9)
    assert (found.committed, found.move(9)) == (None, Move.GO_ON)
    found = rank()
    found.hear(SAID, 7)
    found.hear(replace(DONE, number=4), 9)
    assert (found.committed, found.move(9)) == (None, Move.GO_ON)
    found = rank()
    found.hear(SAID, 10)
    found.hear(DONE, 10)
    assert (found.committed, found.move(10)) == (None, Move.GO_ON), "it had passed the step, and said so"


def test_a_rank_of_another_round_answers_nothing_and_forgets_what_it_promised() -> None:
    assert rank(3).hear(SAID, 7) == []
    found = rank()
    found.hear(SAID, 7)
    found.begin(3)
    assert found.move(9) is Move.GO_ON
    found = rank()
    found.hear(SAID, 7)
    found.hear(replace(DONE, round=5), 9)
    assert found.move(9) is Move.WAIT, "what holds in another round decides nothing in this one"


def test_a_rank_that_is_in_no_loop_yet_answers_nothing() -> None:
    assert StepParticipant().hear(SAID, 0) == []
    assert StepParticipant().hear(replace(SAID, number=0), 0) == []
    found = rank()
    assert found.hear(replace(SAID, number=0), 0) == [Answer(0, False)], "any number is news at first"
