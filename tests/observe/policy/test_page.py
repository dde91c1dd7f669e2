"""The content of a run's page, from logs of any length."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.observe.policy import goodput, page
from outlast.observe.policy.page import History, View
from outlast.observe.recorder import read
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Note,
    Progress,
    Pruned,
    Quarantined,
    Record,
    RunStarted,
    Saved,
    StepTimes,
    Telemetry,
    TrustChanged,
)

DATA = Path(__file__).parent.parent / "data"
EVENTFUL = read(DATA / "eventful.jsonl").records
START = RunStarted(10.0, 10.0, 1, "id", "n0", 7, "boot", ("train.py",), 4, "a new run")


def after(*records: Record, node: str = "", most: int = page.MOST_RECORDS) -> View:
    history = History(most)
    for record in records:
        history.take(record, node)
    return history.view()


def incidents(count: int) -> list[Record]:
    found: list[Record] = [START]
    for number in range(1, count + 1):
        at = 10.0 * number + 10.0
        found += [
            GenerationStarted(at, at, number, 4, (70,), "zygote", "1 worker"),
            FirstStep(at + 1, at + 1, number, number, {}, "session"),
            FaultSeen(at + 8, at + 8, number, "crash", "n0", 2, number, at + 7, "rank 2 died", "signal 9"),
            ActionTaken(at + 8, at + 8, number, "restart-in-job", number + 1, "newest", "attempt 1 of 3"),
        ]
    return found


def test_a_run_is_shown_as_its_report_tells_it() -> None:
    shown, ledger = after(*EVENTFUL), goodput.fold(EVENTFUL)
    assert (shown.wall, shown.goodput, shown.run_id) == (ledger.wall, ledger.goodput, ledger.run_id)
    assert [one.incident for one in shown.incidents] == list(ledger.incidents)
    assert [one.number for one in shown.generations] == [1, 2, 3, 4]
    assert [one.ended for one in shown.generations] == [28.0, 45.375, 93.25, 115.25]
    assert shown.launches == (0.0, 91.25)


def test_logs_of_several_nodes_are_shown_as_one_job() -> None:
    history = History()
    for path in sorted(DATA.glob("three-nodes/nodes/*/events.jsonl")):
        for record in read(path).records:
            history.take(record, path.parent.name)
    shown = history.view()
    assert shown.incidents
    assert math.isclose(sum(one.seconds for one in shown.parts), shown.wall)


def test_the_parts_add_up_to_the_wall_time_exactly_whatever_is_in_the_log(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        some = draw.sample(EVENTFUL, draw.randrange(1, len(EVENTFUL)))
        shown = after(*(replace(one, clock=one.clock + draw.uniform(-50, 50)) for one in some))
        assert sum(one.seconds for one in shown.parts) == shown.wall
        assert not shown.parts or math.isclose(sum(one.share for one in shown.parts), 1.0)


def test_of_ten_thousand_incidents_the_newest_are_shown_and_the_others_counted() -> None:
    shown = after(*incidents(10_000))
    assert shown.incidents[-1].number == 10_000
    assert (len(shown.incidents), shown.incidents_left_out) == (page.MOST_INCIDENTS, 9_900)
    assert (len(shown.generations), shown.generations_left_out) == (page.MOST_GENERATIONS, 9_800)
    assert shown.dropped == 0


def test_many_incidents_of_a_job_of_several_nodes() -> None:
    shown = after(*incidents(1_000), node="n0")
    assert shown.incidents_left_out == 900


def test_a_log_that_is_too_long_loses_its_oldest_records_and_says_so() -> None:
    shown = after(*incidents(100), most=40)
    assert shown.dropped == 361
    assert shown.incidents[-1].incident.generation == 100
    assert len(shown.incidents) == 10


def test_of_notes_in_a_row_one_is_kept() -> None:
    notes = [Note(20.0 + at, 20.0 + at, 1, "words") for at in range(1000)]
    shown = after(START, *notes, most=2)
    assert (shown.dropped, shown.wall) == (0, 1009.0)


def test_checkpoints_have_the_tiers_and_the_trust_that_the_log_tells() -> None:
    shown = after(
        START,
        *(Saved(20.0 + at, 20.0 + at, 1, at, f"step-{at}.g1", 10, 0.5, "every step") for at in range(1, 6)),
        Loaded(30.0, 30.0, 2, 3, "step-3.g1", 10, 0.1, "the newest", ("memory/step-3.g1", "local/step-3.g1")),
        Quarantined(31.0, 31.0, 2, 4, "step-4.g1", "a digest differs"),
        TrustChanged(32.0, 32.0, 2, 3, "local/step-3.g1", "proven", "50 steps without a fault"),
        Pruned(33.0, 33.0, 2, "step-1.g1", "3 newer ones are kept"),
    )
    told = {one.step: (one.trust, one.tiers) for one in shown.checkpoints}
    assert told == {
        1: ("pruned", ()),
        2: ("committed", ("disk",)),
        3: ("proven", ("disk", "memory", "local")),
        4: ("quarantined", ("disk",)),
        5: ("committed", ("disk",)),
    }


def test_many_checkpoints_leave_as_many_marks_as_can_be_told_apart() -> None:
    saves = [Saved(20.0 + at, 20.0 + at, 1, at, f"step-{at}.g1", 10, 0.0, "") for at in range(5000)]
    shown = after(START, *saves)
    assert len(shown.saves) <= page.MOST_SAVES + 1
    assert (len(shown.checkpoints), shown.checkpoints_left_out) == (page.MOST_CHECKPOINTS, 4950)


def test_heat_maps_have_the_ranks_and_devices_that_stand_out_most() -> None:
    ratios = {str(rank): 1.0 + rank / 4096 for rank in range(4096)}
    times = [StepTimes(20.0 + at, 20.0 + at, 1, at, 0.1, {**ratios, "../x": 9.0}) for at in range(0, 300)]
    read_at = [
        Telemetry(
            20.0 + at, 0.0, 1, f"n{gpu // 8:03}", "device", gpu % 8, "", {"temperature": 50.0 + gpu}, ""
        )
        for at in range(10)
        for gpu in range(40)
    ]
    xid = Telemetry(31.0, 0.0, 1, "n0", "xid", 3, "", {"xid": 79.0}, "GPU has fallen off the bus")
    shown = after(START, *times, *read_at, xid)
    assert shown.steps.rows[-1] == "rank 4095"
    assert (len(shown.steps.rows), shown.steps.left_out) == (32, 4064)
    assert (shown.steps.first, shown.steps.last) == (0, 299)
    assert shown.temperatures.worst[-1] == 89.0
    assert shown.temperatures.rows[-1] == "n004 GPU 7"
    assert shown.temperatures.left_out == 8
    assert shown.signs == (xid,)
    assert {len(row) for heat in (shown.steps, shown.temperatures) for row in heat.cells} == {75, 96}


@pytest.mark.parametrize("records", [(), (START,), (Progress(1.0, 1.0, 1, 5),), EVENTFUL[-1:]])
def test_a_log_that_has_just_begun_is_shown(records: tuple[Record, ...]) -> None:
    shown = after(*records)
    assert (shown.wall, shown.parts, shown.incidents) == (0.0, (), ())
