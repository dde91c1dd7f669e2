"""Agents of a simulated fleet that are told to stop unheard, hear of saves, and hold ranks for a spare."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.agreement.policy.steps import Want
from outlast.cluster.policy.events import Order, StepSaved
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import StopRequested
from tests.simulation.fleet import Fleet, Node
from tests.simulation.fleet_steps import AgreeingFleet


def _told_to_stop_unheard(fleet: Fleet, name: str, *ends: str) -> None:
    """Tell an agent to stop which has knocked and heard nothing yet; the job ends everywhere by it."""
    cluster_node = fleet.nodes[name].cluster_node
    assert cluster_node is not None
    assert cluster_node.leader == ""
    fleet.tell(name, StopRequested(15))
    here = [fleet.nodes[one] for one in ends or fleet.nodes if fleet.nodes[one].cluster_node is not None]
    assert fleet.run_until(lambda: all(node.ending is not None for node in here), 5), "\n".join(fleet.log)
    assert {node.ending.exit_code for node in here if node.ending} == {143}


@pytest.mark.parametrize("running", [False, True])
def test_a_node_that_is_told_to_stop_before_it_is_answered_ends_the_job(running: bool) -> None:
    fleet = Fleet(3, 2, 3) if running else Fleet(3, 4, 4)
    fleet.kill("n2")
    fleet.run(fleet.now + 40)
    assert bool(fleet.active()) is running
    fleet.start("n2")
    _told_to_stop_unheard(fleet, "n2")


def _importing(seconds: float) -> Fleet:
    """Return two nodes that have met, and hear nothing of each other before both have imported torch."""
    fleet = Fleet(2, 2, 2)
    for name in ("n0", "n1"):
        fleet.kill(name)
    for name in ("n0", "n1"):
        fleet.start(name, imports=seconds)
    fleet.run(fleet.now + 10)
    assert any("generation 1: n0, n1" in line for line in fleet.log), fleet.log
    return fleet


def test_a_node_that_is_told_to_stop_while_the_ranks_of_its_leader_import_torch_ends_the_job() -> None:
    _told_to_stop_unheard(_importing(60.0), "n1")


def test_a_node_that_is_taken_in_waits_for_the_import_of_torch_beyond_the_join_timeout() -> None:
    fleet = _importing(500.0)
    cluster_node = fleet.nodes["n1"].cluster_node
    assert fleet.run_until(lambda: len(fleet.active()) == 2, 600), "\n".join(fleet.log)
    assert fleet.nodes["n1"].cluster_node is cluster_node, "it gave up, and began anew"


def test_a_founder_that_is_told_to_stop_before_it_coordinates_ends() -> None:
    fleet = Fleet(2, 2, 2)
    fleet.kill("n0")
    fleet.start("n0")  # as it is when an agent begins anew that was told so before
    cluster_node = fleet.nodes["n0"].cluster_node
    assert cluster_node is not None
    assert cluster_node.leader_state is None
    _told_to_stop_unheard(fleet, "n0", "n0")


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


def _steps(seed: int, spares: int = 1) -> AgreeingFleet:
    fleet = AgreeingFleet(3 + spares, 2, 3, spares=spares, seed=seed)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 15, 30)
    return fleet


def _fails(fleet: AgreeingFleet, name: str) -> None:
    words = f"{name} is failing"
    fleet.tell(name, Fault(FaultKind.FAILING, name, -1, 1, fleet.steps[1], f"{words}: XID 79", words))


def _replaced(fleet: AgreeingFleet) -> bool:
    return fleet.steps.get(2, 0) > 0 and len(fleet.active()) == 3


def test_no_step_is_done_twice_when_a_failing_node_is_replaced(seed: int) -> None:
    for number in range(seed, seed + 20):
        fleet = _steps(number)
        name = fleet.active()[number % 3]
        _fails(fleet, name)
        assert fleet.run_until(lambda fleet=fleet: _replaced(fleet), 30), fleet.log
        assert fleet.generation() == 2
        assert name not in fleet.active()
        last = fleet.steps[1]
        assert fleet.commits[-1].step == last, (fleet.commits, fleet.log)
        held = [rank.acts[1] for (one, _), ranks in fleet.ranks.items() if one == 1 for rank in ranks]
        assert held == [(last, Want.SAVE | Want.HOLD, ())] * 6
        assert fleet.apart() == []


def test_without_a_spare_nobody_is_held(seed: int) -> None:
    fleet = _steps(seed, spares=0)
    _fails(fleet, fleet.active()[1])
    done = fleet.steps[1]
    assert fleet.run_until(lambda: fleet.steps[1] > done + 20, 30)
    assert (fleet.generation(), fleet.acts()) == (1, 0)


def test_a_hold_is_over_when_the_last_spare_has_gone_meanwhile(seed: int) -> None:
    fleet = _steps(seed)
    fleet.saves = False
    (spare,) = set(fleet.nodes) - set(fleet.active())
    _fails(fleet, next(one for one in fleet.active() if one not in fleet.leaders()))
    assert fleet.run_until(lambda: fleet.acts() == 6, 10), fleet.log
    fleet.kill(spare)
    fleet.run(fleet.now + 10)
    held = fleet.steps[1]
    first = min(fleet.active(), key=fleet.place)
    fleet._saves.append((fleet.now, fleet.nodes[first].id, 1, held))
    assert fleet.run_until(lambda: fleet.steps[1] > held + 5, 10), fleet.log
    assert fleet.generation() == 1
