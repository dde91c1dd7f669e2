from __future__ import annotations

import math
import random

import pytest

from outlast.checkpoint.policy.cadence import (
    FORGET,
    MEASURE_STEPS,
    MOST_AHEAD,
    PRIOR_FAULTS,
    PRIOR_MTBF,
    Due,
    NextSave,
    PutOff,
    best_steps,
    fault_rate,
)
from tests.source_tree import ROOT


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
    assert fault_rate(3, -5.0) == fault_rate(3, 0.0) > fault_rate(3, 0.5)


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


def timed(begins: int = 0) -> NextSave:
    found = NextSave(None, 60.0)
    found.begin(begins, 1000.0)
    return found


def next_meeting(found: NextSave, after: int) -> int:
    """Return the next step after which ranks meet, at most 10,000 further on."""
    return next(step for step in range(after + 1, after + 10_000) if found.due(step))


@pytest.mark.parametrize("begins", [0, 40])
def test_ranks_meet_to_measure_and_then_save_every_so_many_seconds(begins: int) -> None:
    """Steps of half a second: 60 s are 120 steps. The first meeting saves nothing."""
    found = timed(begins)
    first = next_meeting(found, begins)
    assert first == begins + MEASURE_STEPS
    assert found.measuring
    assert found.due(first) == "every 60 s"
    rate = found.seconds_per_step(first, 1000.0 + MEASURE_STEPS / 2)
    assert rate == pytest.approx(0.5)
    found.settle(rate, first, 1000.0 + MEASURE_STEPS / 2)
    assert not found.measuring
    second = next_meeting(found, first)
    assert second == first + 120
    rate = found.seconds_per_step(second, 1000.0 + MEASURE_STEPS / 2 + 120 * 0.25)
    assert rate == pytest.approx(0.25), "measured since the last meeting"
    found.settle(rate, second, 1032.5)
    assert next_meeting(found, second) == second + 240


def test_the_first_save_is_near_whatever_five_steps_seemed_to_take() -> None:
    found = timed()
    found.settle(1e-4, 5, 1000.0)
    assert next_meeting(found, 5) == 5 + MOST_AHEAD
    found.settle(0.01, 205, 1002.0)
    assert next_meeting(found, 205) == 205 + 6000, "later ones are as far as the clock says"


def test_ranks_meet_after_every_step_where_a_step_takes_longer_than_the_interval() -> None:
    found = timed()
    found.settle(200.0, 5, 2000.0)
    assert next_meeting(found, 5) == 6


@pytest.mark.parametrize(("step", "now"), [(0, 1000.0), (0, 999.0), (5, 1000.0)])
def test_the_seconds_of_a_step_are_never_zero(step: int, now: float) -> None:
    assert 0 < timed().seconds_per_step(step, now) < 1e-3


def test_the_seconds_since_a_meeting_at_the_same_step_count_as_one_step() -> None:
    assert timed(7).seconds_per_step(7, 1003.0) == 3.0


def test_both_cadences_hold_together() -> None:
    found = NextSave(100, 60.0)
    found.begin(0, 0.0)
    found.settle(0.5, 5, 2.5)
    assert next_meeting(found, 5) == 100
    assert found.due(100) == "every 100 steps"
    assert next_meeting(found, 100) == 125
    assert found.due(125) == "every 60 s"
    assert not found.due(124)


@pytest.mark.parametrize(("cost", "seconds"), [(1e-3, 4), (0.1, 40)])
def test_the_documents_tell_the_interval_before_the_first_fault(cost: float, seconds: int) -> None:
    found = best_steps(cost, 1.0, fault_rate(0, 0.0))
    assert found == pytest.approx(seconds, rel=0.05)
    text = (ROOT / "docs" / "how-to" / "save.md").read_text(encoding="utf-8")
    assert f"every {seconds} s where" in text


@pytest.mark.parametrize(
    ("ready_at", "interval", "seconds", "a_step", "saved"),
    [
        ((0, 0), None, 600.0, 1.0, 10),
        ((0, 13), None, 600.0, 1.0, 14),
        ((12, 11), None, 600.0, 1.0, 12),
        ((10**6, 0), None, 600.0, 1.0, 70),  # a minute
        ((10**6, 0), None, 600.0, 0.01, 6010),
        ((10**6, 0), None, 600.0, 100.0, 11),
        ((10**6, 0), None, 5.0, 1.0, 15),  # the time between two saves on disk
        ((10**6, 0), 10, None, 1.0, 20),
        ((10**6, 10**6), 4, None, 100.0, 11),
    ],
)
def test_a_save_is_put_off_until_all_ranks_are_ready_for_a_while(
    ready_at: tuple[int, ...], interval: int | None, seconds: float | None, a_step: float, saved: int
) -> None:
    """The clocks of the ranks differ; that of the first one counts."""
    ranks = [PutOff(3, interval, seconds) for _ in ready_at]
    for step in range(10, 10_000):
        clocks = [step * a_step * (1 + 9 * number) for number in range(len(ranks))]
        if step == 10:
            for one, now in zip(ranks, clocks, strict=True):
                one.is_due(False, "memory", step, now)
        compare = {one.compares(step) for one in ranks}
        assert len(compare) == 1
        if compare == {True}:
            answers = [
                one.answer(step >= ready, step, now)
                for one, ready, now in zip(ranks, ready_at, clocks, strict=True)
            ]
            for one in ranks:
                one.compared(answers, step)
        put_off = {one.put_off(step) for one in ranks}
        assert len(put_off) == 1
        if put_off == {False}:
            break
    assert step == saved
    reasons = {one.due.since(step, now) for one, now in zip(ranks, clocks[:1] * 2, strict=True) if one.due}
    assert all("memory" in one for one in reasons)


def test_what_is_due_on_disk_replaces_what_is_due_in_memory_and_a_save_ends_both() -> None:
    found = PutOff(1, None, 60.0)
    found.is_due(True, "disk", 3, 0.0)
    found.is_due(False, "memory", 4, 1.0)
    assert found.due == Due(True, "disk", 3, 0.0)
    found.saved()
    assert found.due is None
    found.is_due(False, "memory", 5, 2.0)
    found.is_due(True, "disk", 6, 3.0)
    assert found.due == Due(True, "disk", 5, 2.0)
    assert not found.compares(6)  # as many were saved as there are buffers
    assert not found.put_off(6)
