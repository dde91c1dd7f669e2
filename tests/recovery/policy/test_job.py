from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import (
    TRANSITIONS,
    AllStarted,
    CommitSeen,
    Event,
    JobDecider,
    JobState,
    LoadSeen,
    Move,
    OwnCheckpoint,
    SpareCapacity,
    StepsDone,
    StopRequested,
    WorkerFinished,
    with_saved,
)

RICH = FaultToleranceOptions(max_restarts=1000, max_restarts_per_day=1000)


def job(config: FaultToleranceOptions = RICH, world_size: int = 2) -> JobDecider:
    return JobDecider(config, world_size)


def fault(
    generation: int = 1, step: int = 25, kind: FaultKind = FaultKind.ERROR, text: str = "E: x"
) -> Fault:
    return Fault(kind, "n0", 1, generation, step, f"rank 1: {text}", text)


def only(actions: tuple[Action, ...]) -> Action:
    (action,) = actions
    return action


def name(step: int, generation: int = 1) -> str:
    return f"step-{step:09d}.g{generation}"


def committed(decider: JobDecider, *steps: int) -> None:
    for step in steps:
        assert decider.handle(CommitSeen(step, name(step)), 0.0) == ()


def loads(decider: JobDecider, step: int) -> None:
    assert decider.handle(LoadSeen(step, name(step)), 0.0) == ()


def again(decider: JobDecider, step: int = 25, kind: FaultKind = FaultKind.ERROR) -> Action:
    return only(decider.handle(fault(decider.generation, step, kind), 0.0))


def suspicious() -> JobDecider:
    """Return a decider to which the copies of steps 20 and 24 are suspects."""
    decider = job()
    committed(decider, 10, 20)
    again(decider)
    loads(decider, 20)
    committed(decider, 24)
    again(decider)
    return decider


# States


def test_the_table_says_what_moves_a_job() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert TRANSITIONS[JobState.ENDED] == {}
    for state in set(JobState) - {JobState.ENDED}:
        moves = TRANSITIONS[state]
        assert moves[Move.STOP] is JobState.ENDED
        assert moves[Move.RESTART] is JobState.RESTARTING
        assert moves.get(Move.ALL_STARTED, JobState.RUNNING) is JobState.RUNNING
    assert Move.ALL_STARTED not in TRANSITIONS[JobState.RUNNING]


def test_a_job_starts_runs_restarts_and_ends() -> None:
    decider = job()
    assert (decider.state_now, decider.generation) == (JobState.STARTING, 1)
    assert decider.handle(AllStarted(1), 0.0) == ()
    assert decider.state_now is JobState.RUNNING
    assert decider.handle(AllStarted(1), 0.0) == ()
    assert decider.state_now is JobState.RUNNING
    decider.handle(fault(), 1.0)
    assert (decider.state_now, decider.generation) == (JobState.RESTARTING, 2)
    decider.handle(fault(2, step=26), 2.0)
    assert (decider.state_now, decider.generation) == (JobState.RESTARTING, 3)
    decider.handle(AllStarted(3), 3.0)
    assert decider.state_now is JobState.RUNNING
    decider.handle(StopRequested(15), 4.0)
    assert decider.state_now is JobState.ENDED


def test_a_generation_that_no_fault_asked_for_costs_nothing() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    assert decider.next_generation() == 2
    assert (decider.state_now, decider.generation) == (JobState.RESTARTING, 2)
    assert again(decider).kind is RecoveryAction.RESTART_IN_JOB


@pytest.mark.parametrize(("known", "first"), [(0, 3), (2, 3), (3, 4), (7, 8)])
def test_the_first_generation_is_younger_than_any_that_is_known(known: int, first: int) -> None:
    decider = job()
    decider.restore({**job().state(), "generation": 2})
    decider.begin_after(known)
    assert decider.generation == first


def test_nobody_else_sets_the_number_of_the_generation() -> None:
    with pytest.raises(AttributeError):
        job().generation = 7  # type: ignore[misc]


