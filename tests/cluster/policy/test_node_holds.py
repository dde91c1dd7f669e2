"""A planned replacement costs no step: the ranks save, and wait for the generation that follows."""

from __future__ import annotations

from outlast.agreement.policy.steps import Want
from outlast.recovery.policy.events import Fault, FaultKind
from tests.simulation.fleet_steps import AgreeingFleet


def _begun(seed: int, spares: int = 1) -> AgreeingFleet:
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
        fleet = _begun(number)
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
    fleet = _begun(seed, spares=0)
    _fails(fleet, fleet.active()[1])
    done = fleet.steps[1]
    assert fleet.run_until(lambda: fleet.steps[1] > done + 20, 30)
    assert (fleet.generation(), fleet.acts()) == (1, 0)


def test_a_hold_is_over_when_the_last_spare_has_gone_meanwhile(seed: int) -> None:
    fleet = _begun(seed)
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
