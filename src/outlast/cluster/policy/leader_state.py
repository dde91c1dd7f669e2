"""The leader's part in a cluster: what it knows of each agent, and what it writes to them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outlast.cluster.policy.ballots import AppendEntries, Quorums, Record
from outlast.cluster.policy.contacts import Beacon
from outlast.cluster.policy.events import (
    Heartbeat,
    LeadOutcome,
    Looked,
    NodeEvent,
    NodeStatus,
    Proposal,
    Quiesce,
    QuiesceNodes,
    SendMessage,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import Joined, Left, Member
from outlast.cluster.policy.messages import (
    WireMessage,
    agent_id,
    assignment,
    assignment_to_json,
    ballot_to_json,
    event_from_json,
    incarnation_of,
    member_from_json,
    node_of,
    record_to_json,
)
from outlast.hang.policy.attribution import Blamed, blamed_to_json, seen_from_json
from outlast.recovery.policy.job import StopRequested

MOST_VOTERS = 5
GONE_WAITS = 0.3  # a connection that broke is made anew within this, or the agent is dead
ELDERS_EVERY = 2.0
ELDERS_WAIT = 10.0  # whoever founds anew waits so long for the job before, after each sign of it


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
    """

    def __init__(self, me: Member, lead: JobController, now: float, session: str) -> None:
        self.lead = lead
        self._session = session
        self.call: QuiesceNodes | None = None
        self._previous_members: dict[
            str, float
        ] = {}  # agents of the job before, and until when they are waited for
        self.fresh: set[str] = set()  # agents that knocked and were in no generation
        self._me = me
        self._id = agent_id(me.name, me.incarnation)
        self._agents: dict[str, _Agent] = {}
        self._parsed: tuple[tuple[int, int], Mapping[str, Any]] = ((-1, -1), {})
        self._places: dict[str, int] = {}  # of the nodes in that plan
        self._next_call = now
        self._next_previous_members = now

    def plan_of(self, record: Record) -> Mapping[str, Any]:
        """Return the plan in a record that has one."""
        if self._parsed[0] != record.key:
            self._parsed = (record.key, json.loads(record.plan))
            self._places = {seat[0]: place for place, seat in enumerate(self._parsed[1]["seats"])}
        return self._parsed[1]

    def ping(self, to: str, ping: AppendEntries, session: str) -> WireMessage:
        """Return the message of a ping; what the agent has already is left out."""
        known = self._agent(to)
        message = ballot_to_json(ping)
        message["taken"], message["session"] = known.taken, session
        if known.knows != ping.record.key:
            votes = to in ping.record.voters
            message["record"] = record_to_json(ping.record, "" if votes else to)
            if ping.record.plan and not votes:
                plan = self.plan_of(ping.record)
                mine = assignment(plan, ping.record.generation, node_of(to), self._places)
                message["yours"] = assignment_to_json(mine)
        return message

    def _agent(self, name: str) -> _Agent:
        known = self._agents.get(name)
        if known is None:
            known = self._agents[name] = _Agent()
        return known

    def reported(self, sender: str, key: tuple[int, int]) -> None:
        """Take note of which record an agent has."""
        self._agent(sender).knows = key

    def take(self, sender: str, message: WireMessage, now: float) -> Iterator[LeadOutcome]:
        """Take what an agent tells the leader."""
        if message["kind"] == "lacking":
            self._agent(sender).knows = ()
        elif message["kind"] == "here":
            yield from self.heard(sender, message, int(message["generation"]) - 1, now)
        elif message["kind"] == "seen":
            yield from self.lead.handle(Looked(node_of(sender), seen_from_json(message, now)), now)
        else:
            yield from self.said(sender, message, now)

    def said(self, sender: str, message: WireMessage, now: float) -> Iterator[LeadOutcome]:
        """Take what happened on a node; each event once, and in their order."""
        known = self._agent(sender)
        if int(message["after"]) > known.taken:
            return  # some got lost on the way; they come again
        for number, generation, event in message["events"]:
            if int(number) > known.taken:
                known.taken = int(number)
                said = NodeEvent(node_of(sender), int(generation), event_from_json(event))
                yield from self.lead.handle(said, now)

    def heard(self, sender: str, message: WireMessage, ended: int, now: float) -> tuple[LeadOutcome, ...]:
        """Take a sign of life of an agent."""
        able = message["able"]
        offer = NodeStatus(
            int(message["store"]),
            None if able is None else bool(able),
            float(message["patience"]),
            int(message["serial"]),
        )
        return self.lead.handle(Heartbeat(node_of(sender), incarnation_of(sender), offer, ended), now)

    def broken(self, gone: dict[str, tuple[float, str]], now: float) -> Iterator[LeadOutcome]:
        """Give up the agents whose connection broke and was not made anew."""
        for agent, (since, reason) in list(gone.items()):
            if now - since < GONE_WAITS or self.lead.ending is not None:
                continue
            del gone[agent]
            member = self.lead.members().get(node_of(agent))
            if member is not None and member.incarnation == incarnation_of(agent):
                yield from self.lead.handle(Left(member.name, f"its agent has ended ({reason})"), now)

    def join(self, sender: str, message: WireMessage, now: float) -> Iterator[SendMessage | LeadOutcome]:
        """Take a node in, or say why not; while the job before may still be there, nobody is taken in."""
        runs = int(message["generation"]) > 0
        if not runs:
            self.fresh.add(sender)
            self._previous_members = {
                one: at for one, at in self._previous_members.items() if node_of(one) != node_of(sender)
            }
        if runs and not self.lead.began:
            self._previous_members[sender] = now + ELDERS_WAIT
            fresh = sorted({self._id, *self.fresh})
            yield SendMessage(sender, {"kind": "anew", "address": self._me.address, "fresh": fresh})
        elif runs and str(message["session"]) != self._session:
            # It missed that its job is over: the agents that are here prove which ones are dead.
            here = (agent_id(one.name, one.incarnation) for one in self.lead.members().values())
            yield SendMessage(sender, {"kind": "anew", "address": self._me.address, "fresh": sorted(here)})
        elif self.lead.began or now >= max(self._previous_members.values(), default=now):
            self.lead.after(int(message["after"]))
            yield from self.lead.handle(Joined(member_from_json(message["member"])), now)
            member = self.lead.members().get(node_of(sender))
            if member is not None and member.incarnation == incarnation_of(
                sender
            ):  # else nothing more of it counts
                yield from self.heard(sender, message, 0, now)
                yield from self._taken_in(sender, int(message["asked"]), now)

    def _taken_in(self, sender: str, asked: int, now: float) -> Iterator[SendMessage | LeadOutcome]:
        """Answer a node that is pinged once there is a plan, and take note that it was asked to stop."""
        yield SendMessage(sender, {"kind": "taken-in"})
        if asked:
            yield from self.lead.handle(NodeEvent(node_of(sender), 0, StopRequested(asked)), now)

    def blame(self, blamed: Blamed) -> Iterator[SendMessage | Blamed]:
        """Tell the nodes whose ranks are silent whom their evidence names."""
        message = {"kind": "blamed", "session": self._session, **blamed_to_json(blamed)}
        members = self.lead.members()
        for name in blamed.names:
            if name == self._me.name:
                yield blamed
            elif name in members:
                yield SendMessage(agent_id(name, members[name].incarnation), message, members[name].address)

    def begin_call(self, call: QuiesceNodes) -> None:
        """Have nodes called, until something is proposed."""
        self.call, self._next_call = call, -math.inf

    def calls(self, now: float, every: float) -> Iterator[SendMessage | Quiesce]:
        """Yield what to write to those who are called, when it is time to do so once more."""
        call = self.call
        if call is None or now < self._next_call:
            return
        self._next_call = now + every
        halt = Quiesce(call.generation, call.reason, call.reenter)
        message = {"kind": "halt", **asdict(halt)}
        members = self.lead.members()
        for name in call.names:
            if name == self._me.name:
                yield halt
            elif name in members:
                member = members[name]
                yield SendMessage(agent_id(name, member.incarnation), message, member.address)

    def previous_members(
        self, seeds: tuple[str, ...], ours: Beacon, now: float
    ) -> Iterator[tuple[str, WireMessage]]:
        """Yield what to write to the addresses where somebody might found the job anew."""
        if now < self._next_previous_members or not self.lead.began:
            return
        self._next_previous_members = now + ELDERS_EVERY
        members = self.lead.members().values()
        known = {address for member in members for address in (member.address, member.endpoint)}
        for seed in seeds:
            if seed not in known:
                yield seed, ours.message()

    def settled(self, record: Record, gone: Mapping[str, object]) -> bool:
        """Say whether every agent that is told has a record."""
        others = record.agents - {self._id} - gone.keys()
        return all(self._agent(name).knows == record.key for name in others)

    def farewell(self, record: Record | None, session: str) -> tuple[SendMessage, ...]:
        """Return what lets the agents end that could succeed this one: all know how the job ended."""
        voters = frozenset[str]() if record is None else record.voters
        message = {"kind": "farewell", "session": session}
        return tuple(SendMessage(one, message) for one in sorted(voters - {self._id}))

    def record(self, proposal: Proposal, before: Record) -> Record:
        """Return what to put to the vote."""
        members = self.lead.members()
        ids = {name: agent_id(name, member.incarnation) for name, member in members.items()}
        active = frozenset(ids[name] for name in proposal.active if name in ids)
        here = frozenset(ids[name] for name in proposal.here)
        quorums: Quorums = before.quorums[-1:]
        if proposal.generation:
            order = [
                self._id,
                *sorted(before.voters),
                *(ids[name] for name in proposal.active if name in ids),
            ]
            found = [one for one in dict.fromkeys((*order, *sorted(here))) if one in here | {self._id}]
            wanted = min(MOST_VOTERS, len(found))
            quorums = (frozenset(found[: wanted - 1 + wanted % 2]),)
        return Record(0, 0, proposal.generation, active, here, proposal.plan, quorums)
