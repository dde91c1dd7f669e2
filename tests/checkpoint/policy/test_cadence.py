from __future__ import annotations

import math
import random

import pytest

from outlast.checkpoint.policy.cadence import (
    FORGET,
    PRIOR_FAULTS,
    PRIOR_MTBF,
    NextSave,
    best_steps,
    fault_rate,
)


def test_the_interval_is_youngs() -> None:
    assert best_steps(1.0, 1.0, 1 / 10_000) == round(math.sqrt(2 * 10_000)) == 141
    assert best_steps(0.05, 0.5, 1 / 60) == round(math.sqrt(2 * 0.05 * 60) / 0.5) == 5


@pytest.mark.parametrize(("cost", "step"), [(0.0, 1e-9), (0.0, 0.0), (100.0, 1e6)])
def test_every_interval_can_be_kept(cost: float, step: float) -> None:
    assert best_steps(cost, step, 1 / 600) >= 1


def test_restarts_raise_the_rate_and_quiet_time_lowers_it() -> None:
    rates = [fault_rate(restarts, 60.0) for restarts in range(6)]
    assert rates == sorted(rates)
    assert rates[3] > 5 * rates[0]
    quiet = [fault_rate(3, seconds) for seconds in (0.0, 600.0, 3600.0, 86_400.0)]
    assert quiet == sorted(quiet, reverse=True)
    assert quiet[-1] < quiet[0] / 20


def test_a_clock_that_went_back_changes_nothing() -> None:
    assert fault_rate(3, -5.0) == fault_rate(3, 0.0)


def test_the_bound_is_that_of_the_gamma_distribution() -> None:
    """No restart: half a fault in the prior's time. Percentiles of a chi-square over two, from a table."""
    prior = PRIOR_FAULTS * PRIOR_MTBF
    assert fault_rate(0, 0.0) * prior == pytest.approx(2.70554 / 2, rel=0.025)  # 1 degree of freedom
    faults = FORGET * PRIOR_FAULTS + 1
    assert fault_rate(1, 0.0) * FORGET * prior == pytest.approx(gamma_90(faults), rel=0.02)


def gamma_90(shape: float) -> float:
    """Return the 90th percentile of a Gamma distribution of scale 1, by drawing from it."""
    draw = random.Random(0)
    drawn = sorted(draw.gammavariate(shape, 1.0) for _ in range(40_000))
    return drawn[36_000]


def test_a_save_that_is_due_by_a_clock_is_due_after_no_step() -> None:
    found = NextSave(None, 60.0)
    found.begin(0, 100.0)
    assert not found.overdue(1000.0), "ranks agree on a step at the save before"
    assert found.due(5)
    assert found.measuring
    found.follow_clock()
    assert not found.due(5)
    assert not found.measuring
    assert [found.overdue(at) for at in (159.9, 160.0)] == [False, True]
    found.settle(1.0, 5, 160.0)
    assert [found.overdue(at) for at in (219.9, 220.0)] == [False, True]
    assert found.every_so_often == "every 60 s"


def test_saves_every_so_many_steps_need_no_clock() -> None:
    found = NextSave(10, None)
    found.follow_clock()
    found.begin(0, 0.0)
    assert not found.overdue(1e9)
    assert [step for step in range(1, 31) if found.due(step)] == [10, 20, 30]
