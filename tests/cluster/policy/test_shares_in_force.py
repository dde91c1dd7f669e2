"""Micro-batches stay divided when another node leads, until its own times say otherwise."""

from __future__ import annotations

import pytest

from outlast.agreement.policy.steps import Want
from outlast.parallelism.policy.shares import Slow, shares, speeds_of
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import LAST_MICRO_STEP, MICRO_STEP, Kind
from tests.simulation.fleet import Node
from tests.simulation.fleet_steps import AgreeingFleet
from tests.simulation.ranks import Rank

MICRO_BATCHES, WINDOW, SLOW_RANK = 21, 4, 2


class DividingFleet(AgreeingFleet):
    """Three nodes whose ranks divide micro-batches as they agree; one node is slow.

    The plan of the simulated job has one rank for each node: what the first one of two reports is its.
    """

    stragglers = StragglerOptions(action="rebalance", window=WINDOW)
    slowdown = 1.0

    def divided(self, generation: int = 1) -> list[Slow]:
        """Return the speeds by which the ranks of a generation have divided, one after another."""
        found = []
        for (one, _), ranks in self.ranks.items():
            acts = [slow for _, wants, slow in ranks[0].acts.values() if Want.REBALANCE in wants]
            found += [acts] if one == generation else []
        return max(found, key=len)

    def lead_by_another(self) -> None:
        """Cut the leader off for so long that another node leads, and not so long that it is lost."""
        (before,) = self.leaders()
        self.cut(before)
        assert self.run_until(lambda: set(self.leaders()) - {before}, 4.0)
        self.heal()
        assert self.run_until(lambda: len(self.leaders()) == 1, 4.0)
        assert self.leaders() != [before]
        assert self.generation() == 1

    def _make_step(self, generation: int, group: list[Node]) -> None:
        before = self.steps.get(generation, 0)
        super()._make_step(generation, group)
        step = self.steps.get(generation, 0)
        if step == before or step % WINDOW:
            return
        for node in group:
            assert node.mine is not None
            assert node.cluster_node is not None
            window = self._window(self._of(node)[0], node.mine.first_rank, step // WINDOW)
            self._obey(node, node.cluster_node.timed(TimingReport(generation, (window,)), self.now))

    def _window(self, rank: Rank, number: int, end: int) -> RankWindow:
        acts = [slow for _, wants, slow in rank.acts.values() if Want.REBALANCE in wants]
        speeds = speeds_of(len(self.active()), acts[-1] if acts else ())
        each = 0.01 * (self.slowdown if number == SLOW_RANK else 1.0)
        before_last = shares(MICRO_BATCHES, 1, speeds)[number] - 1
        counts = {MICRO_STEP: before_last * WINDOW, LAST_MICRO_STEP: WINDOW}
        times = [
            SectionTimes(name, Kind.COMPUTE, count, each, each, each, count * each, 0.0)
            for name, count in counts.items()
        ]
        return RankWindow(number, end, tuple(times))


def rebalanced(seed: int) -> DividingFleet:
    fleet = DividingFleet(3, 2, 3, seed=seed)
    fleet.slowdown = 2.0
    assert fleet.run_until(lambda: fleet.ranks and fleet.divided(), 60)
    assert fleet.divided() == [((SLOW_RANK, 500),)]
    return fleet


@pytest.mark.parametrize("saves", [False, True])
def test_a_new_leader_leaves_the_shares_of_a_rank_that_is_still_slow(seed: int, saves: bool) -> None:
    fleet = rebalanced(seed)
    if saves:  # then the newest that was agreed on says nothing about shares
        fleet.want(fleet.active()[0], Want.SAVE)
        assert fleet.run_until(lambda: not fleet.wanted(), 10)
    fleet.lead_by_another()
    fleet.run(fleet.now + 60)
    assert fleet.divided() == [((SLOW_RANK, 500),)]
    assert fleet.apart() == []


@pytest.mark.parametrize("saves", [False, True])
def test_a_new_leader_gives_even_shares_back_to_a_rank_that_is_fast_again(seed: int, saves: bool) -> None:
    fleet = rebalanced(seed)
    if saves:
        fleet.want(fleet.active()[0], Want.SAVE)
        assert fleet.run_until(lambda: not fleet.wanted(), 10)
    fleet.slowdown = 1.0
    fleet.lead_by_another()
    assert fleet.run_until(lambda: fleet.divided()[-1] == (), 60)
    assert fleet.apart() == []
