"""Each judgement of the doctor, from planted measurements."""

from __future__ import annotations

import re

import pytest

from outlast.config import CheckpointOptions, Config, FaultToleranceOptions, PreemptionOptions
from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis, Measured
from outlast.health.policy.preflight import Check, Finding, Level
from outlast.recovery.policy.events import FaultSeen, FirstStep, Note, Progress, Record, RunStarted, Saved
from tests.source_tree import ROOT

GIB, MIB = 1 << 30, 1 << 20
FINE, WARNING, ERROR = None, Level.WARNING, Level.ERROR

# A judgement, how bad it is, and the values that it names.
ROWS: list[tuple[Diagnosis, Level | None, str]] = [
    (policy.rename("/run", "", ()), FINE, "/run"),
    (policy.rename("/run", "Read-only file system", ()), ERROR, "Read-only file system"),
    (policy.rename("/run", "", ["17 bytes of a mixture"]), ERROR, "17 bytes of a mixture"),
    (policy.lock("/run", True, ""), FINE, "/run"),
    (policy.lock("/run", False, ""), ERROR, "/run"),
    (policy.lock("/run", True, "No locks available"), ERROR, "No locks available"),
    (policy.writing("/run", 50e6, ""), FINE, r"/run.*47\.7"),
    (policy.writing("/run", 49.9e6, ""), WARNING, r"/run.*47\.6"),
    (policy.writing("/run", 0.0, "No space left on device"), ERROR, "No space left on device"),
    (policy.launchers("/run", "", True), FINE, "/run"),
    (policy.launchers("/run", "4711", True), ERROR, "4711"),
    (policy.launchers("/run", "4711", False), WARNING, "4711"),
    (policy.tracing(-1, is_root=False), FINE, ""),
    (policy.tracing(1, is_root=False), FINE, "ptrace_scope.*1"),
    (policy.tracing(2, is_root=True), FINE, "ptrace_scope.*2"),
    (policy.tracing(2, is_root=False), WARNING, "ptrace_scope.*2"),
    (policy.tracing(3, is_root=True), WARNING, "ptrace_scope.*3"),
    (policy.variables((), {}, {"NCCL_DEBUG": "WARN", "CUDA_LAUNCH_BLOCKING": "0"})[0], FINE, ""),
    (policy.variables(["OUTLAST_X: nothing"], {}, {})[0], WARNING, "OUTLAST_X"),
    (policy.variables((), {"NCCL_DEUBG": "NCCL_DEBUG"}, {})[0], WARNING, "NCCL_DEUBG.*NCCL_DEBUG"),
    (policy.variables((), {}, {"TORCH_DISTRIBUTED_DEBUG": "detail"})[0], WARNING, "TORCH_DISTRIBUTED_DEBUG"),
    (policy.script("train.py", ""), FINE, "train.py"),
    (policy.script("train.py", "line 3: invalid syntax"), ERROR, "line 3"),
    (policy.no_answer("lock", 60.0), ERROR, "60"),
    (policy.processors(2, 2.0, 0), FINE, "2.*2"),
    (policy.processors(2, 1.5, 0), WARNING, r"1\.5.*2"),
    (policy.processors(2, 2.0, 1), FINE, "2.*2"),
    (policy.processors(2, 4.0, 2), FINE, "4.*2.*2.*OMP_NUM_THREADS"),
    (policy.processors(2, 3.0, 2), WARNING, "3.*2.*2.*OMP_NUM_THREADS"),
    (policy.core_files(0, "/cores", 0, 8), FINE, ""),
    (policy.core_files(-1, "", 0, 8), FINE, ""),
    (policy.core_files(-1, "/cores", 8 * GIB, 2), FINE, "/cores.*8 GiB.*2"),
    (policy.core_files(-1, "/cores", 7 * GIB, 2), WARNING, "/cores.*7 GiB.*2"),
    (policy.core_files(1, "/cores", 2, 2), FINE, "/cores.*2 bytes.*2"),
    (policy.core_files(1, "/cores", 1, 2), WARNING, "/cores.*1 bytes.*2"),
    (policy.core_files(9 * GIB, "/c", 4 * GIB, 1), FINE, "/c.*4 GiB.*1"),
    (policy.locked_memory(0, ()), FINE, "0 bytes.*0"),
    (policy.locked_memory(-1, ["mlx5_0"]), FINE, "1"),
    (policy.locked_memory(0, ["mlx5_0"]), ERROR, "0 bytes.*1"),
    (policy.locked_memory(64 * MIB, ["a", "b"]), FINE, "64 MiB.*2"),
    (policy.locked_memory(63 * MIB, ["a", "b"]), ERROR, "63 MiB.*2"),
    (policy.overcommit(1), FINE, "overcommit_memory.*1"),
    (policy.overcommit(2), WARNING, "overcommit_memory.*2"),
    (policy.driver(8, ())[0], FINE, "8"),
    (policy.driver(8, ["GPU 3: lost", "GPU 4: lost"])[0], ERROR, "GPU 3: lost"),
    (policy.driver(8, ["GPU 3: lost", "GPU 4: lost"])[1], ERROR, "GPU 4: lost"),
    (policy.buckets("train.py", ()), FINE, "train.py"),
    (policy.buckets("train.py", [3, 9]), WARNING, "train.py.*3, 9"),
    (policy.modules("/code", ()), FINE, "/code"),
    (policy.modules("/code", ["queue.py", "torch.py"]), WARNING, "/code.*queue.py, torch.py"),
    (policy.rehearsed("crash", "it went on"), FINE, "it went on"),
    (policy.broken("crash", "it ended"), ERROR, "it ended"),
    (policy.unrehearsed("crash", "no time"), WARNING, "no time"),
    (policy.leftovers(()), FINE, ""),
    (policy.leftovers(["pid 7", "/dev/shm/x"]), WARNING, "pid 7, /dev/shm/x"),
]


