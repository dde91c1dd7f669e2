"""One agent's part in a job of several nodes: it finds the others, follows the leader, or leads.

What agents do together is told in ARCHITECTURE.md, "Flow 4: many nodes". An agent that starts again is
another agent, which never voted before, so nothing needs to be on disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from outlast.agreement.policy.nodes import NodeSteps, proposal_received, report_sent
from outlast.agreement.policy.steps import RanksSeen, TellRanks
from outlast.cluster.policy.ballots import HardState, InForce, Leads, Outcome, Send, StepsDown, founding
from outlast.cluster.policy.codec import MessageError
from outlast.cluster.policy.contacts import BEACON_EVERY, Contact, Contacts, LeaderBeacon, meet
from outlast.cluster.policy.election import Elector
from outlast.cluster.policy.event_queue import EventQueue
from outlast.cluster.policy.events import (
    CommitRight,
    HoldRanks,
    JoinRejected,
    LeadOutcome,
    Lived,
    Log,
    NodeEvent,
    Order,
    Ping,
    Proposal,
    QuiesceNodes,
    Rejected,
    Reset,
    SendMessage,
    SendToAddress,
    Start,
    StepSaved,
    TellNodes,
    timing_for,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.leader_state import LeaderState
from outlast.cluster.policy.members import Answered, JobSpec, Joined, Member
from outlast.cluster.policy.messages import (
    AgentsRestarted,
    AppendEntries,
    AppendReply,
    Assignment,
    Beacon,
    BlameNotice,
    ElectionMessage,
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
    StepReport,
    Vote,
    VoteRequest,
    agent_id,
    incarnation_of,
    node_of,
)
from outlast.cluster.policy.plan import LatestPlan
from outlast.hang.policy.attribution import Blamed, EvidenceReport, Seen, report_of
from outlast.recovery.policy.job import Event
from outlast.stragglers.policy.gathering import TimingReport

if TYPE_CHECKING:
    from outlast.config import FaultToleranceOptions
    from outlast.stragglers.policy.options import StragglerOptions


class LocalAssignment:
    """What the newest record means for this node: by its plan or, without one, as the leader wrote.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = (-1, -1)
        self._mine: Assignment | Ending | None = None
        self._plan = LatestPlan()

    def take(self, message: AppendEntries, contacts: Contacts) -> None:
        """Take what a heartbeat says; the plan in it tells where others are, too."""
        record = message.record
        if record is not None and record.plan:
            plan = self._plan.of(record)
            self._key, self._mine = record.key, plan.assignment(record.generation, self._name)
            contacts.learn(plan)
        elif message.assignment is not None:
            self._key, self._mine = message.key, message.assignment

    def of(self, record: Record) -> Assignment | Ending | None:
        """Return what a record means; None: nothing, or it was never told."""
        return self._mine if self._key == record.key else None


JOBS_LEFT = 16  # of this name that an agent may have left and still join another one


