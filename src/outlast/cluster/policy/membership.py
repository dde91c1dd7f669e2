"""Which nodes a generation runs on: what the leader hears of nodes goes in, plans come out.

Theory of operation. A node joins and is a spare until a plan names it. The first generation begins when as
many nodes have joined as may be active: at once, there is no last call. With fewer, but enough, it begins
after a grace. A generation is over when a node of it is lost, or when the caller, who keeps the budgets,
orders a restart; then the next one is *forming*: every node is asked for a ping, and the plan is made
of those that gave one after the fault. So a node that dies and the errors that its death causes elsewhere
make one generation and not two: the errors come first, but the plan waits for the silent node until it has
answered or is lost. Whatever else is heard of a generation that is over changes nothing.

A silence shorter than the timeout restarts nothing. An agent whose loop is busy does not answer, but its
channel does, in a thread of its own: a node that is connected and busy has more time than a silent one.

A node that comes back after it was lost is a spare. While the next generation is forming it may belong to it
at once; if fewer nodes are active than may be, the job grows at the next safe step, which the caller
announces.

Which nodes, and in which order, is :mod:`outlast.cluster.policy.rank_assignment`'s part. How many restarts
there may be is the caller's: each plan but the first answers one order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outlast.checkpoint.policy.manifest import some
from outlast.cluster.policy.members import (
    Answered,
    Decision,
    Event,
    Forming,
    GrowthWanted,
    Heard,
    JobSpec,
    Joined,
    KnownNode,
    Left,
    Lost,
    Member,
    MembershipState,
    Plan,
    Probe,
    Refused,
    RestartOrdered,
    Role,
    SafeStep,
    TakenIn,
    TooFew,
    Unchanged,
    Unfit,
    Waits,
)
from outlast.cluster.policy.rank_assignment import RankAssignment, seats
from outlast.errors import ExitCode
from outlast.health.policy.ledger import in_quarantine
from outlast.parallelism.policy.degrees import layout_for

PROOF_OF_LIFE = 0.5  # seconds for which an agent was heard after another one came under its name: it is alive
_NAMED = 3  # nodes in quarantine whose reasons a plan gives
SHORT_SAID = 5.0  # seconds with too few nodes after which that is said
ENOUGH_SAID = 1.0  # seconds with enough nodes, while more are waited for, after which that is said
BUSY_PATIENCE = 60.0  # seconds for a node that is connected, and whose agent is busy
OVERSLEPT = 3.0  # times the expected interval between two looks


class Phase(Enum):
    """Where the membership is."""

    GATHERING = "gathering"  # before the first generation
    RUNNING = "running"
    FORMING = "forming"  # the next generation is being put together
    ENDED = "ended"


@dataclass
class _Known:
    member: Member
    role: Role
    heard: float
    why: str = ""
    rival: tuple[str, float] = ("", 0.0)  # incarnation of another agent under this name, and when it came
    risk: str = ""  # why its health says that it is about to fail
    answered: float = -math.inf  # when its channel answered a ping
    idle: float = 0.0  # seconds since its loop had turned then
    busy: bool = False  # that was reported

    @property
    def last_choice(self) -> str:
        """Why it gets ranks only where no other node is left; empty: it does not."""
        return f"at risk: {self.risk}" if self.risk else self.member.last_choice


@dataclass
class _Forming:
    generation: int
    reason: str
    silent: dict[str, float] = field(default_factory=dict)  # who has not answered, and since when it may

    @property
    def asks(self) -> str:
        """Why the nodes are asked."""
        return f"generation {self.generation} is made of the nodes that answer now"


class Membership:
    """Decides about the nodes of one job, in the leader.

    Args:
        terms: what every node has to agree with.
        now: in seconds of a clock that never goes back.
    """

    def __init__(self, terms: JobSpec, now: float) -> None:
        self._terms = terms
        self._known: dict[str, _Known] = {}
        self._here: dict[str, Member] | None = None  # what :meth:`here` found; None: look again
        self._order: tuple[str, ...] = ()  # active nodes by rank
        self._forming: _Forming | None = _Forming(1, "the job begins")
        self._looked = now
        self._short_since: float | None = now
        self._short_said = False
        self._enough_since: float | None = None  # when as many nodes as are needed were here
        self._enough_said = False
        self._not_before = now
        self._grown_for = 0
        self.phase = Phase.GATHERING
        self.generation = 0

    def roles(self) -> Mapping[str, Role]:
        """Return what each node is."""
        return {name: known.role for name, known in self._known.items()}

    @property
    def deadline(self) -> float:
        """Return when :meth:`tick` has to be called at the latest."""
        return self._looked + self._terms.interval

    def handle(self, event: Event, now: float) -> tuple[Decision, ...]:
        """Take one event."""
        if self.phase is Phase.ENDED:
            return (Unchanged("the job has ended"),)
        if isinstance(event, Heard):
            heard = self._hear(event, now)
            if self._forming is None or self.phase is Phase.GATHERING:
                return heard  # most of what is heard; it can change nothing else
            return (*heard, *self._settle(now))
        if isinstance(event, Answered):
            return self._answer(event, now)
        said: Iterable[Decision] = ()
        match event:
            case Joined(member):
                said = self._join(member, now)
            case Left(name, reason):
                said = self._lose(name, reason, Role.LOST)
            case Unfit(name, reason):
                said = self._lose(name, reason, Role.EXCLUDED)
            case RestartOrdered(ended, generation, reason):
                said = self._restart(ended, generation, reason, now)
            case SafeStep():
                said = self._safe(event, now)
        return (*said, *self._settle(now))

    def tick(self, now: float) -> tuple[Decision, ...]:
        """Look who has been silent for too long, and whether waiting is over.

        Of a gap between two looks, what is longer than a look may take is held against nobody: the
        leader itself slept. The rest counts, so one that is always slow still finds lost nodes.
        """
        if self.phase is Phase.ENDED:
            return ()
        patience = self._terms.ping_timeout
        # A quarter of a short patience: one gap alone, and the usual silence before it, lose nobody.
        excess = now - self._looked - min(OVERSLEPT * self._terms.interval, patience / 4)
        self._looked = now
        if excess > 0:
            for known in self._known.values():
                known.heard = min(now, known.heard + excess)
                known.answered = min(now, known.answered + excess)
            if self._forming is not None:
                silent = self._forming.silent
                silent.update((name, min(now, since + excess)) for name, since in silent.items())
        said: list[Decision] = []
        late = [name for name, known in self._known.items() if now - known.heard >= patience]
        for name in sorted(set(late) & self.here().keys()):
            said += self._late(name, now)
        if self._forming is not None:
            for name, since in sorted(self._forming.silent.items()):
                if now - since >= max(BUSY_PATIENCE, patience):
                    words = f"it has not ended its generation within {now - since:.0f} seconds"
                    said += self._lose(name, words, Role.LOST)
        return (*said, *self._settle(now))

    def _late(self, name: str, now: float) -> Iterable[Decision]:
        """Lose a node that is silent; one whose channel answers is busy, and has more time."""
        known, patience = self._known[name], self._terms.ping_timeout
        silent, limit = now - known.heard, max(BUSY_PATIENCE, patience)
        if now - known.answered >= patience:
            return self._lose(name, f"silent for {silent:.2f} seconds (timeout {patience:.2f})", Role.LOST)
        turned = f"its loop turned last {known.idle + now - known.answered:.0f} s ago"
        if silent >= limit:
            words = f"its agent was busy for {silent:.0f} seconds (limit {limit:.0f}); {turned}"
            return self._lose(name, words, Role.LOST)
        if known.busy:
            return ()
        known.busy = True
        words = f"{name} is connected, and its agent is busy: {turned}; it is lost after {limit:.0f} s"
        return (Waits(words),)

    def quiet(self, before: float) -> tuple[str, ...]:
        """Return the nodes that were last heard before a time."""
        return tuple(name for name in self.here() if self._known[name].heard < before)

    def wait_until(self, when: float) -> None:
        """Let the first generation wait until a time: another job of this name may run till then."""
        self._not_before = when

    def number(self, generation: int) -> None:
        """Choose the number of the first generation, as long as there was none."""
        if self._forming is not None and not self.generation:
            self._forming.generation = generation

    @property
    def with_ranks(self) -> tuple[str, ...]:
        """The nodes that have ranks in the generation that runs, and are there."""
        return tuple(name for name in self._order if self._known[name].role is Role.ACTIVE)

    def because(self, reason: str) -> None:
        """Say anew why the next generation is put together."""
        if self._forming is not None:
            self._forming.reason = reason

    @property
    def silent(self) -> frozenset[str]:
        """The nodes whose answer the next generation waits for."""
        return frozenset() if self._forming is None else frozenset(self._forming.silent)

    def heard_last(self, heard: Mapping[str, float]) -> None:
        """Put right, after :meth:`restore`, when nodes were last heard of."""
        for name in heard.keys() & self._known.keys():
            self._known[name].heard = min(heard[name], self._known[name].heard)

    def plan_in_force(self, reason: str) -> Plan | None:
        """Return the plan of the generation that runs; None: none does."""
        if self.phase is not Phase.RUNNING:
            return None
        here = {name: self._known[name].member for name in self._order}
        found = seats(here, self._order, len(self._order), self._terms.group_size)
        spares = tuple(sorted(name for name, one in self._known.items() if one.role is Role.SPARE))
        layout = self._layout(found)
        return Plan(self.generation, found, spares, self._order[0], (), reason, layout)

    def here(self) -> Mapping[str, Member]:
        """Return the nodes that have ranks or wait for some."""
        if self._here is None:
            self._here = {
                name: known.member
                for name, known in self._known.items()
                if known.role in (Role.ACTIVE, Role.SPARE)
            }
        return self._here

    def _join(self, member: Member, now: float) -> Iterable[Decision]:
        known = self._known.get(member.name)
        if known is not None and known.role is Role.EXCLUDED:
            return (Refused(member.name, f"{member.name} is excluded: {known.why}"),)
        refusal = self._terms.refuse(member)
        if refusal:
            return (Refused(member.name, refusal),)
        twin = self._twin(member)
        if twin is not None:
            return (self._twin_answer(member, twin, now),)
        said: list[Decision] = []
        if known is not None and known.role is not Role.LOST:
            if known.member.incarnation == member.incarnation and known.member.address == member.address:
                known.heard = now
                return (Unchanged(f"{member.name} has joined already"),)
            if known.member.address != member.address:
                if not self._is_alive(known, member, now):
                    words = "from another address; probing the current member"
                    return (Unchanged(f"duplicate node name {member.name} {words}"),)
                words = f"{known.member.address} has joined under this name and is alive"
                return (Refused(member.name, f"{member.name}: {words}; each node has a name of its own"),)
            said += self._lose(member.name, "its agent has restarted", Role.LOST)
        elif known is None and self._full():
            words = f"{self._terms.most} active and {self._terms.spares} spare nodes are all that is wanted"
            return (Refused(member.name, f"{member.name}: {words} (--nnodes, --spares)"),)
        lived = known is not None and known.member.incarnation == member.incarnation
        back = self._known.pop(member.name, None) is not None  # and behind those that have waited
        self._known[member.name] = _Known(member, Role.SPARE, now)
        if self._here is not None:
            self._here[member.name] = member
        words = "is back" if back else "has joined"
        words = f"{member.name} {words}; it is a spare until a plan names it"
        said.append(TakenIn(member.name, words, lived))
        if self._forming is not None and self.phase is Phase.FORMING:
            # It may still run the generation that is over, or one before.
            self._forming.silent[member.name] = now
            said.append(Probe((member.name,), self._forming.asks))
        return said

    def _is_alive(self, known: _Known, rival: Member, now: float) -> bool:
        """Say whether a node was heard for a while after another agent came that claims its place."""
        if known.rival[0] != rival.incarnation:
            known.rival = (rival.incarnation, now)
        return known.heard >= known.rival[1] + PROOF_OF_LIFE

    def _twin(self, member: Member) -> _Known | None:
        """Return the node that is there with the node rank that the user gave another one, too."""
        same = (self._known[name] for name, one in self.here().items() if one.node_rank == member.node_rank)
        others = (known for known in same if known.member.name != member.name)
        return next(others, None) if member.node_rank >= 0 else None

    def _twin_answer(self, member: Member, twin: _Known, now: float) -> Decision:
        words = f"{member.name}: {twin.member.name} has joined with --node-rank={member.node_rank}"
        if self._is_alive(twin, member, now):
            return Refused(member.name, f"{words} and is alive; each node has a node rank of its own")
        return Unchanged(f"{words}; probing it")

    def _full(self) -> bool:
        return len(self.here()) >= self._terms.most + self._terms.spares

    def _hear(self, event: Heard, now: float) -> tuple[Decision, ...]:
        known = self._known.get(event.name)
        if (
            known is None
            or known.role not in (Role.ACTIVE, Role.SPARE)
            or known.member.incarnation != event.incarnation
        ):
            return (Unchanged(f"{event.name} is no node of the job; it has to join first"),)
        known.heard, known.busy = now, False
        if self._forming is not None and event.answers:
            self._forming.silent.pop(event.name, None)
        return ()

    def _answer(self, event: Answered, now: float) -> tuple[Decision, ...]:
        known = self._known.get(event.name)
        if known is None or known.member.incarnation != event.incarnation:
            return (Unchanged(f"{event.name} is no node of the job"),)
        known.answered, known.idle = now, event.idle
        return ()

    def _lose(self, name: str, reason: str, role: Role) -> Iterable[Decision]:
        known = self._known.get(name)
        if known is None or known.role is Role.EXCLUDED or known.role is role:
            return (Unchanged(f"{name} was not part of the job"),)
        had_rank = known.role is Role.ACTIVE and self.phase is Phase.RUNNING
        known.role, known.why, self._here = role, reason, None
        if self._forming is not None:
            self._forming.silent.pop(name, None)
        word = "excluded" if role is Role.EXCLUDED else "lost"
        ends = self.generation if had_rank else 0
        if ends:
            after = f"; generation {ends} is over"
        elif self.phase is Phase.FORMING and self._forming is not None:
            after = f"; generation {self._forming.generation} is formed without it"
        else:
            after = "; it had no rank, so nothing restarts"
        return (Lost(name, f"{name} is {word}: {reason}{after}", ends, role is Role.EXCLUDED, known.heard),)

    def _restart(self, ended: int, generation: int, reason: str, now: float) -> Iterable[Decision]:
        if self.phase is not Phase.RUNNING or ended != self.generation:
            where = (
                f"{self.generation} is in force" if self.phase is Phase.RUNNING else "the next one is forming"
            )
            return (Unchanged(f"generation {ended} is over already; {where} ({reason})"),)
        if generation <= self.generation:
            return (Unchanged(f"generation {generation} is not after {self.generation}, which is in force"),)
        here = self.here()
        self._forming = _Forming(generation, reason, dict.fromkeys(here, now))
        self.phase = Phase.FORMING
        return (Probe(tuple(sorted(here)), self._forming.asks),)

    def _safe(self, event: SafeStep, now: float) -> Iterable[Decision]:
        if self.phase is not Phase.RUNNING or event.generation != self.generation:
            return (Unchanged(f"step {event.step} of generation {event.generation}: that one is over"),)
        if self._growth() <= 0:
            return ()
        words = f"step {event.step} is saved, so the job can grow without losing work"
        return self._restart(event.generation, event.following, words, now)

    def _growth(self) -> int:
        """Return how many active nodes more there could be."""
        return len(self._seated()) - len(self._order)

    def at_risk(self, name: str, reason: str) -> bool:
        """Take what a node's health says; return whether that is news of a spare.

        Args:
            name: of the node.
            reason: why it is about to fail; empty: it is not.
        """
        known = self._known.get(name)
        if known is None or known.risk == reason:
            return False
        known.risk = reason
        return known.role is Role.SPARE

    def _unhealthy(self, quarantine: bool) -> list[str]:
        """Return the spares that are about to fail, and those in quarantine if that counts."""
        return [
            name
            for name, known in self._known.items()
            if known.role is Role.SPARE
            and (known.risk or (quarantine and in_quarantine(known.member.last_choice)))
        ]

    def passed_over(self) -> str:
        """Return the spares that take no other node's place, each with the reason; empty: there are none."""
        return ", ".join(f"{one} ({self._known[one].last_choice})" for one in self._unhealthy(True)[:_NAMED])

    def seated_without(self, name: str, healthy: bool = False) -> int:
        """Return how many nodes could be active if one were not there.

        Args:
            name: of that one.
            healthy: spares that are at risk or in quarantine do not count; else those at risk count only
                where the job could not go on otherwise.
        """
        here = {one: member for one, member in self.here().items() if one != name}
        return len(self._best(here, self._order, healthy))

    def _best(
        self, here: Mapping[str, Member], order: tuple[str, ...], healthy: bool = False
    ) -> tuple[RankAssignment, ...]:
        """Return the seats without spares that are not healthy, or with them if there are too few."""
        bad = self._unhealthy(healthy)
        good = {name: member for name, member in here.items() if name not in bad} if bad else here
        found = self._with_layout(good, order)
        enough = healthy or not bad or len(found) >= self._terms.least
        return found if enough else self._with_layout(here, order)

    def _seated(self) -> tuple[RankAssignment, ...]:
        # A node that was lost and is back has no advantage over a spare: its torch is not imported yet.
        active = {name for name, known in self._known.items() if known.role is Role.ACTIVE}
        stayed = tuple(name if name in active else "" for name in self._order)
        return self._best(self.here(), stayed)

    def _with_layout(self, here: Mapping[str, Member], order: Sequence[str]) -> tuple[RankAssignment, ...]:
        """Return the seats of as many nodes as there is a layout for; none where there is none."""
        terms = self._terms
        most = terms.most if not terms.layouts else min(terms.most, len(here))
        slots, sizes = {one.slots for one in here.values()}, {one.ranks for one in terms.layouts}
        for nodes in range(most - most % terms.group_size, 0, -terms.group_size):
            if sizes and len(slots) == 1 and sizes.isdisjoint(nodes * one for one in slots):
                continue
            found = seats(here, order, nodes, terms.group_size)
            if not terms.layouts or self._layout(found):
                return found
        return ()

    def _layout(self, found: Sequence[RankAssignment]) -> str:
        """Return the layout of the ranks of some seats; empty: there is none."""
        layout = layout_for(self._terms.layouts, sum(seat.slots for seat in found))
        return "" if layout is None else layout.text

    def _settle(self, now: float) -> Iterable[Decision]:
        """Make the plan that was waited for, if nothing is left to wait for."""
        forming = self._forming
        if forming is None:
            return self._wish()
        if forming.silent:
            return ()
        here = len(self.here())
        if here < self._terms.least:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since, self._enough_said = now, False
        since = now if self._enough_since is None else self._enough_since
        until = max(since + self._terms.grace, self._not_before)
        early = self.phase is Phase.GATHERING and now < until
        if early and self._terms.least <= here < self._terms.most:
            self._short_since, self._short_said = None, False
            return self._enough(here, since, until, now)
        found = self._seated() if here >= self._terms.least else ()  # not for each of a thousand that join
        if len(found) < self._terms.least:
            self._short_since = now if self._short_since is None else self._short_since
            return self._short(len(found) or here, now - self._short_since)
        self._short_since, self._short_said = None, False
        if early and (len(found) < self._terms.most or self._may_run_elsewhere(here, now)):
            return ()
        return (self._plan(forming, found),)

    def _may_run_elsewhere(self, here: int, now: float) -> bool:
        """Say whether the nodes that are not here are enough for another job of this name, and it may run."""
        others = self._terms.most + self._terms.spares - here
        return now < self._not_before and others >= self._terms.least

    def _enough(self, here: int, since: float, until: float, now: float) -> Iterable[Decision]:
        """Wait for more nodes than have to be there, and say so once."""
        if self._enough_said or now - since < ENOUGH_SAID or until - now < ENOUGH_SAID:
            return ()
        self._enough_said = True
        words = f"{here} of up to {self._terms.most} nodes {'is' if here == 1 else 'are'} here; the job waits"
        words += f" {until - now:.0f} s for more (--rdzv-conf last_call_timeout), then begins without them"
        return (Waits(words),)

    def _short(self, here: int, waited: float) -> Iterable[Decision]:
        """Wait with too few nodes, and say so once; end the job when that has lasted."""
        needed, limit = f"at least {self._terms.least} needed (--nnodes)", self._terms.join_timeout
        if here >= self._terms.least:
            needed = f"[parallelism] has no layout for the ranks of {self._terms.least} to {here} nodes"
        if waited >= limit:
            self.phase = Phase.ENDED
            return (
                TooFew(int(ExitCode.FAILED), f"{here} node(s) for {waited:.0f} s, {needed}; the job ends"),
            )
        if self._short_said or waited < min(SHORT_SAID, limit / 2):
            return ()
        self._short_said = True
        words = f"the job waits for nodes until {limit:.0f} s are over (--rdzv-conf join_timeout), then ends"
        return (Waits(f"{here} node(s) for {waited:.0f} s, {needed}; {words}"),)

    def _plan(self, forming: _Forming, found: tuple[RankAssignment, ...]) -> Plan:
        active = {name for name, known in self._known.items() if known.role is Role.ACTIVE}
        before = {name: rank for rank, name in enumerate(self._order) if name in active}
        self._order = tuple(seat.name for seat in found)
        for name, known in self._known.items():
            if known.role in (Role.ACTIVE, Role.SPARE):
                known.role = Role.ACTIVE if name in self._order else Role.SPARE
        moved = tuple(name for at, name in enumerate(self._order) if before.get(name, at) != at)
        spares = tuple(sorted(name for name, known in self._known.items() if known.role is Role.SPARE))
        self.generation, self._forming, self.phase = forming.generation, None, Phase.RUNNING
        self._grown_for = 0
        new = [name for name in self._order if name not in before]
        words = f"{forming.reason}; {len(found)} of {self._terms.most} node(s)"
        layout = self._layout(found)
        if layout:
            words += f"; layout {layout}"
        if before and new:
            words += f"; new nodes: {some(new)}"
        if moved:
            words += f"; other ranks for {some(moved)}, so that ranks have no gap"
        last = [name for name in (*spares, *new) if self._known[name].last_choice]
        for name in last[:_NAMED]:
            why = self._known[name].last_choice
            words += f"; {name} {'has ranks, as no other node is left' if name in new else 'waits'} ({why})"
        if len(last) > _NAMED:
            words += f"; {len(last) - _NAMED} more are at risk, in quarantine or burn-in"
        idle = min(len(self.here()), self._terms.most) - len(found)
        if layout and idle > 0:
            words += f"; {idle} node(s) wait, because [parallelism] has no layout for the ranks of more nodes"
        return Plan(self.generation, found, spares, self._order[0], moved, words, layout)

    def _wish(self) -> Iterable[Decision]:
        growth = self._growth() if len(self._order) < self._terms.most else 0
        if self.phase is not Phase.RUNNING or growth <= 0 or growth == self._grown_for:
            return ()
        if any(self._known[name].role is not Role.ACTIVE for name in self._order):
            return ()  # it restarts anyway
        self._grown_for = growth
        words = f"{growth} node(s) more could be active; the job grows at the next safe step"
        return (GrowthWanted(growth, words),)

    def state(self) -> MembershipState:
        """Return what the next leader has to know."""
        forming = self._forming
        return MembershipState(
            self.generation,
            self._order,
            tuple(KnownNode(known.member, known.role, known.why) for known in self._known.values()),
            None if forming is None else Forming(forming.generation, forming.reason),
        )

    def restore(self, state: MembershipState, now: float) -> tuple[Decision, ...]:
        """Go on after another leader; every node counts as heard now."""
        self._known = {one.member.name: _Known(one.member, one.role, now, one.why) for one in state.nodes}
        self._order, self.generation = state.order, state.generation
        self._here = None
        self._looked = self._enough_since = now
        self._short_since, self._short_said = None, False
        if state.forming is None:
            self._forming = None
            self.phase = Phase.RUNNING
            return ()
        self._forming = forming = _Forming(state.forming.generation, state.forming.reason)
        self.phase = Phase.FORMING if self.generation else Phase.GATHERING
        if self.phase is Phase.FORMING:
            forming.silent = dict.fromkeys(self.here(), now)
        return (Probe(tuple(sorted(self.here())), forming.asks),)
