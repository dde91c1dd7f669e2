"""Agents that write to each other: what the one that leads does itself, and what another one does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.agreement.policy.steps import RanksSeen, Status, Want
from outlast.cluster.policy.codec import MessageError
from outlast.cluster.policy.events import Judged, Order, SendMessage, SendToAddress, Start
from outlast.cluster.policy.members import JobSpec, Member
from outlast.cluster.policy.messages import (
    AppendEntries,
    AppendReply,
    Assignment,
    Beacon,
    BlameNotice,
    EventBatch,
    Join,
    Message,
    NodeStatus,
    Quiesce,
    Record,
    StepOrder,
    StepProposal,
    StepReport,
    Vote,
    VoteRequest,
)
from outlast.cluster.policy.node import ClusterNode
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.attribution import Blamed, Seen, report_of
from outlast.hang.policy.diagnosis import RankEvidence
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import CommitSeen, StopRequested

AGENTS = ("n0#1", "n1#1", "n2#1")
VOTERS = frozenset(AGENTS)
ASKS = RanksSeen(1, (Status(0, 1, round=1, step=5, wants=Want.SAVE),))


def node(name: str, start: Start) -> ClusterNode:
    terms = JobSpec("run", "1", "-", 1, 3, 3)
    me = Member(name, f"{name}:1", 1, "run", "1", "-", incarnation="1")
    return ClusterNode(me, terms, FaultToleranceOptions(), start, (1000.0, 0.0))


def ping(one: ClusterNode, now: float, session: str = "n0#1", generation: int = 1) -> list[Order]:
    """Let n0, which leads a job, write to an agent."""
    record = Record(1, 1 + generation, generation, VOTERS, VOTERS, "", (VOTERS,))
    said = AppendEntries(1, now, record.key, committed=True, record=record, session=session)
    return one.handle("n0#1", said, now)


def following(now: float = 1001.0, generation: int = 1) -> ClusterNode:
    """Return n1, which follows n0."""
    one = node("n1", Start(False, ("n0:1",)))
    assert None not in ping(one, now, generation=generation), "what no leader has said is no order"
    return one


def sent(orders: list[Order], kind: type[Message], to: str = "") -> list[Message]:
    messages = [one for one in orders if isinstance(one, SendMessage) and to in ("", one.to)]
    return [one.message for one in messages if isinstance(one.message, kind)]


class Job:
    """Three agents, of which n0 leads; what they write arrives at once, and what else they do is kept."""

    def __init__(self, *seeds: str) -> None:
        self.agents = {
            one: node(one[:2], Start(one == "n0#1", seeds if one == "n0#1" else ("n0:1",))) for one in AGENTS
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
        kept = []
        waiting = [(sender, one) for one in orders]
        while waiting:
            who, one = waiting.pop(0)
            if isinstance(one, SendMessage) and one.to in self.agents:
                answers = self.agents[one.to].handle(who, one.message, self.now)
                waiting += [(one.to, each) for each in answers]
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


# An agent that follows.


def test_what_ranks_ask_for_is_told_at_every_interval_until_the_leader_has_answered() -> None:
    agent = following()
    (report,) = sent(agent.steps(ASKS, 1002.0), StepReport, "n0#1")
    assert isinstance(report, StepReport)
    assert (report.term, report.generation, report.session) == (1, 1, "n0#1")
    assert (report.step, report.wants) == (5, int(Want.SAVE))
    times = [1002.0, 1002.25, 1002.5, 1002.75, 1003.0, 1003.25]
    told = [len(sent(agent.tick(now), StepReport, "n0#1")) for now in times]
    assert told == [0, 0, 1, 0, 1, 0]
    ping(agent, 1003.5, generation=2)
    assert sent(agent.tick(1004.0), StepReport) == [], "another generation is about to run"


def test_an_agent_that_knows_no_leader_tells_nobody_what_ranks_ask_for() -> None:
    assert node("n1", Start(False, ("n0:1",))).steps(ASKS, 1001.0) == []


def test_an_agent_knows_of_no_generation_unless_it_is_told() -> None:
    (join,) = node("n1", Start(False, ("n0:1",))).tick(1000.0)
    assert isinstance(join, SendToAddress)
    assert isinstance(join.message, Join)
    assert (join.message.generation, join.message.after) == (0, 0)


def test_an_order_of_a_stage_that_there_is_not_is_refused_by_its_name() -> None:
    agent = following()
    agent.steps(ASKS, 1001.5)
    order = StepOrder(1, 1, "n0#1", StepProposal(ticket=7, round=1, step=9))
    with pytest.raises(MessageError, match=r"^StepOrder makes no sense \(ValueError\('3 is not a valid"):
        agent.handle("n0#1", order, 1002.0)


def test_an_agent_whose_ranks_run_joins_no_other_job_though_it_hears_nothing() -> None:
    agent = following()
    agent.tick(1100.0)
    assert ping(agent, 1100.0, session="n9#1") == []
    assert (agent.session, agent.generation) == ("n0#1", 1)


def test_what_happened_in_a_job_that_was_left_is_not_told_in_the_next_one_but_for_a_stop() -> None:
    agent = following(generation=0)
    agent.tell(CommitSeen(40, "step-000000040.g1"), 0, 1002.0)
    agent.tell(StopRequested(15), 0, 1002.0)
    agent.tick(1100.0)
    (batch,) = sent(ping(agent, 1100.0, session="n9#1", generation=0), EventBatch)
    assert agent.session == "n9#1"
    assert isinstance(batch, EventBatch)
    assert [one.event for one in batch.events] == [StopRequested(15)]


def test_another_leader_hears_of_no_stop_where_only_what_is_older_was_stopped() -> None:
    agent = following()
    agent.halted(1, 1002.0)
    record = Record(2, 1, 1, VOTERS, VOTERS, "", (VOTERS,))
    said = AppendEntries(2, 1003.0, record.key, committed=True, record=record, session="n0#1")
    orders = agent.handle("n2#1", said, 1003.0)
    assert agent.leader == "n2#1"
    assert sent(orders, EventBatch) == []


def test_nobody_of_another_job_is_voted_for() -> None:
    agent = following()
    asked = VoteRequest(5, (1, 2), pre_vote=False, session="n9#1")
    assert agent.handle("n2#1", asked, 1100.0) == []
    assert sent(agent.handle("n2#1", replace(asked, session="n0#1"), 1100.0), Vote) == [
        Vote(5, 5, pre_vote=False, granted=True, session="n0#1")
    ]


def test_an_answer_to_a_leader_is_nothing_to_an_agent_that_leads_no_more() -> None:
    agent = following()
    late = AppendReply(1, (1, 2), 1, "1", session="n0#1", sent=1001.0, echo=1001.0)
    assert agent.handle("n2#1", late, 1002.0) == []


# The one that leads.


def test_the_ranks_of_the_leaders_node_ask_like_those_of_others() -> None:
    job = Job()
    order = StepOrder(1, 1, "n0#1")
    orders = job.leader.steps(ASKS, job.now)
    assert [(one.to, one.message) for one in orders if isinstance(one, SendMessage)] == [
        ("n1#1", order),
        ("n2#1", order),
    ]
    assert sent(job.leader.tick(job.now + 0.25), StepOrder) == []
    assert sent(job.leader.tick(job.now + 0.5), StepOrder) == [order, order], "nobody has answered"


def test_a_leader_waits_until_its_own_ranks_have_ended_like_those_of_others() -> None:
    job = Job()
    said = job.fails("n2#1")
    assert [(who, one.generation) for who, one in said if isinstance(one, Quiesce)] == [
        *(("n0#1", 2), ("n1#1", 2), ("n2#1", 2))
    ]
    for one in ("n1#1", "n2#1"):
        job.carry(one, job.agents[one].halted(2, job.now))
    job.carry("n0#1", job.leader.offers(NodeStatus(5009), job.now))
    assert job.generations() == [1, 1, 1], "what the leader has ready is no answer"
    job.carry("n0#1", job.leader.halted(1, job.now))
    assert job.generations() == [1, 1, 1], "that is what runs"
    job.now += 0.5
    again = [who for who, one in job.tick("n0#1") if isinstance(one, Quiesce)]
    assert again == ["n0#1", "n1#1", "n2#1"], "they are told at every interval"
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
    found = [one for one in job.leader.tick(job.now) if isinstance(one, SendToAddress)]
    assert found == [SendToAddress("n9:1", Beacon("run", 1, "n0#1", "n0:1"))]


def test_a_leader_tells_those_that_saw_silent_ranks_whom_it_blames() -> None:
    job = Job()
    for at in (0, 1):
        seen = RankEvidence(at, True, "S", False, ("train.py:main",), 7, ("step",), 1.0)
        report = Seen(1, (seen,), 1.0)
        if at == 0:
            assert job.leader.seen(report, job.now, job.now) == []
        else:
            assert job.leader.handle("n1#1", report_of(report, job.now), job.now) == []
    assert job.leader.deadline(job.now) == job.now
    said = job.leader.tick(job.now)
    (blamed,) = (one for one in said if isinstance(one, Blamed))
    assert (blamed.names, blamed.generation) == (("n0", "n1"), 1)
    notice = BlameNotice(1, blamed.node, blamed.verdict, "n0#1")
    assert sent(said, BlameNotice, "n1#1") == sent(said, BlameNotice) == [notice]


def test_a_leader_answers_one_of_an_earlier_term_like_any_other_agent() -> None:
    job = Job()
    record = Record(0, 1, 0, VOTERS, VOTERS, "", (VOTERS,))
    said = AppendEntries(0, job.now, record.key, committed=True, record=record, session="n0#1")
    (reply,) = sent(job.leader.handle("n1#1", said, job.now), AppendReply, "n1#1")
    assert isinstance(reply, AppendReply)
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
    faults = [one.fault.reason for _, one in said if isinstance(one, Judged) and one.fault is not None]
    assert faults == ["n1 has stopped generation 1 by order of a previous leader"]
    assert any(isinstance(one, Quiesce) and one.generation == 2 for _, one in said)
