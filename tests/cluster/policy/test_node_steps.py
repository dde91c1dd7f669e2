"""Ranks of a simulated job act after the same step, through faults and changes of the leader."""

from __future__ import annotations

import random

import pytest

from outlast.agreement.policy.steps import Proposal, StepCoordinator, Want
from tests.simulation.fleet_steps import AgreeingFleet

SEEDS = 40


def _begun(seed: int) -> AgreeingFleet:
    """Return a job of three nodes with ranks and a spare, all of which vote but one."""
    fleet = AgreeingFleet(4, 2, 3, spares=1, seed=seed)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 5, 30)
    return fleet


def _incident(number: int) -> AgreeingFleet:
    """Return a job that has had a fault in the middle of an agreement, and is well again."""
    draw = random.Random(number)
    fleet = _begun(number)
    fleet.want(draw.choice(fleet.active()), draw.choice([one for one in Want if one is not Want.REBALANCE]))
    fleet.run_until(lambda: False, draw.choice((0.05, 0.1, 0.15, 0.2, 0.3)))
    names = (*fleet.leaders(), draw.choice(fleet.active()))
    name = names[number % 3 > 1]
    what = draw.choice(("kill", "cut", "cut", "stop", "fail"))
    if what == "cut":
        fleet.cut(name)
    else:
        getattr(fleet, what)(name)
    fleet.run(fleet.now + draw.uniform(0.2, 4.9))
    fleet.heal()
    if what == "stop":
        fleet.resume(name)
    if what == "kill":
        fleet.start(name)
    fleet.run(fleet.now + 20)  # whoever is back has joined again

    assert _is_well(fleet), fleet.log
    return fleet


def _half_told(number: int) -> AgreeingFleet:
    """Return a job whose leader was cut off when some nodes had been told its commit, and others not."""
    draw = random.Random(number)
    fleet = _begun(number)
    fleet.want(draw.choice(fleet.active()), Want.SAVE)
    assert fleet.run_until(lambda: fleet.half_committed, 5, turn=0.001), fleet.log
    fleet.cut(*fleet.leaders())
    fleet.run(fleet.now + draw.uniform(0.2, 4.9))
    fleet.heal()
    fleet.run(fleet.now + 20)
    return fleet


def _is_well(fleet: AgreeingFleet) -> bool:
    """Let a job go on until its ranks train and nobody waits; return whether it came to that."""

    def well() -> bool:
        return fleet.steps.get(fleet.generation(), 0) > 0 and len(fleet.active()) > 1 and not fleet.wanted()

    return fleet.run_until(well, 60)


def test_an_agreement_is_safe_and_ends_through_faults_and_other_leaders(seed: int) -> None:
    acts = leaders = 0
    for number in range(SEEDS):
        fleet = _incident(seed + number)
        assert fleet.apart() == [], (seed + number, fleet.log)
        fleet.want(fleet.active()[0], Want.STOP)
        before = fleet.acts()
        assert fleet.run_until(lambda fleet=fleet: not fleet.wanted(), 20), (seed + number, fleet.log)
        assert fleet.acts() > before
        assert fleet.apart() == []
        acts += before
        leaders += len(fleet.led) - 1
    assert acts > 0
    assert leaders > 5, "some agreements had another leader"


def test_a_request_is_acted_upon_by_all_ranks_of_all_nodes(seed: int) -> None:
    fleet = _begun(seed)
    fleet.want(fleet.active()[1], Want.SAVE)
    assert fleet.run_until(lambda: not fleet.wanted(), 20)
    assert fleet.acts() == 6
    assert fleet.generation() == 1


def test_the_successor_of_a_leader_that_told_half_of_the_nodes_goes_on_with_the_same_step(seed: int) -> None:
    leaders = 0
    for number in range(SEEDS):
        fleet = _half_told(seed + number)
        assert _is_well(fleet), (seed + number, fleet.log)
        assert fleet.apart() == [], (seed + number, fleet.log)
        leaders += len(fleet.led) - 1
    assert leaders > 0, "some agreements had another leader"


def test_a_successor_that_forgets_what_was_said_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation above has its chance to fail."""

    def forget(self: StepCoordinator, said: Proposal) -> None:
        del self, said

    monkeypatch.setattr(StepCoordinator, "recall", forget)
    fleets = (_half_told(seed + number) for number in range(SEEDS))
    assert any(fleet.apart() or not _is_well(fleet) for fleet in fleets)
