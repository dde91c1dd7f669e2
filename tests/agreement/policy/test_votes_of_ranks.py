"""The vote of a step in plain numbers: what each place of the row says, and what follows."""

from __future__ import annotations

import pytest

from outlast.agreement.policy.votes import Flag, Reading, Vote

VOTES = (
    Vote(),
    Vote(frozenset({Flag.SAVE}), 12.5, {"local": 3.0}, 99.0),
    Vote(frozenset(Flag), 7.0, {"global": 0.0, "memory": 2.5}, 9.0, 30, 30),
)


@pytest.mark.parametrize("vote", VOTES)
def test_a_vote_is_a_row_of_numbers_and_back(vote: Vote) -> None:
    assert Vote.of(vote.numbers()) == vote


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_row_of_another_length_is_no_vote(extra: int) -> None:
    row = Vote().numbers()
    with pytest.raises(ValueError, match="zip"):
        Vote.of(row[:extra] if extra < 0 else [*row, 1.0])


def test_the_maximum_of_rows_shows_whether_ranks_begin_after_the_same_step() -> None:
    for steps in ([30, 30, 30], [30, 20, 30]):
        rows = [Vote(lowest=step, highest=step).numbers() for step in steps]
        found = Vote.of([max(column) for column in zip(*rows, strict=True)])
        assert (found.lowest, found.highest) == (min(steps), max(steps))


def test_a_rank_that_has_measured_nothing_adds_nothing() -> None:
    assert tuple(Reading()) == (None, None, 0.0, 0.0)
