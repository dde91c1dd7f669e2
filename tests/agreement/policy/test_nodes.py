"""Ranks of several nodes act after the same step, whatever is late, lost or dead, and whoever leads."""

from __future__ import annotations

import math
from dataclasses import replace
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
from outlast.agreement.policy.steps import Proposal, RanksSeen, Stage, Status, StepCoordinator, Want
from outlast.agreement.policy.votes import TIERS
from tests.agreement.policy.builders import NODE_OPS, Build, Nodes, Op, at, drawn, play
from tests.simulation.ranks import acted_apart

PROPOSED, WITHDRAWN, COMMITTED = Stage.PROPOSED, Stage.WITHDRAWN, Stage.COMMITTED
SAVE, STOP = Want.SAVE, Want.STOP
SLOW = ((2, 500),)
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(NODE_OPS), st.integers(0, 5), st.integers(0, 199)), min_size=20, max_size=200
)


@given(SCHEDULES, st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_ranks_of_all_nodes_act_after_the_same_step_and_every_request_ends(
    ops: list[Op], count: int, each: int, coupled: bool
) -> None:
    world = Nodes(count, each, coupled, Build())
    assert play(world, ops) == []
    assert misknown(world) == ""


def misknown(world: Nodes) -> str:
    """Return what a leader takes for the shares in force, where the ranks have others; "": nothing."""
    leads, rank = world.leads, world.ranks[0]
    if world.died or leads is None or leads.busy or leads.shares is None:
        return ""
    if leads.current is not None and any(one.round == leads.current.round for one in world.ranks):
        return ""  # it is about to be acted upon
    divided = [slow for _, wants, slow in rank.acts.values() if Want.REBALANCE in wants]
    found = divided[-1] if divided else ()
    return "" if leads.shares == found else f"shares are {found}, the leader knows {leads.shares}"


def test_schedules_have_commits_successions_and_shares(seed: int) -> None:
    """The property above is about something: what it forbids would have had its chance."""
    acts = successions = divisions = 0
    for number in range(100):
        ops, shape = drawn(seed + number)
        world = Nodes(*shape, Build())
        assert (play(world, ops), misknown(world)) == ([], ""), seed + number
        acts += sum(len(rank.acts) for rank in world.ranks)
        successions += world.term > 1
        divisions += any(Want.REBALANCE in one for rank in world.ranks for _, one, _ in rank.acts.values())
    assert acts > 100
    assert successions > 33
    assert divisions > 10


def test_nothing_is_sent_while_nobody_asks() -> None:
    world = Nodes(3, 2, True, Build())
    for _ in range(30):
        for rank in world.ranks:
            world.hear(rank, 0)
            world.train(rank)
        for agent in world.agents:
            world.look(agent)
            world.repeat(agent)
    assert world.posted == []
    assert {rank.completed for rank in world.ranks} == {30}


@pytest.mark.parametrize("fenced", [True, False])
def test_an_order_of_an_earlier_term_that_comes_late_does_harm_only_where_it_is_taken(fenced: bool) -> None:
    world = Nodes(2, 1, False, Build(fenced=fenced))
    first, second, spare = world.agents

    def until_commit(among: list[Any], trains: bool = True) -> None:
        for _ in range(30):
            assert world.leads is not None
            if world.leads.current is not None and world.leads.current.stage is COMMITTED:
                return
            world.turn(among, trains=trains)

    world.elect(spare, 0)
    world.follow(first)
    world.follow(second)
    world.want(world.ranks[0], 0)
    until_commit(world.agents)
    late = [one for one in world.posted if one[0] is second and one[1] == spare.name]
    assert late, "the commit is under way"
    world.elect(first, 0)
    world.follow(second)
    world.want(world.ranks[1], 2)
    until_commit([first, second], trains=False)
    for one in late:
        world.arrive(*one)
    for _ in range(10):
        world.turn([first, second])
    assert all(rank.acts for rank in world.ranks)
    assert (acted_apart(world.ranks) == []) is fenced


# A successor

OPEN = Proposal(5, PROPOSED, 1, 9, STOP)
DONE = replace(OPEN, stage=COMMITTED, wants=STOP | SAVE)


def test_a_successor_repeats_a_commit_once_every_node_has_reported() -> None:
    found = LeaderSteps(1, ("a", "b"))
    assert found.take(at("a", 8, answered=5, wants=STOP), OPEN), "the other node is asked"
    assert found.current == OPEN
    assert not found.take(at("c", 8), None), "it is no node of the generation"
    found.take(at("b", 8, answered=5), DONE)
    assert found.current == DONE
    assert found.busy, "one node has it not"
    found.take(at("a", 9, 2, round=3), DONE)
    assert found.busy is False


@pytest.mark.parametrize(
    ("second", "told", "expected"),
    [
        (at("b", 8, answered=5, wants=STOP), OPEN, (5, COMMITTED, 9)),
        (at("b", 9, wants=STOP), None, (6, PROPOSED, 13)),
    ],
    ids=["weighed", "passed"],
)
def test_a_successor_weighs_an_open_proposal_or_goes_beyond_it(
    second: Status, told: Proposal | None, expected: tuple[int, Stage, int]
) -> None:
    found = LeaderSteps(1, ("a", "b"))
    found.take(at("a", 8, answered=5), OPEN)
    assert found.take(second, told)
    said = found.current
    assert said is not None
    assert (said.number, said.stage, said.step) == expected


DIVIDED = Proposal(5, COMMITTED, 1, 9, Want.REBALANCE, slow=SLOW)
ANEW = Proposal(7, PROPOSED, 5, 30, Want.REBALANCE, slow=(), before=SLOW)


@pytest.mark.parametrize(
    "said",
    [
        DIVIDED,
        Proposal(6, COMMITTED, 3, 20, SAVE, slow=SLOW, before=SLOW),
        ANEW,
        replace(ANEW, stage=WITHDRAWN),
    ],
    ids=["divided", "saved since", "proposed", "withdrawn"],
)
def test_a_successor_leaves_the_shares_in_force_until_it_has_decided(said: Proposal) -> None:
    found = LeaderSteps(1, ("a", "b"))
    assert found.inquire(), "the nodes are asked"
    assert found.busy, "they are asked again"
    found.take(at("a", 40, round=7), None)
    assert found.shares is None
    found.take(at("b", 40, round=7), said)
    assert found.shares == SLOW
    assert found.inquire() is False
    assert found.rebalance(SLOW) is False
    assert found.rebalance(()) is True


# The leader


def test_a_leader_tells_nodes_only_what_is_new() -> None:
    alone = LeaderSteps(7, ("a",))
    assert (alone.generation, alone.busy) == (7, False)
    assert alone.take(at("a", 8), None) is False
    assert alone.busy is False, "nobody asks"
    found = LeaderSteps(1, ("a", "b"))
    stray = Proposal(1, PROPOSED, 1, 9)
    assert found.take(at("c", 8, wants=SAVE), stray) is False, "it has no ranks"
    assert found.busy is False
    assert found.take(at("a", 8, wants=SAVE), None) is True
    assert found.take(at("a", 8, 2, wants=SAVE), None) is False
    assert found.busy is True
    quiet = LeaderSteps(1, ("a", "b"))
    quiet.take(at("a", 6), None)
    assert quiet.busy, "a node has not reported yet"
    quiet.take(at("b", 6), None)
    assert not quiet.busy


def test_a_leader_has_all_ranks_compute_the_same_product() -> None:
    found = LeaderSteps(1, ("a",))
    found.benchmark()
    assert found.busy
    found.take(at("a", 6), None)
    assert found.current is not None
    assert (found.current.wants, found.current.step) == (Want.BENCHMARK, 8)


def test_a_leader_that_asks_by_itself_asks_every_node_until_it_is_committed_or_cannot_be() -> None:
    found = LeaderSteps(1, ("a", "b"))
    found.hold()
    assert found.busy, "no node has reported yet"
    assert found.take(at("a", 8), None)
    assert found.take(at("b", 8), None)
    said = found.current
    assert said is not None
    assert (said.stage, said.wants, found.held) == (PROPOSED, SAVE | Want.HOLD, None)
    for serial, name in enumerate("ab", 2):
        found.take(at(name, 8, serial, answered=1), said)
    assert found.held == said.step
    found.hold()
    assert found.held is None, "another hold is asked for"
    found.release()
    assert found.held == said.step, "the ranks have not all left the round"
    found.take(at("a", 10, 8, round=3), found.current)
    found.take(at("b", 10, 9, round=3), found.current)
    assert found.current is not None
    assert (found.current.stage, found.current.number, found.held) == (WITHDRAWN, 2, None)

    voting = LeaderSteps(1, ("a",))
    voting.hold()
    voting.take(at("a", 8, round=0), None)
    assert (voting.outside, voting.held, voting.current) == (True, None, None)
    voting.release()
    assert not voting.busy


def test_ranks_that_are_released_keep_the_shares_with_which_they_were_held() -> None:
    found = LeaderSteps(1, ("a",))
    found.take(at("a", 8), None)
    found.rebalance(SLOW)
    found.take(at("a", 8, 2), None)
    found.hold()
    found.take(at("a", 9, 3, answered=1), None)
    assert (found.held, found.shares) == (10, SLOW)
    found.take(at("a", 10, 4, round=3), None)
    found.release()
    assert found.current is not None
    assert (found.current.stage, found.current.shares) == (WITHDRAWN, SLOW)


# A node

SAID = Proposal(2, PROPOSED, 1, 9, SAVE)
MINE = at(0, 8, answered=2)


@pytest.mark.parametrize(
    ("said", "ranks", "ended", "expected"),
    [
        (SAID, [MINE, at(1, 8, answered=1)], (), (0, False, False)),
        (SAID, [MINE, at(1, 8, answered=2)], (), (2, False, False)),
        (SAID, [MINE, at(1, 8, answered=2, passed=True)], (), (2, True, False)),
        (SAID, [MINE, at(1, 8, answered=1, passed=True)], (), (0, False, False)),
        (SAID, [MINE, at(1, 9, answered=1)], (), (2, True, False)),
        (replace(SAID, stage=COMMITTED), [MINE, at(1, 9)], (), (0, False, False)),
        (SAID, [MINE, at(1, 9, round=3)], (), (0, False, True)),
        (SAID, [MINE, at(1, 8, answered=2)], (1,), (2, False, True)),
        (None, [at(0, 9)], (), (0, False, False)),
    ],
    ids=[
        *("one has not", "all have", "one has passed", "one has passed another", "one has gone on unasked"),
        *("one has gone on from a commit", "one is in another round", "one has ended", "nothing told"),
    ],
)
def test_a_node_promises_when_all_its_ranks_have_and_has_passed_when_one_has(
    said: Proposal | None, ranks: list[Status], ended: tuple[int, ...], expected: tuple[int, bool, bool]
) -> None:
    found = status_of_node("a", 1, said, RanksSeen(1, tuple(ranks), ended))
    assert (found.answered, found.passed, found.apart) == expected
    assert (found.who, found.step) == ("a", max(one.step for one in ranks))


def test_an_agent_reports_at_once_what_concerns_an_agreement_and_nothing_else() -> None:
    agent, rank = NodeSteps("a"), at(0, 5)
    said = Proposal(1, PROPOSED, 1, 9, SAVE)

    def look(generation: int = 1, **changed: Any) -> bool:
        nonlocal rank
        rank = replace(rank, **changed)
        return agent.look(RanksSeen(generation, (rank,)))

    assert (agent.generation, agent.pending) == (0, False)
    assert look() is False
    assert look(step=6, round=3) is False, "nobody asks"
    assert look(round=1, wants=SAVE) is True
    status, before = agent.report()
    assert (status.who, status.serial, status.wants, before) == ("a", 1, SAVE, None)
    assert look(step=7) is False, "it is known"
    assert agent.pending
    assert (agent.hear(said), agent.hear(said)) == (True, False)
    assert look(answered=1) is True
    assert agent.report()[0].serial == 2
    assert look(wants=Want(0)) is True
    agent.report()
    assert agent.pending, "a decision is awaited"
    committed = replace(said, stage=COMMITTED)
    assert agent.hear(committed)
    assert not agent.pending
    assert look(step=8) is False
    assert look(round=3, step=9) is True, "it has acted"
    assert agent.report()[1] == committed
    assert look(round=4) is False, "nobody asks"
    assert look(generation=2, round=1, step=0) is False
    assert (agent.generation, agent.said) == (2, None)


# Messages between clocks that have nothing in common

SECONDS = {TIERS[0]: 0.0, TIERS[2]: 3.5}  # nothing was measured of the one between
HERE, THERE = 1000.0, 5.0


@pytest.mark.parametrize("stage", list(Stage))
def test_a_proposal_means_the_same_on_another_node(stage: Stage) -> None:
    said = Proposal(7, stage, 3, 40, SAVE | Want.HOLD, 1050.0, 1060.0, SECONDS, SLOW, ((0, 700),))
    sent = proposal_sent(said, HERE)
    assert sent is not None
    assert proposal_received(sent, THERE) == replace(said, ends=55.0, limit=65.0)


def test_a_proposal_without_an_end_has_none_on_any_clock() -> None:
    sent = proposal_sent(Proposal(1, PROPOSED, 1, 9), HERE)
    assert sent is not None
    got = proposal_received(sent, THERE)
    assert (got.ends, got.limit, got.seconds) == (math.inf, math.inf, {})
    assert proposal_sent(None, HERE) is None


def test_a_report_means_the_same_to_the_leader() -> None:
    status = Status("n1", 4, 3, 40, 7, True, Want.DUE, 1050.0, 1060.0, SECONDS, apart=True)
    sent = report_sent(status, Proposal(7, PROPOSED, 3, 40, ends=1070.0), (2, 5, "s"), HERE)
    assert (sent.term, sent.generation, sent.session) == (2, 5, "s")
    assert status_received("n1", sent, THERE) == replace(status, ends=55.0, limit=65.0)
    assert sent.said is not None
    assert proposal_received(sent.said, THERE).ends == 75.0


# Planted bugs


class ForgetsWhatWasTold(StepCoordinator):
    """Begins anew after a change of the leader."""

    def recall(self, said: Proposal) -> None:
        pass


class KnowsTheNewestOnly(StepCoordinator):
    """Knows the shares only where the newest proposal was about them."""

    def recall(self, said: Proposal) -> None:
        super().recall(replace(said, before=()))


class TakesOlderOrders(NodeSteps):
    """Takes what was told before what it has."""

    def hear(self, said: Proposal) -> bool:
        self.said = said
        return True


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


@pytest.mark.parametrize(
    "build",
    [
        Build(coordinator=ForgetsWhatWasTold),
        Build(coordinator=KnowsTheNewestOnly),
        Build(steps=TakesOlderOrders),
        Build(steps=NeverRepeats),
        Build(leader=NeverAsksAgain),
    ],
)
def test_a_planted_bug_is_found(build: Build, seed: int) -> None:
    for number in range(3_000):
        ops, shape = drawn(2 * (seed + number) + 1)
        world = Nodes(*shape, build)
        if play(world, ops) or misknown(world):
            return
    pytest.fail(f"{build} was not found")
