"""Each judgement of the doctor, from planted measurements."""

from __future__ import annotations

import pytest

from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis
from outlast.health.policy.preflight import Check, Finding, Level
from outlast.recovery.policy.events import FaultSeen, FirstStep, Note, Progress, Record, RunStarted, Saved
from tests.source_tree import ROOT

HEALTHY = [
    policy.rename("/run", "", ()),
    policy.lock("/run", True, ""),
    policy.writing("/run", 50e6, ""),
    policy.launchers("/run", "", True),
    policy.tracing(-1, is_root=False),
    policy.tracing(0, is_root=False),
    policy.tracing(1, is_root=False),
    policy.tracing(2, is_root=True),
    *policy.variables((), {}, {"NCCL_DEBUG": "WARN", "CUDA_LAUNCH_BLOCKING": "0"}),
    policy.script("train.py", ""),
]
PLANTED = [
    (policy.rename("/run", "Read-only file system", ()), "Read-only file system", Level.ERROR),
    (policy.rename("/run", "", ["17 bytes of a mixture"]), "saw 17 bytes of a mixture", Level.ERROR),
    (policy.lock("/run", False, ""), "two holders", Level.ERROR),
    (policy.lock("/run", True, "No locks available"), "No locks available", Level.ERROR),
    (policy.writing("/run", 49.9e6, ""), "/run: 47.6 MiB/s", Level.WARNING),
    (policy.writing("/run", 0.0, "No space left on device"), "No space left on device", Level.ERROR),
    (policy.launchers("/run", "4711", True), "pid 4711", Level.ERROR),
    (policy.launchers("/run", "4711", False), "pid 4711", Level.WARNING),
    (policy.tracing(2, is_root=False), "ptrace_scope is 2", Level.WARNING),
    (policy.tracing(3, is_root=True), "ptrace_scope is 3", Level.WARNING),
    (policy.variables(["OUTLAST_X: nothing reads it"], {}, {})[0], "OUTLAST_X", Level.WARNING),
    (policy.variables((), {"NCCL_DEUBG": "NCCL_DEBUG"}, {})[0], "NCCL_DEBUG is meant", Level.WARNING),
    (policy.variables((), {}, {"TORCH_DISTRIBUTED_DEBUG": "detail"})[0], "checked by another", Level.WARNING),
    (policy.script("train.py", "line 3: invalid syntax"), "line 3", Level.ERROR),
    (policy.no_answer("lock", 60.0), "no answer within 60 s", Level.ERROR),
]


@pytest.mark.parametrize("one", HEALTHY, ids=lambda one: one.check)
def test_a_healthy_machine_needs_no_cure(one: Diagnosis) -> None:
    assert (one.ok, one.cure) == (True, "")


@pytest.mark.parametrize(("one", "said", "level"), PLANTED, ids=lambda one: getattr(one, "check", None))
def test_a_planted_fault_is_named_with_its_cure(one: Diagnosis, said: str, level: Level) -> None:
    assert said in one.found
    assert (one.ok, one.level, one.fails) == (False, level, level is Level.ERROR)
    assert one.expected
    assert one.cure


def test_a_diagnosis_is_printed_with_all_that_it_says() -> None:
    assert policy.tracing(3, is_root=True).to_json() == {
        "check": "ptrace",
        "ok": False,
        "found": "kernel.yama.ptrace_scope is 3",
        "expected": "at most 1; else py-spy reads no stack of a rank that hangs in C code",
        "cure": policy.CURES["ptrace"],
        "level": "warning",
    }


def test_a_healthy_machine_is_described() -> None:
    assert [one.found for one in HEALTHY] == [
        "/run: a file is replaced at once",
        "/run: a lock keeps others out",
        "/run: 47.7 MiB/s",
        "/run: not in use",
        "no restriction",
        "kernel.yama.ptrace_scope is 0",
        "kernel.yama.ptrace_scope is 1",
        "kernel.yama.ptrace_scope is 2",
        "no variable is misspelt or costly",
        "train.py: compiles",
    ]


def test_the_reference_has_each_check_with_its_cure() -> None:
    pages = [(ROOT / "docs/reference" / name).read_text() for name in ("commands.md", "preflight.md")]
    rows = [line for page in pages for line in page.split("\n") if line.startswith("| `")]
    lacking = [
        name
        for name, cure in policy.CURES.items()
        if not any(f"`{name}`" in row and cure in row for row in rows)
    ]
    assert lacking == []


@pytest.mark.parametrize("check", Check)
def test_every_check_of_a_preflight_has_a_cure(check: Check) -> None:
    assert policy.cured(Finding(check, False, "found", "expected")).cure
    assert policy.cured(Finding(check, True, "found", "expected")).cure == ""


def launched(clock: float) -> Record:
    return RunStarted(0.0, clock, 1, "r", "n", 1, "boot", ("train.py",), 4, "reason")


def test_what_is_measured_of_a_run_does_not_count_restarts_as_steps() -> None:
    records = [
        launched(10.0),
        FirstStep(0.0, 15.0, 1, 1, {}),
        Progress(0.0, 20.0, 1, 6),
        Note(0.0, 20.5, 1, "says nothing of steps"),
        Saved(0.0, 21.0, 1, 6, "a", 100, 0.5, "due"),
        Saved(0.0, 31.0, 1, 11, "b", 300, 0.2, "due"),
        FaultSeen(0.0, 40.0, 1, "crash", "n", 0, 12, 39.0, "reason", "signature"),
        FirstStep(0.0, 100.0, 2, 12, {}),
        Progress(0.0, 101.0, 2, 13),
        Saved(0.0, 102.0, 2, 13, "c", 200, 0.1, "due"),
    ]
    found = policy.measured("here", records)
    assert found == policy.Measured("here", 5.0, 11.0 / 5, 0.5, 10.0, 300, 60.0)
    assert policy.measured("here", records[:1]) == policy.Measured("here")
