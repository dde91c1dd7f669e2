"""The vote of a step: a row of numbers, and what the maximum of all rows means."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.votes import TIERS, Flag, StepOutcome, Vote, action_of

LEFT = st.just(math.inf) | st.floats(-10, 1000)
SECONDS = st.dictionaries(st.sampled_from(TIERS), st.floats(0, 1000))
FLAGS = st.frozensets(st.sampled_from(Flag))
VOTES = st.builds(Vote, FLAGS, LEFT, SECONDS, LEFT, st.integers(0, 99), st.integers(0, 99))


@given(VOTES)
def test_a_vote_survives_the_row_of_numbers(vote: Vote) -> None:
    assert Vote.of(vote.numbers()) == vote
    assert Vote.of(Vote().numbers()) == Vote()


@given(st.lists(VOTES, min_size=1, max_size=5))
def test_the_maximum_is_any_flag_the_least_time_and_the_longest_save(votes: list[Vote]) -> None:
    found = Vote.of([max(column) for column in zip(*(vote.numbers() for vote in votes), strict=True)])
    assert found.flags == frozenset().union(*(vote.flags for vote in votes))
    for least in ("left", "limit", "lowest"):
        assert getattr(found, least) == min(getattr(vote, least) for vote in votes)
    assert found.highest == max(vote.highest for vote in votes)
    for tier in TIERS:
        measured = [vote.seconds[tier] for vote in votes if tier in vote.seconds]
        assert found.seconds.get(tier) == max(measured, default=None)


@pytest.mark.parametrize("row", [Vote().numbers()[:-1], [*Vote().numbers(), 1.0]])
def test_a_row_of_another_length_is_no_vote(row: list[float]) -> None:
    with pytest.raises(ValueError, match="zip"):
        Vote.of(row)


@pytest.mark.parametrize(
    ("flags", "outcome"),
    [
        (set(), StepOutcome.GO_ON),
        ({Flag.SAVE}, StepOutcome.SAVE),
        ({Flag.SAVE, Flag.STOP}, StepOutcome.STOP),
        (set(Flag), StepOutcome.GIVE_BACK),
    ],
)
def test_the_gravest_wish_counts_and_only_agents_have_ranks_wait(
    flags: set[Flag], outcome: StepOutcome
) -> None:
    found = action_of(Vote(frozenset(flags), 12.0))
    assert (found.do, found.hold) == (outcome, False)
