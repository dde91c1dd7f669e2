"""What becomes of each worker between two generations: it always ends, and nobody healthy is killed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import InProcessOptions
from outlast.inprocess.policy import (
    Called,
    Ended,
    Enter,
    Event,
    Granularity,
    Kill,
    Leaves,
    Order,
    Reentry,
    Refill,
    Stage,
    Stuck,
    Unwinds,
    Waits,
    culprit_patience,
    longest,
)

RANK, NODE = Granularity.RANK, Granularity.NODE


def begin(*patience: float, granularity: Granularity = RANK, waits: bool = False) -> Reentry:
    called = {seat: Called(one, waits) for seat, one in enumerate(patience)}
    return Reentry(called, granularity, 30.0, 0.0)


def short(order: Order) -> tuple[str, Any]:
    return (type(order).__name__, order.seats if isinstance(order, Enter) else order.seat)


def enter(*seats: int) -> tuple[str, Any]:
    return ("Enter", seats)


def kill(seat: int) -> tuple[str, Any]:
    return ("Kill", seat)


def refill(seat: int) -> tuple[str, Any]:
    return ("Refill", seat)


def at(now: float, event: Event | None, *orders: Any, **state: Any) -> tuple[Any, ...]:
    """Return an event (None: the time alone), the orders that follow, and what is known then."""
    return now, event, list(orders), state


@pytest.mark.parametrize(
    ("machine", "script"),
    [
        pytest.param(
            lambda: begin(30, 30, 30),
            [
                at(0.01, Waits(2)),
                at(0.02, Waits(0), over=False),
                at(0.03, Waits(1), enter(0, 1, 2), over=True, deadline=None),
            ],
            id="all enter when the last one waits",
        ),
        pytest.param(
            lambda: begin(1, 1, waits=True),
            [at(0.0, None, enter(0, 1), over=True, deadline=None)],
            id="those that wait already enter at once",
        ),
        pytest.param(
            lambda: begin(30, 1),
            [
                at(0.1, Waits(0), deadline=1.0),
                at(0.9, None),
                at(1.0, None, kill(1), deadline=11.0),
                at(1.01, Ended(1), refill(1), enter(0), kept=(0,)),
                at(99.0, Ended(1)),
            ],
            id="one that does not come is replaced",
        ),
        pytest.param(
            lambda: begin(1, 30),
            [at(0.5, Waits(0), deadline=30.0), at(2.0, None), at(3.0, Waits(1), enter(0, 1))],
            id="one that waits is never too late",
        ),
        pytest.param(
            lambda: begin(1),
            [at(0.5, Unwinds(0)), at(1.0, None, deadline=30.5)],
            id="one that unwinds has time",
        ),
        pytest.param(
            lambda: begin(30),
            [at(1.0, Stuck(0, "recv in link.py"), kill(0)), at(1.1, Stuck(0))],
            id="one that nothing wakes is killed at once",
        ),
        pytest.param(
            lambda: begin(1, 30),
            [
                at(1.0, None, kill(0)),
                at(1.5, Waits(0)),  # it is too late to come
                at(10.9, None),
                at(11.0, None, refill(0), kept=(1,)),
            ],
            id="the kernel holds one that is killed",
        ),
        pytest.param(
            lambda: begin(1),
            [at(1.0, None, kill(0)), at(11.0, None, refill(0), over=True)],
            id="nobody is left to enter",
        ),
        pytest.param(
            lambda: begin(30.0),  # as a node promises beforehand
            [at(30.0, Unwinds(0)), at(60.0, None, kill(0), deadline=longest(30.0))],
            id="the worst worker takes as long as was promised",
        ),
        pytest.param(
            lambda: begin(30, 30),
            [at(0.1, Waits(0)), at(0.2, Ended(0), refill(0)), at(0.3, Waits(1), enter(1))],
            id="one dies at the gate",
        ),
        pytest.param(
            lambda: begin(30, 30),
            [
                at(0.1, Waits(0)),
                at(0.2, Waits(1), enter(0, 1)),
                at(0.3, Ended(0), refill(0), enter(1)),
                at(0.4, Ended(1), refill(1), over=True),
            ],
            id="one dies after all were there",
        ),
        pytest.param(
            lambda: begin(30, 30),
            [
                at(0.1, Waits(0)),
                at(0.2, Waits(1), enter(0, 1)),
                at(0.3, Leaves(1), kill(1), over=False),
                at(0.4, Leaves(1)),
                at(0.5, None),
                at(0.6, Ended(1), refill(1), enter(0), over=True),
            ],
            id="one leaves after all were there",
        ),
        pytest.param(
            lambda: begin(30, 30, granularity=NODE),
            [
                at(0.1, Waits(1)),
                at(0.2, Ended(0), refill(0), kill(1), deadline=10.2),
                at(0.3, Ended(1), refill(1), over=True),
            ],
            id="a node is one where the user wants that",
        ),
        pytest.param(
            lambda: begin(30),
            [at(0.1, Ended(5)), at(0.2, Waits(0), enter(0)), at(0.3, Unwinds(0)), at(99.0, None, kept=(0,))],
            id="a stranger, and what comes late",
        ),
    ],
)
def test_who_is_killed_who_is_replaced_and_who_enters(machine: Any, script: list[Any]) -> None:
    found: Reentry = machine()
    for now, event, orders, state in script:
        given_orders = found.tick(now) if event is None else found.handle(event, now)
        assert [short(one) for one in given_orders] == orders, (now, event)
        known = {"over": found.over, "kept": found.kept, "deadline": found.deadline()}
        assert {name: known[name] for name in state} == state, (now, event)


def test_the_stage_of_a_seat_and_the_place_of_a_killed_worker_are_known() -> None:
    machine = begin(30, 30)
    machine.handle(Waits(0), 0.1)
    (order,) = machine.handle(Stuck(1, "recv in link.py"), 0.2)
    assert isinstance(order, Kill)
    assert "recv in link.py" in order.reason
    stages = [machine.stage(seat) for seat in (0, 1, 5)]
    machine.handle(Ended(1), 0.3)
    assert [*stages, machine.stage(1)] == [Stage.WAITING, Stage.KILLED, None, Stage.GONE]


EVENTS = st.tuples(
    st.sampled_from([Unwinds, Waits, Stuck, Leaves, Ended]),
    st.integers(0, 4),
    st.floats(0.0, 20.0, allow_nan=False),
)


@settings(max_examples=200)
@given(
    waits=st.lists(st.booleans(), min_size=1, max_size=5),
    granularity=st.sampled_from(list(Granularity)),
    schedule=st.lists(EVENTS, max_size=25),
)
def test_it_always_ends_and_kills_nobody_who_waits(
    waits: list[bool], granularity: Granularity, schedule: list[tuple[type[Event], int, float]]
) -> None:
    called = {seat: Called(5.0, waits=one) for seat, one in enumerate(waits)}
    machine, now = Reentry(called, granularity, 30.0, 0.0), 0.0
    orders: list[Order] = [*machine.tick(now)]
    for kind, seat, passed in schedule:
        now += passed
        before = {one: machine.stage(one) for one in called}
        found = machine.handle(kind(seat), now) + machine.tick(now)
        for one in found:
            if isinstance(one, Kill) and granularity is RANK:
                leaves = kind is Leaves and one.seat == seat
                assert leaves or before[one.seat] is Stage.CALLED, "a rank that waits was killed"
            if isinstance(one, Enter):
                stages = {machine.stage(each) for each in called}
                assert stages <= {Stage.WAITING, Stage.GONE}, "some entered, others were not there"
        orders += found
    limit = now + 100.0
    while (due := machine.deadline()) is not None:
        assert due <= limit, "it does not end"
        now = max(now, due)
        orders += machine.tick(now)
    assert machine.over
    doors = [one for one in orders if isinstance(one, Enter)]
    refilled = [one.seat for one in orders if isinstance(one, Refill)]
    assert len(refilled) == len(set(refilled))
    entered = set(doors[-1].seats) - set(refilled) if doors else set()
    assert entered | set(refilled) == set(called)
    assert entered == {seat for seat in called if machine.stage(seat) is Stage.WAITING}


@pytest.mark.parametrize(
    ("stopped", "gpu", "allowed", "seconds"),
    [(False, False, 90.0, 1.0), (False, True, 90.0, 5.0), (False, True, 2.0, 2.0), (True, True, 90.0, 0.0)],
)
def test_a_hung_rank_with_a_gpu_has_the_time_that_an_abort_of_nccl_takes(
    stopped: bool, gpu: bool, allowed: float, seconds: float
) -> None:
    assert culprit_patience(stopped, gpu, allowed) == seconds


# Options


def options(**given: Any) -> InProcessOptions:
    return InProcessOptions(**given)


@pytest.mark.parametrize(
    ("given", "patience", "gate_patience"),
    [
        (options(), 30.0, 120.0),
        (options(hang_timeout=100), 50.0, 120.0),
        (options(hang_timeout=2), 10.0, 120.0),
        (options(hang_timeout=10, hard_timeout=12), 2.0, 120.0),
        (options(hang_timeout=600), 300.0, 610.0),  # as long as others may take to come
        (options(hang_timeout=600, barrier_timeout=5), 300.0, 5),
    ],
)
def test_timeouts_come_from_one_number(
    given: InProcessOptions, patience: float, gate_patience: float
) -> None:
    assert (given.patience, given.gate_patience, given.problems()) == (patience, gate_patience, ())


SECONDS = ("hang_timeout", "hard_timeout", "barrier_timeout")
SENSELESS = (0, -1.0, math.inf, math.nan)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"hang_timeout": 0.5}, []),
        ({"barrier_timeout": 1}, []),
        ({"hang_timeout": 10.0, "hard_timeout": 10.5}, []),
        ({"max_iterations": 1, "granularity": "node"}, []),
        *(({name: value}, [name, str(value)]) for name in SECONDS for value in SENSELESS),
        ({"hard_timeout": 5}, ["hard_timeout", "5", "hang_timeout"]),
        ({"hang_timeout": 10.0, "hard_timeout": 10.0}, ["hard_timeout", "10.0", "hang_timeout"]),
        ({"hang_timeout": 10.0, "hard_timeout": -1.0}, ["hard_timeout", "-1.0"]),
        ({"max_iterations": 0}, ["max_iterations", "0"]),
        ({"granularity": "rack"}, ["granularity", "'rack'", "rank", "node"]),
    ],
)
def test_options_that_make_no_sense_are_named(given: dict[str, Any], named: list[str]) -> None:
    found = options(**given).problems()
    assert len(found) == bool(named)
    assert all(word in line for line in found for word in named)
