"""What a leader waits for before it decides, for how long, and what makes the waiting superfluous."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from outlast.cluster.policy.events import Heartbeat, Judged, LeadOutcome, Log, Looked, NodeEvent
from outlast.cluster.policy.job_controller import DRAIN_PATIENCE, JobController
from outlast.cluster.policy.members import JobSpec, Joined, Left, Member
from outlast.cluster.policy.membership import BUSY_PATIENCE
from outlast.cluster.policy.messages import NodeStatus
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.hang.policy.diagnosis import GUESSED, WAITS, RankEvidence
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import HANG_WAITS, VICTIM_WAITS, AllStarted, StepsDone

ABLE = NodeStatus(5001, able=True, patience=20.0)
CRASH = Fault(FaultKind.CRASH, "n1", 1, 1, 7, "rank 1 was killed", "signal 9")
VICTIM = Fault(FaultKind.ERROR, "n0", 0, 1, 7, "rank 0 lost a peer", "connection closed by peer")
HANG = Fault(FaultKind.HANG, "n0", -1, 1, 7, "all ranks wait", "all ranks wait")
RAISED = Fault(FaultKind.ERROR, "n0", 0, 1, 7, "rank 0 raised E: x", "E: x", reenters=True)
FAILING = Fault(FaultKind.FAILING, "n1", -1, 1, 7, "n1 is failing: XID 79", "n1 is failing")


def _runs(least: int = 2, spares: int = 0, interval: float = 1e6) -> JobController:
    """Return what leads two nodes, looks for silent nodes at an interval, and waits for nothing else."""
    terms = JobSpec("run", "1", "", 1, least, 2, spares, interval=interval)
    lead = JobController(terms, FaultToleranceOptions(), 0.0, 0.0)
    for name in ("n0", "n1", "n2")[: 2 + spares]:
        lead.handle(Joined(Member(name, f"{name}:1", 1, "run", "1", "", incarnation="1")), 0.0)
        lead.handle(Heartbeat(name, "1", ABLE, 0), 0.0)
        lead.handle(NodeEvent(name, 1, AllStarted(1)), 0.0)
    lead.tick(1.0)
    return lead


def _tell(lead: JobController, fault: Fault, now: float) -> list[str]:
    return _judged(lead.handle(NodeEvent(fault.node, 1, fault), now))


def _judged(outcomes: Iterable[LeadOutcome]) -> list[str]:
    """Return the reasons of the faults that were answered."""
    return [one.fault.reason for one in outcomes if isinstance(one, Judged) and one.fault is not None]


def _steps(lead: JobController, step: int, *names: str, now: float = 10.5) -> list[LeadOutcome]:
    return [one for name in names for one in lead.handle(NodeEvent(name, 1, StepsDone(step)), now)]


@pytest.mark.parametrize(
    ("fault", "patience"),
    [
        (VICTIM, VICTIM_WAITS),
        (HANG, HANG_WAITS),
        (replace(HANG, rank=0, evidence=(WAITS,)), HANG_WAITS),
        (replace(HANG, evidence=(WAITS, GUESSED)), HANG_WAITS + 5.0),
    ],
)
def test_a_fault_that_may_be_the_consequence_of_another_waits_and_is_then_answered(
    fault: Fault, patience: float
) -> None:
    lead = _runs()
    assert lead.deadline > 1e5
    assert _tell(lead, fault, 10.0) == []
    assert lead.deadline == 10.0 + patience
    assert lead.tick(10.0 + patience - 0.01) == []
    assert _judged(lead.tick(10.0 + patience)) == [fault.reason]


@pytest.mark.parametrize("fault", [CRASH, replace(HANG, rank=0), replace(RAISED, reenters=None)])
def test_any_other_fault_is_answered_at_once(fault: Fault) -> None:
    assert _tell(_runs(), fault, 10.0) == [fault.reason]


def test_the_culprit_is_answered_and_its_victims_are_not() -> None:
    lead = _runs()
    assert _tell(lead, VICTIM, 10.0) == []
    assert _tell(lead, CRASH, 10.1) == [CRASH.reason]
    assert _judged(lead.tick(11.0)) == []


def test_a_second_victim_neither_replaces_the_first_nor_prolongs_the_wait() -> None:
    lead = _runs()
    _tell(lead, VICTIM, 10.0)
    assert _tell(lead, replace(VICTIM, node="n1", rank=1), 10.2) == []
    assert _judged(lead.tick(10.0 + VICTIM_WAITS)) == [VICTIM.reason]


def test_a_fault_of_an_older_generation_leaves_one_that_waits() -> None:
    lead = _runs()
    _tell(lead, VICTIM, 10.0)
    said = lead.handle(NodeEvent("n1", 0, replace(CRASH, generation=0)), 10.1)
    assert [one.action.kind for one in said if isinstance(one, Judged)] == [RecoveryAction.NONE]
    assert _judged(lead.tick(10.0 + VICTIM_WAITS)) == [VICTIM.reason]


def test_a_fault_of_an_older_generation_is_ignored_at_once() -> None:
    lead = _runs()
    (judged,) = lead.handle(NodeEvent("n0", 0, replace(VICTIM, generation=0)), 10.0)
    assert isinstance(judged, Judged)
    assert judged.action.kind is RecoveryAction.NONE
    assert lead.deadline > 1e5


def test_ranks_that_all_go_on_do_not_hang() -> None:
    lead = _runs()
    _tell(lead, HANG, 10.0)
    assert _steps(lead, 7, "n0", "n1") == [], "that is the step at which they were found"
    assert _steps(lead, 8, "n0") == []
    assert _steps(lead, 8, "n1") == [Log("the ranks go on at step 8: all ranks wait")]
    assert _judged(lead.tick(20.0)) == []


def test_steps_say_nothing_about_an_error_that_waits() -> None:
    lead = _runs()
    _tell(lead, VICTIM, 10.0)
    assert _steps(lead, 8, "n0", "n1", now=10.1) == []
    assert _judged(lead.tick(11.0)) == [VICTIM.reason]


def test_steps_of_an_older_generation_do_not_count() -> None:
    lead = _runs()
    _tell(lead, HANG, 10.0)
    for name in ("n0", "n1"):
        assert lead.handle(NodeEvent(name, 0, StepsDone(9)), 10.1) == []
    assert _judged(lead.tick(11.0)) == [HANG.reason]


def test_the_status_of_the_other_nodes_is_waited_for_less_than_a_second() -> None:
    lead = _runs()
    lead.handle(Heartbeat("n1", "1", replace(ABLE, able=False), 0), 9.0)
    assert _tell(lead, RAISED, 10.0) == []
    assert 10.0 < lead.deadline < 11.0
    assert lead.handle(Heartbeat("n1", "1", replace(ABLE, able=False), 0), 10.1) == []
    assert _judged(lead.tick(lead.deadline)) == [RAISED.reason]


def test_a_status_is_no_reason_to_answer_a_fault_that_waits_for_its_cause() -> None:
    lead = _runs()
    _tell(lead, VICTIM, 10.0)
    assert _judged(lead.handle(Heartbeat("n1", "1", ABLE, 0), 10.1)) == []


def test_the_leader_is_woken_for_a_failing_node_whose_save_does_not_come() -> None:
    lead = _runs(spares=1)
    assert _tell(lead, FAILING, 10.0) == []
    assert lead.deadline == 10.0 + DRAIN_PATIENCE
    assert lead.tick(lead.deadline - 1.0) == []
    assert _judged(lead.tick(lead.deadline)) == [FAILING.reason]


def test_the_leader_is_woken_when_ranks_should_have_left_their_function() -> None:
    lead = _runs()
    assert _tell(lead, RAISED, 10.0) == [RAISED.reason]
    assert lead.deadline == 10.0 + ABLE.patience + 5.0, "as long as a node may be silent"
    assert _tell(lead, CRASH, 10.1) == [CRASH.reason], "it is of a generation that is over"
    assert lead.tick(34.9) == []
    assert lead.deadline == 35.0
    said = lead.tick(35.0)
    assert [one.action.kind for one in said if isinstance(one, Judged)] == [RecoveryAction.RESTART_IN_JOB]
    assert lead.deadline > 1e5
    for name in ("n0", "n1"):
        lead.handle(Heartbeat(name, "1", replace(ABLE, store=5002), 1), 36.0)
    assert lead.plan is not None
    assert "n0, n1 did not bring the ranks to the re-entry barrier in time" in lead.plan.reason


def _looked(lead: JobController, name: str, rank: int, now: float, generation: int = 1) -> None:
    seen = RankEvidence(rank, True, "S", False, ("train.py:main",), 7, ("step",), 1.0)
    assert lead.handle(Looked(name, Seen(generation, (seen,), 1.0)), now) == []


def test_what_two_nodes_saw_of_silent_ranks_is_judged_together() -> None:
    lead = _runs()
    _looked(lead, "n0", 0, 10.0)
    assert lead.deadline == 10.0
    assert lead.tick(10.0) == [], "one node alone knows no more than it knew"
    _looked(lead, "n1", 1, 10.5)
    (blamed,) = lead.tick(lead.deadline)
    assert isinstance(blamed, Blamed)
    assert (blamed.names, blamed.generation) == (("n0", "n1"), 1)
    assert lead.tick(11.5) == [], "nothing new was seen"


def test_what_was_seen_before_a_restart_is_forgotten() -> None:
    lead = _runs()
    _looked(lead, "n0", 0, 10.0)
    _tell(lead, CRASH, 10.1)
    _looked(lead, "n1", 1, 10.2)
    assert not any(isinstance(one, Blamed) for one in lead.tick(20.0)), "no generation runs"
    for name in ("n0", "n1"):
        lead.handle(Heartbeat(name, "1", replace(ABLE, store=5002), 1), 21.0)
    _looked(lead, "n0", 0, 22.0, generation=1)
    _looked(lead, "n1", 1, 22.0, generation=1)
    assert lead.deadline > 1e5
    _looked(lead, "n0", 0, 23.0, generation=2)
    _looked(lead, "n1", 1, 23.0, generation=2)
    assert any(isinstance(one, Blamed) for one in lead.tick(lead.deadline))


def test_a_silent_node_is_looked_for_at_the_usual_interval() -> None:
    lead = _runs(interval=0.25)
    lead.tick(1.1)
    assert lead.deadline == 1.25, "it was too early for the next look"
    for at in range(5, 21):
        lead.handle(Heartbeat("n0", "1", ABLE, 0), at / 4)
        assert lead.tick(at / 4) == []
    words = "n1 is lost: silent for 5.00 seconds (timeout 5.00); generation 1 is over"
    assert _judged(lead.tick(5.25)) == [words]


@pytest.mark.parametrize(
    ("ended", "seconds", "lost"),
    [(0, BUSY_PATIENCE - 1, []), (0, BUSY_PATIENCE + 2, ["n1"]), (1, BUSY_PATIENCE + 2, [])],
)
def test_a_node_that_is_heard_has_longer_to_end_its_ranks(
    ended: int, seconds: float, lost: list[str]
) -> None:
    lead = _runs(interval=0.25)
    for name in ("n0", "n1"):
        lead.handle(Heartbeat(name, "1", NodeStatus(5001), 0), 1.0)
    _tell(lead, CRASH, 1.1)
    said: list[LeadOutcome] = []
    for at in range(5, int(4 * seconds)):
        lead.handle(Heartbeat("n1", "1", NodeStatus(5001), ended), at / 4)
        said += lead.tick(at / 4)
    names = [name for name in ("n0", "n1") if any(f"{name} is lost" in str(one) for one in said)]
    assert names == ["n0", *lost]


def test_ranks_of_a_smaller_job_are_new_processes() -> None:
    """Their numbers and the number of all of them are others."""
    lead = _runs(least=1)
    assert _tell(lead, RAISED, 10.0) == [RAISED.reason]
    lead.handle(Left("n1", "its agent has ended"), 10.1)
    lead.handle(Heartbeat("n0", "1", replace(ABLE, store=5002), 1), 10.2)
    assert lead.plan is not None
    assert lead.plan.nodes == ("n0",)
    assert lead.deadline > 1e5
