"""The rows of a window, arranged by section and group: what is compared, what is unknown, who waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.stragglers.policy.rows import LAST_MICRO_STEP, MICRO_STEP, Kind, Place, Row
from outlast.stragglers.policy.window import ARRIVAL, Cell, Peers, Window, group_places

COMMUNICATION = Kind.COMMUNICATION
NAN = math.nan


def row(rank: int, total: float, waiting: float = 0.0, count: int = 2, kind: Kind = Kind.COMPUTE) -> Row:
    return Row(rank, "s", kind, 7, count, 0.0, 0.0, 0.0, total, waiting)


def reduced(rank: int, total: float, waiting: float = NAN) -> Row:
    return row(rank, total, waiting, kind=COMMUNICATION)


def loaded(rank: int, total: float, count: int = 2) -> Row:
    return row(rank, total, 0.0, count, Kind.DATA)


def cell(
    rows: list[Row], ranks: int = 4, shares: Mapping[int, int] | None = None, seconds: float = 0.0
) -> tuple[Peers, Cell]:
    """Return a section of ranks 0 and up."""
    peers = Peers(range(ranks), seconds, shares or {})
    found = peers.cell("s", {one.rank: one for one in rows})
    assert found is not None
    return peers, found


def arrived(peers: Peers) -> dict[int, float]:
    found = peers.arrival()
    assert found is not None
    assert (found.section, found.kind) == (ARRIVAL, Kind.OTHER)
    return found.busy


@pytest.mark.parametrize(
    ("kind", "rows", "ranks", "busy", "unknown", "waiting"),
    [
        ("compute", [(4, 0), (4, 1), (4, 4, 5), (6, 0, 1)], 4, [2, 1.5, 0, 6], set(), [0, 1, 4, 0]),
        ("compute", [(4, 0), (6, 0)], 4, [2, 3], {2, 3}, [0, 0, NAN, NAN]),
        ("compute", [(4, 0)], 4, [], {0}, [0, 0, 0, 0]),  # less than half of them enter it
        ("compute", [(4, 0), (4, 0)], 5, [], {0, 1}, [0, 0, 0, 0, 0]),
        ("compute", [(4, 4), (4, 0.5)], 3, [0, 1.75], {2}, [4, 0.5, NAN]),
        ("compute", [(4, 0.5), (4, 0)], 3, [1.75, 2], {2}, [0.5, 0, NAN]),
        ("compute", [(4, 1), (4, NAN)], 2, [1.5], {1}, [1, NAN]),
        ("compute", [(4, NAN), (6, NAN), (math.inf, 1)], 3, [2, 3], {2}, [0, 0, 0]),  # no waiting is known
        ("compute", [(4, NAN), (4, NAN)], 3, [2, 2], {2}, [0, 0, 0]),
        ("communication", [(4, NAN), (6, NAN)], 2, [], set(), [4, 6]),
        ("communication", [(4, NAN), (4, NAN)], 3, [], {2}, [4, 4, NAN]),  # it may have waited for any time
    ],
)
def test_what_is_busy_unknown_and_waiting(
    kind: str,
    rows: list[tuple[float, float, int]],
    ranks: int,
    busy: list[float],
    unknown: set[int],
    waiting: list[float],
) -> None:
    made = [row(rank, *one[:2], *(one[2:] or [2]), Kind(kind)) for rank, one in enumerate(rows)]
    peers, found = cell(made, ranks)
    assert (found.busy, found.unknown.keys()) == (dict(enumerate(busy)), unknown)
    assert peers.waiting == pytest.approx(waiting, nan_ok=True)
    assert peers.waits is any(one > 0 for one in waiting)
    assert [found.count(one.rank) for one in made] == [one.count for one in made]
    assert (found.count(9), found.usual) == (1, 0.0)


def test_the_median_rank_is_how_long_a_window_is() -> None:
    """Of more than 64 ranks every second one, third one and so on; times that are no numbers do not count."""
    assert cell([row(rank, float(rank + 1)) for rank in range(4)])[0].duration == 3.0
    peers, _ = cell([row(rank, 4.0 if rank % 2 else 1.0) for rank in range(64)], ranks=64)
    assert (len(peers.totals), peers.duration) == (64, 4.0)
    peers, _ = cell([row(rank, 4.0 if rank % 2 else 1.0) for rank in range(65)], ranks=65)
    assert (peers.totals, peers.duration) == ([1.0] * 33, 1.0)
    peers, _ = cell([row(0, math.inf), row(1, -1.0), row(2, 0.5)], ranks=3)
    assert peers.totals == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("total", "waiting", "count"),
    [
        *((math.inf, 0.0, 2), (NAN, 0.0, 2), (-1.0, 0.0, 2), (-1.0, NAN, 2), (4.0, 0.0, 0)),
        *((4.0, math.inf, 2), (math.inf, math.inf, 2), (4.0, -1.0, 2), (4.0, 4.5, 2)),
    ],
)
def test_times_that_are_no_numbers_are_unknown(total: float, waiting: float, count: int) -> None:
    rows = [row(0, 4.0, 1.0), row(1, total, waiting, count), row(2, 4.0), row(3, 0.0, count=1)]
    peers, found = cell(rows)
    assert (found.unknown.keys(), found.busy) == ({1}, {0: 1.5, 2: 2.0, 3: 0.0})
    assert peers.waiting == pytest.approx([1.0, NAN, 0.0, 0.0], nan_ok=True)
    assert math.isfinite(peers.duration)


def test_arrival_is_the_window_without_the_waiting() -> None:
    rows = [reduced(0, 4.0), reduced(1, 6.0)]
    peers, _ = cell(rows, ranks=2)
    assert arrived(peers) == {0: 2.0, 1: 0.0}
    found = peers.arrival()
    assert found is not None
    found.usual = 0.5
    assert (peers.late(0), peers.late(5)) == (1.5, None)
    peers, _ = cell([*rows, reduced(2, 9.0, 1.0)], ranks=3, seconds=20.0)
    assert arrived(peers) == {2: 19.0}, "sections may leave a part of the window out"
    peers, _ = cell([row(0, 1.0, 1.0), row(1, 1.0), row(2, 9.0, 9.0)], ranks=3)
    assert arrived(peers) == {0: 0.0, 1: 1.0, 2: 0.0}, "a rank never comes before the window"


TIMES = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 4))


@given(st.lists(TIMES, min_size=2, max_size=6), st.sampled_from([Kind.COMPUTE, COMMUNICATION]))
def test_a_missing_rank_changes_nothing_about_the_others(
    drawn: list[tuple[int, int, int]], kind: Kind
) -> None:
    rows = [row(at, float(a + b), float(b), count, kind) for at, (a, b, count) in enumerate(drawn)]
    peers, found = cell(rows, ranks=len(rows))
    fewer, other = cell(rows, ranks=len(rows) + 1)
    assert (other.busy, other.unknown.keys()) == (found.busy, {len(rows)})
    assert (fewer.waiting[:-1], fewer.waits) == (peers.waiting, peers.waits)


def test_a_window_has_the_sections_of_its_number_by_group() -> None:
    groups = group_places({rank: Place(rank, "n", stage=rank // 2) for rank in range(5)})
    assert list(groups.values()) == [[0, 1], [2, 3], [4]]
    rows = [row(rank, 2.0) for rank in (0, 1, 4)]
    window = Window(7, rows, groups, 0.0)
    assert window.reports() == {0, 1, 4}
    (section, cells), last = window.cells()
    assert (section, [one.busy for _, one in cells], last) == ("s", [{0: 1.0, 1: 1.0}], (ARRIVAL, []))
    assert Window(8, rows, groups, 0.0).reports() == set()


# Ranks with different numbers of micro-batches


def rows_of(
    shares: Mapping[int, float], loading: float = 0.0, each: Mapping[int, float] | None = None
) -> tuple[list[Row], float]:
    """Return a window of 4 steps, and its seconds; ranks wait for the latest one in the last micro-batch.

    Args:
        shares: micro-batches of each rank in a step; not whole where the device lags behind.
        loading: seconds of each micro-batch.
        each: seconds of a micro-batch, by rank; 0.5 if not given.
    """
    rows, busy = [], {}
    for rank, share in shares.items():
        seconds = (each or {}).get(rank, 0.5)
        busy[rank] = 4 * share * (seconds + loading)
        many = round(4 * (share - 1))
        if many:
            rows.append(replace(row(rank, many * seconds, count=many), section=MICRO_STEP))
        rows.append(replace(loaded(rank, 4 * loading * share, 4), section="data"))
    for rank in shares:
        waiting = max(busy.values()) - busy[rank]
        last = 4 * (each or {}).get(rank, 0.5) + waiting
        rows.append(replace(row(rank, last, waiting, 4), section=LAST_MICRO_STEP))
    return rows, max(busy.values())


def cells_of(rows: list[Row], seconds: float) -> dict[str, Cell]:
    ranks = sorted({one.rank for one in rows})
    window = Window(7, rows, {(0, (), ""): ranks}, seconds)
    return {section: one for section, cells in window.cells() for _, one in cells}


def test_ranks_with_more_micro_batches_are_compared_as_if_all_had_equally_many() -> None:
    found = cells_of(*rows_of({0: 5, 1: 4, 2: 4, 3: 3}, loading=0.25))
    assert found[ARRIVAL].busy == dict.fromkeys(range(4), 12.0), "4 steps of 4 micro-batches of 0.75 s"
    assert found["data"].busy == dict.fromkeys(range(4), 1.0)
    assert found[MICRO_STEP].busy == found[LAST_MICRO_STEP].busy == dict.fromkeys(range(4), 0.5)
    assert not any(one.unknown for one in found.values())


@pytest.mark.parametrize(
    ("shares", "each", "arrival"),
    [
        ({0: 5, 1: 4, 2: 4, 3: 2}, {3: 1.0}, {0: 8.0, 1: 8.0, 2: 8.0, 3: 12.0}),
        ({0: 2, 1: 2, 2: 1, 3: 1}, {}, dict.fromkeys(range(4), 3.0)),
        ({0: 2, 1: 1, 2: 1, 3: 1}, {}, dict.fromkeys(range(4), 2.0)),
        ({0: 3.25, 1: 2.75}, {}, {0: 6.5, 1: 5.5}),
        ({0: 3, 1: 1.25}, {}, {0: 4.0, 1: 4.5}),
    ],
    ids=["by its excess", "half have one", "one has two", "both have three", "half of two off, half on"],
)
def test_when_ranks_arrive_as_if_all_had_equally_many(
    shares: dict[int, float], each: dict[int, float], arrival: dict[int, float]
) -> None:
    """The micro-batches of a step are whole where the device lags behind."""
    found = cells_of(*rows_of(shares, each=each))
    assert found[ARRIVAL].busy == arrival
    assert found["data"].busy == dict.fromkeys(shares, 0.0)


def test_ranks_with_one_micro_batch_need_not_enter_what_comes_before_the_last() -> None:
    found = cells_of(*rows_of({0: 2, 1: 2, 2: 1, 3: 1}))
    assert (found[MICRO_STEP].busy, found[MICRO_STEP].unknown) == ({0: 0.5, 1: 0.5}, {})
    assert MICRO_STEP not in cells_of(*rows_of({0: 2, 1: 1, 2: 1, 3: 1})), "rank 0 has no peer there"
    rows, seconds = rows_of({rank: 2 if rank < 3 else 1 for rank in range(9)})
    rows = [one for one in rows if (one.rank, one.section) != (0, MICRO_STEP)]  # that one should enter it
    assert cells_of(rows, seconds)[MICRO_STEP].busy == {1: 0.5, 2: 0.5}


def test_other_sections_miss_ranks_with_one_micro_batch() -> None:
    _, found = cell([row(rank, 2.0) for rank in range(3)], shares={0: 2, 1: 2, 2: 2, 3: 1})
    assert found.unknown.keys() == {3}
    _, found = cell([row(0, 2.0)], shares={0: 2, 1: 1, 2: 1, 3: 1})
    assert (found.unknown.keys(), found.busy) == ({0}, {})


@pytest.mark.parametrize(
    ("rows", "shares", "busy"),
    [
        ([loaded(0, 4.0, 8), loaded(1, 2.0, 4)], (4, 2), (0.5, 0.5)),
        ([loaded(0, 4.0), loaded(1, 4.0)], (4, 2), (1.5, 3.0)),
        ([row(0, 4.0, 2.0), row(1, 4.0)], (4, 2), (1.0, 2.0)),
        ([loaded(0, 0.1, 1), loaded(1, 0.7, 1)], (3, 3), (0.1, 0.7)),
    ],
    ids=["for each micro-batch", "half as much in a step", "computing once a step", "equally many"],
)
def test_data_is_of_a_step_or_of_each_micro_batch(
    rows: list[Row], shares: tuple[int, int], busy: tuple[float, float]
) -> None:
    peers, found = cell(rows, 2, dict(enumerate(shares)))
    assert found.busy == dict(enumerate(busy)), "to the last bit"
    if peers.waits:
        assert arrived(peers) == {0: 2.0, 1: 4.0}, "what a micro-batch takes is not known"


@pytest.mark.parametrize("idle", [False, True])
def test_a_rank_without_a_last_micro_batch_has_the_usual_number(idle: bool) -> None:
    rows, _ = rows_of({0: 3, 1: 2, 2: 2})
    rows = [one for one in rows if (one.rank, one.section) != (2, LAST_MICRO_STEP)]
    rows += [replace(row(2, 0.0, count=0), section=LAST_MICRO_STEP)] * idle
    found = cells_of(rows, 6.0)
    assert found[LAST_MICRO_STEP].unknown.keys() == {2}
    assert found["data"].busy == {0: 0.0, 1: 0.0, 2: 0.0}
    assert found[ARRIVAL].busy == {0: 5.0, 1: 5.0}
