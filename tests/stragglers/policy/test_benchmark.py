"""What the product says of a slow rank: compared with ranks of other nodes, and only with enough excess."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from outlast.stragglers.policy.benchmark import Benchmarks
from outlast.stragglers.policy.rows import BENCHMARK, Kind, Place, Row, State, Verdict

PLACES = {rank: Place(rank, f"n{rank // 2}") for rank in range(6)}


def row(rank: int, seconds: float, section: str = BENCHMARK) -> Row:
    return Row(rank, section, Kind.COMPUTE, 7, 50, seconds, 0.0, 0.0, 0.0, 0.0)


def slow(rank: int = 3, slowdown: float = 2.0) -> Verdict:
    return Verdict(rank, "n1", Kind.COMPUTE, "", slowdown, 1.0, 1.0, 1.0, 5, "it is slow", State.ON)


def after(seconds: Mapping[int, float], places: Mapping[int, Place] = PLACES) -> Benchmarks:
    found = Benchmarks()
    found.take([row(rank, one) for rank, one in seconds.items()], places)
    return found


def test_ranks_of_other_nodes_are_what_a_rank_is_compared_with() -> None:
    found = after({0: 1.0, 1: 1.5, 2: 3.0, 3: 3.0, 4: 1.0, 5: 1.5})
    assert found.sign(slow()) == "it takes 2.40 times as long as 4 ranks of other nodes for the same product"
    assert found.sign(slow(rank=2)) == found.sign(slow()), "the other rank of its node is slow as well"
    assert found.sign(slow(rank=0)) == ""
    found = after({3: 3.0, 4: 1.0, 5: 1.5})
    assert found.sign(slow()) == "it takes 2.40 times as long as 2 ranks of other nodes for the same product"
    found = after({2: 1.0, 3: 3.0, 4: 1.5})
    assert found.sign(slow()) == "it takes 2.00 times as long as 1 rank of other nodes for the same product"


@pytest.mark.parametrize(
    ("slowdown", "least"), [(2.0, 1.5), (1.5, 1.25), (1.2, 1.1), (1.11, 1.1), (math.nan, 1.1)]
)
def test_half_of_the_excess_is_enough_and_a_finding_at_least(slowdown: float, least: float) -> None:
    assert after({3: least * 1.001, 0: 1.0}).sign(slow(slowdown=slowdown))
    assert after({3: 1.5, 0: 1.0}).sign(slow(slowdown=2.0))
    assert not after({3: least * 0.999, 0: 1.0}).sign(slow(slowdown=slowdown))


def test_without_times_nothing_is_said() -> None:
    assert Benchmarks().sign(slow()) == ""
    assert after({3: 3.0, 2: 1.0}).sign(slow()) == "", "both ranks are on its node"
    assert after({3: 3.0}).sign(slow()) == ""
    for bad in (0.0, -1.0, math.nan, math.inf):
        assert after({3: bad, 0: 1.0}).sign(slow()) == ""
        assert after({3: 3.0, 0: bad}).sign(slow()) == ""
    other = Benchmarks()
    other.take([row(3, 3.0, "forward"), row(0, 1.0, "forward")], PLACES)
    assert other.sign(slow()) == ""
    other.take([row(3, 3.0), row(9, 1.0)], PLACES)
    assert other.sign(slow()) == "", "nothing is known of rank 9"


def test_another_device_is_no_peer() -> None:
    places = {rank: Place(rank, f"n{rank}", "H100" if rank else "H200") for rank in range(3)}
    assert after({2: 3.0, 0: 1.0}, places).sign(slow(rank=2)) == ""
    assert "2.00 times as long as 1 rank" in after({2: 3.0, 0: 1.0, 1: 1.5}, places).sign(slow(rank=2))


def test_the_newest_times_count() -> None:
    found = after({3: 3.0, 0: 1.0})
    found.take([row(0, 1.0)], PLACES)
    assert found.sign(slow()), "nothing new was said of it"
    found.take([row(3, 1.0), row(0, 1.0)], PLACES)
    assert found.sign(slow()) == ""


def test_it_is_asked_for_now_and_then_and_not_for_ever() -> None:
    found, asked = Benchmarks(), []
    for at in range(1000):
        asked += [at] if found.ask(float(at)) else []
    assert asked == [0, 60, 120]
