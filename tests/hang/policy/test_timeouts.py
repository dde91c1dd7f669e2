from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import LEARNED_FLOOR, FaultToleranceOptions
from outlast.hang.policy.timeouts import (
    BUCKETS,
    FINISHING,
    INITIAL,
    OUT_OF_SECTION,
    STORAGE,
    WARMUP,
    Durations,
    Timeouts,
    bucket_of,
    name_for_user,
    seconds_of,
    section_of_user,
    stored_name,
    summarise,
)


def learned(config: FaultToleranceOptions | None = None, **observed: Durations) -> Timeouts:
    timeouts = Timeouts(config or FaultToleranceOptions())
    timeouts.learn(observed)
    return timeouts


def many(p99: float, longest: float, count: int = 100) -> Durations:
    return Durations(count, p99, longest)


# Buckets


def test_the_middle_of_a_bucket_falls_into_it_and_middles_rise() -> None:
    middles = [seconds_of(bucket) for bucket in range(BUCKETS)]
    assert [bucket_of(seconds) for seconds in middles] == list(range(BUCKETS))
    assert middles == sorted(middles)


def test_a_bucket_is_a_sixteenth_of_an_octave_around_its_geometric_middle() -> None:
    assert seconds_of(0) == pytest.approx(1e-6 * math.sqrt(17 / 16), rel=1e-9)
    assert seconds_of(16 * 20 + 8) == pytest.approx(1e-6 * 2**20 * math.sqrt(24 * 25) / 16, rel=1e-9)


