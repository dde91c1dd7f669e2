"""The decider of a job: its states, what it answers to each event, and what the next launcher takes over."""

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

from outlast.recovery.policy.events import Action, Fault
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    Event,
    JobDecider,
    JobState,
    OwnCheckpoint,
    SpareCapacity,
    StepsDone,
    StopRequested,
    WorkerFinished,
    with_saved,
)
from tests.recovery.policy.builders import (
    NO_SPARE,
    NONE,
    ROOM,
    committed,
    fault,
    finished,
    heir,
    hit,
    job,
    loads,
    name,
    numbers,
    only,
    short,
    suspicious,
)

STARTING, RUNNING = JobState.STARTING, JobState.RUNNING
RESTARTING, ENDED = JobState.RESTARTING, JobState.ENDED
BOOM = fault(step=25)
AGAIN = replace(BOOM, reenters=True)


def test_a_job_starts_runs_restarts_and_ends() -> None:
    decider = job()
    seen = [(decider.state_now, decider.generation)]
    one = [AllStarted(1), AllStarted(1), BOOM, fault(step=26, generation=2), AllStarted(3), StopRequested(15)]
    for event in one:
        decider.handle(event, 0.0)
        seen.append((decider.state_now, decider.generation))
    after = [(RUNNING, 1), (RUNNING, 1), (RESTARTING, 2), (RESTARTING, 3), (RUNNING, 3), (ENDED, 3)]
    assert seen == [(STARTING, 1), *after]


def test_a_generation_that_no_fault_asked_for_costs_nothing() -> None:
    decider = job(fast=1)
    assert decider.next_generation() == 2
    assert (decider.state_now, decider.generation) == (RESTARTING, 2)
    assert short(hit(decider)) == "in-job"


@pytest.mark.parametrize(("known", "first"), [(0, 3), (2, 3), (3, 4), (7, 8)])
def test_the_first_generation_is_younger_than_any_that_is_known(known: int, first: int) -> None:
    decider = heir(job(), generation=2)
    decider.begin_after(known)
    assert decider.generation == first


@pytest.mark.parametrize(
    ("ended", "event", "named"),
    [
        (False, BOOM, "E: x"),
        (False, WorkerFinished(1, 1), "rank 1"),
        (False, AllStarted(3), "3"),
        (True, fault(text="boom " * 40, generation=2), "boom boom"),
        (True, WorkerFinished(0, 2), "rank 0"),
        (True, AllStarted(2), ""),
        (True, StopRequested(2), ""),
    ],
)
def test_events_after_the_end_and_of_other_generations_are_ignored(
    ended: bool, event: Event, named: str
) -> None:
    decider = job()
    hit(decider)
    if ended:
        decider.handle(StopRequested(15), 0.0)
    before = decider.state_now
    action = only(decider.handle(event, 1.0))
    assert (action, decider.state_now) == (Action(NONE, 2, action.reason), before)
    assert named in action.reason
    assert len(action.reason) < 150


def test_a_job_ends_well_when_every_rank_of_one_generation_has() -> None:
    decider = job()
    for _ in range(2):
        assert decider.handle(WorkerFinished(0, 1), 0.0) == ()
    hit(decider)
    assert decider.handle(WorkerFinished(1, 2), 0.0) == ()
    assert short(only(decider.handle(WorkerFinished(0, 2), 0.0))) == "stop 0"
    assert decider.state_now is ENDED


# In the process, or with new workers


@pytest.mark.parametrize(
    ("one", "room", "answers"),
    [
        (AGAIN, None, ["in-process +", "in-job"]),
        (replace(BOOM, reenters=False), None, ["in-job", "stop 93"]),
        (fault("lost", reenters=True), ROOM, ["replace-node +", "replace-node"]),
        (fault("lost"), ROOM, ["replace-node"]),
        (fault("lost", reenters=False), ROOM, ["replace-node"]),
        (fault("lost", reenters=True), NO_SPARE, ["shrink"]),
        (fault("corrupt", reenters=True), ROOM, ["in-job"]),
    ],
)
def test_living_ranks_are_kept_where_they_can_be_and_nothing_speaks_against_them(
    one: Fault, room: SpareCapacity | None, answers: list[str]
) -> None:
    decider = job()
    found = [hit(decider, one, room=room) for _ in answers]
    assert [short(one) + " +" * one.reenter for one in found] == answers