@pytest.mark.parametrize(("one", "level", "named"), ROWS, ids=lambda one: getattr(one, "check", None))
def test_what_was_measured_is_judged(one: Diagnosis, level: Level | None, named: str) -> None:
    assert re.search(named, one.found)
    assert (one.ok, one.fails) == (level is FINE, level is ERROR)
    assert level in (FINE, one.level)
    assert bool(one.cure) == (not one.ok)
    assert one.ok or one.expected


def test_a_diagnosis_is_printed_with_all_its_fields() -> None:
    one = policy.tracing(3, is_root=True)
    values = {"check": "ptrace", "ok": False, "found": one.found, "expected": one.expected}
    assert one.to_json() == {**values, "cure": policy.CURES["ptrace"], "level": "warning"}


def test_the_reference_has_each_check_with_its_cure() -> None:
    pages = [(ROOT / "docs/reference" / name).read_text() for name in ("commands.md", "preflight.md")]
    rows = [line for page in pages for line in page.split("\n") if line.startswith("| `")]
    lacking = [name for name in policy.CURES if not any(f"`{name}`" in row for row in rows)]
    assert lacking == []


@pytest.mark.parametrize("check", Check)
def test_every_check_of_a_preflight_has_a_cure(check: Check) -> None:
    assert policy.cured(Finding(check, False, "found", "expected")).cure
    assert policy.cured(Finding(check, True, "found", "expected")).cure == ""


@pytest.mark.parametrize(
    ("variable", "names", "ok"),
    [
        ("NCCL_SOCKET_IFNAME", "eth1", True),
        ("NCCL_SOCKET_IFNAME", "eth", True),  # a prefix
        ("NCCL_SOCKET_IFNAME", "ib,eth", True),  # one of them is enough
        ("NCCL_SOCKET_IFNAME", "ib,", False),  # an empty name is none
        ("NCCL_SOCKET_IFNAME", "h0", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=ib0,eth1", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),  # all others
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", True),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", False),  # it opens each of them
        ("GLOO_SOCKET_IFNAME", "eth0,", True),
        ("GLOO_SOCKET_IFNAME", "=eth0", False),  # the signs are NCCL's
        ("GLOO_SOCKET_IFNAME", "^docker", False),
        ("TP_SOCKET_IFNAME", "lo", True),
        ("TP_SOCKET_IFNAME", "l", False),
    ],
)
def test_interfaces_are_named_as_their_library_reads_them(variable: str, names: str, ok: bool) -> None:
    one = policy.interfaces(variable, names, ("eth0", "eth1", "lo"))
    assert (one.ok, one.fails) == (ok, not ok)
    assert f"{variable}={names}" in one.found
    assert "eth0, eth1, lo" in one.expected


RUN = Measured("the run in /run", start=30.0, step=2.0, pause=1.5, interval=9.0, nbytes=1_000_000_000)
RATE = 1e8  # bytes/s: a save of RUN takes 10 s
NAMES = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_section_timeouts.step")
NAMES += ("rank_section_timeouts.checkpointing", "checkpoints.timeout", "preemption.preempt_time")


