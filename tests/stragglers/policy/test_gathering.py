"""Windows of ranks are compared up to steps at which those of every rank end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from outlast.cluster.policy.codec import Codec, MessageError
from outlast.stragglers.policy.gathering import (
    MOST_WAITING,
    Gathering,
    RankWindow,
    SectionTimes,
    TimingReport,
    joined,
    thinned,
)
from outlast.stragglers.policy.rows import Kind, Row

Found = list[tuple[int, list[Row]]]


def window(rank: int, end: int, total: float = 1.0) -> RankWindow:
    times = SectionTimes("step", Kind.COMPUTE, 1, total, total, total, total, 0.0)
    return RankWindow(rank, end, (times,))


def totals(found: Found) -> dict[int, dict[int, float]]:
    return {end: {row.rank: row.total for row in rows} for end, rows in found}


def test_windows_are_joined_where_those_of_every_rank_end() -> None:
    one = Gathering(range(3))
    assert one.take([window(0, 1), window(1, 1)]) == []
    assert totals(one.take([window(2, 1)])) == {1: {0: 1.0, 1: 1.0, 2: 1.0}}
    two = Gathering(range(2))
    found = two.take([window(0, end) for end in (1, 2, 3, 4)] + [window(1, 2, 2.0), window(1, 4, 2.0)])
    assert totals(found) == {2: {0: 2.0, 1: 2.0}, 4: {0: 2.0, 1: 2.0}}


def test_windows_in_any_order_of_ranks_lose_nothing(seed: int) -> None:
    draws = Random(seed)
    lengths = {rank: draws.choice([1, 2, 4]) for rank in range(4)}
    windows = {
        rank: [window(rank, end, float(each)) for end in range(each, 33, each)]
        for rank, each in lengths.items()
    }
    one, found = Gathering(range(4)), Found()
    while any(windows.values()):
        rank = draws.choice([rank for rank, left in windows.items() if left])
        found += one.take([windows[rank].pop(0)])
    assert sum(sum(rows.values()) for rows in totals(found).values()) == 4 * 32
    assert [end for end, _ in found] == list(range(max(lengths.values()), 33, max(lengths.values())))


def test_the_32nd_window_that_waits_is_compared_without_those_who_sent_none() -> None:
    one = Gathering(range(3))
    for end in range(1, 32):
        assert one.take([window(0, end), window(1, end)]) == []
    assert totals(one.take([window(0, 32)])) == {end: {0: 1.0, 1: 1.0} for end in range(1, 32)}
    assert one.take([window(1, 32)]) == [], "rank 0 begins anew"
    assert totals(one.take([window(2, 32, 32.0)])) == {32: {0: 1.0, 1: 1.0, 2: 32.0}}
    found = Found()
    for end in range(33, 33 + 3 * MOST_WAITING):
        found += one.take([window(0, end), window(1, end)])
    assert found
    assert all({row.rank for row in rows} == {0, 1} for _, rows in found)


def test_of_windows_that_never_end_together_the_latest_16_of_a_rank_are_kept() -> None:
    one = Gathering(range(2))
    assert one.take([window(1, 2), window(1, 4)]) == []
    assert one.take([window(0, end) for end in range(1, 65, 2)]) == []
    assert totals(one.take([window(1, 31), window(1, 63)])) == {63: {0: 16.0, 1: 4.0}}


def test_windows_of_a_rank_that_is_not_of_the_generation_are_left_out() -> None:
    one = Gathering(range(2))
    assert one.take([window(7, 1), window(0, 1), window(-1, 1)]) == []
    assert totals(one.take([window(1, 1)])) == {1: {0: 1.0, 1: 1.0}}
    assert Gathering(()).take([window(0, 1)]) == []


def test_a_rank_that_goes_back_begins_anew() -> None:
    one = Gathering(range(2))
    one.take([window(0, 5), window(0, 6)])
    assert totals(one.take([window(0, 3), window(1, 3)])) == {3: {0: 1.0, 1: 1.0}}
    assert one.take([window(1, 5), window(1, 6)]) == []
    assert one.take([window(0, 4), window(0, 4, 9.0)]) == []
    assert totals(one.take([window(0, 5)])) == {5: {0: 10.0, 1: 1.0}}, "the same part again takes its place"


def test_joined_windows_add_up_and_what_an_entry_took_is_a_mean_of_all_entries() -> None:
    one = SectionTimes("step", Kind.OTHER, 1, 1.0, 2.0, 7.0, 10.0, 1.0)
    two = SectionTimes("step", Kind.COMPUTE, 3, 5.0, 10.0, 6.0, 30.0, 0.5)
    own = SectionTimes("save", Kind.OTHER, 1, 1.0, 1.0, 1.0, 1.0, 0.0)
    both = SectionTimes("step", Kind.COMPUTE, 4, 4.0, 8.0, 7.0, 40.0, 1.5)
    found = joined([RankWindow(3, 1, (one,)), RankWindow(3, 2, (own, two))])
    assert found == RankWindow(3, 2, (both, own))
    assert joined([RankWindow(3, 2, (own, two))]) == RankWindow(3, 2, (own, two))
    none = [replace(one, count=0), replace(two, count=0)]
    (times,) = joined([RankWindow(3, at, (each,)) for at, each in enumerate(none)]).sections
    assert (times.count, times.median, times.p90) == (0, 3.0, 6.0)
    many = [
        RankWindow(0, at, tuple(SectionTimes(f"{at}-{of}", Kind.OTHER, *[1] * 6) for of in range(20)))
        for at in range(2)
    ]
    assert len(joined(many).sections) == 36, "as many as a report may have"
    assert joined(many).sections[:20] == many[0].sections


@pytest.mark.parametrize(
    ("before", "most", "after"),
    [
        (range(1, 8), 7, list(range(1, 8))),
        (range(1, 8), 6, [2, 4, 6, 7]),
        (range(1, 8), 4, [2, 4, 6, 7]),
        (range(1, 8), 3, [4, 7]),
        (range(1, 9), 3, [4, 8]),
        (range(1, 9), 1, [8]),
        (range(1, 8), 1, [7]),
        (range(1, 14), 3, [8, 13]),
        (range(3), 2, [0, 2]),
        ([0] * 9, 8, [0]),
        ([6, 7, 8, 3], 3, [6, 8, 3]),
    ],
)
def test_windows_are_joined_up_to_multiples_of_the_least_power_of_two(
    before: Iterable[int], most: int, after: list[int]
) -> None:
    found = thinned([window(0, end) for end in before], most)
    assert [one.end for one in found] == after
    assert sum(one.sections[0].total for one in found) == len(list(before))


def test_windows_that_nodes_report_at_different_times_still_end_together(seed: int) -> None:
    draws, gathering, found = Random(seed), Gathering(range(2)), Found()
    ranks: dict[int, list[RankWindow]] = {0: [], 1: []}
    for end in range(1, 401):
        for rank, windows in ranks.items():
            windows.append(window(rank, end))
            windows[:] = thinned(windows, 8)
            assert len(windows) <= 8
            if draws.random() < 0.02:
                found += gathering.take(windows)
                windows.clear()
    compared = totals(found)
    last = max(compared)
    assert last > 200, "both were compared until the end"
    assert sum(sum(rows.values()) for rows in compared.values()) == 2 * last


def test_a_report_out_of_bounds_is_refused() -> None:
    codec = Codec[TimingReport](TimingReport)
    times = SectionTimes("s" * 64, Kind.DATA, 0, 0.0, 0.5, 1e9, 1e9, 0.0)
    most = TimingReport(0, (RankWindow(0, 0, (times,) * 36),))
    assert codec.read(codec.write(most)) == most
    for sections, names in (
        ([replace(times, median=-1e-9)], r"windows\[0\]\.sections\[0\]\.median .*-1e-09"),
        ([replace(times, total=1e9 + 0.5)], r"windows\[0\]\.sections\[0\]\.total .*1000000000\.5"),
        ([replace(times, section="s" * 65)], r"windows\[0\]\.sections\[0\]\.section .*65.*64"),
        ([times] * 37, "37.*36"),
    ):
        with pytest.raises(MessageError, match=names):
            codec.read(codec.write(TimingReport(0, (RankWindow(0, 0, tuple(sections)),))))
    with pytest.raises(MessageError, match=r"262145.*262144"):
        codec.from_json({"generation": 0, "windows": [0] * (64 * 4096 + 1)})
