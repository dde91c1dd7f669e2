"""Who coordinates and who may commit, over random schedules of loss, delay, partition, crash and restart."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from outlast.cluster.policy.ballots import (
    HardState,
    InForce,
    Leads,
    Outcome,
    Send,
    Timing,
    confirmed,
    founding,
    majority,
)
from outlast.cluster.policy.election import Elector
from outlast.cluster.policy.messages import ElectionMessage, Record, VoteRequest

TIMING = Timing(interval=0.8, lease=4.0, drift=0.1, stagger=0.7)


class VotesTwice(Elector):
    def _not_voted(self, sender: str, request: VoteRequest) -> bool:
        return request.term >= self._stored.term


class BreaksPromises(Elector):
    def _free(self, now: float) -> bool:
        return self._leads is None


class Forgets(Elector):
    """A restart loses the term and the vote."""


@dataclass
class Agent:
    name: str
    rate: float
    offset: float
    kind: type[Elector]
    disk: HardState
    elector: Elector | None = None
    lives: int = 0

    def clock(self, real: float) -> float:
        return self.offset + real * self.rate

    def start(self, real: float) -> None:
        self.lives += 1
        if self.kind is Forgets:
            self.disk = HardState(0, "", self.disk.record)
        self.elector = self.kind(self.name, TIMING, self.clock(real), self.disk, str(self.lives))


@dataclass
class World:
    """A network and its agents; what must hold is looked at after every event."""

    seed: int
    kind: type[Elector] = Elector
    size: int = 0
    now: float = 0.0
    bad: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.size = self.size or self.draw.choice((3, 3, 3, 4, 5, 5, 7))
        names = [f"n{number}" for number in range(self.size)]
        voters = frozenset(names[: self.draw.choice((3, self.size))])
        everybody = frozenset(names)
        first = Record(0, 0, 1, everybody, everybody, "first", (voters,))
        drift = TIMING.drift
        self.agents = {
            name: Agent(
                name,
                self.draw.uniform(1 - drift, 1 + drift),
                self.draw.uniform(0, 1000),
                self.kind,
                HardState(0, "", first),
            )
            for name in names
        }
        self.side: dict[str, int] = dict.fromkeys(names, 0)
        self.loss = self.draw.choice((0.0, 0.05, 0.3))
        self.slow = self.draw.choice((0.1, 0.1, 2.0, 6.0))
        self.queue: list[tuple[float, int, str, tuple[str, ElectionMessage] | None]] = []
        self.count = 0
        self.winners: dict[int, set[str]] = {}
        self.plans: dict[int, str] = {}
        self.newest_in_force = 0
        for agent in self.agents.values():
            agent.start(0.0)
            self.put(self.draw.random() * 0.5, agent.name, None)

    def put(self, after: float, to: str, message: tuple[str, ElectionMessage] | None) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + after, self.count, to, message))

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, name, message = heapq.heappop(self.queue)
            agent = self.agents[name]
            if message is None:
                self.put(0.2, name, None)
                if agent.elector is not None:
                    self.take(agent, agent.elector.tick(agent.clock(self.now)))
            elif agent.elector is not None and self.side[message[0]] == self.side[name]:
                self.take(agent, agent.elector.handle(*message, agent.clock(self.now)))
            self.look()
        self.now = until

    def take(self, agent: Agent, outcomes: list[Outcome]) -> None:
        assert agent.elector is not None
        agent.disk = agent.elector.stored
        for outcome in outcomes:
            if isinstance(outcome, Send):
                if self.draw.random() >= self.loss:
                    late = self.draw.random() < 0.1
                    delay = self.draw.random() * (self.slow if late else 0.1)
                    self.put(delay, outcome.to, (agent.name, outcome.message))
            elif isinstance(outcome, Leads):
                winners = self.winners.setdefault(outcome.term, set())
                winners.add(agent.name)
                if len(winners) > 1:
                    self.bad.append(f"term {outcome.term} has two leaders")
            elif isinstance(outcome, InForce):
                record = outcome.record
                if self.plans.setdefault(record.generation, record.plan) != record.plan:
                    self.bad.append(f"generation {record.generation} has two plans")

    def look(self) -> None:
        rights = set()
        for agent in self.agents.values():
            if agent.elector is not None:
                generation, until = agent.elector.rights
                if agent.clock(self.now) < until:
                    rights.add(generation)
        if len(rights) > 1:
            self.bad.append(f"generations {sorted(rights)} may commit at once")

    def leaders(self) -> list[Agent]:
        return [one for one in self.agents.values() if one.elector is not None and one.elector.leads]

    def begin_generation(self) -> None:
        """Have a leader put some of the nodes into the next generation, perhaps with other voters."""
        found = self.leaders()
        if not found:
            return
        agent = self.draw.choice(found)
        assert agent.elector is not None
        record = agent.elector.record
        assert record is not None
        names = sorted(self.agents)
        active = frozenset(self.draw.sample(names, self.draw.randint(1, len(names))))
        voters = record.quorums[-1]
        if self.draw.random() < 0.5:
            voters = frozenset(self.draw.sample(names, self.draw.choice((3, len(names)))))
        plan = f"{agent.name} {self.count}"
        wanted = Record(0, 0, record.generation + 1, active, frozenset(names), plan, (voters,))
        self.take(agent, agent.elector.propose(wanted, agent.clock(self.now)))
        self.look()

    def disturb(self) -> None:
        agent = self.draw.choice(list(self.agents.values()))
        match self.draw.randrange(7):
            case 0 | 1:
                self.side = {name: self.draw.randrange(2) for name in self.agents}
            case 2:
                self.side = dict.fromkeys(self.agents, 0)
                for one in self.leaders():
                    self.side[one.name] = 1
            case 3:
                agent.elector = None
            case 4:
                if agent.elector is None:
                    agent.start(self.now)
            case 5:
                agent.start(self.now)
            case _:
                self.begin_generation()

    def heal(self) -> None:
        self.side = dict.fromkeys(self.agents, 0)
        self.loss, self.slow = 0.0, 0.1
        for agent in self.agents.values():
            if agent.elector is None:
                agent.start(self.now)


def play(seed: int, kind: type[Elector] = Elector, turns: int = 8) -> World:
    world = World(seed, kind)
    world.run(world.draw.uniform(2, 8))
    for _ in range(turns):
        world.disturb()
        world.run(world.now + world.draw.choice((0.3, 1.0, 4.0)))
    return world


@pytest.mark.parametrize(
    "part", [*range(8), *(pytest.param(at, marks=pytest.mark.long) for at in range(8, 50))]
)
def test_no_schedule_makes_two_leaders_of_a_term_or_two_generations_that_commit(seed: int, part: int) -> None:
    for number in range(200 * part, 200 * (part + 1)):
        world = play(seed + number, turns=4)
        assert not world.bad, f"part {part}, seed {seed + number}: {world.bad[0]}"


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(at, marks=pytest.mark.long) for at in range(2, 10))])
def test_after_healing_somebody_coordinates_and_everybody_may_commit(seed: int, part: int) -> None:
    for number in range(30 * part, 30 * (part + 1)):
        world = play(seed + number)
        world.heal()
        world.run(world.now + 40.0)
        (only,) = world.leaders()
        assert only.elector is not None
        record = only.elector.record
        assert record is not None, seed + number
        allowed = {
            one.name
            for one in world.agents.values()
            if one.elector is not None and one.clock(world.now) < one.elector.rights[1]
        }
        assert allowed == record.active, f"seed {seed + number}: {sorted(allowed)}, {sorted(record.active)}"
        assert not world.bad


@pytest.mark.parametrize(
    ("kind", "words"),
    [(VotesTwice, "two leaders"), (Forgets, "two leaders"), (BreaksPromises, "may commit at once")],
)
def test_a_planted_bug_is_found(kind: type[Elector], words: str, seed: int) -> None:
    for number in range(60000):
        world = play(seed + number, kind)
        if any(words in bad for bad in world.bad):
            print(f"{kind.__name__}: found after {number + 1} schedules")
            return
    pytest.fail(f"{kind.__name__} was not found")


def test_the_first_agent_begins_alone_and_hands_votes_to_those_that_join() -> None:
    first = Elector("n0", TIMING, 0.0, founding("n0"))
    outcomes = first.tick(0.0)
    assert any(isinstance(one, Leads) for one in outcomes)
    names = frozenset({"n0", "n1", "n2"})
    said = first.propose(Record(0, 0, 1, names, names, "plan", (names,)), 0.1)
    assert {one.to for one in said if isinstance(one, Send)} == {"n1", "n2"}
    assert not any(isinstance(one, InForce) and one.record.generation == 1 for one in said)
    second = Elector("n1", TIMING, 0.0)
    (ping,) = [one.message for one in said if isinstance(one, Send) and one.to == "n1"]
    (report,) = [one.message for one in second.handle("n0", ping, 0.2) if isinstance(one, Send)]
    after = first.handle("n1", report, 0.3)
    assert [one.record.quorums for one in after if isinstance(one, InForce)] == [(frozenset({"n0"}), names)]
    assert first.record is not None
    assert first.record.quorums == (names,)


def test_majorities() -> None:
    two = (frozenset("ab"), frozenset("abc"))
    assert not majority(two, {"a", "c"})
    assert majority(two, {"a", "b"})
    assert confirmed((frozenset("abc"),), {"a": 3.0, "b": 2.0}) == 2.0
    assert confirmed((frozenset("abc"),), {"a": 3.0}) == float("-inf")
