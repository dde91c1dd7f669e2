"""What a leader makes of reports: records of times, what a late rank is late with, and what is asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from outlast.stragglers.policy.gathering import MOST_WAITING, RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import BENCHMARK, LAST_MICRO_STEP, MICRO_STEP, Kind, Row, State, Verdict
from outlast.stragglers.policy.watch import Excess, Noticed, RankTimes, StragglerWatch, busy_times, places_of
from tests.stragglers.policy.builders import NODES, fed, shown, slowed, times, verdicts, watching, words

MICRO = (MICRO_STEP, LAST_MICRO_STEP)


def window(rank: int, end: int, each: float = 1.0) -> RankWindow:
    return RankWindow(rank, end, (times("step", each),))


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


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (
            [
                *(row(0, 4.0, count=4), row(0, 6.0, "data", count=99, waiting=2.0)),
                *(row(1, 8.0, count=4), row(1, 4.0, "data", waiting=4.0)),
                *(row(2, 20.0, count=4, waiting=4.0),),
            ],
            RankTimes(12, 2.0, {0: 1.0, 1: 1.0, 2: 2.0}),
        ),
        ([row(0, 3.0, "data", count=7)], RankTimes(12, 3.0, {0: 1.0})),
        ([row(0, 2.0), row(1, math.nan)], RankTimes(12, 2.0, {0: 1.0})),
        ([], None),
        ([row(0, 0.0)], None),
        ([row(0, 0.0), row(1, 0.0), row(2, 9.0)], None),
        ([row(0, math.nan)], None),
        ([row(0, math.inf), row(1, 0.0)], None),
    ],
)
def test_busy_times_are_those_of_a_step_without_waiting(rows: list[Row], found: RankTimes | None) -> None:
    assert busy_times(12, rows) == found


@pytest.mark.parametrize("equal", [False, True])
def test_of_many_ranks_the_200_that_differ_most_are_told_in_order(equal: bool) -> None:
    totals = [1.0 if equal else 100.0 + (rank % 2 * 2 - 1) * (299 - rank) / 10 for rank in range(300)]
    found = busy_times(1, [row(rank, totals[rank]) for rank in reversed(range(300))])
    assert found is not None
    assert list(found.ratios) == list(range(200))


# What a late rank is late with


def spent(*seconds: Mapping[Kind, float], waiting: float = 0.0) -> list[Row]:
    """Return the rows of a window, the seconds of each rank by kind."""
    return [
        row(rank, one + waiting, kind.value, waiting=waiting, kind=kind)
        for rank, kinds in enumerate(seconds)
        for kind, one in kinds.items()
    ]


def of_rank_1(seconds: Mapping[Kind, float]) -> list[Row]:
    return spent(USUAL, {**USUAL, **seconds}, USUAL)


def kind_of(*windows: Iterable[Row], peers: Iterable[int] = range(3)) -> Kind:
    excess = Excess()
    for one in windows:
        excess.add(one)
    return excess.kind(1, list(peers))


COMPUTE, DATA, OTHER = Kind.COMPUTE, Kind.DATA, Kind.OTHER
USUAL = {COMPUTE: 4.0, DATA: 1.0}
LOADS, COMPUTES = of_rank_1({DATA: 3.0}), of_rank_1({COMPUTE: 5.0})


@pytest.mark.parametrize(
    ("windows", "kind"),
    [
        ([of_rank_1({COMPUTE: 4.9, DATA: 2.0})], DATA),
        ([of_rank_1({COMPUTE: 5.0, DATA: 2.0})], OTHER),
        ([of_rank_1({COMPUTE: 0.0, DATA: 1.5})], DATA),  # where it is faster does not count
        ([of_rank_1({Kind.COMMUNICATION: 0.1})], Kind.COMMUNICATION),
        ([of_rank_1({})], OTHER),
        ([[*of_rank_1({}), row(1, 9.0, "x", waiting=9.0, kind=Kind.COMMUNICATION)]], OTHER),
        ([spent(USUAL, {**USUAL, DATA: 2.0}, USUAL, waiting=5.0)], DATA),
        ([LOADS[:2]], OTHER),
        ([spent(USUAL)], OTHER),
        ([], OTHER),
        ([LOADS, LOADS, COMPUTES, COMPUTES], DATA),  # the latest four windows count together
        ([LOADS, COMPUTES, COMPUTES, COMPUTES], COMPUTE),
        ([LOADS, LOADS, COMPUTES, COMPUTES, COMPUTES], COMPUTE),
        ([LOADS, LOADS, LOADS, COMPUTES, COMPUTES, COMPUTES], COMPUTE),
    ],
)
def test_most_of_the_excess_is_more_than_half_of_it(windows: list[list[Row]], kind: Kind) -> None:
    assert kind_of(*windows) is kind


@pytest.mark.parametrize(("peers", "kind"), [([1], OTHER), ([1, 7], OTHER), ([0, 1], DATA)])
def test_a_rank_without_peers_is_late_with_nothing(peers: list[int], kind: Kind) -> None:
    assert kind_of(LOADS, peers=peers) is kind


# Records


def test_times_are_told_every_ten_seconds_and_with_each_verdict() -> None:
    watch = watching()
    found = shown(watch, range(1, 41), {})
    assert [one.step for one in found] == [4 * end for end in (1, 11, 21, 31)]
    found = shown(watch, range(41, 60), {5: 2.0})
    records = [one for one in found if isinstance(one, RankTimes)]
    (noticed,) = [one for one in found if not isinstance(one, RankTimes)]
    verdict = noticed.verdict
    assert (verdict.rank, verdict.node, verdict.kind, verdict.state) == (5, "b", COMPUTE, State.ON)
    assert "compute" not in words(verdict), "its section has it"
    assert noticed.step in [one.step for one in records]
    assert (records[-1].ratios[5], records[-1].typical) == (pytest.approx(2.0), pytest.approx(0.1))


def test_windows_without_times_are_told_as_unknown_and_have_no_record() -> None:
    found = shown(watching(), [1], {}, ())
    assert [one.state for one in verdicts(found)] == [State.UNKNOWN] * 8
    assert len(found) == 8


def test_a_node_is_believed_about_its_own_ranks_only() -> None:
    watch = watching()
    report = TimingReport(1, tuple(window(rank, 1) for rank in (*range(8), 99)))
    assert watch.take(report, 1.0, "a") == []
    assert [one.step for one in watch.take(report, 1.0, "b")] == [4]
    own = {node: TimingReport(1, tuple(window(rank, 11) for rank in NODES[node])) for node in NODES}
    assert watch.take(own["a"], 11.0, "a") == []
    assert [one.step for one in watch.take(own["b"], 11.0, "b")] == [44]


@pytest.mark.parametrize("generation", [1, 0])
def test_before_a_generation_begins_nothing_is_taken(generation: int) -> None:
    watch = StragglerWatch(StragglerOptions(action="stop"), lambda *_: ())
    assert shown(watch, range(1, 41), {5: 2.0}, generation=generation) == []
    assert (watch.wanted(0.0), watch.slow) == (None, ())


def test_a_new_generation_forgets_the_ranks_and_the_time_of_the_one_before() -> None:
    watch = watching("stop")
    slowed(watch, {5: 2.0})
    watch.begin(2, {"a": range(8)})
    assert watch.wanted(0.0) is None
    assert shown(watch, [61], {5: 2.0}) == [], "of generation 1"
    assert [one.step for one in shown(watch, range(62, 82), {}, generation=2)] == [4 * 62, 4 * 72]


# Who is slow, and who is no longer


def test_a_job_that_goes_back_to_an_earlier_step_is_still_watched() -> None:
    watch = watching("stop")
    slowed(watch, {5: 2.0})
    assert watch.wanted(0.0) is not None
    for end in range(3, 43):
        shown(watch, [end], {})
    assert watch.wanted(0.0) is None, "healthy since"
    assert verdicts(shown(watch, range(2, 42), {5: 2.0}))


def test_old_windows_of_a_part_of_the_ranks_are_not_judged_again() -> None:
    watch = watching()
    shown(watch, range(1, 41), {})
    late = [window(rank, end, 0.2 if rank == 5 else 0.1) for end in range(3, 36) for rank in range(7)]
    assert not verdicts(watch.take(TimingReport(1, tuple(late)), 41.0))


def test_a_rank_without_times_is_not_acted_upon() -> None:
    watch = watching("stop")
    slowed(watch, {5: 2.0})
    fed(watch, range(60, 60 + 4 * MOST_WAITING), lambda *_: [times("step", 0.1)], (0, 1, 2, 3, 4, 6, 7))
    assert watch.wanted(0.0) is None


def test_a_slow_rank_whose_times_are_missing_asks_for_nothing_until_they_are_known_again() -> None:
    watch, slow = watching("stop"), {1: 2.0, 5: 3.0}
    slowed(watch, slow)
    told = fed(watch, [60], lambda rank, _: [times("step", 0.2 if rank == 1 else 0.1)] * (rank != 5))
    assert [one.state for one in verdicts(told)] == [State.UNKNOWN]
    nodes = [watch.wanted(0.0)]
    shown(watch, [61], slow)
    nodes.append(watch.wanted(0.0))
    assert [one and one.node for one in nodes] == ["a", "b"]


def both(
    watch: StragglerWatch, end: int, forward: float, backward: float | None
) -> list[Noticed | RankTimes]:
    """Show a window in which rank 5 takes so long in two sections; None: it does not enter one."""

    def sections(rank: int, _: int) -> list[SectionTimes]:
        if rank != 5:
            return [times("forward", 0.1), times("backward", 0.1)]
        return [times("forward", forward)] + [times("backward", backward or 0.0)] * (backward is not None)

    return fed(watch, [end], sections)


def test_a_rank_that_is_fast_again_in_one_section_is_still_slow_in_the_other() -> None:
    watch, wanted = watching("stop"), []
    slowed(watch, {5: 2.0}, ("forward", "backward"))
    for end in range(60, 90):
        both(watch, end, 0.1, 0.2 if end < 75 else 0.1)
        wanted.append(watch.wanted(0.0))
    assert wanted[14] is not None
    assert "'backward'" in wanted[14].reason
    assert wanted[-1] is None


def test_a_rank_whose_times_of_one_section_are_missing_is_still_slow_in_the_other() -> None:
    watch = watching("stop")
    slowed(watch, {5: 2.0}, ("backward", "forward"))
    told = both(watch, 60, 0.2, None)
    assert [(one.section, one.state) for one in verdicts(told)] == [("backward", State.UNKNOWN)]
    wanted = watch.wanted(0.0)
    assert wanted is not None
    assert "'forward'" in wanted.reason


def late(watch: StragglerWatch, kind: Kind, loads: range = range(0)) -> list[Verdict]:
    """Show windows in which rank 5 does something else, and its peers wait for it; some ranks always load."""

    def sections(rank: int, end: int) -> list[SectionTimes]:
        slow = rank == 5 and end > 20
        step = times("step", 0.1, waiting=0.0 if slow or rank in loads or end < 21 else 0.2)
        own = times("load", 0.05, DATA) if rank in loads else times(f"own {kind.value}", 0.05, kind)
        return [step, own] if slow or rank in loads else [step]

    told = verdicts(fed(watch, range(1, 60), sections))
    return [one for one in told if one.state is State.ON and not one.section]


@pytest.mark.parametrize("kind", [DATA, Kind.COMMUNICATION, OTHER])
@pytest.mark.parametrize("action", ["log", "rebalance"])
def test_what_a_rank_is_late_with_is_told_where_no_section_explains_it(kind: Kind, action: str) -> None:
    (told,) = late(watching(action), kind)
    assert (told.rank, told.node, told.kind) == (5, "b", kind)
    assert (kind.value in words(told)) is (kind is not OTHER)
    assert ("outlast.Batches" in words(told)) is (action == "rebalance")


def test_what_a_rank_is_late_with_is_seen_by_the_ranks_with_equal_work() -> None:
    """The first stage loads data for as long as rank 5, of the second one, does."""
    watch = StragglerWatch(StragglerOptions(pipeline_stages=2), lambda *_: ())
    watch.begin(1, NODES)
    assert [(one.rank, one.kind) for one in late(watch, DATA, loads=range(4))] == [(5, DATA)]


# What is asked for


@pytest.mark.parametrize(
    ("action", "signs", "node"),
    [
        ("replace", {"a": "hang", "b": "crash"}, "b"),
        ("replace", {"a": "hang"}, "a"),
        ("replace", {}, ""),
        ("stop", {}, "b"),
        ("stop", {"b": "crash"}, "b"),
        ("log", {"b": "crash"}, ""),
        ("rebalance", {"b": "crash"}, ""),
    ],
)
def test_the_slowest_rank_is_replaced_with_a_second_sign_or_ends_the_job(
    action: str, signs: dict[str, str], node: str
) -> None:
    watch = watching(action, signs)
    slowed(watch, {1: 2.0, 5: 3.0})
    wanted = watch.wanted(0.0)
    assert (wanted.node if wanted else "") == node
    if wanted:
        assert re.search("1 .*a .*2.00" if node == "a" else "5 .*b .*3.00", wanted.reason)
        assert wanted.reason.endswith(signs.get(node, "")) or action == "stop"
    asked = watch.asks_benchmark(100.0, 0.0)
    assert bool(asked) is (action == "replace" and signs.keys() != {"a", "b"})


def test_a_slow_rank_without_another_sign_asks_for_the_product_and_is_replaced_by_it() -> None:
    watch = watching("replace")
    assert watch.asks_benchmark(0.0, 0.0) == ""
    slowed(watch, {5: 2.0})
    assert re.search(r"\b5 .*\bb\b", watch.asks_benchmark(100.0, 0.0))
    assert watch.asks_benchmark(101.0, 0.0) == ""
    assert watch.wanted(0.0) is None
    shown(watch, [60], {5: 2.0}, ("step", BENCHMARK))
    wanted = watch.wanted(0.0)
    assert wanted is not None
    assert re.search(r"; .*2\.00 .*\b4 ", wanted.reason)
    assert watch.asks_benchmark(1000.0, 0.0) == "", "there is a second sign"


def test_the_product_is_no_part_of_a_step() -> None:
    watch = watching("stop")
    for one in fed(
        watch,
        range(1, 60),
        lambda rank, _: [times("step", 0.1), times(BENCHMARK, 0.9 if rank == 5 else 0.1)],
    ):
        assert isinstance(one, RankTimes)
        assert (one.typical, one.ratios) == (pytest.approx(0.1), dict.fromkeys(range(8), 1.0))
    assert watch.wanted(0.0) is None


# Shares


def test_shares_follow_the_four_ranks_that_cost_most() -> None:
    watch = watching("rebalance", nodes={"a": range(16)})
    slow = {1: 2.0, 3: 4.0, 5: 2.5, 7: 4.0, 9: 5000.0}

    def sections(rank: int, end: int) -> list[SectionTimes]:
        each = 0.1 * (slow.get(rank, 1.0) if end > 20 else 1.0)
        waiting = 8 * (0.1 * max(slow.values()) - each) if end > 20 else 0.0
        last = times("sync", 0.025, Kind.COMMUNICATION, waiting)
        return [*(times(name, each) for name in MICRO), last]

    fed(watch, range(1, 60), sections, range(16))
    assert dict(watch.slow) == {3: 250, 5: 400, 7: 250, 9: 1}


def test_shares_follow_micro_batches_alone() -> None:
    watch = watching("rebalance")
    fed(
        watch,
        range(1, 60),
        lambda rank, end: [
            *(times(name, 0.1) for name in MICRO),
            times("forward", 0.2 if rank == 5 and end > 20 else 0.1),
        ],
    )
    assert dict(watch.slow) == {}


@pytest.mark.parametrize(("speed", "slowdown"), [(500, 2.0), (1, 1000.0), (0, 1000.0)])
def test_what_an_earlier_leader_found_is_withdrawn_as_it_was(speed: int, slowdown: float) -> None:
    watch = watching("rebalance")
    watch.resume(((5, speed),), 0.0)
    found = verdicts(shown(watch, range(1, 12), {}))
    assert sorted(one.section for one in found) == sorted(MICRO)
    for one in found:
        assert (one.rank, one.node, one.kind, one.state) == (5, "b", COMPUTE, State.OFF)
        assert (one.slowdown, one.job_slowdown, one.windows) == (slowdown, 1.0, 0)
        assert math.isnan(one.share_of_steps)
        assert math.isnan(one.confidence)


def test_a_new_generation_learns_the_shares_in_force_anew() -> None:
    watch = watching("rebalance")
    watch.resume(((5, 500),), 0.0)
    watch.resume(((1, 500),), 0.0)
    assert dict(watch.slow) == {5: 500}, "once"
    watch.begin(2, NODES)
    assert dict(watch.slow) == {}
    watch.resume(((1, 250), (9, 100)), 0.0)
    assert dict(watch.slow) == {1: 250}, "rank 9 is gone"


def test_a_script_that_does_not_divide_its_micro_batches_is_told_so() -> None:
    watch = watching("rebalance")
    divides = verdicts(slowed(watch, {5: 2.0}, MICRO))
    assert ["outlast.Batches" in words(one) for one in divides] == [False, False], "one for each section"
    watch.begin(2, NODES)
    shown(watch, range(61, 81), {}, generation=2)
    (told,) = verdicts(shown(watch, range(81, 120), {5: 2.0}, generation=2))
    assert "outlast.Batches" in words(told)


# Peers, and options


@pytest.mark.parametrize(
    ("stages", "ranks", "expected"),
    [
        (2, range(8), [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, range(5), [0, 0, 0, 1, 1]),
        (4, range(2), [0, 1]),
        (4, range(0), []),
    ],
)
def test_stages_are_blocks_of_consecutive_ranks(stages: int, ranks: range, expected: list[int]) -> None:
    places = places_of(StragglerOptions(pipeline_stages=stages), {"a": ranks} if ranks else {})
    assert [places[rank].stage for rank in ranks] == expected


def test_peers_share_the_place_on_each_axis_of_unequal_work() -> None:
    """In Megatron-LM's order: tensor, context, expert and data, stages."""
    options = StragglerOptions(pipeline_stages=2, tensor_parallel=2, context_parallel=2, expert_parallel=2)
    places = places_of(options, {"a": range(8), "b": range(8, 16)})
    assert [places[rank].coordinates for rank in range(9)] == [
        *((0, 0), (0, 0), (1, 0), (1, 0)),
        *((0, 1), (0, 1), (1, 1), (1, 1)),
        (0, 0),
    ]
    assert {places[rank].stage for rank in range(8, 16)} == {1}


