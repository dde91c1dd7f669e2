"""Which agent leads, and whose ranks may commit: succession by majority, terms, and leases.

Theory of operation. It is Raft (Ongaro and Ousterhout, 2014) with a log of one record: the plan of the
generation replaces what was there, so nothing has to be replayed or matched. A term has at most one
leader, since each voter votes once a term, and puts that on disk first. A record is in force when a
majority of the voters has it, so the next leader, which needs a majority too, cannot miss it; it
writes the same record again in its own term. It does not begin a generation because of that: workers on
healthy nodes go on.

Who votes. A small set, named in the record; the job of a thousand nodes does not need a thousand votes.
While it changes, majorities of the old and of the new set are needed. So the set follows the job as it
loses nodes, one majority at a time. The first agent of a job begins as the only voter. An agent whose disk
is gone must join under a new name: a voter that forgets may vote twice.

Succession. A voter that hears nothing of the leader for as long as it promised to, and then for longer
the later it comes in the order of names, asks whether it would be voted for, and only if a majority would,
begins a term. So an agent that was cut off, and comes back, disturbs nobody.

Leases. A voter that answers a ping promises to vote for nobody else for a while. What a majority has
promised is the leader's authority, and what is left of it is what agents may commit on. An agent
counts it from when it sent the report that the leader answers, so that no delay makes it longer.
Clocks may drift by :attr:`Timing.drift`; the promise is longer than the lease by as much. When somebody is
elected, a majority's promises have run out, and so have all leases of before. A leader that begins
another generation lets its ranks commit when every agent of the old one has dropped it, or its lease must
have run out. A partition so leaves one side that commits; the ranks of the other one may go on computing
for as long as they like.

The clock must go on while the machine is suspended (CLOCK_BOOTTIME). A writer that was stopped between
looking at the lease and writing is what the number of the generation in the copy's name is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from outlast.cluster.policy.ballots import (
    AppendEntries,
    AppendReply,
    HardState,
    InForce,
    Leads,
    Message,
    Outcome,
    Record,
    Send,
    StepsDown,
    Store,
    Timing,
    Vote,
    VoteRequest,
    confirmed,
    majority,
)

_NEVER = float("-inf")


class Elector:
    """One agent's part.

    Args:
        name: of the agent.
        timing: equal on all agents.
        now: in seconds of the agent's clock.
        stored: what an earlier start left on disk.
        life: differs between two starts.
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

    def may_commit(self, now: float) -> tuple[int, int] | None:
        """Return the fencing token (term, generation) with which this node may commit; None: it may not."""
        generation, until = self._rights
        return (self._stored.term, generation) if now < until else None

    @property
    def rights(self) -> tuple[int, float]:
        """Return the generation with which this node may commit, and until when by the agent's clock."""
        return self._rights

    def tick(self, now: float) -> tuple[Outcome, ...]:
        """Do what is due; to be called several times an interval."""
        return tuple(self._tick(now))

    def handle(self, message: Message, now: float) -> tuple[Outcome, ...]:
        """Take a message."""
        match message:
            case AppendEntries():
                return tuple(self._on_ping(message, now))
            case AppendReply():
                return tuple(self._on_report(message, now))
            case VoteRequest():
                return tuple(self._on_request(message, now))
            case Vote():
                return tuple(self._on_vote(message, now))

    def propose(self, wanted: Record, now: float) -> tuple[Outcome, ...]:
        """Have another record, once the present one is in force; the latest proposal counts.

        Args:
            wanted: with one set of voters; term and version do not matter.
            now: in seconds of the agent's clock.
        """
        if self._leads is None:
            return ()
        self._leads.queued = wanted
        return tuple(self._advance(now))

    # What follows is private: terms and votes first, then the leader's part, then the others'.

    def _free(self, now: float) -> bool:
        """Say whether no promise keeps this agent from voting."""
        return now >= self._promised and self._leads is None

    def _not_voted(self, request: VoteRequest) -> bool:
        if request.term == self._stored.term:
            return self._stored.voted in ("", request.sender)
        return request.term > self._stored.term

    def _key(self) -> tuple[int, int]:
        return (-1, -1) if self._stored.record is None else self._stored.record.key

    def _adopt(self, term: int, now: float) -> Iterator[Outcome]:
        if term <= self._stored.term:
            return
        yield from self._step_down(now, f"term {term} has begun")
        self._stored = replace(self._stored, term=term, voted="")
        self._campaign = None
        yield Store(self._stored)

    def _step_down(self, now: float, reason: str) -> Iterator[Outcome]:
        if self._leads is not None:
            self._promised = max(self._promised, self._leads.authority + self._timing.promise)
            self._leads = None
            self.leader = ""
            self._try_after(max(now, self._promised), 1)
            yield StepsDown(self._stored.term, f"{reason}; workers go on")

    def _try_after(self, when: float, more: int = 0) -> None:
        record = self._stored.record
        order = sorted(record.voters) if record is not None else []
        place = order.index(self._name) if self._name in order else len(order)
        self._next_try = when + (place + more) * self._timing.stagger

    def _on_request(self, request: VoteRequest, now: float) -> Iterator[Outcome]:
        if not self._free(now):
            return
        granted = self._not_voted(request) and request.key >= self._key()
        if not request.pre_vote:
            yield from self._adopt(request.term, now)
            if granted:
                self._stored = replace(self._stored, voted=request.sender)
                yield Store(self._stored)
                self._try_after(now + self._timing.promise)
        vote = Vote(self._name, self._stored.term, request.term, request.pre_vote, granted)
        yield Send(request.sender, vote)

    def _on_vote(self, vote: Vote, now: float) -> Iterator[Outcome]:
        if not vote.granted:
            yield from self._adopt(vote.term, now)
        elif self._campaign == (vote.asked, vote.pre_vote):
            self._votes.add(vote.sender)
            yield from self._count(now)

    def _ask(self, pre_vote: bool, now: float) -> Iterator[Outcome]:
        record = self._stored.record
        if record is None:
            return
        if not pre_vote:
            self._stored = replace(self._stored, term=self._stored.term + 1, voted=self._name)
            yield Store(self._stored)
        term = self._stored.term + pre_vote
        self._campaign, self._votes = (term, pre_vote), {self._name}
        for name in sorted(record.voters - {self._name}):
            yield Send(name, VoteRequest(self._name, term, record.key, pre_vote))
        yield from self._count(now)

    def _count(self, now: float) -> Iterator[Outcome]:
        record = self._stored.record
        if self._campaign is None or record is None or not majority(record.quorums, self._votes):
            return
        pre_vote = self._campaign[1]
        self._campaign = None
        if pre_vote:
            yield from self._ask(pre_vote=False, now=now)
            return
        votes = len(self._votes)
        self._leads = _Leading(now)
        self.leader = self._name
        self._write(replace(record, term=self._stored.term, version=1))
        yield Store(self._stored)
        reason = f"{votes} of {len(record.voters)} vote(s) in term {self._stored.term}"
        yield Leads(self._stored.term, record, reason)
        yield from self._advance(now)

    def _tick(self, now: float) -> Iterator[Outcome]:
        leads, record = self._leads, self._stored.record
        if leads is None:
            if now >= self._next_try and record is not None and self._name in record.voters:
                self._try_after(now, 1)
                yield from self._ask(pre_vote=True, now=now)
            return
        if now >= max(self._authority(leads, now), leads.since) + self._timing.promise:
            words = f"no majority has answered for {self._timing.promise:.2f} seconds"
            yield from self._step_down(now, words)
        elif now >= leads.next_ping:
            yield from self._ping_all(leads, now)

    def _authority(self, leads: _Leading, now: float) -> float:
        record = self._stored.record
        if record is not None:
            leads.acked[self._name] = now
            leads.authority = max(leads.authority, confirmed(record.quorums, leads.acked))
        return leads.authority

    def _write(self, record: Record) -> None:
        self._stored = replace(self._stored, record=record)
        if self._rights[0] != record.generation:
            self._rights = (0, _NEVER)
        if self._leads is not None:
            self._leads.has_record = {self._name}
            if self._leads.grants.get(self._name, (record.generation,))[0] != record.generation:
                del self._leads.grants[self._name]

    def _advance(self, now: float) -> Iterator[Outcome]:
        """Write what is wanted next, as far as what was written before is in force; then tell of it.

        Voters first: what is not in force yet concerns nobody else, and there may be a thousand others.
        """
        leads, record = self._leads, self._stored.record
        if leads is None or record is None:
            return
        while majority(record.quorums, leads.has_record):
            if self._announced != record.key:
                self._announced = record.key
                yield InForce(record, f"{len(leads.has_record)} agent(s) have it on disk")
            wanted = leads.queued
            if len(record.quorums) > 1:
                following = replace(record, quorums=record.quorums[-1:])
            elif wanted is not None:
                leads.queued = None
                changed = wanted.quorums[-1:] != record.quorums
                following = (
                    replace(wanted, quorums=(*record.quorums, wanted.quorums[-1])) if changed else wanted
                )
            else:
                break
            record = replace(following, term=self._stored.term, version=record.version + 1)
            self._write(record)
            yield Store(self._stored)
        if majority(record.quorums, leads.has_record):
            yield from self._ping_all(leads, now)
        else:
            yield from self._ping(leads, sorted(record.voters), now)

    def _ping_all(self, leads: _Leading, now: float) -> Iterator[Outcome]:
        leads.next_ping = now + self._timing.interval
        if self._stored.record is not None:
            yield from self._ping(leads, self._stored.record.told, now)

    def _ping(self, leads: _Leading, names: Iterable[str], now: float) -> Iterator[Outcome]:
        record = self._stored.record
        if record is None:
            return
        committed = majority(record.quorums, leads.has_record)
        left = self._authority(leads, now) + self._timing.lease - now
        if not committed or left <= 0 or not leads.drained(record.generation, now, self._timing.promise):
            left = 0.0
        for name in names:
            if name == self._name:
                continue
            incarnation, echo = leads.lives.get(name, ("", _NEVER))
            granted = left if name in record.active and echo > _NEVER else 0.0
            if granted:
                leads.grants[name] = (record.generation, now)
            yield Send(
                name,
                AppendEntries(self._name, record.term, now, record, committed, granted, incarnation, echo),
            )
        if left and self._name in record.active:
            leads.grants[self._name] = (record.generation, now)
            self._rights = (record.generation, now + left)

    def _on_report(self, report: AppendReply, now: float) -> Iterator[Outcome]:
        yield from self._adopt(report.term, now)
        leads, record = self._leads, self._stored.record
        if leads is None or record is None or report.term != self._stored.term:
            return
        name = report.sender
        leads.acked[name] = max(report.echo, leads.acked.get(name, _NEVER))
        before = leads.lives.get(name)
        if before is None or before[0] != report.incarnation or before[1] < report.sent:
            leads.lives[name] = (report.incarnation, report.sent)
        if report.generation == record.generation and leads.grants.get(name, (report.generation,))[0] != (
            report.generation
        ):
            del leads.grants[name]
        if report.key == record.key and name not in leads.has_record:
            was = majority(record.quorums, leads.has_record)
            leads.has_record.add(name)
            if not was and majority(record.quorums, leads.has_record):
                yield from self._advance(now)

    def _on_ping(self, ping: AppendEntries, now: float) -> Iterator[Outcome]:
        yield from self._adopt(ping.term, now)
        if ping.term == self._stored.term:
            self.leader = ping.sender
            self._campaign = None
            self._promised = now + self._timing.promise
            if ping.record.key > self._key():
                self._write(ping.record)
                yield Store(self._stored)
            self._try_after(self._promised)
            if ping.record.key == self._key():
                if ping.granted and ping.incarnation == self._incarnation:
                    until = ping.echo + ping.granted
                    self._rights = (ping.record.generation, max(until, self._rights[1]))
                if ping.committed and self._announced != ping.record.key:
                    self._announced = ping.record.key
                    yield InForce(ping.record, f"{ping.sender} says so in term {ping.term}")
        record = self._stored.record
        generation = 0 if record is None else record.generation
        report = AppendReply(
            self._name, self._stored.term, self._key(), generation, self._incarnation, now, ping.sent
        )
        yield Send(ping.sender, report)


class _Leading:
    """What a leader knows of the others, in its term."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.authority = _NEVER
        self.next_ping = since
        self.queued: Record | None = None
        self.acked: dict[str, float] = {}
        self.has_record: set[str] = set()
        self.lives: dict[str, tuple[str, float]] = {}
        self.grants: dict[str, tuple[int, float]] = {}  # generation, and when it was last granted

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
