"""The product as a sign about a slow rank: compared with ranks of other nodes, with enough excess."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest

from outlast.stragglers.policy.benchmark import Benchmarks
from outlast.stragglers.policy.rows import BENCHMARK, Kind, Place, Row, State, Verdict

PLACES = {rank: Place(rank, f"n{rank // 2}") for rank in range(6)}
APART = {rank: Place(rank, f"n{rank}", "H100" if rank else "H200") for rank in range(3)}


def row(rank: int, seconds: float, section: str = BENCHMARK) -> Row:
    return Row(rank, section, Kind.COMPUTE, 7, 50, seconds, 0.0, 0.0, 0.0, 0.0)


def slow(rank: int = 3, slowdown: float = 2.0) -> Verdict:
    return Verdict(rank, "n1", Kind.COMPUTE, "", slowdown, 1.0, 1.0, 1.0, 5, "it is slow", State.ON)


def after(seconds: Mapping[int, float], places: Mapping[int, Place] = PLACES) -> Benchmarks:
    found = Benchmarks()
    found.take([row(rank, one) for rank, one in seconds.items()], places)
    return found


@pytest.mark.parametrize(
    ("seconds", "rank", "sign"),
    [
        ({0: 1.0, 1: 1.5, 2: 3.0, 3: 3.0, 4: 1.0, 5: 1.5}, 3, ("2.40", "4")),
        ({0: 1.0, 1: 1.5, 2: 3.0, 3: 3.0, 4: 1.0, 5: 1.5}, 2, ("2.40", "4")),  # the other one of its node
        ({0: 1.0, 1: 1.5, 2: 3.0, 3: 3.0, 4: 1.0, 5: 1.5}, 0, ()),
        ({3: 3.0, 4: 1.0, 5: 1.5}, 3, ("2.40", "2")),
        ({2: 1.0, 3: 3.0, 4: 1.5}, 3, ("2.00", "1")),
        ({3: 3.0, 2: 1.0}, 3, ()),  # both are on its node
        ({3: 3.0}, 3, ()),
        ({3: 3.0, 9: 1.0}, 3, ()),  # nothing is known of rank 9
        *(({3: bad, 0: 1.0}, 3, ()) for bad in (0.0, -1.0, math.nan, math.inf)),
        *(({3: 3.0, 0: bad}, 3, ()) for bad in (0.0, -1.0, math.nan, math.inf)),
        ({}, 3, ()),
    ],
)
def test_a_rank_is_compared_with_ranks_of_other_nodes(
    seconds: Mapping[int, float], rank: int, sign: tuple[str, ...]
) -> None:
    assert tuple(re.findall(r"\b[\d.]+\b", after(seconds).sign(slow(rank)))) == sign


@pytest.mark.parametrize(
    ("slowdown", "least"), [(2.0, 1.5), (1.5, 1.25), (1.2, 1.1), (1.11, 1.1), (math.nan, 1.1)]
)
def test_half_of_the_excess_is_enough_and_a_finding_at_least(slowdown: float, least: float) -> None:
    assert after({3: least * 1.001, 0: 1.0}).sign(slow(slowdown=slowdown))
    assert not after({3: least * 0.999, 0: 1.0}).sign(slow(slowdown=slowdown))
    assert after({3: 1.5, 0: 1.0}).sign(slow())


def test_another_device_or_section_is_no_peer() -> None:
    assert after({2: 3.0, 0: 1.0}, APART).sign(slow(rank=2)) == ""
    assert "2.00" in after({2: 3.0, 0: 1.0, 1: 1.5}, APART).sign(slow(rank=2))
    other = Benchmarks()
    other.take([row(3, 3.0, "forward"), row(0, 1.0, "forward")], PLACES)
    assert other.sign(slow()) == ""


def test_the_newest_times_count() -> None:
    found = after({3: 3.0, 0: 1.0})
    found.take([row(0, 1.0)], PLACES)
    assert found.sign(slow()), "nothing new of it"
    found.take([row(3, 1.0), row(0, 1.0)], PLACES)
    assert found.sign(slow()) == ""


def test_it_is_asked_for_now_and_then_and_not_for_ever() -> None:
    found = Benchmarks()
    assert [at for at in range(1000) if found.ask(float(at))] == [0, 60, 120]