@given(st.floats(1e-6, 1073.0), st.floats(1e-6, 1073.0))
def test_buckets_keep_the_order_and_lose_less_than_a_sixteenth(one: float, other: float) -> None:
    assert (bucket_of(one) <= bucket_of(other)) or one > other
    assert abs(seconds_of(bucket_of(one)) / one - 1) < 1 / 16


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (1e-6, 0),
        (1.0625e-6, 1),
        (1.999999e-6, 15),
        (2e-6, 16),
        (0.0, 0),
        (1e-9, 0),
        (-5.0, 0),
        (-1e9, 0),
        (math.nan, 0),
        (-math.inf, 0),
        (1073.7, BUCKETS - 1),
        (1073.741824, BUCKETS - 1),
        (1073.7418245, BUCKETS - 1),
        (1073.8, BUCKETS - 1),
        (1e9, BUCKETS - 1),
        (math.inf, BUCKETS - 1),
    ],
)
def test_what_does_not_fit_goes_into_the_outermost_bucket(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


def histogram(samples: list[float]) -> list[int]:
    counts = Counter(map(bucket_of, samples))
    return [counts[bucket] for bucket in range(BUCKETS)]


def test_nothing_measured_is_no_duration() -> None:
    assert summarise([0] * BUCKETS, 0.0) == Durations(0, 0.0, 0.0)


def test_a_single_outlier_among_a_hundred_is_beyond_the_99th_percentile() -> None:
    assert summarise(histogram([0.1] * 99 + [9.0]), 9.0).p99 == pytest.approx(0.1, rel=1 / 16)
    assert summarise(histogram([0.1] * 98 + [9.0]), 9.0).p99 == pytest.approx(9.0, rel=1 / 16)


@pytest.mark.parametrize("seconds", [0.0, 2000.0])
def test_what_is_in_the_outermost_buckets_counts(seconds: float) -> None:
    found = summarise(histogram([seconds] * 5), seconds)
    assert (found.count, found.longest) == (5, seconds)
    assert found.p99 == min(seconds, seconds_of(bucket_of(seconds)))


@given(st.lists(st.floats(1e-6, 1000.0), min_size=1, max_size=300))
def test_the_percentile_is_that_of_the_samples(samples: list[float]) -> None:
    found = summarise(histogram(samples), max(samples))
    exact = sorted(samples)[len(samples) - 1 - len(samples) // 100]
    assert (found.count, found.longest) == (len(samples), max(samples))
    assert found.p99 <= found.longest
    assert found.p99 == pytest.approx(exact, rel=1 / 16)


# Limits


def test_before_anything_was_learned_the_defaults_of_megatron_bridge_hold() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    assert (timeouts.initial(), timeouts.limit(None), timeouts.limit("step")) == (1800.0, 300.0, 300.0)
    assert timeouts.origin("step") == "default"
    assert not timeouts.is_fixed("step")


def test_fixed_values_win_and_the_general_one_serves_where_there_is_no_own() -> None:
    config = FaultToleranceOptions(
        initial_rank_heartbeat_timeout=7.0,
        rank_heartbeat_timeout=6.0,
        rank_section_timeouts={"step": 5.0},
        rank_out_of_section_timeout=4.0,
    )
    timeouts = learned(config, step=many(50, 60), other=many(50, 60), **{OUT_OF_SECTION: many(50, 60)})
    assert timeouts.learn_initial(100.0, "step-1.g1") is None
    assert timeouts.initial() == 7.0
    assert [timeouts.limit(name) for name in ("step", "other", None)] == [5.0, 6.0, 4.0]
    assert [timeouts.origin(name) for name in ("step", "other", None)] == ["fixed"] * 3
    assert all(timeouts.is_fixed(name) for name in ("step", "other", None))
    assert Timeouts(replace(config, rank_out_of_section_timeout=None)).limit(None) == 6.0


def test_a_script_may_ask_for_a_timeout_where_the_launcher_was_given_none() -> None:
    free, given_one = (
        Timeouts(FaultToleranceOptions(rank_heartbeat_timeout=silence)) for silence in (None, 6.0)
    )
    for timeouts in (free, given_one):
        timeouts.fix(7.0)
    assert (free.limit(None), free.limit("step"), free.origin("step")) == (7.0, 7.0, "fixed")
    assert (given_one.limit(None), given_one.limit("step")) == (6.0, 6.0)


def test_a_fixed_limit_outside_of_sections_is_none_inside() -> None:
    timeouts = Timeouts(FaultToleranceOptions(rank_out_of_section_timeout=4.0))
    assert (timeouts.is_fixed(None), timeouts.is_fixed("step")) == (True, False)


def test_waiting_for_storage_has_no_limit_here() -> None:
    timeouts = learned(FaultToleranceOptions(rank_heartbeat_timeout=6.0), **{STORAGE: many(2.0, 2.0)})
    assert timeouts.limit(STORAGE) == math.inf


def test_one_fixed_section_leaves_the_others_to_be_learned() -> None:
    timeouts = learned(
        FaultToleranceOptions(rank_section_timeouts={"step": 5.0}), step=many(1, 1), forward=many(1, 1)
    )
    assert [timeouts.limit(name) for name in ("step", "forward", None)] == [5.0, 5.0, 300.0]
    assert [timeouts.is_fixed(name) for name in ("step", "forward", None)] == [True, False, False]


def test_a_section_without_a_name_is_not_the_time_between_sections() -> None:
    timeouts = Timeouts(FaultToleranceOptions(rank_out_of_section_timeout=4.0))
    assert (timeouts.limit(""), timeouts.limit(None)) == (300.0, 4.0)


# Learning


@pytest.mark.parametrize(
    ("p99", "longest", "limit"),
    [
        (2.0, 2.5, 10.0),  # the percentile carries the safety factor
        (2.0, 20.0, 30.0),  # a rare long span is not taken for a hang
        (0.01, 0.02, LEARNED_FLOOR),  # a busy host is not taken for one
    ],
)
def test_the_learned_limit(p99: float, longest: float, limit: float) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    assert timeouts.learn({"step": many(p99, longest)}) == {"step": limit}
    assert timeouts.limit("step") == limit
    assert timeouts.origin("step") == "learned from 100 samples"


def test_the_safety_factor_is_the_users() -> None:
    assert learned(FaultToleranceOptions(safety_factor=2.0), step=many(4.0, 4.0)).limit("step") == 8.0


def test_the_time_between_sections_is_learned_under_its_name() -> None:
    assert learned(**{OUT_OF_SECTION: many(2.0, 2.0)}).limit(None) == 10.0


def test_below_sixteen_samples_the_longest_carries_the_factor_and_below_three_nothing_is_learned() -> None:
    assert learned(step=many(2.0, 3.0, count=2)).limit("step") == 300.0
    assert learned(step=many(2.0, 3.0, count=3)).limit("step") == 15.0
    assert learned(step=many(0.2, 0.3, count=3)).limit("step") == 5.0
    assert learned(step=many(2.0, 3.0, count=15)).limit("step") == 15.0
    assert learned(step=many(2.0, 3.0, count=16)).limit("step") == 10.0


def test_finishing_has_a_limit_of_its_own() -> None:
    assert Timeouts(FaultToleranceOptions(rank_heartbeat_timeout=6.0)).finishing() == 1800.0
    assert Timeouts(FaultToleranceOptions(rank_section_timeouts={FINISHING: 60.0})).finishing() == 60.0


@pytest.mark.parametrize(
    "name",
    [
        "finishing",
        "warmup",
        "out_of_section",
        "before the first heartbeat",
        FINISHING,
        WARMUP,
        INITIAL,
        OUT_OF_SECTION,
    ],
)
def test_a_section_of_the_users_may_have_any_name(name: str) -> None:
    place = section_of_user(name)
    assert place not in {FINISHING, WARMUP, INITIAL, OUT_OF_SECTION, section_of_user("user." + name)}
    assert Timeouts(FaultToleranceOptions(rank_heartbeat_timeout=6.0)).limit(place) == 6.0
    assert Timeouts(FaultToleranceOptions(rank_section_timeouts={place: 7.0})).limit(place) == 7.0
    timeouts = learned(**{place: many(2.0, 2.0)})
    assert timeouts.limit(place) == 10.0
    assert (timeouts.finishing(), timeouts.initial(), timeouts.limit(None)) == (1800.0, 1800.0, 300.0)


@pytest.mark.parametrize("name", ["", "step", "user.step", INITIAL, "outlast", "user"])
def test_people_read_the_name_that_the_script_gave(name: str) -> None:
    assert name_for_user(section_of_user(name)) == name


def test_a_name_like_no_place_of_ours_is_stored_as_it_is() -> None:
    assert [section_of_user(name) for name in ("step", "outlast", "user")] == ["step", "outlast", "user"]


@pytest.mark.parametrize("place", [FINISHING, WARMUP, INITIAL, OUT_OF_SECTION])
def test_a_place_that_no_script_opened_has_no_name_for_people(place: str) -> None:
    assert name_for_user(place) is None


def test_a_name_that_is_longer_than_the_page_holds_has_its_timeout_all_the_same() -> None:
    name = "évaluation on the held-out set of 2026"
    timeouts = Timeouts(FaultToleranceOptions(rank_section_timeouts={name: 7.0}))
    assert timeouts.limit(stored_name(name)) == 7.0
    assert len(stored_name(name).encode()) == 32


def test_a_stopped_process_gets_the_floor_unless_its_place_has_a_fixed_limit() -> None:
    timeouts = Timeouts(FaultToleranceOptions(rank_section_timeouts={"step": 60.0}))
    assert timeouts.stopped("step", 60.0) == 60.0
    assert timeouts.stopped("forward", 300.0) == LEARNED_FLOOR
    assert timeouts.stopped(INITIAL, 1800.0) == LEARNED_FLOOR
    assert timeouts.stopped("forward", 1.0) == 1.0


def test_warmup_teaches_nothing_and_neither_does_anything_when_learning_is_off() -> None:
    assert learned(**{WARMUP: many(2.0, 2.0)}).limit(WARMUP) == 300.0
    off = Timeouts(FaultToleranceOptions(calc_ft_timeouts=False))
    assert off.learn({"step": many(2.0, 2.0)}) == {}
    assert off.learn_initial(50.0, "step-1.g1") is None
    assert off.limit("step") == 300.0


def test_a_new_value_goes_halfway_and_waits_for_twice_the_samples() -> None:
    timeouts = learned(step=many(2.0, 2.0, count=100))
    assert timeouts.learn({"step": many(4.0, 4.0, count=199)}) == {}
    assert timeouts.limit("step") == 10.0
    assert timeouts.learn({"step": many(4.0, 4.0, count=200)}) == {"step": 15.0}
    assert timeouts.origin("step") == "learned from 200 samples"


def test_a_span_that_came_close_to_the_limit_teaches_at_once() -> None:
    timeouts = learned(step=many(2.0, 2.0, count=100))
    assert timeouts.learn({"step": many(2.0, 6.0, count=101)}) == {}
    assert timeouts.learn({"step": many(2.0, 8.0, count=102)}) == {"step": 12.0}
    assert timeouts.learn({"step": many(4.0, 8.0, count=103)}) == {}, "it fits with its margin"
    assert timeouts.learn({"step": many(4.0, 8.1, count=104)}) == {"step": 16.0}


def test_halfway_never_goes_below_what_was_seen() -> None:
    timeouts = learned(step=many(0.4, 0.4, count=100))
    timeouts.learn({"step": many(0.4, 40.0, count=200)})
    assert timeouts.limit("step") == 60.0


@pytest.mark.parametrize(("p99", "limit"), [(2.2, 10.5), (2.4, 11.0)])
def test_a_change_by_a_tenth_or_less_is_in_force_but_not_told(p99: float, limit: float) -> None:
    timeouts = learned(step=many(2.0, 2.0, count=100))
    assert timeouts.learn({"step": many(p99, p99, count=200)}) == {}
    assert timeouts.limit("step") == limit


def test_the_start_is_learned_from_generations_that_loaded_something() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    assert timeouts.learn_initial(2.0, None) is None
    assert timeouts.initial() == 1800.0
    assert timeouts.learn_initial(20.0, "step-1.g1") == 100.0
    assert timeouts.learn_initial(30.0, "step-2.g1") == 125.0
    assert timeouts.learn_initial(200.0, "step-3.g1") == 562.5
    assert timeouts.learn_initial(105.0, "step-4.g1") is None, "by less than a tenth"
    assert timeouts.initial() == 543.75


def test_a_start_that_was_seen_is_within_the_limit_with_a_margin_whatever_the_factor() -> None:
    timeouts = Timeouts(FaultToleranceOptions(safety_factor=1.5))
    assert timeouts.learn_initial(20.0, "step-1.g1") == 30.0
    assert timeouts.learn_initial(100.0, "step-2.g1") == 150.0


def test_the_start_has_a_floor_of_its_own() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    assert timeouts.learn_initial(1.0, "step-1.g1") == 30.0


# Hangs that come back


def test_a_hang_that_came_back_doubles_its_limit() -> None:
    timeouts = learned(step=many(2.0, 2.0))
    assert timeouts.double("step") == timeouts.limit("step") == 20.0
    assert timeouts.origin("step") == "doubled after a repeated hang"
    assert timeouts.limit(None) == 300.0


@pytest.mark.parametrize(("place", "doubled"), [("step", 600.0), (OUT_OF_SECTION, 600.0), (INITIAL, 3600.0)])
def test_a_default_doubles_too(place: str, doubled: float) -> None:
    assert Timeouts(FaultToleranceOptions()).double(place) == doubled


def test_a_long_limit_does_not_shrink_when_it_doubles() -> None:
    assert learned(step=many(100.0, 100.0)).double("step") == 1000.0


def test_a_fixed_limit_stays() -> None:
    timeouts = Timeouts(
        FaultToleranceOptions(rank_section_timeouts={"step": 5.0}, initial_rank_heartbeat_timeout=9.0)
    )
    assert [timeouts.double(place) for place in ("step", INITIAL)] == [None, None]
    assert (timeouts.limit("step"), timeouts.initial()) == (5.0, 9.0)


def test_a_start_is_learned_from_earlier_starts_also_after_its_limit_was_doubled() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    timeouts.learn_initial(20.0, "step-1.g1")
    assert timeouts.origin(INITIAL) == "learned from earlier starts"
    timeouts.double(INITIAL)
    timeouts.learn_initial(20.0, "step-2.g1")
    assert timeouts.origin(INITIAL) == "learned from earlier starts"


def test_what_is_measured_later_takes_a_doubled_limit_back() -> None:
    timeouts = learned(step=many(2.0, 2.0, count=100))
    timeouts.double("step")
    assert timeouts.learn({"step": many(2.0, 2.0, count=200)}) == {"step": 15.0}
    assert timeouts.origin("step") == "learned from 200 samples"


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({}, False),
        ({"rank_heartbeat_timeout": 9.0}, False),
        ({"rank_heartbeat_timeout": 9.0, "rank_section_timeouts": {"step": 5.0}}, False),
        ({"rank_heartbeat_timeout": 9.0, "rank_out_of_section_timeout": 5.0}, True),
        ({"rank_out_of_section_timeout": 5.0}, True),
        ({"rank_section_timeouts": {"step": 5.0}}, True),
    ],
)
def test_the_option_that_is_named_sets_the_limit_outside_of_sections(
    options: dict[str, Any], apart: bool
) -> None:
    before = Timeouts(FaultToleranceOptions(**options))
    name = before.option(None).partition("=")[0].removeprefix("--ft-").replace("-", "_")
    assert (name == "rank_out_of_section_timeout") is apart
    after = Timeouts(FaultToleranceOptions(**{**options, name: 77.0}))
    assert after.limit(None) == 77.0
    assert after.option(None) == before.option(None)
