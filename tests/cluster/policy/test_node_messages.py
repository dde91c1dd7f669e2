"""What one agent answers to each message, in a job of which the test plays all other agents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.cluster.policy.codec import MessageError
from outlast.cluster.policy.contacts import BEACON_EVERY
from outlast.cluster.policy.events import (
    JoinRejected,
    Lived,
    Log,
    Order,
    Ping,
    Reset,
    SendMessage,
    SendToAddress,
    Start,
    StepSaved,
    timing_for,
)
from outlast.cluster.policy.members import JobSpec, KnownNode, Member, MembershipState, Role
from outlast.cluster.policy.messages import (
    AgentsRestarted,
    AppendEntries,
    AppendReply,
    Assignment,
    Beacon,
    BlameNotice,
    Ending,
    EventBatch,
    Join,
    JoinAccepted,
    JoinRefused,
    MayLeave,
    Message,
    NodeStatus,
    Quiesce,
    Record,
    RecordMissing,
    Redirect,
    StatusReport,
    StepOrder,
)
from outlast.cluster.policy.node import ClusterNode
from outlast.cluster.policy.plan import PLANS, JobPlan
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.attribution import Blamed, EvidenceReport, Seen
from outlast.hang.policy.diagnosis import Verdict
from outlast.recovery.policy.events import Fault, FaultKind, StateSource
from outlast.recovery.policy.job import AllStarted, CommitSeen, StopRequested
from outlast.stragglers.policy.gathering import TimingReport

NAMES = ("n0", "n1", "n2")
TERMS = JobSpec("run", "1", "-", 1, 2, 3)
MEMBERS = frozenset({"n0#1", "n1#1", "n2#1"})
RECORD = Record(1, 2, 1, MEMBERS, MEMBERS, "", (MEMBERS,))
MINE = Assignment(1, seated=True, nodes=3, world_size=3)


def _member(name: str, incarnation: str = "1") -> Member:
    return Member(name, f"{name}:1", 1, "run", "1", "-", incarnation=incarnation)


def _node(founder: bool = False, after: int = 0) -> ClusterNode:
    """Return the agent n1, which knows where n0 is."""
    start = Start(founder, ("n0:1",), None, after)
    return ClusterNode(_member("n1"), TERMS, FaultToleranceOptions(), start, (1000.0, 0.0))


def _ping(
    node: ClusterNode, now: float, *, taken: int = 0, saved: int = -1, term: int = 1, **other: object
) -> list[Order]:
    record = replace(RECORD, term=term)
    said = AppendEntries(
        term, now, record.key, committed=True, record=record, taken=taken, session="n0#1", saved=saved
    )
    return node.handle("n0#1", replace(said, **other), now)  # type: ignore[arg-type]


def _following(now: float = 1001.0) -> ClusterNode:
    """Return an agent that follows n0."""
    node = _node()
    _ping(node, now)
    assert node.leader == "n0#1"
    assert (node.session, node.generation) == ("n0#1", 1)
    return node


def _sent(orders: list[Order], to: str = "n0#1") -> list[Message]:
    return [one.message for one in orders if isinstance(one, SendMessage) and one.to == to]


def _alone(node: ClusterNode) -> float:
    """Return a time at which an agent has heard nobody for long."""
    now = 1100.0
    node.tick(now)
    assert node.alone_since(now) is not None
    return now


def test_an_agent_asks_for_the_leader_once_a_second_until_it_hears_one() -> None:
    node = _node(after=4)
    node.status = NodeStatus(5001)
    join = SendToAddress("n0:1", Join(_member("n1"), 0, 4, "", 0, NodeStatus(5001)))
    assert node.tick(1000.0) == [join]
    assert node.tick(1000.9) == []
    assert node.tick(1001.0) == [join]
    assert node.alone_since(1001.0) == 1000.0
    _ping(node, 1001.5)
    assert [one for one in node.tick(1002.5) if isinstance(one, SendToAddress)] == []
    assert node.alone_since(1002.5) is None


def test_an_agent_that_is_told_to_stop_says_so_when_it_asks() -> None:
    node = _node()
    assert node.tell(StopRequested(15), 0, 1000.0) == [], "there is nobody to tell yet"
    (order,) = node.tick(1000.0)
    assert isinstance(order, SendToAddress)
    assert isinstance(order.message, Join)
    assert order.message.asked == 15


def test_an_agent_that_is_taken_in_counts_its_waiting_from_then() -> None:
    node = _node()
    node.handle("n0#1", JoinAccepted(), 1030.0)
    assert node.alone_since(1031.0) == 1030.0


def test_only_who_seeks_the_leader_follows_a_redirection_or_a_refusal() -> None:
    node = _node()
    (order,) = node.handle("n2#1", Redirect("n7:1"), 1000.5)
    assert isinstance(order, SendToAddress)
    assert (order.address, type(order.message)) == ("n7:1", Join)
    assert node.handle("n0#1", JoinRefused("full"), 1000.6) == [JoinRejected("full")]
    node = _following()
    assert node.handle("n2#1", Redirect("n7:1"), 1001.5) == []
    assert node.handle("n2#1", JoinRefused("full"), 1001.6) == []
    assert node.handle("n0#1", JoinRefused("n1 is excluded", True), 1001.7) == [
        JoinRejected("n1 is excluded")
    ]


def test_a_follower_answers_each_heartbeat_with_its_status() -> None:
    node = _following()
    node.status = NodeStatus(5001, able=True)
    (reply,) = (one for one in _sent(_ping(node, 1002.0)) if isinstance(one, AppendReply))
    assert (reply.session, reply.status, reply.key) == ("n0#1", node.status, RECORD.key)


def test_a_follower_that_lacks_the_record_of_a_heartbeat_asks_for_it() -> None:
    node = _node()
    assert _sent(_ping(node, 1001.0, record=None)) == [RecordMissing()]
    _ping(node, 1001.5)
    assert RecordMissing() not in _sent(_ping(node, 1002.0, record=None))
    assert _sent(_ping(node, 1002.5, record=None, key=(1, 3))) == [RecordMissing()]


def test_a_heartbeat_of_another_job_is_no_heartbeat() -> None:
    node = _following()
    assert _ping(node, 1002.0, session="n9#1") == []
    assert node.session == "n0#1"


def test_an_agent_hears_of_each_save_once() -> None:
    node = _node()
    assert not any(isinstance(one, StepSaved) for one in _ping(node, 1001.0)), "nothing is saved"
    assert StepSaved(40) in _ping(node, 1002.0, saved=40)
    assert not any(isinstance(one, StepSaved) for one in _ping(node, 1002.5, saved=40))
    assert StepSaved(60) in _ping(node, 1003.0, saved=60)


def test_what_a_record_means_for_a_node_that_does_not_vote_is_what_its_leader_wrote() -> None:
    node = _node()
    assert MINE in _ping(node, 1001.0, assignment=MINE)
    node = _node()
    assert MINE not in _ping(node, 1001.0), "nobody has said what it means"


def test_what_an_earlier_record_meant_is_not_done_again_for_the_next_one() -> None:
    node = _node()
    assert MINE in _ping(node, 1001.0, assignment=MINE)
    later = replace(RECORD, version=3, generation=2)
    assert MINE not in _ping(node, 1001.5, record=later, key=later.key)
    assert node.generation == 2


def test_a_plan_says_what_it_means_for_the_node_and_where_the_others_are() -> None:
    known = tuple(KnownNode(replace(_member(name), address=f"{name}:7"), Role.ACTIVE, "") for name in NAMES)
    plan = JobPlan(
        membership=MembershipState(1, NAMES, known, None),
        job={},
        seats=tuple(RankAssignment(name, f"{name}:7", at, 1) for at, name in enumerate(NAMES)),
        reason="the job begins",
        why="",
        hung_again=False,
        state=StateSource.NEWEST,
        avoid=(),
        port=5001,
        reenter=False,
        layout="",
        end=None,
    )
    node = _node()
    said = _ping(node, 1001.0, record=replace(RECORD, plan=PLANS.write(plan)))
    assert plan.assignment(1, "n1") in said
    assert _sent(node.handle("n7#1", Join(_member("n7"), 0, 0), 1001.2), "n7#1") == [Redirect("n0:7")]
    now = _alone(node)
    asked = [one.address for one in node.tick(now + 1.0) if isinstance(one, SendToAddress)]
    assert asked == ["n0:1", "n0:7", "n1:7", "n2:7"]


def test_what_happens_on_a_node_is_told_to_its_leader_until_it_was_taken() -> None:
    node = _following()
    (batch,) = _sent(node.tell(AllStarted(1), 1, 1002.0))
    assert isinstance(batch, EventBatch)
    assert (batch.after, [one.event for one in batch.events]) == (0, [AllStarted(1)])
    assert not any(isinstance(one, EventBatch) for one in _sent(_ping(node, 1002.1)))
    assert batch in _sent(_ping(node, 1002.6)), "it was lost on the way"
    assert not any(isinstance(one, EventBatch) for one in _sent(_ping(node, 1003.1, taken=1)))
    saved = CommitSeen(40, "step-000000040.g1")
    (batch,) = _sent(node.tell(saved, 1, 1003.2))
    assert isinstance(batch, EventBatch)
    assert (batch.after, [one.event for one in batch.events]) == (1, [saved])


def test_another_leader_is_told_all_that_happened_in_the_generation() -> None:
    node = _following()
    node.tell(AllStarted(1), 1, 1002.0)
    _ping(node, 1002.1, taken=1)
    (batch,) = (one for one in _sent(_ping(node, 1003.0, term=2)) if isinstance(one, EventBatch))
    assert [one.event for one in batch.events] == [AllStarted(1)]


def test_another_leader_learns_that_a_generation_was_stopped_for_the_one_before() -> None:
    node = _following()
    assert node.handle("n0#1", Quiesce(2, "rank 3 was killed"), 1002.0) == [Quiesce(2, "rank 3 was killed")]
    node.halted(2, 1002.1)
    (batch,) = (one for one in _sent(_ping(node, 1003.0, term=2)) if isinstance(one, EventBatch))
    (fault,) = (one.event for one in batch.events)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.node, fault.generation) == (FaultKind.LOST, "n1", 1)


def test_a_node_quiesces_for_its_leader_and_tells_it_when_it_has() -> None:
    node = _following()
    order = Quiesce(2, "rank 3 was killed")
    assert node.handle("n2#1", order, 1002.0) == [], "n2 does not lead"
    assert node.halted(1, 1002.0) == [], "nobody has asked"
    assert node.handle("n0#1", order, 1002.1) == [order]
    assert _sent(node.halted(2, 1002.2)) == [StatusReport(2, node.status)]
    node = _node()
    assert node.handle("n2#1", order, 1001.0) == [order], "it knows no leader"
    assert _sent(node.halted(2, 1001.1), "n2#1") == [StatusReport(2, node.status)]


def test_the_leader_is_told_at_once_whether_ranks_can_enter_their_function_again() -> None:
    node = _following()
    assert node.offers(NodeStatus(5001), 1002.0) == []
    able = NodeStatus(5001, able=True)
    assert _sent(node.offers(able, 1002.1)) == [StatusReport(0, able)]
    assert node.offers(able, 1002.2) == []
    assert _node().offers(able, 1002.3) == [], "there is nobody to tell"


def test_what_was_seen_of_silent_ranks_is_told_to_the_leader() -> None:
    (report,) = _sent(_following().seen(Seen(1, (), 1.0), 5.0, 1002.0))
    assert isinstance(report, EvidenceReport)
    assert _node().seen(Seen(1, (), 1.0), 5.0, 1002.0) == []


def test_only_the_leader_of_this_job_names_the_rank_that_hangs() -> None:
    node, verdict = _following(), Verdict(3, "it waits for nobody")
    notice = BlameNotice(1, "n2", verdict, "n0#1")
    assert node.handle("n0#1", notice, 1002.0) == [Blamed((), 1, "n2", verdict)]
    assert node.handle("n2#1", notice, 1002.0) == []
    assert node.handle("n0#1", replace(notice, session="n9#1"), 1002.0) == []


def test_a_voter_stays_until_the_leader_of_this_job_lets_it_leave() -> None:
    node = _following()
    assert not node.settled()
    node.handle("n0#1", MayLeave("n9#1"), 1002.0)
    assert not node.settled()
    assert node.handle("n0#1", MayLeave("n0#1"), 1002.0) == []
    assert node.settled()
    assert node.farewell() == []
    assert _node().settled(), "it is in no job"


def test_who_asks_a_follower_for_the_leader_is_sent_there() -> None:
    node = _following()
    assert _sent(node.handle("n7#1", Join(_member("n7"), 0, 0), 1002.0), "n7#1") == [], (
        "its address is unknown"
    )
    node.handle("n0#1", Join(_member("n0"), 0, 0), 1002.1)
    assert _sent(node.handle("n7#1", Join(_member("n7"), 0, 0), 1002.2), "n7#1") == [Redirect("n0:1")]


def test_two_agents_that_seek_the_leader_tell_each_other_that_they_began_anew() -> None:
    node = _node()
    asked = Join(_member("n2"), 1, 0, "n0#1")
    assert _sent(node.handle("n2#1", asked, 1001.0), "n2#1") == [AgentsRestarted(("n1#1",))]
    assert node.handle("n2#1", replace(asked, generation=0), 1001.0) == []
    node = _following()
    now = _alone(node)
    assert node.handle("n2#1", asked, now) == [], "both run the same generation"


def test_an_agent_begins_anew_once_the_majority_of_its_job_is_known_to_be_dead() -> None:
    node = _following()
    now = _alone(node)
    assert node.handle("n2#2", AgentsRestarted(("n2#2",)), now) == []
    (order,) = node.handle("n0#2", AgentsRestarted(("n0#2",)), now)
    assert order == Reset(1, "quorum lost (agent of n0, n2 restarted); restarting this agent")


def test_a_message_that_makes_no_sense_is_refused_by_its_name() -> None:
    node = _following()
    record = replace(RECORD, version=3, plan="[")
    with pytest.raises(MessageError, match="plan: "):
        _ping(node, 1002.0, record=record, key=record.key)


def test_an_agent_that_seeks_the_leader_knocks_where_a_beacon_in_the_folder_changes() -> None:
    node = _node()
    beacon = Beacon("run", 1, "n0#1", "n0:9", 1)
    assert node.read(beacon, 1001.0) == []
    assert node.read(beacon, 1002.0) == [], "it may be left from an earlier job"
    (order,) = node.read(replace(beacon, beat=2), 1003.0)
    assert isinstance(order, SendToAddress)
    assert (order.address, type(order.message)) == ("n0:9", Join)
    assert node.read(None, 1004.0) == []
    assert node.beacon(1004.0) is None


def test_a_node_that_reads_how_its_job_ended_without_it_has_lived() -> None:
    follower = _following()
    end = Ending(0, "every rank has ended")
    beacon = Beacon("run", 2, follower.session, "n0:9", 1, end)
    assert follower.read(beacon, 1001.2) == [], "the leader is in contact"
    assert follower.read(beacon, 1060.0) == [Lived("n1"), end]
    follower = _following()
    follower.read(replace(beacon, session="n9#1"), 1001.2)
    assert follower.read(replace(beacon, session="n9#1", beat=2), 1001.4) == []


def test_a_founder_that_has_not_begun_joins_the_job_that_runs() -> None:
    node = _node(founder=True)
    for tenth in range(100):
        node.tick(1000.0 + tenth / 10)
    assert node.leader_state is not None
    said = node.handle("n0#1", Beacon("run", 3, "n0#1", "n0:9"), 1010.0)
    assert said[0] == Log("the job is already running, led from n0:9; this node joins it")
    assert [one.address for one in said if isinstance(one, SendToAddress)] == ["n0:9"]
    assert (node.leader, node.session, node.generation) == ("", "", 0)
    asked = [one.address for one in node.tick(1012.0) if isinstance(one, SendToAddress)]
    assert asked == ["n0:1", "n0:9"]


def _leading() -> ClusterNode:
    """Return an agent that leads a job that runs on it and n2."""
    node = _node(founder=True)
    for tenth in range(100):
        node.tick(1000.0 + tenth / 10)
    for name in ("n2", "n3"):
        node.handle(f"{name}#1", Join(_member(name), 0, 0), 1010.0)
    for who, store in (("n1", 5001), ("n2", 5002), ("n3", 5003)):
        if who == "n1":
            node.offers(NodeStatus(store), 1010.1)
        else:
            node.handle(f"{who}#1", StatusReport(0, NodeStatus(store)), 1010.1)
    assert node.leader_state is not None
    assert node.leader_state.lead.began
    return node


def test_the_newer_of_two_jobs_of_a_name_goes_on() -> None:
    node = _leading()
    (order,) = node.handle("n9#1", Beacon("run", 7, "n9#1", "n9:1"), 1010.5)
    assert order == Reset(7, "a newer job of this name is led from n9:1; this one gives way")
    (order,) = node.handle("n9#1", Beacon("run", 0, "a#1", "n9:1"), 1010.5)
    assert isinstance(order, SendToAddress)
    assert isinstance(order.message, Beacon)
    assert (order.address, order.message.session, order.message.address) == ("n9:1", "n1#1", "n1:1")


def test_a_leader_writes_beacons_that_change_every_second() -> None:
    node = _leading()
    beats = []
    for now in (1011.0, 1011.4, 1012.0):
        beacon = node.beacon(now)
        assert beacon is not None
        assert (beacon.run_id, beacon.address, beacon.session) == ("run", "n1:1", "n1#1")
        beats.append(beacon.beat)
    assert beats[0] == beats[1]
    assert beats[2] == beats[0] + 1


def test_a_leader_that_may_be_late_is_woken_in_time() -> None:
    assert _following().deadline(1010.0) == 1010.125
    node = _leading()
    assert node.leader_state is not None
    assert node.deadline(1010.3) == min(1010.425, node.leader_state.lead.deadline)


def test_a_leader_tells_a_node_that_it_is_not_taken_in() -> None:
    node = _leading()
    said = node.handle("n7#1", Join(_member("n7"), 0, 0), 1010.5)
    (refused,) = (one for one in _sent(said, "n7#1") if isinstance(one, JoinRefused))
    assert "3 active and 0 spare nodes are all that is wanted" in refused.reason
    assert not refused.excluded
    assert any(isinstance(one, Log) and one.reason == refused.reason for one in said)


def _replies(node: ClusterNode, *names: str, now: float) -> list[Order]:
    """Let followers answer, and once more where that has led to another record."""
    said: list[Order] = []
    for name in (*names, *names):
        record = node._elector.record
        assert record is not None
        reply = AppendReply(
            node._elector.term, record.key, record.generation, "1", session=node.session, sent=now, echo=now
        )
        said += node.handle(f"{name}#1", reply, now)
    return said


def test_a_leader_stays_until_all_agents_know_how_the_job_ended_and_then_lets_them_leave() -> None:
    node = _leading()
    _replies(node, "n2", "n3", now=1010.3)
    assert node.settled()
    said = node.tell(StopRequested(15), 1, 1010.5)
    assert node.leader_state is not None
    assert node.leader_state.lead.ending is not None
    assert any(isinstance(one, SendMessage) and isinstance(one.message, AppendEntries) for one in said)
    assert not node.settled()
    said = _replies(node, "n2", now=1010.6)
    assert node.leader_state.lead.ending in said, "a majority knows it"
    assert not node.settled()
    _replies(node, "n3", now=1010.7)
    assert node.settled()
    assert [(one.to, one.message) for one in node.farewell() if isinstance(one, SendMessage)] == [
        (name, MayLeave("n1#1")) for name in ("n2#1", "n3#1")
    ]


def test_a_leader_takes_what_it_sees_itself() -> None:
    node = _leading()
    _replies(node, "n2", "n3", now=1010.3)
    assert node.tell(AllStarted(1), 1, 1010.4) == []
    assert node.seen(Seen(1, (), 1.0), 5.0, 1010.5) == []
    assert node.timed(TimingReport(1, ()), 1010.5) == []
    node.offers(NodeStatus(5009), 1010.6)
    said = node.tell(Fault(FaultKind.CRASH, "n1", 0, 1, 5, "rank 0 was killed", "signal 9"), 1, 1010.7)
    order = next(one for one in said if isinstance(one, Quiesce))
    assert order.generation == 2
    assert [one.to for one in said if isinstance(one, SendMessage) and one.message == order] == [
        "n2#1",
        "n3#1",
    ]
    said = node.halted(2, 1010.8)
    for name in ("n2", "n3"):
        said += node.handle(f"{name}#1", StatusReport(2, NodeStatus(5003)), 1010.9)
    said += _replies(node, "n2", "n3", now=1011.0)
    mine = [one for one in said if isinstance(one, Assignment)][-1]
    assert (mine.generation, mine.port, mine.master) == (2, 5009, True)


def test_what_ranks_measured_is_told_to_the_leader() -> None:
    report = TimingReport(1, ())
    assert _sent(_following().timed(report, 1002.0)) == [report]
    assert _node().timed(report, 1002.0) == []


def test_an_agent_that_has_heard_nobody_for_two_promises_is_alone() -> None:
    node, patience = _following(1001.0), 2 * timing_for(TERMS.most, TERMS.ping_timeout).promise
    assert node.alone_since(1001.0 + patience - 0.01) is None
    assert node.alone_since(1001.0 + patience + 0.01) is not None


def test_a_founder_begins_nothing_with_a_part_of_the_nodes_while_another_job_may_write_beacons() -> None:
    node, began = _node(founder=True), 0.0
    for second in range(1, 60):
        now = 1000.0 + second
        node.tick(now)
        if second == 5:
            node.handle("n2#1", Join(_member("n2"), 0, 0), now)
        if second == 28:
            assert node.read(Beacon("run", 3, "n9#1", "n9:1", 7), now) == []
        if second > 5:
            node.handle("n2#1", StatusReport(0, NodeStatus(5002)), now)
        if not began and node.leader_state is not None and node.leader_state.lead.began:
            began = now
    patience = 2 * timing_for(TERMS.most, TERMS.ping_timeout).promise + 2 * BEACON_EVERY
    assert 1028.0 + patience <= began < 1028.0 + patience + 1.0


def test_a_connection_that_broke_ends_a_node_unless_its_agent_is_heard_again() -> None:
    node = _leading()
    _replies(node, "n2", "n3", now=1010.3)
    for name in ("n2", "n3"):
        assert node.gone(f"{name}#1", "reset by peer") == [Ping(f"{name}#1", f"{name}:1")], "it is dialled"
    assert not any(isinstance(one, Log) for one in node.tick(1010.9)), "which proves nothing yet"
    for name in ("n2", "n3"):
        node.unreachable(f"{name}:1", 1011.0)
    node.answered("n2#1", 0.1, 1011.1)
    said = node.tick(1011.4)
    words = "n3 is lost: its agent has ended (reset by peer); generation 1 is over"
    assert any(isinstance(one, Log) and one.reason == words for one in said)
    assert not any(isinstance(one, Log) and "n2 is lost" in one.reason for one in said)


def test_a_leader_that_another_one_has_replaced_is_not_heard_any_more() -> None:
    node = _following()
    _ping(node, 1002.0, term=2)
    assert not any(isinstance(one, StepSaved) for one in _ping(node, 1003.0, saved=99))
    patience = 2 * timing_for(TERMS.most, TERMS.ping_timeout).promise
    assert node.alone_since(1002.5 + patience) is not None


def test_what_only_a_leader_takes_is_nothing_to_another_agent() -> None:
    node = _following()
    for message in (RecordMissing(), StatusReport(0, NodeStatus()), EventBatch(0, ())):
        assert node.handle("n2#1", message, 1002.0) == []


def test_an_agent_without_ranks_does_not_answer_how_they_stand() -> None:
    node = _following()
    assert node.handle("n0#1", StepOrder(1, 0, "n0#1"), 1002.0) == []
    assert node.handle("n0#1", StepOrder(1, 1, "n0#1"), 1002.0) == []


def test_a_follower_tells_another_job_of_its_name_where_its_leader_is() -> None:
    node = _following()
    node.handle("n0#1", Join(_member("n0"), 0, 0), 1001.5)
    other = Beacon("run", 3, "n9#1", "n9:1")
    (order,) = node.handle("n9#1", other, 1002.0)
    assert order == SendToAddress("n9:1", Beacon("run", 1, "n0#1", "n0:1"))
    assert node.handle("n9#1", replace(other, run_id="another"), 1002.0) == []
    assert node.handle("n9#1", other, _alone(node)) == [], "it does not know whether its job still runs"


def test_a_founder_that_has_not_begun_joins_the_job_whose_beacon_changes() -> None:
    node = _node(founder=True)
    for tenth in range(100):
        node.tick(1000.0 + tenth / 10)
    beacon = Beacon("run", 3, "n0#1", "n0:9", 1)
    assert node.read(beacon, 1010.0) == []
    assert node.leader_state is not None
    said = node.read(replace(beacon, beat=2), 1011.0)
    assert [one.address for one in said if isinstance(one, SendToAddress)] == ["n0:9"]
    assert node.session == ""