def test_a_commit_refills_the_budget_and_the_next_fault_is_met_again() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    assert again(decider, 1).kind is RecoveryAction.RESTART_IN_JOB
    committed(decider, 5)
    assert again(decider, 6).kind is RecoveryAction.RESTART_IN_JOB
    assert again(decider, 7).kind is RecoveryAction.STOP


def test_a_fault_before_all_have_started_restarts_as_well() -> None:
    assert only(job().handle(fault(), 0.0)).kind is RecoveryAction.RESTART_IN_JOB


# One generation ends once


def test_the_second_fault_of_a_generation_is_answered_with_nothing_and_a_reason() -> None:
    decider = job()
    assert only(decider.handle(fault(), 0.0)).generation == 2
    assert only(decider.handle(fault(), 0.0)) == Action(
        RecoveryAction.NONE, 2, "ignored: a fault (E: x) from stale generation 1 (current 2)"
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (WorkerFinished(1, 1), "ignored: the end of rank 1 from stale generation 1 (current 2)"),
        (AllStarted(3), "ignored: a start from stale generation 3 (current 2)"),
    ],
)
def test_events_of_other_generations_are_ignored(event: Event, words: str) -> None:
    decider = job()
    decider.handle(fault(), 0.0)
    assert only(decider.handle(event, 0.0)) == Action(RecoveryAction.NONE, 2, words)
    assert decider.state_now is JobState.RESTARTING


def test_a_job_ends_well_when_every_rank_of_one_generation_has() -> None:
    decider = job(world_size=2)
    assert decider.handle(WorkerFinished(0, 1), 0.0) == ()
    assert decider.handle(WorkerFinished(0, 1), 0.0) == ()
    decider.handle(fault(), 0.0)
    assert decider.handle(WorkerFinished(1, 2), 0.0) == ()
    assert only(decider.handle(WorkerFinished(0, 2), 0.0)) == Action(
        RecoveryAction.STOP, 2, "every rank finished"
    )
    assert decider.state_now is JobState.ENDED


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (fault(text="boom " * 40), "a fault (" + ("boom " * 12) + ")"),
        (WorkerFinished(0, 1), "the end of rank 0"),
        (AllStarted(1), "a start"),
        (StopRequested(2), "a request to stop"),
    ],
)
def test_after_the_end_nothing_changes_any_more(event: Event, what: str) -> None:
    decider = job()
    decider.handle(StopRequested(15), 0.0)
    assert only(decider.handle(event, 1.0)) == Action(
        RecoveryAction.NONE, 1, f"ignored: {what} after the end of the job"
    )
    assert decider.handle(CommitSeen(30, name(30)), 1.0) == ()
    assert list(decider.state()["copies"]["copies"]) == [f"local/{name(30)}"], (
        "what is on disk is known all the same"
    )


# In the process, or with new workers


def test_ranks_are_entered_again_where_they_can_be() -> None:
    decider = job(world_size=3)
    assert only(decider.handle(replace(fault(), reenters=True), 0.0)) == Action(
        RecoveryAction.RESTART_IN_PROCESS,
        2,
        "restart in process 1 of 1000 without progress, 1 of 1000 today",
        reenter=True,
    )
    assert decider.state_now is JobState.RESTARTING
    assert only(decider.handle(replace(fault(2, 26), reenters=False), 0.0)) == Action(
        RecoveryAction.RESTART_IN_JOB,
        3,
        "restart 1 of 1000 without progress, 1 of 1000 today "
        "(skipped: restart-in-process: the living ranks cannot restart in process)",
    )


def test_the_living_ranks_of_other_nodes_are_entered_again_when_a_spare_replaces_a_lost_one() -> None:
    lost, room = replace(fault(), kind=FaultKind.LOST, reenters=True), SpareCapacity(spare=True, fewer=True)
    decider = job()
    first = only(decider.handle(lost, 0.0, room))
    assert (first.kind, first.reenter) == (RecoveryAction.REPLACE_NODE, True)
    again = only(decider.handle(replace(lost, generation=2), 1.0, room))
    assert (again.kind, again.reenter) == (RecoveryAction.REPLACE_NODE, False)


