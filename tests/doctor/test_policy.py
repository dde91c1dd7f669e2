"""Each judgement of the doctor, from planted measurements."""

from __future__ import annotations

import pytest

from outlast.doctor import policy
from outlast.doctor.policy import WRITE_LEAST, Diagnosis
from outlast.health.policy.preflight import Check, Finding, Level

HEALTHY = [
    policy.rename("/run", "", ()),
    policy.lock("/run", True, ""),
    policy.writing("/run", WRITE_LEAST, ""),
    policy.launchers("/run", "", True),
    policy.tracing(-1, is_root=False),
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
    (policy.writing("/run", WRITE_LEAST * 0.99, ""), "/run: 47.2 MiB/s", Level.WARNING),
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


@pytest.mark.parametrize("check", Check)
def test_every_check_of_a_preflight_has_a_cure(check: Check) -> None:
    assert policy.cured(Finding(check, False, "found", "expected")).cure
    assert policy.cured(Finding(check, True, "found", "expected")).cure == ""
