"""Emergency saves: by cost, one at a time, then the drain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.health.policy.emergency import (
    Decision,
    Do,
    Emergency,
    Filter,
    Tier,
    Work,
    should_emergency_save,
    worth_it,
)
from outlast.health.policy.monitor import Risk


def risk(probability: float, hard: bool = False) -> Risk:
    return Risk("n1", "", 1.0 if hard else probability, 1800.0, ("GPU 3: XID 79",), hard)


def work(step: int = 100, saved: int = 10, age: float = 900.0, generation: int = 1) -> Work:
    tiers = (Tier("memory", 0.5, False, age), Tier("local", 5.0, True, age))
    return Work(generation, step, saved, tiers)


@pytest.mark.parametrize(
    ("iteration", "last", "interval", "expected"),
    [
        (124, 100, 100, False),
        (125, 100, 100, True),
        (102, 100, 10, True),
        (101, 100, 10, False),
        (0, 0, 3, True),
    ],
)
def test_the_published_filter(iteration: int, last: int, interval: int, expected: bool) -> None:
    assert should_emergency_save(iteration, last, interval) is expected


@pytest.mark.parametrize(("cost", "limit"), [(1.0, 0.00056), (5.0, 0.0028), (30.0, 0.0167), (120.0, 0.067)])
def test_the_limit_is_cost_over_loss(cost: float, limit: float) -> None:
    assert not worth_it(limit * 0.98, cost, 1800.0)
    assert worth_it(limit * 1.02, cost, 1800.0)


def test_a_small_risk_is_saved_to_the_cheapest_tier() -> None:
    (found,) = Emergency().decide(risk(0.001), work(), 0.0)
    assert found == Decision(Do.SAVE, "0.10% > 0.5 s / 900 s of work; GPU 3: XID 79", "memory")
    assert Emergency().decide(risk(0.0005), work(), 0.0) == []


def kinds(found: list[Decision]) -> list[Do]:
    return [one.do for one in found]


def test_an_incident_a_dead_device() -> None:
    judge = Emergency()
    save, drain = judge.decide(risk(1.0, hard=True), work(step=100, saved=90), 0.0)
    assert (save.do, save.tier) == (Do.SAVE, "local")  # the memory of the node goes with it
    assert drain == Decision(Do.DRAIN, "GPU 3: XID 79")
    assert judge.decide(risk(1.0, hard=True), work(step=101, saved=90), 5.0) == []  # the save is on its way
    assert judge.decide(risk(1.0, hard=True), work(step=104, saved=102, age=1.0), 10.0) == []


def test_without_a_spare_the_job_goes_on_and_saves_now_and_then() -> None:
    judge, saves, drains, saved = Emergency(), 0, 0, 0
    for second in range(0, 7200, 10):
        at = work(step=second + 1, saved=saved, age=second + 1 - saved)
        found = kinds(judge.decide(risk(1.0, hard=True), at, float(second)))
        saves += found.count(Do.SAVE)
        drains += found.count(Do.DRAIN)
        if Do.SAVE in found:
            saved = second + 3
    assert drains == 12  # every ten minutes: a spare may have come
    assert 6 <= saves <= 9  # three at once, then one every 20 minutes


def test_a_save_that_never_comes_is_asked_for_again() -> None:
    judge = Emergency()
    assert Do.SAVE in kinds(judge.decide(risk(1.0, hard=True), work(), 0.0))
    assert judge.decide(risk(1.0, hard=True), work(), 590.0) == []
    assert kinds(judge.decide(risk(1.0, hard=True), work(), 601.0)) == [Do.SAVE, Do.DRAIN]


def test_nothing_to_lose_is_drained_without_a_save() -> None:
    assert kinds(Emergency().decide(risk(1.0, hard=True), work(step=10, saved=10), 0.0)) == [Do.DRAIN]


def test_before_the_first_step_nothing_is_done() -> None:
    assert Emergency().decide(risk(1.0, hard=True), work(step=-1, saved=-1), 0.0) == []


def test_likelier_than_not_is_drained() -> None:
    assert kinds(Emergency(drain_at=0.5).decide(risk(0.6), work(), 0.0)) == [Do.SAVE, Do.DRAIN]
    assert kinds(Emergency(drain_at=0.7).decide(risk(0.6), work(), 0.0)) == [Do.SAVE]


def test_the_filter_holds_a_save_back() -> None:
    judge = Emergency(filter_=Filter(save_interval=100))
    assert judge.decide(risk(0.1), work(step=34, saved=10), 0.0) == []
    assert [one.do for one in judge.decide(risk(0.1), work(step=35, saved=10), 0.0)] == [Do.SAVE]


def test_a_new_generation_begins_anew() -> None:
    judge = Emergency()
    judge.decide(risk(1.0, hard=True), work(), 0.0)
    assert kinds(judge.decide(risk(1.0, hard=True), work(generation=2), 1.0)) == [Do.SAVE, Do.DRAIN]


@pytest.mark.parametrize(("probability", "orders"), [(0.499, [Do.SAVE]), (0.5, [Do.SAVE, Do.DRAIN])])
def test_an_even_chance_is_drained(probability: float, orders: list[Do]) -> None:
    assert kinds(Emergency().decide(risk(probability), work(), 0.0)) == orders


def test_a_save_that_costs_as_much_as_it_is_worth_is_left_out() -> None:
    assert not worth_it(0.25, 2.0, 8.0)
    assert not should_emergency_save(24, 0, 100)
    assert should_emergency_save(25, 0, 100)


def test_the_cheapest_tier_that_is_worth_its_cost_is_taken() -> None:
    tiers = (Tier("remote", 30.0, True, 9e3), Tier("local", 5.0, True, 9e3), Tier("memory", 0.5, False, 1.0))
    (save,) = Emergency().decide(risk(0.1), Work(1, 100, 10, tiers), 0.0)
    assert save.tier == "local"
    only_memory = Work(1, 100, 10, tiers[2:])
    assert kinds(Emergency().decide(risk(1.0, hard=True), only_memory, 0.0)) == [Do.DRAIN]


def test_the_first_step_is_worth_a_save() -> None:
    assert kinds(Emergency().decide(risk(0.1), work(step=0, saved=-1), 0.0)) == [Do.SAVE]


def test_without_a_copy_the_filter_counts_from_the_start() -> None:
    judge = Emergency(filter_=Filter(save_interval=100))
    assert judge.decide(risk(0.1), work(step=24, saved=-1), 0.0) == []
    assert kinds(judge.decide(risk(0.1), work(step=25, saved=-1), 0.0)) == [Do.SAVE]


def test_no_more_than_three_saves_at_once_and_one_more_every_20_minutes() -> None:
    judge, found = Emergency(), []
    for second in (7200, 7201, 7202, 7203, 8399, 8400):
        at = work(step=second, saved=second - 1)
        if judge.decide(risk(0.1), at, float(second)):
            found.append(second)
    assert found == [7200, 7201, 7202, 8400]
    often = [judge.decide(risk(0.1), work(step=9000, saved=8400), 8400.0) for _ in range(1300)]
    assert not any(often)


def test_a_clock_that_is_set_back_holds_no_order_back() -> None:
    judge = Emergency()
    judge.decide(risk(1.0, hard=True), work(), 10_000.0)
    assert kinds(judge.decide(risk(1.0, hard=True), work(), 9_000.0)) == [Do.SAVE, Do.DRAIN]
    assert judge.decide(risk(1.0, hard=True), work(), 9_000.0) == []


def test_an_order_is_repeated_after_ten_minutes() -> None:
    judge = Emergency()
    judge.decide(risk(1.0, hard=True), work(), 0.0)
    assert judge.decide(risk(1.0, hard=True), work(), 599.0) == []
    assert kinds(judge.decide(risk(1.0, hard=True), work(), 600.0)) == [Do.SAVE, Do.DRAIN]


def test_the_first_generation_may_be_drained_at_once() -> None:
    assert kinds(Emergency().decide(risk(1.0, hard=True), work(generation=0), 1.0)) == [Do.SAVE, Do.DRAIN]


def test_an_order_has_the_three_largest_reasons() -> None:
    several = Risk("n1", "", 0.1, 1800.0, ("a", "b", "c", "d"))
    assert Emergency().decide(several, work(), 0.0)[0].reason == "10.00% > 0.5 s / 900 s of work; a; b; c"
    none = Risk("n1", "", 0.1, 1800.0)
    assert Emergency().decide(none, work(), 0.0)[0].reason.endswith("; no reason is known")


@given(
    low=st.floats(0, 0.49),
    more=st.floats(0, 0.5),
    step=st.integers(0, 1000),
    behind=st.integers(0, 500),
    age=st.floats(0, 1e5),
)
def test_a_larger_risk_never_does_less(low: float, more: float, step: int, behind: int, age: float) -> None:
    at = work(step=step, saved=max(-1, step - behind), age=age)
    calm, alarmed = Emergency().decide(risk(low), at, 0.0), Emergency().decide(risk(low + more), at, 0.0)
    assert not calm or alarmed
