"""The vote of a step: what the maximum of all rows means, whoever raised what."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.votes import TIERS, Flag, StepOutcome, Vote, action_of

VOTES = st.builds(
    Vote,
    st.frozensets(st.sampled_from(Flag)),
    st.one_of(st.just(math.inf), st.floats(-10, 1000)),
    st.dictionaries(st.sampled_from(TIERS), st.floats(0, 1000)),
    st.one_of(st.just(math.inf), st.floats(-10, 1000)),
)


def reduced(votes: list[Vote]) -> Vote:
    return Vote.of([max(column) for column in zip(*(vote.numbers() for vote in votes), strict=True)])


@given(VOTES)
def test_a_vote_survives_the_row_of_numbers(vote: Vote) -> None:
    assert Vote.of(vote.numbers()) == vote


@given(st.lists(VOTES, min_size=1, max_size=5))
def test_the_maximum_is_any_flag_the_least_time_and_the_longest_save(votes: list[Vote]) -> None:
    found = reduced(votes)
    assert found.flags == frozenset().union(*(vote.flags for vote in votes))
    assert found.left == min(vote.left for vote in votes)
    assert found.limit == min(vote.limit for vote in votes)
    for tier in TIERS:
        measured = [vote.seconds[tier] for vote in votes if tier in vote.seconds]
        assert found.seconds.get(tier) == max(measured, default=None)


def test_the_gravest_wish_counts() -> None:
    assert action_of(Vote()).do is StepOutcome.GO_ON
    assert action_of(Vote(frozenset({Flag.SAVE}))).do is StepOutcome.SAVE
    assert action_of(Vote(frozenset({Flag.SAVE, Flag.STOP}))).do is StepOutcome.STOP
    assert action_of(Vote(frozenset(Flag), 12.0)).do is StepOutcome.GIVE_BACK
    assert not action_of(Vote(frozenset({Flag.SAVE}))).hold, "only agents have ranks wait"
