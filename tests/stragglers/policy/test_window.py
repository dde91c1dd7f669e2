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
MISSING = "its times of 's' are missing"


def row(rank: int, total: float, waiting: float = 0.0, count: int = 2, kind: Kind = Kind.COMPUTE) -> Row:
    return Row(rank, "s", kind, 7, count, 0.0, 0.0, 0.0, total, waiting)


def cell(
    rows: list[Row], ranks: int = 4, shares: Mapping[int, int] | None = None, seconds: float = 0.0
) -> tuple[Peers, Cell]:
    """Return a section of ranks 0 and up."""
    peers = Peers(range(ranks), seconds, shares or {})
    found = peers.cell("s", {one.rank: one for one in rows})
    assert found is not None
    return peers, found


def test_a_rank_is_busy_when_it_does_not_wait() -> None:
    peers, found = cell([row(0, 4.0), row(1, 4.0, 1.0), row(2, 4.0, 4.0, 5), row(3, 6.0, 0.0, 1)])
    assert found.busy == {0: 2.0, 1: 1.5, 2: 0.0, 3: 6.0}
    assert [found.count(rank) for rank in (0, 2, 9)] == [2, 5, 1]
    assert (peers.waiting, peers.waits, peers.duration) == ([0.0, 1.0, 4.0, 0.0], True, 4.0)
    assert not found.unknown
    assert found.usual == 0.0


def test_nobody_waits_before_a_row_says_so() -> None:
    peers = Peers(range(2), 0.0, {})
    assert (peers.waits, peers.waiting, peers.duration) == (False, [0.0, 0.0], 0.0)
    assert peers.cell("s", {0: row(0, 1.0), 1: row(1, 3.0)}) is not None
    assert (peers.waits, peers.arrival(), peers.duration) == (False, None, 3.0)
    assert peers.cell("s", {0: row(0, 1.0, 0.5), 1: row(1, 3.0)}) is not None
    assert peers.cell("s", {0: row(0, 1.0, 0.5), 1: row(1, 3.0, 0.25)}) is not None
    assert (peers.waits, peers.waiting) == (True, [1.0, 0.25])


def test_the_median_rank_tells_how_long_a_window_is() -> None:
    """Of more than 64 ranks every second one, third one and so on."""
    peers, _ = cell([row(rank, float(rank + 1)) for rank in range(4)])
    assert peers.duration == 3.0
    peers, _ = cell([row(rank, 4.0 if rank % 2 else 1.0) for rank in range(64)], ranks=64)
    assert (len(peers.totals), peers.duration) == (64, 4.0)
    peers, _ = cell([row(rank, 4.0 if rank % 2 else 1.0) for rank in range(65)], ranks=65)
    assert (peers.totals, peers.duration) == ([1.0] * 33, 1.0)


def test_half_of_the_peers_are_enough_to_compare() -> None:
    _, found = cell([row(0, 4.0), row(1, 6.0)])
    assert found.busy == {0: 2.0, 1: 3.0}
    assert found.unknown == dict.fromkeys((2, 3), MISSING)
    _, found = cell([row(1, 4.0)])
    assert (found.busy, found.unknown) == ({}, {1: "only 1 of 4 peers enter 's'"})
    _, found = cell([row(1, 4.0), row(2, 4.0)], ranks=5)
    assert (found.busy, len(found.unknown)) == ({}, 2)


BAD = [
    *(row(1, math.inf), row(1, math.nan), row(1, -1.0), row(1, -1.0, math.nan), row(1, 4.0, count=0)),
    *(row(1, 4.0, math.inf), row(1, math.inf, math.inf), row(1, 4.0, -1.0), row(1, 4.0, 4.5)),
]


@pytest.mark.parametrize("bad", BAD)
def test_times_that_are_no_numbers_are_unknown(bad: Row) -> None:
    peers, found = cell([row(0, 4.0, 1.0), bad, row(2, 4.0), row(3, 0.0, count=1)])
    assert found.unknown == {1: "its times of 's' are no numbers"}
    assert found.busy == {0: 1.5, 2: 2.0, 3: 0.0}
    assert math.isnan(peers.waiting[1])
    assert (peers.waiting[0], peers.waiting[2:]) == (1.0, [0.0, 0.0])
    assert math.isfinite(peers.duration)


def test_times_of_which_one_is_infinite_or_negative_do_not_say_how_long_a_window_is() -> None:
    peers, _ = cell([row(0, math.inf), row(1, -1.0), row(2, 0.5)], ranks=3)
    assert peers.totals == [0.0, 0.0, 0.5]


def test_where_times_are_missing_the_waiting_of_others_counts_all_the_same() -> None:
    peers, found = cell([row(0, 4.0, 4.0), row(1, 4.0, 0.5)], ranks=3)
    assert (found.busy, found.unknown) == ({0: 0.0, 1: 1.75}, {2: MISSING})
    assert (peers.waits, peers.waiting[:2]) == (True, [4.0, 0.5])
    assert math.isnan(peers.waiting[2])
    peers, _ = cell([row(0, 4.0, 0.5), row(1, 4.0)], ranks=3)
    assert peers.waits
    peers, _ = cell([row(0, 4.0), row(1, 4.0)], ranks=3)
    assert not peers.waits


