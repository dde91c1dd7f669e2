"""A new leader knows by which speeds the ranks divide micro-batches, and leaves them until it has decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outlast.agreement.policy.nodes import LeaderSteps
from outlast.agreement.policy.steps import Proposal, Stage, Status, StepCoordinator, Want
from tests.agreement.policy.test_nodes import Build, World, drawn, play

SLOW = ((2, 500),)
DIVIDED = Proposal(5, Stage.COMMITTED, 1, 9, Want.REBALANCE, slow=SLOW)
SAVED = Proposal(6, Stage.COMMITTED, 3, 20, Want.SAVE, slow=SLOW, before=SLOW)
PROPOSED = Proposal(7, Stage.PROPOSED, 5, 30, Want.REBALANCE, slow=(), before=SLOW)
WITHDRAWN = replace(PROPOSED, stage=Stage.WITHDRAWN)


def standing(who: str, step: int, **more: Any) -> Status:
    return Status(who, more.pop("serial", 1), more.pop("round", 1), step, **more)


@pytest.mark.parametrize("said", [DIVIDED, SAVED, PROPOSED, WITHDRAWN])
def test_a_successor_leaves_the_shares_in_force_until_it_has_decided(said: Proposal) -> None:
    found = LeaderSteps(1, ("a", "b"))
    assert found.inquire(), "the nodes are asked"
    assert found.busy, "they are asked again"
    found.take(standing("a", 40, round=7), None)
    assert found.shares is None
    found.take(standing("b", 40, round=7), said)
    assert found.shares == SLOW
    assert found.inquire() is False
    assert found.rebalance(SLOW) is False
    assert found.rebalance(()) is True


def test_ranks_that_are_let_go_on_keep_the_shares_with_which_they_were_held() -> None:
    found = LeaderSteps(1, ("a",))
    found.take(standing("a", 8), None)
    found.rebalance(SLOW)
    found.take(standing("a", 8, serial=2), None)
    found.hold()
    found.take(standing("a", 9, serial=3, answered=1), None)
    assert (found.held, found.shares) == (10, SLOW)
    found.take(standing("a", 10, serial=4, round=3), None)
    found.release()
    assert found.current is not None
    assert (found.current.stage, found.current.shares) == (Stage.WITHDRAWN, SLOW)


def misknown(world: World) -> str:
    """Return what a leader takes for the shares in force, where the ranks have others; "": nothing."""
    leads, rank = world.by_term[world.term].leads, world.ranks[0]
    if world.died or leads is None or leads.busy or leads.shares is None:
        return ""
    if leads.current is not None and any(one.round == leads.current.round for one in world.ranks):
        return ""  # it is about to be acted upon
    divided = [slow for _, wants, slow in rank.acts.values() if Want.REBALANCE in wants]
    found = divided[-1] if divided else ()
    return "" if leads.shares == found else f"shares are {found}, the leader knows {leads.shares}"


def test_whoever_leads_knows_the_shares_in_force(seed: int) -> None:
    known = 0
    for number in range(300):
        world, bad = play(*drawn(2 * (seed + number) + 1), Build())
        assert (bad, misknown(world)) == ([], ""), seed + number
        known += any(Want.REBALANCE in wants for rank in world.ranks for _, wants, _ in rank.acts.values())
    assert known > 100


class KnowsTheNewestOnly(StepCoordinator):
    """Knows the shares only where the newest proposal was about them."""

    def recall(self, said: Proposal) -> None:
        super().recall(replace(said, before=()))


class TakesAProposalForACommit(StepCoordinator):
    """Takes shares for those in force that were only proposed."""

    def recall(self, said: Proposal) -> None:
        super().recall(replace(said, before=said.slow))


@pytest.mark.parametrize("coordinator", [KnowsTheNewestOnly, TakesAProposalForACommit])
def test_a_successor_that_knows_other_shares_is_found(coordinator: type[StepCoordinator], seed: int) -> None:
    for number in range(3_000):
        world, _ = play(*drawn(2 * (seed + number) + 1), Build(coordinator=coordinator))
        if words := misknown(world):
            print(f"found after {number + 1} schedules: {words}")
            return
    pytest.fail(f"{coordinator.__name__} was not found")
