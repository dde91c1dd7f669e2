"""Agents of several nodes that have knocked and are in no plan yet: what they say counts, and they wait."""

from __future__ import annotations

import pytest

from outlast.recovery.policy.job import StopRequested
from tests.simulation.fleet import Fleet


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
