"""Which node keeps failing, and what is done about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.actions import OOM_KILL
from outlast.recovery.policy.escalation import Capabilities, Escalation
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.fault_history import DAY, ENOUGH, Met, against, is_own
from outlast.recovery.policy.job import JobDecider, SpareCapacity
from tests.recovery.policy.test_escalation import RICH

SPARE, FEWER, NEITHER = (
    Capabilities(spare=True),
    Capabilities(spare=False, fewer=True),
    Capabilities(spare=False),
)


def struck(step: int, node: str = "n1", kind: FaultKind = FaultKind.CRASH) -> Fault:
    return Fault(kind, node, step % 2, 1, step, "rank 4 failed", "signal 9")


def met(*faults: Fault, now: float = 0.0) -> list[Met]:
    return [Met.of(fault, now, is_own(fault)) for fault in faults]


def test_three_faults_of_its_own_make_a_node_bad() -> None:
    assert (ENOUGH, DAY) == (3, 24 * 3600)
    assert against("n1", met(struck(1), struck(2)), 0.0) == ""
    three = met(struck(1), struck(2), struck(3))
    assert against("n1", three, 0.0) == "n1 caused 3 faults in 24 h"
    assert against("n2", three, 0.0) == ""


def test_the_same_fault_at_the_same_step_counts_once_unless_the_node_is_lost() -> None:
    assert not against("n1", met(struck(1), struck(1), struck(1), struck(2)), 0.0)
    lost = struck(-1, kind=FaultKind.LOST)
    assert against("n1", met(lost, lost, lost), 0.0)
    assert against("n1", met(*[replace(lost, rank=-1)] * 3), 0.0)


def test_faults_of_which_no_step_is_known_are_never_the_same() -> None:
    assert against("n1", met(*[replace(struck(1), counted=True)] * 3), 0.0)


def test_the_same_fault_on_another_node_is_another_strike() -> None:
    assert against("n1", met(struck(1, "n2"), struck(1), struck(2), struck(3)), 0.0)


@pytest.mark.parametrize("others", [3, 4])
def test_where_others_fail_as_often_no_node_is_bad(others: int) -> None:
    program = [struck(step, f"n{step + 5}") for step in range(others)]
    three = [struck(1), struck(2), struck(3), *program]
    assert not against("n1", met(*three), 0.0)
    assert bool(against("n1", met(*three, struck(4)), 0.0)) is (others == 3)


@pytest.mark.parametrize(
    "fault",
    [
        replace(struck(9), rank=-1),
        replace(struck(9), evidence=(OOM_KILL,)),
        replace(struck(9, kind=FaultKind.ERROR), signature="RuntimeError: Connection closed by peer"),
    ],
)
def test_what_is_not_a_nodes_own(fault: Fault) -> None:
    assert not against("n1", met(struck(1), struck(2), fault), 0.0)


def test_a_day_wipes_them_out() -> None:
    three = [*met(struck(1)), *met(struck(2), now=DAY - 1.0), *met(struck(3), now=DAY)]
    assert not against("n1", three, DAY)
    assert against("n1", three, DAY - 1.0)


def test_a_clock_that_was_set_back_keeps_no_strike_for_ever() -> None:
    escalation = Escalation(RICH)
    for step in (1, 2):
        escalation.answer(struck(step), SPARE, 365 * DAY)
    escalation.answer(struck(3, "n2"), SPARE, 0.0)
    assert escalation.answer(struck(4), SPARE, DAY).exclude == ""


# What is done


def answers(
    means: Capabilities, *steps: int, config: FaultToleranceOptions = RICH
) -> list[tuple[RecoveryAction, str]]:
    escalation = Escalation(config)
    found = [escalation.answer(struck(step), means, 0.0) for step in steps]
    return [(one.kind, one.exclude) for one in found]


def test_a_bad_node_is_replaced_or_done_without() -> None:
    plain = (RecoveryAction.RESTART_IN_JOB, "")
    assert answers(SPARE, 1, 2, 3) == [plain, plain, (RecoveryAction.REPLACE_NODE, "n1")]
    assert answers(FEWER, 1, 2, 3) == [plain, plain, (RecoveryAction.SHRINK, "n1")]
    assert answers(NEITHER, 1, 2, 3, 4) == [plain] * 4
    assert answers(Capabilities(), 1, 2, 3, 4) == [plain] * 4


def test_the_reason_says_what_speaks_against_it() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts=5))
    found = [escalation.answer(struck(step), SPARE, 0.0) for step in (1, 2, 3)]
    assert found[-1].reason == (
        "replacement 1 of 5 without progress, 1 of 20 today; n1 caused 3 faults in 24 h"
    )
    assert found[-1].repeats == 0


def test_a_budget_that_is_spent_keeps_the_node() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts=3))
    for step in (1, 2, 3):
        assert escalation.answer(struck(step, f"n{step}", FaultKind.LOST), SPARE, 0.0).exclude == ""
    for step in range(1, 5):
        last = escalation.answer(struck(step, "n9"), SPARE, 0.0)
    assert (last.kind, last.exclude) == (RecoveryAction.STOP, "")


def test_a_node_that_is_lost_once_more_is_not_taken_in_again() -> None:
    escalation = Escalation(RICH)
    lost = [escalation.answer(struck(step, kind=FaultKind.LOST), FEWER, 0.0) for step in (7, 7, 9)]
    assert [(one.kind, one.exclude) for one in lost] == [
        (RecoveryAction.SHRINK, ""),
        (RecoveryAction.SHRINK, ""),
        (RecoveryAction.SHRINK, "n1"),
    ]


def test_a_node_on_which_the_same_step_keeps_failing_is_exchanged() -> None:
    escalation = Escalation(RICH)
    error = replace(struck(7), kind=FaultKind.ERROR)
    first, second = (escalation.answer(error, SPARE, 0.0) for _ in range(2))
    assert (first.kind, second.kind, second.exclude) == (
        RecoveryAction.RESTART_IN_JOB,
        RecoveryAction.REPLACE_NODE,
        "n1",
    )


def test_the_next_launcher_knows_the_strikes() -> None:
    first, second = JobDecider(RICH, 2), JobDecider(RICH, 2)
    for step in (1, 2):
        first.handle(
            replace(struck(step), generation=first.generation), 0.0, SpareCapacity(spare=True, fewer=True)
        )
    second.restore(json.loads(json.dumps(first.state())))
    third = replace(struck(3), generation=second.generation)
    (action,) = second.handle(third, 1.0, SpareCapacity(spare=False, fewer=True))
    assert (action.kind, action.exclude) == (RecoveryAction.SHRINK, "n1")
    assert action.reason.endswith("; n1 caused 3 faults in 24 h; n1 is excluded from the job")
