"""Timeouts that the user has fixed, or that are learned from what the ranks measured."""

from __future__ import annotations

import math
from collections import Counter
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
from tests.hang.policy.builders import many

LOADED = "step-1.g1"


def fixed(observed: dict[str, Durations] | None = None, **options: Any) -> Timeouts:
    """Return timeouts with some options, which have learned from what was observed."""
    timeouts = Timeouts(FaultToleranceOptions(**options))
    timeouts.learn(observed or {})
    return timeouts


def learned(**observed: Durations) -> Timeouts:
    return fixed(observed)


# Buckets


@given(st.floats(1e-6, 1073.0), st.floats(1e-6, 1073.0))
def test_buckets_keep_the_order_and_lose_less_than_a_sixteenth(one: float, other: float) -> None:
    assert (bucket_of(one) <= bucket_of(other)) or one > other
    assert abs(seconds_of(bucket_of(one)) / one - 1) < 1 / 16


def test_a_bucket_is_a_sixteenth_of_an_octave_around_its_geometric_middle() -> None:
    assert [bucket_of(seconds_of(bucket)) for bucket in range(BUCKETS)] == list(range(BUCKETS))
    assert seconds_of(0) == pytest.approx(1e-6 * math.sqrt(17 / 16), rel=1e-9)
    assert seconds_of(16 * 20 + 8) == pytest.approx(1e-6 * 2**20 * math.sqrt(24 * 25) / 16, rel=1e-9)


@pytest.mark.parametrize(
    ("bucket", "seconds"),
    [
        (0, [1e-6, 0.0, 1e-9, -5.0, -1e9, math.nan, -math.inf]),
        (1, [1.0625e-6]),
        (15, [1.999999e-6]),
        (16, [2e-6]),
        (BUCKETS - 1, [1073.7, 1073.741824, 1073.7418245, 1073.8, 1e9, math.inf]),
    ],
)
def test_what_does_not_fit_goes_into_the_outermost_bucket(bucket: int, seconds: list[float]) -> None:
    assert {bucket_of(one) for one in seconds} == {bucket}


def histogram(samples: list[float]) -> list[int]:
    counts = Counter(map(bucket_of, samples))
    return [counts[bucket] for bucket in range(BUCKETS)]


def test_nothing_measured_is_no_duration() -> None:
    assert summarise([0] * BUCKETS, 0.0) == Durations(0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("samples", "p99"),
    [([0.1] * 99 + [9.0], 0.1), ([0.1] * 98 + [9.0], 9.0), ([0.0] * 5, 0.0), ([2000.0] * 5, 1050.0)],
    ids=["one of a hundred", "one of 99", "the first bucket", "the last bucket"],
)
def test_a_single_outlier_among_a_hundred_is_beyond_the_99th_percentile(
    samples: list[float], p99: float
) -> None:
    found = summarise(histogram(samples), max(samples))
    assert (found.count, found.longest) == (len(samples), max(samples))
    assert found.p99 == pytest.approx(p99, rel=1 / 16)


@given(st.lists(st.floats(1e-6, 1000.0), min_size=1, max_size=300))
def test_the_percentile_is_that_of_the_samples(samples: list[float]) -> None:
    found = summarise(histogram(samples), max(samples))
    exact = sorted(samples)[len(samples) - 1 - len(samples) // 100]
    assert (found.count, found.longest) == (len(samples), max(samples))
    assert found.p99 <= found.longest
    assert found.p99 == pytest.approx(exact, rel=1 / 16)


# Limits

HEARTBEAT = {"rank_heartbeat_timeout": 6.0}
STEP = {"rank_section_timeouts": {"step": 5.0}}
OUTSIDE = {"rank_out_of_section_timeout": 4.0}


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        pytest.param({}, {"step": 300.0, "": 300.0, None: 300.0, INITIAL: 1800.0}, id="Megatron Bridge's"),
        pytest.param(
            {**HEARTBEAT, **STEP, **OUTSIDE, "initial_rank_heartbeat_timeout": 7.0},
            {"step": 5.0, "other": 6.0, "": 6.0, None: 4.0, INITIAL: 7.0},
            id="all",
        ),
        pytest.param(HEARTBEAT, {"step": 6.0, None: 6.0, FINISHING: 1800.0, STORAGE: math.inf}, id="general"),
        pytest.param(OUTSIDE, {"step": 300.0, "": 300.0, None: 4.0}, id="outside"),
        pytest.param(STEP, {"step": 5.0, "forward": 300.0, None: 300.0}, id="one section"),
        pytest.param({"rank_section_timeouts": {FINISHING: 60.0}}, {FINISHING: 60.0}, id="finishing"),
    ],
)
def test_what_the_user_has_fixed_holds_and_defaults_elsewhere(
    options: dict[str, Any], limits: dict[str | None, float]
) -> None:
    timeouts = fixed(**options)
    special = {INITIAL: timeouts.initial(), FINISHING: timeouts.finishing()}
    assert {place: special.get(place or "", timeouts.limit(place)) for place in limits} == limits
    for place, limit in limits.items():
        assert timeouts.is_fixed(place) is (limit < 300.0)
        assert (
            timeouts.origin(place) == Timeouts(FaultToleranceOptions(**HEARTBEAT)).origin("x") or limit >= 300
        )