@pytest.mark.parametrize(
    ("kind", "reenters", "room"),
    [
        (FaultKind.LOST, None, SpareCapacity(spare=True, fewer=False)),
        (FaultKind.LOST, False, SpareCapacity(spare=True, fewer=False)),
        (FaultKind.LOST, True, SpareCapacity(spare=False, fewer=True)),
        (FaultKind.CORRUPT, True, SpareCapacity(spare=True, fewer=True)),
    ],
)
def test_ranks_are_new_ones_where_they_cannot_be_entered_again_or_something_speaks_against_them(
    kind: FaultKind, reenters: bool | None, room: SpareCapacity
) -> None:
    action = only(job().handle(replace(fault(), kind=kind, reenters=reenters), 0.0, room))
    assert action.kind not in (RecoveryAction.RESTART_IN_PROCESS, RecoveryAction.STOP)
    assert not action.reenter


def test_a_restart_in_process_that_comes_to_nothing_is_one_of_the_workers_in_the_same_generation() -> None:
    decider = job()
    first = replace(fault(), reenters=True)
    assert only(decider.handle(first, 0.0)).kind is RecoveryAction.RESTART_IN_PROCESS
    action = decider.escalate(first, "n1 was late", 5.0)
    assert (action.kind, action.generation, action.reenter) == (RecoveryAction.RESTART_IN_JOB, 2, False)
    assert action.reason == ("n1 was late; restart 1 of 1000 without progress, 1 of 1000 today")
    assert decider.generation == 2
    assert again(decider).reason.startswith("the same fault occurred twice at step 25: ")


def test_a_restart_in_process_that_comes_to_nothing_ends_the_job_where_nothing_is_left() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    assert again(decider).kind is RecoveryAction.RESTART_IN_JOB
    second = replace(fault(2, text="F: y"), reenters=True)
    assert only(decider.handle(second, 0.0)).kind is RecoveryAction.RESTART_IN_PROCESS
    end = decider.escalate(second, "n1 was late", 5.0)
    assert (end.kind, end.exit_code) == (RecoveryAction.STOP, 1), "two faults at a step may be chance"
    assert end.reason.endswith("; last faults: error (E: x) at step 25, error (F: y) at step 25")
    assert decider.state_now is JobState.ENDED


def test_a_fault_that_is_answered_twice_is_one_strike_and_one_replacement() -> None:
    """A lost node is replaced, the living ranks do not come to the gate, and all are started anew."""
    decider = job(FaultToleranceOptions(max_restarts=2))
    room = SpareCapacity(spare=True, fewer=False)
    for step in (5, 9):
        lost = replace(
            fault(decider.generation, step, FaultKind.LOST, "n3 is lost"), node="n3", rank=-1, reenters=True
        )
        first = only(decider.handle(lost, 0.0, room))
        assert (first.kind, first.reenter, first.exclude) == (RecoveryAction.REPLACE_NODE, True, "")
        anew = decider.escalate(lost, "n1 was late", 5.0, room)
        assert (anew.kind, anew.generation, anew.reenter) == (
            RecoveryAction.REPLACE_NODE,
            decider.generation,
            False,
        )
        assert "faults of its own" not in anew.reason
    assert anew.reason == "n1 was late; replacement 2 of 2 without progress, 2 of 20 today"


def test_two_faults_are_two_also_where_one_of_them_was_answered_twice() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    first = replace(fault(), reenters=True)
    assert only(decider.handle(first, 0.0)).kind is RecoveryAction.RESTART_IN_PROCESS
    assert decider.escalate(first, "n1 was late", 5.0).kind is RecoveryAction.RESTART_IN_JOB
    second = only(decider.handle(replace(fault(2, text="F: y"), reenters=True), 6.0))
    assert (second.kind, second.exit_code) == (RecoveryAction.STOP, 1)
    assert second.reason.endswith("; last faults: error (E: x) at step 25, error (F: y) at step 25")


