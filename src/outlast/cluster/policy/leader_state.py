"""The leader's part in a cluster: what it knows of each agent, and what it writes to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outlast.agreement.policy.nodes import (
    LeaderSteps,
    proposal_received,
    proposal_sent,
    status_received,
)
from outlast.cluster.policy.events import (
    Heartbeat,
    LeadOutcome,
    Log,
    Looked,
    NodeEvent,
    Proposal,
    QuiesceNodes,
    SendMessage,
    SendToAddress,
    TellNodes,
    Timed,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import Joined, Left, Member, Plan
from outlast.cluster.policy.messages import (
    AgentsRestarted,
    AppendEntries,
    Beacon,
    BlameNotice,
    EventBatch,
    Join,
    JoinAccepted,
    LeaderMessage,
    MayLeave,
    NodeStatus,
    Quiesce,
    Quorums,
    Record,
    RecordMissing,
    StatusReport,
    StepOrder,
    StepReport,
    agent_id,
    incarnation_of,
    node_of,
)
from outlast.cluster.policy.plan import PLANS, LatestPlan
from outlast.hang.policy.attribution import Blamed, EvidenceReport, seen_of
from outlast.recovery.policy.job import StopRequested
from outlast.stragglers.policy.gathering import TimingReport

MOST_VOTERS = 5
GONE_WAITS = 0.3  # seconds in which an agent that cannot be dialled may dial the leader itself
PREVIOUS_MEMBERS_EVERY = 2.0
PREVIOUS_MEMBERS_WAIT = 10.0  # a bootstrap node waits so long for the job before, after each sign of it


@dataclass
class _Agent:
    knows: tuple[int, ...] = ()  # key of the record that it reported last
    taken: int = 0  # number of the last event of it that was taken


class LeaderState:
    """What a leader keeps in its term.

    Args:
        me: its node.
        lead: decides for the job.
        now: in seconds of the agent's clock.
        session: id of the agent that founded the job.
        term: in which it leads.
    """

    def __init__(self, me: Member, lead: JobController, now: float, session: str, term: int) -> None:
        self.lead = lead
        self._term = term
        self._steps: LeaderSteps | None = None
        self._next_steps = now
        self.plan = LatestPlan()
        self.call: QuiesceNodes | None = None
        self._session = session
        self._previous_members: dict[
            str, float
        ] = {}  # agents of the job before, and how long to wait for them
        self._fresh: set[str] = set()  # agents that asked to join and were in no generation
        self._me = me
        self._id = agent_id(me.name, me.incarnation)
        self._agents: dict[str, _Agent] = {}
        self._next_call = now
        self._next_previous_members = now

    def heartbeat(self, to: str, message: AppendEntries) -> AppendEntries:
        """Return the heartbeat for an agent; what it has already is left out."""
        known = self._agent(to)
        record, mine = message.record, None
        if record is not None and known.knows == record.key:
            record = None
        elif record is not None and to not in record.voters:
            if record.plan:
                plan = self.plan.of(record)
                mine = plan.assignment(record.generation, node_of(to), self.plan.places)
            record = replace(record, active=record.active & {to}, agents=frozenset({to}), plan="")
        return AppendEntries(
            message.term,
            message.sent,
            message.key,
            message.committed,
            message.granted,
            message.incarnation,
            message.echo,
            record,
            mine,
            known.taken,
            self._session,
            self.lead.saved,
            self.is_member(to),
        )

    def _agent(self, name: str) -> _Agent:
        known = self._agents.get(name)
        if known is None:
            known = self._agents[name] = _Agent()
        return known

    def reported(self, sender: str, key: tuple[int, int]) -> None:
        """Take note of which record an agent has."""
        self._agent(sender).knows = key

    def take(self, sender: str, message: LeaderMessage, now: float) -> list[LeadOutcome]:
        """Take what an agent tells the leader."""
        match message:
            case RecordMissing():
                self._agent(sender).knows = ()
                return []
            case StatusReport(generation, status):
                return self.heard(sender, status, generation - 1, now)
            case EventBatch():
                return self._take_events(sender, message, now)
            case TimingReport():
                said = self.lead.handle(Timed(node_of(sender), message), now)
                return [*said, *self._rebalance(now), *self._benchmark(now)]
            case StepReport():
                return self._take_steps(sender, message, now)
            case EvidenceReport():
                return self.lead.handle(Looked(node_of(sender), seen_of(message, now)), now)

    def _take_steps(self, sender: str, report: StepReport, now: float) -> list[LeadOutcome]:
        """Take how the ranks of a node stand; one of another term or generation counts for nothing."""
        plan = self.lead.plan
        known = (report.term, report.session) == (self._term, self._session) and self.is_member(sender)
        if not known or plan is None or plan.generation != report.generation:
            return []
        steps = self._steps_of(plan)
        said = None if report.said is None else proposal_received(report.said, now)
        news = steps.take(status_received(node_of(sender), report, now), said)
        told: list[LeadOutcome] = [self._tell_steps(steps, now)] if news else []
        if steps.held is not None:
            told += self.lead.held(steps.held, now)
        elif steps.outside:  # they vote by themselves, or have no session
            steps.release()
            told += self.lead.held(None, now)
        return told

    def _steps_of(self, plan: Plan) -> LeaderSteps:
        if self._steps is None or self._steps.generation != plan.generation:
            self._steps = LeaderSteps(plan.generation, plan.nodes)
        return self._steps

    def hold(self, over: bool, now: float) -> list[LeadOutcome]:
        """Have all ranks save after the same step and wait there, or go on."""
        plan = self.lead.plan
        if plan is None:
            return []
        steps = self._steps_of(plan)
        (steps.release if over else steps.hold)()
        return [self._tell_steps(steps, now)] if steps.busy else []

    def _rebalance(self, now: float) -> list[LeadOutcome]:
        """Ask the nodes which shares are in force, then for others where the speeds of ranks have changed."""
        plan, watch = self.lead.plan, self.lead.stragglers
        if plan is None or not watch.rebalances:
            return []
        steps = self._steps_of(plan)
        if steps.shares is None:
            return [self._tell_steps(steps, now)] if steps.inquire() else []
        watch.resume(steps.shares, now)
        return [self._tell_steps(steps, now)] if steps.rebalance(watch.slow) else []

    def _benchmark(self, now: float) -> list[LeadOutcome]:
        """Have all ranks compute the same product after a step, where that may be a second sign."""
        plan = self.lead.plan
        if plan is None or not (why := self.lead.asks_benchmark(now)):
            return []
        steps = self._steps_of(plan)
        steps.benchmark()
        return [Log(why), self._tell_steps(steps, now)]

    def _tell_steps(self, steps: LeaderSteps, now: float) -> TellNodes:
        self._next_steps = now
        said = proposal_sent(steps.current, now)
        return TellNodes(steps.nodes, StepOrder(self._term, steps.generation, self._session, said))

    def steps_due(self, now: float, every: float) -> list[LeadOutcome]:
        """Return whom to ask again how its ranks stand, when it is time to do so once more."""
        steps, plan = self._steps, self.lead.plan
        if steps is None or plan is None or plan.generation != steps.generation:
            self._steps = None
            return []
        if now < self._next_steps + every or not steps.busy:
            return []
        return [self._tell_steps(steps, now)]

    def _take_events(self, sender: str, batch: EventBatch, now: float) -> list[LeadOutcome]:
        """Take what happened on a node; each event once, and in their order."""
        known = self._agent(sender)
        said: list[LeadOutcome] = []
        if batch.after > known.taken:
            return said  # some were lost on the way; they are sent again
        for one in batch.events:
            if one.number > known.taken:
                known.taken = one.number
                said += self.lead.handle(NodeEvent(node_of(sender), one.generation, one.event), now)
        return said

    def heard(self, sender: str, status: NodeStatus, ended: int, now: float) -> list[LeadOutcome]:
        """Take a ping of an agent."""
        return self.lead.handle(Heartbeat(node_of(sender), incarnation_of(sender), status, ended), now)

    def broken(self, gone: dict[str, tuple[float, str]], now: float) -> list[LeadOutcome]:
        """Count the agents as ended whose connection broke, and at whose address nothing listens any more.

        Args:
            gone: since when that is known of an agent, and why its connection broke; those that are counted
                are removed.
            now: in seconds of the agent's clock.
        """
        said: list[LeadOutcome] = []
        for agent, (since, reason) in list(gone.items()):
            if now - since < GONE_WAITS or self.lead.ending is not None:
                continue
            del gone[agent]
            if self.is_member(agent):
                said += self.lead.handle(Left(node_of(agent), f"its agent has ended ({reason})"), now)
        return said

    def is_member(self, agent: str) -> bool:
        """Say whether an agent is that of a node of the job."""
        member = self.lead.members().get(node_of(agent))
        return member is not None and member.incarnation == incarnation_of(agent)

    def join(self, sender: str, message: Join, now: float) -> list[SendMessage | LeadOutcome]:
        """Take a node in, or say why not; while the job before may still be there, nobody is taken in."""
        runs = message.generation > 0
        if not runs:
            self._fresh.add(sender)
            self._previous_members = {
                one: at for one, at in self._previous_members.items() if node_of(one) != node_of(sender)
            }
        if runs and not self.lead.began:
            self._previous_members[sender] = now + PREVIOUS_MEMBERS_WAIT
            return [SendMessage(sender, AgentsRestarted(tuple(sorted({self._id, *self._fresh}))))]
        if runs and message.session != self._session:
            # It missed that its job is over: the agents that are here prove which ones are dead.
            here = sorted(agent_id(one.name, one.incarnation) for one in self.lead.members().values())
            return [SendMessage(sender, AgentsRestarted(tuple(here)))]
        if not self.lead.began and now < max(self._previous_members.values(), default=now):
            return []
        self.lead.after(message.after)
        said: list[SendMessage | LeadOutcome] = [*self.lead.handle(Joined(message.member), now)]
        if self.is_member(sender):  # else nothing more of it counts
            said += self.heard(sender, message.status, 0, now)
            said.append(SendMessage(sender, JoinAccepted()))
            if message.asked:
                stop = NodeEvent(node_of(sender), message.generation, StopRequested(message.asked))
                said += self.lead.handle(stop, now)
        return said

    def blame(self, blamed: Blamed) -> list[SendMessage | Blamed]:
        """Tell the nodes whose ranks are silent whom their evidence names."""
        message = BlameNotice(blamed.generation, blamed.node, blamed.verdict, self._session)
        said: list[SendMessage | Blamed] = [blamed] if self._me.name in blamed.names else []
        return [*said, *self.to_others(blamed.names, message)]

    def to_others(
        self, names: tuple[str, ...], message: BlameNotice | Quiesce | StepOrder
    ) -> list[SendMessage]:
        """Return what carries a message to the agents of other nodes."""
        members = self.lead.members()
        found = [members[name] for name in names if name in members and name != self._me.name]
        return [SendMessage(agent_id(one.name, one.incarnation), message, one.address) for one in found]

    def quiet(self, before: float) -> list[str]:
        """Return the agents of other nodes that were last heard before a time."""
        members = self.lead.members()
        found = [members[name] for name in self.lead.quiet(before) if name != self._me.name]
        return [agent_id(one.name, one.incarnation) for one in found]

    def begin_call(self, call: QuiesceNodes) -> None:
        """Have nodes quiesce, until something is proposed; those that join meanwhile are added."""
        before = self.call
        if before is not None and before.order.generation == call.order.generation:
            call = replace(call, names=tuple(dict.fromkeys((*before.names, *call.names))))
        self.call, self._next_call = call, -math.inf

    def calls(self, now: float, every: float) -> list[SendMessage | Quiesce]:
        """Return what to write to those who are to quiesce, when it is time to do so once more."""
        call = self.call
        if call is None or now < self._next_call:
            return []
        self._next_call = now + every
        said: list[SendMessage | Quiesce] = [call.order] if self._me.name in call.names else []
        return [*said, *self.to_others(call.names, call.order)]

    def previous_members(self, seeds: tuple[str, ...], ours: Beacon, now: float) -> list[SendToAddress]:
        """Return what to write to the addresses where somebody might found the job anew."""
        if now < self._next_previous_members or not self.lead.began:
            return []
        self._next_previous_members = now + PREVIOUS_MEMBERS_EVERY
        members = self.lead.members().values()
        known = {address for member in members for address in (member.address, member.endpoint)}
        return [SendToAddress(seed, ours) for seed in seeds if seed not in known]

    def settled(self, record: Record, gone: Mapping[str, object]) -> bool:
        """Say whether every agent that is told has a record."""
        others = record.agents - {self._id} - gone.keys()
        return all(self._agent(name).knows == record.key for name in others)

    def farewell(self, record: Record | None) -> list[SendMessage]:
        """Return what lets the agents end that could succeed this one: all know how the job ended."""
        voters = frozenset[str]() if record is None else record.voters
        return [SendMessage(one, MayLeave(self._session)) for one in sorted(voters - {self._id})]

    def record(self, proposal: Proposal, before: Record) -> Record:
        """Return what to put to the vote."""
        members = self.lead.members()
        ids = {name: agent_id(name, member.incarnation) for name, member in members.items()}
        active = [ids[name] for name in proposal.active if name in ids]
        here = frozenset(ids[name] for name in proposal.here)
        quorums: Quorums = before.quorums[-1:]
        if proposal.generation:
            order = [self._id, *sorted(before.voters), *active, *sorted(here)]
            found = [one for one in dict.fromkeys(order) if one in here | {self._id}]
            wanted = min(MOST_VOTERS, len(found))
            quorums = (frozenset(found[: wanted - 1 + wanted % 2]),)
        text = PLANS.write(proposal.plan)
        self.plan.keep(text, proposal.plan)
        return replace(
            before,
            generation=proposal.generation,
            active=frozenset(active),
            agents=here,
            plan=text,
            quorums=quorums,
        )
