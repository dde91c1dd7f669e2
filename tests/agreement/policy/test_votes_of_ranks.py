"""The vote of a step in plain numbers: what each place of the row says, and what follows."""

from __future__ import annotations

import math

import pytest

from outlast.agreement.policy.votes import TIERS, Flag, Reading, Vote


def test_the_row_is_time_left_the_limit_saves_and_flags() -> None:
    vote = Vote(frozenset({Flag.SAVE}), 12.5, {"local": 3.0}, 99.0)
    flags = [float(flag is Flag.SAVE) for flag in Flag]
    assert len(TIERS) == 3
    assert vote.numbers() == [-12.5, -99.0, -1.0, 3.0, -1.0, *flags]
    assert Vote().numbers() == [-math.inf, -math.inf, -1.0, -1.0, -1.0, *(0.0 for _ in Flag)]


@pytest.mark.parametrize("flag", Flag)
def test_each_number_of_a_row_has_one_meaning(flag: Flag) -> None:
    raised = [float(one is flag) for one in Flag]
    assert Vote.of([-7.0, -9.0, 0.0, -1.0, 2.5, *raised]) == Vote(
        frozenset({flag}), 7.0, {"global": 0.0, "memory": 2.5}, 9.0
    )


@pytest.mark.parametrize(
    "row", [[-7.0, -8, -1.0, -1.0], [-7.0, -9.0, -1.0, -1.0, -1.0, *(0.0 for _ in Flag), 1.0]]
)
def test_a_row_of_another_length_is_no_vote(row: list[float]) -> None:
    with pytest.raises(ValueError, match="zip"):
        Vote.of(row)


def test_a_rank_that_has_measured_nothing_adds_nothing() -> None:
    assert tuple(Reading()) == (None, None, 0.0, 0.0)
