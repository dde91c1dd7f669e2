"""The ledger against jobs whose account is known, and against logs that make no sense at all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.observe.policy.codec import KINDS
from outlast.observe.policy.goodput import AGENT_DEATH, Category, Ledger, fold
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
    RunStarted,
    Saved,
    SaveLost,
    TimeoutsLearned,
)
from tests.observe.policy.builders import EPOCH, seconds


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


CLOCKS = st.one_of(
    st.integers(0, 1000).map(lambda tenths: tenths / 10),  # most of their sums are rounded
    st.sampled_from([0.0, 1.0 + 2**-30, -7.0, EPOCH, 1e300]),
    st.floats(),
)
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
                    "action": st.sampled_from(["none", "restart-in-job", "stop", "else"]),
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
    assert all((spent * 2**20).is_integer() for spent in ledger.seconds.values())  # so no sum is rounded
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


def small_job() -> Job:
    """A job of one generation: 2 s of start, 10 s of training, 1 + 10 steps."""
    job = Job()
    job.launch(reboot=False, gap=0.0, skew=0.0)
    job.begin((2.0, 0.0, 0.0), None, 0.0, Category.STARTING)
    job.train(10.0, 10, told=True)
    return job


def spent(job: Job) -> dict[str, float]:
    return seconds(fold(job.log))


@pytest.mark.parametrize("claimed", [4.0, -50.0])
def test_a_save_proves_that_the_job_runs_when_the_first_step_is_missing(claimed: float) -> None:
    job = small_job()
    job.spend(Category.SAVING, 4.0)
    job.log = [record for record in job.log if not isinstance(record, (FirstStep, Progress))]
    job.log.append(SaveLost(*job.now, 11, claimed, "disk full"))
    job.spend(Category.TRAINING, 3.0)
    job.log.append(Note(*job.now, "by the way"))
    saving = {"saving": 4.0} if claimed > 0 else {}
    assert spent(job) == {"starting": 16.0 - saving.get("saving", 0.0), "training": 3.0, **saving}


def test_a_load_whose_save_was_not_recorded_goes_back_to_where_its_step_was_known() -> None:
    job = small_job()
    job.save(0.0, fails=False)
    job.train(5.0, 5, told=True)
    job.fault(0.0, job.step)
    job.begin((1.0, 0.0, 1.0), next(iter(job.checkpoints)), 0.0, Category.RECOVERING)
    job.log = [record for record in job.log if not isinstance(record, Saved)]
    assert spent(job) == {"training": 10.0, "lost_work": 5.0, "starting": 2.0, "recovering": 2.0}


def test_what_stands_in_the_way_of_an_action_is_recovering_or_stopping() -> None:
    for kind, category in (("restart-in-job", "recovering"), ("stop", "stopping"), ("none", "training")):
        job = small_job()
        job.log.append(FaultSeen(*job.now, "crash", "n01", 1, 11, job.clock, "died", "signal 9"))
        job.spend(Category.RECOVERING, 4.0)
        job.log.append(ActionTaken(*job.now, kind, 2, "newest", ""))
        expected = {"training": 10.0, "starting": 2.0}
        expected[category] = expected.get(category, 0.0) + 4.0
        assert spent(job) == expected
        assert len(fold(job.log).incidents) == (kind != "none")


def test_a_fault_between_a_load_and_the_first_step_is_at_the_step_that_was_loaded() -> None:
    job = small_job()
    job.save(0.0, fails=False)
    job.train(5.0, 5, told=True)
    job.save(0.0, fails=False)
    old, new = job.checkpoints
    job.fault(0.0, job.step)
    job.log.append(Loaded(*job.now, 16, new, 1, 0.0, "newest"))
    job.fault(0.0, -1)
    job.begin((1.0, 0.0, 1.0), old, 0.0, Category.RECOVERING)
    assert [incident.steps_lost for incident in fold(job.log).incidents] == [0, 5]
