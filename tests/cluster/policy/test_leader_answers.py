"""What a leader does about a fault depends on the nodes that are left, and on what it did before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from outlast.cluster.policy.events import Heartbeat, Judged, LeadOutcome, NodeEvent, Proposal
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import JobSpec, Joined, Left, Member
from outlast.cluster.policy.messages import Ending, NodeStatus
from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import CommitSeen, StepsDone, WorkerFinished

ABLE = NodeStatus(5001, able=True, patience=20.0)
CRASH = Fault(FaultKind.CRASH, "n0", 0, 1, 5, "rank 0 was killed", "signal 9")
RAISED = Fault(FaultKind.ERROR, "n0", 0, 1, 7, "rank 0 raised E: x", "E: x", reenters=True)
FAILING = Fault(FaultKind.FAILING, "n0", -1, 1, 7, "n0 is failing: XID 79", "n0 is failing")
DAY = 86400.0
ONCE_A_DAY = FaultToleranceOptions(max_restarts=9, max_restarts_per_day=1)


class _Job:
    """A leader and its nodes, which answer at once."""

    def __init__(
        self, least: int, most: int, spares: int = 0, options: FaultToleranceOptions | None = None
    ) -> None:
        terms = JobSpec("run", "1", "", 1, least, most, spares, interval=1e9)
        self.lead = JobController(terms, options or FaultToleranceOptions(), 0.0, 1e6)
        self.status = NodeStatus(5001)
        for name in (f"n{at}" for at in range(most + spares)):
            self.join(name)
            self.ready(name, 0.0)

    def join(self, name: str, incarnation: str = "1", now: float = 0.0) -> list[LeadOutcome]:
        member = Member(name, f"{name}:1", 1, "run", "1", "", incarnation=incarnation)
        return self.lead.handle(Joined(member), now)

    def ready(self, name: str, now: float, ended: int = 0, incarnation: str = "1") -> list[LeadOutcome]:
        return self.lead.handle(Heartbeat(name, incarnation, self.status, ended), now)

    def tell(self, fault: Fault, now: float) -> list[RecoveryAction]:
        told = replace(fault, generation=self.lead.generation)
        return _actions(self.lead.handle(NodeEvent(fault.node, told.generation, told), now))

    def answer(self, now: float) -> None:
        """Let every node end its ranks, and have another store."""
        generation = self.lead.generation
        self.status = replace(self.status, store=self.status.store + 1)
        for name in list(self.lead.members()):
            self.ready(name, now, generation - 1)
        assert self.lead.plan is not None
        assert self.lead.plan.generation == generation

    def save(self, step: int, now: float) -> list[LeadOutcome]:
        generation = self.lead.generation
        saved = CommitSeen(step, f"step-{step:09d}.g{generation}")
        return self.lead.handle(NodeEvent("n0", generation, saved), now)


def _actions(outcomes: Iterable[LeadOutcome]) -> list[RecoveryAction]:
    return [one.action.kind for one in outcomes if isinstance(one, Judged)]


@pytest.mark.parametrize(
    ("least", "most", "spares", "action"),
    [
        (2, 2, 0, RecoveryAction.RESTART_IN_JOB),
        (1, 2, 0, RecoveryAction.SHRINK),
        (2, 2, 1, RecoveryAction.REPLACE_NODE),
        (1, 2, 1, RecoveryAction.REPLACE_NODE),
        (1, 1, 1, RecoveryAction.REPLACE_NODE),
        (1, 1, 0, RecoveryAction.RESTART_IN_JOB),
    ],
)
def test_a_lost_node_is_replaced_if_a_spare_is_there_or_left_out_if_the_job_can_do_without(
    least: int, most: int, spares: int, action: RecoveryAction
) -> None:
    job = _Job(least, most, spares)
    assert _actions(job.lead.handle(Left(f"n{most - 1}", "gone"), 5.0)) == [action]


def test_a_job_does_not_shrink_while_a_spare_is_there() -> None:
    job = _Job(1, 2, 2, FaultToleranceOptions(max_restarts=1))
    actions = _actions(job.lead.handle(Left("n1", "gone"), 5.0))
    job.answer(6.0)
    for name in ("n0", "n2"):
        job.lead.handle(NodeEvent(name, 2, StepsDone(5)), 7.0)
    actions += _actions(job.lead.handle(Left("n2", "gone"), 8.0))
    assert actions == [RecoveryAction.REPLACE_NODE, RecoveryAction.STOP], "its budget is spent"


def test_a_budget_for_a_day_is_there_again_a_day_later() -> None:
    job = _Job(2, 2, 0, ONCE_A_DAY)
    assert job.tell(CRASH, 10.0) == [RecoveryAction.RESTART_IN_JOB]
    job.answer(11.0)
    job.save(40, 12.0)
    assert job.tell(replace(CRASH, step=50), 20.0 + DAY) == [RecoveryAction.RESTART_IN_JOB]
    job.answer(21.0 + DAY)
    assert job.tell(replace(CRASH, step=60), 30.0 + DAY) == [RecoveryAction.STOP]


def test_the_budget_of_the_day_holds_for_ranks_that_do_not_come_to_the_barrier() -> None:
    job = _Job(2, 2, 0, ONCE_A_DAY)
    assert job.tell(CRASH, 10.0) == [RecoveryAction.RESTART_IN_JOB]
    job.answer(11.0)
    job.save(40, 12.0)
    job.status = replace(ABLE, store=job.status.store)
    job.ready("n1", 13.0)
    assert job.tell(replace(RAISED, step=50), 20.0 + DAY) == [RecoveryAction.RESTART_IN_PROCESS]
    assert _actions(job.lead.tick(45.0 + DAY)) == [RecoveryAction.RESTART_IN_JOB]


def test_the_budget_of_the_day_holds_for_failing_nodes() -> None:
    job = _Job(2, 2, 2, ONCE_A_DAY)
    assert _actions(job.lead.handle(Left("n1", "gone"), 10.0)) == [RecoveryAction.REPLACE_NODE]
    job.answer(11.0)
    assert job.tell(FAILING, 20.0) == []
    assert _actions(job.save(40, 21.0)) == [], "one node was replaced today"
    assert job.tell(FAILING, 20.0 + DAY) == []
    assert _actions(job.lead.held(None, 21.0 + DAY)) == [RecoveryAction.REPLACE_NODE]


def test_a_job_that_shrank_ends_when_the_ranks_that_are_left_have_finished() -> None:
    job = _Job(1, 2)
    job.lead.handle(Left("n1", "gone"), 5.0)
    job.answer(6.0)
    job.lead.handle(NodeEvent("n0", 2, WorkerFinished(0, 2)), 7.0)
    assert job.lead.ending == Ending(0, "every rank finished")


def test_a_fault_that_is_ignored_changes_nothing_of_what_a_plan_says() -> None:
    job = _Job(2, 2, 1)
    job.tell(CRASH, 5.0)
    job.answer(6.0)
    stale = job.lead.handle(NodeEvent("n0", 1, CRASH), 7.0)
    assert _actions(stale) == [RecoveryAction.NONE]
    (proposal,) = (one for one in job.join("n2", "2", 8.0) if isinstance(one, Proposal))
    assert proposal.plan.why.startswith("restart 1 of 3")


def test_the_job_does_not_grow_with_a_node_that_has_gone_again() -> None:
    job = _Job(1, 2)
    job.lead.handle(Left("n1", "gone"), 5.0)
    job.answer(6.0)
    job.join("n1", "2", 7.0)
    job.lead.handle(Left("n1", "gone"), 8.0)
    job.save(40, 9.0)
    assert job.lead.generation == 2
    assert job.lead.plan is not None


def test_a_node_that_is_back_is_given_ranks_once_its_new_agent_could_begin_them() -> None:
    job = _Job(1, 2)
    job.lead.handle(Left("n1", "gone"), 5.0)
    job.answer(6.0)
    job.join("n1", "2", 7.0)
    job.save(40, 8.0)
    assert job.lead.generation == 2
    job.ready("n1", 9.0, incarnation="2")
    job.save(50, 10.0)
    assert job.lead.generation == 3


def test_the_store_of_an_agent_that_has_gone_is_not_used() -> None:
    job = _Job(2, 2)
    job.status = NodeStatus(5002)
    job.ready("n0", 1.0)
    job.lead.handle(Left("n0", "gone"), 5.0)
    job.join("n0", "2", 6.0)
    job.ready("n1", 7.0, 1)
    said = job.lead.handle(Heartbeat("n0", "2", NodeStatus(5009), 1), 8.0)
    assert [one.plan.port for one in said if isinstance(one, Proposal)] == [5009]
