"""Relative differences: symmetric, bounded, and never a division by zero."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.rerun.policy.stats import QuickStats, relative_difference

ANY = st.floats()
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(ANY, ANY)
def test_it_is_symmetric_and_never_fails(one: float, other: float) -> None:
    found = relative_difference(one, other)
    assert found == relative_difference(other, one)
    assert 0 <= found <= 2 or found == math.inf


@given(FINITE, FINITE)
def test_finite_numbers_are_at_most_two_apart_and_zero_only_if_equal(one: float, other: float) -> None:
    found = relative_difference(one, other)
    assert found <= 2
    if one == other:
        assert found == 0


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (1.0, -1.0, 2.0),  # Megatron-LM: ZeroDivisionError
        (0.0, -0.0, 0.0),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, 3.0, pytest.approx(1.0)),
        (1.7e308, 1.6e308, pytest.approx(2 * 0.1 / 3.3)),
        (5e-324, 0.0, 2.0),
    ],
)
def test_known_pairs(one: float, other: float, apart: float) -> None:
    assert relative_difference(one, other) == apart


def test_quantiles_are_of_nearest_rank() -> None:
    stats = QuickStats()
    assert stats.quantiles() is None
    for value in range(100):
        stats.record(value / 100)
    found = stats.quantiles()
    assert found is not None
    assert (found.count, found.same, found.p50, found.p90, found.p99, found.most) == (
        100,
        1,
        0.49,
        0.89,
        0.98,
        0.99,
    )
    assert "1 of 100 equal" in str(found)


def test_the_newest_are_kept_and_the_largest_is_remembered() -> None:
    stats = QuickStats()
    stats.record(2.0)
    for _ in range(10_000):
        stats.record(0.0)
    found = stats.quantiles()
    assert found is not None
    assert (found.count, found.p99, found.most) == (10_001, 0.0, 2.0)


def test_the_oldest_of_more_than_ten_thousand_is_forgotten() -> None:
    stats = QuickStats()
    for value in [1.0] + [0.0] * 5_000 + [1.0] * 5_000:
        stats.record(value)
    found = stats.quantiles()
    assert found is not None
    assert (found.count, found.p50) == (10_001, 0.0), "the median of the newest ones"