def test_a_hang_that_comes_back_has_its_timeout_doubled_on_whichever_node_it_was_found() -> None:
    decider = job()
    hangs = [again(decider, step, FaultKind.HANG).hung_again for step in (25, 26, 25)]
    assert hangs == [False, False, True]
    assert not again(decider, 25).hung_again, "an error is none"


# Scripts without a session


def counted(decider: JobDecider, step: int, trained: float = 1.0, **changes: Any) -> Action:
    one = replace(fault(decider.generation, step), counted=True, trained=trained, **changes)
    return only(decider.handle(one, 0.0))


@pytest.mark.parametrize("signature", ["E: x", "torch.OutOfMemoryError: CUDA out of memory"])
def test_the_same_step_of_two_processes_is_no_evidence(signature: str) -> None:
    decider = job(FaultToleranceOptions(max_restarts=3))
    reasons = [counted(decider, 22, signature=signature).reason for _ in range(3)]
    assert reasons[2] == (
        "restart 3 of 3, 3 of 20 today "
        "(the script reports no progress: 10 min of training reset this counter)"
    )
    end = counted(decider, 22, signature=signature)
    assert (end.kind, end.exit_code) == (RecoveryAction.STOP, 1)
    assert end.reason.startswith(
        "3 of 3 restarts used (--max-restarts), each within 10 min of training; last"
    )
    assert "progress" not in end.reason


def test_a_generation_that_trained_for_long_refills_the_budget_and_a_day_does_not_end() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1, max_restarts_per_day=4))
    assert counted(decider, 22).kind is RecoveryAction.RESTART_IN_JOB
    for today in (2, 3, 4):
        action = counted(decider, 22, trained=600.0)
        assert action.reason == (
            f"restart 1 of 1, {today} of 4 today (counter reset after 10 min of training)"
        )
    end = counted(decider, 22, trained=9999.0)
    assert end.reason.startswith("4 of 4 restarts in 24 h used")
    short = job(FaultToleranceOptions(max_restarts=1))
    counted(short, 22)
    assert counted(short, 22, trained=599.0).kind is RecoveryAction.STOP


def test_training_for_long_refills_nothing_where_steps_are_known() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    again(decider, 3)
    one = replace(fault(decider.generation, 4), trained=9999.0)
    assert only(decider.handle(one, 0.0)).kind is RecoveryAction.STOP


def test_a_checkpoint_of_the_scripts_own_refills_the_budget() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    for step in (20, 40, 60):
        decider.handle(OwnCheckpoint(step), 0.0)
        assert again(decider, step + 2).kind is RecoveryAction.RESTART_IN_JOB
    decider.handle(OwnCheckpoint(60), 0.0)
    assert again(decider, 63).kind is RecoveryAction.STOP


def test_a_script_that_goes_on_later_than_ever_has_kept_what_came_before() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    for began in (1, 21, 41):
        decider.handle(StepsDone(began + 3, began=began), 0.0)
        assert again(decider, began + 5).kind is RecoveryAction.RESTART_IN_JOB
    decider.handle(StepsDone(50, began=41), 0.0)
    decider.handle(StepsDone(90, began=41), 0.0)
    assert again(decider, 91).kind is RecoveryAction.STOP, "it went on from the same step as before"


def test_a_script_that_goes_on_has_kept_what_came_before_also_in_a_new_launcher() -> None:
    first, heir = job(FaultToleranceOptions(max_restarts=1)), job(FaultToleranceOptions(max_restarts=1))
    again(first, 25)
    heir.restore(first.state())
    heir.handle(StepsDone(23, began=21), 0.0)
    assert again(heir, 26).kind is RecoveryAction.RESTART_IN_JOB


