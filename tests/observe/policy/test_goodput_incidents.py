"""The ledger on logs written by hand: incidents, phases, and what a log may lack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.observe.policy.goodput import AGENT_DEATH, Category, Incident, Ledger, fold
from outlast.recovery.policy.events import (
    Progress,
    Record,
    TimeoutsLearned,
)
from tests.observe.policy.builders import EPOCH, Line, seconds

ONE, TWO, THREE, FOUR = Line(1), Line(2), Line(3), Line(4)
BEGUN: list[Record] = [ONE.start(), ONE.workers(1.0), ONE.step(2.0)]


def test_a_script_that_reports_no_steps_is_starting_all_the_time() -> None:
    log = [*BEGUN[:2], ONE.action(50.0, "stop"), ONE.ended(51.0)]
    assert seconds(fold(log)) == {"starting": 50.0, "stopping": 1.0}


def test_phases_add_up_to_the_time_from_the_detection_to_the_first_step() -> None:
    marks = {"spawned": 12.5, "started": 12.75, "session": 13.0, "loaded": 14.0, "first_step": 14.5}
    log = [*BEGUN, ONE.fault(12.0, since=11.0), ONE.action(12.0), TWO.workers(12.5), TWO.step(15.0, **marks)]
    (incident,) = fold(log).incidents
    assert incident.phases == {"stop": 0.5, "spawn": 0.25, "import": 0.25, "load": 1.0, "first_step": 0.5}
    assert incident.detected_after == 1.0
    assert incident.running_again_after == 1.0 + sum(incident.phases.values())


def test_a_checkpoint_that_is_older_loses_the_work_of_several_generations() -> None:
    log = [
        *BEGUN,
        ONE.saved(12.0, 10),
        ONE.saved(22.0, 20),
        ONE.fault(32.0, since=31.0, step=30),
        ONE.action(32.0),
        TWO.workers(32.0),
        TWO.loaded(33.0, 20),
        TWO.step(34.0, 21),
        TWO.fault(40.0, since=39.0, step=-1),
        TWO.action(40.0),
        THREE.workers(40.0),
        THREE.loaded(41.0, 10),
        THREE.step(42.0, 11),
        replace(THREE.saved(52.0, 20), checkpoint="c20 again"),
    ]
    ledger = fold(log)
    lost = (22.0 - 12.0) + (31.0 - 22.0) + (39.0 - 34.0)
    assert ledger.seconds[Category.LOST_WORK] == lost
    assert ledger.seconds[Category.TRAINING] == (12.0 - 2.0) + (52.0 - 42.0)
    assert [one.steps_lost for one in ledger.incidents] == [10, 21 - 10]


def test_a_fresh_start_loses_everything() -> None:
    log = [
        *BEGUN,
        ONE.fault(32.0, since=31.0, step=30),
        ONE.action(32.0),
        TWO.step(34.0),
        TWO.saved(44.0, 10),
    ]
    ledger = fold(log)
    assert seconds(ledger) == {
        "training": 10.0, "lost_work": 29.0, "starting": 2.0, "recovering": 2.0, "detecting": 1.0
    }  # fmt: skip
    assert ledger.incidents[0].steps_lost == 30


def test_a_checkpoint_of_which_nothing_is_known_loses_all_work() -> None:
    log = [ONE.start(), ONE.workers(0.0), ONE.step(0.5), ONE.fault(4.0, since=4.0), ONE.action(4.0)]
    assert fold([*log, TWO.loaded(6.0, 0), TWO.step(7.0)]).seconds[Category.LOST_WORK] == 3.5


def test_a_fault_without_an_action_is_no_incident() -> None:
    ledger = fold([*BEGUN, ONE.fault(12.0, since=11.0), ONE.saved(20.0, 20)])
    assert ledger.incidents == ()
    assert seconds(ledger) == {"starting": 2.0, "detecting": 1.0, "training": 17.0}


def test_a_fault_that_says_not_when_progress_ended_is_not_given_a_time() -> None:
    log = [*BEGUN, replace(ONE.fault(12.0, since=0.0), since=0.0), ONE.action(12.0), TWO.step(14.0)]
    (incident,) = fold(log).incidents
    assert (incident.detected_after, incident.running_again_after) == (None, 2.0)


def test_a_fault_that_stops_the_job_is_told_and_not_waited_for() -> None:
    log = [*BEGUN, ONE.fault(12.0, since=11.0), ONE.action(12.0, "stop"), ONE.ended(13.0, 1)]
    log += [TWO.start(5000.0), TWO.workers(5001.0), TWO.step(5002.0)]
    ledger = fold(log)
    (incident,) = ledger.incidents
    assert (incident.action, incident.running_again_after, incident.steps_lost) == ("stop", None, 10)
    assert (ledger.seconds[Category.STOPPING], ledger.seconds[Category.DOWN]) == (1.0, 4987.0)


def test_a_stop_that_was_asked_for_is_stopping_from_there_on() -> None:
    log = [*BEGUN, Progress(*ONE.at(10.0), 10), ONE.action(14.0, "stop"), ONE.ended(15.0, 143)]
    assert seconds(fold(log)) == {"starting": 2.0, "training": 12.0, "stopping": 1.0}


def test_between_boots_wall_time_counts_and_is_never_negative() -> None:
    log = [*BEGUN, Progress(*ONE.at(10.0), 10), replace(TWO.start(40.0, "other"), clock=3.0)]
    assert fold(log).seconds[Category.DOWN] == 30.0
    log[-1] = replace(TWO.start(5.0, "other"), clock=3.0)
    assert fold(log).seconds[Category.DOWN] == 0.0


def test_without_a_launcher_training_begins_with_the_session_or_its_load() -> None:
    solo = Line(0)
    ledger = fold([solo.start(), solo.saved(10.0, 10, spent=1.0), solo.saved(20.0, 20)])
    assert seconds(ledger) == {"training": 19.0, "saving": 1.0}
    again = [solo.start(30.0), solo.loaded(32.0, 10, spent=1.0), solo.saved(42.0, 30)]
    ledger = fold([solo.start(), solo.saved(10.0, 10), solo.saved(20.0, 20), *again])
    assert seconds(ledger) == {
        "training": 20.0,
        "lost_work": 10.0,
        "down": 10.0,
        "starting": 1.0,
        "loading": 1.0,
    }
    assert ledger.incidents == ()


def test_timeouts_in_force_are_the_latest_of_each_section() -> None:
    log = [*BEGUN, TimeoutsLearned(*ONE.at(3.0), {"step": 2.0, "save": 9.0}, "")]
    log.append(TimeoutsLearned(*ONE.at(4.0), {"step": 3.0}, ""))
    assert fold(log).timeouts == {"step": 3.0, "save": 9.0}


# The third generation died before its first step; the fourth loaded nothing, so all steps were lost.
SAVED, ENDED = ONE.saved(12.0, 10, spent=1.0), FOUR.ended(55.0)
TWO_LAUNCHES: list[Record] = [
    *[ONE.start(), ONE.workers(0.25), ONE.step(0.5, 1), Progress(*ONE.at(10.0), 10), SAVED],
    *[ONE.fault(20.0, since=19.0, step=18), ONE.action(20.0), TWO.workers(20.5)],
    replace(TWO.loaded(21.5, 10, spent=0.5), checkpoint="a copy"),
    TWO.step(22.0, 11, spawned=20.5, first_step=22.0),
    *[TWO.fault(30.0, since=30.0, step=-1, kind="lost"), TWO.action(30.0), THREE.workers(31.0)],
    *[FOUR.start(40.0), FOUR.workers(41.0), FOUR.step(43.0), Progress(*FOUR.at(50.0), 8), ENDED],
]


def test_the_whole_ledger_of_a_job_that_lost_a_rank_and_then_its_launcher() -> None:
    ledger = fold(TWO_LAUNCHES)
    phases = {"stop": 0.5, "first_step": 1.5}
    died = ledger.incidents[-1].reason
    assert "pid 1" in died
    assert ledger == Ledger(
        run_id="job",
        began=EPOCH,
        launches=2,
        generations=4,
        wall=55.0,
        seconds={
            Category.TRAINING: 7.0,
            Category.LOST_WORK: 25.5,
            Category.STARTING: 3.5,
            Category.RECOVERING: 2.5,
            Category.STOPPING: 5.0,
            Category.DETECTING: 1.0,
            Category.SAVING: 1.0,
            Category.LOADING: 0.5,
            Category.DOWN: 9.0,
        },
        incidents=(
            Incident(
                "crash", 19.0, "n01", 1, 1, 18, "died", "restart-in-job", "because", 1.0, 3.0, 8, phases
            ),
            Incident("lost", 30.0, "n01", 1, 2, 11, "died", "restart-in-job", "because", 0.0, 13.0, 11),
            Incident(AGENT_DEATH, 31.0, "n01", -1, 3, -1, died, "run again", "a new run", None, 12.0, 0),
        ),
        saves=(SAVED,),
        lost_saves=(),
        quarantined=(),
        trust=(),
        timeouts={},
        end=ENDED,
        own=(),
        steps_unknown=False,
        unrestored=False,
        spans=ledger.spans,
    )


def test_the_spans_of_a_ledger_have_no_gaps_and_neighbours_differ() -> None:
    assert fold(TWO_LAUNCHES).spans == (
        (Category.STARTING, 0.0, 0.5),
        (Category.LOST_WORK, 0.5, 11.0),
        (Category.SAVING, 11.0, 12.0),
        (Category.LOST_WORK, 12.0, 19.0),
        (Category.DETECTING, 19.0, 20.0),
        (Category.RECOVERING, 20.0, 21.0),
        (Category.LOADING, 21.0, 21.5),
        (Category.RECOVERING, 21.5, 22.0),
        (Category.LOST_WORK, 22.0, 30.0),
        (Category.RECOVERING, 30.0, 31.0),
        (Category.DOWN, 31.0, 40.0),
        (Category.STARTING, 40.0, 43.0),
        (Category.TRAINING, 43.0, 50.0),
        (Category.STOPPING, 50.0, 55.0),
    )


def test_a_generation_that_fails_before_its_first_step_is_starting_until_it_is_answered() -> None:
    log = [*BEGUN[:2], ONE.fault(10.0, since=9.0), ONE.action(10.0), TWO.fault(15.0, since=15.0)]
    log += [TWO.action(15.0), THREE.workers(16.0), THREE.step(17.0)]
    assert seconds(fold([*log, THREE.saved(20.0, 9)])) == {
        "starting": 9.0, "detecting": 1.0, "recovering": 7.0, "training": 3.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("since", "detected_after"),
    [
        (12.0, 0.0),  # it was seen at once
        (13.0, None),  # no fault is seen before it happens
        (0.0, None),
        (-1.0, None),
        (0.5, 11.5),  # the host was booted when the job began
    ],
)
def test_a_fault_says_how_long_it_was_not_seen_if_it_knows(
    since: float, detected_after: float | None
) -> None:
    log: list[Record] = [replace(one, clock=one.clock - 100.0) for one in BEGUN]
    log += [replace(ONE.fault(12.0, 0.0), clock=12.0, since=since), replace(ONE.action(12.0), clock=12.0)]
    assert [one.detected_after for one in fold(log).incidents] == [detected_after]
