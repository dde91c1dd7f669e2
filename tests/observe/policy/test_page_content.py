"""The whole content of a page of a small log, and what is dropped of one that is too long."""

from __future__ import annotations

from outlast.observe.policy.goodput import Category, Incident
from outlast.observe.policy.heat import Heat
from outlast.observe.policy.page import CheckpointSeen, GenerationSeen, History, Numbered, Part, View
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Note,
    Progress,
    Pruned,
    Record,
    RunStarted,
    Saved,
    SaveLost,
    StepTimes,
    Telemetry,
    TimeoutsLearned,
    TrustChanged,
)

START = RunStarted(100.0, 0.0, 1, "id", "n0", 7, "boot", ("train.py",), 4, "a new run")
LOST = SaveLost(112.0, 12.0, 1, 6, 0.25, "the disk is full")
LOG: list[Record] = [
    START,
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


def after(*records: Record, most: int = 1_000_000) -> View:
    history = History(most)
    for record in records:
        history.take(record)
    return history.view()


def saved(time: float, step: int) -> Saved:
    return Saved(time, time - 100.0, 1, step, f"step-{step}.g1", 10, 0.0, "")


def note(time: float) -> Note:
    return Note(time, time - 100.0, 1, "words")


def progress(time: float) -> Progress:
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


def test_a_log_without_records_has_an_empty_page() -> None:
    nothing = View(
        run_id="",
        began=0.0,
        wall=0.0,
        goodput=None,
        parts=(),
        steps_unknown=False,
        generations_left_out=0,
        incidents_left_out=0,
        checkpoints_left_out=0,
        dropped=0,
    )
    assert View() == nothing
    assert after() == View(goodput=0.0)


def test_kept_and_lost_work_are_marked_where_nobody_knows_what_the_script_loaded() -> None:
    records: list[Record] = [
        START,
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
        START,
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


def test_up_to_four_hundred_saves_have_a_mark_each() -> None:
    shown = after(START, *(saved(101.0, step) for step in range(399)), saved(102.0, 399))
    assert shown.saves == (1.0,) * 399 + (2.0,)


def test_of_more_saves_one_is_marked_in_each_four_hundredth_of_the_time() -> None:
    places = [at + part for at in range(400) for part in (0.25, 0.75)]
    shown = after(START, *(saved(100.0 + at, number) for number, at in enumerate([*places, 400.0])))
    assert shown.wall == 400.0
    assert shown.saves == (*places[1::2], 400.0)


def test_of_more_saves_at_one_time_the_newest_are_marked() -> None:
    assert after(*(saved(100.0, step) for step in range(401))).saves == (0.0,) * 400


def test_a_log_that_is_too_long_keeps_the_last_of_several_notes_in_a_row() -> None:
    notes = [note(101.0 + at) for at in range(10)]
    steps = [progress(120.0 + at) for at in range(3)]
    kept = after(START, *notes, *steps, most=3)
    assert (kept.began, kept.wall, kept.dropped) == (120.0, 2.0, 2)
    kept = after(START, *notes, *steps, note(130.0), note(131.0), note(132.0), most=3)
    assert (kept.began, kept.wall, kept.dropped) == (121.0, 11.0, 3)


def test_the_newest_fifty_signs_of_devices_are_shown() -> None:
    xids = [Telemetry(101.0 + at, 0.0, 1, "n0", "xid", at, "", {"xid": 79.0}, "lost") for at in range(51)]
    silent = Telemetry(200.0, 0.0, 1, "n0", "silence", -1, "", {}, "no answer")
    device = Telemetry(201.0, 0.0, 1, "n0", "device", 0, "", {}, "")
    assert after(START, *xids, device).signs == tuple(xids[1:])
    assert after(START, *xids, silent).signs == (*xids[2:], silent)


def test_of_step_times_the_newest_two_thousand_are_shown() -> None:
    times = [StepTimes(101.0, 1.0, 1, step, 0.5, {"0": 9.0 if step < 2 else 1.0}) for step in range(2001)]
    shown = after(START, *times).steps
    assert (shown.first, shown.last, shown.worst) == (1, 2000, (9.0,))
    assert after(START, *times, times[2]).steps.worst == (1.0,)


def test_the_newest_two_hundred_generations_and_fifty_checkpoints_are_shown() -> None:
    starts = [GenerationStarted(101.0, 1.0, at, 4, (70,), "zygote", "") for at in range(201)]
    shown = after(START, *starts, *(saved(102.0, step) for step in range(51)))
    assert [one.number for one in shown.generations] == list(range(1, 201))
    assert [one.step for one in shown.checkpoints] == list(range(1, 51))
    assert (shown.generations_left_out, shown.checkpoints_left_out) == (1, 1)