def test_what_is_fixed_is_not_learned() -> None:
    seen = {place: many(50, 60) for place in ("step", "other", OUT_OF_SECTION, STORAGE)}
    timeouts = fixed(seen, **HEARTBEAT, **STEP, **OUTSIDE, initial_rank_heartbeat_timeout=7.0)
    assert timeouts.learn_initial(100.0, LOADED) is None
    assert timeouts.initial() == 7.0
    assert [timeouts.limit(name) for name in ("step", "other", None)] == [5.0, 6.0, 4.0]
    assert [timeouts.double(place) for place in ("step", "other", OUT_OF_SECTION, INITIAL)] == [None] * 4
    assert fixed({"forward": many(1, 1)}, **STEP).limit("forward") == 5.0


def test_a_script_may_ask_for_a_timeout_where_the_launcher_was_given_none() -> None:
    free, given_one = fixed(), fixed(**HEARTBEAT)
    for timeouts in (free, given_one):
        timeouts.fix(7.0)
    assert (free.limit(None), free.limit("step"), free.is_fixed("step")) == (7.0, 7.0, True)
    assert (given_one.limit(None), given_one.limit("step")) == (6.0, 6.0)


def test_a_stopped_process_gets_the_floor_unless_its_place_has_a_fixed_limit() -> None:
    timeouts = fixed(rank_section_timeouts={"step": 60.0})
    assert timeouts.stopped("step", 60.0) == 60.0
    assert timeouts.stopped("forward", 300.0) == timeouts.stopped(INITIAL, 1800.0) == LEARNED_FLOOR
    assert timeouts.stopped("forward", 1.0) == 1.0


# Names

OURS = [FINISHING, WARMUP, INITIAL, OUT_OF_SECTION]


@pytest.mark.parametrize(
    "name", ["finishing", "warmup", "out_of_section", "before the first heartbeat", *OURS]
)
def test_a_section_of_the_users_may_have_any_name(name: str) -> None:
    place = section_of_user(name)
    assert place not in {*OURS, section_of_user("user." + name)}
    assert fixed(**HEARTBEAT).limit(place) == 6.0
    assert fixed(rank_section_timeouts={place: 7.0}).limit(place) == 7.0
    timeouts = learned(**{place: many(2.0, 2.0)})
    assert timeouts.limit(place) == 10.0
    assert (timeouts.finishing(), timeouts.initial(), timeouts.limit(None)) == (1800.0, 1800.0, 300.0)


def test_people_read_the_name_that_the_script_gave() -> None:
    names = ["", "step", "user.step", INITIAL, "outlast", "user"]
    assert [name_for_user(section_of_user(name)) for name in names] == names
    assert [section_of_user(name) for name in ("step", "outlast", "user")] == ["step", "outlast", "user"]
    assert [name_for_user(place) for place in OURS] == [None] * 4


def test_a_name_that_is_longer_than_the_page_holds_has_its_timeout_all_the_same() -> None:
    name = "évaluation on the held-out set of 2026"
    assert fixed(rank_section_timeouts={name: 7.0}).limit(stored_name(name)) == 7.0
    assert len(stored_name(name).encode()) == 32


# Learning


@pytest.mark.parametrize(
    ("seen", "limit"),
    [
        pytest.param(many(2.0, 2.5), 10.0, id="the percentile carries the safety factor"),
        pytest.param(many(2.0, 20.0), 30.0, id="a rare long span is not taken for a hang"),
        pytest.param(many(0.01, 0.02), LEARNED_FLOOR, id="a busy host is not taken for one"),
        pytest.param(many(2.0, 3.0, 16), 10.0, id="16 samples"),
        pytest.param(many(2.0, 3.0, 15), 15.0, id="few samples: the longest carries the factor"),
        pytest.param(many(2.0, 3.0, 3), 15.0, id="3 samples"),
        pytest.param(many(0.2, 0.3, 3), 5.0, id="few samples: the floor"),
    ],
)
def test_the_learned_limit(seen: Durations, limit: float) -> None:
    timeouts = fixed()
    assert timeouts.learn({"step": seen, OUT_OF_SECTION: seen}) == {"step": limit, OUT_OF_SECTION: limit}
    assert (timeouts.limit("step"), timeouts.limit(None)) == (limit, limit)
    assert str(seen.count) in timeouts.origin("step")


