"""Emergency saves: by cost, one at a time, then the drain."""

from __future__ import annotations

import pytest

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
        (24, 0, 100, False),
    ],
)
def test_the_published_filter(iteration: int, last: int, interval: int, expected: bool) -> None:
    assert should_emergency_save(iteration, last, interval) is expected


@pytest.mark.parametrize(("cost", "limit"), [(1.0, 0.00056), (5.0, 0.0028), (30.0, 0.0167), (120.0, 0.067)])
def test_the_limit_is_cost_over_loss(cost: float, limit: float) -> None:
    assert not worth_it(limit * 0.98, cost, 1800.0)
    assert worth_it(limit * 1.02, cost, 1800.0)
    assert not worth_it(0.25, 2.0, 8.0)


def kinds(found: list[Decision]) -> list[Do]:
    return [one.do for one in found]


SAVES, DRAINS, BOTH, HARD = [Do.SAVE], [Do.DRAIN], [Do.SAVE, Do.DRAIN], risk(1.0, hard=True)


@pytest.mark.parametrize(
    ("judge", "node", "at", "expected"),
    [
        (Emergency(), risk(0.0005), work(), []),
        (Emergency(), risk(0.001), work(), SAVES),
        (Emergency(), risk(0.499), work(), SAVES),
        (Emergency(), risk(0.5), work(), BOTH),  # an even chance is drained
        (Emergency(drain_at=0.7), risk(0.6), work(), SAVES),
        (Emergency(), HARD, work(step=10, saved=10), DRAINS),  # nothing to lose
        (Emergency(), HARD, work(step=-1, saved=-1), []),  # before the first step
        (Emergency(), HARD, work(generation=0), BOTH),
        (Emergency(), risk(0.1), work(step=0, saved=-1), SAVES),  # the first step is worth a save
        (Emergency(filter_=Filter(save_interval=100)), risk(0.1), work(step=34, saved=10), []),
        (Emergency(filter_=Filter(save_interval=100)), risk(0.1), work(step=35, saved=10), SAVES),
        (Emergency(filter_=Filter(save_interval=100)), risk(0.1), work(step=24, saved=-1), []),
        (Emergency(filter_=Filter(save_interval=100)), risk(0.1), work(step=25, saved=-1), SAVES),
    ],
)
def test_what_a_risk_is_worth(judge: Emergency, node: Risk, at: Work, expected: list[Do]) -> None:
    assert kinds(judge.decide(node, at, 0.0)) == expected


def test_an_order_names_the_cheapest_tier_the_risk_and_its_largest_reasons() -> None:
    several = Risk("n1", "", 0.1, 1800.0, ("one", "two", "three", "four"))
    (save,) = Emergency().decide(several, work(), 0.0)
    assert (save.do, save.tier) == (Do.SAVE, "memory")
    assert [word in save.reason for word in ("10.00%", "0.5 s", "one", "two", "three", "four")] == [
        True
    ] * 5 + [False]
    assert Emergency().decide(Risk("n1", "", 0.1, 1800.0), work(), 0.0)[0].reason


def test_an_incident_a_dead_device() -> None:
    judge = Emergency()
    save, drain = judge.decide(risk(1.0, hard=True), work(step=100, saved=90), 0.0)
    assert (save.do, save.tier) == (Do.SAVE, "local")  # the memory of the node goes with it
    assert (drain.do, "GPU 3: XID 79" in drain.reason) == (Do.DRAIN, True)
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
    assert judge.decide(risk(1.0, hard=True), work(), 599.0) == []
    assert kinds(judge.decide(risk(1.0, hard=True), work(), 600.0)) == [Do.SAVE, Do.DRAIN]


def test_a_new_generation_begins_anew() -> None:
    judge = Emergency()
    judge.decide(risk(1.0, hard=True), work(), 0.0)
    assert kinds(judge.decide(risk(1.0, hard=True), work(generation=2), 1.0)) == [Do.SAVE, Do.DRAIN]


def test_the_cheapest_tier_that_is_worth_its_cost_is_taken() -> None:
    tiers = (Tier("remote", 30.0, True, 9e3), Tier("local", 5.0, True, 9e3), Tier("memory", 0.5, False, 1.0))
    (save,) = Emergency().decide(risk(0.1), Work(1, 100, 10, tiers), 0.0)
    assert save.tier == "local"
    only_memory = Work(1, 100, 10, tiers[2:])
    assert kinds(Emergency().decide(risk(1.0, hard=True), only_memory, 0.0)) == [Do.DRAIN]


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