@pytest.mark.parametrize(("saved", "kind"), [(20, RecoveryAction.STOP), (19, RecoveryAction.RESTART_IN_JOB)])
def test_what_a_script_goes_on_from_is_progress_where_it_is_newer_than_what_it_said_to_have_saved(
    saved: int, kind: RecoveryAction
) -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    decider.handle(OwnCheckpoint(saved), 0.0)
    again(decider, 25)
    decider.handle(StepsDone(23, began=21), 0.0)
    assert again(decider, 26).kind is kind


def test_a_script_that_gets_going_after_a_start_that_failed_has_made_progress() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    again(decider, -1)
    decider.handle(StepsDone(3, began=1), 0.0)
    assert again(decider, 4).kind is RecoveryAction.RESTART_IN_JOB


@pytest.mark.parametrize("before", [-1, 20])
@pytest.mark.parametrize(
    ("event", "trained", "refills"),
    [
        (None, 0.0, lambda _: False),
        (None, 601.0, lambda _: True),
        (StepsDone(3, counted=True), 0.0, lambda _: False),
        (StepsDone(3, began=1), 0.0, lambda before: before < 0),
        (StepsDone(23, began=21), 0.0, lambda before: before < 20),
        (StepsDone(24, began=22), 0.0, lambda _: True),
        (OwnCheckpoint(5), 0.0, lambda before: before < 5),
        (CommitSeen(25, name(25)), 0.0, lambda _: True),
    ],
)
def test_what_a_launch_without_a_restart_is_told_holds(
    before: int, event: Event | None, trained: float, refills: Callable[[int], bool]
) -> None:
    """The script of the next launch may be another one, which reports what the one before did not."""
    first, heir = job(FaultToleranceOptions(max_restarts=1)), job(FaultToleranceOptions(max_restarts=1))
    if before >= 0:
        first.handle(OwnCheckpoint(before), 0.0)
    counted(first, -1)
    heir.restore(first.state())
    told = heir.shortage(1.0)
    assert str(before) in told if before >= 0 else "first step" in told
    assert "10 min" in told
    if event is not None:
        heir.handle(event, 1.0)
    assert bool(heir.shortage(2.0)) == (trained > 0 or not refills(before))
    found = only(heir.handle(replace(fault(heir.generation, 3), counted=event is None, trained=trained), 3.0))
    assert (found.kind is RecoveryAction.RESTART_IN_JOB) == refills(before)


def test_optimizer_steps_of_a_process_cannot_be_compared_though_steps_are_known() -> None:
    decider = job()
    decider.handle(StepsDone(5), 0.0)
    assert [counted(decider, 0).kind for _ in range(4)] == [RecoveryAction.RESTART_IN_JOB] * 4


def test_a_start_up_that_fails_is_none_for_a_script_that_never_told_a_step() -> None:
    decider = job()
    decider.handle(StepsDone(5, counted=True), 0.0)
    assert [counted(decider, -1).kind for _ in range(4)] == [RecoveryAction.RESTART_IN_JOB] * 4


@pytest.mark.parametrize("known", [StepsDone(5), CommitSeen(5, name(5)), OwnCheckpoint(5)])
def test_a_start_up_that_fails_is_known_for_a_script_that_told_steps_before(known: Event) -> None:
    """Its process ends before it can say again that it has a session, or what its step is."""
    decider = job()
    decider.handle(known, 0.0)
    assert counted(decider, -1).kind is RecoveryAction.RESTART_IN_JOB
    heir = job(FaultToleranceOptions(max_restarts=1))
    heir.restore(json.loads(json.dumps(decider.state())))
    end = counted(heir, -1)
    trained = isinstance(known, StepsDone)
    assert (end.kind, end.exit_code) == (RecoveryAction.STOP, 1 if trained else 93)
    assert "the same fault occurred twice before the first step: the start-up fails" in end.reason


