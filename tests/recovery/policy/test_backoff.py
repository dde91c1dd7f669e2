"""Starts that complete no step: how long the next one waits, which cost budget, and which end the job."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.recovery.policy.backoff import DELAYS, BackOff
from outlast.recovery.policy.events import Action, Fault
from outlast.recovery.policy.job import JobDecider, StepsDone
from tests.recovery.policy.builders import committed, fault, heir, hit, job, killed, loads, numbers, short

OUTAGE = fault(text="ConnectionError: Temporary failure in name resolution", step=-1, program="d1")


def trained(fast: int = 10, slow: int = 1000) -> JobDecider:
    """Return a decider of a launch after one in which the files have completed a step."""
    decider = job(fast, slow)
    decider.handle(StepsDone(5, program="d1"), 0.0)
    return decider


def fail(decider: JobDecider, times: int = 1, one: Fault = OUTAGE, **more: Any) -> list[Action]:
    return [hit(decider, one, **more) for _ in range(times)]


def waits(actions: list[Action]) -> list[float]:
    return [one.wait for one in actions]


def test_restarts_after_starts_without_a_step_wait_longer_and_longer() -> None:
    assert waits(fail(job(10), 6)) == [0.0, 2.0, 10.0, 60.0, 60.0, 60.0]


def test_a_kill_after_steps_has_used_the_restart_at_once() -> None:
    decider = trained()
    assert waits(fail(decider, one=killed(30, program="d1"))) == [0.0]
    assert waits(fail(decider, 3)) == [2.0, 10.0, 60.0]


@pytest.mark.parametrize("counted", [False, True])
def test_a_completed_step_resets_the_waits_and_steps_wait_for_nothing(counted: bool) -> None:
    decider = job(10)
    assert waits(fail(decider, 3, counted=counted)) == [0.0, 2.0, 10.0]
    decider.handle(StepsDone(1, counted=counted), 0.0)
    assert waits(fail(decider, step=1, counted=counted)) == [0.0]
    assert waits(fail(decider, counted=counted)) == [2.0]


def test_a_load_is_no_step_and_what_a_script_announces_before_its_first_step_is_none() -> None:
    decider = committed(job(10), 5)
    for _ in range(3):
        fail(decider)
        loads(decider, 5)
    decider.handle(StepsDone(5, began=6), 0.0)  # it goes on from step 5
    assert waits(fail(decider, step=5)) == [60.0]
    assert waits(fail(decider, step=3)) == [0.0], "this generation has announced nothing, and did steps"


@pytest.mark.parametrize("restarts", range(5))
@pytest.mark.parametrize("counted", [False, True])
def test_max_restarts_bounds_a_program_that_never_trained_as_under_torchrun(
    restarts: int, counted: bool
) -> None:
    found = fail(job(restarts), restarts + 1, counted=counted)
    code = 93 if restarts and not counted else 1
    assert [short(one) for one in found] == ["in-job"] * restarts + [f"stop {code}"]
    assert "--max-restarts" in found[-1].reason


@pytest.mark.parametrize("counted", [False, True])
def test_an_outage_counts_once_where_the_same_files_have_trained(counted: bool) -> None:
    decider = trained(2)
    fail(decider, one=killed(30, program="d1", counted=counted))
    found = fail(decider, 4, counted=counted)
    assert [short(one) for one in found] == ["in-job"] * 3 + ["stop 1"], "another allocation may help"
    assert waits(found[:3]) == [2.0, 10.0, 60.0]
    assert [numbers(one.reason)[:4] for one in found[:3]] == [[2, 2, today, 1000] for today in (2, 3, 4)]
    words = [re.sub(r"\d+", "#", one.reason).split("#")[0] for one in found[:3]]
    assert words[0] != words[1] == words[2], "one that does not count is named as such"


def test_the_daily_budget_bounds_what_counts_once() -> None:
    assert [short(one) for one in fail(trained(3, 4), 5)] == ["in-job"] * 4 + ["stop 1"]


@pytest.mark.parametrize("text", ["ImportError: x", "exit 2"])
@pytest.mark.parametrize(
    ("decider", "program", "answer"),
    [
        (job, "d1", "stop 93"),
        (job, "", "stop 93"),
        (trained, "d1", "in-job"),
        (trained, "", "in-job"),  # what could not be read may be the same
        (trained, "d2", "stop 93"),
    ],
)
def test_an_error_of_the_program_is_final_unless_the_same_files_have_trained(
    text: str, decider: Any, program: str, answer: str
) -> None:
    (action,) = fail(decider(), one=fault(text=text, step=-1, program=program))
    assert short(action) == answer


def test_exit_status_2_is_an_error_of_the_program_before_its_first_step_only() -> None:
    for step, counted, answer in ((0, True, "stop 93"), (1, True, "in-job"), (0, False, "in-job")):
        assert short(hit(job(), fault(text="exit 2", step=step, counted=counted))) == answer


def test_which_files_have_trained_is_known_to_the_next_launch_and_waits_are_not() -> None:
    decider, successor = trained(), job(10)
    assert waits(fail(decider, 2)) == [0.0, 2.0]
    successor.restore(json.loads(json.dumps(decider.state())), in_force=True)
    next_launch, missing = heir(decider), fault(text="ImportError: x", step=-1, program="d1")
    assert short(hit(next_launch, missing)) == "in-job"
    assert waits(fail(next_launch)) == [2.0], "for another cause"
    assert waits(fail(successor)) == [10.0]
    older = {key: value for key, value in decider.state().items() if key not in ("trained", "back_off")}
    next_launch.restore(older)
    assert short(hit(next_launch, missing)) == "stop 93"


@pytest.mark.parametrize(
    "one",
    [
        fault("non-finite", "nan", -1),
        fault("corrupt", "differ", -1),
        fault(text="torch.OutOfMemoryError: CUDA out of memory", step=-1),
        fault("lost", "n1 is lost", -1, rank=-1),
        fault(step=-1, reenters=True),
    ],
)
def test_what_is_no_outage_or_keeps_its_processes_does_not_wait(one: Fault) -> None:
    decider = trained()
    fail(decider, one=killed(30))
    assert waits(fail(decider, one=one)) == [0.0]


def test_ten_minutes_of_training_without_known_steps_reset_the_waits() -> None:
    decider = job(10)
    assert waits(fail(decider, 2, step=0, counted=True)) == [0.0, 2.0]
    assert waits(fail(decider, step=0, counted=True, trained=600.0)) == [0.0]


@given(st.lists(st.sampled_from("ABC-"), max_size=30))
def test_waits_grow_with_each_cause_until_a_step(events: list[str]) -> None:
    back_off, since = BackOff(), ""
    for event in events:
        if event == "-":
            back_off.stepped()
            since = ""
            continue
        tries = since.count(event) + bool(set(since) - {event})
        assert back_off.delay(event) == DELAYS[min(tries, 3)]
        back_off.restarted(event)
        since += event
    assert BackOff.of(json.loads(json.dumps(back_off.state()))).state() == back_off.state()


def test_the_number_of_causes_is_bounded() -> None:
    back_off = BackOff()
    for number in range(1000):
        back_off.restarted(str(number))
    assert len(back_off.state()) <= 64
    assert back_off.delay("999") == DELAYS[2]
