"""The ledger of scripts without a session: steps that a process counted, or that the script announced."""

from __future__ import annotations

from dataclasses import replace

from outlast.observe.policy.goodput import Category, Incident, Ledger, fold
from outlast.recovery.policy.events import FaultSeen, FirstStep, Progress, Record, RunEnded, ScriptSaved
from tests.observe.policy.test_goodput_incidents import Line


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


def test_without_an_incident_all_that_a_process_counted_was_kept() -> None:
    ledger = job(first_step(Line(), 1.0, 1, "counted"), progress(Line(), 29.0, 40, "counted"))
    assert (ledger.steps_unknown, ledger.lost_unknown) == (True, False)
    spent = {name.value: seconds for name, seconds in ledger.seconds.items() if seconds}
    assert spent == {"training": 28.0, "starting": 1.0, "stopping": 1.0}
    assert ledger.goodput == 28.0 / 30.0


def test_what_the_script_announces_tells_how_many_steps_were_lost_and_how_long_they_took() -> None:
    """It announces its first step some time after the process has counted one."""
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


def test_a_script_that_goes_on_from_an_older_checkpoint_of_its_own_lost_more() -> None:
    one, two = Line(1), Line(2)
    ledger = job(
        first_step(one, 1.0, 1, "announced"),
        progress(one, 1.0, 1, "announced"),
        saved(one, 4.0, 10),
        saved(one, 8.0, 20),
        fault(one, 10.0, 22),
        one.action(10.0),
        first_step(two, 12.0, 11, "announced"),
        progress(two, 12.0, 11, "announced"),
    )
    incident, seconds = lost(ledger)
    assert (incident.steps_lost, seconds) == (12, 6.0)


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
    assert [one.steps_lost for one in ledger.incidents] == [2, 0]
