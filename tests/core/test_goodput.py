"""The ledger against jobs whose account is known, and against logs that make no sense at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.codec import KINDS
from outlast.core.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Note,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    SaveLost,
    TimeoutsLearned,
)
from outlast.core.goodput import AGENT_DEATH, Category, Ledger, fold

EPOCH = 1_795_000_000.0


def seconds(ledger: Ledger) -> dict[str, float]:
    return {name.value: spent for name, spent in ledger.seconds.items() if spent}


class Job:
    """A job that keeps its own account while it writes its log.

    Stretches of training are relabelled when a load undoes them, one by one: nothing here knows
    of overlapping spans, which is how the ledger does it.
    """

    def __init__(self) -> None:
        self.log: list[Record] = []
        self.account: list[tuple[Category, float]] = []
        self.wall = EPOCH
        self.skew = 0.0  # of the wall clock
        self.clock = 0.0
        self.boot = 0
        self.generation = 0
        self.step = 0
        self.checkpoints: dict[str, tuple[int, int]] = {}  # name -> step, stretches before
        self.incidents: list[dict[str, object]] = []
        self.broken: list[tuple[int, float, int]] = []  # incident, end of progress, step: not running yet
        self.unloaded: list[tuple[int, int]] = []

    @property
    def now(self) -> tuple[float, float, int]:
        return self.wall + self.skew, self.clock, self.generation

    def spend(self, category: Category, spent: float) -> None:
        self.wall += spent
        self.clock += spent
        self.account.append((category, spent))

    def launch(self, reboot: bool, gap: float, skew: float) -> None:
        if self.log:
            self.spend(Category.DOWN, gap)
        if reboot:
            self.boot, self.clock = self.boot + 1, 50.0 + gap
        else:
            self.skew += skew
        self.generation += 1
        boot_id = f"boot-{self.boot}"
        self.log.append(
            RunStarted(*self.now, "job", "n01", 10 + self.generation, boot_id, ("t.py",), 2, "why")
        )

    def begin(
        self, phases: tuple[float, float, float], load: str | None, lag: float, category: Category
    ) -> None:
        """Start a generation: until its load, the load, until its first step, until that is recorded."""
        self.log.append(GenerationStarted(*self.now, 2, (1, 2), "zygote", ""))
        self.spend(category, phases[0])
        undone = 0
        if load is not None:
            self.spend(Category.LOADING, phases[1])
            self.step, undone = self.checkpoints[load]
            self.log.append(Loaded(*self.now, self.step, load, 1, phases[1], "newest"))
        else:
            self.step = 0
        self.account[undone:] = [
            (Category.LOST_WORK if spent is Category.TRAINING else spent, long)
            for spent, long in self.account[undone:]
        ]
        for index, step in self.unloaded:
            self.incidents[index]["steps_lost"] = max(0, step - self.step)
        self.unloaded.clear()
        self.spend(category, phases[2])
        for index, since, _ in self.broken:
            self.incidents[index]["running_again_after"] = self.wall - since
        self.broken.clear()
        mark = self.clock
        self.step += 1
        self.spend(Category.TRAINING, lag)
        self.log.append(FirstStep(*self.now, self.step, {"first_step": mark}))

    def train(self, spent: float, steps: int, told: bool) -> None:
        self.spend(Category.TRAINING, spent)
        self.step += steps
        if told:
            self.log.append(Progress(*self.now, self.step))

    def save(self, spent: float, fails: bool) -> None:
        self.spend(Category.SAVING, spent)
        if fails:
            self.log.append(SaveLost(*self.now, self.step, spent, "disk full"))
            return
        name = f"step-{self.step:09d}.g{self.generation}"
        self.log.append(Saved(*self.now, self.step, name, 1, spent, "due"))
        self.checkpoints[name] = (self.step, len(self.account))

    def fault(self, unnoticed: float, step: int) -> None:
        since, began = self.clock, self.wall
        self.spend(Category.DETECTING, unnoticed)
        self.log.append(FaultSeen(*self.now, "hang", "n01", 1, step, since, "silent", "hang"))
        self.log.append(ActionTaken(*self.now, "restart-in-job", self.generation + 1, "newest", "once more"))
        self.incidents.append({"kind": "hang", "detected_after": unnoticed, "running_again_after": None})
        self._note_incident(began, step)
        self.generation += 1

    def die(self) -> None:
        """The agent is killed, right after it wrote a line."""
        self.log.append(Progress(*self.now, self.step))
        self.incidents.append({"kind": AGENT_DEATH, "detected_after": None, "running_again_after": None})
        self._note_incident(self.wall, self.step)

    def _note_incident(self, began: float, step: int) -> None:
        index = len(self.incidents) - 1
        self.incidents[index]["steps_lost"] = None
        self.broken.append((index, began, step))
        self.unloaded.append((index, step))

    def end(self, spent: float) -> None:
        self.train(0.0, 1, True)
        self.spend(Category.STOPPING, spent)
        self.log.append(ActionTaken(*self.now, "stop", self.generation, "newest", "every rank finished"))
        self.log.append(RunEnded(*self.now, self.step, 0, "every rank finished"))


TIMES = st.integers(1, 2**16).map(lambda units: units / 2**10)  # sums of them have no rounding


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    job = Job()

    def begin(category: Category) -> None:
        names = [None, *job.checkpoints] if not job.checkpoints else list(job.checkpoints)
        load = draw(st.sampled_from(names[-2:]))
        job.begin(draw(st.tuples(TIMES, TIMES, TIMES)), load, draw(TIMES), category)

    def recover() -> None:
        job.fault(draw(TIMES), job.step)
        if draw(st.integers(0, 3)) == 0:  # and once more, before anything was loaded
            job.log.append(GenerationStarted(*job.now, 2, (1, 2), "zygote", ""))
            job.spend(Category.RECOVERING, draw(TIMES))
            job.fault(draw(TIMES), -1)
        begin(Category.RECOVERING)

    turns: list[Callable[[], None]] = [
        lambda: job.train(draw(TIMES), draw(st.integers(1, 50)), draw(st.booleans())),
        lambda: job.save(draw(TIMES), draw(st.integers(0, 3)) == 0),
        lambda: job.log.append(Note(*job.now, "by the way")),
        lambda: job.log.append(TimeoutsLearned(*job.now, {"step": 1.0}, "")),
        recover,
    ]
    for number in range(draw(st.integers(1, 3))):
        job.launch(draw(st.booleans()), draw(TIMES), draw(st.floats(-1e4, 1e4)))
        begin(Category.STARTING)
        for turn in draw(st.lists(st.sampled_from(turns), max_size=10)):
            turn()
        if number == 0 or draw(st.booleans()):
            job.train(draw(TIMES), 3, True)
            job.die()
        else:
            job.end(draw(TIMES))
    if job.incidents and job.incidents[-1]["kind"] == AGENT_DEATH and isinstance(job.log[-1], Progress):
        job.incidents.pop()  # nobody came to see it
    return job


@given(jobs())
def test_the_ledger_is_the_account_that_the_job_kept(job: Job) -> None:
    expected = dict.fromkeys(Category, 0.0)
    for category, spent in job.account:
        expected[category] += spent
    ledger = fold(job.log)
    assert ledger.seconds == expected
    assert ledger.wall == sum(expected.values())
    told = [
        {
            "kind": one.kind,
            "detected_after": one.detected_after,
            "running_again_after": one.running_again_after,
            "steps_lost": one.steps_lost,
        }
        for one in ledger.incidents
    ]
    assert told == job.incidents


CLOCKS = st.sampled_from([0.0, 1.0, 1.0 + 2**-30, 2.5, 1e3, -7.0, EPOCH, 1e300]) | st.floats()
GARBAGE = st.one_of(
    [
        st.builds(
            kind,
            time=CLOCKS,
            clock=CLOCKS,
            **{
                name: values
                for name, values in {
                    "seconds": CLOCKS,
                    "since": CLOCKS,
                    "generation": st.integers(0, 3),
                    "step": st.integers(-2, 9),
                    "checkpoint": st.sampled_from("ab"),
                    "boot_id": st.sampled_from(["", "a", "b"]),
                    "rung": st.sampled_from(["none", "restart-in-job", "stop", "else"]),
                    "marks": st.dictionaries(st.sampled_from(["spawned", "loaded", "first_step"]), CLOCKS),
                }.items()
                if name in kind.__dataclass_fields__
            },
        )
        for kind in KINDS.values()
    ]
)


def check(ledger: Ledger) -> None:
    assert math.fsum(ledger.seconds.values()) == ledger.wall
    assert sum(ledger.seconds.values()) == ledger.wall
    assert list(ledger.seconds) == list(reversed(Category))
    assert all(0.0 <= spent < math.inf for spent in ledger.seconds.values())
    assert 0.0 <= ledger.goodput <= 1.0
    for incident in ledger.incidents:
        durations = [incident.at, incident.detected_after, incident.running_again_after, incident.steps_lost]
        assert all(one is None or 0.0 <= one < math.inf for one in (*durations, *incident.phases.values()))


@given(st.lists(GARBAGE, max_size=30))
def test_whatever_the_log_holds_each_second_is_counted_once(log: list[Record]) -> None:
    check(fold(log))


@given(jobs(), st.randoms(use_true_random=False))
def test_in_whatever_order_each_second_is_counted_once(job: Job, dice: object) -> None:
    log = list(job.log)
    dice.shuffle(log)  # type: ignore[attr-defined]
    check(fold(log))
    check(fold(log[: len(log) // 2]))


def test_an_empty_log_is_an_empty_ledger() -> None:
    ledger = fold([])
    assert (ledger.wall, ledger.goodput, ledger.launches, ledger.end) == (0.0, 0.0, 0, None)


@dataclass
class Line:
    """Makes records at seconds after the start of one launch."""

    generation: int = 1

    def at(self, after: float) -> tuple[float, float, int]:
        return EPOCH + after, 100.0 + after, self.generation

    def start(self, after: float = 0.0, boot_id: str = "boot") -> RunStarted:
        return RunStarted(*self.at(after), "job", "n01", 1, boot_id, (), 2, "a new run")

    def workers(self, after: float) -> GenerationStarted:
        return GenerationStarted(*self.at(after), 2, (1, 2), "zygote", "")

    def step(self, after: float, step: int = 1, **marks: float) -> FirstStep:
        return FirstStep(*self.at(after), step, {name: 100.0 + mark for name, mark in marks.items()})

    def fault(self, after: float, since: float, step: int = 10, kind: str = "crash") -> FaultSeen:
        return FaultSeen(*self.at(after), kind, "n01", 1, step, 100.0 + since, "died", "signal 9")

    def action(self, after: float, rung: str = "restart-in-job") -> ActionTaken:
        return ActionTaken(*self.at(after), rung, self.generation + 1, "newest", "because")

    def saved(self, after: float, step: int, spent: float = 0.0) -> Saved:
        return Saved(*self.at(after), step, f"c{step}", 1, spent, "due")

    def loaded(self, after: float, step: int, spent: float = 0.0) -> Loaded:
        return Loaded(*self.at(after), step, f"c{step}", 1, spent, "newest")

    def ended(self, after: float, exit_code: int = 0) -> RunEnded:
        return RunEnded(*self.at(after), 99, exit_code, "")


ONE, TWO, THREE = Line(1), Line(2), Line(3)
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


def test_a_checkpoint_whose_record_is_missing_is_found_by_its_step() -> None:
    log = [
        *BEGUN,
        Progress(*ONE.at(12.0), 10),
        Progress(*ONE.at(22.0), 20),
        ONE.fault(32.0, since=32.0, step=30),
    ]
    log += [ONE.action(32.0), TWO.loaded(33.0, 15), TWO.step(34.0, 16)]
    assert fold(log).seconds[Category.LOST_WORK] == 32.0 - 12.0


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


def test_what_waits_when_a_job_is_stopped_does_not_wait_over_night() -> None:
    log = [
        *BEGUN,
        ONE.fault(12.0, since=11.0),
        ONE.action(12.0),
        ONE.action(13.0, "stop"),
        ONE.ended(14.0, 143),
    ]
    log += [TWO.start(5000.0), TWO.workers(5001.0), TWO.step(5002.0)]
    assert [one.running_again_after for one in fold(log).incidents] == [None]


def test_a_stop_that_was_asked_for_is_stopping_from_there_on() -> None:
    log = [*BEGUN, Progress(*ONE.at(10.0), 10), ONE.action(14.0, "stop"), ONE.ended(15.0, 143)]
    assert seconds(fold(log)) == {"starting": 2.0, "training": 12.0, "stopping": 1.0}


def test_between_boots_wall_time_counts_and_is_never_negative() -> None:
    log = [*BEGUN, Progress(*ONE.at(10.0), 10), replace(TWO.start(40.0, "other"), clock=3.0)]
    assert fold(log).seconds[Category.DOWN] == 30.0
    log[-1] = replace(TWO.start(5.0, "other"), clock=3.0)
    assert fold(log).seconds[Category.DOWN] == 0.0


def test_within_a_boot_a_jump_of_the_wall_clock_changes_nothing() -> None:
    log = [*BEGUN, Progress(*ONE.at(10.0), 10), replace(TWO.start(40.0), time=EPOCH - 1e6)]
    assert fold(log).seconds[Category.DOWN] == 30.0


def test_a_report_that_was_relayed_late_has_its_own_time() -> None:
    """A worker's record carries the worker's clock; the agent may write another one first."""
    log = [*BEGUN, Progress(*ONE.at(12.5), 10), ONE.saved(12.0, 10, spent=1.0), Progress(*ONE.at(20.0), 20)]
    assert seconds(fold(log)) == {"starting": 2.0, "saving": 1.0, "training": 17.0}


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


@pytest.mark.parametrize("spent", [math.nan, -5.0, -math.inf, 0.0])
def test_a_duration_that_is_none_takes_no_time(spent: float) -> None:
    assert seconds(fold([*BEGUN, ONE.saved(12.0, 10, spent)])) == {"starting": 2.0, "training": 10.0}


def test_timeouts_in_force_are_the_latest_of_each_section() -> None:
    log = [*BEGUN, TimeoutsLearned(*ONE.at(3.0), {"step": 2.0, "save": 9.0}, "")]
    log.append(TimeoutsLearned(*ONE.at(4.0), {"step": 3.0}, ""))
    assert fold(log).timeouts == {"step": 3.0, "save": 9.0}
