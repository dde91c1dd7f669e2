"""What a run does now, from records that are taken one by one."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from outlast.observe.policy.goodput import AGENT_DEATH, fold
from outlast.observe.policy.now import (
    CheckpointNow,
    IncidentNow,
    NodeNow,
    Now,
    NowFold,
    SlowNow,
    State,
)
from outlast.observe.recorder import read
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Note,
    Progress,
    Record,
    RunEnded,
    Saved,
    SaveLost,
    ScriptSaved,
    StepsPlanned,
    StragglerSeen,
)
from tests.observe.policy.builders import DATA, START, progress
from tests.observe.policy.builders import told_now as after

BEGUN = GenerationStarted(11.0, 11.0, 1, 4, (70, 71), "zygote", "2 workers")
TRAINS = FirstStep(12.0, 12.0, 1, 0, {}, "session")
FAULT = FaultSeen(30.0, 30.0, 1, "crash", "n0", 2, 50, 29.0, "rank 2 died", "signal 9")
RESTART = ActionTaken(30.0, 30.0, 1, "restart-in-job", 2, "newest", "attempt 1 of 3")


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


def test_a_wait_before_a_start_is_known_until_the_start() -> None:
    waits = replace(RESTART, wait=10.0)
    told = after(START, BEGUN, FAULT, waits)
    assert (told.state, told.starts_at) == (State.RECOVERING, waits.time + 10.0)
    following = replace(BEGUN, time=45.0, clock=45.0, generation=2)
    assert after(START, BEGUN, FAULT, waits, following).starts_at == 0.0
    assert after(START, BEGUN, FAULT, waits, replace(waits, next_generation=3, wait=0.0)).starts_at == 0.0


def test_all_that_the_log_tells_of_a_run() -> None:
    slow = StragglerSeen(50.0, 50.0, 2, 9, 3, "n0", "on", "computing", "", 1.4, 1.3, 1.0, 0.9, 4, "slow")
    told = after(
        START,
        StepsPlanned(10.5, 10.5, 1, 900),
        BEGUN,
        TRAINS,
        Saved(20.0, 20.0, 1, 40, "step-40", 9, 0.1, "every 20 steps"),
        SaveLost(25.0, 25.0, 1, 45, 0.1, "full"),
        FAULT,
        RESTART,
        replace(BEGUN, time=31.0, clock=31.0, generation=2),
        Loaded(32.0, 32.0, 2, 40, "step-40", 9, 0.1, "the newest"),
        FirstStep(40.0, 40.0, 2, 41, {}, "session"),
        slow,
        ScriptSaved(55.0, 55.0, 2, 50),
        progress(60.0, 51, 2),
        progress(65.0, 51, 2),
        node="n0",
    )
    assert told == Now(
        run_id="id",
        state=State.TRAINING,
        generation=2,
        ranks=4,
        nodes=(NodeNow("n0", generation=2, ranks=2, step=51, heard=65.0, present=True, lost=False),),
        step=51,
        source="session",
        rate=0.4,
        total=900,
        stepped=60.0,
        heard=65.0,
        launches=1,
        faults={"crash": 1},
        actions={"restart-in-job": 1},
        checkpoints=(CheckpointNow("disk", 40, 20.0), CheckpointNow("script", 50, 55.0)),
        saves=1,
        saves_lost=1,
        incident=IncidentNow(
            *("crash", "n0", 2, 50, 30.0, "rank 2 died", "restart-in-job", "attempt 1 of 3")
        ),
        slow=(SlowNow(3, "n0", 1.4, "computing"),),
    )


@pytest.mark.parametrize(
    ("rate", "total", "step", "left"),
    [
        (2.0, 100, 40, 30.0),
        (2.0, 100, 0, 50.0),
        (2.0, 1, 0, 0.5),
        (2.0, 100, 100, 0.0),
        (2.0, 100, 140, 0.0),  # the script goes on after what it planned
        (2.0, 0, 40, None),
        (2.0, 100, -1, None),
        (0.0, 100, 40, None),
        (None, 100, 40, None),
    ],
)
def test_the_time_left_needs_a_rate_a_plan_and_a_step(
    rate: float | None, total: int, step: int, left: float | None
) -> None:
    assert Now(rate=rate, total=total, step=step).seconds_left == left


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([(0, 0), (10, 100), (40, 200), (70, 1000)], 15.0),  # what is older than the last minute is left out
        ([(0, 0), (20, 100), (40, 200), (60, 1200)], 20.0),
        ([(0, 0), (100, 1), (200, 5)], 0.025),  # three steps are kept, however long they take
        ([(0, 0), (30, 30), (90, 30)], 1 / 3),  # no step for a minute
        ([(0, 0), (30, 30), (90.5, 30)], None),
        ([(0, 0), (100, 50), (200, 50)], 0.25),  # no step for as long as one took
        ([(0, 0), (100, 50), (200.5, 50)], None),
        ([(5, 1), (5, 2)], None),
    ],
)
def test_a_rate_needs_steps_of_the_last_minute_or_the_latest_three(
    steps: list[tuple[float, int]], rate: float | None
) -> None:
    (clock, step), *others = steps
    told = [progress(clock, step) for clock, step in others]
    assert after(BEGUN, replace(TRAINS, clock=clock, step=step), *told).rate == rate


def test_a_rate_is_not_one_of_steps_before_a_start_or_a_load() -> None:
    again = replace(BEGUN, time=31.0, clock=31.0, generation=2)
    before = (START, BEGUN, TRAINS, progress(20.0, 80))
    steps = [progress(at, step, 2) for at, step in ((40.0, 110), (50.0, 130))]
    resumed = replace(TRAINS, time=40.0, clock=40.0, generation=2, step=110)
    assert after(*before, FAULT, RESTART, again, resumed).rate is None
    assert after(*before, FAULT, RESTART, again, resumed, *steps).rate == 2.0
    loaded = Loaded(32.0, 32.0, 2, 100, "step-100", 1, 0.1, "the newest")
    assert after(*before, loaded, *steps[:1]).rate is None
    assert after(*before, loaded, *steps).rate == 2.0


def test_a_launch_forgets_the_steps_of_the_one_before() -> None:
    saves = [Saved(20.0 + 10 * at, 20.0 + 10 * at, 0, 40 * at, f"{at}", 9, 0.1, "") for at in (1, 2)]
    session = replace(START, generation=0)
    told = after(session, *saves)
    assert (told.state, told.step, told.stepped, told.rate) == (State.TRAINING, 80, 40.0, 4.0)
    told = after(session, *saves, replace(session, time=90.0, clock=1.0))
    assert (told.state, told.step, told.source, told.stepped, told.rate) == (
        State.STARTING,
        -1,
        "",
        0.0,
        None,
    )
    first = Saved(95.0, 6.0, 0, 10, "again", 9, 0.1, "")  # its checkpoints were removed: nothing is loaded
    told = after(session, *saves, replace(session, time=90.0, clock=1.0), first)
    assert (told.state, told.step, told.stepped, told.rate) == (State.TRAINING, 10, 95.0, None)


@pytest.mark.parametrize(
    "record",
    [
        progress(32.0, 60),
        Loaded(32.0, 32.0, 2, 60, "step-60", 1, 0.1, "the newest"),
        Saved(32.0, 32.0, 1, 60, "step-60", 1, 0.1, "every 20 steps"),
    ],
)
def test_under_a_launcher_only_a_first_step_says_that_a_run_trains(record: Record) -> None:
    assert after(START, BEGUN, record).state is State.STARTING
    assert after(START, BEGUN, TRAINS, FAULT, RESTART, record).state is State.RECOVERING
    assert after(START, BEGUN, TRAINS, FAULT, RESTART, record, TRAINS).state is State.TRAINING


SAVED = Saved(32.0, 32.0, 1, 60, "step-000000060.g1", 1, 0.1, "every 20 steps")


def test_every_rank_has_reached_what_is_saved() -> None:
    for saved in (SAVED, ScriptSaved(32.0, 32.0, 1, 60)):
        told = after(START, BEGUN, TRAINS, saved)
        assert (told.step, told.stepped, told.nodes[0].step) == (60, 32.0, 60)
    assert after(START, BEGUN, TRAINS, SAVED, ScriptSaved(33.0, 33.0, 1, 60)).stepped == 32.0
    assert after(START, BEGUN, TRAINS, progress(31.5, 60), SAVED).stepped == 31.5
    further = progress(33.0, 61)
    assert after(START, BEGUN, TRAINS, SAVED, further).step == 61
    told = NowFold()
    for node in ("n0", "lost"):
        for record in (START, BEGUN, TRAINS):
            told.take(record, node)
    told.take(SAVED, "n0")
    again = replace(BEGUN, generation=2)
    later = replace(SAVED, step=80, checkpoint="step-000000080.g2")
    for record in (again, replace(TRAINS, generation=2, step=61), later):
        told.take(record, "n0")
    assert [one.step for one in told.now().nodes] == [TRAINS.step, 80]


@pytest.mark.parametrize(
    "records",
    [
        (SAVED, Loaded(33.0, 33.0, 1, 40, "step-40", 1, 0.1, "a rollback")),
        (
            replace(BEGUN, generation=2),
            Loaded(33.0, 33.0, 2, 40, "step-40", 1, 0.1, "an older one"),
            replace(SAVED, generation=2),  # the writer has completed what was staged before
        ),
        (SAVED, START, replace(BEGUN, generation=1), progress(34.0, 40)),
        (SAVED, replace(BEGUN, generation=2), progress(34.0, 40, 2)),
    ],
)
def test_a_checkpoint_from_before_a_load_or_a_start_says_nothing_of_the_step(
    records: tuple[Record, ...],
) -> None:
    assert after(START, BEGUN, TRAINS, *records).step == 40


def test_a_run_has_ended_when_each_of_its_nodes_has() -> None:
    told = NowFold()
    for node in ("n0", "n1"):
        told.take(BEGUN, node)
    late = RunEnded(41.0, 41.0, 1, 60, 0, "every rank finished")
    told.take(late, "n1")
    assert (told.now().end, told.now().state) == (None, State.STARTING)
    told.take(replace(late, time=40.0, reason="the leader said so"), "n0")
    assert (told.now().end, told.now().state) == (late, State.ENDED)
    told.take(replace(BEGUN, time=42.0, generation=2), "n0")
    assert told.now().end is None


def test_steps_of_another_source_are_not_compared_with_those_before() -> None:
    counted = FirstStep(12.0, 12.0, 1, 1, {}, "counted")
    told = after(START, BEGUN, counted, Progress(22.0, 22.0, 1, 10_000, "announced"))
    assert (told.step, told.rate) == (10_000, None)
    assert after(START, BEGUN, counted, Progress(22.0, 22.0, 1, -5, "announced")).step == -1
    told = after(
        START,
        BEGUN,
        replace(counted, step=800),
        Progress(22.0, 22.0, 1, 100, "announced"),
        Progress(32.0, 32.0, 1, 110, "announced"),
    )
    assert (told.step, told.source, told.rate) == (110, "announced", 1.0)


def test_a_number_of_steps_that_no_loop_has_is_not_taken() -> None:
    steps = (TRAINS, progress(17.0, 50))
    planned = StepsPlanned(13.0, 13.0, 1, 150)
    assert after(START, BEGUN, planned, *steps).seconds_left == 10.0
    told = after(START, BEGUN, planned, replace(planned, total=10**400), *steps)
    assert (told.total, told.seconds_left) == (150, 10.0)
    assert after(planned, replace(planned, total=2**63)).total == 2**63
    assert after(planned, replace(planned, total=2**63 + 1)).total == 150


def test_a_slow_rank_is_told_until_it_is_slow_no_more_or_started_again() -> None:
    slow = StragglerSeen(20.0, 20.0, 1, 9, 3, "n0", "on", "computing", "", 1.4, 1.3, 1.0, 0.9, 4, "slow")
    assert [one.rank for one in after(START, BEGUN, slow).slow] == [3]
    assert after(START, BEGUN, slow, replace(slow, state="off")).slow == ()
    assert after(START, BEGUN, slow, replace(BEGUN, generation=2)).slow == ()
    assert [one.rank for one in after(START, BEGUN, slow, BEGUN).slow] == [3]  # another node's start


def test_the_job_is_as_far_as_the_slowest_node_of_its_newest_generation() -> None:
    told = NowFold()
    for node, step in (("n0", 30), ("n1", 20), ("lost", 10)):
        for record in (START, BEGUN, progress(20.0, step)):
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
        ("lost", 0, 20.0, False),
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


def test_of_a_run_without_a_log_nothing_is_known() -> None:
    assert asdict(after()) == {
        **{"run_id": "", "state": State.EMPTY, "generation": 0, "ranks": 0, "nodes": (), "end": None},
        **{"step": -1, "source": "", "rate": None, "total": 0, "stepped": 0.0, "heard": 0.0, "launches": 0},
        **{"faults": {}, "actions": {}, "checkpoints": (), "saves": 0, "saves_lost": 0, "slow": ()},
        **{"incident": None, "starts_at": 0.0},
    }


def test_of_a_log_without_its_begin_only_the_node_is_known() -> None:
    told = after(Note(0.5, 0.5, 0, "the clock of this node was reset"))
    node = NodeNow("", generation=0, ranks=0, step=-1, heard=0.5, present=True, lost=False)
    assert told == Now(state=State.STARTING, nodes=(node,), heard=0.5)


def test_a_session_without_a_launcher_trains_from_its_load_or_save_on() -> None:
    session = replace(START, generation=0)
    for record in (
        Loaded(32.0, 32.0, 0, 60, "step-60", 1, 0.1, ""),
        Saved(32.0, 32.0, 0, 60, "step-60", 1, 0.1, ""),
    ):
        told = after(session, record)
        assert (told.state, told.step, told.ranks) == (State.TRAINING, 60, 4)


def test_what_two_leaders_write_is_counted_once() -> None:
    told = NowFold()
    for node in ("n0", "n1"):
        told.take(Saved(20.0, 20.0, 1, 40, "step-40", 9, 0.1, ""), node)
        told.take(SaveLost(22.0, 22.0, 1, 60, 0.1, "full"), node)
        told.take(FAULT, node)
        told.take(RESTART, node)
    now = told.now()
    assert (now.saves, now.saves_lost, now.faults, now.restarts) == (1, 1, {"crash": 1}, 1)


def test_a_rate_ends_with_the_steps_and_with_the_run() -> None:
    steps = [progress(12.0 + at, 100 * at) for at in range(0, 65, 5)]
    hang = [progress(72.0 + at, 6000) for at in range(5, 125, 5)]
    assert after(START, BEGUN, TRAINS, *steps).rate == 100.0
    assert (after(START, BEGUN, TRAINS, *steps, *hang[:6]).rate or 100.0) < 70.0
    assert after(START, BEGUN, TRAINS, *steps, *hang).rate is None
    assert after(START, BEGUN, TRAINS, *steps, RunEnded(76.0, 76.0, 1, 6000, 0, "done")).rate is None
    assert after(START, BEGUN, TRAINS, *steps, FAULT, RESTART).rate is None


def test_a_fault_without_an_action_and_an_end_without_a_fault_are_no_incidents() -> None:
    ignored = replace(RESTART, action="none")
    stop = replace(RESTART, action="stop", reason="every rank finished")
    told = after(START, BEGUN, FAULT, ignored, stop)
    assert (told.incident, told.faults, told.restarts, told.state) == (None, {}, 0, State.STARTING)