def test_a_restart_in_process_that_fails_becomes_one_with_new_workers_in_the_same_generation() -> None:
    decider = job()
    hit(decider, AGAIN)
    action = decider.escalate(AGAIN, "n1 was late", 5.0)
    assert (short(action), action.generation, action.reenter) == ("in-job", 2, False)
    assert action.reason.startswith("n1 was late")
    assert numbers(action.reason) == [1, 1000, 1, 1000]
    assert decider.generation == 2
    assert short(hit(decider)) == "stop 93", "the fault came back"


def test_a_restart_in_process_that_fails_ends_the_job_where_nothing_is_left() -> None:
    decider, second = job(fast=1), replace(AGAIN, generation=2, signature="F: y")
    assert [short(hit(decider)), short(hit(decider, second))] == ["in-job", "in-process"]
    end = decider.escalate(second, "n1 was late", 5.0)
    assert (short(end), decider.state_now) == ("stop 1", ENDED), "two faults at a step may be chance"
    assert re.findall("[EF]: [xy]", end.reason) == ["E: x", "F: y"]


def test_a_fault_that_is_answered_twice_counts_once() -> None:
    decider, room = job(fast=2), SpareCapacity(spare=True, fewer=False)
    for step in (5, 9):
        lost = fault("lost", "n3 is lost", step, node="n3", rank=-1, reenters=True)
        first = hit(decider, lost, room=room)
        assert (short(first), first.reenter, first.exclude) == ("replace-node", True, "")
        anew = decider.escalate(lost, "n1 was late", 5.0, room)
        assert (short(anew), anew.generation, anew.reenter) == ("replace-node", decider.generation, False)
    assert numbers(anew.reason) == [2, 2, 2, 1000]
    other = job(fast=1)
    hit(other, AGAIN)
    other.escalate(AGAIN, "n1 was late", 5.0)
    end = hit(other, replace(AGAIN, signature="F: y"))
    assert (short(end), re.findall("[EF]: [xy]", end.reason)) == ("stop 1", ["E: x", "F: y"])


def test_a_hang_that_comes_back_has_its_timeout_doubled() -> None:
    decider = job()
    assert [hit(decider, step, "hang").hung_again for step in (25, 26, 25)] == [False, False, True]
    assert not hit(decider, 25).hung_again, "an error is none"
    unknown = job()
    assert [counted(unknown, step, kind="hang").hung_again for step in (22, 7)] == [False, True]
    hang = fault("hang", counted=True, reenters=True, generation=unknown.generation)
    found = (hit(unknown, hang), unknown.escalate(hang, "n1 was late", 5.0))
    assert [(short(one), one.hung_again) for one in found] == [("in-process", True), ("in-job", True)]


# Scripts without a session


def counted(decider: JobDecider, step: int, **more: Any) -> Action:
    return hit(decider, fault(step=step, counted=True, **{"trained": 1.0, **more}))


@pytest.mark.parametrize("text", ["E: x", "torch.OutOfMemoryError: CUDA out of memory"])
def test_the_same_step_of_two_processes_is_no_evidence(text: str) -> None:
    decider = job(3, 20)
    found = [counted(decider, 22, signature=text) for _ in range(4)]
    assert [short(one) for one in found] == ["in-job"] * 3 + ["stop 1"]
    assert numbers(found[2].reason) == [3, 3, 3, 20, 10]


