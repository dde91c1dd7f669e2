"""Nodes that are paused, busy or cut off for a while: who is lost, who comes back, and who may commit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outlast.cluster.policy.membership import BUSY_PATIENCE
from tests.simulation.fencing import overlaps
from tests.simulation.fleet import Fleet, Halt


def _begun(count: int, **options: int) -> Fleet:
    fleet = Fleet(count, count, count, **options)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    fleet.run(fleet.now + 2)
    return fleet


def _one(fleet: Fleet, who: str) -> str:
    (leader,) = fleet.leaders()
    return leader if who == "the leader" else next(name for name in fleet.active() if name != leader)


def _trains(fleet: Fleet, nodes: int) -> bool:
    """Let every node have ranks, and the job make steps."""
    before = dict(fleet.steps)
    newest = fleet.generation
    return fleet.run_until(
        lambda: len(fleet.active()) == nodes and fleet.steps.get(newest(), 0) > before.get(newest(), 0) + 5,
        20,
    )


def _lost(fleet: Fleet) -> list[str]:
    return [line for line in fleet.log if " is lost: " in line]


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("who", ["a node", "the leader"])
@pytest.mark.parametrize(("how", "seconds"), [("stop", 7), ("stop", 12), ("cut", 4), ("cut", 10)])
def test_a_node_that_was_lost_and_lives_is_taken_back_where_the_job_needs_it(
    nodes: int, who: str, how: str, seconds: float
) -> None:
    fleet = _begun(nodes)
    name = _one(fleet, who)
    (fleet.stop if how == "stop" else fleet.cut)(name)
    fleet.run(fleet.now + seconds)
    if how == "stop":
        fleet.resume(name)
    fleet.heal()
    assert _trains(fleet, nodes), "\n".join(fleet.log)
    assert fleet.generation() <= 2, "\n".join(fleet.log)
    assert not overlaps(fleet.commits)
    assert len(fleet.lived) == len(_lost(fleet)), "a loss of a node that lives is withdrawn"


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("who", ["a node", "the leader"])
@pytest.mark.parametrize("during", ["training", "a restart"])
def test_a_node_whose_agent_is_busy_is_not_lost(who: str, during: str, spares: int) -> None:
    fleet = Fleet(3 + spares, 3, 3, spares=spares)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    name = _one(fleet, who)
    fleet.halt(name, Halt.BUSY)
    if during == "a restart":
        fleet.run(fleet.now + 0.2)
        fleet.fail(next(one for one in fleet.active() if one != name))
    fleet.run(fleet.now + 20)
    assert not _lost(fleet)
    fleet.go_on(name)
    assert _trains(fleet, 3), "\n".join(fleet.log)
    assert name in fleet.active()
    assert not _lost(fleet), "\n".join(fleet.log)
    assert not overlaps(fleet.commits)


def test_a_node_that_is_busy_for_too_long_is_lost() -> None:
    fleet = Fleet(3, 2, 2, spares=1)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    name = _one(fleet, "a node")
    fleet.halt(name, Halt.BUSY)
    fleet.run(fleet.now + BUSY_PATIENCE - 2)
    assert not _lost(fleet)
    assert fleet.run_until(lambda: len(_lost(fleet)) == 1, 4)
    assert fleet.run_until(lambda: len([one for one in fleet.active() if one != name]) == 2, 5)


def test_a_node_whose_channel_answers_has_no_right_to_commit_by_that() -> None:
    fleet = _begun(3)
    name = _one(fleet, "a node")
    fleet.halt(name, Halt.BUSY)
    fleet.run(fleet.now + 4)
    assert fleet.nodes[name].right[1] < fleet.now


@pytest.mark.parametrize("who", ["a node", "the leader"])
@pytest.mark.parametrize("seed", range(4))
def test_a_connection_that_breaks_between_agents_that_live_changes_nothing(who: str, seed: int) -> None:
    fleet = _begun(2, seed=seed)
    for wait in (0.0, 0.13, 0.29, 0.41):
        fleet.run(fleet.now + 1 + wait)
        fleet.reset("n0", "n1") if who == "a node" else fleet.reset("n1", "n0")
    fleet.run(fleet.now + 3)
    assert fleet.generation() == 1
    assert not _lost(fleet)


def _fails() -> tuple[Fleet, str]:
    """Return a job in which a fault is about to make another generation, and a node with ranks."""
    fleet = Fleet(4, 2, 3, spares=1)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    name = _one(fleet, "a node")
    fleet.fail(next(one for one in fleet.active() if one != name))
    return fleet, name


def _grows() -> tuple[Fleet, str]:
    """Return a job of one node that is about to grow, and that node: it leads, and has the only vote."""
    fleet = Fleet(2, 1, 2)
    fleet.kill("n1")
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 5, 60)
    fleet.start("n1")
    return fleet, "n0"


@pytest.mark.parametrize("begin", [_fails, _grows])
def test_an_agent_that_is_stopped_as_it_moves_on_leaves_no_two_generations_that_may_commit(
    begin: Callable[[], tuple[Fleet, str]],
) -> None:
    """It is stopped after the message by which others count on that, and before it does anything else."""
    fleet, name = begin()
    fleet.stop_after_moving_on(name)
    assert fleet.run_until(lambda: fleet.nodes[name].agent is Halt.STOPPED, 20, turn=0.01)
    for _ in range(500):
        fleet.run(fleet.now + 0.02)
        assert len(fleet.may_commit()) <= 1, "\n".join(fleet.log)
    assert fleet.generation() > 1


@pytest.mark.parametrize("spares", [1, 2])
@pytest.mark.parametrize("who", ["a node", "the leader"])
@pytest.mark.parametrize("how", ["stop", "cut"])
def test_an_agent_that_comes_back_after_the_end_learns_how_the_job_ended(
    who: str, how: str, spares: int
) -> None:
    fleet = Fleet(3 + spares, 3, 3, spares=spares, steps=150)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    name = _one(fleet, who)
    (fleet.stop if how == "stop" else fleet.cut)(name)
    others = [node for node in fleet.nodes.values() if node.name != name]

    def all_ended() -> bool:
        fleet.leave()
        return all(node.cluster_node is None for node in others)

    assert fleet.run_until(all_ended, 90), "\n".join(fleet.log)
    (fleet.resume if how == "stop" else fleet.cut)(name)
    assert fleet.run_until(lambda: fleet.nodes[name].ending is not None, 12), "\n".join(fleet.log)
    ended = {node.ending.exit_code for node in fleet.nodes.values() if node.ending is not None}
    assert ended == {0}