@pytest.mark.parametrize(("other", "found"), [("H200", ["H100"] * 4 + ["H200"] * 4), ("", [""] * 8)])
def test_peers_have_the_same_device_where_all_devices_are_known(other: str, found: list[str]) -> None:
    places = places_of(StragglerOptions(), NODES, {"a": "H100", "b": other})
    assert [places[rank].device for rank in range(8)] == found


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, ""),
        ({"action": "evict"}, "action: .*evict.*log, rebalance, replace, stop"),
        ({"window": 0}, "window: 0"),
        ({"pipeline_stages": -1}, "pipeline_stages: -1"),
        ({"enabled": False, "action": "stop"}, "action: .*enabled"),
        ({"tensor_parallel": 2}, "tensor_parallel: .*context_parallel.*expert_parallel"),
        *(
            ({"tensor_parallel": tensor, "context_parallel": context, "expert_parallel": expert}, "")
            for tensor in (1, 2)
            for context, expert in ((2, 1), (1, 2), (2, 2), (2, 3))
        ),
    ],
)
def test_an_option_that_cannot_take_effect_is_named(options: dict[str, Any], problem: str) -> None:
    found = StragglerOptions(**options).problems()
    assert len(found) == bool(problem)
    assert not problem or re.match(problem, found[0])
    assert StragglerOptions() == StragglerOptions(True, "log", 4, 1, 1, 1, 1)