def configured(start: float, beat: float, step: float, pause: float, save: float, notice: float) -> Config:
    sections = {"step": step, "checkpointing": pause}
    return Config(
        fault_tolerance=FaultToleranceOptions(
            initial_rank_heartbeat_timeout=start, rank_heartbeat_timeout=beat, rank_section_timeouts=sections
        ),
        checkpoints=CheckpointOptions(timeout=save),
        preemption=PreemptionOptions(preempt_time=notice),
    )


SHORT, LONG = configured(59.0, 3.0, 3.5, 2.5, 19.0, 18.0), configured(60.0, 4.0, 4.0, 3.0, 20.0, 20.0)


def test_each_timeout_below_twice_what_was_measured_is_named() -> None:
    found = policy.timeouts(SHORT, RUN, RATE, 0.0)
    assert [(one.check, one.fails, one.found.split()[0]) for one in found] == [
        ("timeouts", True, name) for name in NAMES
    ]
    for one, values in zip(found, ("59.*30", "3.*2", "3.5.*2", "2.5.*1.5", "19.*10", "18.*10"), strict=True):
        assert re.search(values, one.found)
    assert [one.ok for one in policy.timeouts(LONG, RUN, RATE, 20.0)] == [True]


@pytest.mark.parametrize(
    ("config", "run"),
    [
        (SHORT, Measured("")),
        (
            Config(checkpoints=CheckpointOptions(timeout=0.5)),
            Measured("", nbytes=1 << 30),
        ),  # of an unknown disk
    ],
)
def test_timeouts_are_judged_by_nothing_where_nothing_was_measured(config: Config, run: Measured) -> None:
    assert [one.ok for one in policy.timeouts(config, run, 0.0, 0.0)] == [True]


@pytest.mark.parametrize(
    ("config", "grace", "named"),
    [
        (Config(), 1.0, "workers_stop_timeout.*15.* 1 "),
        (Config(), 14.0, "workers_stop_timeout.*15.* 14 "),
        (Config(), 15.0, ""),
        (Config(), 0.0, ""),  # not known
        (LONG, 19.0, r"preemption\.preempt_time.*20.* 19 "),
    ],
)
def test_a_job_that_the_scheduler_kills_before_its_end_is_warned_of(
    config: Config, grace: float, named: str
) -> None:
    (one,) = policy.timeouts(config, Measured(""), 0.0, grace)
    assert (one.ok, one.fails) == (not named, False)
    assert re.search(named, one.found)


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
    one = policy.saving(config, Measured("", step=step, interval=9.0, nbytes=RUN.nbytes), RATE)
    assert (one.check, one.ok, one.fails) == ("saving", ok, False)
    assert re.search(r"954 MiB.*10 s.*95\.4 MiB/s", one.found)
    assert f" {between} s" in one.expected


@pytest.mark.parametrize(
    ("run", "rate"),
    [
        (Measured("", interval=9.0), RATE),
        (Measured("", nbytes=1), RATE),
        (Measured("", nbytes=1, interval=9.0), 0.0),
    ],
)
def test_saves_are_judged_by_nothing_where_nothing_was_measured(run: Measured, rate: float) -> None:
    assert policy.saving(Config(), run, rate).ok


def test_what_is_measured_of_a_run_does_not_count_restarts_as_steps() -> None:
    records: list[Record] = [
        RunStarted(0.0, 10.0, 1, "r", "n", 1, "boot", ("train.py",), 4, "reason"),
        FirstStep(0.0, 15.0, 1, 1, {}),
        Progress(0.0, 20.0, 1, 6),
        Note(0.0, 20.5, 1, "nothing of steps"),
        Saved(0.0, 21.0, 1, 6, "a", 100, 0.5, "due"),
        Saved(0.0, 31.0, 1, 11, "b", 300, 0.2, "due"),
        FaultSeen(0.0, 40.0, 1, "crash", "n", 0, 12, 39.0, "reason", "signature"),
        FirstStep(0.0, 100.0, 2, 12, {}),
        Progress(0.0, 101.0, 2, 13),
        Saved(0.0, 102.0, 2, 13, "c", 200, 0.1, "due"),
    ]
    assert policy.measured("here", records) == Measured("here", 5.0, 11.0 / 5, 0.5, 10.0, 300, 60.0)
    assert policy.measured("here", records[:1]) == Measured("here")
