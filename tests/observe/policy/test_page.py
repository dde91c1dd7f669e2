"""The content of a run's page, from logs of any length."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from outlast.observe.policy import goodput, page
from outlast.observe.policy.goodput import Category, Incident
from outlast.observe.policy.heat import Heat
from outlast.observe.policy.page import CheckpointSeen, GenerationSeen, History, Numbered, Part, View
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
    SaveLost,
    StepTimes,
    Telemetry,
    TimeoutsLearned,
    TrustChanged,
)
from tests.observe.policy.builders import DATA, START
from tests.observe.policy.builders import viewed as after

EVENTFUL = read(DATA / "eventful.jsonl").records


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


def test_a_log_that_is_too_long_loses_its_oldest_records_and_says_so() -> None:
    shown = after(*incidents(100), most=40)
    assert shown.dropped == 361
    assert shown.incidents[-1].incident.generation == 100
    assert len(shown.incidents) == 10


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


BEGAN = RunStarted(100.0, 0.0, 1, "id", "n0", 7, "boot", ("train.py",), 4, "a new run")
LOST = SaveLost(112.0, 12.0, 1, 6, 0.25, "the disk is full")
LOG: list[Record] = [
    BEGAN,
    GenerationStarted(101.0, 1.0, 1, 4, (70,), "zygote", "4 workers"),
    FirstStep(104.0, 4.0, 1, 1, {}, "session"),
    Saved(110.0, 10.0, 1, 5, "step-5.g1", 10, 0.5, "every 5 steps"),
    LOST,
    TimeoutsLearned(113.0, 13.0, 1, {"step": 9.0}, "60 steps"),
    FaultSeen(120.0, 20.0, 1, "crash", "n0", 2, 9, 19.0, "rank 2 died", "signal 9"),
    ActionTaken(120.0, 20.0, 1, "restart-in-job", 2, "newest", "attempt 1 of 3"),
    GenerationStarted(121.0, 21.0, 2, 3, (71,), "cold: it died", "3 workers"),
    Loaded(123.0, 23.0, 2, 5, "step-5.g1", 10, 0.5, "the newest", ("memory/step-5.g1",)),
    FirstStep(124.0, 24.0, 2, 6, {}, "session"),
    Progress(130.0, 30.0, 2, 12),
]
SECONDS = {
    Category.TRAINING: 11.5,
    Category.LOST_WORK: 8.75,
    Category.STARTING: 4.0,
    Category.RECOVERING: 3.5,
    Category.STOPPING: 0.0,
    Category.DETECTING: 1.0,
    Category.SAVING: 0.75,
    Category.LOADING: 0.5,
    Category.DOWN: 0.0,
}
CRASH = Incident(
    kind="crash",
    at=19.0,
    node="n0",
    rank=2,
    generation=1,
    step=9,
    reason="rank 2 died",
    action="restart-in-job",
    action_reason="attempt 1 of 3",
    detected_after=1.0,
    running_again_after=5.0,
    steps_lost=4,
)


def saved(time: float, step: int) -> Saved:
    return Saved(time, time - 100.0, 1, step, f"step-{step}.g1", 10, 0.0, "")


def note(time: float) -> Note:
    return Note(time, time - 100.0, 1, "words")


def step(time: float) -> Progress:
    return Progress(time, time - 100.0, 1, 5)


def test_all_that_a_small_log_tells_is_shown() -> None:
    assert after(*LOG) == View(
        run_id="id",
        began=100.0,
        wall=30.0,
        goodput=11.5 / 30.0,
        parts=tuple(Part(one, seconds, seconds / 30.0, unknown=False) for one, seconds in SECONDS.items()),
        steps_unknown=False,
        generations=(
            GenerationSeen(1, 1.0, 21.0, 4, "zygote", "4 workers"),
            GenerationSeen(2, 21.0, 30.0, 3, "cold: it died", "3 workers"),
        ),
        generations_left_out=0,
        incidents=(Numbered(1, CRASH),),
        incidents_left_out=0,
        checkpoints=(CheckpointSeen("step-5.g1", 5, 123.0, ("disk", "memory"), "loaded", "the newest"),),
        checkpoints_left_out=0,
        lost_saves=(LOST,),
        saves=(10.0,),
        loads=(23.0,),
        launches=(0.0,),
        steps=Heat(),
        temperatures=Heat(),
        signs=(),
        limits={"step": 9.0},
        dropped=0,
    )


def test_kept_and_lost_work_are_marked_where_nobody_knows_what_the_script_loaded() -> None:
    records: list[Record] = [
        BEGAN,
        FirstStep(104.0, 4.0, 1, 1, {}, "counted"),
        FaultSeen(120.0, 20.0, 1, "crash", "n0", 2, 9, 19.0, "rank 2 died", "signal 9", source="counted"),
        ActionTaken(120.0, 20.0, 1, "restart-in-job", 2, "newest", "attempt 1 of 3"),
        FirstStep(124.0, 24.0, 2, 1, {}, "counted"),
    ]
    shown = after(*records)
    assert (shown.steps_unknown, shown.goodput) == (True, None)
    assert {one.category for one in shown.parts if one.unknown} == {Category.TRAINING, Category.LOST_WORK}


def test_a_load_keeps_what_was_said_of_the_checkpoint_unless_it_was_only_committed() -> None:
    shown = after(
        BEGAN,
        Loaded(101.0, 1.0, 1, 1, "step-1.g1", 10, 0.5, "the newest"),
        saved(102.0, 2),
        Loaded(103.0, 3.0, 1, 2, "step-2.g1", 10, 0.5, "the newest"),
        TrustChanged(104.0, 4.0, 1, 3, "step-3.g1", "proven", "50 steps"),
        TrustChanged(105.0, 5.0, 1, 3, "global/step-3.g1", "suspect", "a fault"),
        Loaded(106.0, 6.0, 1, 3, "step-3.g1", 10, 0.5, "the newest"),
        Pruned(107.0, 7.0, 1, "step-4.g1", "3 newer ones are kept"),
    )
    assert shown.checkpoints == (
        CheckpointSeen("step-1.g1", 1, 101.0, (), "loaded", "the newest"),
        CheckpointSeen("step-2.g1", 2, 103.0, ("disk",), "loaded", "the newest"),
        CheckpointSeen("step-3.g1", 3, 106.0, ("global",), "suspect", "the newest"),
        CheckpointSeen("step-4.g1", -1, 107.0, (), "pruned", "3 newer ones are kept"),
    )
