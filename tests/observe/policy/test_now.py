"""What a run does now, from records that are taken one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outlast.observe.policy.goodput import AGENT_DEATH, fold
from outlast.observe.policy.now import RATE_SECONDS, Now, NowFold, State
from outlast.observe.recorder import read
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    SaveLost,
    ScriptSaved,
    StepsPlanned,
    StragglerSeen,
)

DATA = Path(__file__).parent.parent / "data"
START = RunStarted(10.0, 10.0, 1, "id", "n0", 7, "boot", ("train.py",), 4, "a new run")
BEGUN = GenerationStarted(11.0, 11.0, 1, 4, (70, 71), "zygote", "2 workers")
TRAINS = FirstStep(12.0, 12.0, 1, 0, {}, "session")
FAULT = FaultSeen(30.0, 30.0, 1, "crash", "n0", 2, 50, 29.0, "rank 2 died", "signal 9")
RESTART = ActionTaken(30.0, 30.0, 1, "restart-in-job", 2, "newest", "attempt 1 of 3")


def after(*records: Record, node: str = "") -> Now:
    told = NowFold()
    for record in records:
        told.take(record, node)
    return told.now()


def test_a_run_is_told_from_its_start_to_its_end() -> None:
    assert after() == Now()
    assert after(START).state is State.STARTING
    assert after(START, BEGUN).step == -1
    told = after(START, BEGUN, FirstStep(12.0, 12.0, 1, 1, {}, "session"))
    assert (told.state, told.step, told.source, told.ranks, told.rate) == (
        State.TRAINING,
        1,
        "session",
        4,
        None,
    )
    told = after(START, BEGUN, FAULT, RESTART)
    assert (told.state, told.restarts, told.faults) == (State.RECOVERING, 1, {"crash": 1})
    assert told.incident is not None
    assert (told.incident.rank, told.incident.action, told.incident.time) == (2, "restart-in-job", 30.0)
    told = after(START, BEGUN, RunEnded(40.0, 40.0, 1, 60, 0, "every rank finished"))
    assert (told.state, told.step) == (State.ENDED, 60)
    assert after(START, BEGUN, RunEnded(40.0, 40.0, 1, 60, 75, "preempted"), START).end is None


def test_the_rate_is_that_of_the_last_minute() -> None:
    steps = [Progress(20.0 + 5 * one, 20.0 + 5 * one, 1, 100 * one, "session") for one in range(20)]
    faster = [Progress(115.0 + 5 * one, 115.0 + 5 * one, 1, 1900 + 500 * one, "") for one in range(1, 20)]
    assert after(START, BEGUN, TRAINS, *steps).rate == 20.0
    assert after(START, BEGUN, TRAINS, *steps, *faster).rate == 100.0
    slow = [Progress(600.0 * one, 600.0 * one, 1, one, "session") for one in range(1, 6)]
    assert slow[1].clock - slow[0].clock > RATE_SECONDS
    assert after(START, BEGUN, TRAINS, *slow).rate == pytest.approx(1 / 600, rel=0.01)


def test_a_rate_ends_with_the_steps_and_with_the_run() -> None:
    steps = [Progress(12.0 + at, 12.0 + at, 1, 100 * at, "session") for at in range(0, 65, 5)]
    hang = [Progress(72.0 + at, 72.0 + at, 1, 6000, "session") for at in range(5, 125, 5)]
    assert after(START, BEGUN, TRAINS, *steps).rate == 100.0
    assert (after(START, BEGUN, TRAINS, *steps, *hang[:6]).rate or 100.0) < 70.0
    assert after(START, BEGUN, TRAINS, *steps, *hang).rate is None
    assert after(START, BEGUN, TRAINS, *steps, RunEnded(76.0, 76.0, 1, 6000, 0, "done")).rate is None
    assert after(START, BEGUN, TRAINS, *steps, FAULT, RESTART).rate is None


def test_steps_of_another_source_are_not_compared_with_those_before() -> None:
    counted = FirstStep(12.0, 12.0, 1, 1, {}, "counted")
    told = after(START, BEGUN, counted, Progress(22.0, 22.0, 1, 10_000, "announced"))
    assert (told.step, told.rate) == (10_000, None)
    told = after(
        START,
        BEGUN,
        replace(counted, step=800),
        Progress(22.0, 22.0, 1, 100, "announced"),
        Progress(32.0, 32.0, 1, 110, "announced"),
    )
    assert (told.step, told.source, told.rate) == (110, "announced", 1.0)


def test_a_number_of_steps_that_no_loop_has_is_not_taken() -> None:
    steps = (TRAINS, Progress(17.0, 17.0, 1, 50, "session"))
    planned = StepsPlanned(13.0, 13.0, 1, 150)
    assert after(START, BEGUN, planned, *steps).seconds_left == 10.0
    told = after(START, BEGUN, planned, replace(planned, total=10**400), *steps)
    assert (told.total, told.seconds_left) == (150, 10.0)


def test_a_step_that_does_not_advance_keeps_the_time_at_which_it_was_told_first() -> None:
    told = after(START, BEGUN, *(Progress(at, at, 1, 7, "session") for at in (20.0, 25.0, 30.0)))
    assert (told.step, told.stepped, told.heard, told.rate) == (7, 20.0, 30.0, None)


def test_steps_begin_again_with_a_generation_and_with_what_was_loaded() -> None:
    again = replace(BEGUN, generation=2)
    before = (START, BEGUN, Progress(20.0, 20.0, 1, 90, "session"), FAULT, RESTART, again)
    assert after(*before).step == -1
    assert after(*before, Loaded(32.0, 32.0, 2, 60, "step-60", 1, 0.1, "the newest")).step == 60


def test_checkpoints_are_told_by_tier_and_counted_once() -> None:
    one = Saved(20.0, 20.0, 1, 40, "step-000000040.g1", 9, 0.1, "every 20 steps")
    told = after(
        START, BEGUN, one, one, ScriptSaved(21.0, 21.0, 1, 41), SaveLost(22.0, 22.0, 1, 60, 0.1, "full")
    )
    assert [(each.tier, each.step) for each in told.checkpoints] == [("disk", 40), ("script", 41)]
    assert (told.saves, told.saves_lost) == (1, 1)


def test_a_fault_without_an_action_and_an_end_without_a_fault_are_no_incidents() -> None:
    ignored = replace(RESTART, action="none")
    stop = replace(RESTART, action="stop", reason="every rank finished")
    told = after(START, BEGUN, FAULT, ignored, stop)
    assert (told.incident, told.faults, told.restarts, told.state) == (None, {}, 0, State.STARTING)


def test_a_slow_rank_is_told_until_it_is_slow_no_more_or_started_again() -> None:
    slow = StragglerSeen(20.0, 20.0, 1, 9, 3, "n0", "on", "computing", "", 1.4, 1.3, 1.0, 0.9, 4, "slow")
    assert [one.rank for one in after(START, BEGUN, slow).slow] == [3]
    assert after(START, BEGUN, slow, replace(slow, state="off")).slow == ()
    assert after(START, BEGUN, slow, replace(BEGUN, generation=2)).slow == ()
    assert [one.rank for one in after(START, BEGUN, slow, BEGUN).slow] == [3]  # another node's start


def test_the_job_is_as_far_as_the_slowest_node_of_its_newest_generation() -> None:
    told = NowFold()
    for node, step in (("n0", 30), ("n1", 20), ("lost", 10)):
        for record in (START, BEGUN, Progress(20.0, 20.0, 1, step, "session")):
            told.take(record, node)
    assert told.now().step == 10
    for node, step in (("n0", 33), ("n1", 31)):
        for record in (
            FAULT,
            RESTART,
            replace(BEGUN, generation=2),
            FirstStep(32.0, 32.0, 2, step, {}, "session"),
        ):
            told.take(record, node)
    now = told.now()
    assert (now.step, now.generation, now.state, now.restarts) == (31, 2, State.TRAINING, 1)
    assert [(one.name, one.present) for one in now.nodes] == [("lost", False), ("n0", True), ("n1", True)]


@pytest.mark.parametrize(
    ("fault", "rank", "heard", "lost"),
    [
        ("lost", -1, 20.0, True),
        ("lost", -1, 30.0, True),
        ("lost", -1, 30.1, False),
        ("lost", 2, 20.0, False),
        ("crash", -1, 20.0, False),
    ],
)
def test_a_node_is_lost_until_it_writes_again(fault: str, rank: int, heard: float, lost: bool) -> None:
    told = NowFold()
    told.take(BEGUN, "n0")
    told.take(Progress(heard, 20.0, 1, 10, "session"), "n1")
    told.take(replace(FAULT, fault=fault, node="n1", rank=rank), "n0")
    assert {one.name: one.lost for one in told.now().nodes} == {"n0": False, "n1": lost}


@pytest.mark.parametrize("name", ["eventful.jsonl", "three-nodes"])
def test_it_agrees_with_the_report_of_a_whole_log(name: str) -> None:
    told = NowFold()
    logs = (
        {"": DATA / name}
        if name.endswith("jsonl")
        else {path.parent.name: path for path in sorted((DATA / name).glob("nodes/*/events.jsonl"))}
    )
    ledgers = []
    for node, path in logs.items():
        records = read(path).records
        ledgers.append(fold(records))
        for record in records:
            told.take(record, node)
    now = told.now()
    assert now.saves == sum(len({one.checkpoint for one in ledger.saves}) for ledger in ledgers)
    faults = [one for ledger in ledgers for one in ledger.incidents if one.kind != AGENT_DEATH]
    assert sum(now.faults.values()) == len({(one.kind, one.rank) for one in faults})
    assert now.launches == max(ledger.launches for ledger in ledgers)
    assert (now.state, now.step) == (State.ENDED, 500)