@pytest.mark.parametrize(
    ("options", "place", "seen"),
    [
        ({}, "step", many(2.0, 3.0, 2)),
        ({}, WARMUP, many(2.0, 2.0)),
        ({"calc_ft_timeouts": False}, "step", many(2.0, 2.0)),
    ],
    ids=["two samples", "warmup", "off"],
)
def test_nothing_is_learned(options: dict[str, Any], place: str, seen: Durations) -> None:
    timeouts = fixed(**options)
    assert timeouts.learn({place: seen}) == {}
    assert timeouts.limit(place) == 300.0
    assert (timeouts.learn_initial(50.0, LOADED) is None) is bool(options)


def test_the_safety_factor_is_the_users() -> None:
    assert fixed({"step": many(4.0, 4.0)}, safety_factor=2.0).limit("step") == 8.0


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (2.0, [(4.0, 4.0, 199, None, 10.0), (4.0, 4.0, 200, 15.0, 15.0)]),
        (
            2.0,
            [
                (2.0, 6.0, 101, None, 10.0),
                (2.0, 8.0, 102, 12.0, 12.0),
                (4.0, 8.0, 103, None, 12.0),  # it fits with its margin
                (4.0, 8.1, 104, 16.0, 16.0),
            ],
        ),
        (0.4, [(0.4, 40.0, 200, 60.0, 60.0)]),
        (2.0, [(2.2, 2.2, 200, None, 10.5)]),
        (2.0, [(2.4, 2.4, 200, None, 11.0)]),
    ],
    ids=["halfway, with twice the samples", "close to the limit", "longest", "a twentieth", "a tenth"],
)
def test_a_limit_that_was_learned_is_learned_again_and_told_if_it_moved_by_a_tenth(
    first: float, then: list[tuple[float, float, int, float | None, float]]
) -> None:
    timeouts = learned(step=many(first, first))
    for p99, longest, count, told, limit in then:
        assert timeouts.learn({"step": many(p99, longest, count)}).get("step") == told
        assert timeouts.limit("step") == limit


@pytest.mark.parametrize(
    ("factor", "starts"),
    [
        (5.0, [(2.0, None, None, 1800.0)]),
        (5.0, [(1.0, LOADED, 30.0, 30.0)]),
        (5.0, [(20.0, LOADED, 100.0, 100.0), (30.0, LOADED, 125.0, 125.0)]),
        (5.0, [(112.5, LOADED, 562.5, 562.5), (105.0, LOADED, None, 543.75)]),
        (1.5, [(20.0, LOADED, 30.0, 30.0), (100.0, LOADED, 150.0, 150.0)]),
    ],
    ids=["nothing loaded", "floor", "halfway", "less than a tenth", "a margin whatever the factor"],
)
def test_the_start_is_learned_from_generations_that_loaded_something(
    factor: float, starts: list[Any]
) -> None:
    timeouts = fixed(safety_factor=factor)
    for longest, checkpoint, told, limit in starts:
        assert timeouts.learn_initial(longest, checkpoint) == told
        assert timeouts.initial() == limit


# Hangs that come back


@pytest.mark.parametrize(
    ("seen", "place", "doubled"),
    [
        ({}, "step", 600.0),
        ({}, OUT_OF_SECTION, 600.0),
        ({}, INITIAL, 3600.0),
        ({"step": many(2.0, 2.0)}, "step", 20.0),
        ({"step": many(100.0, 100.0)}, "step", 1000.0),  # a long one does not shrink
    ],
)
def test_a_hang_that_came_back_doubles_its_limit(
    seen: dict[str, Durations], place: str, doubled: float
) -> None:
    timeouts = fixed(seen)
    before = timeouts.origin(place)
    assert timeouts.double(place) == timeouts.limit(place) == doubled
    assert timeouts.origin(place) != before
    assert timeouts.limit("other") == 300.0


def test_what_is_measured_later_takes_a_doubled_limit_back() -> None:
    timeouts = learned(step=many(2.0, 2.0))
    timeouts.learn_initial(20.0, LOADED)
    before = timeouts.origin(INITIAL)
    for place in ("step", INITIAL):
        timeouts.double(place)
    assert timeouts.learn({"step": many(2.0, 2.0, count=200)}) == {"step": 15.0}
    assert "200" in timeouts.origin("step")
    timeouts.learn_initial(20.0, "step-2.g1")
    assert timeouts.origin(INITIAL) == before


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({}, False),
        (HEARTBEAT, False),
        ({**HEARTBEAT, **STEP}, False),
        ({**HEARTBEAT, **OUTSIDE}, True),
        (OUTSIDE, True),
        (STEP, True),
    ],
)
def test_the_option_that_is_named_sets_the_limit_outside_of_sections(
    options: dict[str, Any], apart: bool
) -> None:
    before = fixed(**options)
    name = before.option(None).partition("=")[0].removeprefix("--ft-").replace("-", "_")
    assert (name == "rank_out_of_section_timeout") is apart
    after = fixed(**{**options, name: 77.0})
    assert after.limit(None) == 77.0
    assert after.option(None) == before.option(None)
