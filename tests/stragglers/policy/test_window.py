"""The rows of a window, arranged by section and group: what is compared, what is unknown, who waits."""

from __future__ import annotations

import math

import pytest

from outlast.stragglers.policy.rows import Kind, Place, Row
from outlast.stragglers.policy.window import ARRIVAL, Cell, Peers, Window, group_places


def row(rank: int, total: float, waiting: float = 0.0, count: int = 2, kind: Kind = Kind.COMPUTE) -> Row:
    return Row(rank, "s", kind, 7, count, 0.0, 0.0, 0.0, total, waiting)


def cell(rows: list[Row], ranks: int = 4) -> tuple[Peers, Cell]:
    """Return a section of ranks 0 and up."""
    peers = Peers(range(ranks), 0.0)
    found = peers.cell("s", {one.rank: one for one in rows})
    assert found is not None
    return peers, found


def test_a_rank_is_busy_when_it_does_not_wait() -> None:
    peers, found = cell([row(0, 4.0), row(1, 4.0, 1.0), row(2, 4.0, 4.0, 5), row(3, 6.0, 0.0, 1)])
    assert found.busy == {0: 2.0, 1: 1.5, 2: 0.0, 3: 6.0}
    assert [found.count(rank) for rank in (0, 2, 9)] == [2, 5, 1]
    assert (peers.waiting, peers.waits, peers.duration) == ([0.0, 1.0, 4.0, 0.0], True, 4.0)
    assert not found.unknown


def test_half_of_the_peers_are_enough_to_compare() -> None:
    _, found = cell([row(0, 4.0), row(1, 6.0)])
    assert found.busy == {0: 2.0, 1: 3.0}
    assert found.unknown == dict.fromkeys((2, 3), "its times of 's' are missing")
    _, found = cell([row(1, 4.0)])
    assert (found.busy, found.unknown) == ({}, {1: "only 1 of 4 peers enter 's'"})


@pytest.mark.parametrize(
    "bad", [row(1, math.inf), row(1, math.nan), row(1, -1.0), row(1, 4.0, count=0), row(1, 4.0, math.inf)]
)
def test_times_that_are_no_numbers_are_unknown(bad: Row) -> None:
    peers, found = cell([row(0, 4.0, 1.0), bad, row(2, 4.0), row(3, 0.0, count=1)])
    assert found.unknown == {1: "its times of 's' are no numbers"}
    assert found.busy == {0: 1.5, 2: 2.0, 3: 0.0}
    assert math.isnan(peers.waiting[1])
    assert math.isfinite(peers.duration)


def test_a_rank_that_does_not_tell_its_waiting_is_unknown_where_others_do() -> None:
    peers, found = cell([row(0, 4.0, 1.0), row(1, 4.0, math.nan)], ranks=2)
    assert (found.busy, found.unknown) == ({0: 1.5}, {1: "how long it waits in 's' is unknown"})
    assert peers.waits


def test_where_nobody_tells_waiting_the_total_counts() -> None:
    peers, found = cell([row(0, 4.0, math.nan), row(1, 6.0, math.nan)], ranks=2)
    assert (found.busy, peers.waits) == ({0: 2.0, 1: 3.0}, False)


def test_arrival_is_the_window_without_the_waiting() -> None:
    kind = Kind.COMMUNICATION
    peers, found = cell([row(0, 4.0, math.nan, kind=kind), row(1, 6.0, math.nan, kind=kind)], ranks=2)
    assert (found.busy, peers.waiting) == ({}, [4.0, 6.0])
    arrived = peers.arrival()
    assert arrived is not None
    arrived.usual = 0.5
    assert (arrived.section, arrived.busy) == (ARRIVAL, {0: 2.0, 1: 0.0})
    assert (peers.late(0), peers.late(5)) == (1.5, None)


def test_a_window_has_the_sections_of_its_number_by_group() -> None:
    places = {rank: Place(rank, "n", stage=rank // 2) for rank in range(5)}
    groups = group_places(places)
    assert list(groups.values()) == [[0, 1], [2, 3], [4]]
    rows = [row(rank, 2.0) for rank in (0, 1, 4)]
    window = Window(7, rows, groups)
    assert window.reports() == {0, 1, 4}
    (section, cells), last = window.cells()
    assert (section, [one.busy for _, one in cells], last) == ("s", [{0: 1.0, 1: 1.0}], (ARRIVAL, []))
    assert Window(8, rows, groups).reports() == set()
