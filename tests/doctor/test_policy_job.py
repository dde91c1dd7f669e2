"""What the doctor says of a job: its timeouts and saves against what was measured, and its rehearsal."""

from __future__ import annotations

import pytest

from outlast.config import CheckpointOptions, Config, FaultToleranceOptions, PreemptionOptions
from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis, Measured
from outlast.health.policy.preflight import Level

RUN = Measured("the run in /run", start=30.0, step=2.0, pause=1.5, interval=9.0, nbytes=1_000_000_000)
RATE = 1e8  # bytes/s: a save of RUN takes 10 s
SHORT = Config(
    fault_tolerance=FaultToleranceOptions(
        initial_rank_heartbeat_timeout=59.0,
        rank_heartbeat_timeout=3.0,
        rank_section_timeouts={"step": 3.5, "checkpointing": 2.5},
    ),
    checkpoints=CheckpointOptions(timeout=19.0),
    preemption=PreemptionOptions(preempt_time=18.0),
)
LONG = Config(
    fault_tolerance=FaultToleranceOptions(
        initial_rank_heartbeat_timeout=60.0,
        rank_heartbeat_timeout=4.0,
        rank_section_timeouts={"step": 4.0, "checkpointing": 3.0},
    ),
    checkpoints=CheckpointOptions(timeout=20.0),
    preemption=PreemptionOptions(preempt_time=20.0),
)


def too_short(name: str, limit: str, took: str) -> Diagnosis:
    found = f"{name} is {limit} s, and {took} s (the run in /run)"
    cure = policy.CURES["timeouts"]
    return Diagnosis("timeouts", False, found, "at least 2 times as long", cure, Level.ERROR)


def fine(check: str, found: str) -> Diagnosis:
    return Diagnosis(check, True, found, "", "", Level.WARNING)


def test_each_timeout_below_twice_what_was_measured_is_named() -> None:
    assert policy.timeouts(SHORT, RUN, RATE, 0.0) == [
        too_short("initial_rank_heartbeat_timeout", "59", "a start took 30"),
        too_short("rank_heartbeat_timeout", "3", "a step took 2"),
        too_short("rank_section_timeouts.step", "3.5", "a step took 2"),
        too_short("rank_section_timeouts.checkpointing", "2.5", "the pause of a save took 1.5"),
        too_short("checkpoints.timeout", "19", "a save took 10"),
        too_short("preemption.preempt_time", "18", "a save took 10"),
    ]


def test_timeouts_of_twice_what_was_measured_are_long_enough() -> None:
    told = [fine("timeouts", "longer than what was measured (the run in /run)")]
    assert policy.timeouts(LONG, RUN, RATE, 20.0) == told


def test_timeouts_are_judged_by_nothing_where_nothing_was_measured() -> None:
    told = [fine("timeouts", "nothing to compare with")]
    brief = Config(checkpoints=CheckpointOptions(timeout=0.5))
    assert policy.timeouts(SHORT, Measured(""), 0.0, 0.0) == told
    assert policy.timeouts(brief, Measured("", nbytes=1_000_000_000), 0.0, 0.0) == told  # the disk is unknown


@pytest.mark.parametrize(
    ("config", "grace", "name", "last"),
    [
        (Config(), 1.0, "workers_stop_timeout", "15"),
        (Config(), 14.0, "workers_stop_timeout", "15"),
        (Config(), 15.0, "", ""),
        (Config(), 0.0, "", ""),  # not known
        (LONG, 19.0, "preemption.preempt_time", "20"),
    ],
)
def test_a_job_that_the_scheduler_kills_before_its_end_is_warned_of(
    config: Config, grace: float, name: str, last: str
) -> None:
    found = f"{name} is {last} s, and the scheduler kills the job {grace:g} s after its notice"
    cure = f"set {name} below {grace:g}, or ask the scheduler for more time"
    warned = [
        Diagnosis("timeouts", False, found, "less than the scheduler gives", cure, Level.WARNING),
    ]
    assert policy.timeouts(config, Measured(""), 0.0, grace) == (
        warned if name else [fine("timeouts", "nothing to compare with")]
    )


def every(seconds: float | None, steps: int | None) -> Config:
    return Config(checkpoints=CheckpointOptions(save_interval_seconds=seconds, save_interval=steps))


@pytest.mark.parametrize(
    ("config", "step", "ok", "between"),
    [
        (every(10.0, None), 2.0, True, "10"),
        (every(9.5, 5), 2.0, False, "9.5"),
        (every(None, 5), 2.0, True, "10"),
        (every(None, 4), 2.0, False, "8"),
        (every(None, None), 100.0, False, "9"),  # as the run did
        (every(None, 5), 0.0, False, "9"),  # no step was seen
    ],
)
def test_saves_come_no_faster_than_the_disk_takes_them(
    config: Config, step: float, ok: bool, between: str
) -> None:
    run = Measured(RUN.source, step=step, interval=9.0, nbytes=RUN.nbytes)
    assert policy.saving(config, run, RATE) == Diagnosis(
        "saving",
        ok,
        "a checkpoint of 954 MiB takes 10 s at 95.4 MiB/s",
        f"less than the {between} s between two (the run in /run)",
        "" if ok else policy.CURES["saving"],
        Level.WARNING,
    )


@pytest.mark.parametrize(
    ("run", "rate"),
    [
        (Measured("", interval=9.0), RATE),
        (Measured("", nbytes=1), RATE),
        (Measured("", nbytes=1, interval=9.0), 0.0),
    ],
)
def test_saves_are_judged_by_nothing_where_nothing_was_measured(run: Measured, rate: float) -> None:
    assert policy.saving(Config(), run, rate) == fine("saving", "no checkpoint to compare with")


def test_a_path_of_the_rehearsal_goes_on_or_breaks_or_could_not_be_tried() -> None:
    untried = "a longer --timeout, or a script with outlast.start() and session.steps()"
    cure = policy.CURES["crash"]
    assert [
        policy.rehearsed("crash", "it went on"),
        policy.broken("crash", "it ended"),
        policy.unrehearsed("crash", "no time"),
        policy.leftovers(()),
        policy.leftovers(["pid 7", "/dev/shm/x"]),
    ] == [
        fine("crash", "it went on"),
        Diagnosis("crash", False, "it ended", "the job goes on", cure, Level.ERROR),
        Diagnosis("crash", False, "not rehearsed: no time", "a path that is tried", untried, Level.WARNING),
        Diagnosis("leftovers", True, "nothing", "nothing", "", Level.WARNING),
        Diagnosis(
            "leftovers", False, "pid 7, /dev/shm/x", "nothing", policy.CURES["leftovers"], Level.WARNING
        ),
    ]