def test_a_generation_that_trained_for_long_refills_the_budget_but_not_that_of_the_day() -> None:
    decider, known = job(1, 4), job(1)
    found = [counted(decider, 22), *(counted(decider, 22, trained=at) for at in (600.0, 600.0, 600.0, 9e3))]
    assert [short(one) for one in found] == ["in-job"] * 4 + ["stop 1"]
    hit(known, 3)
    assert short(hit(known, fault(step=4, trained=9999.0))) == "stop 1", "its steps are known"


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ([OwnCheckpoint(20), OwnCheckpoint(40), OwnCheckpoint(60)], OwnCheckpoint(60)),
        ([StepsDone(4, began=1), StepsDone(24, began=21), StepsDone(44, began=41)], StepsDone(90, began=41)),
        ([StepsDone(3, began=1)], StepsDone(4, began=1)),
        ([OwnCheckpoint(19), StepsDone(23, began=21)], OwnCheckpoint(20)),
    ],
)
def test_a_checkpoint_or_a_start_from_a_later_step_than_ever_refills_the_budget(
    events: list[Event], last: Event
) -> None:
    decider = job(fast=1)
    hit(decider, -1)
    for place, event in enumerate(events):
        decider.handle(event, 0.0)
        decider = heir(decider, fast=1) if place == 1 else decider
        assert short(hit(decider, 100 + place)) == "in-job", event
    decider.handle(last, 0.0)
    assert short(hit(decider, 99)) == "stop 1"


@pytest.mark.parametrize("before", [-1, 0, 20])
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
    first = job(fast=1)
    if before >= 0:
        first.handle(OwnCheckpoint(before), 0.0)
    counted(first, -1)
    second = heir(first, fast=1)
    assert (before in numbers(second.shortage(1.0))) == (before >= 0)
    if event is not None:
        second.handle(event, 1.0)
    assert bool(second.shortage(2.0)) == (trained > 0 or not refills(before))
    found = hit(second, fault(step=3, counted=event is None, trained=trained))
    assert (short(found) == "in-job") == refills(before)


@pytest.mark.parametrize(
    ("known", "step", "end"),
    [
        (StepsDone(5), 0, "in-job"),  # steps of a process cannot be compared
        (StepsDone(5, counted=True), -1, "in-job"),
        (StepsDone(5), -1, "stop 1"),
        (CommitSeen(5, name(5)), -1, "stop 93"),
        (OwnCheckpoint(5), -1, "stop 93"),
    ],
)
def test_a_start_up_that_fails_again_is_known_for_a_script_that_told_steps_before(
    known: Event, step: int, end: str
) -> None:
    """Its process ends before it can say again that it has a session, or what its step is."""
    decider = job()
    decider.handle(known, 0.0)
    assert short(counted(decider, step)) == "in-job"
    found = counted(heir(decider, fast=2 if end == "in-job" else 1), step)
    assert short(found) == end
    assert (10 in numbers(found.reason)) == (end == "in-job"), "minutes, where steps are not known"


# Being stopped


@pytest.mark.parametrize(
    ("signum", "named"),
    [
        (1, "SIGHUP"),
        (2, "SIGINT"),
        (3, "SIGQUIT"),
        (10, "SIGUSR1"),
        (12, "SIGUSR2"),
        (15, "SIGTERM"),
        (40, "40"),
    ],
)
@pytest.mark.parametrize(
    ("saved", "own", "goes_on"),
    [((10, 20), (), 20), ((0,), (), 0), ((), (40, 20), 40), ((), (0,), 0), ((10,), (40,), 10), ((), (), -1)],
)
def test_a_signal_ends_the_job_and_the_reason_names_the_step_it_would_go_on_from(
    signum: int, named: str, saved: tuple[int, ...], own: tuple[int, ...], goes_on: int
) -> None:
    decider = committed(job(), *saved)
    for step in own:
        decider.handle(OwnCheckpoint(step), 0.0)
    assert decider.saved == goes_on
    end = only(decider.handle(StopRequested(signum), 0.0))
    assert (short(end), end.generation) == (f"stop {128 + signum}", 1)
    assert named in end.reason
    assert numbers(end.reason) == [signum, max(goes_on, 0)]


def test_a_checkpoint_at_step_0_is_told_from_none() -> None:
    ours, own, none = committed(job(), 0), job(), job()
    own.handle(OwnCheckpoint(0), 0.0)
    reasons = {only(one.handle(StopRequested(15), 0.0)).reason for one in (ours, own, none)}
    assert len(reasons) == 3


