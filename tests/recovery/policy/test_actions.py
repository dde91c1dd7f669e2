"""The course of each fault: what is tried in which order, and why a move was passed over."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.actions import (
    COURSES,
    OOM_KILL,
    Move,
    course_of,
    evidence_of,
    speaks_against_state,
    where,
)
from outlast.recovery.policy.escalation import Capabilities, Escalation
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction, StateSource
from tests.recovery.policy.test_escalation import (
    BARE,
    NEWEST,
    OLD,
    ONCE,
    RESTART,
    RESTART_OLDER,
    RICH,
    STOP,
    TWICE,
    fault,
    summary,
)

ALL = Capabilities(older_exists=True, ranks_can_reenter=True, spare=True, fewer=True)
IN_PROCESS = (RecoveryAction.RESTART_IN_PROCESS, NEWEST)
REPLACE, SHRINK = (RecoveryAction.REPLACE_NODE, NEWEST), (RecoveryAction.SHRINK, NEWEST)


def test_the_ladder_knows_every_kind_of_fault() -> None:
    assert set(COURSES) == set(FaultKind)
    assert ONCE | TWICE | {FaultKind.LOST, FaultKind.REFUSED, FaultKind.FAILING} == set(FaultKind)


def test_a_restart_in_process_that_fails_can_be_answered_with_new_workers() -> None:
    for course in COURSES.values():
        for move, following in itertools.pairwise(course):
            if move.kind is RecoveryAction.RESTART_IN_PROCESS:
                assert following == Move(RecoveryAction.RESTART_IN_JOB)
        assert not course or course[-1].kind is not RecoveryAction.RESTART_IN_PROCESS


def with_all(means: Capabilities, *kinds: FaultKind, signature: str = "RuntimeError: boom") -> list[object]:
    """Return the answers to the same fault at the same step, until the end."""
    found: list[object] = []
    for kind in kinds:
        escalation = Escalation(RICH)
        while STOP not in found:
            found.append(summary(escalation.answer(fault(kind, signature), means, 0.0)))
    return found


@pytest.mark.parametrize(
    ("kind", "signature", "course"),
    [
        (FaultKind.ERROR, "E: x", [IN_PROCESS, RESTART, RESTART_OLDER, REPLACE, STOP]),
        (FaultKind.CRASH, "signal 9", [IN_PROCESS, RESTART, RESTART_OLDER, REPLACE, STOP]),
        (FaultKind.HANG, "hang in x", [IN_PROCESS, RESTART, RESTART_OLDER, REPLACE, STOP]),
        (FaultKind.CORRUPT, "digest", [RESTART, RESTART_OLDER, REPLACE, STOP]),
        (FaultKind.NON_FINITE, "nan", [IN_PROCESS, RESTART, RESTART_OLDER, REPLACE, STOP]),
    ],
)
def test_with_every_means_the_same_fault_climbs_the_ladder(
    kind: FaultKind, signature: str, course: list[object]
) -> None:
    assert with_all(ALL, kind, signature=signature) == course


def test_without_a_spare_the_job_shrinks_where_a_node_may_be_the_cause() -> None:
    fewer = replace(ALL, spare=False, ranks_can_reenter=False)
    assert with_all(fewer, FaultKind.NON_FINITE) == [RESTART, RESTART_OLDER, SHRINK, STOP]
    assert with_all(fewer, FaultKind.CRASH) == [RESTART, RESTART, RESTART_OLDER, SHRINK, STOP]
    assert with_all(fewer, FaultKind.ERROR) == [RESTART, RESTART_OLDER, STOP]
    assert with_all(BARE, FaultKind.LOST) == [RESTART, RESTART, STOP]


@pytest.mark.parametrize("number", [4, 5, 6, 7, 8, 11, 31])
def test_a_signal_that_nobody_sends_is_evidence_the_first_time(number: int) -> None:
    assert with_all(OLD, FaultKind.CRASH, signature=f"signal {number}") == [RESTART, RESTART_OLDER, STOP]
    assert with_all(OLD, FaultKind.CRASH, signature="signal 9") == [RESTART, RESTART, RESTART_OLDER, STOP]


def test_a_action_that_is_spent_is_passed_over_and_the_reason_says_so() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts=1))
    first = escalation.answer(fault(step=1), ALL, 0.0)
    assert (first.kind, first.passed) == (RecoveryAction.RESTART_IN_PROCESS, ())
    assert first.reason == "restart in process 1 of 1 without progress, 1 of 20 today"
    two_nodes = replace(ALL, spare=False, fewer=False)
    second = escalation.answer(fault(step=2), two_nodes, 0.0)
    assert second.kind is RecoveryAction.RESTART_IN_JOB
    spent = "1 of 1 restarts in process without progress used (--max-restarts)"
    assert second.passed == (f"restart-in-process: {spent}",)
    third = escalation.answer(fault(step=3), two_nodes, 0.0)
    assert third.kind is RecoveryAction.STOP
    assert third.reason.startswith(f"{spent}; 1 of 1 restarts without progress used (--max-restarts); last")
    escalation.committed(4)
    assert escalation.answer(fault(step=5), two_nodes, 0.0).kind is RecoveryAction.RESTART_IN_PROCESS


def test_the_reasons_why_actions_were_passed_over() -> None:
    none = Capabilities(ranks_can_reenter=False, spare=False)
    escalation = Escalation(RICH)
    assert escalation.answer(fault(), none, 0.0).passed == (
        "restart-in-process: the living ranks cannot restart in process",
    )
    end = escalation.answer(fault(), none, 0.0)
    assert (end.kind, end.passed) == (
        RecoveryAction.STOP,
        ("loading an older checkpoint: there is none", "replace-node: no spare node"),
    )
    lost = escalation.answer(fault(FaultKind.LOST), none, 0.0)
    assert (lost.kind, lost.passed) == (
        RecoveryAction.RESTART_IN_JOB,
        ("replace-node: no spare node", "shrink: the job needs all of its nodes"),
    )
    elsewhere = replace(fault(FaultKind.LOST, "n2"), node="n2")
    lost = escalation.answer(elsewhere, replace(none, fewer=True), 0.0)
    assert (lost.kind, lost.passed) == (
        RecoveryAction.SHRINK,
        ("replace-node: no spare node",),
    )
    spare = Capabilities(spare=True)
    escalation = Escalation(FaultToleranceOptions(max_restarts=1))
    replaced = escalation.answer(fault(FaultKind.LOST, "n1"), spare, 0.0)
    assert (replaced.reason, replaced.passed) == ("replacement 1 of 1 without progress, 1 of 20 today", ())
    end = escalation.answer(fault(FaultKind.LOST, "n2"), spare, 0.0)
    assert (end.kind, end.reason) == (
        RecoveryAction.STOP,
        "1 of 1 replacements without progress used (--max-restarts); "
        "last faults: lost (n1) at step 7, lost (n2) at step 7",
    )


def test_a_chance_that_is_not_given_is_not_spoken_of() -> None:
    escalation = Escalation(RICH)
    found = [escalation.answer(fault(FaultKind.CRASH, "signal 9"), ALL, 0.0) for _ in range(3)]
    assert [summary(one) for one in found] == [IN_PROCESS, RESTART, RESTART_OLDER]
    assert [(one.passed, one.exit_code) for one in found] == [((), 0)] * 3


def test_what_is_out_of_the_question_is_not_spoken_of() -> None:
    escalation = Escalation(RICH)
    assert [escalation.answer(fault(), BARE, 0.0).passed for _ in range(2)] == [
        (),
        ("loading an older checkpoint: there is none",),
    ]


@pytest.mark.parametrize(
    ("kind", "texts", "same"),
    [
        (FaultKind.NON_FINITE, ("loss of rank 1 is nan", "loss of rank 12 is nan"), True),
        (FaultKind.NON_FINITE, ("loss is nan", "loss is inf"), False),
        (FaultKind.CORRUPT, ("digest 0a1b2c3d and 99887766", "digest 12345678 and 0a1b2c3e"), True),
        (FaultKind.CORRUPT, ("digests differ on rank 1", "digests differ on rank 2"), False),
        (FaultKind.ERROR, ("E: port 25500", "E: port 8083"), True),
        (FaultKind.ERROR, ("E: index 125", "E: index 126"), False),
        (FaultKind.HANG, ("hang in step 1000", "hang in step 2000"), False),
    ],
)
def test_what_varies_between_two_faults_of_one_cause(
    kind: FaultKind, texts: tuple[str, str], same: bool
) -> None:
    first, second = (evidence_of(fault(kind, text)) for text in texts)
    assert (first == second) is same


@pytest.mark.parametrize(
    ("one", "tried", "repeats", "speaks"),
    [
        (fault(FaultKind.NON_FINITE), 0, 0, True),
        (fault(FaultKind.CORRUPT), 0, 0, True),
        (fault(), 1, 1, False),  # a plain restart is left
        (fault(), 2, 1, True),
        (fault(FaultKind.CRASH, "signal 9"), 2, 1, False),
        (fault(FaultKind.CRASH, "signal 9"), 2, 2, True),  # another chance would not be given
        (fault(FaultKind.CRASH, "signal 9"), 3, 1, True),
        (replace(fault(), counted=True), 9, 9, False),
        (fault(FaultKind.LOST), 9, 9, False),
        (replace(fault(), evidence=(OOM_KILL,)), 9, 9, False),
    ],
)
def test_a_fault_speaks_against_the_checkpoint_when_every_plain_restart_was_made(
    one: Fault, tried: int, repeats: int, speaks: bool
) -> None:
    assert speaks_against_state(one, tried, repeats) is speaks


@pytest.mark.parametrize(
    ("step", "counted", "words"),
    [
        (-1, True, "before an optimizer step was seen"),
        (0, True, "before an optimizer step was seen"),
        (1, True, "after 1 optimizer steps of its process"),
        (-1, False, "before the first step"),
        (0, False, "at step 0"),
    ],
)
def test_where_a_fault_happened(step: int, counted: bool, words: str) -> None:
    assert where(replace(fault(step=step), counted=counted)) == words


# What is written about it

ROWS = (
    ("an exception, an exit status", fault(FaultKind.ERROR)),
    ("a signal that somebody may send", fault(FaultKind.CRASH, "signal 9")),
    ("a signal of its own (SIGSEGV, SIGABRT, SIGBUS and the like)", fault(FaultKind.CRASH, "signal 11")),
    ("a hang", fault(FaultKind.HANG)),
    ("a number that is not finite", fault(FaultKind.NON_FINITE)),
    ("replicas that differ: ranks that should hold the same bytes do not", fault(FaultKind.CORRUPT)),
    ("a lost node", fault(FaultKind.LOST)),
    ("a failing node, if a spare waits", fault(FaultKind.FAILING)),
    ("memory that ran out", replace(fault(FaultKind.CRASH), evidence=(OOM_KILL,))),
    ("a refusal, an error in the program itself", fault(FaultKind.REFUSED)),
)
COLUMNS = (
    Move(RecoveryAction.RESTART_IN_PROCESS),
    Move(RecoveryAction.RESTART_IN_JOB),
    Move(RecoveryAction.RESTART_IN_JOB, StateSource.OLDER),
    Move(RecoveryAction.REPLACE_NODE),
    Move(RecoveryAction.SHRINK),
)


def test_the_table_in_the_documents_is_the_source() -> None:
    lines = []
    for words, one in ROWS:
        places: dict[Move, list[str]] = {move: [] for move in COLUMNS}
        for place, move in enumerate(course_of(one), 1):
            places[replace(move, chance=False)].append(f"({place})" if move.chance else str(place))
        lines.append(f"| {words} | {' | '.join(', '.join(places[move]) for move in COLUMNS)} |")
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "fault-model.md").read_text()
    _, _, after = text.partition("compares this table with the source -->\n\n")
    found = [line for line in after.partition("\n\n")[0].splitlines()[2:]]
    assert found == lines, "\n".join(["the table should be:", *lines])