def test_a_rank_that_does_not_tell_its_waiting_is_unknown_where_others_do() -> None:
    peers, found = cell([row(0, 4.0, 1.0), row(1, 4.0, math.nan)], ranks=2)
    assert (found.busy, found.unknown) == ({0: 1.5}, {1: "how long it waits in 's' is unknown"})
    assert peers.waits
    assert math.isnan(peers.waiting[1])


def test_where_nobody_tells_waiting_the_total_counts() -> None:
    bad = row(2, math.inf, 1.0)  # says nothing about waiting
    peers, found = cell([row(0, 4.0, math.nan), row(1, 6.0, math.nan), bad], ranks=3)
    assert (found.busy, found.unknown.keys()) == ({0: 2.0, 1: 3.0}, {2})
    assert (peers.waits, peers.waiting) == (False, [0.0, 0.0, 0.0])


def test_arrival_is_the_window_without_the_waiting() -> None:
    rows = [row(0, 4.0, math.nan, kind=COMMUNICATION), row(1, 6.0, math.nan, kind=COMMUNICATION)]
    peers, found = cell(rows, ranks=2)
    assert (found.busy, peers.waiting) == ({}, [4.0, 6.0])
    arrived = peers.arrival()
    assert arrived is not None
    arrived.usual = 0.5
    assert (arrived.section, arrived.kind, arrived.busy) == (ARRIVAL, Kind.OTHER, {0: 2.0, 1: 0.0})
    assert (peers.late(0), peers.late(5)) == (1.5, None)
    assert Peers(range(2), 0.0, {}).late(0) is None
    peers, _ = cell([*rows, row(2, 9.0, 1.0, kind=COMMUNICATION)], ranks=3, seconds=20.0)
    arrived = peers.arrival()
    assert arrived is not None
    assert arrived.busy == {2: 19.0}, "sections may leave a part of the window out"


def test_a_rank_never_comes_before_the_window() -> None:
    peers, _ = cell([row(0, 1.0, 1.0), row(1, 1.0), row(2, 9.0, 9.0)], ranks=3)
    arrived = peers.arrival()
    assert arrived is not None
    assert arrived.busy == {0: 0.0, 1: 1.0, 2: 0.0}


def test_in_communication_a_missing_rank_may_have_waited_for_any_time() -> None:
    known = [row(rank, 4.0, math.nan, kind=COMMUNICATION) for rank in range(2)]
    peers, found = cell(known, ranks=3)
    assert (found.busy, peers.waiting[:2], math.isnan(peers.waiting[2])) == ({}, [4.0, 4.0], True)
    known = [row(rank, 4.0, math.nan) for rank in range(2)]
    peers, found = cell(known, ranks=3)
    assert (found.busy, peers.waiting) == ({0: 2.0, 1: 2.0}, [0.0, 0.0, 0.0])


TIMES = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 4))


@given(st.lists(TIMES, min_size=2, max_size=6), st.sampled_from([Kind.COMPUTE, COMMUNICATION]))
def test_a_missing_rank_changes_nothing_about_the_others(
    drawn: list[tuple[int, int, int]], kind: Kind
) -> None:
    rows = [row(at, float(a + b), float(b), count, kind) for at, (a, b, count) in enumerate(drawn)]
    peers, found = cell(rows, ranks=len(rows))
    fewer, other = cell(rows, ranks=len(rows) + 1)
    assert (other.busy, other.unknown) == (found.busy, {len(rows): MISSING})
    assert (fewer.waiting[:-1], fewer.waits) == (peers.waiting, peers.waits)


