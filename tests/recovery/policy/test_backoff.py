"""Starts that complete no step: how long the next one waits, which cost budget, and which end the job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.backoff import DELAYS, BackOff
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import CommitSeen, JobDecider, LoadSeen, StepsDone

RESTART, STOP = RecoveryAction.RESTART_IN_JOB, RecoveryAction.STOP
OUTAGE = "ConnectionError: Temporary failure in name resolution"
FILES = "d1"


def job(restarts: int = 3, per_day: int = 1000, trained: bool = False) -> JobDecider:
    """Return a decider; ``trained``: a generation of an earlier launch has completed a step."""
    found = JobDecider(FaultToleranceOptions(max_restarts=restarts, max_restarts_per_day=per_day), 2)
    if trained:
        found.handle(StepsDone(5, program=FILES), 0.0)
    return found


def fails(
    decider: JobDecider,
    text: str = OUTAGE,
    step: int = -1,
    kind: FaultKind = FaultKind.ERROR,
    program: str = FILES,
    **more: object,
) -> Action:
    fault = Fault(kind, "n0", 1, decider.generation, step, text, text, program=program)
    (action,) = decider.handle(replace(fault, **more), 0.0)  # type: ignore[arg-type]
    return action


def waits(actions: Iterable[Action]) -> list[float]:
    return [one.wait for one in actions]


def test_restarts_after_starts_without_a_step_wait_longer_and_longer() -> None:
    decider = job(10)
    found = [fails(decider) for _ in range(6)]
    assert {one.kind for one in found} == {RESTART}
    assert waits(found) == [0.0, 2.0, 10.0, 60.0, 60.0, 60.0]


def test_a_kill_after_steps_has_used_the_restart_at_once() -> None:
    decider = job(trained=True)
    assert fails(decider, "signal 9", 30, FaultKind.CRASH).wait == 0.0
    assert waits(fails(decider) for _ in range(3)) == [2.0, 10.0, 60.0]


@pytest.mark.parametrize("counted", [False, True])
def test_a_completed_step_resets_the_waits_and_steps_wait_for_nothing(counted: bool) -> None:
    decider = job(10)
    assert waits(fails(decider, counted=counted) for _ in range(3)) == [0.0, 2.0, 10.0]
    decider.handle(StepsDone(1, counted=counted), 0.0)
    assert fails(decider, step=1, counted=counted).wait == 0.0
    assert fails(decider, counted=counted).wait == 2.0


def test_a_load_is_no_step_and_what_a_script_announces_before_its_first_step_is_none() -> None:
    decider = job(10)
    decider.handle(CommitSeen(5, "step-000000005.g1"), 0.0)
    for _ in range(3):
        fails(decider)
        decider.handle(LoadSeen(5, "step-000000005.g1"), 0.0)
    decider.handle(StepsDone(5, began=6), 0.0)  # it goes on from step 5
    assert fails(decider, step=5).wait == 60.0


@pytest.mark.parametrize("restarts", range(5))
def test_max_restarts_bounds_a_program_that_never_trained_as_under_torchrun(restarts: int) -> None:
    for counted in (False, True):
        decider = job(restarts)
        found = [fails(decider, "ValueError: x", counted=counted) for _ in range(restarts + 1)]
        assert [one.kind for one in found] == [RESTART] * restarts + [STOP]
        assert found[-1].exit_code == (93 if restarts and not counted else 1)


def test_an_outage_counts_once_where_the_same_files_have_trained() -> None:
    decider = job(2, trained=True)
    fails(decider, "signal 9", 30, FaultKind.CRASH)
    found = [fails(decider) for _ in range(4)]
    assert [one.kind for one in found] == [RESTART] * 3 + [STOP]
    assert waits(found[:3]) == [2.0, 10.0, 60.0]
    assert found[-1].exit_code == 1, "another allocation may help"


@pytest.mark.parametrize("counted", [False, True])
def test_the_reason_names_a_restart_that_does_not_count(counted: bool) -> None:
    decider = job(2, trained=True)
    fails(decider, "signal 9", 30, FaultKind.CRASH, counted=counted)
    found = [fails(decider, counted=counted).reason for _ in range(3)]
    assert ["not counted" in reason for reason in found] == [False, True, True]
    assert [f"{today} of 1000 today" in reason for today, reason in enumerate(found, 2)] == [True] * 3
    assert found[0].startswith("restart 2 of 2")
    assert not any("restart 2 of 2" in reason for reason in found[1:])


def test_the_daily_budget_bounds_what_counts_once() -> None:
    decider = job(3, per_day=4, trained=True)
    found = [fails(decider) for _ in range(5)]
    assert [one.kind for one in found] == [RESTART] * 4 + [STOP]


@pytest.mark.parametrize(
    "text",
    ["SyntaxError: bad", "ImportError: x", "ModuleNotFoundError: x", "exit 2"],
)
@pytest.mark.parametrize(
    ("trained", "program", "final"),
    [(False, FILES, True), (True, FILES, False), (True, "", False), (True, "d2", True), (False, "", True)],
)
def test_an_error_of_the_program_is_final_unless_the_same_files_have_trained(
    text: str, trained: bool, program: str, final: bool
) -> None:
    action = fails(job(trained=trained), text, program=program)
    assert (action.kind, action.exit_code) == ((STOP, 93) if final else (RESTART, 0))


def test_a_wrong_use_of_the_package_is_always_final() -> None:
    for text in ("UsageError: x", "outlast.errors.ConfigError: x"):
        assert fails(job(trained=True), text).kind is STOP


def test_which_files_have_trained_is_known_to_the_next_launch_and_waits_are_not() -> None:
    decider = job(10, trained=True)
    assert [fails(decider).wait for _ in range(2)] == [0.0, 2.0]
    heir, successor = job(10), job(10)
    heir.restore(json.loads(json.dumps(decider.state())))
    successor.restore(json.loads(json.dumps(decider.state())), in_force=True)
    assert fails(heir, "ImportError: x").kind is RESTART
    assert (fails(heir).wait, fails(successor).wait) == (2.0, 10.0)
    older = {key: value for key, value in decider.state().items() if key not in ("trained", "back_off")}
    heir.restore(older)
    assert fails(heir, "ImportError: x").kind is STOP


@pytest.mark.parametrize(
    ("kind", "text", "more"),
    [
        (FaultKind.NON_FINITE, "nan", {}),
        (FaultKind.CORRUPT, "differ", {}),
        (FaultKind.ERROR, "torch.OutOfMemoryError: CUDA out of memory", {}),
        (FaultKind.LOST, "n1 is lost", {"rank": -1}),
        (FaultKind.ERROR, OUTAGE, {"reenters": True}),
    ],
)
def test_what_is_no_outage_or_keeps_its_processes_does_not_wait(
    kind: FaultKind, text: str, more: dict[str, object]
) -> None:
    decider = job(10, trained=True)
    fails(decider, "signal 9", 30, FaultKind.CRASH)
    assert fails(decider, text, -1, kind, **more).wait == 0.0


def test_ten_minutes_of_training_without_known_steps_reset_the_waits() -> None:
    decider = job(10)
    assert waits(fails(decider, counted=True) for _ in range(2)) == [0.0, 2.0]
    assert fails(decider, counted=True, trained=600.0).wait == 0.0


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
