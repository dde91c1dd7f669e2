"""Statuses, and worlds in which ranks train and messages are late, lost, repeated or reordered."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from outlast.agreement.policy.nodes import (
    LeaderSteps,
    NodeSteps,
    proposal_received,
    proposal_sent,
    report_sent,
    status_received,
)
from outlast.agreement.policy.steps import (
    Proposal,
    RankEnded,
    RanksSeen,
    Status,
    StepCoordinator,
    StepParticipant,
    Want,
)
from outlast.cluster.policy.messages import StepOrder, StepReport
from tests.simulation.ranks import Rank, acted_apart

GENERATION = 1
LAST_STEP = 400
FAIR_TURNS = 400
RECENT = 160  # of 200 messages so many are the newest

Op = tuple[str, int, int]
RANK_OPS = (
    "train",
    "train",
    "train",
    "look",
    "look",
    "hear",
    "hear",
    "tell",
    "tell",
    "deliver",
    "want",
    "die",
)
NODE_OPS = (
    *("train", "train", "train", "between", "between", "hear", "hear", "look", "look", "look"),
    *("deliver", "deliver", "deliver", "repeat", "want", "follow", "elect", "die"),
    *("turn", "turn", "turn", "turn"),
)
SUCCESSIONS = ("turn", "turn", "turn", "turn", "hear", "want", "elect", "follow", "follow", "deliver")


def at(who: int | str, step: int, serial: int = 1, **more: Any) -> Status:
    """Return the status of a rank or a node that has gone on after a step, in round 1."""
    return Status(who, serial, more.pop("round", 1), step, **more)


@dataclass
class Build:
    """What a world is made of: the product's parts, or one with a bug."""

    coordinator: type[StepCoordinator] = StepCoordinator
    part: type[StepParticipant] = StepParticipant
    steps: type[NodeSteps] = NodeSteps
    leader: type[LeaderSteps] = LeaderSteps
    fenced: bool = True  # an agent takes no order of an earlier term


class World:
    """Ranks that train.

    ``coupled``: a step ends only when every rank has begun it, as with data-parallel training.
    """

    def __init__(self, ranks: int, coupled: bool, build: Build) -> None:
        self.ranks = [Rank(number, build.part()) for number in range(ranks)]
        for rank in self.ranks:
            rank.part.begin(1)
        self.coupled, self.build = coupled, build
        self.died = False

    def between(self, rank: Rank, _: int = 0) -> None:
        if rank.training and rank.left < rank.completed:
            rank.look()

    def ask(self, rank: Rank, pick: int) -> None:
        if rank.training:
            rank.wants |= list(Want)[pick % len(Want)]

    def train(self, rank: Rank, _: int = 0) -> None:
        """Complete the step that is under way, and be after it."""
        if not rank.training or rank.left < rank.completed:
            return
        if self.coupled and any(other.left < rank.completed and other.alive for other in self.ranks):
            return
        rank.completed += 1
        if rank.completed >= LAST_STEP:  # of the loop, after which nobody acts
            rank.begin(rank.round + 1)
        else:
            rank.look()

    def unserved(self) -> list[str]:
        """Return which requests did not end, and which ranks wait, where no rank has died."""
        if self.died:
            return []
        found = [f"rank {one.number} wants {one.wants!r}" for one in self.ranks if one.wants and one.training]
        waiting = [one for one in self.ranks if one.training and one.left < one.completed]
        return found + [f"rank {one.number} waits after step {one.completed}" for one in waiting]

    def bad(self) -> list[str]:
        """Return what must not be."""
        return [*acted_apart(self.ranks), *self.unserved()]


