from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.chaos import policy as scenario
from outlast.chaos.policy import FAULTS, Condition, Injection, Observation, Scenario, Target

AT_ONCE = Condition.AT_ONCE
KILL = Injection("rank_killed", 0, after_step=10)


def seen(
    step: int, generation: int = 1, *, running: bool = True, learned: bool = False, saves: int = 0
) -> Observation:
    return Observation(generation, step, running, learned, saves)


def test_an_injection_waits_for_its_step_and_is_due_once() -> None:
    scene = Scenario((KILL,), patience=60.0)
    assert scene.handle(seen(9), now=0.0) == ()
    assert scene.handle(seen(10), now=1.0) == (KILL,)
    assert scene.handle(seen(11, generation=2), now=2.0) == ()
    assert scene.left == ()


def test_the_next_one_waits_until_a_newer_generation_runs() -> None:
    scene = Scenario((KILL, Injection("rank_hung", 1, after_step=10)), patience=60.0)
    assert len(scene.handle(seen(10), now=0.0)) == 1
    assert scene.handle(seen(12), now=1.0) == ()
    assert scene.handle(seen(12, generation=2, running=False), now=2.0) == ()
    assert [one.fault for one in scene.handle(seen(12, generation=2), now=3.0)] == ["rank_hung"]


def test_a_hang_waits_for_learned_timeouts() -> None:
    scene = Scenario((Injection("rank_hung", 1, 0, Condition.TIMEOUTS_LEARNED),), patience=60.0)
    assert scene.handle(seen(99), now=0.0) == ()
    assert len(scene.handle(seen(99, learned=True), now=0.0)) == 1


def test_a_bad_checkpoint_waits_for_a_save_and_the_crash_follows_at_once() -> None:
    injections = (
        Injection("bit_flipped", -1, 5, Condition.JUST_SAVED),
        Injection("rank_killed", 2, 5, Condition.AT_ONCE),
    )
    scene = Scenario(injections, patience=60.0)
    assert scene.handle(seen(8, saves=2), now=0.0) == (), "the save may be long ago"
    assert scene.handle(seen(9, saves=2), now=0.0) == ()
    assert scene.handle(seen(10, saves=3), now=0.0) == injections


def test_a_changed_file_alone_does_not_wait_for_a_recovery() -> None:
    injections = (Injection("bit_flipped", -1, 5), Injection("rank_killed", 2, 20))
    scene = Scenario(injections, patience=60.0)
    assert scene.handle(seen(5), now=0.0) == injections[:1]
    assert scene.handle(seen(20), now=0.0) == injections[1:]


def test_an_overdue_injection_names_what_was_not_observed() -> None:
    scene = Scenario((KILL,), patience=60.0)
    assert scene.deadline() is None
    scene.handle(seen(0), now=100.0)
    scene.handle(seen(1), now=150.0)
    assert scene.deadline() == 160.0
    assert scene.tick(159.9) == ""
    assert re.search("rank_killed.* 10", scene.tick(160.0))


def test_the_patience_begins_anew_with_each_injection() -> None:
    scene = Scenario((KILL, KILL), patience=60.0)
    scene.handle(seen(0), now=0.0)
    scene.handle(seen(10), now=50.0)
    assert scene.deadline() == 110.0


def _dice(seed: int) -> Callable[[], float]:
    return random.Random(seed).random


@given(st.integers(0, 2**32), st.integers(1, 64))
def test_the_demo_is_a_function_of_its_seed(seed: int, world_size: int) -> None:
    injections = scenario.demo(world_size, 20, _dice(seed))
    assert injections == scenario.demo(world_size, 20, _dice(seed))
    assert [one.after_step % 20 for one in injections if one.fault == "rank_hung"] == [10]
    steps = [one.after_step for one in injections]
    assert steps == sorted(steps)
    assert steps[-1] <= scenario.DEMO_LAST_STEP
    for one in injections:
        on_worker = FAULTS[one.fault].target is Target.WORKER
        assert (0 <= one.rank < world_size) if on_worker else one.rank == -1


@given(st.integers(0, 2**32))
def test_two_seeds_give_two_scenarios(seed: int) -> None:
    assert scenario.demo(4, 20, _dice(seed)) != scenario.demo(4, 20, _dice(seed + 1))


def test_what_the_demo_draws_is_where_when_and_which_bit() -> None:
    first, last = (scenario.demo(4, 20, partial(float, drawn)) for drawn in (0.0, 0.999))
    assert [one.rank for one in first] == [0, 0, -1, 0, -1]
    assert [one.rank for one in last] == [3, 3, -1, 3, -1]
    assert all(one.after_step < other.after_step for one, other in zip(first, last, strict=True))
    assert first[2].seed != last[2].seed


@given(st.integers(0, 2**32))
def test_a_recovery_of_the_demo_has_steps_enough_before_the_next_fault(seed: int) -> None:
    steps = [one.after_step for one in scenario.demo(4, 20, _dice(seed)) if one.condition is not AT_ONCE]
    assert all(other - one >= 30 for one, other in itertools.pairwise(steps))


@pytest.mark.parametrize(("drawn", "expected"), [(0.0, 5.0), (0.5, 5.5), (0.999, 5.999)])
def test_the_delay_is_bridges(drawn: float, expected: float) -> None:
    assert scenario.delay(5.0, lambda: drawn) == pytest.approx(expected)


def test_random_is_one_of_bridges_two_faults() -> None:
    assert {scenario.concrete("random", lambda drawn=drawn: drawn) for drawn in (0.0, 0.49, 0.5, 0.999)} == {
        "rank_killed",
        "rank_hung",
    }
    assert scenario.concrete("SIGTERM", lambda: 0.9) == "SIGTERM"


@pytest.mark.parametrize("generation", [0, 1])
def test_a_fault_that_is_asked_for_at_once_waits_for_progress_like_any_other_if_it_is_the_first(
    generation: int,
) -> None:
    scene = Scenario((Injection("rank_killed", 2, 5, Condition.AT_ONCE),), patience=60.0)
    assert scene.handle(seen(4, generation), now=0.0) == ()
    assert scene.handle(seen(5, generation, running=False), now=0.0) == ()
    assert len(scene.handle(seen(5, generation), now=0.0)) == 1


def test_the_first_save_of_all_is_one_that_was_just_made() -> None:
    scene = Scenario((Injection("bit_flipped", -1, 0, Condition.JUST_SAVED),), patience=60.0)
    assert scene.handle(seen(1, saves=0), now=0.0) == ()
    assert len(scene.handle(seen(2, saves=1), now=0.0)) == 1


def test_nothing_is_overdue_before_the_first_look_and_after_the_last_injection() -> None:
    scene = Scenario((KILL,), patience=60.0)
    assert (scene.deadline(), scene.tick(1e9)) == (None, "")
    scene.handle(seen(10), now=0.0)
    assert (scene.deadline(), scene.tick(1e9)) == (None, "")
