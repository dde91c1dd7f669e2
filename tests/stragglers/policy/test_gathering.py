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
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import Kind, Row
from outlast.stragglers.policy.watch import Excess, Noticed, RankTimes, StragglerWatch, Wanted, places_of


def window(rank: int, end: int, total: float = 1.0, count: int = 1) -> RankWindow:
    each = total / count
    times = SectionTimes("step", Kind.COMPUTE, count, each, each, each, total, 0.0)
    return RankWindow(rank, end, (times,))


def totals(found: list[tuple[int, list[Row]]]) -> dict[int, dict[int, float]]:
    return {end: {row.rank: row.total for row in rows} for end, rows in found}


def ends(windows: Iterable[RankWindow]) -> list[int]:
    return [one.end for one in windows]


def test_a_window_waits_for_every_rank() -> None:
    one = Gathering(range(3))
    assert one.take([window(0, 1), window(1, 1)]) == []
    assert totals(one.take([window(2, 1)])) == {1: {0: 1.0, 1: 1.0, 2: 1.0}}


def test_windows_of_different_length_are_joined_where_all_end() -> None:
    one = Gathering(range(2))
    found = one.take([window(0, end) for end in (1, 2, 3, 4)] + [window(1, 2, 2.0), window(1, 4, 2.0)])
    assert totals(found) == {2: {0: 2.0, 1: 2.0}, 4: {0: 2.0, 1: 2.0}}


def test_windows_in_any_order_of_ranks_lose_nothing(seed: int) -> None:
    draws = Random(seed)
    lengths = {rank: draws.choice([1, 2, 4]) for rank in range(4)}
    windows = {
        rank: [window(rank, end, float(each)) for end in range(each, 33, each)]
        for rank, each in lengths.items()
    }
    one = Gathering(range(4))
    found: list[tuple[int, list[Row]]] = []
    while any(windows.values()):
        rank = draws.choice([rank for rank, left in windows.items() if left])
        found += one.take([windows[rank].pop(0)])
    assert sum(sum(rows.values()) for rows in totals(found).values()) == 4 * 32
    assert [end for end, _ in found] == list(range(max(lengths.values()), 33, max(lengths.values())))


def test_a_rank_that_sends_nothing_is_left_out_after_a_while() -> None:
    one = Gathering(range(3))
    found: list[tuple[int, list[Row]]] = []
    for end in range(1, 3 * MOST_WAITING):
        found += one.take([window(0, end), window(1, end)])
    assert found
    assert all({row.rank for row in rows} == {0, 1} for _, rows in found)


def test_the_32nd_window_that_waits_is_compared_without_those_who_sent_none() -> None:
    one = Gathering(range(3))
    for end in range(1, 32):
        assert one.take([window(0, end), window(1, end)]) == []
    assert totals(one.take([window(0, 32)])) == {end: {0: 1.0, 1: 1.0} for end in range(1, 32)}
    assert one.take([window(1, 32)]) == [], "rank 0 begins anew"
    assert totals(one.take([window(2, 32, 32.0)])) == {32: {0: 1.0, 1: 1.0, 2: 32.0}}


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


def test_joined_windows_have_as_many_sections_as_a_report_may_have() -> None:
    windows = [
        RankWindow(0, at, tuple(SectionTimes(f"{at}-{of}", Kind.OTHER, *[1] * 6) for of in range(20)))
        for at in range(2)
    ]
    assert len(joined(windows).sections) == 36
    assert joined(windows).sections[:20] == windows[0].sections


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
    assert ends(found) == after
    assert sum(one.sections[0].total for one in found) == len(list(before))


def test_a_report_out_of_bounds_is_refused() -> None:
    codec = Codec[TimingReport](TimingReport)
    times = SectionTimes("s" * 64, Kind.DATA, 0, 0.0, 0.5, 1e9, 1e9, 0.0)
    most = TimingReport(0, (RankWindow(0, 0, (times,) * 36),))
    assert codec.read(codec.write(most)) == most
    for one, words in (
        (replace(times, median=-1e-9), "median is -1e-09, expected a number from 0 to 1000000000.0"),
        (replace(times, total=1e9 + 0.5), "total is 1000000000.5, expected a number from 0 to 1000000000.0"),
        (replace(times, section="s" * 65), "section is a text of 65 characters, expected at most 64"),
    ):
        with pytest.raises(MessageError) as refused:
            codec.read(codec.write(TimingReport(0, (RankWindow(0, 0, (one,)),))))
        assert str(refused.value) == f"field windows[0].sections[0].{words}"
    with pytest.raises(MessageError, match="a list of 37 entries, expected at most 36"):
        codec.read(codec.write(TimingReport(0, (RankWindow(0, 0, (times,) * 37),))))
    with pytest.raises(MessageError, match="a list of 262145 entries, expected at most 262144"):
        codec.from_json({"generation": 0, "windows": [0] * (64 * 4096 + 1)})


def test_windows_that_nodes_report_at_different_times_still_end_together(seed: int) -> None:
    draws = Random(seed)
    ranks: dict[int, list[RankWindow]] = {0: [], 1: []}
    reported: dict[int, list[RankWindow]] = {0: [], 1: []}
    gathering, found = Gathering(range(2)), []
    for end in range(1, 401):
        for rank, windows in ranks.items():
            windows.append(window(rank, end))
            windows[:] = thinned(windows, 8)
            assert len(windows) <= 8
            if draws.random() < 0.02:
                reported[rank] += windows
                found += gathering.take(windows)
                windows.clear()
    compared = totals(found)
    last = max(compared)
    assert last > 200, "both were compared until the end"
    assert sum(sum(rows.values()) for rows in compared.values()) == 2 * last


