"""The edges of the in-process restart: what comes twice, late or from nobody, and options at their bounds."""

from __future__ import annotations

import math

import pytest

from outlast.config import InProcessOptions
from outlast.inprocess.policy import (
    CULPRIT_PATIENCE,
    KILL_PATIENCE,
    Called,
    Ended,
    Enter,
    Granularity,
    Kill,
    Reentry,
    Refill,
    Stage,
    Unwinds,
    Waits,
)


def begin(*patience: float, granularity: Granularity = Granularity.RANK) -> Reentry:
    return Reentry({seat: Called(one) for seat, one in enumerate(patience)}, granularity, 30.0, 0.0)


def test_a_worker_that_waits_is_never_too_late() -> None:
    machine = begin(1, 30)
    machine.handle(Waits(0), 0.5)
    assert machine.tick(2.0) == ()
    assert (machine.stage(0), machine.stage(1)) == (Stage.WAITING, Stage.CALLED)
    assert machine.deadline() == 30.0, "of those that have not come yet"
    assert machine.handle(Waits(1), 3.0) == (Enter((0, 1)),)


def test_one_that_waits_as_the_restart_begins_is_let_in_at_once() -> None:
    machine = Reentry({0: Called(1, waits=True), 1: Called(1, waits=True)}, Granularity.RANK, 30.0, 0.0)
    assert machine.deadline() is None
    assert machine.tick(0.0) == (Enter((0, 1)),)
    assert machine.over


def test_one_that_is_killed_is_gone_when_the_kernel_says_so_or_when_its_time_is_up() -> None:
    assert (CULPRIT_PATIENCE, KILL_PATIENCE) == (1.0, 10.0)
    machine = begin(1, 30)
    (kill,) = machine.tick(1.0)
    assert isinstance(kill, Kill)
    assert machine.stage(0) is Stage.KILLED
    assert machine.deadline() == 11.0
    assert machine.handle(Waits(0), 1.5) == ()
    assert machine.stage(0) is Stage.KILLED, "it is too late to come"
    assert machine.tick(10.9) == ()
    assert machine.tick(11.0) == (Refill(0),)
    assert machine.kept == (1,)


def test_an_end_is_heard_once() -> None:
    machine = begin(30, 30)
    assert machine.handle(Ended(0), 0.1) == (Refill(0),)
    assert machine.handle(Ended(0), 0.2) == ()
    assert (machine.stage(0), machine.kept) == (Stage.GONE, (1,))


def test_what_was_never_kept_is_nobodys_business() -> None:
    machine = begin(30)
    assert machine.stage(5) is None
    assert machine.handle(Ended(5), 0.1) == ()
    assert machine.handle(Waits(0), 0.2) == (Enter((0,)),)
    assert machine.handle(Unwinds(0), 0.3) == ()
    assert machine.tick(99.0) == ()
    assert machine.kept == (0,)


def test_the_node_is_the_grain_that_ends_all_that_are_kept() -> None:
    machine = begin(30, 30, granularity=Granularity.NODE)
    machine.handle(Waits(0), 0.1)
    refill, kill = machine.handle(Ended(1), 0.2)
    assert (refill, isinstance(kill, Kill)) == (Refill(1), True)
    assert machine.deadline() == 0.2 + KILL_PATIENCE


# Options


def test_the_defaults_are_nvrx_and_make_sense() -> None:
    options = InProcessOptions()
    assert (options.enabled, options.gate_patience, options.granularity) == (True, 120.0, "rank")
    assert options.problems() == ()
    assert (options.hang_timeout, options.patience) == (None, 30.0)


@pytest.mark.parametrize("name", ["hang_timeout", "hard_timeout", "barrier_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_seconds_are_positive_and_finite(name: str, value: float) -> None:
    assert InProcessOptions(**{name: value}).problems()[0] == (
        f"{name}: {value} is not a positive number of seconds"
    )


@pytest.mark.parametrize("name", ["hang_timeout", "barrier_timeout"])
def test_a_second_is_enough_and_less_is_too(name: str) -> None:
    assert InProcessOptions(**{name: 0.5}).problems() == ()  # type: ignore[arg-type]  # one of the numbers
    assert InProcessOptions(**{name: 1}).problems() == ()  # type: ignore[arg-type]


def test_the_hard_timeout_is_more_than_the_hang_timeout() -> None:
    assert InProcessOptions(hang_timeout=10.0, hard_timeout=10.5).problems() == ()
    assert InProcessOptions(hang_timeout=10.0, hard_timeout=10.0).problems() == (
        "hard_timeout: 10.0 is not more than hang_timeout",
    )
    several = InProcessOptions(hang_timeout=10.0, hard_timeout=-1.0)
    assert len(several.problems()) == 1


def test_iterations_are_at_least_one() -> None:
    assert InProcessOptions(max_iterations=1).problems() == ()
    assert InProcessOptions(max_iterations=0).problems() == ("max_iterations: 0 is not a positive number",)


def test_the_grain_is_a_rank_or_a_node() -> None:
    assert InProcessOptions(granularity="node").problems() == ()
    assert InProcessOptions(granularity="rack").problems() == (
        "granularity: found 'rack', expected rank or node",
    )
