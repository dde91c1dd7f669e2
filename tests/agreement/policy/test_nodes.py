"""Ranks of several nodes act after the same step, whatever is late, lost or dead, and whoever leads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.nodes import (
    LeaderSteps,
    NodeSteps,
    proposal_received,
    proposal_sent,
    report_sent,
    status_of_node,
    status_received,
)
from outlast.agreement.policy.steps import (
    Proposal,
    RanksSeen,
    Stage,
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

    def look(self) -> bool:
        return self.steps.look(RanksSeen(GENERATION, tuple(rank.status() for rank in self.ranks)))


Op = tuple[str, int, int]
OPS = (
    *("train", "train", "train", "between", "between", "hear", "hear", "look", "look", "look"),
    *("deliver", "deliver", "deliver", "repeat", "want", "follow", "elect", "die"),
    *("turn", "turn", "turn", "turn"),
)


@dataclass
class Build:
    """What the world is made of: the product's parts, or one with a bug."""

    coordinator: type[StepCoordinator] = StepCoordinator
    part: type[StepParticipant] = StepParticipant
    steps: type[NodeSteps] = NodeSteps
    leader: type[LeaderSteps] = LeaderSteps
    fenced: bool = True  # an agent takes no order of an earlier term


class World:
    """Agents and their ranks; messages arrive in any order, several times or never.

    ``coupled``: a step ends only when every rank has begun it, as with data-parallel training.
    """

    def __init__(self, count: int, each: int, coupled: bool, build: Build) -> None:
        self.coupled, self.build = coupled, build
        self.agents = []
        self.members = [f"n{at}" for at in range(count)]
        for at in range(count + 1):  # the last one is a spare: it may lead, and has no ranks
            ranks = [Rank(at * each + local, build.part()) for local in range(each if at < count else 0)]
            self.agents.append(Agent(f"n{at}", build.steps(f"n{at}"), ranks))
        self.ranks = [rank for agent in self.agents for rank in agent.ranks]
        for rank in self.ranks:
            rank.part.begin(1)
        self.term = 1
        self.by_term = {1: self.agents[0]}
        self.posted: list[tuple[Agent, str, StepOrder | StepReport]] = []  # to whom, from whom
        self.died = False
        for agent in self.agents:
            self.look(agent)
        self._lead(self.agents[0])

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
            among = [one for at, one in enumerate(self.agents) if one.alive and not pick >> at & 1]
            self.turn(among, slow=self.ranks[number % len(self.ranks)])
        else:
            agent = self.agents[number % len(self.agents)]
            if agent.alive:
                getattr(self, what)(agent, pick)

    # What ranks do.

    def between(self, rank: Rank, _: int) -> None:
        if rank.training and rank.left < rank.completed:
            rank.look()

    def hear(self, rank: Rank, pick: int) -> None:
        said = next(agent.said for agent in self.agents if rank in agent.ranks)
        if said:
            rank.said = said[-1 if pick < RECENT else pick % len(said)]

    def want(self, rank: Rank, pick: int) -> None:
        if rank.training:
            rank.wants |= list(Want)[pick % len(Want)]
        if pick % 3 == 0 and self.by_term[self.term].leads is not None:
            self.by_term[self.term].leads.rebalance(((rank.number, 100 + pick),) if pick % 2 else ())

    def train(self, rank: Rank, _: int = 0) -> None:
        if not rank.training or rank.left < rank.completed:
            return
        if self.coupled and any(other.left < rank.completed and other.alive for other in self.ranks):
            return
        rank.completed += 1
        if rank.completed >= LAST_STEP:
            rank.begin(rank.round + 1)
        else:
            rank.look()

    # What agents do.

    def look(self, agent: Agent, _: int = 0) -> None:
        if agent.ranks and agent.look():
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
            at = -1 - pick % 6 if pick < RECENT else pick * 7919
            self._arrive(*self.posted[at % len(self.posted)])

    def _arrive(self, agent: Agent, sender: str, message: StepOrder | StepReport) -> None:
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
        for to, sender, message in arriving:
            if to in among and any(sender == agent.name for agent in among):
                self._arrive(to, sender, message)
            else:
                self.posted.append((to, sender, message))
        for rank in (rank for agent in among for rank in agent.ranks if rank is not slow):
            self.hear(rank, 0)
            self.between(rank, 0)
            if rank.alive and trains:
                self.train(rank)

    def unserved(self) -> list[str]:
        """Return which requests did not end, and which ranks wait, where no node has died."""
        if self.died:
            return []
        found = [f"rank {one.number} wants {one.wants!r}" for one in self.ranks if one.wants and one.training]
        return found + [
            f"rank {one.number} waits after step {one.completed}"
            for one in self.ranks
            if one.training and one.left < one.completed
        ]


