"""Spikes by a sliding median, against a plain reference."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.numerics.policy.tally import NORMAL, Limit, Spacing, Window

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
    """Say what the definition says, of the latest values."""
    latest = values[-limit.size :]
    if len(latest) < limit.warmup:
        return False
    median = statistics.median(latest)
    deviation = statistics.median(abs(one - median) for one in latest)
    spread = max(NORMAL * deviation, limit.floor * abs(median))
    return value - median > limit.factor * spread > 0


def filled(limit: Limit, values: list[float]) -> Window:
    window = Window(limit)
    for value in values:
        window.add(value)
    return window


@given(LIMITS, st.lists(VALUES, max_size=40), VALUES)
def test_a_spike_is_what_the_definition_says(limit: Limit, values: list[float], value: float) -> None:
    window = filled(limit, values)
    assert window.spikes(value) == reference(values, value, limit)
    assert window.values == values[-limit.size :]


@given(LIMITS, CALM, st.sampled_from([0.9, 1.1, 1.9, 2.1, 10.0]))
def test_near_the_limit_too(limit: Limit, values: list[float], part: float) -> None:
    window = filled(limit, values)
    value = window.median + part * limit.factor * window.spread
    assert window.spikes(value) == reference(values, value, limit)


@given(LIMITS, st.lists(VALUES, max_size=40), VALUES)
def test_a_window_that_was_put_back_answers_alike(limit: Limit, values: list[float], value: float) -> None:
    window, other = filled(limit, values), Window(limit)
    other.replace(window.values)
    for _ in range(limit.size):
        assert other.spikes(value) == window.spikes(value)
        window.add(value)
        other.add(value)
        assert other.values == window.values


def test_late_in_training_ten_times_the_loss_is_a_spike_though_it_began_higher() -> None:
    limit = Limit(size=128, warmup=32, factor=10.0, floor=0.02)
    window = filled(limit, [11.0 * math.exp(-step / 300) + 0.05 * math.sin(step) + 2 for step in range(2000)])
    assert not window.spikes(2.3)
    assert window.spikes(20.0)


def test_one_spike_that_is_remembered_does_not_hide_the_next() -> None:
    window = filled(Limit(64, 8, 10.0, 0.02), [2 + 0.1 * (step % 3) for step in range(40)])
    window.add(1e9)
    assert window.spikes(50.0)


def test_where_nothing_ever_moved_from_zero_there_is_no_measure() -> None:
    assert not filled(Limit(64, 8, 10.0, 0.02), [0.0] * 40).spikes(1.0)


def spaced(spacing: Spacing, values: list[float]) -> float | None:
    """Return how far apart values are, by what their ranks add."""
    above, below = (sum(one) for one in zip(*map(spacing.terms, values), strict=True))
    return spacing.apart(len(values), above, below)


@given(
    st.lists(st.floats(0.01, 3), min_size=1, max_size=8),
    st.lists(st.floats(-1, 1), min_size=2, max_size=40),
    st.floats(-0.5, 0.5),
)
def test_sums_tell_the_range_from_below_wherever_the_centre_is(
    ranges: list[float], parts: list[float], off: float
) -> None:
    window = filled(Limit(64, 3, 10.0, 0.02), ranges)
    reach = window.reach
    assert reach >= max(ranges)
    values = [5.0 + part * reach for part in parts]
    found = spaced(Spacing(5.0 + off * reach, window), values)
    true = max(values) - min(values)
    assert found is not None
    assert true - 2 * math.log(len(values)) / 300 * reach - 1e-9 <= found <= true + 1e-9


def test_ranks_that_are_alike_are_not_apart_and_those_too_far_off_are_not_told() -> None:
    window = filled(Limit(64, 3, 10.0, 0.02), [0.1, 0.1])
    assert spaced(Spacing(2.0, window), [2.01] * 7) == 0.0
    assert spaced(Spacing(2.0, window), [2.0, 2.0 + 1.9 * window.reach]) is not None
    assert spaced(Spacing(2.0, window), [2.0, 2.0 + 2.1 * window.reach]) is None
    assert spaced(Spacing(2.0, window), [2.0]) is None
    assert Spacing(2.0, window).apart(4, 0.0, 0.0) is None
    alike = filled(Limit(64, 3, 10.0, 0.02), [0.0] * 5)
    assert spaced(Spacing(2.0, alike), [2.0, 2.0]) == 0.0
    assert spaced(Spacing(2.0, alike), [2.0, 2.1]) is None
    assert spaced(Spacing(0.0, alike), [0.0, 0.0]) == 0.0


def test_the_spread_of_normal_values_is_their_standard_deviation() -> None:
    normal = statistics.NormalDist(5.0, 2.0)
    window = filled(Limit(999, 3, 10.0, 0.02), [normal.inv_cdf(place / 1000) for place in range(1, 1000)])
    assert window.median == pytest.approx(5.0)
    assert window.spread == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("off", [-1.0, 0.0, 1.0])
def test_ranks_that_are_a_little_apart_are_told_so_and_sums_of_which_one_is_missing_are_not(
    off: float,
) -> None:
    window = filled(Limit(64, 3, 10.0, 0.02), [0.1, 0.1])
    spacing = Spacing(2.0 + off * window.reach, window)
    found = spaced(spacing, [2.0, 2.0 + window.reach / 300])
    assert found is not None
    assert found > 0.0
    above, below = spacing.terms(2.0)
    for one, other in ((0.0, below), (above, 0.0), (math.inf, below), (above, math.inf)):
        assert spacing.apart(2, one, other) is None


def test_ranks_around_zero_that_were_always_alike_are_too_far_off_as_soon_as_they_differ() -> None:
    alike = filled(Limit(64, 3, 10.0, 0.02), [0.0] * 5)
    assert spaced(Spacing(0.0, alike), [0.0, 1e-6]) is None
    assert spaced(Spacing(2.0, alike), [2.0, 2.0 + 1e-6]) is None


def test_a_value_at_the_limit_is_no_spike() -> None:
    window = filled(Limit(64, 3, 1.0, 0.02), [-1.0, 0.0, 1.0])
    assert window.spread == NORMAL
    assert not window.spikes(NORMAL)
    assert window.spikes(math.nextafter(NORMAL, 2.0))


@pytest.mark.parametrize("count", [3, 4, 5])
def test_of_too_many_values_that_are_put_back_the_newest_are_kept(count: int) -> None:
    values = [float(value) for value in range(count)]
    window = Window(Limit(4, 3, 10.0, 0.02))
    window.replace(values)
    assert window.values == values[-4:]
    window.add(9.0)
    assert window.values == [*values, 9.0][-4:]
    assert window.median == statistics.median(window.values)


@pytest.mark.parametrize("count", range(2, 50))
def test_any_number_of_ranks_that_are_alike_is_not_apart(count: int) -> None:
    spacing = Spacing(2.0, filled(Limit(64, 3, 10.0, 0.02), [0.1, 0.1]))
    for off in (0.0, 0.001, -0.07):
        assert spaced(spacing, [2.0 + off] * count) == 0.0