class OneNode(World):
    """A coordinator and its ranks."""

    def __init__(self, ranks: int, coupled: bool, build: Build) -> None:
        super().__init__(ranks, coupled, build)
        self.coordinator = build.coordinator(range(ranks))
        self.said: list[Proposal] = []
        self.told: list[Status] = []

    def do(self, op: Op) -> None:
        what, number, pick = op
        rank = self.ranks[number % len(self.ranks)]
        if rank.alive:
            getattr(self, what)(rank, pick)

    def look(self, rank: Rank, _: int) -> None:
        if rank.training:
            rank.look()

    def hear(self, rank: Rank, pick: int) -> None:
        if self.said:
            rank.said = self.said[-1 if pick < RECENT else pick % len(self.said)]

    def tell(self, rank: Rank, _: int) -> None:
        self.told.append(rank.status())

    def deliver(self, rank: Rank, pick: int) -> None:
        if pick < RECENT:
            self.tell(rank, pick)
        if self.told:
            self.said += self.coordinator.handle(self.told[-1 if pick < RECENT else pick % len(self.told)])

    def want(self, rank: Rank, pick: int) -> None:
        self.ask(rank, pick)
        if pick % 3 == 0:
            self.coordinator.rebalance(((rank.number, 100 + pick),) if pick % 2 else ())

    def die(self, rank: Rank, pick: int) -> None:
        if pick % 4 == 0:
            rank.alive, self.died = False, True
            self.said += self.coordinator.handle(RankEnded(rank.number))

    def settle(self) -> None:
        """Let everything arrive, in order, and all ranks train until every request has ended."""
        for turn in range(FAIR_TURNS):
            if turn > len(self.ranks) and not self.unserved():
                return
            for rank in self.ranks:
                if rank.alive:
                    self.deliver(rank, 0)
                self.hear(rank, 0)
            for rank in self.ranks:
                if rank.training and rank.left < rank.completed:
                    rank.look()
                elif rank.alive:
                    self.train(rank)


@dataclass
class Agent:
    """An agent that speaks for its ranks, and may lead, in the order of the product's code."""

    name: str
    steps: NodeSteps
    ranks: list[Rank]
    term: int = 1
    leads: LeaderSteps | None = None
    alive: bool = True
    said: list[Proposal] = field(default_factory=list)  # what was written into the pages


