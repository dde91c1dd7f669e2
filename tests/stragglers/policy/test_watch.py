"""What a leader makes of reports: records of times, what a late rank is late with, and what is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import BENCHMARK, LAST_MICRO_STEP, MICRO_STEP, Kind, Row, State
from outlast.stragglers.policy.watch import (
    Excess,
    Noticed,
    RankTimes,
    StragglerWatch,
    Wanted,
    busy_times,
    places_of,
)

NODES = {"a": range(4), "b": range(4, 8)}


def row(
    rank: int,
    total: float,
    section: str = "step",
    count: int = 1,
    waiting: float = 0.0,
    kind: Kind = Kind.COMPUTE,
) -> Row:
    return Row(rank, section, kind, 1, count, total, total, total, total, waiting)


# How long each rank was busy


def test_busy_times_are_those_of_a_step_without_waiting() -> None:
    rows = [
        *(row(0, 4.0, count=4), row(0, 6.0, "data", count=99, waiting=2.0)),
        *(row(1, 8.0, count=4), row(1, 4.0, "data", waiting=4.0)),
        *(row(2, 20.0, count=4, waiting=4.0),),
    ]
    assert busy_times(12, rows) == RankTimes(12, 2.0, {0: 1.0, 1: 1.0, 2: 2.0})


def test_without_steps_the_whole_window_counts() -> None:
    assert busy_times(1, [row(0, 3.0, "data", count=7)]) == RankTimes(1, 3.0, {0: 1.0})


@pytest.mark.parametrize("totals", [(), (0.0,), (0.0, 0.0, 9.0), (math.nan,), (math.inf, 0.0)])
def test_without_a_time_there_is_no_record(totals: tuple[float, ...]) -> None:
    assert busy_times(1, [row(rank, one) for rank, one in enumerate(totals)]) is None


def test_a_time_that_is_not_known_is_left_out() -> None:
    assert busy_times(1, [row(0, 2.0), row(1, math.nan)]) == RankTimes(1, 2.0, {0: 1.0})


def test_of_many_ranks_the_200_that_differ_most_are_told_in_order() -> None:
    totals = [100.0 + (rank % 2 * 2 - 1) * (299 - rank) / 10 for rank in range(300)]
    found = busy_times(1, [row(rank, one) for rank, one in enumerate(totals)])
    assert found is not None
    assert list(found.ratios) == list(range(200))
    equal = busy_times(1, [row(rank, 1.0) for rank in reversed(range(300))])
    assert equal is not None
    assert list(equal.ratios) == list(range(200))


# What a late rank is late with


def spent(*seconds: Mapping[Kind, float], waiting: float = 0.0) -> list[Row]:
    """Return the rows of a window, the seconds of each rank by kind."""
    return [
        row(rank, one + waiting, kind.value, waiting=waiting, kind=kind)
        for rank, kinds in enumerate(seconds)
        for kind, one in kinds.items()
    ]


def kind_of(*windows: Iterable[Row], peers: Iterable[int] = range(3)) -> Kind:
    excess = Excess()
    for one in windows:
        excess.add(one)
    return excess.kind(1, list(peers))


USUAL = {Kind.COMPUTE: 4.0, Kind.DATA: 1.0}


def test_most_of_the_excess_is_more_than_half_of_it() -> None:
    data = spent(USUAL, {Kind.COMPUTE: 4.9, Kind.DATA: 2.0}, USUAL)
    assert kind_of(data) is Kind.DATA
    half = spent(USUAL, {Kind.COMPUTE: 5.0, Kind.DATA: 2.0}, USUAL)
    assert kind_of(half) is Kind.OTHER
    less = spent(USUAL, {Kind.COMPUTE: 0.0, Kind.DATA: 1.5}, USUAL)
    assert kind_of(less) is Kind.DATA, "where it is faster does not count"
    new = spent(USUAL, {**USUAL, Kind.COMMUNICATION: 0.1}, USUAL)
    assert kind_of(new) is Kind.COMMUNICATION


def test_waiting_is_no_excess() -> None:
    waits = [*spent(USUAL, USUAL, USUAL), row(1, 9.0, "x", waiting=9.0, kind=Kind.COMMUNICATION)]
    assert kind_of(waits) is Kind.OTHER
    assert kind_of(spent(USUAL, {**USUAL, Kind.DATA: 2.0}, USUAL, waiting=5.0)) is Kind.DATA


def test_a_rank_that_is_as_fast_as_its_peers_or_has_none_is_late_with_nothing() -> None:
    late = spent(USUAL, {**USUAL, Kind.DATA: 9.0}, USUAL)
    assert kind_of(spent(USUAL, USUAL, USUAL)) is Kind.OTHER
    assert kind_of(late, peers=[1]) is Kind.OTHER
    assert kind_of(late, peers=[1, 7]) is Kind.OTHER
    assert kind_of(late, peers=[0, 1]) is Kind.DATA
    assert kind_of(late[:2]) is Kind.OTHER
    assert kind_of(spent(USUAL)) is Kind.OTHER, "nothing of it is known"


def test_the_latest_four_windows_count_together() -> None:
    loads = spent(USUAL, {Kind.COMPUTE: 4.0, Kind.DATA: 3.0}, USUAL)
    computes = spent(USUAL, {Kind.COMPUTE: 5.0, Kind.DATA: 1.0}, USUAL)
    assert kind_of(loads, loads, computes, computes) is Kind.DATA
    assert kind_of(loads, computes, computes, computes) is Kind.COMPUTE
    assert kind_of(loads, loads, computes, computes, computes) is Kind.COMPUTE
    assert kind_of(loads, loads, loads, computes, computes, computes) is Kind.COMPUTE


# What follows


def window(rank: int, end: int, each: float, sections: Iterable[str]) -> RankWindow:
    times = (SectionTimes(one, Kind.COMPUTE, 4, each, each, each, each * 4, 0.0) for one in sections)
    return RankWindow(rank, end, tuple(times))


def watching(action: str = "log", signs: Mapping[str, str] | None = None, window: int = 4) -> StragglerWatch:
    told = signs or {}
    watch = StragglerWatch(
        StragglerOptions(action=action, window=window),
        lambda node, wall: [told[node]] if node in told else [],
    )
    watch.begin(1, NODES)
    return watch


def shown(
    watch: StragglerWatch,
    ends: Iterable[int],
    slow: Mapping[int, float],
    sections: Iterable[str] = ("step",),
    generation: int = 1,
) -> list[Noticed | RankTimes]:
    """Show windows in which some ranks take longer; a window takes a second."""
    found: list[Noticed | RankTimes] = []
    for end in ends:
        windows = [window(rank, end, 0.1 * slow.get(rank, 1.0), sections) for rank in range(8)]
        found += watch.take(TimingReport(generation, tuple(windows)), float(end))
    return found


def test_times_are_told_every_ten_seconds_and_with_each_verdict() -> None:
    watch = watching()
    assert [one.step for one in shown(watch, range(1, 41), {}) if isinstance(one, RankTimes)] == [
        *(4 * end for end in (1, 11, 21, 31))
    ]
    found = shown(watch, range(41, 60), {5: 2.0})
    noticed = next(one for one in found if isinstance(one, Noticed))
    assert noticed.step in [one.step for one in found if isinstance(one, RankTimes)]
    assert noticed.verdict.state is State.ON


@pytest.mark.parametrize(("speed", "slowdown"), [(500, 2.0), (1, 1000.0), (0, 1000.0)])
def test_what_an_earlier_leader_found_is_withdrawn_with_what_it_said(speed: int, slowdown: float) -> None:
    watch = watching("rebalance")
    watch.resume(((5, speed),), 0.0)
    verdicts = [one.verdict for one in shown(watch, range(1, 12), {}) if isinstance(one, Noticed)]
    assert sorted(one.section for one in verdicts) == sorted((MICRO_STEP, LAST_MICRO_STEP))
    for one in verdicts:
        assert (one.rank, one.node, one.kind, one.state) == (5, "b", Kind.COMPUTE, State.OFF)
        assert (one.slowdown, one.job_slowdown, one.windows) == (slowdown, 1.0, 0)
        assert math.isnan(one.share_of_steps)
        assert math.isnan(one.confidence)


def test_the_slowest_rank_with_another_sign_is_replaced() -> None:
    slow = {1: 2.0, 5: 3.0}
    for signs, node in (({"a": "hang", "b": "crash"}, "b"), ({"a": "hang"}, "a"), ({}, "")):
        watch = watching("replace", signs)
        shown(watch, range(1, 21), {})
        shown(watch, range(21, 60), slow)
        wanted = watch.wanted(0.0)
        assert (wanted.node if wanted else "") == node
        if isinstance(wanted, Wanted):
            assert wanted.reason.endswith(f"; second sign: {signs[node]}")
    stop = watching("stop")
    shown(stop, range(1, 21), {})
    shown(stop, range(21, 60), slow)
    stopped = stop.wanted(0.0)
    assert stopped is not None
    assert stopped.node == "b"
    assert stopped.reason.startswith("rank 5 on b takes 3.00 times as long")


def test_a_slow_rank_without_another_sign_asks_for_the_product_and_is_replaced_by_it() -> None:
    watch = watching("replace")
    assert watch.asks_benchmark(0.0, 0.0) == ""
    shown(watch, range(1, 21), {})
    shown(watch, range(21, 60), {5: 2.0})
    assert watch.asks_benchmark(100.0, 0.0) == (
        "rank 5 on b is slow, and no second sign says that its node is sick: every rank computes the same"
        " product after a step"
    )
    assert watch.asks_benchmark(101.0, 0.0) == ""
    assert watch.wanted(0.0) is None
    shown(watch, [60], {5: 2.0}, ("step", BENCHMARK))
    wanted = watch.wanted(0.0)
    assert wanted is not None
    assert wanted.reason.endswith(
        "second sign: it takes 2.00 times as long as 4 ranks of other nodes for the same product"
    )
    assert watch.asks_benchmark(1000.0, 0.0) == "", "there is a second sign"


def test_the_product_is_no_part_of_a_step() -> None:
    watch = watching("stop")
    for end in range(1, 60):
        windows = []
        for rank in range(8):
            (step,) = window(rank, end, 0.1, ("step",)).sections
            (product,) = window(rank, end, 0.9 if rank == 5 else 0.1, (BENCHMARK,)).sections
            windows.append(RankWindow(rank, end, (step, product)))
        for one in watch.take(TimingReport(1, tuple(windows)), float(end)):
            assert one == RankTimes(4 * end, pytest.approx(0.1), dict.fromkeys(range(8), 1.0))
    assert watch.wanted(0.0) is None


@pytest.mark.parametrize("action", ["log", "stop", "rebalance"])
def test_only_a_replacement_asks_for_the_product(action: str) -> None:
    watch = watching(action)
    shown(watch, range(1, 21), {})
    shown(watch, range(21, 60), {5: 2.0})
    assert watch.asks_benchmark(100.0, 0.0) == ""
    watch = watching(action, {"b": "crash"})
    shown(watch, range(1, 21), {})
    shown(watch, range(21, 60), {5: 2.0})
    assert (watch.wanted(0.0) is None) is (action != "stop")


def test_a_rank_with_a_sign_of_its_own_asks_for_no_product() -> None:
    watch = watching("replace", {"b": "crash"})
    shown(watch, range(1, 21), {})
    shown(watch, range(21, 60), {5: 2.0})
    assert watch.asks_benchmark(100.0, 0.0) == ""


def test_a_slow_rank_whose_times_are_missing_asks_for_nothing_until_they_are_known_again() -> None:
    watch = watching("stop")
    shown(watch, range(1, 21), {})
    shown(watch, range(21, 60), {1: 2.0, 5: 3.0})
    silent = [window(rank, 60, 0.2 if rank == 1 else 0.1, ("step",) * (rank != 5)) for rank in range(8)]
    told = watch.take(TimingReport(1, tuple(silent)), 60.0)
    assert [one.verdict.state for one in told if isinstance(one, Noticed)] == [State.UNKNOWN]
    nodes = [watch.wanted(0.0)]
    shown(watch, [61], {1: 2.0, 5: 3.0})
    nodes.append(watch.wanted(0.0))
    assert [one and one.node for one in nodes] == ["a", "b"]


def test_a_rank_that_is_fast_again_in_one_section_is_still_slow_in_the_other() -> None:
    watch = watching("stop")
    names = ("forward", "backward")
    shown(watch, range(1, 21), {}, names)
    shown(watch, range(21, 50), {5: 2.0}, names)
    wanted = []
    for end in range(50, 80):
        windows = []
        for rank in range(8):
            (fast,) = window(rank, end, 0.1, ("forward",)).sections
            (slow,) = window(rank, end, 0.2 if rank == 5 and end < 65 else 0.1, ("backward",)).sections
            windows.append(RankWindow(rank, end, (fast, slow)))
        watch.take(TimingReport(1, tuple(windows)), float(end))
        wanted.append(watch.wanted(0.0))
    assert [one is not None and "'backward'" in one.reason for one in (wanted[14], wanted[-1])] == [
        True,
        False,
    ]
    assert wanted[-1] is None


def test_a_rank_whose_times_of_one_section_are_missing_is_still_slow_in_the_other() -> None:
    watch = watching("stop")
    shown(watch, range(1, 21), {}, ("backward", "forward"))
    shown(watch, range(21, 50), {5: 2.0}, ("backward", "forward"))
    windows = [window(rank, 50, 0.2 if rank == 5 else 0.1, ("backward", "forward")) for rank in range(8)]
    windows[5] = replace(windows[5], sections=windows[5].sections[1:])
    told = watch.take(TimingReport(1, tuple(windows)), 50.0)
    assert [(one.verdict.section, one.verdict.state) for one in told if isinstance(one, Noticed)] == [
        ("backward", State.UNKNOWN)
    ]
    wanted = watch.wanted(0.0)
    assert wanted is not None
    assert "'forward'" in wanted.reason


def test_windows_without_times_are_told_as_unknown_and_have_no_record() -> None:
    found = shown(watching(), [1], {}, ())
    assert [one.verdict.state for one in found if isinstance(one, Noticed)] == [State.UNKNOWN] * 8
    assert len(found) == 8


def test_old_windows_of_a_part_of_the_ranks_are_not_judged_again() -> None:
    """All ranks together go back to an earlier step; some alone send what is late."""
    watch = watching()
    shown(watch, range(1, 41), {})
    late = [
        window(rank, end, 0.2 if rank == 5 else 0.1, ("step",)) for end in range(3, 36) for rank in range(7)
    ]
    told = watch.take(TimingReport(1, tuple(late)), 41.0)
    assert not any(isinstance(one, Noticed) for one in told)


def test_a_node_is_believed_about_its_own_ranks_only() -> None:
    watch = watching()
    report = TimingReport(1, tuple(window(rank, 1, 0.1, ("step",)) for rank in (*range(8), 99)))
    assert watch.take(report, 1.0, "a") == []
    assert [one.step for one in watch.take(report, 1.0, "b")] == [4]
    own = {
        node: TimingReport(1, tuple(window(rank, 11, 0.1, ("step",)) for rank in NODES[node]))
        for node in NODES
    }
    assert watch.take(own["a"], 11.0, "a") == []
    assert [one.step for one in watch.take(own["b"], 11.0, "b")] == [44]


def late(end: int, kind: Kind, action: str, watch: StragglerWatch) -> list[str]:
    """Show a window in which rank 5 does something that no other rank does, and the others wait for it."""
    windows = []
    for rank in range(8):
        waits = 0.0 if rank == 5 or end < 21 else 0.2
        step = SectionTimes("step", Kind.COMPUTE, 4, 0.1, 0.1, 0.1, 0.4 + waits, waits)
        own = SectionTimes(f"{kind.value}-{action}", kind, 4, 0.05, 0.05, 0.05, 0.2, 0.0)
        windows.append(RankWindow(rank, end, (step, own) if rank == 5 and end > 20 else (step,)))
    found = watch.take(TimingReport(1, tuple(windows)), float(end))
    return [
        f"{one.verdict.kind.value}: {one.verdict.reason}"
        for one in found
        if isinstance(one, Noticed) and one.verdict.state is State.ON and not one.verdict.section
    ]


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.COMMUNICATION, Kind.OTHER])
@pytest.mark.parametrize("action", ["log", "rebalance"])
def test_what_a_rank_is_late_with_is_told_where_no_section_explains_it(kind: Kind, action: str) -> None:
    watch = watching(action)
    (told,) = [one for end in range(1, 60) for one in late(end, kind, action, watch)]
    assert told.startswith(f"{kind.value}: rank 5 on b keeps its 7 peers waiting in ")
    assert told.endswith(
        "no section explains it"
        + "; micro-batches stay as they are, since the script does not measure them with outlast.Batches"
        * (action == "rebalance")
        + f"; most of it is {kind.value}" * (kind is not Kind.OTHER)
    )


def test_what_a_rank_is_late_with_is_seen_by_the_ranks_with_equal_work() -> None:
    """The first stage loads data for as long as rank 5, of the second one, does."""
    watch = StragglerWatch(StragglerOptions(pipeline_stages=2), lambda *_: ())
    watch.begin(1, NODES)
    told = []
    for end in range(1, 60):
        windows = []
        for rank in range(8):
            slow = rank == 5 and end > 20
            waits = 0.0 if slow or rank < 4 or end < 21 else 0.2
            step = SectionTimes("step", Kind.COMPUTE, 4, 0.1, 0.1, 0.1, 0.4 + waits, waits)
            own = SectionTimes("load" if rank < 4 else "own", Kind.DATA, 4, 0.05, 0.05, 0.05, 0.2, 0.0)
            windows.append(RankWindow(rank, end, (step, own) if slow or rank < 4 else (step,)))
        found = watch.take(TimingReport(1, tuple(windows)), float(end))
        told += [one.verdict for one in found if isinstance(one, Noticed)]
    assert [(one.rank, one.kind) for one in told if one.state is State.ON] == [(5, Kind.DATA)]


def test_shares_follow_the_four_ranks_that_cost_most_and_micro_batches_alone() -> None:
    watch = watching("rebalance")
    watch.begin(1, {"a": range(16)})
    micro = (MICRO_STEP, LAST_MICRO_STEP)
    slow = {1: 2.0, 3: 4.0, 5: 2.5, 7: 4.0, 9: 5000.0}
    for end in range(1, 60):
        each = {rank: 0.1 * (slow.get(rank, 1.0) if end > 20 else 1.0) for rank in range(16)}
        windows = []
        for rank, seconds in each.items():
            waits = 8 * (max(each.values()) - seconds)
            last = SectionTimes("sync", Kind.COMMUNICATION, 4, 0.1, 0.1, 0.1, 0.1 + waits, waits)
            windows.append(RankWindow(rank, end, (*window(rank, end, seconds, micro).sections, last)))
        watch.take(TimingReport(1, tuple(windows)), 10.0 * end)
    assert dict(watch.slow) == {3: 250, 5: 400, 7: 250, 9: 1}
    other = watching("rebalance")
    shown(other, range(1, 21), {}, (*micro, "forward"))
    for end in range(21, 60):
        windows = []
        for rank in range(8):
            plain = window(rank, end, 0.1, micro).sections
            forward = window(rank, end, 0.2 if rank == 5 else 0.1, ("forward",)).sections
            windows.append(RankWindow(rank, end, (*plain, *forward)))
        other.take(TimingReport(1, tuple(windows)), float(end))
    assert dict(other.slow) == {}


def test_before_a_generation_begins_nothing_is_taken() -> None:
    watch = StragglerWatch(StragglerOptions(action="stop"), lambda *_: ())
    assert shown(watch, range(1, 41), {5: 2.0}) == []
    assert shown(watch, range(1, 41), {5: 2.0}, generation=0) == []
    assert (watch.wanted(0.0), watch.slow) == (None, ())


def test_a_new_generation_learns_the_shares_in_force_anew() -> None:
    watch = watching("rebalance")
    watch.resume(((5, 500),), 0.0)
    assert dict(watch.slow) == {5: 500}
    watch.resume(((1, 500),), 0.0)
    assert dict(watch.slow) == {5: 500}, "once"
    watch.begin(2, NODES)
    assert dict(watch.slow) == {}
    watch.resume(((1, 250), (9, 100)), 0.0)
    assert dict(watch.slow) == {1: 250}, "rank 9 is gone"


def test_a_new_generation_tells_its_times_at_once_and_does_not_know_who_divides() -> None:
    watch = watching("rebalance")
    shown(watch, range(1, 21), {}, (MICRO_STEP, LAST_MICRO_STEP))
    watch.begin(2, NODES)
    found = shown(watch, range(21, 41), {}, generation=2)
    assert [one.step for one in found] == [4 * end for end in (21, 31)]
    found = shown(watch, range(41, 60), {5: 2.0}, generation=2)
    (told,) = [one.verdict for one in found if isinstance(one, Noticed)]
    assert told.reason.endswith("since the script does not measure them with outlast.Batches")


def test_a_script_that_divides_its_micro_batches_is_told_no_reason_why_they_stay() -> None:
    watch, sections = watching("rebalance"), (MICRO_STEP, LAST_MICRO_STEP)
    shown(watch, range(1, 21), {}, sections)
    found = shown(watch, range(21, 60), {5: 2.0}, sections)
    reasons = [one.verdict.reason for one in found if isinstance(one, Noticed)]
    assert ["outlast.Batches" in one for one in reasons] == [False, False], "one for each section"


def test_places_are_blocks_of_a_stage_that_cover_all_ranks() -> None:
    places = places_of(StragglerOptions(pipeline_stages=2), {"a": range(5)})
    assert [places[rank].stage for rank in range(5)] == [0, 0, 0, 1, 1]
    assert places_of(StragglerOptions(pipeline_stages=4), {}) == {}
    few = places_of(StragglerOptions(pipeline_stages=4), {"a": range(2)})
    assert [few[rank].stage for rank in range(2)] == [0, 1]
