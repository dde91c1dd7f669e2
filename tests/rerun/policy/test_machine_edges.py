"""Unexpected events, counts at their bounds, and the reasons of the rerun machine."""

from __future__ import annotations

import pytest

from outlast.config import RerunOptions
from outlast.rerun.policy.events import Found, Loaded, Means, Remedy, Reran, Swapped, Verdict
from tests.rerun.policy.test_machine import DEVICES, Case

DAY = 86_400.0


def test_unexpected_results_are_ignored() -> None:
    case = Case()
    for event in (Reran((1,), ("0", "1", "2")), Swapped((1,))):
        assert case.machine.handle(event, 1.0).remedy is Remedy.CONTINUE
    assert case.found(1, means=Means({1: 2})).remedy is Remedy.RERUN
    assert case.machine.handle(Swapped((1,)), 1.5).remedy is Remedy.CONTINUE, "nobody swapped"
    assert case.reran(1).remedy is Remedy.SWAP
    assert case.reran(1).remedy is Remedy.CONTINUE, "nobody reran"


def test_continuing_has_no_exit_code() -> None:
    case = Case()
    assert case.found(1).exit_code == 0
    assert case.clean().exit_code == 0


@pytest.mark.parametrize(("last", "remedy"), [(DAY + 0.5, Remedy.CONTINUE), (DAY - 5.0, Remedy.STOP)])
def test_transient_faults_of_a_device_are_counted_for_a_day(last: float, remedy: Remedy) -> None:
    case = Case(RerunOptions(max_transients_per_day=2))
    case.found(1, step=1)
    assert case.clean().remedy is Remedy.CONTINUE
    case.machine.handle(Found(2, "loss", "nan", (1,), ("0", "1 bad", "2")), 1.0 + last)
    assert case.clean(at=1.0 + last).remedy is remedy


def test_transient_faults_are_counted_for_each_device() -> None:
    case = Case(RerunOptions(max_transients_per_day=2))
    case.found(1, step=1)
    case.clean()
    case.found(2, step=2)
    order = case.clean()
    assert (order.remedy, order.device) == (Remedy.CONTINUE, DEVICES[2])


def test_a_witness_that_computes_something_else_convicts_nobody() -> None:
    case = Case()
    case.found(1)
    order = case.reran(others=(0,))
    assert (order.remedy, order.verdict, order.device) == (Remedy.CONTINUE, Verdict.INCONCLUSIVE, "")
    assert "the result of rank 0 changed" in order.reason
    assert "inconclusive" in str(case.machine.records()), "it is written down"


def test_ranks_that_differ_after_a_swap_go_back() -> None:
    case = Case()
    case.found(1, means=Means({1: 2}))
    case.reran(1)
    order = case.machine.handle(Swapped((), same_state=False), 3.0)
    assert (order.remedy, order.verdict) == (Remedy.ROLL_BACK, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize("peer", [3, -1])
def test_a_peer_that_is_not_there_swaps_nothing(peer: int) -> None:
    case = Case()
    case.found(1, means=Means({1: peer}))
    order = case.reran(1)
    assert (order.remedy, order.verdict, order.pairs) == (Remedy.STOP, Verdict.INCONCLUSIVE, ())


def test_a_device_with_too_many_transient_faults_is_convicted_by_their_number() -> None:
    case = Case(RerunOptions(max_transients_per_day=3))
    for step in (1, 2):
        case.found(1, step=step)
        assert case.clean().remedy is Remedy.CONTINUE
    case.found(1, step=3)
    order = case.clean()
    assert (order.remedy, order.verdict) == (Remedy.STOP, Verdict.PERSISTENT)
    assert order.reason == "3 transient incidents on GPU-b in 24 h; there is no replacement"


@pytest.mark.parametrize(("megatron", "codes"), [(True, (0, 16, 17)), (False, (0, 1, 93))])
def test_a_launcher_that_knows_megatron_is_told_by_its_exit_codes(
    megatron: bool, codes: tuple[int, ...]
) -> None:
    options = RerunOptions(megatron_exit_codes=megatron)
    case = Case(options, Loaded(0, "local", "p"))
    rerun = case.found(1, means=Means(another_copy=True))
    restart = case.reran(1)
    case.restarted(loaded=Loaded(0, "local", "q"))
    stop = case.found(1)
    orders = (rerun, restart, stop)
    assert [one.remedy for one in orders] == [Remedy.RERUN, Remedy.LOAD_OLDER, Remedy.STOP]
    assert tuple(one.exit_code for one in orders) == codes


@pytest.mark.parametrize("same", [True, False])
def test_a_finding_after_a_restart_says_whether_another_copy_was_loaded(same: bool) -> None:
    case = Case(loaded=Loaded(0, "local", "p"))
    case.found(1, means=Means(another_copy=True))
    case.reran(1)
    case.restarted(loaded=Loaded(0, "local", "p" if same else "q"))
    order = case.found(1)
    where = "local/p was loaded again instead of another copy"
    assert case.results[1] == f"load another copy: loss is nan in step 5 again{f'; {where}' if same else ''}"
    assert order.reason == (where if same else "no other device and no other copy is available")


def test_an_incident_that_was_over_is_not_said_to_have_loaded_a_copy() -> None:
    case = Case(loaded=Loaded(0, "local", "p"))
    case.found(1)
    case.clean()
    order = case.found(1)
    assert order.reason == "no other device and no other copy is available"
