"""How a job begins, goes on with another leader or after another launch, grows, and ends."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from outlast.cluster.policy.events import (
    Heartbeat,
    Judged,
    LeadOutcome,
    Log,
    Looked,
    NodeEvent,
    Proposal,
    QuiesceNodes,
    Rejected,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import JobSpec, Joined, Left, Member, Role, Unfit
from outlast.cluster.policy.messages import Ending, NodeStatus, Quiesce
from outlast.cluster.policy.plan import PLANS, JobPlan
from outlast.config import FaultToleranceOptions
from outlast.errors import ExitCode
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.hang.policy.diagnosis import RankEvidence
from outlast.parallelism.policy.degrees import Layout
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    LoadSeen,
    StepsDone,
    StopRequested,
    WorkerFinished,
)

READY = NodeStatus(5001)
SAVED = CommitSeen(40, "step-000000040.g1")
CRASH = Fault(FaultKind.CRASH, "n0", 0, 1, 5, "rank 0 was killed", "signal 9")


def _leads(least: int = 2, most: int = 2, spares: int = 0, **terms: Any) -> JobController:
    spec = JobSpec("run", "1", "", 1, least, most, spares, **terms)
    return JobController(spec, FaultToleranceOptions(), 0.0, 1000.0)


def _joins(
    lead: JobController, *names: str, now: float = 0.0, incarnation: str = "1", **other: Any
) -> list[LeadOutcome]:
    said = []
    for name in names:
        member = Member(name, f"{name}:1", 1, "run", "1", "", incarnation=incarnation, **other)
        said += lead.handle(Joined(member), now)
    return said


def _ready(
    lead: JobController, *names: str, now: float = 0.0, ended: int = 0, port: int = 5001
) -> list[LeadOutcome]:
    status = NodeStatus(port)
    return [one for name in names for one in lead.handle(Heartbeat(name, "1", status, ended), now)]


def _runs(least: int = 2, most: int = 2, spares: int = 0, **terms: Any) -> JobController:
    """Return a leader of as many nodes as there may be, whose ranks have started."""
    lead = _leads(least, most, spares, **terms)
    names = [f"n{at}" for at in range(most + spares)]
    _joins(lead, *names)
    _ready(lead, *names)
    for name in names[:most]:
        lead.handle(NodeEvent(name, 1, AllStarted(1)), 0.0)
    return lead


def _plans(outcomes: Iterable[LeadOutcome]) -> list[JobPlan]:
    return [PLANS.read(PLANS.write(one.plan)) for one in outcomes if isinstance(one, Proposal)]


def _seated(outcomes: Iterable[LeadOutcome]) -> list[tuple[int, tuple[str, ...]]]:
    return [(one.generation, one.active) for one in outcomes if isinstance(one, Proposal)]


def _judged(outcomes: Iterable[LeadOutcome]) -> list[Judged]:
    return [one for one in outcomes if isinstance(one, Judged)]


def test_a_job_begins_when_all_nodes_are_there_and_the_first_has_a_store() -> None:
    lead = _leads()
    _joins(lead, "n1")
    assert (lead.began, lead.plan) == (False, None)
    said = _joins(lead, "n0")
    assert lead.plan is not None
    assert Log("generation 1: n0, n1: the job begins; 2 of 2 node(s)") in said
    assert _plans(said) == []
    assert _plans(_ready(lead, "n1")) == [], "ranks meet in the store of the first node"
    (said_then,) = _ready(lead, "n0")
    assert isinstance(said_then, Proposal)
    assert (said_then.generation, said_then.active, said_then.here) == (1, ("n0", "n1"), ("n1", "n0"))
    plan = said_then.plan
    assert (plan.port, plan.why, plan.reenter, plan.hung_again) == (5001, "the job begins", False, False)
    assert (plan.layout, plan.end, plan.reason) == ("", None, "the job begins; 2 of 2 node(s)")
    assert lead.roles() == {"n0": Role.ACTIVE, "n1": Role.ACTIVE}


def test_the_layout_of_the_ranks_is_part_of_the_plan() -> None:
    lead = _leads(layouts=(Layout(dp=2),))
    _joins(lead, "n0", "n1")
    (plan,) = _plans(_ready(lead, "n0", "n1"))
    assert plan.layout == Layout(dp=2).text


def test_a_node_may_say_what_devices_it_has_before_there_is_a_plan() -> None:
    lead = _leads()
    _joins(lead, "n0")
    assert lead.handle(Heartbeat("n0", "1", NodeStatus(0, device="H100"), 0), 0.0) == []


def test_a_later_launch_goes_on_after_the_last_generation_and_the_last_save() -> None:
    lead = _runs()
    lead.handle(NodeEvent("n0", 1, SAVED), 1.0)
    state = json.loads(json.dumps(lead.job_state()))
    again = _leads()
    assert again.recall(state, 0, 2.0) == [Log("the run goes on with generation 2")]
    assert (again.generation, again.saved, again.began) == (2, 40, False)
    _joins(again, "n0", "n1")
    (proposal,) = (one for one in _ready(again, "n0") if isinstance(one, Proposal))
    assert proposal.generation == 2
    assert proposal.plan.why == "", "nothing ended the generation before it"


def test_a_launch_that_begins_without_a_restart_says_so_unless_its_agent_only_began_anew() -> None:
    lead = _runs()
    lead.handle(NodeEvent("n0", 1, CRASH), 1.0)
    state = json.loads(json.dumps(lead.job_state()))
    goes_on = Log("the run goes on with generation 3")
    assert _leads().recall(state, 0, 2.0) == [goes_on], "two are left"
    state["escalation"]["spent"]["restart-in-job"]["fast"] = 3
    _, said = _leads().recall(state, 0, 2.0)
    assert "have used 3 of 3 restarts (--max-restarts) for crash (signal 9) at step 5, so" in said.reason
    assert _leads().recall(state, 2, 2.0) == [goes_on]
    day = 24 * 3600.0
    state["escalation"]["spent"]["restart-in-job"] = {"fast": 0, "times": [1000.0] * 20}
    _, said = _leads().recall(state, 0, day - 1.0)
    assert "have used 20 of 20 restarts in 24 h (--ft-max-restarts-per-day)" in said.reason
    assert _leads().recall(state, 0, day) == [goes_on], "the clock of the launch begins at 1000"


def test_the_first_launch_has_nothing_to_recall() -> None:
    lead = _leads()
    assert lead.recall(None, 0, 2.0) == []
    assert (lead.generation, lead.saved) == (1, -1)


def test_a_malformed_job_state_is_said_and_the_generation_is_younger_all_the_same() -> None:
    lead = _leads()
    (said,) = lead.recall({"generation": "x"}, 6, 2.0)
    assert isinstance(said, Log)
    assert said.reason.startswith("malformed job state of an earlier launch (")
    assert said.reason.endswith("): budgets start anew")
    assert lead.generation == 7


def test_the_first_generation_is_younger_than_any_that_is_known_to_have_been() -> None:
    lead = _leads()
    lead.recall(None, 3, 2.0)
    assert lead.generation == 4
    _joins(lead, "n0")
    lead.after(8)
    assert lead.generation == 9
    _joins(lead, "n1")
    assert _seated(_ready(lead, "n0")) == [(9, ("n0", "n1"))]
    lead.after(20)
    assert lead.generation == 9, "it has begun"


def test_a_part_of_the_nodes_begins_nothing_while_another_job_may_run() -> None:
    lead = _leads(1, 2, grace=1.0)
    _joins(lead, "n0")
    _ready(lead, "n0")
    lead.wait_until(4.0)
    assert _seated(lead.tick(3.75)) == []
    assert _seated(lead.tick(4.0)) == [(1, ("n0",))]


def test_who_joins_is_told_to_all_within_a_second_and_not_for_each_anew() -> None:
    lead = _runs(spares=3, most=2, least=1)
    for name in ("n2", "n3", "n4"):
        lead.handle(Left(name, "gone"), 1.0)
    lead.tick(9.0)
    _ready(lead, "n0", "n1", now=9.0)
    first = _joins(lead, "n2", now=10.0, incarnation="2")
    assert [one.here for one in first if isinstance(one, Proposal)] == [("n0", "n1", "n2")]
    assert _plans(_joins(lead, "n3", "n4", now=10.01, incarnation="2")) == []
    assert _plans(lead.tick(10.02)) == []
    due = lead.deadline
    assert 10.02 < due < 11.0
    (proposal,) = (one for one in lead.tick(due) if isinstance(one, Proposal))
    assert proposal.here == ("n0", "n1", "n2", "n3", "n4")
    assert _plans(lead.tick(due + 1.0)) == []


def test_before_the_first_plan_nodes_are_told_that_they_are_known() -> None:
    lead = _leads(3, 3)
    (taken, proposal) = _joins(lead, "n0")
    assert taken == Log("n0 has joined; it is a spare until a plan names it")
    assert isinstance(proposal, Proposal)
    assert (proposal.generation, proposal.active, proposal.here) == (0, (), ("n0",))
    plan = proposal.plan
    assert (plan.seats, plan.reason, plan.why, plan.port, plan.reenter) == ((), "", "", 0, False)


def test_nobody_is_told_anew_while_the_next_generation_is_formed() -> None:
    lead = _runs(spares=1)
    lead.handle(NodeEvent("n0", 1, CRASH), 5.0)
    assert lead.plan is None
    assert _plans(lead.handle(Left("n2", "gone"), 5.1)) == []


def test_a_node_that_does_not_fit_is_refused_and_may_try_again() -> None:
    lead = _runs()
    (refused,) = _joins(lead, "n7")
    assert isinstance(refused, Rejected)
    assert (refused.name, refused.excluded) == ("n7", False)


def test_a_node_that_is_used_no_more_is_told_so() -> None:
    lead = _runs(spares=1)
    said = lead.handle(Unfit("n2", "two Xid 79"), 5.0)
    assert Rejected("n2", "n2 is excluded: two Xid 79; it had no rank, so nothing restarts", True) in said
    assert Log("n2 is lost: gone; it had no rank, so nothing restarts") not in said


def test_the_job_ends_when_every_rank_has_finished_and_nothing_is_decided_after_that() -> None:
    lead = _runs()
    assert _plans(lead.handle(NodeEvent("n0", 1, WorkerFinished(0, 1)), 5.0)) == []
    said = lead.handle(NodeEvent("n1", 1, WorkerFinished(1, 1)), 6.0)
    assert lead.ending == Ending(0, "every rank finished")
    assert [one.end for one in _plans(said)] == [lead.ending]
    assert lead.handle(NodeEvent("n0", 1, replace(CRASH)), 7.0) == []
    assert lead.handle(Left("n1", "gone"), 7.0) == []
    assert lead.tick(1000.0) == []


def test_a_request_to_stop_ends_the_job_with_the_status_of_the_signal() -> None:
    lead = _runs()
    said = lead.handle(NodeEvent("n1", 0, StopRequested(15)), 5.0)
    assert lead.ending is not None
    assert lead.ending.exit_code == 143
    assert [one.action.kind for one in _judged(said)] == [RecoveryAction.STOP]
    assert [one.end for one in _plans(said)] == [lead.ending]


def test_too_few_nodes_for_too_long_are_said_and_end_the_job() -> None:
    lead = _leads(2, 2, join_timeout=60.0)
    _joins(lead, "n0")
    said: list[LeadOutcome] = []
    for now in range(1, 60):
        _ready(lead, "n0", now=now)
        said += lead.tick(now)
    (waits,) = said
    assert isinstance(waits, Log)
    assert "at least 2 needed" in waits.reason
    _ready(lead, "n0", now=60.0)
    said = lead.tick(60.0)
    assert lead.ending is not None
    assert lead.ending.exit_code == ExitCode.FAILED
    assert [one.end for one in _plans(said)] == [lead.ending]


def test_a_lost_node_is_a_fault_with_what_is_known_of_its_generation() -> None:
    lead = _runs()
    for name, step in (("n0", 7), ("n1", 6)):
        lead.handle(NodeEvent(name, 1, StepsDone(step, counted=True)), 3.0)
    _ready(lead, "n0", "n1", now=4.0)
    said = lead.handle(Left("n1", "its agent has ended"), 9.0)
    assert said[0] == Log("n1 is lost: its agent has ended; generation 1 is over")
    (judged,) = _judged(said)
    assert judged.fault is not None
    fault = judged.fault
    assert (fault.kind, fault.node, fault.rank, fault.step) == (FaultKind.LOST, "n1", -1, 6)
    assert (fault.since, fault.trained, fault.counted) == (4.0, 4.0, True)
    assert fault.signature == "n1 is lost"


def test_a_generation_that_not_all_nodes_have_started_has_not_trained() -> None:
    lead = _leads()
    _joins(lead, "n0", "n1")
    _ready(lead, "n0", "n1")
    for name, generation, now in (("n0", 1, 1.0), ("n1", 0, 2.0)):
        assert lead.handle(NodeEvent(name, generation, AllStarted(1)), now) == []
    _ready(lead, "n0", "n1", now=9.0)
    (judged,) = _judged(lead.handle(Left("n1", "its agent has ended"), 9.5))
    assert judged.fault is not None
    assert judged.fault.trained == 0.0


@pytest.mark.parametrize(("heard", "trained"), [(9.0, 5.0), (4.5, 0.5), (3.0, 0.0)])
def test_a_generation_trains_from_when_the_last_node_has_started(heard: float, trained: float) -> None:
    lead = _leads()
    _joins(lead, "n0", "n1")
    _ready(lead, "n0", "n1")
    for name, generation, now in (("n0", 1, 1.0), ("n1", 0, 2.0), ("n1", 1, 4.0)):
        assert _judged(lead.handle(NodeEvent(name, generation, AllStarted(1)), now)) == []
    _ready(lead, "n0", "n1", now=heard)
    (judged,) = _judged(lead.handle(Left("n1", "its agent has ended"), 9.5))
    assert judged.fault is not None
    assert judged.fault.trained == trained


def test_what_was_known_of_a_generation_is_forgotten_with_it() -> None:
    lead = _runs(spares=1)
    for name in ("n0", "n1"):
        lead.handle(NodeEvent(name, 1, StepsDone(7, counted=True)), 3.0)
    lead.handle(NodeEvent("n0", 1, CRASH), 5.0)
    assert _seated(_ready(lead, "n0", "n1", "n2", now=6.0, ended=1, port=5002)) == [(2, ("n0", "n1"))]
    (judged,) = _judged(lead.handle(Left("n1", "its agent has ended"), 9.0))
    assert judged.fault is not None
    assert (judged.fault.generation, judged.fault.step) == (2, -1)
    assert (judged.fault.trained, judged.fault.counted) == (0.0, False)


def test_the_spare_takes_the_ranks_of_a_lost_node() -> None:
    lead = _runs(spares=1)
    said = lead.handle(Left("n1", "its agent has ended"), 5.0)
    (judged,) = _judged(said)
    assert judged.action.kind is RecoveryAction.REPLACE_NODE
    (call,) = (one for one in said if isinstance(one, QuiesceNodes))
    assert call == QuiesceNodes(("n0", "n2"), Quiesce(2, call.order.reason, reenter=False))
    assert lead.plan is None
    assert _seated(_ready(lead, "n0", now=5.1, ended=1, port=5002)) == []
    assert _seated(_ready(lead, "n2", now=5.2, ended=1, port=5003)) == [(2, ("n0", "n2"))]
    assert lead.generation == 2


def test_a_heartbeat_answers_only_when_all_before_the_generation_has_ended() -> None:
    lead = _runs()
    lead.handle(NodeEvent("n0", 1, CRASH), 5.0)
    assert _seated(_ready(lead, "n0", "n1", now=5.1, ended=0, port=5002)) == []
    assert _seated(_ready(lead, "n0", "n1", now=5.2, ended=1, port=5002)) == [(2, ("n0", "n1"))]


def test_the_job_grows_after_a_save_once_every_node_could_begin_ranks() -> None:
    lead = _leads(1, 2, grace=1.0)
    _joins(lead, "n0")
    _ready(lead, "n0")
    lead.tick(1.0)
    lead.handle(NodeEvent("n0", 1, AllStarted(1)), 1.0)
    said = _joins(lead, "n1", now=2.0)
    assert any(isinstance(one, Log) and "the job grows at the next safe step" in one.reason for one in said)
    assert _seated(lead.handle(NodeEvent("n0", 1, SAVED), 3.0)) == [], "n1 has not imported torch"
    _ready(lead, "n1", now=4.0)
    for event in (CopyGone("step-000000030.g1"), LoadSeen(30, "step-000000030.g1")):
        lead.handle(NodeEvent("n0", 1, event), 4.2)
        assert lead.generation == 1, "that is no save"
    lead.handle(NodeEvent("n0", 0, replace(SAVED, step=45, name="step-000000045.g1")), 4.5)
    assert lead.generation == 1, "that is one of another generation"
    said = lead.handle(NodeEvent("n0", 1, replace(SAVED, step=50, name="step-000000050.g1")), 5.0)
    (call,) = (one for one in said if isinstance(one, QuiesceNodes))
    assert call.names == ("n0", "n1")
    assert call.order.generation == 2
    assert _judged(said) == [], "it is no fault, and costs no budget"
    said = _ready(lead, "n0", "n1", now=5.1, ended=1, port=5002)
    assert _seated(said) == [(2, ("n0", "n1"))]
    (plan,) = _plans(said)
    assert plan.why == "the job grows"
    assert _seated(lead.handle(NodeEvent("n0", 2, replace(SAVED, step=60)), 6.0)) == []


def _taken_over(plan: JobPlan, heard: dict[str, float] | None = None) -> JobController:
    other = _leads(2, 2, 1)
    other.take_over(plan, heard or {}, 100.0)
    return other


def test_a_successor_goes_on_with_the_plan_in_force() -> None:
    lead = _runs(spares=1)
    lead.handle(NodeEvent("n0", 1, SAVED), 1.0)
    (plan,) = _plans(lead.handle(NodeEvent("n0", 1, replace(CRASH, step=41)), 5.0)) or _plans(
        _ready(lead, "n0", "n1", "n2", now=6.0, ended=1, port=5002)
    )
    other = _taken_over(plan)
    assert (other.generation, other.saved, other.began, other.ending) == (2, 40, True, None)
    assert other.plan is not None
    assert other.plan.nodes == ("n0", "n1")
    (again,) = _plans(_joins(other, "n2", now=100.5, incarnation="2"))
    assert (again.port, again.seats, again.reason) == (5002, plan.seats, plan.reason)
    assert again.why == plan.why != ""
    assert other.handle(NodeEvent("n0", 2, AllStarted(2)), 101.0) == []
    fault = replace(CRASH, generation=2)
    assert [one.action.kind for one in _judged(other.handle(NodeEvent("n0", 2, fault), 102.0))] == [
        RecoveryAction.RESTART_IN_JOB
    ]


def test_a_successor_waits_for_every_node_before_it_says_that_ranks_go_on() -> None:
    (plan,) = _plans(_ready_again())
    other = _taken_over(plan)
    hang = Fault(FaultKind.HANG, "n0", -1, 1, 7, "all ranks wait", "all ranks wait")
    assert other.handle(NodeEvent("n0", 1, hang), 100.5) == []
    assert other.handle(NodeEvent("n0", 1, StepsDone(8)), 100.6) == []
    assert other.handle(NodeEvent("n1", 1, StepsDone(8)), 100.7) != []


def test_a_successor_ends_the_job_when_the_ranks_of_the_plan_in_force_have_finished() -> None:
    lead = _leads(1, 3, grace=1.0)
    _joins(lead, "n0", "n1")
    _ready(lead, "n0", "n1")
    plan = _plans(lead.tick(1.0))[-1]
    other = _leads(1, 3)
    other.take_over(plan, {}, 100.0)
    assert other.handle(NodeEvent("n0", 1, WorkerFinished(0, 1)), 101.0) == []
    assert other.handle(NodeEvent("n1", 1, WorkerFinished(1, 1)), 101.0) != []
    assert other.ending == Ending(0, "every rank finished")


def test_a_successor_judges_what_nodes_see_of_silent_ranks() -> None:
    (plan,) = _plans(_ready_again())
    other = _taken_over(plan)
    for at, name in enumerate(("n0", "n1")):
        seen = RankEvidence(at, True, "S", False, ("train.py:main",), 7, ("step",), 1.0)
        other.handle(Looked(name, Seen(1, (seen,), 1.0)), 100.1)
    assert [one.names for one in other.tick(100.1) if isinstance(one, Blamed)] == [("n0", "n1")]


def test_a_successor_knows_that_a_node_was_silent_before() -> None:
    (plan,) = _plans(_ready_again())
    other = _taken_over(plan, {"n1": 97.0})
    for now in (100.25, 100.5, 101.0, 101.5, 101.9):
        _ready(other, "n0", "n2", now=now)
        assert _judged(other.tick(now)) == []
    _ready(other, "n0", "n2", now=102.2)
    (judged,) = _judged(other.tick(102.2))
    assert judged.fault is not None
    assert (judged.fault.node, judged.fault.counted, judged.fault.trained) == ("n1", False, 0.0)


def _ready_again() -> list[LeadOutcome]:
    """Return what is proposed when a job of two nodes and a spare begins."""
    lead = _leads(2, 2, 1)
    _joins(lead, "n0", "n1", "n2")
    return _ready(lead, "n0", "n1", "n2")


def test_a_successor_of_a_leader_that_ended_the_job_ends_it_too() -> None:
    lead = _runs(spares=1)
    (plan,) = _plans(lead.handle(NodeEvent("n1", 0, StopRequested(2)), 5.0))
    other = _taken_over(plan)
    assert other.ending == lead.ending
    assert other.tick(200.0) == []


def test_a_successor_forms_the_generation_that_was_being_formed() -> None:
    lead, other = _leads(3, 3), _leads(3, 3)
    _joins(lead, "n0")
    (plan,) = _plans(_joins(lead, "n9", now=5.0))
    said = other.take_over(plan, {}, 100.0)
    assert [one.names for one in said if isinstance(one, QuiesceNodes)] == [("n0", "n9")]
    assert other.plan is None
    assert not other.began


@pytest.mark.parametrize("job", [{}, {"generation": 0}, []])
def test_a_malformed_plan_is_not_taken_over(job: Any) -> None:
    (plan,) = _plans(_ready_again())
    other = _leads(2, 2, 1)
    with pytest.raises((KeyError, TypeError, ValueError)):
        other.take_over(replace(plan, job=job), {}, 100.0)
    assert not other.began
