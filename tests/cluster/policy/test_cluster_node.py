"""What one agent answers to each message, as follower and as leader; the test plays the other agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from outlast.agreement.policy.steps import RanksSeen, Status, Want
from outlast.cluster.policy.codec import MessageError
from outlast.cluster.policy.contacts import BEACON_EVERY
from outlast.cluster.policy.events import (
    JoinRejected,
    Judged,
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
from outlast.cluster.policy.members import KnownNode, MembershipState, Role
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
    StepProposal,
    StepReport,
    Vote,
    VoteRequest,
)
from outlast.cluster.policy.node import ClusterNode
from outlast.cluster.policy.plan import PLANS, JobPlan
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.attribution import Blamed, EvidenceReport, Seen, report_of
from outlast.hang.policy.diagnosis import RankEvidence, Verdict
from outlast.recovery.policy.events import Fault, FaultKind, StateSource
from outlast.recovery.policy.job import AllStarted, CommitSeen, StopRequested
from outlast.stragglers.policy.gathering import TimingReport
from tests.cluster.builders import member, of_kind, only, spec

T = TypeVar("T", bound=Message)
NAMES = ("n0", "n1", "n2")
TERMS = spec(2, 3)
AGENTS = ("n0#1", "n1#1", "n2#1")
VOTERS = frozenset(AGENTS)
RECORD = Record(1, 2, 1, VOTERS, VOTERS, "", (VOTERS,))
MINE = Assignment(1, seated=True, nodes=3, world_size=3)
PATIENCE = 2 * timing_for(TERMS.most, TERMS.ping_timeout).promise
ASKS = RanksSeen(1, (Status(0, 1, round=1, step=5, wants=Want.SAVE),))
ORDER = Quiesce(2, "rank 3 was killed")


def agent(
    founder: bool = False, after: int = 0, name: str = "n1", seeds: tuple[str, ...] = ("n0:1",)
) -> ClusterNode:
    """Return an agent, which knows where n0 is."""
    return ClusterNode(
        member(name), TERMS, FaultToleranceOptions(), Start(founder, seeds, None, after), (1000.0, 0.0)
    )


def ping(node: ClusterNode, now: float, *, term: int = 1, sender: str = "n0#1", **other: Any) -> list[Order]:
    """Let a leader write to an agent."""
    record = replace(RECORD, term=term)
    said = AppendEntries(term, now, record.key, committed=True, record=record, session="n0#1")
    return node.handle(sender, replace(said, **other), now)


def following(generation: int = 1) -> ClusterNode:
    """Return an agent that follows n0."""
    node, record = agent(), replace(RECORD, generation=generation)
    ping(node, 1001.0, record=record)
    assert (node.leader, node.session, node.generation) == ("n0#1", "n0#1", generation)
    return node


def sent(orders: list[Order], kind: type[T], to: str = "") -> list[T]:
    return of_kind(kind, (one.message for one in of_kind(SendMessage, orders) if to in ("", one.to)))


def addressed(orders: list[Order]) -> list[tuple[str, type[Message]]]:
    return [(one.address, type(one.message)) for one in of_kind(SendToAddress, orders)]


def alone(node: ClusterNode) -> float:
    """Return a time at which an agent has heard nobody for long."""
    node.tick(1100.0)
    assert node.alone_since(1100.0) is not None
    return 1100.0


def knocks(name: str, **other: Any) -> Join:
    return replace(Join(member(name), 0, 0), **other)


# An agent that looks for the leader.


def test_an_agent_asks_for_the_leader_once_a_second_until_it_hears_one() -> None:
    node = agent(after=4)
    node.status = NodeStatus(5001)
    join = SendToAddress("n0:1", Join(member("n1"), 0, 4, "", 0, NodeStatus(5001)))
    assert [node.tick(now) for now in (1000.0, 1000.9, 1001.0)] == [[join], [], [join]]
    assert node.alone_since(1001.0) == 1000.0
    ping(node, 1001.5)
    assert addressed(node.tick(1002.5)) == []
    assert node.alone_since(1002.5) is None


def test_an_agent_that_is_told_to_stop_says_so_when_it_asks() -> None:
    node = agent()
    assert node.tell(StopRequested(15), 0, 1000.0) == [], "there is nobody to tell yet"
    join = only(SendToAddress, node.tick(1000.0)).message
    assert isinstance(join, Join)
    assert (join.asked, join.generation, join.after) == (15, 0, 0)


def test_an_agent_that_is_taken_in_counts_its_waiting_from_then() -> None:
    node = agent()
    node.handle("n0#1", JoinAccepted(), 1030.0)
    assert node.alone_since(1031.0) == 1030.0


def test_only_who_seeks_the_leader_follows_a_redirection_or_a_refusal_of_another_agent() -> None:
    node = agent()
    assert addressed(node.handle("n2#1", Redirect("n7:1"), 1000.5)) == [("n7:1", Join)]
    assert node.handle("n0#1", JoinRefused("full"), 1000.6) == [JoinRejected("full")]
    node = following()
    assert node.handle("n2#1", Redirect("n7:1"), 1001.5) == []
    assert node.handle("n2#1", JoinRefused("full"), 1001.6) == []
    assert node.handle("n0#1", JoinRefused("bad", True), 1001.7) == [JoinRejected("bad")]


def test_two_agents_that_seek_the_leader_tell_each_other_that_they_began_anew() -> None:
    node, asked = agent(), knocks("n2", generation=1, session="n0#1")
    assert sent(node.handle("n2#1", asked, 1001.0), AgentsRestarted, "n2#1") == [AgentsRestarted(("n1#1",))]
    assert node.handle("n2#1", replace(asked, generation=0), 1001.0) == []
    node = following()
    assert node.handle("n2#1", asked, alone(node)) == [], "both run the same generation"


def test_an_agent_begins_anew_once_the_majority_of_its_job_is_known_to_be_dead() -> None:
    node = following()
    now = alone(node)
    assert node.handle("n2#2", AgentsRestarted(("n2#2",)), now) == []
    assert only(Reset, node.handle("n0#2", AgentsRestarted(("n0#2",)), now)).after == 1


def test_an_agent_that_seeks_the_leader_knocks_where_a_beacon_in_the_folder_changes() -> None:
    node, beacon = agent(), Beacon("run", 1, "n0#1", "n0:9", 1)
    assert node.read(beacon, 1001.0) == []
    assert node.read(beacon, 1002.0) == [], "it may be left from an earlier job"
    assert addressed(node.read(replace(beacon, beat=2), 1003.0)) == [("n0:9", Join)]
    assert node.read(None, 1004.0) == []
    assert node.beacon(1004.0) is None


def test_an_agent_whose_ranks_run_joins_no_other_job_though_it_hears_nothing() -> None:
    node = following()
    assert ping(node, alone(node), session="n9#1") == []
    assert (node.session, node.generation) == ("n0#1", 1)


def test_an_agent_that_has_heard_nobody_for_two_promises_is_alone() -> None:
    node = following()
    assert node.alone_since(1001.0 + PATIENCE - 0.01) is None
    assert node.alone_since(1001.0 + PATIENCE + 0.01) is not None


# An agent that follows.


def test_a_follower_answers_each_heartbeat_with_its_status() -> None:
    node = following()
    node.status = NodeStatus(5001, able=True)
    (reply,) = sent(ping(node, 1002.0), AppendReply)
    assert (reply.session, reply.status, reply.key) == ("n0#1", node.status, RECORD.key)
    assert ping(node, 1003.0, session="n9#1") == [], "that is another job"
    assert node.session == "n0#1"


def test_a_follower_that_lacks_the_record_of_a_heartbeat_asks_for_it() -> None:
    node, lacks = agent(), {"record": None}
    given: list[dict[str, Any]] = [lacks, {}, lacks, {**lacks, "key": (1, 3)}]
    asks = [len(sent(ping(node, 1001.0 + at, **one), RecordMissing)) for at, one in enumerate(given)]
    assert asks == [1, 0, 0, 1]


def test_an_agent_hears_of_each_save_once() -> None:
    node = agent()
    heard = [
        of_kind(StepSaved, ping(node, 1001.0 + at, saved=step)) for at, step in enumerate((-1, 40, 40, 60))
    ]
    assert heard == [[], [StepSaved(40)], [], [StepSaved(60)]]


def test_what_a_record_means_for_a_node_that_does_not_vote_is_what_its_leader_wrote_once() -> None:
    node, later = agent(), replace(RECORD, version=3, generation=2)
    assert MINE in ping(node, 1001.0, assignment=MINE)
    assert MINE not in ping(node, 1001.5, record=later, key=later.key)
    assert node.generation == 2
    assert MINE not in ping(agent(), 1001.0), "nobody has said what it means"


def test_a_plan_says_what_it_means_for_the_node_and_where_the_others_are() -> None:
    known = tuple(KnownNode(member(name, address=f"{name}:7"), Role.ACTIVE, "") for name in NAMES)
    seats = tuple(RankAssignment(name, f"{name}:7", at, 1) for at, name in enumerate(NAMES))
    state = MembershipState(1, NAMES, known, None)
    plan = JobPlan(state, {}, seats, "begins", "", False, StateSource.NEWEST, (), 5001, False, "", None)
    node = agent()
    said = ping(node, 1001.0, record=replace(RECORD, plan=PLANS.write(plan)))
    assert plan.assignment(1, "n1") in said
    assert sent(node.handle("n7#1", knocks("n7"), 1001.2), Redirect, "n7#1") == [Redirect("n0:7")]
    asked = [address for address, _ in addressed(node.tick(alone(node) + 1.0))]
    assert asked == ["n0:1", "n0:7", "n1:7", "n2:7"]


def test_what_happens_on_a_node_is_told_to_its_leader_until_it_was_taken() -> None:
    node = following()
    (batch,) = sent(node.tell(AllStarted(1), 1, 1002.0), EventBatch)
    assert (batch.after, [one.event for one in batch.events]) == (0, [AllStarted(1)])
    again = [
        sent(ping(node, now, taken=taken), EventBatch)
        for now, taken in ((1002.1, 0), (1002.6, 0), (1003.1, 1))
    ]
    assert again == [[], [batch], []], "it was lost on the way"
    saved = CommitSeen(40, "step-000000040.g1")
    (batch,) = sent(node.tell(saved, 1, 1003.2), EventBatch)
    assert (batch.after, [one.event for one in batch.events]) == (1, [saved])


def test_another_leader_is_told_all_that_happened_in_the_generation() -> None:
    node = following()
    node.tell(AllStarted(1), 1, 1002.0)
    ping(node, 1002.1, taken=1)
    (batch,) = sent(ping(node, 1003.0, term=2), EventBatch)
    assert [one.event for one in batch.events] == [AllStarted(1)]


@pytest.mark.parametrize(("halted", "told"), [(2, [(FaultKind.LOST, "n1", 1)]), (1, [])])
def test_another_leader_learns_that_a_generation_was_stopped_for_the_one_before(
    halted: int, told: list[tuple[FaultKind, str, int]]
) -> None:
    node = following()
    node.handle("n0#1", ORDER, 1002.0)
    node.halted(halted, 1002.1)
    batches = sent(ping(node, 1003.0, term=2), EventBatch)
    faults = of_kind(Fault, (one.event for batch in batches for one in batch.events))
    assert [(one.kind, one.node, one.generation) for one in faults] == told


def test_what_happened_in_a_job_that_was_left_is_not_told_in_the_next_one_but_for_a_stop() -> None:
    node = following(generation=0)
    node.tell(CommitSeen(40, "step-000000040.g1"), 0, 1002.0)
    node.tell(StopRequested(15), 0, 1002.0)
    record = replace(RECORD, generation=0)
    (batch,) = sent(ping(node, alone(node), session="n9#1", record=record), EventBatch)
    assert node.session == "n9#1"
    assert [one.event for one in batch.events] == [StopRequested(15)]


def test_a_node_quiesces_for_its_leader_and_tells_it_when_it_has() -> None:
    node = following()
    assert node.handle("n2#1", ORDER, 1002.0) == [], "n2 does not lead"
    assert node.halted(1, 1002.0) == [], "nobody has asked"
    assert node.handle("n0#1", ORDER, 1002.1) == [ORDER]
    assert sent(node.halted(2, 1002.2), StatusReport) == [StatusReport(2, node.status)]
    node = agent()
    assert node.handle("n2#1", ORDER, 1001.0) == [ORDER], "it knows no leader"
    assert sent(node.halted(2, 1001.1), StatusReport, "n2#1") == [StatusReport(2, node.status)]


def test_the_leader_is_told_at_once_whether_ranks_can_enter_their_function_again() -> None:
    node, able = following(), NodeStatus(5001, able=True)
    assert node.offers(NodeStatus(5001), 1002.0) == []
    assert sent(node.offers(able, 1002.1), StatusReport) == [StatusReport(0, able)]
    assert node.offers(able, 1002.2) == []
    assert agent().offers(able, 1002.3) == [], "there is nobody to tell"


def test_what_is_seen_and_measured_of_ranks_is_told_to_the_leader() -> None:
    timing = TimingReport(1, ())
    assert sent(following().seen(Seen(1, (), 1.0), 5.0, 1002.0), EvidenceReport)
    assert sent(following().timed(timing, 1002.0), TimingReport) == [timing]
    assert agent().seen(Seen(1, (), 1.0), 5.0, 1002.0) == agent().timed(timing, 1002.0) == []


def test_what_ranks_ask_for_is_told_at_every_interval_until_the_leader_has_answered() -> None:
    node = following()
    (report,) = sent(node.steps(ASKS, 1002.0), StepReport, "n0#1")
    assert (report.term, report.generation, report.session) == (1, 1, "n0#1")
    assert (report.step, report.wants) == (5, int(Want.SAVE))
    times = [1002.0, 1002.25, 1002.5, 1002.75, 1003.0, 1003.25]
    assert [len(sent(node.tick(now), StepReport, "n0#1")) for now in times] == [0, 0, 1, 0, 1, 0]
    later = replace(RECORD, version=3, generation=2)
    ping(node, 1003.5, record=later, key=later.key)
    assert sent(node.tick(1004.0), StepReport) == [], "another generation is about to run"
    assert agent().steps(ASKS, 1001.0) == [], "there is nobody to tell"


VERDICT = Verdict(3, "it waits for nobody")
NOTICE = BlameNotice(1, "n2", VERDICT, "n0#1")


@pytest.mark.parametrize(
    ("sender", "message", "orders"),
    [
        ("n0#1", NOTICE, [Blamed((), 1, "n2", VERDICT)]),
        ("n2#1", NOTICE, []),
        ("n0#1", replace(NOTICE, session="n9#1"), []),
        ("n2#1", RecordMissing(), []),
        ("n2#1", StatusReport(0, NodeStatus()), []),
        ("n2#1", EventBatch(0, ()), []),
        ("n2#1", AppendReply(1, (1, 2), 1, "1", session="n0#1", sent=1001.0, echo=1001.0), []),
        ("n0#1", StepOrder(1, 0, "n0#1"), []),  # it has no ranks
        ("n0#1", StepOrder(1, 1, "n0#1"), []),
    ],
)
def test_what_a_follower_does_with_a_message(sender: str, message: Message, orders: list[Order]) -> None:
    assert following().handle(sender, message, 1002.0) == orders


def test_nobody_of_another_job_is_voted_for() -> None:
    node, asked = following(), VoteRequest(5, (1, 2), pre_vote=False, session="n9#1")
    assert node.handle("n2#1", asked, 1100.0) == []
    said = node.handle("n2#1", replace(asked, session="n0#1"), 1100.0)
    assert sent(said, Vote) == [Vote(5, 5, pre_vote=False, granted=True, session="n0#1")]


def test_a_message_that_makes_no_sense_is_refused_by_its_name() -> None:
    node, record = following(), replace(RECORD, version=3, plan="[")
    node.steps(ASKS, 1001.5)
    with pytest.raises(MessageError, match="plan"):
        ping(node, 1002.0, record=record, key=record.key)
    order = StepOrder(1, 1, "n0#1", StepProposal(ticket=7, round=1, step=9))  # of a stage that there is not
    with pytest.raises(MessageError, match="StepOrder"):
        node.handle("n0#1", order, 1002.0)


def test_a_voter_stays_until_the_leader_of_this_job_lets_it_leave() -> None:
    node = following()
    node.handle("n0#1", MayLeave("n9#1"), 1002.0)
    assert not node.settled()
    assert node.handle("n0#1", MayLeave("n0#1"), 1002.0) == []
    assert node.settled()
    assert node.farewell() == []
    assert agent().settled(), "it is in no job"


def test_who_asks_a_follower_for_the_leader_is_sent_there() -> None:
    node = following()
    assert sent(node.handle("n7#1", knocks("n7"), 1002.0), Redirect) == [], "its address is unknown"
    node.handle("n0#1", knocks("n0"), 1002.1)
    assert sent(node.handle("n7#1", knocks("n7"), 1002.2), Redirect, "n7#1") == [Redirect("n0:1")]


def test_a_follower_tells_another_job_of_its_name_where_its_leader_is() -> None:
    node, other = following(), Beacon("run", 3, "n9#1", "n9:1")
    node.handle("n0#1", knocks("n0"), 1001.5)
    assert node.handle("n9#1", other, 1002.0) == [SendToAddress("n9:1", Beacon("run", 1, "n0#1", "n0:1"))]
    assert node.handle("n9#1", replace(other, run_id="another"), 1002.0) == []
    assert node.handle("n9#1", other, alone(node)) == [], "it does not know whether its job still runs"


def test_a_node_that_reads_how_its_job_ended_without_it_has_lived() -> None:
    node, end = following(), Ending(0, "every rank has ended")
    beacon = Beacon("run", 2, node.session, "n0:9", 1, end)
    assert node.read(beacon, 1001.2) == [], "the leader is in contact"
    assert node.read(beacon, 1060.0) == [Lived("n1"), end]
    node = following()
    for beat in (1, 2):
        assert node.read(replace(beacon, session="n9#1", beat=beat), 1001.2) == []


def test_a_leader_that_another_one_has_replaced_is_not_heard_any_more() -> None:
    node = following()
    ping(node, 1002.0, term=2)
    assert of_kind(StepSaved, ping(node, 1003.0, saved=99)) == []
    assert node.alone_since(1002.5 + PATIENCE) is not None


# A founder, and an agent that leads.


def founded() -> ClusterNode:
    node = agent(founder=True)
    for tenth in range(100):
        node.tick(1000.0 + tenth / 10)
    assert node.leader_state is not None
    return node


@pytest.mark.parametrize(
    "meets",
    [
        lambda node, beacon: node.handle("n0#1", beacon, 1010.0),
        lambda node, beacon: [*node.read(beacon, 1009.9), *node.read(replace(beacon, beat=2), 1010.0)],
    ],
    ids=["in a message", "in the folder"],
)
def test_a_founder_that_has_not_begun_joins_the_job_that_runs(
    meets: Callable[[ClusterNode, Beacon], list[Order]],
) -> None:
    node = founded()
    assert addressed(meets(node, Beacon("run", 3, "n0#1", "n0:9", 1))) == [("n0:9", Join)]
    assert (node.leader, node.session, node.generation) == ("", "", 0)
    assert [address for address, _ in addressed(node.tick(1012.0))] == ["n0:1", "n0:9"]


def test_a_founder_begins_nothing_with_a_part_of_the_nodes_while_another_job_may_write_beacons() -> None:
    node, began = agent(founder=True), 0.0
    for second in range(1, 60):
        now = 1000.0 + second
        node.tick(now)
        if second == 5:
            node.handle("n2#1", knocks("n2"), now)
        if second == 28:
            assert node.read(Beacon("run", 3, "n9#1", "n9:1", 7), now) == []
        if second > 5:
            node.handle("n2#1", StatusReport(0, NodeStatus(5002)), now)
        if not began and node.leader_state is not None and node.leader_state.lead.began:
            began = now
    until = 1028.0 + PATIENCE + 2 * BEACON_EVERY
    assert until <= began < until + 1.0


def leading() -> ClusterNode:
    """Return an agent that leads a job that runs on it, n2 and n3."""
    node = founded()
    for name in ("n2", "n3"):
        node.handle(f"{name}#1", knocks(name), 1010.0)
    node.offers(NodeStatus(5001), 1010.1)
    for name, store in (("n2", 5002), ("n3", 5003)):
        node.handle(f"{name}#1", StatusReport(0, NodeStatus(store)), 1010.1)
    assert node.leader_state is not None
    assert node.leader_state.lead.began
    return node


def replies(node: ClusterNode, *names: str, now: float) -> list[Order]:
    """Let followers answer, and once more where that has led to another record."""
    said: list[Order] = []
    for name in (*names, *names):
        record, term = node._elector.record, node._elector.term
        assert record is not None
        reply = AppendReply(
            term, record.key, record.generation, "1", session=node.session, sent=now, echo=now
        )
        said += node.handle(f"{name}#1", reply, now)
    return said


def test_a_leader_takes_what_it_sees_itself() -> None:
    node = leading()
    replies(node, "n2", "n3", now=1010.3)
    assert node.tell(AllStarted(1), 1, 1010.4) == []
    assert node.seen(Seen(1, (), 1.0), 5.0, 1010.5) == []
    assert node.timed(TimingReport(1, ()), 1010.5) == []


def test_the_newer_of_two_jobs_of_a_name_goes_on() -> None:
    node = leading()
    assert only(Reset, node.handle("n9#1", Beacon("run", 7, "n9#1", "n9:1"), 1010.5)).after == 7
    answer = only(SendToAddress, node.handle("n9#1", Beacon("run", 0, "a#1", "n9:1"), 1010.5))
    assert isinstance(answer.message, Beacon)
    assert (answer.address, answer.message.session, answer.message.address) == ("n9:1", "n1#1", "n1:1")


def test_a_leader_writes_beacons_that_change_every_second() -> None:
    node, beats = leading(), []
    for now in (1011.0, 1011.4, 1012.0):
        beacon = node.beacon(now)
        assert beacon is not None
        assert (beacon.run_id, beacon.address, beacon.session) == ("run", "n1:1", "n1#1")
        beats.append(beacon.beat)
    assert beats == [beats[0], beats[0], beats[0] + 1]


def test_a_leader_that_may_be_late_is_woken_in_time() -> None:
    assert following().deadline(1010.0) == 1010.125
    node = leading()
    assert node.leader_state is not None
    assert node.deadline(1010.3) == min(1010.425, node.leader_state.lead.deadline)


def test_a_leader_tells_a_node_that_it_is_not_taken_in() -> None:
    said = leading().handle("n7#1", knocks("n7"), 1010.5)
    (refused,) = sent(said, JoinRefused, "n7#1")
    assert not refused.excluded
    assert "n7" in refused.reason
    assert refused.reason in [one.reason for one in of_kind(Log, said)]


def test_a_leader_stays_until_all_agents_know_how_the_job_ended_and_then_lets_them_leave() -> None:
    node = leading()
    replies(node, "n2", "n3", now=1010.3)
    assert node.settled()
    assert sent(node.tell(StopRequested(15), 1, 1010.5), AppendEntries)
    assert node.leader_state is not None
    assert not node.settled()
    assert node.leader_state.lead.ending in replies(node, "n2", now=1010.6), "a majority knows it"
    assert not node.settled()
    replies(node, "n3", now=1010.7)
    assert node.settled()
    leaves = MayLeave("n1#1")
    assert [(one.to, one.message) for one in of_kind(SendMessage, node.farewell())] == [
        ("n2#1", leaves),
        ("n3#1", leaves),
    ]


def test_a_connection_that_broke_ends_a_node_unless_its_agent_is_heard_again() -> None:
    node = leading()
    replies(node, "n2", "n3", now=1010.3)
    for name in ("n2", "n3"):
        assert node.gone(f"{name}#1", "reset by peer") == [Ping(f"{name}#1", f"{name}:1")], "it is dialled"
    assert of_kind(Judged, node.tick(1010.9)) == [], "which proves nothing yet"
    for name in ("n2", "n3"):
        node.unreachable(f"{name}:1", 1011.0)
    node.answered("n2#1", 0.1, 1011.1)
    fault = only(Judged, node.tick(1011.4)).fault
    assert fault is not None
    assert (fault.kind, fault.node) == (FaultKind.LOST, "n3")


class Job:
    """Three agents, of which n0 leads; what they write arrives at once, and what else they do is kept."""

    def __init__(self, *seeds: str) -> None:
        self.agents = {
            one: agent(one == "n0#1", name=one[:2], seeds=seeds if one == "n0#1" else ("n0:1",))
            for one in AGENTS
        }
        self.leader, self.now = self.agents["n0#1"], 1000.0
        while self.leader.leader_state is None:
            self.now += 0.1
            self.leader.tick(self.now)
        for at, one in enumerate(AGENTS):
            self.agents[one].status = NodeStatus(5000 + at)
            self.tick(one)
        assert self.generations() == [1, 1, 1]

    def carry(self, sender: str, orders: list[Order]) -> list[tuple[str, Order]]:
        """Deliver what an agent writes, and all that is written in answer; return the other orders."""
        kept: list[tuple[str, Order]] = []
        waiting = [(sender, one) for one in orders]
        while waiting:
            who, one = waiting.pop(0)
            if isinstance(one, SendMessage) and one.to in self.agents:
                waiting += [(one.to, each) for each in self.agents[one.to].handle(who, one.message, self.now)]
            elif isinstance(one, SendToAddress):
                there = next((name for name in self.agents if one.address == f"{name[:2]}:1"), "")
                answers = self.agents[there].handle(who, one.message, self.now) if there else []
                waiting += [(there, each) for each in answers]
            else:
                kept.append((who, one))
        return kept

    def tick(self, name: str) -> list[tuple[str, Order]]:
        return self.carry(name, self.agents[name].tick(self.now))

    def generations(self) -> list[int]:
        return [one.generation for one in self.agents.values()]

    def fails(self, name: str) -> list[tuple[str, Order]]:
        """Let a rank of an agent end with a signal; the leader has everybody quiesce."""
        fault = Fault(FaultKind.CRASH, name[:2], int(name[1]), 1, 5, "a rank was killed", "signal 9")
        return self.carry(name, self.agents[name].tell(fault, 1, self.now))


def test_the_ranks_of_the_leaders_node_ask_like_those_of_others() -> None:
    job, order = Job(), StepOrder(1, 1, "n0#1")
    said = of_kind(SendMessage, job.leader.steps(ASKS, job.now))
    assert [(one.to, one.message) for one in said] == [("n1#1", order), ("n2#1", order)]
    assert sent(job.leader.tick(job.now + 0.25), StepOrder) == []
    assert sent(job.leader.tick(job.now + 0.5), StepOrder) == [order, order], "nobody has answered"


def test_a_leader_waits_until_its_own_ranks_have_ended_like_those_of_others() -> None:
    job = Job()
    said = job.fails("n2#1")
    assert [(who, one.generation) for who, one in said if isinstance(one, Quiesce)] == [
        (one, 2) for one in AGENTS
    ]
    for one in ("n1#1", "n2#1"):
        job.carry(one, job.agents[one].halted(2, job.now))
    job.carry("n0#1", job.leader.offers(NodeStatus(5009), job.now))
    job.carry("n0#1", job.leader.halted(1, job.now))
    assert job.generations() == [1, 1, 1], "what the leader has ready is no answer, nor is what runs"
    job.now += 0.5
    assert [who for who, one in job.tick("n0#1") if isinstance(one, Quiesce)] == [*AGENTS], (
        "at every interval"
    )
    assert job.generations() == [1, 1, 1], "that it looks after them is no answer"
    said = job.carry("n0#1", job.leader.halted(2, job.now))
    job.now += 0.5
    said += job.tick("n0#1")
    assert job.generations() == [2, 2, 2]
    assert not any(isinstance(one, Quiesce) for _, one in said)
    begins = {(who, one.port) for who, one in said if isinstance(one, Assignment) and one.generation == 2}
    assert begins == {(one, 5009) for one in AGENTS}


def test_a_job_that_runs_tells_an_address_where_nobody_of_it_is_that_it_does() -> None:
    job = Job("n9:1", "n1:1")
    job.now += 2.0
    assert of_kind(SendToAddress, job.leader.tick(job.now)) == [
        SendToAddress("n9:1", Beacon("run", 1, "n0#1", "n0:1"))
    ]


def test_a_leader_tells_those_that_saw_silent_ranks_whom_it_blames() -> None:
    job = Job()
    first, second = (
        Seen(1, (RankEvidence(at, True, "S", False, ("train.py:main",), 7, ("step",), 1.0),), 1.0)
        for at in (0, 1)
    )
    assert job.leader.seen(first, job.now, job.now) == []
    assert job.leader.handle("n1#1", report_of(second, job.now), job.now) == []
    assert job.leader.deadline(job.now) == job.now
    said = job.leader.tick(job.now)
    blamed = only(Blamed, said)
    assert (blamed.names, blamed.generation) == (("n0", "n1"), 1)
    notice = BlameNotice(1, blamed.node, blamed.verdict, "n0#1")
    assert sent(said, BlameNotice, "n1#1") == sent(said, BlameNotice) == [notice]


def test_a_leader_answers_one_of_an_earlier_term_like_any_other_agent() -> None:
    job, record = Job(), Record(0, 1, 0, VOTERS, VOTERS, "", (VOTERS,))
    (reply,) = sent(
        ping(job.leader, job.now, term=0, sender="n1#1", record=record, key=record.key), AppendReply, "n1#1"
    )
    assert (reply.term, reply.generation, reply.session) == (1, 1, "n0#1")
    assert job.leader.handle("n1#1", Vote(1, 1, True, False, session="n0#1"), job.now) == []


def test_a_successor_knows_that_it_has_stopped_a_generation_for_the_leader_before() -> None:
    job = Job()
    job.fails("n0#1")
    agent = job.agents["n1#1"]
    job.carry("n1#1", agent.halted(2, job.now))
    del job.agents["n0#1"]  # with what it knew of the fault
    said = []
    while agent.leader_state is None:
        job.now += 0.25
        said += job.tick("n1#1")
    faults = [one.fault for _, one in said if isinstance(one, Judged) and one.fault is not None]
    assert [(one.kind, one.node, one.generation) for one in faults] == [(FaultKind.LOST, "n1", 1)]
    assert any(isinstance(one, Quiesce) and one.generation == 2 for _, one in said)
