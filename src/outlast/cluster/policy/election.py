"""Which agent leads, and whose ranks may commit: succession by majority, terms, and leases.

Theory of operation. It is Raft (Ongaro and Ousterhout, 2014) with a log of one record: the plan of the
generation replaces what was there, so nothing has to be replayed or matched. A term has at most one
leader, since each voter votes once a term. A record is in force when a majority of the voters has it, so
the next leader, which needs a majority too, cannot miss it; it writes the same record again in its own
term. It does not begin a generation because of that: workers on healthy nodes go on.

Who votes. A small set, named in the record; the job of a thousand nodes does not need a thousand votes.
While it changes, majorities of the old and of the new set are needed. So the set follows the job as it
loses nodes, one majority at a time. The first agent of a job begins as the only voter. A voter that forgets
may vote twice, so an agent that starts again joins under a new name.

Succession. A voter that hears nothing of the leader for as long as it promised to, and then for longer
the later it comes in the order of names, asks whether it would be voted for, and only if a majority would,
begins a term. So an agent that was cut off, and comes back, disturbs nobody.

Leases. A voter that answers a heartbeat promises to vote for nobody else for a while. What a majority has
promised is the leader's authority, and what is left of it is what agents may commit on. An agent
counts it from when it sent the reply that the leader answers, so that no delay makes it longer.
Clocks may drift by :attr:`Timing.drift`; the promise is longer than the lease by as much. When somebody is
elected, a majority's promises have run out, and so have all leases of before. A leader that begins
another generation lets its ranks commit when every agent of the old one has dropped it, or its lease must
have run out. A partition so leaves one side that commits; the ranks of the other one may go on computing
for as long as they like.

The clock must go on while the machine is suspended (CLOCK_BOOTTIME). A writer that was stopped between
looking at the lease and writing is what the number of the generation in the copy's name is for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outlast.cluster.policy.ballots import (
    HardState,
    InForce,
    Leads,
    Outcome,
    Send,
    StepsDown,
    Timing,
    confirmed,
    majority,
)
from outlast.cluster.policy.messages import (
    AppendEntries,
    AppendReply,
    ElectionMessage,
    Record,
    Vote,
    VoteRequest,
)

_NEVER = float("-inf")


class Elector:
    """One agent's part.

    Args:
        name: of the agent.
        timing: equal on all agents.
        now: in seconds of the agent's clock.
        stored: what this agent remembers of the job from before.
        incarnation: differs between two starts.
    """

    def __init__(
        self, name: str, timing: Timing, now: float, stored: HardState | None = None, incarnation: str = ""
    ) -> None:
        self._name = name
        self._timing = timing
        self._stored = HardState() if stored is None else stored
        self._incarnation = incarnation
        # Before its end, it may have promised something a moment ago.
        self._promised = now + timing.promise if self._stored.term else _NEVER
        self._try_after(self._promised if self._stored.term else now)
        self._campaign: tuple[int, bool] | None = None
        self._votes: set[str] = set()
        self._announced: tuple[int, int] | None = None
        self._rights: tuple[int, float] = (0, _NEVER)
        self._leads: _Leading | None = None
        self.leader = ""

    @property
    def term(self) -> int:
        """Return the newest term that this agent knows."""
        return self._stored.term

    @property
    def stored(self) -> HardState:
        """Return what this agent must not forget as long as it may vote: its term, vote and record."""
        return self._stored

    @property
    def record(self) -> Record | None:
        """Return the newest record that this agent has; it may not be in force."""
        return self._stored.record

    @property
    def leads(self) -> bool:
        """Say whether this agent believes that it leads; its records need a majority all the same."""
        return self._leads is not None

    @property
    def rights(self) -> tuple[int, float]:
        """Return the generation with which this node may commit, and until when by the agent's clock."""
        return self._rights

    def tick(self, now: float) -> list[Outcome]:
        """Do what is due; to be called several times an interval."""
        leads, record = self._leads, self._stored.record
        if leads is None:
            if now >= self._next_try and record is not None and self._name in record.voters:
                self._try_after(now, 1)
                return self._ask(pre_vote=True, now=now)
            return []
        if now >= max(self._authority(leads, now), leads.since) + self._timing.promise:
            words = f"no majority has answered for {self._timing.promise:.2f} seconds"
            return self._step_down(now, words)
        return self._send_all(leads, now) if now >= leads.next_heartbeat else []

    def handle(self, sender: str, message: ElectionMessage, now: float) -> list[Outcome]:
        """Take a message."""
        match message:
            case AppendEntries():
                return self._on_heartbeat(sender, message, now)
            case AppendReply():
                return self._on_reply(sender, message, now)
            case VoteRequest():
                return self._on_request(sender, message, now)
            case Vote():
                return self._on_vote(sender, message, now)

    def propose(self, wanted: Record, now: float) -> list[Outcome]:
        """Have another record, once the present one is in force; the latest proposal counts.

        Args:
            wanted: with one set of voters; term and version do not matter.
            now: in seconds of the agent's clock.
        """
        if self._leads is None:
            return []
        self._leads.queued = wanted
        return self._advance(self._leads, now)

    # What follows is private: terms and votes first, then the leader's part, then the others'.

    def _free(self, now: float) -> bool:
        """Say whether no promise keeps this agent from voting."""
        return now >= self._promised and self._leads is None

    def _not_voted(self, sender: str, request: VoteRequest) -> bool:
        same = request.term == self._stored.term and self._stored.voted in ("", sender)
        return same or request.term > self._stored.term

    @property
    def _written(self) -> Record:
        """The newest record; whoever is a candidate or leads has one."""
        assert self._stored.record is not None
        return self._stored.record

    def _key(self) -> tuple[int, int]:
        return (-1, -1) if self._stored.record is None else self._stored.record.key

    def _adopt(self, term: int, now: float) -> list[Outcome]:
        if term <= self._stored.term:
            return []
        said = self._step_down(now, f"term {term} has begun")
        self._stored = replace(self._stored, term=term, voted="")
        self._campaign = None
        return said

    def _step_down(self, now: float, reason: str) -> list[Outcome]:
        if self._leads is None:
            return []
        self._promised = max(self._promised, self._leads.authority + self._timing.promise)
        self._leads = None
        self.leader = ""
        self._try_after(max(now, self._promised), 1)
        return [StepsDown(self._stored.term, f"{reason}; workers go on")]

    def _try_after(self, when: float, more: int = 0) -> None:
        record = self._stored.record
        order = sorted(record.voters) if record is not None else []
        place = order.index(self._name) if self._name in order else len(order)
        self._next_try = when + (place + more) * self._timing.stagger

    def _on_request(self, sender: str, request: VoteRequest, now: float) -> list[Outcome]:
        said: list[Outcome] = []
        if not self._free(now):
            return said
        granted = self._not_voted(sender, request) and request.key >= self._key()
        if not request.pre_vote:
            said += self._adopt(request.term, now)
            if granted:
                self._stored = replace(self._stored, voted=sender)
                self._try_after(now + self._timing.promise)
        vote = Vote(self._stored.term, request.term, request.pre_vote, granted)
        return [*said, Send(sender, vote)]

    def _on_vote(self, sender: str, vote: Vote, now: float) -> list[Outcome]:
        if not vote.granted:
            return self._adopt(vote.term, now)
        if self._campaign != (vote.asked, vote.pre_vote):
            return []
        self._votes.add(sender)
        return self._count(vote.pre_vote, now)

    def _ask(self, pre_vote: bool, now: float) -> list[Outcome]:
        record = self._written
        if not pre_vote:
            self._stored = replace(self._stored, term=self._stored.term + 1, voted=self._name)
        term = self._stored.term + pre_vote
        self._campaign, self._votes = (term, pre_vote), {self._name}
        request = VoteRequest(term, record.key, pre_vote)
        said = [Send(name, request) for name in sorted(record.voters - {self._name})]
        return [*said, *self._count(pre_vote, now)]

    def _count(self, pre_vote: bool, now: float) -> list[Outcome]:
        record = self._written
        if not majority(record.quorums, self._votes):
            return []
        self._campaign = None
        if pre_vote:
            return self._ask(pre_vote=False, now=now)
        votes = len(self._votes)
        leads = self._leads = _Leading(now)
        self.leader = self._name
        self._write(replace(record, term=self._stored.term, version=1))
        reason = f"{votes} of {len(record.voters)} vote(s) in term {self._stored.term}"
        return [Leads(self._stored.term, record, reason), *self._advance(leads, now)]

    def _authority(self, leads: _Leading, now: float) -> float:
        leads.acked[self._name] = now
        leads.authority = max(leads.authority, confirmed(self._written.quorums, leads.acked))
        return leads.authority

    def _write(self, record: Record) -> None:
        self._stored = replace(self._stored, record=record)
        if self._rights[0] != record.generation:
            self._rights = (0, _NEVER)
        if self._leads is not None:
            self._leads.has_record = {self._name}

    def _advance(self, leads: _Leading, now: float) -> list[Outcome]:
        """Write what is wanted next, as far as what was written before is in force; then tell of it.

        Voters first: what is not in force yet concerns nobody else, and there may be a thousand others.
        """
        record = self._written
        said: list[Outcome] = []
        while majority(record.quorums, leads.has_record):
            if self._announced != record.key:
                self._announced = record.key
                said.append(InForce(record, f"{len(leads.has_record)} agent(s) have it"))
            wanted = leads.queued
            if len(record.quorums) > 1:
                following = replace(record, quorums=record.quorums[-1:])
            elif wanted is not None:
                leads.queued = None
                following = wanted
                if wanted.quorums != record.quorums:
                    following = replace(wanted, quorums=(*record.quorums, *wanted.quorums))
            else:
                break
            record = replace(following, term=self._stored.term, version=record.version + 1)
            self._write(record)
        if majority(record.quorums, leads.has_record):
            return said + self._send_all(leads, now)
        return said + self._send_to(leads, sorted(record.voters), now)

    def _send_all(self, leads: _Leading, now: float) -> list[Outcome]:
        leads.next_heartbeat = now + self._timing.interval
        return self._send_to(leads, self._written.told, now)

    def _send_to(self, leads: _Leading, names: Iterable[str], now: float) -> list[Outcome]:
        record = self._written
        said: list[Outcome] = []
        committed = majority(record.quorums, leads.has_record)
        left = max(0.0, self._authority(leads, now) + self._timing.lease - now)
        if not committed or not leads.drained(record.generation, now, self._timing.promise):
            left = 0.0
        for name in names:
            if name == self._name:
                continue
            known = leads.heard.get(name)
            granted = left if name in record.active and known is not None else 0.0
            if granted:
                leads.grants[name] = (record.generation, now)
            incarnation, echo = known or ("", 0.0)
            message = AppendEntries(
                record.term, now, record.key, committed, granted, incarnation, echo, record
            )
            said.append(Send(name, message))
        if left and self._name in record.active:
            self._rights = (record.generation, now + left)
        return said

    def _on_reply(self, sender: str, reply: AppendReply, now: float) -> list[Outcome]:
        said = self._adopt(reply.term, now)
        leads = self._leads
        if leads is None or reply.term != self._stored.term:
            return said
        record = self._written
        leads.acked[sender] = max(reply.echo, leads.acked.get(sender, _NEVER))
        incarnation, latest = leads.heard.get(sender, ("", _NEVER))
        same = incarnation == reply.incarnation
        leads.heard[sender] = (reply.incarnation, max(latest, reply.sent) if same else reply.sent)
        if reply.generation == record.generation:
            leads.moved_on(sender, reply.generation)
        if reply.key == record.key and sender not in leads.has_record:
            was = majority(record.quorums, leads.has_record)
            leads.has_record.add(sender)
            if not was and majority(record.quorums, leads.has_record):
                said += self._advance(leads, now)
        return said

    def _on_heartbeat(self, sender: str, message: AppendEntries, now: float) -> list[Outcome]:
        said = self._adopt(message.term, now)
        if message.term == self._stored.term:
            self.leader = sender
            self._campaign = None
            self._promised = now + self._timing.promise
            if message.record is not None and message.key > self._key():
                self._write(message.record)
            self._try_after(self._promised)
            if message.key == self._key():
                said += self._on_current(sender, message)
        record = self._stored.record
        generation = 0 if record is None else record.generation
        reply = AppendReply(
            self._stored.term, self._key(), generation, self._incarnation, sent=now, echo=message.sent
        )
        return [*said, Send(sender, reply)]

    def _on_current(self, sender: str, message: AppendEntries) -> list[Outcome]:
        """Take what a leader says of the record that this agent has."""
        record = self._written
        if message.granted and message.incarnation == self._incarnation:
            until = message.echo + message.granted
            self._rights = (record.generation, max(until, self._rights[1]))
        if not message.committed or self._announced == record.key:
            return []
        self._announced = record.key
        return [InForce(record, f"{sender} says so in term {message.term}")]


class _Leading:
    """What a leader knows of the others, in its term."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.authority = _NEVER
        self.next_heartbeat = since
        self.queued: Record | None = None
        self.acked: dict[str, float] = {}
        self.has_record: set[str] = set()
        self.heard: dict[str, tuple[str, float]] = {}  # incarnation, and when its last reply was sent
        self.grants: dict[str, tuple[int, float]] = {}  # generation, and when it was last granted

    def moved_on(self, name: str, generation: int) -> None:
        """Take note that an agent runs nothing but a generation."""
        if self.grants.get(name, (generation,))[0] != generation:
            del self.grants[name]

    def drained(self, generation: int, now: float, promise: float) -> bool:
        """Say whether nobody can hold a right of another generation any more."""
        over = [
            name
            for name, (other, sent) in self.grants.items()
            if other != generation and now >= sent + promise
        ]
        for name in over:
            del self.grants[name]
        return all(other == generation for other, _ in self.grants.values())
