"""Every node hears which step is saved, not only the one whose rank has saved it."""

from __future__ import annotations

from typing import Any

from outlast.cluster.policy.events import Order, StepSaved
from tests.simulation.fleet import Fleet, Node


class ListeningFleet(Fleet):
    """A fleet that notes what each node hears of saves."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.heard: dict[str, list[int]] = {}
        super().__init__(*args, **more)

    def _carry_out(self, node: Node, order: Order) -> None:
        if isinstance(order, StepSaved):
            self.heard.setdefault(node.name, []).append(order.step)
        super()._carry_out(node, order)

    def all_know(self) -> bool:
        """Say whether every node that lives has heard of the newest save."""
        newest = self.commits[-1].step if self.commits else -1
        living = [one for one in self.nodes.values() if one.cluster_node is not None]
        return newest > 0 and all(self.heard.get(one.name, [-1])[-1] == newest for one in living)


def test_all_nodes_hear_of_each_save_once_and_spares_too(seed: int) -> None:
    fleet = ListeningFleet(5, 2, 3, spares=2, seed=seed)
    assert fleet.run_until(lambda: len(fleet.commits) > 3 and fleet.all_know(), 60)
    assert fleet.heard.keys() == fleet.nodes.keys()
    for steps in fleet.heard.values():
        assert steps == sorted(set(steps))


def test_a_successor_of_the_leader_tells_what_was_saved_before(seed: int) -> None:
    fleet = ListeningFleet(4, 2, 3, spares=1, seed=seed)
    assert fleet.run_until(lambda: len(fleet.commits) > 1 and fleet.all_know(), 60)
    (leader,) = fleet.leaders()
    fleet.kill(leader, power=True)
    fleet.run(fleet.now + 1)
    fleet.start("n0" if leader == "n0" else leader)
    count = len(fleet.commits)
    assert fleet.run_until(lambda: len(fleet.commits) > count and fleet.all_know(), 90), fleet.log
