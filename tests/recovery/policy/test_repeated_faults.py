"""What is said of a job that goes round in circles, and when it is told from bad luck."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.actions import OOM_KILL, out_of_memory
from outlast.recovery.policy.escalation import Answer, Capabilities, Escalation
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction, StateSource
from outlast.recovery.policy.fault_history import Met, clear_suspicion
from tests.recovery.policy.test_escalation import BARE, OLD, RICH, after_load, fault

ALL = Capabilities(older_exists=True, ranks_can_reenter=True, spare=True, fewer=True)


def until_the_end(escalation: Escalation, one: Fault, means: Capabilities) -> Answer:
    """Return the last answer to a fault that comes again and again."""
    loaded = 6
    while True:
        answer = escalation.answer(one, after_load(loaded, means), 0.0)
        if answer.kind is RecoveryAction.STOP:
            return answer
        loaded -= answer.state is StateSource.OLDER


# The same fault at the same step


@pytest.mark.parametrize(
    ("one", "means", "reason"),
    [
        (
            fault(),
            OLD,
            "the same fault occurred 3 times at step 7, from every checkpoint that was tried: the cause is"
            " the data of this step, the program or the machine, not the checkpoint",
        ),
        (
            fault(),
            ALL,
            "the same fault occurred 5 times at step 7, from every checkpoint that was tried and on"
            " other nodes: the cause is the data of this step or the program, not the checkpoint",
        ),
        (
            fault(FaultKind.NON_FINITE),
            OLD,
            "the same fault occurred 3 times at step 7, from every checkpoint that was tried: the cause is"
            " the data of this step, the program or the machine, or all of these checkpoints are bad",
        ),
        (
            fault(step=0),
            OLD,
            "the same fault occurred 3 times at step 0, from every checkpoint that was tried: the cause is"
            " the data of this step, the program or the machine, not the checkpoint",
        ),
        (
            fault(step=0),
            BARE,
            "the same fault occurred twice at step 0: the cause is the program, the data or the"
            " machine; a restart will not help",
        ),
        (
            fault(),
            Capabilities(spare=True),
            "the same fault occurred 3 times at step 7 and on other nodes: the cause is the program,"
            " the data or the machine; a restart will not help",
        ),
        (
            fault(step=-1),
            OLD,
            "the same fault occurred 3 times before the first step: the start-up fails; check the program "
            "and its environment",
        ),
        (
            fault(FaultKind.LOST, "n1 is lost"),
            BARE,
            "the same fault occurred 3 times at step 7, and no other node can replace it",
        ),
    ],
)
def test_a_course_that_is_used_up_ends_with_a_diagnosis(one: Fault, means: Capabilities, reason: str) -> None:
    answer = until_the_end(Escalation(RICH), one, means)
    assert (answer.reason, answer.exit_code) == (reason, 93)


def test_a_fault_after_the_end_of_a_complete_run_says_nothing_about_its_checkpoints() -> None:
    escalation = Escalation(RICH)
    done = after_load(100, replace(OLD, complete=True))
    first, end = (escalation.answer(fault(step=100), done, 0.0) for _ in range(2))
    assert (first.kind, first.state) == (RecoveryAction.RESTART_IN_JOB, StateSource.NEWEST)
    assert (end.kind, end.exit_code) == (RecoveryAction.STOP, 93)
    assert end.reason.startswith("the run was complete, and the same fault came back without a step: ")
    assert end.passed == ("loading an older checkpoint: not needed, since the run was complete",)
    assert not end.speaks


def test_a_number_that_is_not_finite_speaks_against_a_complete_run_too() -> None:
    escalation = Escalation(RICH)
    done = after_load(100, replace(OLD, complete=True))
    bad = fault(FaultKind.NON_FINITE, step=100)
    first, second = (escalation.answer(bad, done, 0.0) for _ in range(2))
    assert (first.speaks, second.speaks, second.state) == (True, True, StateSource.OLDER)


# Memory


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "device"),
        ("torch.cuda.OutOfMemoryError: x", "device"),
        ("RuntimeError: CUDA out of memory", "device"),
        ("torch.OutOfMemoryError: HIP out of memory", "device"),
        ("MemoryError: ", "host"),
        ("OSError: [Errno 12] Cannot allocate memory", "host"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "host"),
        ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ", "host"),
        ("RuntimeError: boom", ""),
    ],
)
def test_an_error_that_says_that_memory_ran_out(text: str, memory: str) -> None:
    assert out_of_memory(fault(signature=text)) == memory
    assert out_of_memory(fault(FaultKind.HANG, text)) == ""


def test_a_kill_for_want_of_memory_is_told_by_the_kernel_or_by_a_shell() -> None:
    killed = fault(FaultKind.CRASH, "signal 9")
    assert not out_of_memory(killed)
    assert out_of_memory(replace(killed, evidence=(("stacks", "x"), OOM_KILL))) == "host"
    assert out_of_memory(replace(fault(signature="exit 137"), exit_code=137)) == "host"
    assert not out_of_memory(replace(fault(signature="exit 136"), exit_code=136))


def full(step: int, size: int = 2) -> Fault:
    return fault(signature=f"torch.OutOfMemoryError: CUDA out of memory. Tried {size} GiB", step=step)


def test_memory_that_runs_out_twice_without_progress_ends_the_job_and_says_what_to_change() -> None:
    escalation = Escalation(RICH)
    assert escalation.answer(full(7), ALL, 0.0).kind is RecoveryAction.RESTART_IN_JOB, (
        "no memory is freed in the process"
    )
    end = escalation.answer(full(9, size=3), ALL, 0.0)
    assert (end.kind, end.exit_code) == (RecoveryAction.STOP, 93)
    assert end.reason.startswith("out of device memory twice without progress; try: a smaller")
    killed = replace(fault(FaultKind.CRASH, "signal 9"), evidence=(OOM_KILL,))
    assert "try: fewer or smaller DataLoader workers" in until_the_end(escalation, killed, ALL).reason


def test_memory_that_runs_out_without_a_known_step_is_left_to_the_budgets() -> None:
    escalation = Escalation(RICH)
    unknown = replace(full(7), counted=True)
    for one in (full(7), unknown, unknown):
        assert escalation.answer(one, ALL, 0.0).kind is RecoveryAction.RESTART_IN_JOB
    assert escalation.answer(full(7), ALL, 0.0).kind is RecoveryAction.STOP, "twice with a known one"


def test_progress_in_between_makes_it_a_matter_of_luck_and_of_the_budgets() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts_per_day=5))
    for step in range(5):
        assert escalation.answer(full(step), ALL, 0.0).kind is RecoveryAction.RESTART_IN_JOB
        escalation.committed(step)
    assert escalation.answer(full(9), ALL, 0.0).reason.startswith("5 of 5 restarts in 24 h used")


def test_progress_clears_nothing_else() -> None:
    escalation = Escalation(RICH)
    escalation.answer(fault(), OLD, 0.0)
    escalation.committed(3)
    assert escalation.answer(fault(), OLD, 0.0).repeats == 1


# A budget that is spent


def spent(*faults: Fault, newest: int = -1) -> Answer:
    escalation = Escalation(FaultToleranceOptions(max_restarts=len(faults) - 1))
    if newest >= 0:
        escalation.committed(newest)
    answers = [escalation.answer(one, BARE, 0.0) for one in faults]
    assert [one.kind for one in answers[:-1]] == [RecoveryAction.RESTART_IN_JOB] * (len(faults) - 1)
    assert answers[-1].kind is RecoveryAction.STOP
    return answers[-1]


@pytest.mark.parametrize("step", [0, 50])
def test_one_step_that_fails_of_three_causes_is_no_bad_luck(step: int) -> None:
    end = spent(*(fault(signature=f"{letter}Error: x", step=step) for letter in "ABC"))
    assert end.reason.endswith(
        f"; all 3 faults occurred at step {step}: check the data of this step and the program"
    )
    assert end.exit_code == 93


@pytest.mark.parametrize(
    "faults",
    [
        [fault(signature=f"{letter}Error: x", step=50) for letter in "AB"],
        [fault(signature=f"{letter}Error: x", step=50 + (letter == "B")) for letter in "ABC"],
        [fault(signature=f"{letter}Error: x", step=-1) for letter in "ABC"],
        [fault(FaultKind.LOST, f"{letter} is lost", step=50) for letter in "ABC"],
    ],
)
def test_what_is_not_enough_to_blame_the_step(faults: list[Fault]) -> None:
    end = spent(*faults, newest=40)
    assert "; last faults: " in end.reason
    assert end.exit_code == 1


def test_a_job_that_never_did_a_step_fails_to_start() -> None:
    faults = [fault(signature=f"{letter}Error: x", step=-1) for letter in "AB"]
    assert spent(*faults).reason.endswith(
        "; no step was completed: the start-up fails; last fault: error (BError: x) before the first step"
    )


@pytest.mark.parametrize(("step", "newest"), [(-1, 0), (0, -1)])
def test_a_job_that_did_a_step_or_has_a_checkpoint_does_not_fail_to_start(step: int, newest: int) -> None:
    faults = [fault(signature=f"{letter}Error: x", step=step) for letter in "AB"]
    assert "; last faults: error (AError: x)" in spent(*faults, newest=newest).reason


def test_what_clears_checkpoints_of_suspicion() -> None:
    escalation = Escalation(RICH)
    assert until_the_end(escalation, fault(step=0), OLD).clear_suspicion
    assert not until_the_end(escalation, fault(step=-1), OLD).clear_suspicion
    assert not until_the_end(escalation, fault(step=5), BARE).clear_suspicion
    for kind in (FaultKind.NON_FINITE, FaultKind.CORRUPT):
        assert not until_the_end(escalation, fault(kind), OLD).clear_suspicion


def places(*copies: str) -> tuple[str, ...]:
    """Return the places of copies such as "local 20": tier and step."""
    return tuple(f"{tier}/step-{int(step):09d}.g1" for tier, step in map(str.split, copies))


@pytest.mark.parametrize(
    ("loaded", "older"),
    [
        ([places("local 20")], False),
        ([places("local 20"), places("local 10")], True),
        ([places("local 20"), places("local 20")], False),
        ([places("local 20"), places("local 24")], False),
        ([places("local 10"), places("local 20"), places("local 10")], True),
        ([places("memory 20"), places("local 20")], False),  # the same bytes
        ([places("local 20"), places("memory 20")], False),
        ([places("local 20"), places("durable 20")], True),
        ([places("durable 20"), places("memory 20", "local 20")], True),
        ([places("local 20", "durable 20"), places("durable 20")], False),
        ([places("durable 20"), places("local 24")], False),
        ([places("local 20"), places("local 24", "local 10")], True),
        ([(), places("local 20"), ()], False),
        ([places("local 20"), (), places("local 10")], True),
        ([places("local 20"), places("local 10"), ()], True),
        ([places("local 0"), ("local/a folder of another name",)], True),
        ([("local/a folder of another name",), places("local 0")], False),
    ],
)
def test_a_fault_that_came_from_an_older_state_or_other_bytes_clears_them(
    loaded: list[tuple[str, ...]], older: bool
) -> None:
    *earlier, last = loaded
    met = [Met.of(fault(), 0.0, loaded=one) for one in earlier]
    assert clear_suspicion(fault(), met, last) is older


def test_only_the_last_faults_are_told_and_each_of_them_once() -> None:
    faults = [fault(FaultKind.CRASH, "signal 9", step) for step in (1, 2, 3, 4)]
    assert spent(*faults).reason.endswith(
        "; last faults: crash (signal 9) at step 2, crash (signal 9) at step 3, crash (signal 9) at step 4"
    )
    twice = [fault(FaultKind.CRASH, "signal 9", step) for step in (3, 3)]
    assert spent(*twice).reason.endswith("; last faults: crash (signal 9) at step 3")


def test_progress_and_time_make_new_luck_and_a_launcher_remembers() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts=1))
    escalation.answer(fault(signature="AError: x"), BARE, 0.0)
    escalation.committed(3)
    escalation.answer(fault(signature="BError: x"), BARE, 0.0)
    following = Escalation(FaultToleranceOptions(max_restarts=1))
    following.restore(json.loads(json.dumps(escalation.state())))
    assert following.answer(fault(signature="CError: x"), BARE, 0.0).reason.endswith(
        "; last faults: error (BError: x) at step 7, error (CError: x) at step 7"
    )
