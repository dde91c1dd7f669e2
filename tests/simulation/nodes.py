"""Incidents of many nodes as transcripts: membership, succession and preemption; see :mod:`.transcript`.

begin nodes 2:3 spares 1                  who is in: every node gives signs of life, unless it is silent
at 0 join n0 n1                           at 5 silent n1         at 6 alive n1
at 7 left n1: its power went              at 7 unfit n1: two Xid 79
at 9 restart: rank 3 lost its peer        at 9 safe step 40      at 9 wait until 20

begin agents 5                            who leads: n0 to n4 all vote
at 5 cut n0 n1                            from all others        at 30 heal
at 5 kill n0                              at 6 start n0
at 9 generation on n2 n3                  at 20 look

begin preemption lead 20 global=40 local=8
at 5 signal 15 on rank 3                  at 6 Slurm ends at 60
at 7 staged 39                            at 8 vote step 40 left 14
at 9 durable 40 in local                  at 9 wait until 20
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator

from outlast.cluster.policy.ballots import (
    HardState,
    InForce,
    Leads,
    Outcome,
    Send,
    StepsDown,
    Timing,
)
from outlast.cluster.policy.election import Elector
from outlast.cluster.policy.members import Decision as MembershipDecision
from outlast.cluster.policy.members import (
    Event,
    Heard,
    JobSpec,
    Joined,
    Left,
    Member,
    Plan,
    Probe,
    RestartOrdered,
    SafeStep,
    Unfit,
)
from outlast.cluster.policy.membership import Membership
from outlast.cluster.policy.messages import ElectionMessage, Record
from outlast.config import PreemptionOptions
from outlast.preemption.policy import (
    Decision,
    Durable,
    Notice,
    Preempted,
    Signal,
    Staged,
    Voted,
)

_TURN = 0.25


class NodesStage:
    """The membership of one job."""

    def __init__(self, line: str) -> None:
        found = _match(r"begin nodes (\d+):(\d+) spares (\d+)", line)
        least, most, spares = (int(found[n]) for n in (1, 2, 3))
        self._membership = Membership(JobSpec("run", "1", "-", 1, least, most, spares), 0.0)
        self._alive: dict[str, bool] = {}
        self._now = 0.0

    def take(self, line: str) -> Iterator[str]:
        """Take a line of the script, and give the answers."""
        found = _match(r"at (\S+) (.*)", line)
        yield from self._wait(float(found[1]))
        words = found[2].split()
        match words[0]:
            case "join":
                for name in words[1:]:
                    self._alive[name] = True
                    yield from self._say(Joined(Member(name, f"{name}:1", 1, "run", "1", "-")))
            case "silent" | "alive":
                self._alive[words[1]] = words[0] == "alive"
            case "wait":
                yield from self._wait(float(words[2]))
            case "left":
                name, _, reason = found[2][5:].partition(": ")
                self._alive[name] = False
                yield from self._say(Left(name, reason))
            case "unfit":
                name, _, reason = found[2][6:].partition(": ")
                yield from self._say(Unfit(name, reason))
            case "restart:":
                generation = self._membership.generation
                yield from self._say(RestartOrdered(generation, generation + 1, found[2][9:]))
            case "safe":
                generation = self._membership.generation
                yield from self._say(SafeStep(generation, int(words[2]), generation + 1))
            case _:
                raise ValueError(f"transcript: {line!r} is no event")

    def _wait(self, until: float) -> Iterator[str]:
        while self._now + _TURN <= until:
            self._now += _TURN
            for name, alive in self._alive.items():
                if alive:
                    yield from self._tell(self._membership.handle(Heard(name), self._now), quiet=True)
            yield from self._tell(self._membership.tick(self._now))
        self._now = max(self._now, until)

    def _say(self, event: Event) -> Iterator[str]:
        yield from self._tell(self._membership.handle(event, self._now))

    def _tell(self, decisions: Iterable[MembershipDecision], quiet: bool = False) -> Iterator[str]:
        for one in decisions:
            if isinstance(one, Plan):
                spares = f", spare: {' '.join(one.spares)}" if one.spares else ""
                who = f"generation {one.generation}: {' '.join(one.nodes)}{spares}"
                yield f"{self._now:.2f} s: {who}: {one.reason}"
            elif isinstance(one, Probe):
                for name in one.names:
                    if self._alive[name]:
                        yield from self._say(Heard(name))
            elif not quiet:
                yield f"{self._now:.2f} s: {one.reason}"


class AgentsStage:
    """Agents that vote, with true clocks and a quick network."""

    def __init__(self, line: str) -> None:
        count = int(_match(r"begin agents (\d+)", line)[1])
        self._names = [f"n{number}" for number in range(count)]
        everybody = frozenset(self._names)
        first = HardState(0, "", Record(0, 0, 1, everybody, everybody, "", (everybody,)))
        self._disks = dict.fromkeys(self._names, first)
        self._agents: dict[str, Elector] = {}
        self._side = dict.fromkeys(self._names, 0)
        self._queue: list[tuple[float, int, str, str, ElectionMessage]] = []
        self._sent = 0
        self._now = 0.0
        for name in self._names:
            self._start(name)

    def take(self, line: str) -> Iterator[str]:
        """Take a line of the script, and give the answers."""
        found = _match(r"at (\S+) (.*)", line)
        yield from self._wait(float(found[1]))
        words = found[2].split()
        match words[0]:
            case "cut":
                self._side.update(dict.fromkeys(words[1:], 1))
            case "heal":
                self._side = dict.fromkeys(self._names, 0)
            case "kill":
                del self._agents[words[1]]
            case "start":
                self._start(words[1])
            case "generation":
                yield from self._generation(frozenset(words[2:]))
            case "look":
                yield from self._look()
            case _:
                raise ValueError(f"transcript: {line!r} is no event")

    def _start(self, name: str) -> None:
        self._agents[name] = Elector(name, Timing(), self._now, self._disks[name], f"{name} {self._now}")

    def _wait(self, until: float) -> Iterator[str]:
        while self._now + _TURN <= until:
            end = self._now + _TURN
            while self._queue and self._queue[0][0] <= end:
                self._now, _, name, sender, message = heapq.heappop(self._queue)
                if name in self._agents and self._side[name] == self._side[sender]:
                    yield from self._tell(name, self._agents[name].handle(sender, message, self._now))
            self._now = end
            for name, agent in self._agents.items():
                yield from self._tell(name, agent.tick(self._now))

    def _generation(self, active: frozenset[str]) -> Iterator[str]:
        everybody = frozenset(self._names)
        for name, agent in self._agents.items():
            record = agent.record
            if agent.leads and record is not None and self._side[name] == self._side[min(active)]:
                wanted = Record(0, 0, record.generation + 1, active, everybody, "", record.quorums)
                yield from self._tell(name, agent.propose(wanted, self._now))

    def _look(self) -> Iterator[str]:
        for name, agent in self._agents.items():
            generation, until = agent.rights
            rights = f"may commit in generation {generation}" if self._now < until else "may not commit"
            yield f"{name}: term {agent.term}, leader {agent.leader or 'unknown'}; {rights}"

    def _tell(self, name: str, outcomes: Iterable[Outcome]) -> Iterator[str]:
        self._disks[name] = self._agents[name].stored
        for one in outcomes:
            if isinstance(one, Send):
                self._sent += 1
                heapq.heappush(self._queue, (self._now + 0.01, self._sent, one.to, name, one.message))
            elif isinstance(one, Leads):
                yield f"{self._now:.2f} s: {name} coordinates: {one.reason}"
            elif isinstance(one, StepsDown):
                yield f"{self._now:.2f} s: {name} steps down: {one.reason}"
            elif isinstance(one, InForce) and self._agents[name].leads:
                yield f"{self._now:.2f} s: generation {one.record.generation} is in force: {one.reason}"


class PreemptionStage:
    """One rank that is preempted."""

    def __init__(self, line: str) -> None:
        found = _match(r"begin preemption lead (\S+)(.*)", line)
        self._tiers = {name: float(one) for name, one in re.findall(r"(\w+)=(\S+)", found[2])}
        self._rank = Preempted(PreemptionOptions(), self._tiers, float(found[1]))
        self._now = 0.0
        self._started = False

    def take(self, line: str) -> Iterator[str]:
        """Take a line of the script, and give the answers."""
        if not self._started:
            self._started = True
            yield from self._tell(self._rank.start())
        found = _match(r"at (\S+) (.*)", line)
        self._now = float(found[1])
        what = found[2]
        seconds = dict(self._tiers)
        if one := re.fullmatch(r"signal (\d+) on rank (\d+)", what):
            yield from self._tell(self._rank.handle(Signal(int(one[1]), int(one[2])), self._now))
        elif one := re.fullmatch(r"(.+) ends at (\S+)", what):
            yield from self._tell(self._rank.handle(Notice(one[1], float(one[2])), self._now))
        elif one := re.fullmatch(r"staged (\d+)", what):
            yield from self._tell(self._rank.handle(Staged(int(one[1])), self._now))
        elif one := re.fullmatch(r"vote step (\d+) left (\S+)", what):
            vote = Voted(int(one[1]), float(one[2]), seconds)
            yield from self._tell(self._rank.handle(vote, self._now))
        elif one := re.fullmatch(r"durable (\d+) in (\w+)", what):
            yield from self._tell(self._rank.handle(Durable(int(one[1]), one[2]), self._now))
        elif one := re.fullmatch(r"wait until (\S+)", what):
            while self._now < float(one[1]):
                self._now += _TURN
                yield from self._tell(self._rank.tick(self._now))
        else:
            raise ValueError(f"transcript: {line!r} is no event")

    def _tell(self, decisions: Iterable[Decision]) -> Iterator[str]:
        for one in decisions:
            yield f"{self._now:.2f} s: {one.order.value}: {one.reason}"


def _match(pattern: str, line: str) -> re.Match[str]:
    found = re.fullmatch(pattern, line)
    if found is None:
        raise ValueError(f"transcript: {line!r} is no event")
    return found


Stage = NodesStage | AgentsStage | PreemptionStage
STAGES: dict[str, Callable[[str], Stage]] = {
    "nodes": NodesStage,
    "agents": AgentsStage,
    "preemption": PreemptionStage,
}
