"""What becomes of each worker between two generations: it always ends, and nobody healthy is killed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import InProcessOptions
from outlast.inprocess.policy import (
    KILL_PATIENCE,
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


@pytest.mark.parametrize(
    ("stopped", "gpu", "allowed", "seconds"),
    [(False, False, 90.0, 1.0), (False, True, 90.0, 5.0), (False, True, 2.0, 2.0), (True, True, 90.0, 0.0)],
)
def test_a_hung_rank_with_a_gpu_has_the_time_that_an_abort_of_nccl_takes(
    stopped: bool, gpu: bool, allowed: float, seconds: float
) -> None:
    assert culprit_patience(stopped, gpu, allowed) == seconds


def begin(*patience: float, granularity: Granularity = Granularity.RANK) -> Reentry:
    return Reentry({seat: Called(one) for seat, one in enumerate(patience)}, granularity, 30.0, 0.0)


def test_one_that_leaves_after_all_could_enter_is_replaced_before_they_do() -> None:
    machine = begin(30, 30)
    machine.handle(Waits(0), 0.1)
    assert machine.handle(Waits(1), 0.2) == (Enter((0, 1)),)
    (kill,) = machine.handle(Leaves(1), 0.3)
    assert (type(kill), kill.seat, machine.over) == (Kill, 1, False)
    assert machine.handle(Leaves(1), 0.4) == machine.tick(0.5) == ()
    assert machine.handle(Ended(1), 0.6) == (Refill(1), Enter((0,)))
    assert machine.over


def test_all_enter_when_the_last_one_waits() -> None:
    machine = begin(30, 30, 30)
    assert machine.handle(Waits(2), 0.01) == ()
    assert machine.handle(Waits(0), 0.02) == ()
    assert machine.handle(Waits(1), 0.03) == (Enter((0, 1, 2)),)
    assert machine.over
    assert machine.deadline() is None


def test_one_that_does_not_come_is_killed_and_replaced_and_the_others_enter() -> None:
    machine = begin(30, 1)
    machine.handle(Waits(0), 0.1)
    assert machine.deadline() == 1.0
    (kill,) = machine.tick(1.0)
    assert isinstance(kill, Kill)
    assert kill.seat == 1
    assert machine.handle(Ended(1), 1.01) == (Refill(1), Enter((0,)))


def test_one_that_unwinds_gets_its_time() -> None:
    machine = begin(1)
    assert machine.handle(Unwinds(0), 0.5) == ()
    assert machine.tick(1.0) == ()
    assert machine.deadline() == 30.5


@pytest.mark.parametrize(("place", "where"), [("", ""), ("recv in link.py", ", in recv in link.py")])
def test_one_that_nothing_wakes_is_killed_before_its_time_is_up(place: str, where: str) -> None:
    machine = begin(30)
    (kill,) = machine.handle(Stuck(0, place), 1.0)
    assert kill == Kill(0, f"it sleeps and cannot be interrupted{where}")
    assert machine.handle(Stuck(0), 1.1) == ()


def test_a_node_says_beforehand_how_long_its_worst_worker_takes() -> None:
    machine = Reentry({0: Called(30.0)}, Granularity.RANK, 30.0, 0.0)
    machine.handle(Unwinds(0), 30.0)
    assert isinstance(machine.tick(60.0)[0], Kill)
    assert machine.deadline() == longest(30.0) == 70.0
    assert machine.tick(longest(30.0)) == (Refill(0),)


def test_a_worker_that_the_kernel_holds_is_waited_for_so_long_and_no_longer() -> None:
    machine = begin(1)
    assert isinstance(machine.tick(1.0)[0], Kill)
    assert machine.tick(1.0 + KILL_PATIENCE) == (Refill(0),)
    assert machine.over


def test_one_that_dies_at_the_gate_is_replaced() -> None:
    machine = begin(30, 30)
    machine.handle(Waits(0), 0.1)
    assert machine.handle(Ended(0), 0.2) == (Refill(0),)
    assert machine.handle(Waits(1), 0.3) == (Enter((1,)),)


def test_one_that_dies_after_all_were_there_is_replaced_and_the_others_enter() -> None:
    machine = begin(30, 30)
    machine.handle(Waits(0), 0.1)
    assert machine.handle(Waits(1), 0.2) == (Enter((0, 1)),)
    assert machine.handle(Ended(0), 0.3) == (Refill(0), Enter((1,)))
    assert machine.handle(Ended(1), 0.4) == (Refill(1),)
    assert machine.over


def test_a_node_is_one_where_the_user_says_so() -> None:
    machine = begin(30, 30, granularity=Granularity.NODE)
    machine.handle(Waits(1), 0.1)
    orders = machine.handle(Ended(0), 0.2)
    assert orders[0] == Refill(0)
    assert [one.seat for one in orders if isinstance(one, Kill)] == [1]
    assert machine.handle(Ended(1), 0.3) == (Refill(1),)
    assert machine.over


EVENTS = st.tuples(
    st.sampled_from([Unwinds, Waits, Stuck, Leaves, Ended]),
    st.integers(0, 4),
    st.floats(0.0, 20.0, allow_nan=False),
)


@settings(max_examples=300)
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
    orders: list[tuple[float, Order]] = [(now, one) for one in machine.tick(now)]
    for kind, seat, passed in schedule:
        now += passed
        before = {one: machine.stage(one) for one in called}
        found = machine.handle(kind(seat), now) + machine.tick(now)
        for one in found:
            if isinstance(one, Kill) and granularity is Granularity.RANK:
                leaves = kind is Leaves and one.seat == seat
                assert leaves or before[one.seat] is Stage.CALLED, "a rank that waits was killed"
            if isinstance(one, Enter):
                stages = {machine.stage(each) for each in called}
                assert stages <= {Stage.WAITING, Stage.GONE}, "some entered, others were not there"
        orders += [(now, one) for one in found]
    limit = now + 100.0
    while (due := machine.deadline()) is not None:
        assert due <= limit, "it does not end"
        now = max(now, due)
        orders += [(now, one) for one in machine.tick(now)]
    assert machine.over
    doors = [one for _, one in orders if isinstance(one, Enter)]
    refilled = [one.seat for _, one in orders if isinstance(one, Refill)]
    assert len(refilled) == len(set(refilled))
    entered = set(doors[-1].seats) - set(refilled) if doors else set()
    assert entered | set(refilled) == set(called)
    assert entered == {seat for seat in called if machine.stage(seat) is Stage.WAITING}


def test_timeouts_come_from_one_number() -> None:
    assert InProcessOptions().patience == 30.0
    assert InProcessOptions(hang_timeout=100).patience == 50.0
    assert InProcessOptions(hang_timeout=2).patience == 10.0
    assert InProcessOptions(hang_timeout=10, hard_timeout=12).patience == 2.0


def test_a_rank_waits_at_the_gate_for_as_long_as_others_may_take_to_come() -> None:
    slow = InProcessOptions(hang_timeout=600)
    assert slow.gate_patience == longest(slow.patience) == 610.0
    assert InProcessOptions(hang_timeout=600, barrier_timeout=5).gate_patience == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hang_timeout": 0}, "hang_timeout: 0 is not a positive number"),
        ({"hard_timeout": 5}, "not more than hang_timeout"),
        ({"granularity": "rack"}, "expected rank or node"),
        ({"max_iterations": 0}, "max_iterations: 0 is not a positive number"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, object], words: str) -> None:
    problems = InProcessOptions(**options).problems()  # type: ignore[arg-type]
    assert words in " ".join(problems)