def test_a_hang_of_an_unknown_step_that_comes_back_in_its_section_has_its_timeout_doubled() -> None:
    decider = job()
    found = [counted(decider, step, kind=FaultKind.HANG).hung_again for step in (22, 7)]
    assert found == [False, True]
    hang = replace(fault(decider.generation, 9, FaultKind.HANG), counted=True, reenters=True)
    first = only(decider.handle(hang, 0.0))
    second = decider.escalate(hang, "n1 was late", 5.0)
    assert [(one.kind, one.hung_again) for one in (first, second)] == [
        (RecoveryAction.RESTART_IN_PROCESS, True),
        (RecoveryAction.RESTART_IN_JOB, True),
    ]
    assert "(the script reports no progress: " in second.reason


# Being stopped


@pytest.mark.parametrize(
    ("signum", "words"),
    [
        (2, "signal 2 (SIGINT)"),
        (3, "signal 3 (SIGQUIT)"),
        (10, "signal 10 (SIGUSR1)"),
        (12, "signal 12 (SIGUSR2)"),
        (15, "signal 15 (SIGTERM)"),
        (40, "signal 40"),
    ],
)
def test_a_signal_ends_the_job_with_its_exit_code(signum: int, words: str) -> None:
    decider = job()
    committed(decider, 10, 20)
    reason = f"stopped by {words}; rerun the same command to resume from step 20 or later"
    action = only(decider.handle(StopRequested(signum), 0.0))
    assert action == Action(RecoveryAction.STOP, 1, reason, exit_code=128 + signum)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (FaultKind.ERROR, "the job was preempted; rerun the same command to resume from step 0 or later"),
        (FaultKind.REFUSED, "nothing was lost; rerun the same command when the storage answers again"),
    ],
)
def test_exit_code_75_of_a_rank_ends_the_job_for_a_later_attempt(kind: FaultKind, words: str) -> None:
    decider = job()
    committed(decider, 0)
    action = only(decider.handle(replace(fault(), kind=kind, exit_code=75), 0.0))
    assert action == Action(RecoveryAction.STOP, 1, words, exit_code=75)


def test_without_a_commit_the_reason_says_what_is_known() -> None:
    assert only(job().handle(StopRequested(1), 0.0)).reason == (
        "stopped by signal 1 (SIGHUP); outlast has no checkpoint of this run: the same command starts from "
        "step 0, unless the script loads a checkpoint of its own"
    )
    decider = job()
    for step in (40, 20):
        decider.handle(OwnCheckpoint(step), 0.0)
    assert only(decider.handle(StopRequested(1), 0.0)).reason == (
        "stopped by signal 1 (SIGHUP); the script announced a checkpoint of its own at step 40"
    )


def test_an_answer_that_ends_the_job_comes_with_its_code() -> None:
    refusal = replace(fault(kind=FaultKind.REFUSED), exit_code=65)
    assert only(job().handle(refusal, 0.0)) == Action(
        RecoveryAction.STOP, 1, "a restart will not help", exit_code=65
    )


@pytest.mark.parametrize(
    ("agreed", "told"),
    [
        (None, ""),
        (-1, "; checkpoints that diverged replicas saved are not loaded"),
        (0, "; checkpoints that diverged replicas saved after step 0 are not loaded"),
        (1, "; checkpoints that diverged replicas saved after step 1 are not loaded"),
    ],
)
def test_the_reason_says_what_ranks_that_differ_cost(agreed: int | None, told: str) -> None:
    found = replace(fault(kind=FaultKind.CORRUPT), agreed=agreed)
    reason = only(job().handle(found, 0.0)).reason
    assert reason.endswith(told)
    assert ("diverged" in reason) == bool(told)


# What is kept


def test_the_next_launcher_goes_on_with_a_generation_of_its_own() -> None:
    first, second = suspicious(), job()
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state_now is JobState.STARTING
    assert second.generation == first.generation + 1
    assert second.avoid == first.avoid
    assert second.state()["escalation"] == first.state()["escalation"]
    assert second.trust_changes() == ()
    loads(second, 10)
    assert again(second).kind is RecoveryAction.STOP, "it has been tried from an older state already"


