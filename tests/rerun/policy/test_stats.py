"""Relative differences: symmetric, bounded, and never a division by zero."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.rerun.policy.stats import QuickStats, relative_difference


@given(st.floats(), st.floats())
def test_it_is_symmetric_and_bounded_and_never_fails(one: float, other: float) -> None:
    found = relative_difference(one, other)
    assert found == relative_difference(other, one)
    assert 0 <= found <= (2 if math.isfinite(one) and math.isfinite(other) else math.inf)
    assert relative_difference(one, one) == 0


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


@pytest.mark.parametrize(
    ("values", "count", "same", "p50", "p90", "p99", "most"),
    [
        ([value / 100 for value in range(100)], 100, 1, 0.49, 0.89, 0.98, 0.99),  # of nearest rank
        ([2.0] + [0.0] * 10_000, 10_001, 10_000, 0.0, 0.0, 0.0, 2.0),  # the largest is remembered
        ([1.0] + [0.0] * 5_000 + [1.0] * 5_000, 10_001, 5_000, 0.0, 1.0, 1.0, 1.0),  # of the newest ones
    ],
)
def test_quantiles_are_of_the_newest_differences(
    values: list[float], count: int, same: int, p50: float, p90: float, p99: float, most: float
) -> None:
    stats = QuickStats()
    assert stats.quantiles() is None
    for value in values:
        stats.record(value)
    found = vars(stats.quantiles())
    assert list(found.values()) == [count, same, p50, p90, p99, most]
    assert all(f"{one:.3g}" in str(stats.quantiles()) for one in (p50, p90, p99, most))
