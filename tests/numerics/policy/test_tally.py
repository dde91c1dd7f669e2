"""Sums that hold of all ranks what counts, and spikes by a sliding median, against a plain reference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.votes import Flag, Reading
from outlast.numerics.policy.tally import (
    NORMAL,
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
from tests.numerics.policy.builders import NAN, NUMBERS

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
def test_a_tally_has_the_mean_loss_and_the_norm_of_all_gradients(pairs: list[tuple]) -> None:
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


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([(1.0, 3.0), (NAN, 5.0), (2.0, 4.0)], (False, 2, 1.5, 5.0)),
        ([(1.0, 3.0), (5.0, math.inf), (2.0, 4.0)], (False, 2, 1.5, 5.0)),
        ([(None, None), (None, None)], (True, 0, None, None)),
    ],
)
def test_a_number_that_is_not_finite_or_missing_does_not_spoil_what_the_others_come_to(
    readings: list[tuple], expected: tuple[object, ...]
) -> None:
    found = tallied(*(Reading(*one) for one in readings))
    assert (found.sound, found.losses, found.loss, found.grad_norm) == expected
    none = Observation(3, (None, None), (None, None))
    assert (none.loss, none.grad_norm) == (None, None)


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


# Spikes

VALUES = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 2.0, 2.1, 2.5, 3.0, 5.0, -2.0]))
CALM = st.lists(st.sampled_from([2.0, 2.1]), min_size=3, max_size=20)
LIMITS = st.builds(
    Limit,
    size=st.integers(3, 12),
    warmup=st.integers(1, 3),
    factor=st.sampled_from([0.5, 1.0, 4.0, 10.0]),
    floor=st.sampled_from([0.001, 0.02, 0.5, 1.0]),
)


def reference(values: list[float], value: float, limit: Limit) -> bool:
    """Return what the definition says, of the latest values."""
    latest = values[-limit.size :]
    if len(latest) < limit.warmup:
        return False
    median = statistics.median(latest)
    deviation = statistics.median(abs(one - median) for one in latest)
    spread = max(NORMAL * deviation, limit.floor * abs(median))
    return value - median > limit.factor * spread > 0


def filled(values: Sequence[float], limit: Limit | None = None) -> Window:
    window = Window(limit or Limit(64, 3, 10.0, 0.02))
    for value in values:
        window.add(value)
    return window


@given(LIMITS, st.lists(VALUES, max_size=40), VALUES)
def test_a_spike_is_what_the_definition_says_also_after_a_window_was_put_back(
    limit: Limit, values: list[float], value: float
) -> None:
    window, other = filled(values, limit), Window(limit)
    assert window.spikes(value) == reference(values, value, limit)
    assert window.values == values[-limit.size :]
    other.replace(window.values)
    for _ in range(limit.size):
        assert other.spikes(value) == window.spikes(value)
        window.add(value)
        other.add(value)
        assert other.values == window.values


@given(LIMITS, CALM, st.sampled_from([0.9, 1.1, 1.9, 2.1, 10.0]))
def test_near_the_limit_too(limit: Limit, values: list[float], part: float) -> None:
    window = filled(values, limit)
    value = window.median + part * limit.factor * window.spread
    assert window.spikes(value) == reference(values, value, limit)


@pytest.mark.parametrize(
    ("values", "limit", "value", "spike"),
    [
        ([11 * math.exp(-at / 300) + 0.05 * math.sin(at) + 2 for at in range(2000)], (128, 32), 2.3, False),
        ([11 * math.exp(-at / 300) + 0.05 * math.sin(at) + 2 for at in range(2000)], (128, 32), 20.0, True),
        ([*(2 + 0.1 * (at % 3) for at in range(40)), 1e9], (64, 8), 50.0, True),
        ([0.0] * 40, (64, 8), 1.0, False),
        ([-1.0, 0.0, 1.0], (64, 3, 1.0), NORMAL, False),
        ([-1.0, 0.0, 1.0], (64, 3, 1.0), math.nextafter(NORMAL, 2.0), True),
    ],
    ids=["late in training", "late, high", "after a spike", "never moved", "at the limit", "beyond it"],
)
def test_examples_of_spikes(values: list[float], limit: tuple[int, ...], value: float, spike: bool) -> None:
    size, warmup, *factor = limit
    assert filled(values, Limit(size, warmup, *(factor or [10.0]), 0.02)).spikes(value) is spike


def test_the_spread_of_normal_values_is_their_standard_deviation() -> None:
    normal = statistics.NormalDist(5.0, 2.0)
    values = [normal.inv_cdf(place / 1000) for place in range(1, 1000)]
    window = filled(values, Limit(999, 3, 10.0, 0.02))
    assert (window.median, window.spread) == (pytest.approx(5.0), pytest.approx(2.0, rel=1e-3))


@pytest.mark.parametrize("count", [3, 4, 5])
def test_of_too_many_values_that_are_put_back_the_newest_are_kept(count: int) -> None:
    values = [float(value) for value in range(count)]
    window = Window(Limit(4, 3, 10.0, 0.02))
    window.replace(values)
    assert window.values == values[-4:]
    window.add(9.0)
    assert window.values == [*values, 9.0][-4:]
    assert window.median == statistics.median(window.values)


# How far apart ranks are

SPACED = filled([0.1, 0.1])
ALIKE = filled([0.0] * 5)


def apart(spacing: Spacing, values: list[float]) -> float | None:
    """Return how far apart values are, by what their ranks add."""
    above, below = (sum(one) for one in zip(*map(spacing.terms, values), strict=True))
    return spacing.apart(len(values), above, below)


@given(
    st.lists(st.floats(0.01, 3), min_size=1, max_size=8),
    st.lists(st.floats(-1, 1), min_size=2, max_size=40),
    st.floats(-0.5, 0.5),
)
def test_sums_hold_the_range_from_below_wherever_the_centre_is(
    ranges: list[float], parts: list[float], off: float
) -> None:
    window = filled(ranges)
    reach = window.reach
    assert reach >= max(ranges)
    values = [5.0 + part * reach for part in parts]
    found = apart(Spacing(5.0 + off * reach, window), values)
    true = max(values) - min(values)
    assert found is not None
    assert true - 2 * math.log(len(values)) / 300 * reach - 1e-9 <= found <= true + 1e-9


@pytest.mark.parametrize(
    ("centre", "window", "values", "known"),
    [
        (2.0, SPACED, [2.0, 2.0 + 1.9 * SPACED.reach], True),
        (2.0, SPACED, [2.0, 2.0 + 2.1 * SPACED.reach], False),
        (2.0, SPACED, [2.0], False),
        (2.0, ALIKE, [2.0, 2.0], True),
        (2.0, ALIKE, [2.0, 2.1], False),
        (2.0, ALIKE, [2.0, 2.0 + 1e-6], False),
        (0.0, ALIKE, [0.0, 0.0], True),
        (0.0, ALIKE, [0.0, 1e-6], False),
    ],
)
def test_ranks_that_are_too_far_off_or_alone_are_not_told(
    centre: float, window: Window, values: list[float], known: bool
) -> None:
    found = apart(Spacing(centre, window), values)
    assert (found is not None) is known
    assert found == 0.0 or len(set(values)) > 1 or not known


@pytest.mark.parametrize("off", [-1.0, 0.0, 1.0])
def test_ranks_a_little_apart_are_and_sums_of_which_one_is_missing_are_not(off: float) -> None:
    spacing = Spacing(2.0 + off * SPACED.reach, SPACED)
    found = apart(spacing, [2.0, 2.0 + SPACED.reach / 300])
    assert found is not None
    assert found > 0.0
    above, below = spacing.terms(2.0)
    for one, other in ((0.0, 0.0), (0.0, below), (above, 0.0), (math.inf, below), (above, math.inf)):
        assert spacing.apart(2, one, other) is None


@pytest.mark.parametrize("off", [0.0, 0.001, 0.01, -0.07])
def test_any_number_of_ranks_that_are_alike_is_not_apart(off: float) -> None:
    spacing = Spacing(2.0, SPACED)
    assert {apart(spacing, [2.0 + off] * count) for count in range(2, 50)} == {0.0}


def test_a_hundred_thousand_ranks_add_88_bytes_each_and_the_one_far_off_is_seen() -> None:
    ranks, window = 100_000, filled([0.20, 0.21, 0.20, 0.22, 0.21])
    spacing, sums, row = Spacing(2.0, window), [0.0] * WIDTH, ()
    for rank in range(ranks):
        loss = 2.0 + 0.1 * math.sin(rank)
        row = addends(frozenset(), Reading(loss, 0.5, *spacing.terms(loss)))
        sums = [one + other for one, other in zip(sums, row, strict=True)]
    assert 8 * len(row) == 88
    found = tally_of(sums)
    assert found.grad_norm == pytest.approx(0.5 * math.sqrt(ranks))
    near = spacing.apart(found.losses, found.above, found.below)
    assert near is not None
    assert 0.2 - 0.08 * window.reach <= near <= 0.2
    assert not window.spikes(near)
    one_far = addends(frozenset(), Reading(2.6, 0.5, *spacing.terms(2.6)))
    found = tally_of([one + other - last for one, other, last in zip(sums, one_far, row, strict=True)])
    far = spacing.apart(found.losses, found.above, found.below)
    assert far is not None
    assert window.spikes(far)
