"""One agent's part in a job of several nodes: it finds the others, follows whoever coordinates, or does so.

What agents do together is told in ARCHITECTURE.md, "Flow 4: many nodes". An agent that begins anew is another
agent, which never voted before, so nothing needs to be on disk.

What the newest record means for this node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outlast.cluster.policy.ballots import (
    Coordinates,
    InForce,
    Outcome,
    Ping,
    Record,
    Report,
    Send,
    StepsDown,
    Stored,
    founding,
)
from outlast.cluster.policy.contacts import NOTICE_EVERY, Board, Contacts, Meeting, Notice, meet
from outlast.cluster.policy.election import Elector
from outlast.cluster.policy.events import (
    Call,
    Halt,
    Knock,
    LeadOutcome,
    Offer,
    Order,
    Proposal,
    Reborn,
    Rejected,
    Said,
    Start,
    Told,
    TurnedAway,
    Write,
    timing_for,
)
from outlast.cluster.policy.job_controller import Lead
from outlast.cluster.policy.leader_state import Chair
from outlast.cluster.policy.members import Joined, Member, Terms
from outlast.cluster.policy.message_shapes import misfit
from outlast.cluster.policy.messages import (
    Assignment,
    Ending,
    Letter,
    LetterError,
    Outbox,
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


class Mine:
    """Keeps it: from the plan, where the agent has it, else from what the coordinator wrote besides.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = (-1, -1)
        self._mine: Assignment | Ending | None = None

    def take(self, letter: Letter, record: Record, contacts: Contacts) -> None:
        """Take what a ping says; the plan in it tells where others are, too."""
        if "record" in letter and record.plan:
            plan = plan_from_text(record.plan)
            self._key, self._mine = record.key, assignment(plan, record.generation, self._name)
            contacts.learn(plan)
        elif "yours" in letter:
            self._key, self._mine = record.key, assignment_from_json(letter["yours"])

    def of(self, record: Record) -> Assignment | Ending | None:
        """Return what a record means; None: nothing, or it was never told."""
        return self._mine if self._key == record.key else None


JOBS_LEFT = 16  # of this name that an agent may have left and still join another one


