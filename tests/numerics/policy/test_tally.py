"""Sums that tell of all ranks what counts, in a row of one width."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.votes import Flag, Reading
from outlast.numerics.policy.tally import (
    WIDTH,
    Limit,
    Observation,
    Spacing,
    Tally,
    Window,
    addends,
    from_row,
    tally_of,
    tally_of_one,
    to_row,
)

NAN = math.nan
NUMBERS = st.one_of(st.none(), st.floats(0.5, 1.5), st.sampled_from([NAN, math.inf, -math.inf, 1e9, 0.0]))
USUAL = st.one_of(st.none(), st.floats(-100, 100))
READINGS = st.lists(st.tuples(USUAL, st.one_of(st.none(), st.floats(0, 100))), min_size=1, max_size=6)
FLAGS = st.frozensets(st.sampled_from(Flag))


def tallied(*readings: Reading, flags: frozenset[Flag] = frozenset()) -> Tally:
    rows = [addends(flags, one) for one in readings]
    return tally_of([sum(column) for column in zip(*rows, strict=True)])


@given(st.lists(NUMBERS, min_size=1, max_size=5))
def test_numbers_survive_a_maximum_over_ranks(values: list[float | None]) -> None:
    rows = [
        [to_row(value) if place == rank else to_row(None) for place in range(len(values))]
        for rank, value in enumerate(values)
    ]
    back = [from_row(max(column)) for column in zip(*rows, strict=True)]
    assert list(map(repr, back)) == list(map(repr, values))


@given(READINGS)
def test_a_tally_tells_the_mean_loss_and_the_norm_of_all_gradients(pairs: list[tuple]) -> None:
    found = tallied(*(Reading(*pair) for pair in pairs))
    losses = [loss for loss, _ in pairs if loss is not None]
    norms = [norm for _, norm in pairs if norm is not None]
    assert (found.sound, found.losses) == (True, len(losses))
    assert found.loss == (pytest.approx(sum(losses) / len(losses), abs=1e-9) if losses else None)
    assert found.grad_norm == (pytest.approx(math.hypot(*norms), rel=1e-12, abs=1e-150) if norms else None)


@given(st.lists(FLAGS, min_size=1, max_size=5))
def test_a_flag_is_up_where_it_is_up_on_any_rank(flags: list[frozenset[Flag]]) -> None:
    rows = [addends(one, Reading(1.0, 1.0)) for one in flags]
    found = tally_of([sum(column) for column in zip(*rows, strict=True)])
    assert found.flags == frozenset().union(*flags)
    assert found.sound


@given(READINGS, st.integers(0, 6), st.sampled_from([NAN, math.inf, -math.inf]), st.booleans())
def test_one_number_that_is_not_finite_is_never_lost(
    pairs: list[tuple], place: int, bad: float, in_norm: bool
) -> None:
    readings = [Reading(*pair) for pair in pairs]
    readings.insert(place, Reading(1.0, bad) if in_norm else Reading(bad, 1.0))
    assert not tallied(*readings).sound


@pytest.mark.parametrize("bad", [Reading(NAN, 5.0), Reading(5.0, math.inf)])
def test_a_number_that_is_not_finite_does_not_spoil_what_the_others_come_to(bad: Reading) -> None:
    found = tallied(Reading(1.0, 3.0), bad, Reading(2.0, 4.0))
    assert (found.sound, found.losses, found.loss, found.grad_norm) == (False, 2, 1.5, 5.0)


def test_numbers_that_no_rank_has_come_to_nothing() -> None:
    found, seen = (
        tallied(Reading(None, None), Reading(None, None)),
        Observation(3, (None, None), (None, None)),
    )
    assert (found.sound, found.losses, found.loss, found.grad_norm) == (True, 0, None, None)
    assert (seen.loss, seen.grad_norm) == (None, None)


@pytest.mark.parametrize("huge", [Reading(1e308, 1.0), Reading(1.0, 1e200)])
def test_numbers_whose_sum_is_not_finite_are_looked_at_one_by_one(huge: Reading) -> None:
    assert not tallied(huge, huge).sound


@given(FLAGS, NUMBERS, NUMBERS)
def test_one_rank_needs_no_sum(flags: frozenset[Flag], loss: float | None, norm: float | None) -> None:
    one, summed = tally_of_one(flags, Reading(loss, norm)), tallied(Reading(loss, norm), flags=flags)
    assert (one.flags, one.sound) == (summed.flags, summed.sound)
    if one.sound:
        assert (one.loss, one.losses) == (summed.loss, summed.losses)
        assert one.grad_norm == (
            None if norm is None else pytest.approx(summed.grad_norm, rel=1e-12, abs=1e-150)
        )


def test_a_hundred_thousand_ranks_tell_of_themselves_in_88_bytes() -> None:
    """And the one that is far from all others is seen among them."""
    ranks, limit = 100_000, Limit(64, 3, 10.0, 0.02)
    window = Window(limit)
    for near in (0.20, 0.21, 0.20, 0.22, 0.21):
        window.add(near)
    spacing = Spacing(2.0, window)
    sums, row = [0.0] * WIDTH, ()
    for rank in range(ranks):
        loss = 2.0 + 0.1 * math.sin(rank)
        row = addends(frozenset(), Reading(loss, 0.5, *spacing.terms(loss)))
        sums = [one + other for one, other in zip(sums, row, strict=True)]
    assert 8 * len(row) == 88
    calm = tally_of(sums)
    assert calm.grad_norm == pytest.approx(0.5 * math.sqrt(ranks))
    apart = spacing.apart(calm.losses, calm.above, calm.below)
    assert apart is not None
    assert 0.2 - 0.08 * window.reach <= apart <= 0.2
    assert not window.spikes(apart)
    far = addends(frozenset(), Reading(2.6, 0.5, *spacing.terms(2.6)))
    found = tally_of([one + other - last for one, other, last in zip(sums, far, row, strict=True)])
    apart = spacing.apart(found.losses, found.above, found.below)
    assert apart is not None
    assert window.spikes(apart)
