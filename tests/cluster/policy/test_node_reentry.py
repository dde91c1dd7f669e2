"""In-process restart over simulated nodes: a generation for a fault, living processes stay, and it ends."""

from __future__ import annotations

import random

import pytest

from tests.simulation.fencing import overlaps
from tests.simulation.fleet_reentry import ResilientFleet

SEEDS = 100
FIRST = [0, *(pytest.param(at, marks=pytest.mark.long) for at in range(25, SEEDS, 25))]


def _begun(count: int, spares: int = 0, seed: int = 0) -> ResilientFleet:
    fleet = ResilientFleet(count + spares, count, count, spares=spares, seed=seed)
    assert _made(fleet, 20, 30)
    return fleet


def _made(fleet: ResilientFleet, steps: int, within: float) -> bool:
    return fleet.run_until(lambda: fleet.steps.get(1, 0) > steps, within)


def _saves_again(fleet: ResilientFleet) -> bool:
    count = len(fleet.commits)
    return fleet.run_until(lambda: len(fleet.commits) > count + 2, 90)


def _goes_on(fleet: ResilientFleet, generation: int, within: float) -> bool:
    return fleet.run_until(lambda: fleet.steps.get(generation, 0) > 0, within)


@pytest.mark.parametrize("name", ["n0", "n1", "n2"])
def test_an_exception_on_any_node_costs_one_generation_and_no_process(name: str) -> None:
    fleet = _begun(3)
    fleet.raise_in(name)
    assert _goes_on(fleet, 2, 2.0), fleet.log
    fleet.run(fleet.now + 20)
    assert fleet.generation() == 2, fleet.log
    assert set(fleet.processes.values()) == {1}


@pytest.mark.parametrize("name", ["n0", "n1", "n2"])
def test_a_killed_rank_is_the_only_new_process(name: str) -> None:
    fleet = _begun(3)
    fleet.fail(name)
    assert _goes_on(fleet, 2, 2.0), fleet.log
    assert fleet.processes == {each: 1 + (each == name) for each in ("n0", "n1", "n2")}
    assert fleet.generation() == 2


def test_errors_of_several_nodes_at_once_make_one_generation() -> None:
    fleet = _begun(3)
    fleet.raise_in("n1")
    fleet.raise_in("n2")
    assert _goes_on(fleet, 2, 2.0), fleet.log
    assert fleet.generation() == 2
    assert set(fleet.processes.values()) == {1}


def test_a_rank_that_is_not_at_the_gate_in_time_is_replaced_and_its_node_is_not_lost_meanwhile() -> None:
    fleet = _begun(3)
    fleet.stick("n2")
    fleet.raise_in("n1")
    fleet.run(fleet.now + 8)  # longer than a node may be silent
    assert not any("is lost" in line for line in fleet.log)
    assert _goes_on(fleet, 2, 10.0), fleet.log
    assert fleet.processes == {"n0": 1, "n1": 1, "n2": 2}
    assert fleet.generation() == 2


def test_a_node_that_does_not_answer_costs_the_next_action_in_the_same_generation() -> None:
    fleet = _begun(3)
    fleet.deaf("n2")
    fleet.raise_in("n1")
    assert _goes_on(fleet, 2, 40.0), fleet.log
    assert fleet.processes == {"n0": 2, "n1": 2, "n2": 2}
    assert fleet.generation() == 2
    assert sum("restart-in-job after error on n1" in line for line in fleet.log) == 1


@pytest.mark.parametrize("power", [False, True])
def test_a_spare_takes_the_place_of_a_lost_node_and_the_others_stay(power: bool) -> None:
    fleet = _begun(2, spares=1)
    fleet.run(fleet.now + 2)
    lost = next(name for name in fleet.active() if name not in fleet.leaders())
    (stays,) = set(fleet.active()) - {lost}
    fleet.kill(lost, power=power)
    assert _goes_on(fleet, 2, 8.0), fleet.log
    assert lost not in fleet.active()
    assert fleet.processes[stays] == 1, fleet.log
    assert fleet.generation() == 2