class ClusterNode:
    """Takes what happens on this node, messages, and time; says what to do.

    Args:
        me: this node.
        terms: what every node has to agree with.
        config: budgets.
        start: how to begin.
        clock: now, in seconds of a clock that goes on while the machine sleeps; and wall time when it was 0.
        stragglers: what is done about slow ranks.
    """

    def __init__(
        self,
        me: Member,
        terms: JobSpec,
        config: FaultToleranceOptions,
        start: Start,
        clock: tuple[float, float],
        stragglers: StragglerOptions | None = None,
    ) -> None:
        now, self._epoch = clock
        self._stragglers = stragglers
        self.id = agent_id(me.name, me.incarnation)
        self._me, self._terms, self._config, self._start = me, terms, config, start
        self._timing = timing_for(terms.most, terms.ping_timeout)
        self.status = NodeStatus()
        self._contacts = Contacts(me, start, 2 * self._timing.promise, now)
        self._beacons = LeaderBeacon(2 * self._timing.promise + 2 * BEACON_EVERY)
        self._gone: dict[str, tuple[float, str]] = {}  # since when nothing listens there, and why it broke
        self._next_ping = now
        self._right: tuple[int, float] = (0, -math.inf)  # that was passed on
        self._queue = EventQueue()
        self._mine = LocalAssignment(me.name)
        self._steps = NodeSteps(me.name)
        self._next_steps = now
        self._called_by = ""
        self._quiesced = 0
        self._dismissed = False
        self._left: dict[str, HardState] = {}  # votes in jobs that this agent was in before, by session
        self.session = ""  # who founded the job that this agent is in
        first = founding(self.id) if start.bootstrap_node else None
        self._begin(now, self.id if start.bootstrap_node else "", first)

    @property
    def leader(self) -> str:
        """Return the id of the leader, as far as is known; empty: unknown."""
        return self._elector.leader

    def alone_since(self, now: float) -> float | None:
        """Return since when no leader was heard; None: one is."""
        return self._contacts.out_since if self._out_of_contact(now) else None

    def settled(self) -> bool:
        """Say whether all that are told have the newest record; a voter waits until it may leave."""
        record = self._elector.record
        if record is None or self.leader_state is None:
            return record is None or self._dismissed or self.id not in record.voters
        return self.leader_state.settled(record, self._gone)

    def farewell(self) -> list[Order]:
        """Return what the leader writes once all is settled: those that could succeed it may end."""
        if self.leader_state is None:
            return []
        return [*self.leader_state.farewell(self._elector.record)]

    def deadline(self, now: float) -> float:
        """Return when :meth:`tick` has to be called at the latest."""
        soonest = now + self._timing.interval / 4
        return soonest if self.leader_state is None else min(soonest, self.leader_state.lead.deadline)

    def tell(self, event: Event, generation: int, now: float) -> list[Order]:
        """Take something that happened on this node in a generation."""
        before = self._queue.add(event, generation)
        if self.leader_state is not None:
            said = NodeEvent(self._me.name, generation, event)
            return self._led(self.leader_state.lead.handle(said, now), now)
        return self._tell_on(before)

    def seen(self, seen: Seen, clock: float, now: float) -> list[Order]:
        """Tell the leader what was seen of the ranks of this node; ``clock`` is that of their heartbeats."""
        report = report_of(seen, clock)
        if self.leader_state is not None:
            return self._led(self.leader_state.take(self.id, report, now), now)
        return [SendMessage(self.leader, report)] if self.leader else []

    def timed(self, report: TimingReport, now: float) -> list[Order]:
        """Tell the leader what the ranks of this node measured."""
        if self.leader_state is not None:
            return self._led(self.leader_state.take(self.id, report, now), now)
        return [SendMessage(self.leader, report)] if self.leader else []

    def steps(self, seen: RanksSeen, now: float) -> list[Order]:
        """Take how the ranks of this node stand; the leader is told what concerns an agreement on a step."""
        return self._report_steps(self.leader, now) if self._steps.look(seen) else []

    def _report_steps(self, to: str, now: float) -> list[Order]:
        self._next_steps = now + self._timing.interval
        if not to:
            return []
        status, said = self._steps.report()
        address = (self._elector.term, self._steps.generation, self.session)
        report = report_sent(status, said, address, now)
        if self.leader_state is not None:
            return self._led(self.leader_state.take(self.id, report, now), now)
        return [SendMessage(to, report)]

    def _on_step_order(self, sender: str, order: StepOrder, now: float) -> list[Order]:
        """Take what the leader of this term says, and answer; an earlier one counts for nothing any more."""
        ours = (self._elector.term, self._steps.generation, self.session)
        if (order.term, order.generation, order.session) != ours or not order.generation:
            return []
        said: list[Order] = []
        found = None if order.said is None else proposal_received(order.said, now)
        if found is not None and self._steps.hear(found):
            said.append(TellRanks(order.generation, found))
        return said + self._report_steps(sender, now)

    def offers(self, status: NodeStatus, now: float) -> list[Order]:
        """Take note of what this node has for the next generation; what ranks can is told at once."""
        before, self.status = self.status, status
        if self.leader_state is not None:
            return self._report_self(self.leader_state, 0, now) if status != before else []
        told = status.able != before.able and bool(self.leader)
        return [SendMessage(self.leader, StatusReport(0, status))] if told else []

    def halted(self, generation: int, now: float) -> list[Order]:
        """Take note that this node runs nothing that is older than a generation."""
        self._quiesced = max(self._quiesced, generation)
        if self.leader_state is not None:
            return self._report_self(self.leader_state, generation - 1, now)
        return (
            [SendMessage(self._called_by, StatusReport(generation, self.status))] if self._called_by else []
        )

    def gone(self, peer: str, reason: str) -> list[Order]:
        """Dial an agent again whose connection broke: that alone does not prove that it has ended."""
        self._gone[peer] = (math.inf, reason)
        member = self.leader_state is not None and self.leader_state.is_member(peer)
        return [self._ping(peer)] if member or peer == self.leader else []

    def _ping(self, peer: str) -> Ping:
        return Ping(peer, self._contacts.addresses.get(peer, ""))

    def unreachable(self, address: str, now: float) -> None:
        """Take note that no agent listens at an address, or another one than before."""
        for peer, (since, reason) in self._gone.items():
            if since == math.inf and self._contacts.addresses.get(peer) == address:
                self._gone[peer] = (now, reason)

    def answered(self, peer: str, idle: float, now: float) -> list[Order]:
        """Take the answer of an agent's channel to a ping.

        Args:
            peer: the agent.
            idle: seconds since its loop turned last.
            now: in seconds of the agent's clock.
        """
        self._gone.pop(peer, None)
        if self.leader_state is None:
            return []
        answer = Answered(node_of(peer), incarnation_of(peer), idle)
        return self._led(self.leader_state.lead.handle(answer, now), now)

    def handle(self, sender: str, message: Message, now: float) -> list[Order]:
        """Take a message.

        Raises:
            MessageError: it contains something that makes no sense.
        """
        self._gone.pop(sender, None)
        try:
            return self._take(sender, message, now)
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
            raise MessageError(f"{type(message).__name__} makes no sense ({error!r})") from error

    def _take(self, sender: str, message: Message, now: float) -> list[Order]:
        match message:
            case AppendEntries():
                return self._on_heartbeat(sender, message, now)
            case AppendReply() | Vote() | VoteRequest():
                return self._on_ballot(sender, message, now)
            case (
                RecordMissing()
                | StatusReport()
                | EventBatch()
                | EvidenceReport()
                | TimingReport()
                | StepReport()
            ):
                leader_state = self.leader_state
                return [] if leader_state is None else self._led(leader_state.take(sender, message, now), now)
            case BlameNotice(generation, node, verdict, session):
                ours = sender == self.leader and session == self.session
                return [Blamed((), generation, node, verdict)] if ours else []
            case Quiesce():
                return self._on_quiesce(sender, message, now)
            case StepOrder():
                return self._on_step_order(sender, message, now)
            case MayLeave(session):
                self._dismissed = session == self.session
                return []
            case _:
                return self._on_contact(sender, message, now)

    def _on_contact(
        self,
        sender: str,
        message: Join | JoinRefused | Redirect | JoinAccepted | Beacon | AgentsRestarted,
        now: float,
    ) -> list[Order]:
        match message:
            case Join():
                return self._on_join(sender, message, now)
            case JoinRefused(reason, excluded):
                return [JoinRejected(reason)] if excluded or self._out_of_contact(now) else []
            case Redirect(address):
                return [self._join(address)] if self._out_of_contact(now) else []
            case JoinAccepted():
                self._contacts.out_since = now
                return []
            case Beacon():
                return self._on_other(message, now)
            case AgentsRestarted(fresh):
                return self._meets(set(fresh))

    def tick(self, now: float) -> list[Order]:
        """Do what is due."""
        said = self._carry(self._elector.tick(now), now)
        if self.leader_state is not None:
            said += self._lead_on(self.leader_state, now)
        elif self._out_of_contact(now):
            said += [self._join(one) for one in self._contacts.due(self._elector.record, now)]
        current = self._steps.generation == self.generation
        if current and self._steps.pending and now >= self._next_steps:
            said += self._report_steps(self.leader, now)
        return said

    def _join(self, address: str) -> SendToAddress:
        return SendToAddress(address, self._request())

    def _request(self) -> Join:
        return self._contacts.join(self.generation, self.status, self.session, self._queue.asked)

    def _out_of_contact(self, now: float) -> bool:
        return self._contacts.out(self.leader_state is not None, now)

    def _on_join(self, sender: str, message: Join, now: float) -> list[Order]:
        self._contacts.addresses[sender] = message.member.address
        if self.leader_state is not None:
            return self._led(self.leader_state.join(sender, message, now), now)
        if not self._out_of_contact(now):
            where = self._contacts.addresses.get(self.leader)
            return [SendMessage(sender, Redirect(where))] if where else []
        if not message.generation:
            return self._meets({sender})
        return [] if self.generation else [SendMessage(sender, AgentsRestarted((self.id,)))]

    def beacon(self, now: float) -> Beacon | None:
        """Return what a leader writes into a shared folder every second; None: nothing."""
        if self.leader_state is None or not self.leader_state.lead.began:
            return None
        return self._beacon(self._me.address, int(now / BEACON_EVERY), self.leader_state.lead.ending)

    def _beacon(self, address: str, beat: int = 0, end: Ending | None = None) -> Beacon:
        return Beacon(self._terms.run_id, self.generation, self.session, address, beat, end)

    def read(self, found: Beacon | None, now: float) -> list[Order]:
        """Take what is in the shared folder; who leads, or hears nobody, reads it every second."""
        if found is not None and found.end is not None:
            ours = found.session == self.session and self._out_of_contact(now)
            self._dismissed = self._dismissed or ours
            return [Lived(self._me.name), found.end] if ours else []
        runs = self._beacons.runs(found, self.session, now)
        if self.leader_state is not None:
            self.leader_state.lead.wait_until(self._beacons.until)
        if found is None or not runs:
            return []
        if self.leader_state is not None:
            return self._on_other(found, now)
        return [self._join(found.address)] if self._out_of_contact(now) else []

    def _on_other(self, other: Beacon, now: float) -> list[Order]:
        """Join another job of this name, or let the older one of two give way."""
        begun = None if self.leader_state is None else self.leader_state.lead.began
        where = self._contacts.addresses.get(self.leader, "") if begun is None else self._me.address
        ours = self._beacon("" if begun is None and self._out_of_contact(now) else where)
        match meet(other, ours, begun):
            case Contact.JOIN:
                self._contacts.seek(other.address)
                self._begin(now, "")
                words = f"the job is already running, led from {other.address}; this node joins it"
                return [Log(words), self._join(other.address)]
            case Contact.GIVE_WAY:
                words = f"a newer job of this name is led from {other.address}; this one gives way"
                return [Reset(other.generation, words)]
            case Contact.ANSWER:
                return [SendToAddress(other.address, ours)]
            case Contact.NOTHING:
                return []

    def _meets(self, fresh: set[str]) -> list[Order]:
        """Take note that agents have started again, so that those before them on their nodes are dead."""
        record = self._elector.record
        dead = "" if record is None or self.leader_state is not None else self._contacts.bury(fresh, record)
        if record is None or not dead:
            return []
        words = f"quorum lost (agent of {dead} restarted); restarting this agent"
        return [Reset(max(self._start.after, record.generation), words)]

    def _begin(self, now: float, session: str, stored: HardState | None = None) -> None:
        """Take part in another job of this name, or in none yet.

        An agent may leave a job that has not begun for it, though it has voted there. When it comes back,
        that vote counts: else two agents could win one term.
        """
        if self.session:
            self._left[self.session] = self._elector.stored
        stored = self._left.pop(session, stored)
        self._elector: Elector = Elector(self.id, self._timing, now, stored, self._me.incarnation)
        self.leader_state: LeaderState | None = None
        self.session = session
        self._follows = ("", -1)
        self._saved = -1  # what the leader has said of saves
        self._queue.clear()
        self.generation = 0

    def _on_heartbeat(self, sender: str, message: AppendEntries, now: float) -> list[Order]:
        if not self._is_ours(message.session, now):
            return []
        record = self._elector.record if message.record is None else message.record
        if record is None or record.key != message.key:
            return [SendMessage(sender, RecordMissing())]
        self._mine.take(message, self._contacts)
        said = self._carry(self._elector.handle(sender, message, now), now)
        if message.term != self._elector.term:
            return said
        if not message.member:  # this node is lost for the leader, and heartbeats alone do not change that
            said.append(SendMessage(sender, self._request()))
            return said
        self._contacts.pinged = now
        if message.saved != self._saved:
            self._saved = message.saved
            said.append(StepSaved(message.saved))
        if self._queue.late(message.taken) or (sender, message.term) != self._follows:
            self._follows = (sender, message.term)
            self._report_stopped(record.generation)
            said += self._tell_on(message.taken)
        return said

    def _is_ours(self, session: str, now: float) -> bool:
        """Say whether a leader is that of the job that this agent is in, which may be from now on."""
        free = not self.generation and self.leader_state is None and len(self._left) < JOBS_LEFT
        if session != self.session and free and self._out_of_contact(now):
            self._begin(now, session)
        return session == self.session

    def _report_stopped(self, generation: int) -> None:
        if self.generation <= generation < self._quiesced:
            self._queue.report_stopped(self._me.name, generation)

    def _tell_on(self, taken: int) -> list[Order]:
        """Tell the leader what happened here after what it has taken already."""
        if not self.leader or self.leader == self.id:
            return []
        return [SendMessage(self.leader, one) for one in self._queue.batches(taken, self.generation)]

    def _on_quiesce(self, sender: str, order: Quiesce, now: float) -> list[Order]:
        if sender != self.leader and not self._out_of_contact(now):
            return []
        self._called_by = sender
        return [order]

    def _on_ballot(self, sender: str, ballot: AppendReply | Vote | VoteRequest, now: float) -> list[Order]:
        if ballot.session != self.session:
            return []
        if isinstance(ballot, AppendReply) and self.leader_state is not None:
            self.leader_state.reported(sender, ballot.key)
        said = self._carry(self._elector.handle(sender, ballot, now), now)
        if isinstance(ballot, AppendReply) and self.leader_state is not None:
            said += self._led(self.leader_state.heard(sender, ballot.status, 0, now), now)
        return said

    def _report_self(self, leader_state: LeaderState, ended: int, now: float) -> list[Order]:
        return self._led(leader_state.heard(self.id, self.status, ended, now), now)

    def _lead_on(self, leader_state: LeaderState, now: float) -> list[Order]:
        said = self._report_self(leader_state, 0, now)
        if now >= self._next_ping:
            self._next_ping = now + self._timing.interval
            quiet = leader_state.quiet(now - 1.5 * self._timing.interval)
            said += [self._ping(one) for one in quiet]
        said += self._led(leader_state.broken(self._gone, now), now)
        said += self._led(leader_state.lead.tick(now), now)
        said += self._led(leader_state.steps_due(now, self._timing.interval), now)
        said += leader_state.calls(now, self._timing.interval)
        said += leader_state.previous_members(self._start.seeds, self._beacon(self._me.address), now)
        return said

    def _led(self, outcomes: Iterable[LeadOutcome | SendMessage], now: float) -> list[Order]:
        """Carry out what was decided for the job."""
        said: list[Order] = []
        for one in outcomes:
            leader_state, record = self.leader_state, self._elector.record
            assert leader_state is not None, "nobody else decides"
            assert record is not None, "whoever leads has one"
            match one:
                case Proposal():
                    leader_state.call = None
                    said += self._carry(self._elector.propose(leader_state.record(one, record), now), now)
                case QuiesceNodes():
                    leader_state.begin_call(one)
                    said += leader_state.calls(now, self._timing.interval)
                case TellNodes(names, order):
                    said += leader_state.to_others(names, order)
                    said += self._on_step_order(self.id, order, now)
                case HoldRanks(over):
                    said += self._led(leader_state.hold(over, now), now)
                case Rejected(name, reason, excluded):
                    agents = [agent for agent in self._contacts.addresses if node_of(agent) == name]
                    said += [SendMessage(agent, JoinRefused(reason, excluded)) for agent in agents]
                    said.append(Log(reason))
                case Blamed():
                    said += leader_state.blame(one)
                case _:
                    said.append(one)
        return said

    def _carry(self, outcomes: Iterable[Outcome], now: float) -> list[Order]:
        """Carry out what was decided about who leads.

        The right to commit goes first: what is sent here lets others count on it, and this agent may be
        stopped right after it has sent that.
        """
        said: list[Order] = []
        if self._elector.rights != self._right:
            self._right = self._elector.rights
            said.append(CommitRight(*self._right))
        for one in outcomes:
            match one:
                case Send(to, message):
                    said.append(self._send(to, message))
                case Leads():
                    said += self._take_leader_state(one, now)
                case StepsDown(_, reason):
                    self.leader_state = None
                    said.append(Log(f"this node is no longer the leader: {reason}"))
                case InForce(record, _):
                    said += self._in_force(record)
        return said

    def _send(self, to: str, message: ElectionMessage) -> SendMessage:
        address = self._contacts.addresses.get(to, "")
        if isinstance(message, AppendEntries) and self.leader_state is not None:
            return SendMessage(to, self.leader_state.heartbeat(to, message), address)
        if isinstance(message, AppendReply):
            return SendMessage(to, replace(message, session=self.session, status=self.status), address)
        return SendMessage(to, replace(message, session=self.session), address)

    def _take_leader_state(self, won: Leads, now: float) -> list[Order]:
        lead = JobController(self._terms, self._config, now, self._epoch, self._stragglers)
        leader_state = self.leader_state = LeaderState(self._me, lead, now, self.session, won.term)
        said: list[Order] = [Log(f"this node is the leader: {won.reason}")]
        if won.record.plan:
            plan = leader_state.plan.of(won.record)
            since = {node_of(self._follows[0]): self._contacts.pinged}  # the leader before, if there was one
            said += self._led(lead.take_over(plan, since, now), now)
            self._report_stopped(won.record.generation)
        else:
            lead.wait_until(now + 2 * BEACON_EVERY)  # until the shared folder was read
            said += lead.recall(self._start.job_state, self._start.after, now)
            said += self._led(lead.handle(Joined(self._me), now), now)
        for one in self._queue.since(self.generation):
            said += self._led(lead.handle(NodeEvent(self._me.name, one.generation, one.event), now), now)
        return said

    def _in_force(self, record: Record) -> list[Order]:
        mine = self._mine.of(record)
        if self.leader_state is not None and record.plan:
            mine = self.leader_state.plan.of(record).assignment(record.generation, self._me.name)
        self.generation = max(self.generation, record.generation)
        return [] if mine is None else [mine]
