"""What a leader does about a failing node: a spare replaces it after the next save; without one it stays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outlast.cluster.policy.events import Heartbeat, HoldRanks, Judged, LeadOutcome, Log, NodeEvent, StepSaved
from outlast.cluster.policy.job_controller import DRAIN_PATIENCE, JobController
from outlast.cluster.policy.members import Left
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import AllStarted, CommitSeen, LoadSeen, NoSaveComes, OwnCheckpoint
from tests.cluster.policy.test_job_controller import ABLE, begun

FAILING = Fault(FaultKind.FAILING, "n1", -1, 1, 40, "n1 is failing: XID 79", "n1 is failing")


def _told(lead: JobController, now: float = 5.0, held: int | None = None) -> list[LeadOutcome]:
    said = lead.handle(NodeEvent("n1", 1, FAILING), now)
    return said + lead.held(held, now)


def _commit(lead: JobController, step: int, now: float) -> list[LeadOutcome]:
    return lead.handle(NodeEvent("n0", 1, CommitSeen(step, f"step-{step}")), now)


def _own(lead: JobController, step: int, agreed: int, now: float) -> list[LeadOutcome]:
    return lead.handle(NodeEvent("n0", 1, OwnCheckpoint(step, agreed)), now)


def _judged(outcomes: Iterable[LeadOutcome]) -> list[tuple[RecoveryAction, str]]:
    return [(one.action.kind, one.action.exclude) for one in outcomes if isinstance(one, Judged)]


def test_a_failing_node_is_replaced_after_the_save_and_not_before() -> None:
    lead = begun("n0", "n1", spares=1)
    words = "n1 is failing: XID 79: a spare replaces n1 after the next save"
    assert _told(lead) == [Log(words), HoldRanks()]
    assert _told(lead, 6.0) == []
    assert _judged(_commit(lead, 39, 7.0)) == []
    said = _commit(lead, 42, 8.0)
    assert _judged(said) == [(RecoveryAction.REPLACE_NODE, "n1")]
    assert HoldRanks(over=True) not in said
    assert lead.generation == 2


def test_a_failing_node_is_replaced_when_the_step_at_which_ranks_wait_is_saved() -> None:
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert _judged(_commit(lead, 41, 6.0)) == [], "the ranks do not wait yet"
    assert lead.held(43, 7.0) == []
    assert _judged(_commit(lead, 42, 7.5)) == []
    assert _judged(_commit(lead, 43, 8.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_where_ranks_cannot_wait_a_save_that_came_meanwhile_is_enough() -> None:
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert _judged(_commit(lead, 41, 6.0)) == []
    assert _judged(lead.held(None, 7.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_a_checkpoint_of_the_scripts_own_at_the_agreed_step_is_enough() -> None:
    """A framework counts its steps as it likes; 1 is agreed on after the first one since the start."""
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert _judged(_own(lead, 104, 2, 6.0)) == []
    assert lead.held(3, 7.0) == [], "step 104 is not what the ranks agreed on"
    assert _judged(_own(lead, 104, 2, 7.5)) == []
    assert _judged(_own(lead, 106, 3, 8.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_a_save_of_an_earlier_loop_is_not_the_one_that_was_agreed_on() -> None:
    """A second fit of one process counts from 0 again."""
    lead = begun("n0", "n1", spares=1)
    _own(lead, 500, 500, 4.0)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert _judged(lead.held(12, 7.0)) == []
    assert _judged(_own(lead, 512, 12, 8.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_where_ranks_cannot_wait_a_checkpoint_of_the_scripts_own_counts_by_its_step() -> None:
    lead = begun("n0", "n1", spares=1)
    assert _judged(_told(lead)) == []
    assert _judged(_own(lead, 39, -1, 6.0)) == []
    assert _judged(_own(lead, 40, -1, 8.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_nodes_are_told_of_a_checkpoint_of_the_scripts_own() -> None:
    """A node at risk would ask for a save again and again."""
    lead = begun("n0", "n1")
    assert _own(lead, 40, -1, 5.0) == [StepSaved(40)]
    assert lead.saved == 40
    assert _own(lead, 40, -1, 6.0) == []


def test_a_save_that_was_rolled_back_is_none() -> None:
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert _judged(_commit(lead, 60, 6.0)) == []
    lead.handle(NodeEvent("n0", 1, LoadSeen(30, "step-000000030.g1")), 6.5)
    assert _judged(lead.held(42, 7.0)) == [], "step 60 will be trained again"
    assert _judged(_commit(lead, 42, 8.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_without_a_spare_the_job_goes_on() -> None:
    lead = begun("n0", "n1")
    (said,) = _told(lead)
    assert said == Log("n1 is failing: XID 79: no spare node is there, so the job goes on with n1")
    assert _judged(_commit(lead, 42, 8.0)) == []
    assert lead.generation == 1


def test_a_spare_that_is_dying_too_is_passed_over() -> None:
    lead = begun("n0", "n1", spares=1)
    sick = replace(ABLE, at_risk="GPU 0: XID 79")
    words = "n2 is at risk: GPU 0: XID 79: as a spare it is passed over"
    assert Log(words) in lead.handle(Heartbeat("n2", "1", sick, 0), 4.0)
    assert Log(words) not in lead.handle(Heartbeat("n2", "1", sick, 0), 4.5)
    (said,) = _told(lead)
    assert isinstance(said, Log)
    assert said.reason.endswith("goes on with n1; passed over: n2 (at risk: GPU 0: XID 79)")
    assert _judged(_commit(lead, 42, 8.0)) == []
    lead.handle(Heartbeat("n2", "1", ABLE, 0), 9.0)
    assert _judged(_told(lead, 9.5)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_a_spare_that_falls_ill_meanwhile_keeps_the_node() -> None:
    lead = begun("n0", "n1", spares=1)
    _told(lead)
    lead.handle(Heartbeat("n2", "1", replace(ABLE, at_risk="GPU 0: XID 79"), 0), 6.0)
    said = _commit(lead, 42, 8.0)
    assert _judged(said) == [(RecoveryAction.NONE, "")]
    assert said[-1] == HoldRanks(over=True)


def test_a_save_that_does_not_come_is_not_waited_for_for_ever() -> None:
    lead = begun("n0", "n1", spares=1)
    _told(lead)
    assert lead.deadline <= 5.0 + DRAIN_PATIENCE
    for name in ("n0", "n1", "n2"):
        lead.handle(Heartbeat(name, "1", ABLE, 0), 5.0 + DRAIN_PATIENCE - 1)
    assert _judged(lead.tick(5.0 + DRAIN_PATIENCE)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_a_save_that_cannot_come_is_not_waited_for() -> None:
    """Lightning's Trainer without a ModelCheckpoint."""
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert lead.held(12, 6.0) == []
    none = NodeEvent("n0", 1, NoSaveComes("the Trainer has no ModelCheckpoint"))
    assert _judged(lead.handle(none, 7.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]
    assert _judged(lead.handle(none, 8.0)) == [], "of a generation that is over"


def test_a_save_that_came_after_one_that_could_not_is_waited_for() -> None:
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n0", 1, NoSaveComes("of an earlier fit")), 4.0)
    _commit(lead, 30, 4.5)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert _judged(lead.held(42, 6.0)) == []
    assert _judged(_commit(lead, 42, 7.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_a_spare_that_has_gone_meanwhile_keeps_the_node() -> None:
    lead = begun("n0", "n1", spares=1)
    _told(lead)
    lead.handle(Left("n2", "gone"), 6.0)
    said = _commit(lead, 42, 8.0)
    assert _judged(said) == [(RecoveryAction.NONE, "")]
    assert said[-1] == HoldRanks(over=True), "the ranks go on"
    assert lead.generation == 1


def test_a_node_that_is_kept_hides_no_other_fault() -> None:
    lead = begun("n0", "n1", spares=1)
    _told(lead)
    lead.handle(Left("n2", "gone"), 6.0)
    hang = Fault(FaultKind.HANG, "n0", -1, 1, 41, "all ranks wait", "all ranks wait")
    assert _judged(lead.handle(NodeEvent("n0", 1, hang), 7.0)) == []
    assert _judged(_commit(lead, 41, 7.5)) == [(RecoveryAction.NONE, "")]
    for name in ("n0", "n1"):
        lead.handle(Heartbeat(name, "1", ABLE, 0), 19.0)
    assert [kind for kind, _ in _judged(lead.tick(20.0))] != []


def test_one_of_an_older_generation_says_nothing() -> None:
    lead = begun("n0", "n1", spares=1)
    _told(lead)
    _commit(lead, 42, 8.0)
    assert _told(lead, 9.0) == []


def test_a_save_of_an_older_generation_is_none() -> None:
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    assert _judged(lead.handle(NodeEvent("n0", 0, CommitSeen(60, "step-60")), 6.0)) == []
    assert _judged(lead.held(None, 7.0)) == []
    assert _judged(_commit(lead, 40, 8.0)) == [(RecoveryAction.REPLACE_NODE, "n1")]


def _restarted(lead: JobController, now: float) -> None:
    """Let a rank of n0 crash, and all nodes answer."""
    crash = Fault(FaultKind.CRASH, "n0", 0, 1, 30, "rank 0 was killed", "signal 9")
    lead.handle(NodeEvent("n0", 1, crash), now)
    for name in ("n0", "n1", "n2"):
        lead.handle(Heartbeat(name, "1", replace(ABLE, store=5002), 1), now)
    assert lead.generation == 2
    assert lead.plan is not None


def test_a_node_that_was_failing_in_an_earlier_generation_is_waited_for_no_more() -> None:
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    _restarted(lead, 6.0)
    assert lead.held(30, 7.0) == []
    assert _judged(lead.tick(lead.deadline)) == []
    assert _judged(lead.tick(5.0 + DRAIN_PATIENCE)) == []


def test_a_failing_node_that_a_fault_kept_in_the_job_is_replaced_in_the_next_generation() -> None:
    """A person has asked for it, for example, and asks once."""
    lead = begun("n0", "n1", spares=1)
    lead.handle(NodeEvent("n1", 1, FAILING), 5.0)
    _restarted(lead, 6.0)
    said = [one for name in ("n0", "n1") for one in lead.handle(NodeEvent(name, 2, AllStarted(2)), 7.0)]
    assert HoldRanks() in said
    lead.held(31, 7.5)
    said = lead.handle(NodeEvent("n0", 2, CommitSeen(31, "step-000000031.g2")), 8.0)
    assert _judged(said) == [(RecoveryAction.REPLACE_NODE, "n1")]


def test_what_was_saved_in_an_earlier_generation_is_not_what_is_waited_for() -> None:
    """The ranks may have gone on from an older step."""
    lead = begun("n0", "n1", spares=1)
    _commit(lead, 60, 4.0)
    _restarted(lead, 6.0)
    lead.handle(NodeEvent("n1", 2, replace(FAILING, generation=2)), 7.0)
    assert _judged(lead.held(None, 8.0)) == []
    said = lead.handle(NodeEvent("n0", 2, CommitSeen(41, "step-000000041.g2")), 9.0)
    assert _judged(said) == [(RecoveryAction.REPLACE_NODE, "n1")]