def test_a_smaller_world_is_made_of_new_processes() -> None:
    fleet = ResilientFleet(3, 2, 3)
    assert _made(fleet, 20, 30)
    fleet.kill("n2")
    assert _goes_on(fleet, 2, 8.0), fleet.log
    assert (fleet.processes["n0"], fleet.processes["n1"]) == (2, 2)


def test_processes_are_new_ones_when_the_spare_turns_out_to_be_dead() -> None:
    fleet = ResilientFleet(4, 2, 3, spares=1)
    assert _made(fleet, 30, 30)
    spare = next(name for name in fleet.nodes if name not in fleet.active())
    lost = next(name for name in fleet.active() if name not in fleet.leaders())
    fleet.kill(spare, power=True)
    fleet.kill(lost)
    assert _goes_on(fleet, 2, 10.0), fleet.log
    assert len(fleet.active()) == 2
    assert [fleet.processes[name] for name in fleet.active()] == [2, 2], fleet.log
    assert any("replace-node after lost" in line for line in fleet.log)


def test_a_rank_that_raises_while_another_node_loses_its_power_is_no_reason_for_a_gap() -> None:
    fleet = _begun(3, spares=1)
    fleet.run(fleet.now + 2)
    first, *others = fleet.active()
    fleet.raise_in(others[0])
    fleet.kill(first, power=True)
    assert _goes_on(fleet, 2, 20.0), fleet.log
    places = sorted(fleet.place(name) for name in fleet.active())
    assert places == [0, 1, 2]
    kept = [name for name in others if fleet.processes[name] == 1]
    assert kept in ([], others), "some processes stay, others do not"


def test_a_leader_lost_while_ranks_go_to_the_gate_is_succeeded() -> None:
    fleet = _begun(2, spares=2)
    fleet.run(fleet.now + 2)
    (leader_state,) = fleet.leaders()
    other = next(name for name in fleet.active() if name != leader_state)
    fleet.raise_in(other)
    fleet.run(fleet.now + 0.05)
    fleet.kill(leader_state)
    newest = fleet.generation()
    assert fleet.run_until(lambda: fleet.steps.get(fleet.generation(), 0) > 0, 60), fleet.log
    assert fleet.generation() <= newest + 2, fleet.log


def _do(fleet: ResilientFleet, what: str, name: str) -> None:
    node = fleet.nodes[name]
    possible = {"start": node.cluster_node is None, "raise_in": node.started, "fail": node.started}
    if what == "heal":
        fleet.heal()
    elif what == "power":
        fleet.kill(name, power=True)
    elif possible.get(what, True):
        getattr(fleet, what)(name)


def _torment(fleet: ResilientFleet, dice: random.Random) -> None:
    """Let a few things happen to a job, at random moments; at the end everything is well again."""
    kinds = [
        "raise_in",
        "raise_in",
        "fail",
        "stick",
        "cut",
        "heal",
        "stop",
        "resume",
        "kill",
        "power",
        "start",
    ]
    for _ in range(dice.randint(2, 7)):
        fleet.run(fleet.now + dice.choice((0.05, dice.uniform(0.0, 0.3), dice.uniform(0.1, 6.0))))
        name, what = dice.choice(list(fleet.nodes)), dice.choice(kinds)
        fleet.log.append(f"{fleet.now - 1000:7.2f} {what} {name}")
        _do(fleet, what, name)
    fleet.heal()
    for name, node in fleet.nodes.items():
        if node.stopped:
            fleet.resume(name)
        if node.cluster_node is None or node.turned_away:
            fleet.start(name)


@pytest.mark.parametrize("first", FIRST)
def test_the_job_comes_back_whatever_happens_and_one_generation_commits(first: int) -> None:
    for seed in range(first, first + 25):
        fleet = ResilientFleet(4, 2, 3, spares=1, seed=seed)
        _made(fleet, 5, 30)
        _torment(fleet, random.Random(seed))
        assert _saves_again(fleet), f"seed {seed}\n" + "\n".join(fleet.log)
        assert not overlaps(fleet.commits), (seed, overlaps(fleet.commits))
