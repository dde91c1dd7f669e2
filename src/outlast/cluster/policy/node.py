"""One agent's part in a job of several nodes: it finds the others, follows the leader, or does so.

What agents do together is told in ARCHITECTURE.md, "Flow 4: many nodes". An agent that begins anew is another
agent, which never voted before, so nothing needs to be on disk.

What the newest record means for this node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outlast.cluster.policy.ballots import (
    AppendEntries,
    AppendReply,
    HardState,
    InForce,
    Leads,
    Outcome,
    Record,
    Send,
    StepsDown,
    founding,
)
from outlast.cluster.policy.contacts import NOTICE_EVERY, Beacon, Contact, Contacts, LeaderBeacon, meet
from outlast.cluster.policy.election import Elector
from outlast.cluster.policy.events import (
    JoinRejected,
    JoinRequest,
    LeadOutcome,
    Log,
    NodeEvent,
    NodeStatus,
    Order,
    Proposal,
    Quiesce,
    QuiesceNodes,
    Rejected,
    Reset,
    SendMessage,
    Start,
    timing_for,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.leader_state import LeaderState
from outlast.cluster.policy.members import JobSpec, Joined, Member
from outlast.cluster.policy.message_shapes import misfit
from outlast.cluster.policy.messages import (
    Assignment,
    Ending,
    EventQueue,
    MessageError,
    WireMessage,
    agent_id,
    assignment,
    assignment_from_json,
    ballot_from_json,
    ballot_to_json,
    member_from_json,
    node_of,
    plan_from_text,
)
from outlast.hang.policy.attribution import Blamed, Seen, blamed_from_json, seen_to_json
from outlast.recovery.policy.job import Event

if TYPE_CHECKING:
    from outlast.config import FaultTolerance


class LocalAssignment:
    """Keeps it: from the plan, where the agent has it, else from what the leader wrote besides.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = (-1, -1)
        self._mine: Assignment | Ending | None = None

    def take(self, message: WireMessage, record: Record, contacts: Contacts) -> None:
        """Take what a ping says; the plan in it tells where others are, too."""
        if "record" in message and record.plan:
            plan = plan_from_text(record.plan)
            self._key, self._mine = record.key, assignment(plan, record.generation, self._name)
            contacts.learn(plan)
        elif "yours" in message:
            self._key, self._mine = record.key, assignment_from_json(message["yours"])

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
    """

    def __init__(
        self, me: Member, terms: JobSpec, config: FaultTolerance, start: Start, clock: tuple[float, float]
    ) -> None:
        now, self._epoch = clock
        self.id = agent_id(me.name, me.incarnation)
        self._me, self._terms, self._config, self._start = me, terms, config, start
        self._timing = timing_for(terms.most, terms.ping_timeout)
        self.offer = NodeStatus()
        self._contacts = Contacts(me, start, 2 * self._timing.promise, now)
        self._board = LeaderBeacon(2 * self._timing.promise + 2 * NOTICE_EVERY)
        self._gone: dict[str, tuple[float, str]] = {}
        self._outbox = EventQueue()
        self._mine = LocalAssignment(me.name)
        self._called_by = ""
        self._halted = 0
        self._dismissed = False
        self._left: dict[str, HardState] = {}  # votes in jobs that this agent was in before, by session
        self._elector = Elector(self.id, self._timing, now, None, me.incarnation)
        self.session = ""  # who founded the job that this agent is in
        self._begin(
            now, self.id if start.bootstrap_node else "", founding(self.id) if start.bootstrap_node else None
        )

    @property
    def leader(self) -> str:
        """Return the id of the leader, as far as is known; empty: unknown."""
        return self._elector.leader

    @property
    def rights(self) -> tuple[int, float]:
        """Return the generation whose ranks on this node may commit, and until when."""
        return self._elector.rights

    def alone_since(self, now: float) -> float | None:
        """Return since when no leader was heard; None: one is."""
        return self._contacts.out_since if self._out_of_contact(now) else None

    def settled(self) -> bool:
        """Say whether all that are told have the newest record; a voter waits until it is bidden farewell."""
        record = self._elector.record
        if record is None or self.leader_state is None:
            return record is None or self._dismissed or self.id not in record.voters
        return self.leader_state.settled(record, self._gone)

    def farewell(self) -> tuple[Order, ...]:
        """Return what the leader writes once all is settled: those that could succeed it may end."""
        return (
            ()
            if self.leader_state is None
            else self.leader_state.farewell(self._elector.record, self.session)
        )

    def deadline(self, now: float) -> float:
        """Return when :meth:`tick` has to be called at the latest."""
        soonest = now + self._timing.interval / 4
        return soonest if self.leader_state is None else min(soonest, self.leader_state.lead.deadline)

    def tell(self, event: Event, generation: int, now: float) -> tuple[Order, ...]:
        """Take something that happened on this node in a generation."""
        before = self._outbox.add(event, generation)
        if self.leader_state is not None:
            said = NodeEvent(self._me.name, generation, event)
            return tuple(self._led(self.leader_state.lead.handle(said, now), now))
        return tuple(self._tell_on(before))

    def seen(self, seen: Seen, clock: float, now: float) -> tuple[Order, ...]:
        """Tell the leader what was seen of the ranks of this node; ``clock`` is that of their pulses."""
        message = seen_to_json(seen, clock)
        if self.leader_state is not None:
            return tuple(self._led(self.leader_state.take(self.id, {"kind": "seen", **message}, now), now))
        return (SendMessage(self.leader, {"kind": "seen", **message}),) if self.leader else ()

    def offers(self, offer: NodeStatus, now: float) -> tuple[Order, ...]:
        """Take note of what this node has for the next generation; what ranks can is told at once."""
        before, self.offer = self.offer, offer
        if self.leader_state is not None:
            return tuple(self._report_self(0, now)) if offer != before else ()
        told = offer.able != before.able and bool(self.leader)
        return (self._here(self.leader, 0),) if told else ()

    def _here(self, to: str, generation: int) -> SendMessage:
        return SendMessage(to, {"kind": "here", "generation": generation, **asdict(self.offer)})

    def halted(self, generation: int, now: float) -> tuple[Order, ...]:
        """Take note that this node runs nothing that is older than a generation."""
        self._halted = max(self._halted, generation)
        if self.leader_state is not None:
            return tuple(self._report_self(generation - 1, now))
        return (self._here(self._called_by, generation),) if self._called_by else ()

    def gone(self, peer: str, reason: str, now: float) -> None:
        """Take note that the connection with an agent broke."""
        self._gone[peer] = (now, reason)

    def handle(self, sender: str, message: WireMessage, now: float) -> tuple[Order, ...]:
        """Take a message.

        Raises:
            LetterError: it makes no sense, or a field of it is larger than it may be.
        """
        self._gone.pop(sender, None)
        wrong = misfit(message)
        if wrong is not None:
            kind = wrong.found if wrong.place == "kind" else repr(message["kind"])
            raise MessageError(f"a message {kind} of {sender} was refused: {wrong}")
        try:
            return tuple(self._take(sender, message, now))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            words = f"a message {message.get('kind')!r} of {sender} makes no sense ({error!r})"
            raise MessageError(words) from error

    def _take(self, sender: str, message: WireMessage, now: float) -> Iterator[Order]:
        kind = message.get("kind")
        if kind == "ping":
            return self._on_ping(sender, message, now)
        if kind in ("report", "vote", "vote-request"):
            return self._on_ballot(sender, message, now)
        if kind in ("here", "said", "lacking", "seen"):
            return (
                iter(())
                if self.leader_state is None
                else self._led(self.leader_state.take(sender, message, now), now)
            )
        if kind == "blamed":
            ours = sender == self.leader and message["session"] == self.session
            return iter((blamed_from_json(message),) if ours else ())
        return self._on_contact(sender, message, now)

    def _on_contact(self, sender: str, message: WireMessage, now: float) -> Iterator[Order]:
        match message.get("kind"):
            case "join":
                yield from self._on_join(sender, message, now)
            case "refused" | "elsewhere" if not (message.get("excluded") or self._out_of_contact(now)):
                pass
            case "refused":
                yield JoinRejected(str(message["reason"]))
            case "elsewhere":
                yield self._knock(str(message["address"]))
            case "taken-in":
                self._contacts.out_since = now
            case "here-is":
                yield from self._on_other(Beacon.of(message), now)
            case "anew":
                yield from self._meets({str(one) for one in message["fresh"]})
            case "halt":
                yield from self._on_halt(sender, message, now)
            case "farewell":
                self._dismissed = message["session"] == self.session
            case kind:
                raise MessageError(f"{sender} writes of {kind!r}, which is unknown; it is passed over")

    def tick(self, now: float) -> tuple[Order, ...]:
        """Do what is due."""
        said = list(self._carry(self._elector.tick(now), now))
        if self.leader_state is not None:
            said += self._lead_on(self.leader_state, now)
        elif self._out_of_contact(now):
            said += [self._knock(one) for one in self._contacts.knocks(self._elector.record, now)]
        return tuple(said)

    def _knock(self, address: str) -> JoinRequest:
        asked = self._outbox.asked
        return JoinRequest(
            address, self._contacts.join_message(self.generation, self.offer, self.session, asked)
        )

    def _out_of_contact(self, now: float) -> bool:
        return self._contacts.out(self.leader_state is not None, now)

    def _on_join(self, sender: str, message: WireMessage, now: float) -> Iterator[Order]:
        self._contacts.addresses[sender] = member_from_json(message["member"]).address
        if self.leader_state is not None:
            for one in self.leader_state.join(sender, message, now):
                yield from (one,) if isinstance(one, SendMessage) else self._led((one,), now)
            return
        where = self._contacts.addresses.get(self.leader)
        if not self._out_of_contact(now):
            yield from (SendMessage(sender, {"kind": "elsewhere", "address": where}),) if where else ()
        elif not int(message["generation"]):
            yield from self._meets({sender})
        elif not self.generation:
            yield SendMessage(sender, {"kind": "anew", "address": "", "fresh": [self.id]})

    def notice(self, now: float) -> Beacon | None:
        """Return what a leader writes into a shared folder every second; None: nothing."""
        if self.leader_state is None or not self.leader_state.lead.began:
            return None
        return self._notice(self._me.address, int(now / NOTICE_EVERY))

    def _notice(self, address: str, beat: int = 0) -> Beacon:
        return Beacon(self._terms.run_id, self.generation, self.session, address, beat)

    def read(self, found: Beacon | None, now: float) -> tuple[Order, ...]:
        """Take what is in the shared folder; who leads, or hears nobody, reads it every second."""
        runs = self._board.runs(found, self.session, now)
        if self.leader_state is not None:
            self.leader_state.lead.wait_until(self._board.until)
        if found is None or not runs:
            return ()
        if self.leader_state is not None:
            return tuple(self._on_other(found, now))
        return (self._knock(found.address),) if self._out_of_contact(now) else ()

    def _on_other(self, other: Beacon, now: float) -> Iterator[Order]:
        """Join another job of this name, or let the older one of two give way."""
        begun = None if self.leader_state is None else self.leader_state.lead.began
        where = self._contacts.addresses.get(self.leader, "") if begun is None else self._me.address
        ours = self._notice("" if begun is None and self._out_of_contact(now) else where)
        match meet(other, ours, begun):
            case Contact.JOIN:
                self._contacts.seek(other.address)
                self._begin(now, "")
                yield Log(f"the job runs already, coordinated at {other.address}; this node joins")
                yield self._knock(other.address)
            case Contact.GIVE_WAY:
                words = f"a younger job of this name is coordinated at {other.address}; this one gives way"
                yield Reset(other.generation, words)
            case Contact.ANSWER:
                yield JoinRequest(other.address, ours.message())

    def _meets(self, fresh: set[str]) -> Iterator[Order]:
        """Take note that agents have begun anew, so that those before them on their nodes are dead."""
        record = self._elector.record
        dead = "" if record is None or self.leader_state is not None else self._contacts.bury(fresh, record)
        if record is not None and dead:
            words = f"nobody can be elected, since the agent of {dead} has begun anew; so does this one"
            yield Reset(max(self._start.after, record.generation), words)

    def _begin(self, now: float, session: str, stored: HardState | None = None) -> None:
        """Take part in another job of this name, or in none yet.

        An agent may leave a job that has not begun for it, though it has voted there. When it comes back,
        that vote counts: else two agents could win one term.
        """
        if self.session:
            self._left[self.session] = self._elector.stored
        stored = self._left.pop(session, stored)
        self._elector = Elector(self.id, self._timing, now, stored, self._me.incarnation)
        self.leader_state: LeaderState | None = None
        self.session = session
        self._follows = ("", -1)
        self._outbox.clear()
        self.generation = 0

    def _on_ping(self, sender: str, message: WireMessage, now: float) -> Iterator[Order]:
        if not self._is_ours(message, now):
            return
        ping = ballot_from_json(message, sender, self._elector.record)
        if ping is None:
            yield SendMessage(sender, {"kind": "lacking"})
            return
        assert isinstance(ping, AppendEntries)
        record = ping.record
        self._mine.take(message, record, self._contacts)
        yield from self._carry(self._elector.handle(ping, now), now)
        if ping.term != self._elector.term:
            return
        self._contacts.pinged = now
        taken = int(message["taken"])
        if self._outbox.late(taken) or (sender, ping.term) != self._follows:
            self._follows = (sender, ping.term)
            self._own_up(record.generation)
            yield from self._tell_on(taken)

    def _is_ours(self, message: WireMessage, now: float) -> bool:
        """Say whether a leader is that of the job that this agent is in, which may be from now on."""
        session = str(message["session"])
        free = not self.generation and self.leader_state is None and len(self._left) < JOBS_LEFT
        if session != self.session and free and self._out_of_contact(now):
            self._begin(now, session)
        return session == self.session

    def _own_up(self, generation: int) -> None:
        if self.generation <= generation < self._halted:
            self._outbox.own_up(self._me.name, generation)

    def _tell_on(self, taken: int) -> Iterator[Order]:
        """Tell the leader what happened here after what it has taken already."""
        if self.leader and self.leader != self.id:
            for message in self._outbox.messages(taken, self.generation):
                yield SendMessage(self.leader, message)

    def _on_halt(self, sender: str, message: WireMessage, now: float) -> Iterator[Order]:
        if sender == self.leader or self._out_of_contact(now):
            self._called_by = sender
            yield Quiesce(int(message["generation"]), str(message["reason"]), bool(message["reenter"]))

    def _on_ballot(self, sender: str, message: WireMessage, now: float) -> Iterator[Order]:
        ballot = ballot_from_json(message, sender, None)
        if ballot is None or message["session"] != self.session:
            return
        if isinstance(ballot, AppendReply) and self.leader_state is not None:
            self.leader_state.reported(sender, ballot.key)
        yield from self._carry(self._elector.handle(ballot, now), now)
        if isinstance(ballot, AppendReply) and self.leader_state is not None:
            yield from self._led(self.leader_state.heard(sender, message, 0, now), now)

    def _report_self(self, ended: int, now: float) -> Iterator[Order]:
        if self.leader_state is not None:
            yield from self._led(self.leader_state.heard(self.id, asdict(self.offer), ended, now), now)

    def _lead_on(self, leader_state: LeaderState, now: float) -> Iterator[Order]:
        yield from self._report_self(0, now)
        yield from self._led(leader_state.broken(self._gone, now), now)
        yield from self._led(leader_state.lead.tick(now), now)
        yield from leader_state.calls(now, self._timing.interval)
        notice = self._notice(self._me.address)
        yield from (
            JoinRequest(*one) for one in leader_state.previous_members(self._start.seeds, notice, now)
        )

    def _led(self, outcomes: Iterable[LeadOutcome], now: float) -> Iterator[Order]:
        """Carry out what was decided for the job."""
        for one in outcomes:
            leader_state, record = self.leader_state, self._elector.record
            if leader_state is None or record is None:
                return
            match one:
                case Proposal():
                    leader_state.call = None
                    yield from self._carry(self._elector.propose(leader_state.record(one, record), now), now)
                case QuiesceNodes():
                    leader_state.begin_call(one)
                    yield from leader_state.calls(now, self._timing.interval)
                case Rejected(name, reason, excluded):
                    for agent in [agent for agent in self._contacts.addresses if node_of(agent) == name]:
                        yield SendMessage(agent, {"kind": "refused", "reason": reason, "excluded": excluded})
                    yield Log(reason)
                case Blamed():
                    yield from leader_state.blame(one)
                case _:
                    yield one

    def _carry(self, outcomes: Iterable[Outcome], now: float) -> Iterator[Order]:
        """Carry out what was decided about who leads."""
        for one in outcomes:
            match one:
                case Send(to, message):
                    yield self._written(to, message)
                case Leads():
                    yield from self._take_leader_state(one, now)
                case StepsDown(_, reason):
                    self.leader_state = None
                    yield Log(f"this node is no longer the leader: {reason}")
                case InForce(record, _):
                    yield from self._in_force(record)

    def _written(self, to: str, ballot: Any) -> SendMessage:
        address = self._contacts.addresses.get(to, "")
        if isinstance(ballot, AppendEntries) and self.leader_state is not None:
            return SendMessage(to, self.leader_state.ping(to, ballot, self.session), address)
        message = {**ballot_to_json(ballot), "session": self.session}
        if isinstance(ballot, AppendReply):
            message |= asdict(self.offer)
        return SendMessage(to, message, address)

    def _take_leader_state(self, won: Leads, now: float) -> Iterator[Order]:
        lead = JobController(self._terms, self._config, now, self._epoch)
        self.leader_state = LeaderState(self._me, lead, now, self.session)
        yield Log(f"this node is the leader: {won.reason}")
        if won.record.plan:
            self._contacts.learn(plan_from_text(won.record.plan))
            since = {node_of(self._follows[0]): self._contacts.pinged} if self._follows[0] else {}
            yield from self._led(lead.take_over(won.record.plan, since, now), now)
            self._own_up(won.record.generation)
        else:
            yield from lead.recall(self._start.job_state, self._start.after)
            yield from self._led(lead.handle(Joined(self._me), now), now)
        for generation, event in self._outbox.since(self.generation):
            yield from self._led(lead.handle(NodeEvent(self._me.name, generation, event), now), now)

    def _in_force(self, record: Record) -> Iterator[Order]:
        mine = self._mine.of(record)
        if self.leader_state is not None and record.plan:
            mine = assignment(self.leader_state.plan_of(record), record.generation, self._me.name)
        self.generation = max(self.generation, record.generation)
        if mine is not None:
            yield mine