def test_a_state_that_is_not_ours_is_refused_and_changes_nothing() -> None:
    refused: Counter[str] = Counter()
    whole = suspicious().state()
    leaves = (
        st.none() | st.integers(-9, 0) | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    )
    junk = leaves | st.lists(leaves, max_size=2) | st.dictionaries(st.text(max_size=4), leaves, max_size=2)
    part = st.fixed_dictionaries({}, optional={key: junk for key in whole["escalation"]})

    @settings(max_examples=200)
    @given(st.fixed_dictionaries({}, optional={**{key: junk for key in whole}, "escalation": part}) | junk)
    @example({})
    @example({"generation": -1})
    @example("no state")
    def check(damage: object) -> None:
        state = damage
        if isinstance(damage, dict):
            inner = damage.get("escalation", {})
            merged = {**whole["escalation"], **inner} if isinstance(inner, dict) else inner
            state = {**whole, **damage, "escalation": merged}
        decider = job()
        try:
            decider.restore(state)  # type: ignore[arg-type]  # whatever a file may hold
        except (KeyError, TypeError, ValueError) as error:
            refused[type(error).__name__] += 1
            assert decider.state() == job().state()
        else:
            refused["nothing"] += 1
            assert json.dumps(decider.state())
            again(decider)

    check()
    assert min(refused["TypeError"], refused["ValueError"], refused["nothing"]) > 0, refused


# Every recovery ends


def test_whatever_happens_a_job_ends_within_its_daily_budget() -> None:
    """Each turn may commit, loads something old or new, and ends in a fault; no day ever goes by."""
    seen: Counter[str] = Counter()
    kinds = st.sampled_from([FaultKind.ERROR, FaultKind.CRASH, FaultKind.HANG, FaultKind.NON_FINITE])
    faults = st.builds(fault, st.just(0), st.sampled_from([-1, 0, 0, 0, 7]) | st.integers(1, 99), kinds)
    turns = st.tuples(st.none() | st.integers(0, 99), st.integers(0, 5), faults)

    @settings(max_examples=200)
    @given(st.lists(turns, min_size=16, max_size=24), st.integers(2, 12), st.integers(2, 6))
    def check(history: list[tuple[int | None, int, Fault]], slow: int, fast: int) -> None:
        decider = job(FaultToleranceOptions(max_restarts=fast, max_restarts_per_day=slow))
        restarts, copies = 0, [0, 1]
        committed(decider, *copies)
        for place, (commit, load, failure) in enumerate(history):
            if commit is not None:
                copies.append(commit)
                committed(decider, commit)
            loads(decider, sorted(copies)[-1 - load % len(copies)])
            ended = decider.state_now is JobState.ENDED
            event = replace(failure, generation=decider.generation)
            action = only(decider.handle(event, float(place)))
            assert action.reason
            assert not ended or action.kind is RecoveryAction.NONE
            restarts += action.kind is RecoveryAction.RESTART_IN_JOB
            seen[f"{action.kind.value} {action.state.value}"] += 1
            assert decider.generation == 1 + restarts
            assert restarts <= slow
        assert decider.state_now is JobState.ENDED
        seen["progress"] += restarts > fast

    check()
    wanted = ("restart-in-job newest", "restart-in-job older", "stop newest", "progress")
    assert min(seen[one] for one in wanted) > 0, seen


@pytest.mark.parametrize("before", [(), (30,)])
def test_the_end_names_the_step_that_was_saved_last(before: tuple[int, ...]) -> None:
    decider = job()
    committed(decider, *before)
    reason = only(decider.handle(StopRequested(15), 0.0)).reason
    told = with_saved(reason, 41)
    assert [int(one) for one in re.findall(r"step (\d+)", told)] == [41]
    assert told.startswith(reason.split(";")[0])
