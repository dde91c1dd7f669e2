"""What a leader decides, event by event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from outlast.cluster.policy.events import (
    Heartbeat,
    Judged,
    LeadOutcome,
    NodeEvent,
    Proposal,
    QuiesceNodes,
)
from outlast.cluster.policy.job_controller import STATUS_PATIENCE, JobController
from outlast.cluster.policy.members import JobSpec, Joined, Member
from outlast.cluster.policy.messages import Assignment, NodeStatus, Quiesce
from outlast.cluster.policy.plan import PLANS, JobPlan
from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction


def _ports(outcomes: Iterable[LeadOutcome]) -> list[int]:
    """Return the ports of the stores in what is proposed."""
    return [one.plan.port for one in outcomes if isinstance(one, Proposal)]


def test_a_store_that_its_node_has_lost_is_not_used_for_the_next_generation() -> None:
    lead = JobController(JobSpec("run", "1", "", 1, 2, 2), FaultToleranceOptions(), 0.0, 0.0)
    for name in ("n0", "n1"):
        lead.handle(Joined(Member(name, f"{name}:1", 1, "run", "1", "", incarnation="1")), 0.0)
    assert _ports(lead.handle(Heartbeat("n0", "1", NodeStatus(5001), 0), 0.0)) == [5001]
    lead.handle(Heartbeat("n0", "1", NodeStatus(5002), 0), 1.0)
    lead.handle(Heartbeat("n0", "1", NodeStatus(0), 0), 2.0)
    lead.handle(NodeEvent("n0", 1, Fault(FaultKind.CRASH, "n0", 0, 1, -1, "signal 9", "signal 9")), 2.0)
    ended = [one for name in ("n0", "n1") for one in lead.handle(Heartbeat(name, "1", NodeStatus(0), 1), 2.0)]
    assert _ports(ended) == []
    assert _ports(lead.handle(Heartbeat("n0", "1", NodeStatus(5003), 1), 3.0)) == [5003]


def test_a_store_at_the_same_port_counts_only_when_it_is_another_one() -> None:
    lead = JobController(JobSpec("run", "1", "", 1, 2, 2), FaultToleranceOptions(), 0.0, 0.0)
    for name in ("n0", "n1"):
        lead.handle(Joined(Member(name, f"{name}:1", 1, "run", "1", "", incarnation="1")), 0.0)
    first = NodeStatus(5001, serial=1)
    assert _ports(lead.handle(Heartbeat("n0", "1", first, 0), 0.0)) == [5001]
    lead.handle(NodeEvent("n0", 1, Fault(FaultKind.CRASH, "n0", 0, 1, -1, "signal 9", "signal 9")), 2.0)
    ended = [one for name in ("n0", "n1") for one in lead.handle(Heartbeat(name, "1", first, 1), 2.0)]
    assert _ports(ended) == []
    assert _ports(lead.handle(Heartbeat("n0", "1", NodeStatus(5001, serial=2), 1), 3.0)) == [5001]


ABLE = NodeStatus(5001, able=True, patience=20.0)
NEXT = replace(ABLE, store=5002)
RAISED = Fault(FaultKind.ERROR, "n0", 0, 1, 5, "rank 0 raised E: x", "E: x", reenters=True)


def begun(*names: str, spares: int = 0) -> JobController:
    """Return what leads a job of nodes whose ranks can be entered again; the spares are called n2, n3."""
    count = len(names)
    lead = JobController(JobSpec("run", "1", "", 1, count, count, spares), FaultToleranceOptions(), 0.0, 0.0)
    for name in (*names, *(f"n{count + one}" for one in range(spares))):
        lead.handle(Joined(Member(name, f"{name}:1", 1, "run", "1", "", incarnation="1")), 0.0)
        lead.handle(Heartbeat(name, "1", ABLE, 0), 0.0)
    return lead


def _plan(outcomes: Iterable[LeadOutcome]) -> JobPlan:
    (proposal,) = (one for one in outcomes if isinstance(one, Proposal))
    return PLANS.read(PLANS.write(proposal.plan))


def _answered(lead: JobController, *names: str, now: float) -> JobPlan:
    return _plan([one for name in names for one in lead.handle(Heartbeat(name, "1", NEXT, 1), now)])


def test_ranks_are_called_to_the_gate_and_the_plan_lets_them_in() -> None:
    lead = begun("n0", "n1")
    (call,) = (one for one in lead.handle(NodeEvent("n0", 1, RAISED), 1.0) if isinstance(one, QuiesceNodes))
    assert call == QuiesceNodes(("n0", "n1"), Quiesce(2, "rank 0 raised E: x", reenter=True))
    assert lead.handle(Heartbeat("n0", "1", NEXT, 1), 1.1) == []
    lead.handle(Heartbeat("n1", "1", ABLE, 0), 1.1)
    plan = _answered(lead, "n1", now=1.2)
    assert plan.reenter is True
    assert lead.deadline < 2.0
    assert [one for one in lead.tick(60.0) if isinstance(one, (QuiesceNodes, Judged))] == []


DIFFER = Fault(FaultKind.CORRUPT, "n0", 1, 1, 9, "rank 0 raised ReplicasDiffer: rank 1 contradicts", "differ")


def test_replicas_that_differ_are_laid_to_the_node_of_the_rank_that_is_wrong_whoever_tells() -> None:
    lead = begun("n0", "n1")
    (judged,) = (one for one in lead.handle(NodeEvent("n0", 1, DIFFER), 1.0) if isinstance(one, Judged))
    assert judged.fault is not None
    assert (judged.fault.node, judged.fault.rank) == ("n1", 1)


@pytest.mark.parametrize(("rank", "excluded"), [(1, "n1"), (-1, "")])
def test_where_nobody_knows_which_replica_is_wrong_no_node_is_replaced(rank: int, excluded: str) -> None:
    lead = begun("n0", "n1", spares=1)
    actions = []
    for number in (1, 2):
        told = replace(DIFFER, rank=rank, generation=number)
        said = lead.handle(NodeEvent("n0", number, told), number)
        actions += [one.action for one in said if isinstance(one, Judged)]
        for name in ("n0", "n1", "n2"):
            lead.handle(Heartbeat(name, "1", replace(ABLE, store=5001 + number), number), number + 0.5)
    assert [one.exclude for one in actions] == ["", excluded]
    assert actions[-1].kind is (RecoveryAction.REPLACE_NODE if excluded else RecoveryAction.STOP)


def test_ranks_are_ended_when_one_node_cannot_enter_its_own_again() -> None:
    lead = begun("n0", "n1")
    lead.handle(Heartbeat("n1", "1", NodeStatus(5001, able=False), 0), 0.5)
    assert lead.handle(NodeEvent("n0", 1, RAISED), 1.0) == []
    until = 1.0 + STATUS_PATIENCE
    assert not any(isinstance(one, Judged) for one in lead.tick(until - 0.01))
    judged, call = (one for one in lead.tick(until) if isinstance(one, (QuiesceNodes, Judged)))
    assert isinstance(judged, Judged)
    assert judged.action.kind is RecoveryAction.RESTART_IN_JOB
    assert isinstance(call, QuiesceNodes)
    assert not call.order.reenter
    assert _answered(lead, "n0", "n1", now=1.6).reenter is False


def _late_status() -> JobController:
    """Return a leader that has heard of a fault before a node said that its ranks have entered."""
    lead = begun("n0", "n1")
    lead.handle(Heartbeat("n1", "1", NodeStatus(5001, able=False), 0), 0.5)
    assert lead.handle(NodeEvent("n0", 1, RAISED), 1.0) == []
    return lead


def test_a_fault_waits_for_the_status_of_a_node_whose_ranks_have_just_entered() -> None:
    lead = _late_status()
    said = lead.handle(Heartbeat("n1", "1", ABLE, 0), 1.1)
    (judged,) = (one for one in said if isinstance(one, Judged))
    assert judged.action.kind is RecoveryAction.RESTART_IN_PROCESS
    assert _answered(lead, "n0", "n1", now=1.2).reenter is True


def test_another_fault_ends_the_wait_for_a_status_and_is_not_blamed() -> None:
    lead = _late_status()
    second = replace(RAISED, node="n1", rank=1, reason="rank 1 raised E: x")
    (judged,) = (one for one in lead.handle(NodeEvent("n1", 1, second), 1.1) if isinstance(one, Judged))
    assert judged.fault is not None
    assert judged.fault.rank == RAISED.rank


def test_a_successor_proposes_again_what_is_in_force() -> None:
    lead = begun("n0", "n1")
    lead.handle(NodeEvent("n0", 1, RAISED), 1.0)
    plan = _answered(lead, "n0", "n1", now=1.2)
    other = JobController(JobSpec("run", "1", "", 1, 2, 2, 1), FaultToleranceOptions(), 2.0, 0.0)
    other.take_over(plan, {}, 2.0)
    again = other.handle(Joined(Member("n2", "n2:1", 1, "run", "1", "", incarnation="1")), 3.0)
    assert _plan(again).reenter is True


def test_nodes_that_do_not_answer_in_time_are_named_and_all_are_called_once_more() -> None:
    lead = begun("n0", "n1")
    lead.handle(NodeEvent("n0", 1, RAISED), 1.0)
    lead.handle(Heartbeat("n0", "1", NEXT, 1), 1.1)
    for now in range(2, 26):
        lead.handle(Heartbeat("n0", "1", NEXT, 1), now)
        lead.handle(Heartbeat("n1", "1", ABLE, 0), now)
        assert lead.tick(now) == []
    judged, call = lead.tick(26.0)
    assert isinstance(judged, Judged)
    assert judged.action.kind is RecoveryAction.RESTART_IN_JOB
    late = "n1 did not bring the ranks to the re-entry barrier in time"
    assert judged.action.reason.startswith(f"{late}; restart 1 of 3")
    assert call == QuiesceNodes(("n0", "n1"), Quiesce(2, late))
    assert _answered(lead, "n1", now=26.1).reenter is False


def test_every_node_is_told_that_a_hang_came_back_whichever_node_found_it() -> None:
    lead = begun("n0", "n1")
    told = []
    for number in (1, 2):
        hang = Fault(FaultKind.HANG, f"n{number - 1}", 0, number, 9, "rank 0 is silent", "hang in step")
        lead.handle(NodeEvent(hang.node, number, hang), float(number))
        later = replace(ABLE, store=6000 + number)
        found = [
            one for name in ("n0", "n1") for one in lead.handle(Heartbeat(name, "1", later, number), 9.0)
        ]
        mine = [_plan(found).assignment(number + 1, name) for name in ("n0", "n1")]
        told.append([isinstance(one, Assignment) and one.hung_again for one in mine])
    assert told == [[False, False], [True, True]]
