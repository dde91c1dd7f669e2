"""The edges of the rerun: what nobody asked for, counts at their bounds, and what a person is told."""

from __future__ import annotations

import pytest

from outlast.rerun.policy.events import Found, Means, Remedy, Reran, Swapped, Verdict
from outlast.rerun.policy.machine import Rerun
from tests.rerun.policy.test_machine import DEVICES, Case

DAY = 86_400.0


def test_results_that_nobody_waits_for_change_nothing() -> None:
    case = Case()
    for event in (Reran((1,), ("0", "1", "2")), Swapped((1,))):
        assert case.machine.handle(event, 1.0).remedy is Remedy.GO_ON
    assert case.found(1, means=Means({1: 2})).remedy is Remedy.RERUN
    assert case.machine.handle(Swapped((1,)), 1.5).remedy is Remedy.GO_ON, "nobody swapped"
    assert case.reran(1).remedy is Remedy.SWAP
    assert case.reran(1).remedy is Remedy.GO_ON, "nobody reran"


def test_what_is_gone_on_with_asks_for_no_exit() -> None:
    case = Case()
    assert case.found(1).exit_code == 0
    assert case.clean().exit_code == 0


@pytest.mark.parametrize(("last", "remedy"), [(DAY + 0.5, Remedy.GO_ON), (DAY - 5.0, Remedy.STOP)])
def test_a_device_is_forgiven_so_often_in_a_day(last: float, remedy: Remedy) -> None:
    case = Case(Rerun(max_transients_per_day=2))
    case.found(1, step=1)
    assert case.clean().remedy is Remedy.GO_ON
    case.machine.handle(Found(2, "loss", "nan", (1,), ("0", "1 bad", "2")), 1.0 + last)
    assert case.clean(at=1.0 + last).remedy is remedy


def test_another_device_is_forgiven_for_itself() -> None:
    case = Case(Rerun(max_transients_per_day=2))
    case.found(1, step=1)
    case.clean()
    case.found(2, step=2)
    order = case.clean()
    assert (order.remedy, order.device) == (Remedy.GO_ON, DEVICES[2])


def test_a_witness_that_computes_something_else_convicts_nobody() -> None:
    case = Case()
    case.found(1)
    order = case.reran(others=(0,))
    assert (order.remedy, order.verdict, order.device) == (Remedy.GO_ON, Verdict.INCONCLUSIVE, "")
    assert "rank 0 computed something else" in order.reason
    assert "inconclusive" in str(case.machine.records()), "it is written down"


def test_ranks_that_differ_after_a_swap_go_back() -> None:
    case = Case()
    case.found(1, means=Means({1: 2}))
    case.reran(1)
    order = case.machine.handle(Swapped((), same_state=False), 3.0)
    assert (order.remedy, order.verdict) == (Remedy.ROLL_BACK, Verdict.INCONCLUSIVE)