def report(end: int, slow: float = 1.0, generation: int = 1) -> TimingReport:
    windows = tuple(window(rank, end, 0.4 * (slow if rank == 2 else 1.0), 4) for rank in range(4))
    return TimingReport(generation, windows)


def watching(action: str, signs: tuple[str, ...] = ()) -> StragglerWatch:
    watch = StragglerWatch(StragglerOptions(action=action), lambda node, _: signs if node == "b" else ())
    watch.begin(1, {"a": range(2), "b": range(2, 4)})
    return watch


def slowed(watch: StragglerWatch) -> list[Noticed | RankTimes]:
    found: list[Noticed | RankTimes] = []
    for end in range(1, 40):
        found += watch.take(report(end, 2.0 if end > 20 else 1.0), float(end))
    return found


def test_a_slow_rank_is_noticed_once_with_its_times() -> None:
    found = slowed(watching("log"))
    (noticed,) = [one for one in found if isinstance(one, Noticed)]
    assert (noticed.verdict.rank, noticed.verdict.node, noticed.verdict.kind) == (2, "b", Kind.COMPUTE)
    times = [one for one in found if isinstance(one, RankTimes)]
    assert times[-1].ratios[2] == pytest.approx(2.0)
    assert times[0].typical == pytest.approx(0.1)


def test_slowness_alone_replaces_no_node() -> None:
    watch = watching("replace")
    slowed(watch)
    assert watch.wanted(0.0) is None


def test_slowness_with_a_second_sign_replaces_the_node() -> None:
    watch = watching("replace", ("hang (rank 2)",))
    slowed(watch)
    wanted = watch.wanted(0.0)
    assert isinstance(wanted, Wanted)
    assert wanted.node == "b"
    assert "second sign: hang (rank 2)" in wanted.reason


def test_a_rank_that_is_fast_again_is_left_alone() -> None:
    watch = watching("stop")
    slowed(watch)
    assert watch.wanted(0.0) is not None
    for end in range(40, 80):
        watch.take(report(end), float(end))
    assert watch.wanted(0.0) is None


def test_a_job_that_goes_back_to_an_earlier_step_is_still_watched() -> None:
    watch = watching("stop")
    slowed(watch)
    for end in range(3, 43):
        watch.take(report(end), float(40 + end))
    assert watch.wanted(0.0) is None, "healthy since"
    found: list[Noticed | RankTimes] = []
    for end in range(2, 42):
        found += watch.take(report(end, 2.0), float(90 + end))
    assert any(isinstance(one, Noticed) for one in found)


def test_a_rank_without_times_is_not_acted_upon() -> None:
    watch = watching("stop")
    slowed(watch)
    three = report(40, 2.0).windows[:2] + report(40, 2.0).windows[3:]
    for end in range(40, 40 + 4 * MOST_WAITING):
        watch.take(
            TimingReport(1, tuple(RankWindow(one.rank, end, one.sections) for one in three)), float(end)
        )
    assert watch.wanted(0.0) is None


def test_a_new_generation_forgets_the_ranks_of_the_one_before() -> None:
    watch = watching("stop")
    slowed(watch)
    watch.begin(2, {"a": range(4)})
    assert watch.wanted(0.0) is None
    assert watch.take(report(50, 2.0, generation=1), 50.0) == []


def test_a_node_reports_only_its_own_ranks() -> None:
    watch = watching("log")
    for end in range(1, 30):
        assert watch.take(report(end, 9.0), float(end), node="a") == []


def test_stages_are_blocks_of_consecutive_ranks() -> None:
    places = places_of(StragglerOptions(pipeline_stages=2), {"a": range(4), "b": range(4, 8)})
    assert [places[rank].stage for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_what_a_late_rank_is_late_with_is_where_most_of_its_excess_is(seed: int) -> None:
    draws = Random(seed)
    excess = Excess()
    for end in range(4):
        rows = []
        for rank in range(4):
            usual = {Kind.COMPUTE: 0.4, Kind.DATA: 0.1, Kind.COMMUNICATION: 0.1}
            for kind, seconds in usual.items():
                slow = 0.1 if rank == 1 and kind is Kind.DATA else 0.0
                total = seconds * draws.uniform(0.95, 1.05) + slow
                rows.append(Row(rank, kind.value, kind, end, 4, 0.1, 0.1, 0.1, total, 0.0))
        excess.add(rows)
    assert excess.kind(1, range(4)) is Kind.DATA
    assert Excess().kind(1, range(4)) is Kind.OTHER


def test_peers_share_the_place_on_each_axis_of_unequal_work() -> None:
    options = StragglerOptions(
        pipeline_stages=2, tensor_parallel=2, context_parallel=2, expert_parallel=2
    )  # in Megatron-LM's order: tensor, context, expert and data, stages
    places = places_of(options, {"a": range(8), "b": range(8, 16)})
    assert [places[rank].coordinates for rank in range(8)] == [
        *((0, 0), (0, 0), (1, 0), (1, 0)),
        *((0, 1), (0, 1), (1, 1), (1, 1)),
    ]
    assert {places[rank].stage for rank in range(8, 16)} == {1}
    assert places[8].coordinates == (0, 0)


def test_peers_have_the_same_device_where_all_devices_are_known() -> None:
    nodes = {"a": range(2), "b": range(2, 4)}
    known = places_of(StragglerOptions(), nodes, {"a": "H100", "b": "H200"})
    assert [known[rank].device for rank in range(4)] == ["H100", "H100", "H200", "H200"]
    part = places_of(StragglerOptions(), nodes, {"a": "H100", "b": ""})
    assert {part[rank].device for rank in range(4)} == {""}