class Nodes(World):
    """Agents and their ranks; the last agent is a spare: it may lead, and has no ranks."""

    def __init__(self, count: int, each: int, coupled: bool, build: Build) -> None:
        super().__init__(count * each, coupled, build)
        self.members = [f"n{number}" for number in range(count)]
        self.agents = [
            Agent(f"n{number}", build.steps(f"n{number}"), self.ranks[number * each : (number + 1) * each])
            for number in range(count + 1)
        ]
        self.term = 1
        self.by_term = {1: self.agents[0]}
        self.posted: list[tuple[Agent, str, StepOrder | StepReport]] = []  # to whom, from whom
        for agent in self.agents:
            self.look(agent)
        self._lead(self.agents[0])

    @property
    def leads(self) -> LeaderSteps | None:
        """Whoever leads the newest term."""
        return self.by_term[self.term].leads

    def _lead(self, agent: Agent) -> None:
        agent.leads = self.build.leader(GENERATION, self.members)
        agent.leads._coordinator = self.build.coordinator(self.members)

    def do(self, op: Op) -> None:
        what, number, pick = op
        if what in ("train", "between", "want", "hear"):
            rank = self.ranks[number % len(self.ranks)]
            if rank.alive:
                getattr(self, what)(rank, pick)
        elif what == "deliver":
            self.deliver(pick)
        elif what == "turn":
            among = [one for place, one in enumerate(self.agents) if one.alive and not pick >> place & 1]
            self.turn(among, slow=self.ranks[number % len(self.ranks)])
        else:
            agent = self.agents[number % len(self.agents)]
            if agent.alive:
                getattr(self, what)(agent, pick)

    # What ranks do.

    def hear(self, rank: Rank, pick: int) -> None:
        said = next(agent.said for agent in self.agents if rank in agent.ranks)
        if said:
            rank.said = said[-1 if pick < RECENT else pick % len(said)]

    def want(self, rank: Rank, pick: int) -> None:
        self.ask(rank, pick)
        if pick % 3 == 0 and self.leads is not None:
            self.leads.rebalance(((rank.number, 100 + pick),) if pick % 2 else ())

    # What agents do.

    def look(self, agent: Agent, _: int = 0) -> None:
        seen = RanksSeen(GENERATION, tuple(rank.status() for rank in agent.ranks))
        if agent.ranks and agent.steps.look(seen):
            self.report(agent)

    def report(self, agent: Agent) -> None:
        sent = report_sent(*agent.steps.report(), (agent.term, GENERATION, ""), 0.0)
        if agent.term in self.by_term:
            self.posted.append((self.by_term[agent.term], agent.name, sent))

    def repeat(self, agent: Agent, _: int = 0) -> None:
        if agent.steps.pending:
            self.report(agent)
        if agent.leads is not None and agent.leads.busy:
            self.tell(agent)

    def tell(self, leader: Agent) -> None:
        assert leader.leads is not None
        order = StepOrder(leader.term, GENERATION, "", proposal_sent(leader.leads.current, 0.0))
        for one in self.agents:
            if one is leader and one.ranks:
                self._take_order(leader, order)
            elif one.ranks:
                self.posted.append((one, leader.name, order))

    def deliver(self, pick: int) -> None:
        if self.posted:
            place = -1 - pick % 6 if pick < RECENT else pick * 7919
            self.arrive(*self.posted[place % len(self.posted)])

    def arrive(self, agent: Agent, sender: str, message: StepOrder | StepReport) -> None:
        if not agent.alive:
            return
        if isinstance(message, StepOrder):
            self._take_order(agent, message)
        elif agent.leads is not None and agent.term == message.term:
            said = None if message.said is None else proposal_received(message.said, 0.0)
            if agent.leads.take(status_received(sender, message, 0.0), said):
                self.tell(agent)

    def _take_order(self, agent: Agent, order: StepOrder) -> None:
        if self.build.fenced and order.term != agent.term:
            return
        found = None if order.said is None else proposal_received(order.said, 0.0)
        if found is not None and agent.steps.hear(found):
            agent.said.append(found)
        self.report(agent)

    # Who leads.

    def elect(self, agent: Agent, pick: int) -> None:
        """Let an agent lead a new term; the leader before it may not know, and go on."""
        if pick % 4 == 0:
            self.term += 1
            agent.term, self.by_term[self.term] = self.term, agent
            self._lead(agent)

    def follow(self, agent: Agent, _: int = 0) -> None:
        """Let an agent hear of the newest term."""
        if agent.term != self.term:
            agent.term, agent.leads = self.term, None

    def die(self, agent: Agent, pick: int) -> None:
        """Let a node die: no generation goes on without it."""
        if pick % 8 == 0:
            agent.alive = False
            self.died = True
            for rank in agent.ranks:
                rank.alive = False

    def settle(self) -> None:
        """Let everything arrive, in order, and all ranks train until every request has ended."""
        if not self.by_term[self.term].alive:
            return
        for turn in range(FAIR_TURNS):
            if turn > 8 and not self.unserved():
                return
            for agent in self.agents:
                self.follow(agent)
            self.posted = self.posted[-200:]
            self.turn([agent for agent in self.agents if agent.alive], trains=bool(turn % 2))

    def turn(self, among: list[Agent], trains: bool = True, slow: Rank | None = None) -> None:
        """Let what these agents write to each other arrive, in order, and their ranks go on, but for one."""
        for agent in among:
            self.look(agent)
            self.repeat(agent)
        arriving, self.posted = self.posted, []
        names = {agent.name for agent in among}
        for to, sender, message in arriving:
            if to in among and sender in names:
                self.arrive(to, sender, message)
            else:
                self.posted.append((to, sender, message))
        for rank in (rank for agent in among for rank in agent.ranks if rank is not slow):
            self.hear(rank, 0)
            self.between(rank)
            if rank.alive and trains:
                self.train(rank)


def play(world: Any, ops: list[Op]) -> list[str]:
    """Do what a schedule says, let everything end, and return what must not be."""
    for op in ops:
        world.do(op)
    world.settle()
    found: list[str] = world.bad()
    return found


def drawn(number: int) -> tuple[list[Op], tuple[int, int, bool]]:
    """Return a schedule of nodes; every second one is about little but leaders that are succeeded."""
    draw = random.Random(number)
    of = (NODE_OPS, SUCCESSIONS)[number % 2]
    ops = [(draw.choice(of), draw.randrange(6), draw.choice((0, draw.randrange(200)))) for _ in range(120)]
    return ops, (draw.randint(2, 3), draw.randint(1, 2), draw.random() < 0.5)