class Council:
    """Takes what happens on this node, letters, and time; says what to do.

    Args:
        me: this node.
        terms: what every node has to agree with.
        config: budgets.
        start: how to begin.
        clock: now, in seconds of a clock that goes on while the machine sleeps; and wall time when it was 0.
    """

    def __init__(
        self, me: Member, terms: Terms, config: FaultTolerance, start: Start, clock: tuple[float, float]
    ) -> None:
        now, self._epoch = clock
        self.id = agent_id(me.name, me.life)
        self._me, self._terms, self._config, self._start = me, terms, config, start
        self._timing = timing_for(terms.most, terms.ping_timeout)
        self.offer = Offer()
        self._contacts = Contacts(me, start, 2 * self._timing.promise, now)
        self._board = Board(2 * self._timing.promise + 2 * NOTICE_EVERY)
        self._gone: dict[str, tuple[float, str]] = {}
        self._outbox = Outbox()
        self._mine = Mine(me.name)
        self._called_by = ""
        self._halted = 0
        self._dismissed = False
        self._left: dict[str, Stored] = {}  # votes in jobs that this agent was in before, by session
        self._elector = Elector(self.id, self._timing, now, None, me.life)
        self.session = ""  # who founded the job that this agent is in
        self._begin(now, self.id if start.founder else "", founding(self.id) if start.founder else None)

    @property
    def coordinator(self) -> str:
        """Return the id of the agent that coordinates, as far as is known; empty: unknown."""
        return self._elector.coordinator

    @property
    def rights(self) -> tuple[int, float]:
        """Return the generation whose ranks on this node may commit, and until when."""
        return self._elector.rights

    def alone_since(self, now: float) -> float | None:
        """Return since when no coordinator was heard; None: one is."""
        return self._contacts.out_since if self._out_of_contact(now) else None

    def settled(self) -> bool:
        """Say whether all that are told have the newest record; a voter waits until it is bidden farewell."""
        record = self._elector.record
        if record is None or self.chair is None:
            return record is None or self._dismissed or self.id not in record.voters
        return self.chair.settled(record, self._gone)

    def farewell(self) -> tuple[Order, ...]:
        """Return what whoever coordinates writes once all is settled: those that could succeed it may end."""
        return () if self.chair is None else self.chair.farewell(self._elector.record, self.session)

    def deadline(self, now: float) -> float:
        """Return when :meth:`tick` has to be called at the latest."""
        soonest = now + self._timing.interval / 4
        return soonest if self.chair is None else min(soonest, self.chair.lead.deadline)

    def tell(self, event: Event, generation: int, now: float) -> tuple[Order, ...]:
        """Take something that happened on this node in a generation."""
        before = self._outbox.add(event, generation)
        if self.chair is not None:
            said = Said(self._me.name, generation, event)
            return tuple(self._led(self.chair.lead.handle(said, now), now))
        return tuple(self._tell_on(before))

    def seen(self, seen: Seen, clock: float, now: float) -> tuple[Order, ...]:
        """Tell the coordinator what was seen of the ranks of this node; ``clock`` is that of their pulses."""
        letter = seen_to_json(seen, clock)
        if self.chair is not None:
            return tuple(self._led(self.chair.take(self.id, {"kind": "seen", **letter}, now), now))
        return (Write(self.coordinator, {"kind": "seen", **letter}),) if self.coordinator else ()

    def offers(self, offer: Offer, now: float) -> tuple[Order, ...]:
        """Take note of what this node has for the next generation; what ranks can is told at once."""
        before, self.offer = self.offer, offer
        if self.chair is not None:
            return tuple(self._report_self(0, now)) if offer != before else ()
        told = offer.able != before.able and bool(self.coordinator)
        return (self._here(self.coordinator, 0),) if told else ()

    def _here(self, to: str, generation: int) -> Write:
        return Write(to, {"kind": "here", "generation": generation, **asdict(self.offer)})

    def halted(self, generation: int, now: float) -> tuple[Order, ...]:
        """Take note that this node runs nothing that is older than a generation."""
        self._halted = max(self._halted, generation)
        if self.chair is not None:
            return tuple(self._report_self(generation - 1, now))
        return (self._here(self._called_by, generation),) if self._called_by else ()

    def gone(self, peer: str, reason: str, now: float) -> None:
        """Take note that the connection with an agent broke."""
        self._gone[peer] = (now, reason)

    def handle(self, sender: str, letter: Letter, now: float) -> tuple[Order, ...]:
        """Take a letter.

        Raises:
            LetterError: it makes no sense, or a field of it is larger than it may be.
        """
        self._gone.pop(sender, None)
        wrong = misfit(letter)
        if wrong is not None:
            kind = wrong.found if wrong.place == "kind" else repr(letter["kind"])
            raise LetterError(f"a letter {kind} of {sender} was refused: {wrong}")
        try:
            return tuple(self._take(sender, letter, now))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            words = f"a letter {letter.get('kind')!r} of {sender} makes no sense ({error!r})"
            raise LetterError(words) from error

    def _take(self, sender: str, letter: Letter, now: float) -> Iterator[Order]:
        kind = letter.get("kind")
        if kind == "ping":
            return self._on_ping(sender, letter, now)
        if kind in ("report", "vote", "vote-request"):
            return self._on_ballot(sender, letter, now)
        if kind in ("here", "said", "lacking", "seen"):
            return iter(()) if self.chair is None else self._led(self.chair.take(sender, letter, now), now)
        if kind == "blamed":
            ours = sender == self.coordinator and letter["session"] == self.session
            return iter((blamed_from_json(letter),) if ours else ())
        return self._on_contact(sender, letter, now)

    def _on_contact(self, sender: str, letter: Letter, now: float) -> Iterator[Order]:
        match letter.get("kind"):
            case "join":
                yield from self._on_join(sender, letter, now)
            case "refused" | "elsewhere" if not (letter.get("excluded") or self._out_of_contact(now)):
                pass
            case "refused":
                yield TurnedAway(str(letter["reason"]))
            case "elsewhere":
                yield self._knock(str(letter["address"]))
            case "taken-in":
                self._contacts.out_since = now
            case "here-is":
                yield from self._on_other(Notice.of(letter), now)
            case "anew":
                yield from self._meets({str(one) for one in letter["fresh"]})
            case "halt":
                yield from self._on_halt(sender, letter, now)
            case "farewell":
                self._dismissed = letter["session"] == self.session
            case kind:
                raise LetterError(f"{sender} writes of {kind!r}, which is unknown; it is passed over")

    def tick(self, now: float) -> tuple[Order, ...]:
        """Do what is due."""
        said = list(self._carry(self._elector.tick(now), now))
        if self.chair is not None:
            said += self._lead_on(self.chair, now)
        elif self._out_of_contact(now):
            said += [self._knock(one) for one in self._contacts.knocks(self._elector.record, now)]
        return tuple(said)

    def _knock(self, address: str) -> Knock:
        asked = self._outbox.asked
        return Knock(address, self._contacts.join_letter(self.generation, self.offer, self.session, asked))

    def _out_of_contact(self, now: float) -> bool:
        return self._contacts.out(self.chair is not None, now)

    def _on_join(self, sender: str, letter: Letter, now: float) -> Iterator[Order]:
        self._contacts.addresses[sender] = member_from_json(letter["member"]).address
        if self.chair is not None:
            for one in self.chair.join(sender, letter, now):
                yield from (one,) if isinstance(one, Write) else self._led((one,), now)
            return
        where = self._contacts.addresses.get(self.coordinator)
        if not self._out_of_contact(now):
            yield from (Write(sender, {"kind": "elsewhere", "address": where}),) if where else ()
        elif not int(letter["generation"]):
            yield from self._meets({sender})
        elif not self.generation:
            yield Write(sender, {"kind": "anew", "address": "", "fresh": [self.id]})

    def notice(self, now: float) -> Notice | None:
        """Return what a coordinator writes into a shared folder every second; None: nothing."""
        if self.chair is None or not self.chair.lead.began:
            return None
        return self._notice(self._me.address, int(now / NOTICE_EVERY))

    def _notice(self, address: str, beat: int = 0) -> Notice:
        return Notice(self._terms.run_id, self.generation, self.session, address, beat)

    def read(self, found: Notice | None, now: float) -> tuple[Order, ...]:
        """Take what is in the shared folder; who coordinates, or hears nobody, reads it every second."""
        runs = self._board.runs(found, self.session, now)
        if self.chair is not None:
            self.chair.lead.wait_until(self._board.until)
        if found is None or not runs:
            return ()
        if self.chair is not None:
            return tuple(self._on_other(found, now))
        return (self._knock(found.address),) if self._out_of_contact(now) else ()

    def _on_other(self, other: Notice, now: float) -> Iterator[Order]:
        """Join another job of this name, or let the older one of two give way."""
        begun = None if self.chair is None else self.chair.lead.began
        where = self._contacts.addresses.get(self.coordinator, "") if begun is None else self._me.address
        ours = self._notice("" if begun is None and self._out_of_contact(now) else where)
        match meet(other, ours, begun):
            case Meeting.JOIN:
                self._contacts.seek(other.address)
                self._begin(now, "")
                yield Told(f"the job runs already, coordinated at {other.address}; this node joins")
                yield self._knock(other.address)
            case Meeting.GIVE_WAY:
                words = f"a younger job of this name is coordinated at {other.address}; this one gives way"
                yield Reborn(other.generation, words)
            case Meeting.ANSWER:
                yield Knock(other.address, ours.letter())

    def _meets(self, fresh: set[str]) -> Iterator[Order]:
        """Take note that agents have begun anew, so that those before them on their nodes are dead."""
        record = self._elector.record
        dead = "" if record is None or self.chair is not None else self._contacts.bury(fresh, record)
        if record is not None and dead:
            words = f"nobody can be elected, since the agent of {dead} has begun anew; so does this one"
            yield Reborn(max(self._start.after, record.generation), words)

    def _begin(self, now: float, session: str, stored: Stored | None = None) -> None:
        """Take part in another job of this name, or in none yet.

        An agent may leave a job that has not begun for it, though it has voted there. When it comes back,
        that vote counts: else two agents could win one term.
        """
        if self.session:
            self._left[self.session] = self._elector.stored
        stored = self._left.pop(session, stored)
        self._elector = Elector(self.id, self._timing, now, stored, self._me.life)
        self.chair: Chair | None = None
        self.session = session
        self._follows = ("", -1)
        self._outbox.clear()
        self.generation = 0

    def _on_ping(self, sender: str, letter: Letter, now: float) -> Iterator[Order]:
        if not self._is_ours(letter, now):
            return
        ping = ballot_from_json(letter, sender, self._elector.record)
        if ping is None:
            yield Write(sender, {"kind": "lacking"})
            return
        assert isinstance(ping, Ping)
        record = ping.record
        self._mine.take(letter, record, self._contacts)
        yield from self._carry(self._elector.handle(ping, now), now)
        if ping.term != self._elector.term:
            return
        self._contacts.pinged = now
        taken = int(letter["taken"])
        if self._outbox.late(taken) or (sender, ping.term) != self._follows:
            self._follows = (sender, ping.term)
            self._own_up(record.generation)
            yield from self._tell_on(taken)

    def _is_ours(self, letter: Letter, now: float) -> bool:
        """Say whether a coordinator is that of the job that this agent is in, which may be from now on."""
        session = str(letter["session"])
        free = not self.generation and self.chair is None and len(self._left) < JOBS_LEFT
        if session != self.session and free and self._out_of_contact(now):
            self._begin(now, session)
        return session == self.session

    def _own_up(self, generation: int) -> None:
        if self.generation <= generation < self._halted:
            self._outbox.own_up(self._me.name, generation)

    def _tell_on(self, taken: int) -> Iterator[Order]:
        """Tell the coordinator what happened here after what it has taken already."""
        if self.coordinator and self.coordinator != self.id:
            for letter in self._outbox.letters(taken, self.generation):
                yield Write(self.coordinator, letter)

    def _on_halt(self, sender: str, letter: Letter, now: float) -> Iterator[Order]:
        if sender == self.coordinator or self._out_of_contact(now):
            self._called_by = sender
            yield Halt(int(letter["generation"]), str(letter["reason"]), bool(letter["reenter"]))

    def _on_ballot(self, sender: str, letter: Letter, now: float) -> Iterator[Order]:
        message = ballot_from_json(letter, sender, None)
        if message is None or letter["session"] != self.session:
            return
        if isinstance(message, Report) and self.chair is not None:
            self.chair.reported(sender, message.key)
        yield from self._carry(self._elector.handle(message, now), now)
        if isinstance(message, Report) and self.chair is not None:
            yield from self._led(self.chair.heard(sender, letter, 0, now), now)

    def _report_self(self, ended: int, now: float) -> Iterator[Order]:
        if self.chair is not None:
            yield from self._led(self.chair.heard(self.id, asdict(self.offer), ended, now), now)

    def _lead_on(self, chair: Chair, now: float) -> Iterator[Order]:
        yield from self._report_self(0, now)
        yield from self._led(chair.broken(self._gone, now), now)
        yield from self._led(chair.lead.tick(now), now)
        yield from chair.calls(now, self._timing.interval)
        notice = self._notice(self._me.address)
        yield from (Knock(*one) for one in chair.elders(self._start.seeds, notice, now))

    def _led(self, outcomes: Iterable[LeadOutcome], now: float) -> Iterator[Order]:
        """Carry out what was decided for the job."""
        for one in outcomes:
            chair, record = self.chair, self._elector.record
            if chair is None or record is None:
                return
            match one:
                case Proposal():
                    chair.call = None
                    yield from self._carry(self._elector.propose(chair.record(one, record), now), now)
                case Call():
                    chair.begin_call(one)
                    yield from chair.calls(now, self._timing.interval)
                case Rejected(name, reason, excluded):
                    for agent in [agent for agent in self._contacts.addresses if node_of(agent) == name]:
                        yield Write(agent, {"kind": "refused", "reason": reason, "excluded": excluded})
                    yield Told(reason)
                case Blamed():
                    yield from chair.blame(one)
                case _:
                    yield one

    def _carry(self, outcomes: Iterable[Outcome], now: float) -> Iterator[Order]:
        """Carry out what was decided about who coordinates."""
        for one in outcomes:
            match one:
                case Send(to, message):
                    yield self._written(to, message)
                case Coordinates():
                    yield from self._take_chair(one, now)
                case StepsDown(_, reason):
                    self.chair = None
                    yield Told(f"this node coordinates no more: {reason}")
                case InForce(record, _):
                    yield from self._in_force(record)

    def _written(self, to: str, message: Any) -> Write:
        address = self._contacts.addresses.get(to, "")
        if isinstance(message, Ping) and self.chair is not None:
            return Write(to, self.chair.ping(to, message, self.session), address)
        letter = {**ballot_to_json(message), "session": self.session}
        if isinstance(message, Report):
            letter |= asdict(self.offer)
        return Write(to, letter, address)

    def _take_chair(self, won: Coordinates, now: float) -> Iterator[Order]:
        lead = Lead(self._terms, self._config, now, self._epoch)
        self.chair = Chair(self._me, lead, now, self.session)
        yield Told(f"this node coordinates: {won.reason}")
        if won.record.plan:
            self._contacts.learn(plan_from_text(won.record.plan))
            since = {node_of(self._follows[0]): self._contacts.pinged} if self._follows[0] else {}
            yield from self._led(lead.take_over(won.record.plan, since, now), now)
            self._own_up(won.record.generation)
        else:
            yield from lead.recall(self._start.job_state, self._start.after)
            yield from self._led(lead.handle(Joined(self._me), now), now)
        for generation, event in self._outbox.since(self.generation):
            yield from self._led(lead.handle(Said(self._me.name, generation, event), now), now)

    def _in_force(self, record: Record) -> Iterator[Order]:
        mine = self._mine.of(record)
        if self.chair is not None and record.plan:
            mine = assignment(self.chair.plan_of(record), record.generation, self._me.name)
        self.generation = max(self.generation, record.generation)
        if mine is not None:
            yield mine
