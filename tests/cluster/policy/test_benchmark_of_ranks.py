"""All ranks compute the same product after one step, and a node that is slow at it is replaced."""

from __future__ import annotations

from outlast.agreement.policy.steps import Want
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import BENCHMARK, Kind
from tests.simulation.fleet import Node
from tests.simulation.fleet_steps import AgreeingFleet

WINDOW = 4


class MeasuredFleet(AgreeingFleet):
    """Two nodes and a spare; one node is slow in every step, and in the product where it is sick.

    The plan of the simulated job has one rank for each node: what the first one of two reports is its.
    """

    stragglers = StragglerOptions(action="replace", window=WINDOW)
    sick = True
    slow_node = ""  # one that has ranks in the first generation

    def computed(self) -> list[int]:
        """Return the steps after which the ranks of the first generation have computed the product."""
        acts = [
            rank.acts.values() for (number, _), some in self.ranks.items() if number == 1 for rank in some
        ]
        return [step for one in acts for step, wants, _ in one if Want.BENCHMARK in wants]

    def _make_step(self, generation: int, group: list[Node]) -> None:
        before = self.steps.get(generation, 0)
        super()._make_step(generation, group)
        step = self.steps.get(generation, 0)
        if step == before or step % WINDOW:
            return
        self.slow_node = self.slow_node or max(node.name for node in group)
        for node in group:
            assert node.mine is not None
            assert node.cluster_node is not None
            slow = 2.0 if node.name == self.slow_node else 1.0
            times = [SectionTimes("step", Kind.COMPUTE, WINDOW, slow, slow, slow, WINDOW * slow, 0.0)]
            acts = self._of(node)[0].acts.values()
            if any(step - WINDOW <= at < step and Want.BENCHMARK in wants for at, wants, _ in acts):
                taken = slow if self.sick else 1.0
                times.append(SectionTimes(BENCHMARK, Kind.COMPUTE, 50, taken, taken, taken, 50 * taken, 0.0))
            window = RankWindow(node.mine.first_rank, step // WINDOW, tuple(times))
            self._obey(node, node.cluster_node.timed(TimingReport(generation, (window,)), self.now))


def test_a_node_that_is_slow_at_the_product_is_replaced_by_the_spare(seed: int) -> None:
    fleet = MeasuredFleet(3, 2, 2, spares=1, seed=seed)
    assert fleet.run_until(lambda: fleet.generation() > 1 and fleet.slow_node not in fleet.active(), 120), (
        fleet.log
    )
    computed = fleet.computed()
    assert (len(computed), len(set(computed))) == (4, 1), "all ranks, after the same step"
    assert fleet.apart() == []


def test_a_node_that_is_not_slow_at_the_product_stays(seed: int) -> None:
    fleet = MeasuredFleet(3, 2, 2, spares=1, seed=seed)
    fleet.sick = False
    assert fleet.run_until(lambda: len(set(fleet.computed())) == 3, 300), fleet.log
    fleet.run(fleet.now + 120)
    assert len(set(fleet.computed())) == 3, "it is not asked for any more"
    assert fleet.generation() == 1
    assert fleet.apart() == []