@pytest.mark.parametrize("before", [(), (30,)])
def test_the_end_names_the_step_that_was_saved_last(before: tuple[int, ...]) -> None:
    reason = only(committed(job(), *before).handle(StopRequested(15), 0.0)).reason
    assert numbers(with_saved(reason, 41)) == [15, 41]
    assert numbers(with_saved("RuntimeError: boom", 41)) == [41]


@pytest.mark.parametrize(
    ("kind", "code", "named"), [("error", 75, [0]), ("refused", 75, []), ("refused", 65, [])]
)
def test_a_rank_that_gives_the_job_back_or_refuses_ends_it_with_its_code(
    kind: str, code: int, named: list[int]
) -> None:
    end = hit(committed(job(), 0), fault(kind, exit_code=code))
    assert (short(end), end.generation, numbers(end.reason)) == (f"stop {code}", 1, named)


@pytest.mark.parametrize(("agreed", "named"), [(None, []), (-1, []), (0, [0]), (1, [1])])
def test_the_reason_names_the_step_at_which_replicas_last_agreed(
    agreed: int | None, named: list[int]
) -> None:
    reason, plain = (hit(job(), fault("corrupt", agreed=one)).reason for one in (agreed, None))
    assert numbers(reason) == [1, 1000, 1, 1000, *named]
    assert (reason == plain) == (agreed is None)


# What is kept


def test_the_next_launcher_goes_on_with_a_generation_of_its_own() -> None:
    first = suspicious()
    second = heir(first)
    assert (second.state_now, second.generation) == (STARTING, first.generation + 1)
    assert second.avoid == first.avoid
    assert second.state()["escalation"] == first.state()["escalation"]
    assert second.trust_changes() == ()
    assert short(hit(loads(second, 10))) == "stop 93", "it has been tried from an older state already"


@pytest.mark.parametrize("changes", [{}, {"own": 0}, {"complete": 0}])
def test_the_state_of_a_launcher_that_ended_at_once_is_taken_over(changes: dict[str, object]) -> None:
    state = {**job().state(), **changes}
    found = heir(job(), **changes).state()
    assert found == {**state, "generation": 2, "copies": found["copies"]}


def test_a_finished_run_is_known_as_such_until_training_goes_on() -> None:
    unsaved = committed(job(), 20)
    unsaved.handle(StepsDone(30), 0.0)
    assert finished(unsaved).state()["complete"] == 30, "the last step was not saved"
    first = finished(committed(job(), 10, 20))
    second, seen = heir(first), []
    for step in (20, 21):
        second.handle(StepsDone(step), 0.0)
        seen.append(second.state()["complete"])
    assert [first.state()["complete"], *seen] == [20, 20, -1]
    old = {key: value for key, value in first.state().items() if key != "complete"}
    second.restore(old)
    assert second.state()["complete"] == -1, "an earlier version has left the state"


def test_a_fault_that_comes_back_after_the_end_of_a_run_makes_no_suspects() -> None:
    first = finished(committed(job(), 0))
    for second, suspects in ((heir(first), []), (heir(first, complete=-1), ["suspect"])):
        assert [short(hit(loads(second, 0), 0)) for _ in range(2)] == ["in-job", "stop 93"]
        assert [one.trust for one in second.trust_changes()] == suspects


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"generation": 0}, ValueError),
        ({"own": -2}, ValueError),
        ({"complete": -2}, ValueError),
        ({"knows_steps": 1}, TypeError),
        ({"copies": {**suspicious().state()["copies"], "version": 3}}, ValueError),  # a newer version's
    ],
)
def test_a_state_that_cannot_be_is_refused(changes: dict[str, object], error: type[Exception]) -> None:
    decider = job()
    with pytest.raises(error):
        decider.restore({**suspicious().state(), **changes})
    assert decider.state() == job().state()


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
            hit(decider)

    check()
    assert min(refused["TypeError"], refused["ValueError"], refused["nothing"]) > 0, refused
