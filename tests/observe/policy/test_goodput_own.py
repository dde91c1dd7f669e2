"""The ledger of scripts without a session: steps that a process counted, or that the script announced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.observe.policy.goodput import Category, Incident, Ledger, fold
from outlast.recovery.policy.events import FaultSeen, FirstStep, Progress, Record, RunEnded, ScriptSaved
from tests.observe.policy.builders import Line


def first_step(line: Line, after: float, step: int, source: str) -> FirstStep:
    return replace(line.step(after, step), source=source)


def progress(line: Line, after: float, step: int, source: str) -> Progress:
    return Progress(*line.at(after), step, source)


def saved(line: Line, after: float, step: int) -> ScriptSaved:
    return ScriptSaved(*line.at(after), step)


def fault(line: Line, after: float, step: int, source: str = "") -> FaultSeen:
    return replace(line.fault(after, after, step), source=source)


def job(*records: Record) -> Ledger:
    return fold([Line().start(), Line().workers(0.0), *records, RunEnded(*Line(2).at(30.0), 40, 0, "done")])


def lost(ledger: Ledger) -> tuple[Incident, float]:
    (incident,) = ledger.incidents
    return incident, ledger.seconds[Category.LOST_WORK]


def test_steps_that_a_process_counted_tell_nothing_of_what_was_lost() -> None:
    one, two = Line(1), Line(2)
    ledger = job(
        first_step(one, 1.0, 1, "counted"),
        progress(one, 9.0, 20, "counted"),
        fault(one, 10.0, 22, "counted"),
        one.action(10.0),
        first_step(two, 12.0, 1, "counted"),
        progress(two, 29.0, 40, "counted"),
    )
    incident, seconds = lost(ledger)
    assert (ledger.steps_unknown, ledger.lost_unknown, ledger.goodput) == (True, True, None)
    assert (incident.step, incident.steps_lost, incident.running_again_after) == (22, None, 2.0)
    assert seconds == 0.0
    assert not ledger.unrestored


def test_a_session_that_restored_nothing_is_told_from_a_script_without_one() -> None:
    begun = replace(first_step(Line(), 1.0, 1, "counted"), marks={"session": 0.5})
    assert job(begun).unrestored
    assert not job(replace(begun, source="session")).unrestored


def test_what_the_script_announces_tells_how_many_steps_were_lost_and_how_long_they_took() -> None:
    one, two = Line(1), Line(2)
    ledger = job(
        first_step(one, 1.0, 1, "counted"),
        progress(one, 1.5, 1, "announced"),
        saved(one, 8.0, 20),
        fault(one, 10.0, 22),
        one.action(10.0),
        first_step(two, 12.0, 1, "counted"),
        progress(two, 12.5, 21, "announced"),
        saved(two, 20.0, 40),
    )
    incident, seconds = lost(ledger)
    assert (ledger.steps_unknown, incident.step, incident.steps_lost) == (False, 22, 2)
    assert seconds == 2.0
    assert [one.step for one in ledger.own] == [20, 40]


def test_without_announced_checkpoints_the_first_step_tells_where_it_went_on() -> None:
    one, two = Line(1), Line(2)
    ledger = job(
        first_step(one, 1.0, 1, "announced"),
        progress(one, 1.0, 1, "announced"),
        progress(one, 6.0, 20, "announced"),
        fault(one, 10.0, 22),
        one.action(10.0),
        first_step(two, 12.0, 21, "announced"),
        progress(two, 12.0, 21, "announced"),
    )
    incident, seconds = lost(ledger)
    assert (incident.steps_lost, seconds) == (2, 4.0)


def test_a_process_that_ended_before_it_announced_a_step_lost_none() -> None:
    one, two, three = Line(1), Line(2), Line(3)
    ledger = job(
        first_step(one, 1.0, 1, "announced"),
        progress(one, 1.0, 1, "announced"),
        saved(one, 8.0, 20),
        fault(one, 10.0, 22),
        one.action(10.0),
        first_step(two, 12.0, 1, "counted"),
        fault(two, 13.0, 5, "counted"),
        two.action(13.0),
        progress(three, 15.0, 21, "announced"),
    )
    assert [(one.step, one.steps_lost) for one in ledger.incidents] == [(22, 2), (-1, 0)]


def test_a_run_that_counts_its_steps_and_was_started_again_may_have_lost_some() -> None:
    one, two = Line(1), Line(2)
    log = [one.start(), one.workers(0.0), first_step(one, 1.0, 1, "counted"), one.ended(5.0, 143)]
    ledger = fold([*log, two.start(10.0), two.workers(11.0), first_step(two, 12.0, 1, "counted")])
    assert (ledger.incidents, ledger.lost_unknown, ledger.goodput) == ((), True, None)


@pytest.mark.parametrize(
    ("records", "last_step"),
    [
        ([first_step(Line(), 20.0, 1, "counted")], 20.0),
        ([first_step(Line(), 1.0, 1, "counted"), progress(Line(), 20.0, 2, "counted")], 20.0),
        (
            [first_step(Line(), 1.0, 1, "counted")]
            + [progress(Line(), at, 7, "counted") for at in (20.0, 25.0)],
            20.0,
        ),
        # All steps were done before the first one was reported, at its mark; the last record has the time.
        *(
            (
                [
                    replace(first_step(Line(), 21.0, 7, source), marks={"first_step": Line().at(2.0)[1]}),
                    progress(Line(), 22.0, 7, source),
                    progress(Line(), 20.0, 7, source),
                ],
                20.0,
            )
            for source in ("counted", "announced", "session")
        ),
        # The second generation counts from 0 again, after the first one had counted more.
        (
            [
                *[first_step(Line(), 1.0, 1, "counted"), progress(Line(), 8.0, 50, "counted")],
                *[fault(Line(), 9.0, 50), Line().action(9.0), first_step(Line(2), 10.0, 1, "counted")],
                progress(Line(2), 20.0, 2, "counted"),
            ],
            20.0,
        ),
    ],
)
def test_a_job_that_counts_its_steps_stops_after_the_last_one(
    records: list[Record], last_step: float
) -> None:
    assert job(*records).spans[-1] == (Category.STOPPING, last_step, 30.0)


BEFORE: list[Record] = [
    *[first_step(Line(), 0.5, 1, "announced"), progress(Line(), 0.5, 1, "announced"), saved(Line(), 8.0, 20)],
    *[fault(Line(), 10.0, 22), Line().action(10.0)],
]


@pytest.mark.parametrize(
    ("records", "steps", "seconds"),
    [
        # The script begins anew.
        ([first_step(Line(2), 12.0, 1, "announced"), progress(Line(2), 12.0, 1, "announced")], 22, 9.5),
        # It announces its step before the slowest rank has made one.
        ([progress(Line(2), 11.5, 21, "announced"), first_step(Line(2), 12.0, 1, "counted")], 2, 2.0),
        # It saves again before it announces a step.
        (
            [
                first_step(Line(2), 12.0, 1, "counted"),
                saved(Line(2), 13.0, 21),
                progress(Line(2), 14.0, 22, "announced"),
            ],
            1,
            0.0,
        ),
        # The generation that has ended announces a step late; the next one goes on from an older checkpoint.
        (
            [
                progress(Line(), 10.5, 23, "announced"),
                *[first_step(Line(2), 12.0, 1, "counted"), progress(Line(2), 12.5, 11, "announced")],
            ],
            12,
            9.5,
        ),
    ],
)
def test_the_first_step_that_is_announced_after_a_restart_tells_what_was_lost(
    records: list[Record], steps: int, seconds: float
) -> None:
    incident, lost_work = lost(job(*BEFORE, *records))
    assert (incident.steps_lost, lost_work) == (steps, seconds)


def test_a_launch_whose_generation_has_a_number_of_before_tells_what_it_lost() -> None:
    one = Line()
    log = [one.start(), one.workers(0.0), *BEFORE[:3], progress(one, 10.0, 24, "announced"), one.start(15.0)]
    log += [one.workers(15.0), progress(one, 16.0, 21, "announced"), first_step(one, 17.0, 21, "announced")]
    ledger = fold([*log, one.ended(20.0)])
    assert ([one.steps_lost for one in ledger.incidents], ledger.seconds[Category.LOST_WORK]) == ([4], 2.0)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("interval", [1, 10, 100])
@pytest.mark.parametrize("after", [0, 1, 7, 87])
def test_a_framework_tells_the_step_that_it_resumed_from(interval: int, after: int, announced: bool) -> None:
    one, two, newest = Line(1), Line(2), 5 * interval
    saves = [saved(one, float(number), number * interval) for number in range(1, 5 + announced)]
    ledger = job(
        *[Progress(*one.at(0.5), 0, "announced", resumed=0), first_step(one, 1.0, 1, "announced"), *saves],
        fault(one, 10.0, newest + after),
        one.action(10.0),
        first_step(two, 12.0, newest, "announced"),
        Progress(*two.at(12.0), newest, "announced", resumed=newest),
    )
    incident, seconds = lost(ledger)
    assert incident.steps_lost == after
    assert seconds == 5.0 if announced else seconds <= 10.0
