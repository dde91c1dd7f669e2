"""Which node a fault is laid to, how long it may turn out to be another's, and a node that is failing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.diagnosis import GUESSED, WAITS
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.fault_history import DAY
from outlast.recovery.policy.job import JobState, SpareCapacity, is_nobodys, laid_to_its_node, waits
from tests.recovery.policy.test_job import fault, job, only

SEATS = (RankAssignment("n0", "h0:1", 0, 2), RankAssignment("n1", "h1:1", 2, 2))
SPARE, NONE = SpareCapacity(spare=True, fewer=True), SpareCapacity(spare=False, fewer=True)


def of(
    kind: FaultKind, rank: int = 1, text: str = "E: x", evidence: tuple[tuple[str, str], ...] = ()
) -> Fault:
    return replace(fault(kind=kind, text=text), rank=rank, evidence=evidence)


VICTIM = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        (of(FaultKind.ERROR, text=VICTIM), 0.3),
        (of(FaultKind.ERROR), 0.0),
        (of(FaultKind.CRASH, text=VICTIM), 0.0),
        (of(FaultKind.HANG), 0.0),
        (of(FaultKind.HANG, rank=0), 0.0),
        (of(FaultKind.HANG, rank=-1), 1.0),
        (of(FaultKind.HANG, evidence=(WAITS,)), 1.0),
        (of(FaultKind.HANG, evidence=(GUESSED,)), 0.0),
        (of(FaultKind.HANG, evidence=(WAITS, GUESSED)), 6.0),
        (of(FaultKind.HANG, rank=-1, evidence=(GUESSED,)), 6.0),
        (of(FaultKind.ERROR, rank=-1, evidence=(WAITS, GUESSED)), 0.0),
    ],
)
def test_what_may_be_the_consequence_of_another_fault_waits_for_that(one: Fault, seconds: float) -> None:
    assert waits(one, ping_timeout=5.0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("one", "node"),
    [
        (of(FaultKind.CORRUPT, rank=2), "n1"),
        (of(FaultKind.CORRUPT, rank=1), "n0"),
        (of(FaultKind.REFUSED, rank=3), "n1"),
        (of(FaultKind.HANG, rank=3, evidence=(WAITS,)), "n1"),
        (of(FaultKind.HANG, rank=3), "n7"),
        (of(FaultKind.ERROR, rank=3), "n7"),
        (of(FaultKind.ERROR, rank=3, evidence=(WAITS,)), "n7"),
        (of(FaultKind.CORRUPT, rank=-1), "n7"),
        (of(FaultKind.CORRUPT, rank=4), "n7"),
    ],
)
def test_what_any_rank_may_report_is_laid_to_the_node_of_the_rank_that_it_names(
    one: Fault, node: str
) -> None:
    told = replace(one, node="n7")
    assert laid_to_its_node(told, SEATS) == replace(one, node=node)


def test_replicas_that_differ_are_nobodys_fault_where_no_rank_is_named() -> None:
    assert is_nobodys(of(FaultKind.CORRUPT, rank=-1))
    assert not is_nobodys(of(FaultKind.CORRUPT, rank=0))
    assert not is_nobodys(of(FaultKind.HANG, rank=-1))


# A node that works, and whose health says that it will not for long

FAILING = replace(fault(kind=FaultKind.FAILING, text="n1: XID 79"), node="n1", rank=-1, reason="XID 79")


def test_a_failing_node_is_replaced_where_a_spare_is_there() -> None:
    decider = job()
    assert decider.keeps(FAILING, 0.0, SPARE) == ""
    action = only(decider.handle(FAILING, 0.0, SPARE))
    assert (action.kind, action.generation, action.exclude) == (RecoveryAction.REPLACE_NODE, 2, "n1")
    assert action.reason == (
        "replacement 1 of 1000 without progress, 1 of 1000 today; n1 is excluded from the job"
    )


@pytest.mark.parametrize("room", [NONE, None])
def test_without_a_spare_the_job_goes_on_with_a_failing_node(room: SpareCapacity | None) -> None:
    decider = job()
    before = decider.state()
    assert only(decider.handle(FAILING, 0.0, room)) == Action(
        RecoveryAction.NONE, 1, "XID 79: no spare node is there, so the job goes on with n1"
    )
    assert (decider.state(), decider.state_now) == (before, JobState.STARTING)


def test_a_failing_node_stays_when_the_budget_of_replacements_is_used() -> None:
    decider = job(FaultToleranceOptions(max_restarts=1))
    decider.handle(FAILING, 0.0, SPARE)
    kept = only(decider.handle(replace(FAILING, node="n2", generation=2), 0.0, SPARE))
    assert (kept.kind, kept.generation) == (RecoveryAction.NONE, 2)
    assert kept.reason == (
        "XID 79: 1 of 1 replacements without progress used (--max-restarts), so the job goes on with n2"
    )


def test_what_speaks_against_a_node_is_told_for_a_day() -> None:
    decider = job()
    for step, node in ((5, "n1"), (6, "n2"), (7, "n1")):
        decider.handle(replace(fault(decider.generation, step), node=node), float(step), NONE)
    told = [f"error (E: x) at step {step}" for step in (5, 7)]
    assert list(decider.signs("n1", 8.0)) == told
    assert list(decider.signs("n1", 4.9 + DAY)) == told
    assert list(decider.signs("n1", 5.0 + DAY)) == told[1:]
    assert decider.signs("n3", 8.0) == ()


def test_where_there_is_one_node_nothing_speaks_against_it() -> None:
    decider = job()
    for step in range(4):
        assert only(decider.handle(fault(decider.generation, step), 0.0)).exclude == ""
    assert decider.signs("n0", 0.0) == ()


def test_a_fault_of_no_rank_speaks_against_no_node() -> None:
    decider = job()
    decider.handle(replace(fault(), rank=-1), 0.0, NONE)
    assert decider.signs("n0", 0.0) == ()


UNFIT = replace(fault(kind=FaultKind.REFUSED), exit_code=69)


@pytest.mark.parametrize(
    "faults",
    [
        [FAILING],
        [UNFIT],
        [replace(fault(step=step), node="n1") for step in (1, 2, 3)],  # n1 is bad
        [replace(fault(), counted=True)],
        [replace(fault(kind=FaultKind.LOST), node="n1", rank=-1)],
    ],
)
def test_the_next_launcher_takes_over_after_any_move_and_starts_with_the_first_one(
    faults: list[Fault],
) -> None:
    decider, heir = job(), job()
    for one in faults:
        action = only(decider.handle(replace(one, generation=decider.generation), 0.0, SPARE))
        assert action.kind is not RecoveryAction.STOP
    heir.restore(decider.state())
    assert heir.state()["escalation"] == decider.state()["escalation"]
    another = replace(fault(heir.generation, 40), node="n2", reenters=True)
    assert only(heir.handle(another, 0.0, SPARE)).kind is RecoveryAction.RESTART_IN_PROCESS


def test_a_fault_that_comes_back_on_another_node_than_the_bad_one_is_answered_with_a_plain_restart() -> None:
    """The replacement was for the node and no move against the fault, which came back all the same."""
    decider = job()
    replaced = [
        only(decider.handle(replace(fault(decider.generation, step), node="n1"), 0.0, SPARE))
        for step in (1, 2, 3)
    ][-1]
    assert (replaced.kind, replaced.exclude) == (RecoveryAction.REPLACE_NODE, "n1")
    back = replace(fault(decider.generation, 3), node="n2", reenters=True)
    assert only(decider.handle(back, 0.0, SPARE)).kind is RecoveryAction.RESTART_IN_PROCESS
    anew = decider.escalate(back, "n3 was late", 5.0, SPARE)
    assert anew.kind is RecoveryAction.RESTART_IN_JOB
    assert "; repeated fault at step 3" in anew.reason