def test_a_window_has_the_sections_of_its_number_by_group() -> None:
    places = {rank: Place(rank, "n", stage=rank // 2) for rank in range(5)}
    groups = group_places(places)
    assert list(groups.values()) == [[0, 1], [2, 3], [4]]
    rows = [row(rank, 2.0) for rank in (0, 1, 4)]
    window = Window(7, rows, groups, 0.0)
    assert window.reports() == {0, 1, 4}
    (section, cells), last = window.cells()
    assert (section, [one.busy for _, one in cells], last) == ("s", [{0: 1.0, 1: 1.0}], (ARRIVAL, []))
    assert Window(8, rows, groups, 0.0).reports() == set()


def window(
    shares: Mapping[int, float], loading: float = 0.0, each: Mapping[int, float] | None = None
) -> Window:
    """Return a window of 4 steps; ranks wait for the latest one in the last micro-batch of a step.

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
        rows.append(replace(row(rank, 4 * loading * share, 0.0, 4, Kind.DATA), section="data"))
    for rank in shares:
        waiting = max(busy.values()) - busy[rank]
        last = 4 * (each or {}).get(rank, 0.5) + waiting
        rows.append(replace(row(rank, last, waiting, 4), section=LAST_MICRO_STEP))
    return Window(7, rows, {(0, (), ""): list(shares)}, max(busy.values()))


def cells_of(of: Window) -> dict[str, Cell]:
    return {section: one for section, cells in of.cells() for _, one in cells}


def test_ranks_with_more_micro_batches_are_compared_as_if_all_had_equally_many() -> None:
    found = cells_of(window({0: 5, 1: 4, 2: 4, 3: 3}, loading=0.25))
    assert found[ARRIVAL].busy == dict.fromkeys(range(4), 12.0), "4 steps of 4 micro-batches of 0.75 s"
    assert found["data"].busy == dict.fromkeys(range(4), 1.0)
    assert found[MICRO_STEP].busy == found[LAST_MICRO_STEP].busy == dict.fromkeys(range(4), 0.5)
    assert not any(one.unknown for one in found.values())
    found = cells_of(window({0: 5, 1: 4, 2: 4, 3: 2}, each={3: 1.0}))
    assert found[ARRIVAL].busy == {0: 8.0, 1: 8.0, 2: 8.0, 3: 12.0}, "by 2 x 4 times 0.5 s, its excess"


def test_where_all_have_equally_many_micro_batches_nothing_is_evened_out() -> None:
    _, found = cell([row(0, 0.1, 0.0, 1, Kind.DATA), row(1, 0.7, 0.0, 1, Kind.DATA)], 2, {0: 3, 1: 3})
    assert found.busy == {0: 0.1, 1: 0.7}, "to the last bit"


def test_ranks_with_one_micro_batch_need_not_enter_what_comes_before_the_last() -> None:
    found = cells_of(window({0: 2, 1: 2, 2: 1, 3: 1}))
    assert (found[MICRO_STEP].busy, found[MICRO_STEP].unknown) == ({0: 0.5, 1: 0.5}, {})
    assert found[ARRIVAL].busy == dict.fromkeys(range(4), 3.0)
    found = cells_of(window({0: 2, 1: 1, 2: 1, 3: 1}))
    assert MICRO_STEP not in found, "nobody is there to compare rank 0 with"
    assert found[ARRIVAL].busy == dict.fromkeys(range(4), 2.0)
    few = window({rank: 2 if rank < 3 else 1 for rank in range(9)})
    del few._sections[MICRO_STEP][0]  # its row is lost: it is one that should enter the section
    assert cells_of(few)[MICRO_STEP].busy == {1: 0.5, 2: 0.5}


def test_other_sections_miss_ranks_with_one_micro_batch() -> None:
    shares = {0: 2, 1: 2, 2: 2, 3: 1}
    _, found = cell([row(rank, 2.0) for rank in range(3)], shares=shares)
    assert found.unknown == {3: MISSING}
    _, found = cell([row(0, 2.0)], shares={0: 2, 1: 1, 2: 1, 3: 1})
    assert found.unknown == {0: "only 1 of 4 peers enter 's'"}


def test_data_that_is_loaded_for_each_micro_batch_has_entries_of_its_own() -> None:
    shares = {0: 4, 1: 2}
    peers, found = cell([row(0, 4.0, 0.0, 8, Kind.DATA), row(1, 2.0, 0.0, 4, Kind.DATA)], 2, shares)
    assert found.busy == {0: 0.5, 1: 0.5}
    peers, found = cell([row(0, 4.0, 0.0, 2, Kind.DATA), row(1, 4.0, 0.0, 2, Kind.DATA)], 2, shares)
    assert found.busy == {0: 1.5, 1: 3.0}, "rank 1 loads half as much in the same time"
    peers, found = cell([row(0, 4.0, 2.0), row(1, 4.0)], 2, shares)
    assert found.busy == {0: 1.0, 1: 2.0}, "computing once a step is the same work for every rank"
    arrived = peers.arrival()
    assert arrived is not None
    assert arrived.busy == {0: 2.0, 1: 4.0}, "what a micro-batch takes is not known"


def test_the_micro_batches_of_a_step_are_whole_where_the_device_lags_behind() -> None:
    found = cells_of(window({0: 3.25, 1: 2.75}))
    assert found["data"].busy == {0: 0.0, 1: 0.0}
    assert found[ARRIVAL].busy == {0: 6.5, 1: 5.5}, "both have three"
    found = cells_of(window({0: 3, 1: 1.25}))
    assert found[MICRO_STEP].busy == {0: 0.5, 1: 0.5}
    assert found[ARRIVAL].busy == {0: 4.0, 1: 4.5}, (
        "4 s for two more in each step: half of it off, half of it on"
    )


def test_a_rank_without_a_last_micro_batch_has_the_usual_number() -> None:
    lacks = window({0: 3, 1: 2, 2: 2})
    idle = replace(row(2, 0.0, count=0), section=LAST_MICRO_STEP)
    rows = [one for some in lacks._sections.values() for one in some.values()]
    kept = [one for one in rows if (one.rank, one.section) != (2, LAST_MICRO_STEP)]
    for more in ([], [idle]):
        found = cells_of(Window(7, [*kept, *more], {(0, (), ""): [0, 1, 2]}, 6.0))
        assert found[LAST_MICRO_STEP].unknown.keys() == {2}
        assert found["data"].busy == {0: 0.0, 1: 0.0, 2: 0.0}
        assert found[ARRIVAL].busy == {0: 5.0, 1: 5.0}