def play(ops: list[Op], shape: tuple[int, int, bool], build: Build) -> tuple[World, list[str]]:
    world = World(*shape, build)
    for op in ops:
        world.do(op)
    world.settle()
    return world, [*acted_apart(world.ranks), *world.unserved()]


SCHEDULES = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 5), st.integers(0, 199)), min_size=20, max_size=200
)


@given(SCHEDULES, st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_ranks_of_all_nodes_act_after_the_same_step_and_every_request_ends(
    ops: list[Op], count: int, each: int, coupled: bool
) -> None:
    _, bad = play(ops, (count, each, coupled), Build())
    assert bad == []


SUCCESSIONS = ("turn", "turn", "turn", "turn", "hear", "want", "elect", "follow", "follow", "deliver")


def drawn(number: int) -> tuple[list[Op], tuple[int, int, bool]]:
    """Return a schedule; every second one is about little but leaders that are cut off and succeeded."""
    draw = random.Random(number)
    of = (OPS, SUCCESSIONS)[number % 2]
    ops = [(draw.choice(of), draw.randrange(6), draw.choice((0, draw.randrange(200)))) for _ in range(120)]
    return ops, (draw.randint(2, 3), draw.randint(1, 2), draw.random() < 0.5)


def test_schedules_have_commits_elections_and_successors_that_find_a_commit(seed: int) -> None:
    """The property above is about something: what it forbids would have had its chance."""
    acts = successions = 0
    for number in range(300):
        world, bad = play(*drawn(seed + number), Build())
        assert bad == []
        acts += sum(len(rank.acts) for rank in world.ranks)
        successions += world.term > 1
    assert acts > 300
    assert successions > 100


def test_nothing_is_sent_while_nobody_asks() -> None:
    world = World(3, 2, True, Build())
    for _ in range(30):
        for rank in world.ranks:
            world.hear(rank, 0)
            world.train(rank)
        for agent in world.agents:
            world.look(agent)
            world.repeat(agent)
    assert world.posted == []
    assert {rank.completed for rank in world.ranks} == {30}


def standing(who: str, step: int, **more: Any) -> Status:
    return Status(who, more.pop("serial", 1), more.pop("round", 1), step, **more)


def test_a_successor_says_a_commit_again_once_every_node_has_reported() -> None:
    found = LeaderSteps(1, ("a", "b"))
    proposed = Proposal(5, Stage.PROPOSED, 1, 9, Want.STOP)
    committed = replace(proposed, stage=Stage.COMMITTED, wants=Want.STOP | Want.SAVE)
    assert found.take(standing("a", 8, answered=5, wants=Want.STOP), proposed), "the other node is asked"
    assert found.current == proposed
    assert not found.take(standing("c", 8), None), "it is no node of the generation"
    found.take(standing("b", 8, answered=5), committed)
    assert found.current == committed
    assert found.busy, "one node has it not"
    found.take(standing("a", 9, serial=2, round=3), committed)
    assert found.busy is False


def test_a_successor_weighs_an_open_proposal_or_goes_beyond_it() -> None:
    proposed = Proposal(5, Stage.PROPOSED, 1, 9, Want.STOP)
    found = LeaderSteps(1, ("a", "b"))
    found.take(standing("a", 8, answered=5), proposed)
    assert found.take(standing("b", 8, answered=5, wants=Want.STOP), proposed)
    assert found.current is not None
    assert (found.current.number, found.current.stage, found.current.step) == (5, Stage.COMMITTED, 9)
    found = LeaderSteps(1, ("a", "b"))
    found.take(standing("a", 8, answered=5), proposed)
    assert found.take(standing("b", 9, wants=Want.STOP), None)
    assert (found.current.number, found.current.stage, found.current.step) == (6, Stage.PROPOSED, 13)


def test_a_node_promises_when_all_its_ranks_have_and_has_passed_when_one_has() -> None:
    said = Proposal(2, Stage.PROPOSED, 1, 9, Want.SAVE)

    def together(*ranks: Status, ended: tuple[int, ...] = ()) -> tuple[int, bool, bool]:
        found = status_of_node("a", 1, said, RanksSeen(1, ranks, ended))
        return found.answered, found.passed, found.apart

    mine, other = Status(0, 1, 1, 8, answered=2), Status(1, 1, 1, 8, answered=1)
    assert together(mine, other) == (0, False, False)
    assert together(mine, replace(other, answered=2)) == (2, False, False)
    assert together(mine, replace(other, answered=2, passed=True)) == (2, True, False)
    assert together(mine, replace(other, step=9)) == (2, True, False), "it has gone on and was not asked"
    assert together(mine, replace(other, step=9, round=3)) == (0, False, True)
    assert together(mine, replace(other, answered=2), ended=(1,)) == (2, False, True)


def test_an_answer_to_another_proposal_and_a_step_beyond_a_commit_count_for_nothing() -> None:
    said = Proposal(2, Stage.PROPOSED, 1, 9, Want.SAVE)
    ranks = (Status(0, 1, 1, 8, answered=1, passed=True), Status(1, 1, 1, 8, answered=2))
    assert status_of_node("a", 1, said, RanksSeen(1, ranks)).passed is False
    late = RanksSeen(1, (Status(0, 1, 1, 9), Status(1, 1, 1, 9, answered=2)))
    assert status_of_node("a", 1, said, late).passed
    assert not status_of_node("a", 1, replace(said, stage=Stage.COMMITTED), late).passed
    assert status_of_node("a", 1, None, RanksSeen(1, (Status(0, 1, 1, 9),))) == Status("a", 1, 1, 9)


def test_an_agent_reports_at_once_what_concerns_an_agreement_and_nothing_else() -> None:
    agent, rank = NodeSteps("a"), Status(0, 1, 1, 5)
    said = Proposal(1, Stage.PROPOSED, 1, 9, Want.SAVE)

    def look(generation: int = 1, **changed: Any) -> bool:
        nonlocal rank
        rank = replace(rank, **changed)
        return agent.look(RanksSeen(generation, (rank,)))

    assert (agent.generation, agent.pending) == (0, False)
    assert look() is False
    assert look(step=6, round=3) is False, "nobody asks"
    assert look(round=1, wants=Want.SAVE) is True
    status, before = agent.report()
    assert (status.who, status.serial, status.wants, before) == ("a", 1, Want.SAVE, None)
    assert look(step=7) is False, "it is known"
    assert agent.pending
    assert (agent.hear(said), agent.hear(said)) == (True, False)
    assert look(answered=1) is True
    assert agent.report()[0].serial == 2
    assert look(wants=Want(0)) is True
    agent.report()
    assert agent.pending, "a decision is awaited"
    committed = replace(said, stage=Stage.COMMITTED)
    assert agent.hear(committed)
    assert not agent.pending
    assert look(step=8) is False
    assert look(round=3, step=9) is True, "it has acted"
    assert agent.report()[1] == committed
    assert look(round=4) is False, "nobody asks"
    assert look(generation=2, round=1, step=0) is False
    assert (agent.generation, agent.said) == (2, None)


def test_a_leader_tells_nodes_only_what_is_new() -> None:
    alone = LeaderSteps(7, ("a",))
    assert (alone.generation, alone.busy) == (7, False)
    assert alone.take(standing("a", 8), None) is False
    assert alone.busy is False, "nobody asks"
    found = LeaderSteps(1, ("a", "b"))
    stray = Proposal(1, Stage.PROPOSED, 1, 9)
    assert found.take(standing("c", 8, wants=Want.SAVE), stray) is False, "it has no ranks"
    assert found.busy is False
    assert found.take(standing("a", 8, wants=Want.SAVE), None) is True
    assert found.take(standing("a", 8, serial=2, wants=Want.SAVE), None) is False
    assert found.busy is True


def test_a_leader_that_asks_by_itself_asks_every_node_until_it_is_committed_or_cannot_be() -> None:
    found = LeaderSteps(1, ("a", "b"))
    found.hold()
    assert found.busy, "no node has reported yet"
    assert found.take(standing("a", 8), None)
    assert found.take(standing("b", 8), None)
    said = found.current
    assert said is not None
    assert (said.stage, said.wants, found.held) == (Stage.PROPOSED, Want.SAVE | Want.HOLD, None)
    for serial, name in enumerate("ab", 2):
        found.take(standing(name, 8, serial=serial, answered=1), said)
    assert found.held == said.step
    found.hold()
    assert found.held is None, "another hold is asked for"
    found.release()
    assert found.held == said.step, "the ranks have not all left the round"
    found.take(standing("a", 10, serial=8, round=3), found.current)
    found.take(standing("b", 10, serial=9, round=3), found.current)
    assert found.current is not None
    assert (found.current.stage, found.current.number, found.held) == (Stage.WITHDRAWN, 2, None)

    voting = LeaderSteps(1, ("a",))
    voting.hold()
    voting.take(standing("a", 8, round=0), None)
    assert (voting.outside, voting.held, voting.current) == (True, None, None)
    voting.release()
    assert not voting.busy


@pytest.mark.parametrize("fenced", [True, False])
def test_an_order_of_an_earlier_term_that_comes_late_does_harm_only_where_it_is_taken(fenced: bool) -> None:
    world = World(2, 1, False, Build(fenced=fenced))
    first, second, spare = world.agents
    world.elect(spare, 0)
    world.follow(first)
    world.follow(second)
    world.want(world.ranks[0], 0)
    for _ in range(30):
        assert spare.leads is not None
        if spare.leads.current is not None and spare.leads.current.stage is Stage.COMMITTED:
            break
        world.turn(world.agents)
    late = [one for one in world.posted if one[0] is second and one[1] == spare.name]
    assert late, "the commit is under way"
    world.elect(first, 0)
    world.follow(second)
    world.want(world.ranks[1], 2)
    for _ in range(30):
        assert first.leads is not None
        if first.leads.current is not None and first.leads.current.stage is Stage.COMMITTED:
            break
        world.turn([first, second], trains=False)
    for one in late:
        world._arrive(*one)
    for _ in range(10):
        world.turn([first, second])
    assert all(rank.acts for rank in world.ranks)
    assert (acted_apart(world.ranks) == []) is fenced


class DecidesBeforeAllReport(StepCoordinator):
    """Withdraws, or proposes, before every node has reported in its term."""

    def _next(self) -> Proposal | None:
        members, self._members = self._members, frozenset(self._known)
        try:
            return super()._next()
        finally:
            self._members = members


class ForgetsWhatWasSaid(StepCoordinator):
    """Begins anew after a change of the leader."""

    def recall(self, said: Proposal) -> None:
        pass


class NumbersAnew(StepCoordinator):
    """Takes a commit for done after a change of the leader, and proposes under another number."""

    def recall(self, said: Proposal) -> None:
        super().recall(replace(said, stage=Stage.WITHDRAWN))


class ProposesTooSoon(StepCoordinator):
    """Proposes again while ranks have not acted upon what was committed."""

    def _in_round(self, round_: int) -> bool:
        return False


class PromisesForOthers(NodeSteps):
    """Takes the promise of one rank for that of all ranks of the node."""

    def _status(self, seen: RanksSeen) -> Status:
        found = super()._status(seen)
        number = 0 if self.said is None else self.said.number
        if any(one.answered == number and not one.passed for one in seen.statuses):
            return replace(found, answered=number, passed=False)
        return found


class HidesPassedSteps(NodeSteps):
    """Says that ranks have promised, whatever they have answered."""

    def _status(self, seen: RanksSeen) -> Status:
        return replace(super()._status(seen), passed=False)


class TakesOlderOrders(NodeSteps):
    """Takes what was said before what it has."""

    def hear(self, said: Proposal) -> bool:
        self.said = said
        return True


class IsOneRank(NodeSteps):
    """Says that all ranks are in the round of the one that is furthest."""

    def _status(self, seen: RanksSeen) -> Status:
        found = super()._status(seen)
        return replace(found, round=max(one.round for one in seen.statuses), apart=False)


class NeverRepeats(NodeSteps):
    """Reports changes only."""

    @property
    def pending(self) -> bool:
        return False


class NeverAsksAgain(LeaderSteps):
    """Tells every node once."""

    @property
    def busy(self) -> bool:
        return False


class WaitsForTheUnasked(NodeSteps):
    """Waits for the answer of a rank that has gone on and needs the others to come to its next look."""

    def _status(self, seen: RanksSeen) -> Status:
        number = 0 if self.said is None else self.said.number
        hidden = tuple(one if one.answered == number else replace(one, step=0) for one in seen.statuses)
        return super()._status(replace(seen, statuses=hidden))


@pytest.mark.parametrize(
    "build",
    [
        Build(coordinator=DecidesBeforeAllReport),
        Build(coordinator=ForgetsWhatWasSaid),
        Build(coordinator=NumbersAnew),
        Build(coordinator=ProposesTooSoon),
        Build(steps=PromisesForOthers),
        Build(steps=HidesPassedSteps),
        Build(steps=TakesOlderOrders),
        Build(steps=IsOneRank),
        Build(steps=NeverRepeats),
        Build(leader=NeverAsksAgain),
        Build(steps=WaitsForTheUnasked),
    ],
)
def test_a_planted_bug_is_found(build: Build, seed: int) -> None:
    for number in range(3_000):
        _, bad = play(*drawn(2 * (seed + number) + 1), build)
        if bad:
            print(f"found after {number + 1} schedules: {bad[0]}")
            return
    pytest.fail(f"{build} was not found")
