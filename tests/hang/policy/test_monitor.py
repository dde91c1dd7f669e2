"""Which ranks have been silent for too long, by their heartbeat pages."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import LEARNED_FLOOR, FaultToleranceOptions
from outlast.hang.policy.monitor import Excused, HeartbeatSeen, Liveness, RankEnded, RankStarted, Silent
from outlast.hang.policy.timeouts import FINISHING, INITIAL, OUT_OF_SECTION, Timeouts
from tests.hang.policy.builders import many

INTERVAL = 0.25
ALWAYS_LATE = 1e9  # an interval at which no watcher oversleeps


def watching(interval: float = ALWAYS_LATE, ranks: int = 1, **limits: float) -> Liveness:
    """Return a watcher of ranks of generation 2, spawned at 0; ``start`` and ``outside`` are no sections."""
    config = FaultToleranceOptions(
        initial_rank_heartbeat_timeout=limits.pop("start", 60.0),
        rank_out_of_section_timeout=limits.pop("outside", 10.0),
        rank_section_timeouts=limits,
    )
    return started(Timeouts(config), interval, ranks)


def started(timeouts: Timeouts, interval: float = ALWAYS_LATE, ranks: int = 1, at: float = 0.0) -> Liveness:
    liveness = Liveness(timeouts, interval)
    for rank in range(ranks):
        liveness.handle(RankStarted(rank, 2, at), at)
    return liveness


def by_default(**sections: float) -> Liveness:
    return started(Timeouts(FaultToleranceOptions(rank_section_timeouts=sections)))


def seen(beat: float, *sections: tuple[str, float], rank: int = 0, **fields: Any) -> HeartbeatSeen:
    generation = fields.pop("generation", 2)
    return HeartbeatSeen(rank, generation, int(beat > 0), beat, 5, sections, **fields)


def only(found: tuple[Silent, ...]) -> Silent:
    (silent,) = found
    return silent


def due(liveness: Liveness) -> Silent:
    """Return the only silence, which is due at the deadline and not a moment before it."""
    at = liveness.deadline()
    assert at is not None
    assert liveness.tick(at - 0.01) == ()
    return only(liveness.tick(at))


def test_nobody_is_watched_before_a_rank_starts_or_after_it_ended() -> None:
    liveness = Liveness(Timeouts(FaultToleranceOptions()), INTERVAL)
    assert (liveness.tick(1e6), liveness.deadline()) == ((), None)
    liveness = watching()
    liveness.handle(RankEnded(0), 1.0)
    assert (liveness.tick(1e6), liveness.deadline()) == ((), None)
    liveness.handle(RankEnded(7), 1.0)
    liveness.handle(seen(5.0, rank=7), 1.0)
    assert liveness.tick(2e6) == ()


def place(since: float, limit: float, section: str | None = None, initial: bool = False) -> tuple[Any, ...]:
    return (section, since, limit, initial)


@pytest.mark.parametrize(
    ("limits", "page", "expected", "option"),
    [
        pytest.param({}, None, place(0.0, 60.0, initial=True), "initial-rank-heartbeat-timeout", id="start"),
        pytest.param(
            {"checkpointing": 5.0},
            seen(0.0, ("checkpointing", 1.0)),
            place(0.0, 60.0, initial=True),
            "initial-rank-heartbeat-timeout",
            id="section before the first heartbeat",
        ),
        pytest.param(
            {"setup": 20.0},
            seen(0.0, ("checkpointing", 1.0)),
            place(0.0, 20.0, "setup"),
            "setup",
            id="setup, from the spawn on",
        ),
        pytest.param(
            {"setup": 20.0}, seen(21.0), place(21.0, 10.0), "rank-out-of-section-timeout", id="after setup"
        ),
        pytest.param(
            {}, seen(100.0, closed=105.0), place(105.0, 10.0), "out-of-section", id="since a section closed"
        ),
        pytest.param(
            {}, seen(107.0, closed=105.0), place(107.0, 10.0), "out-of-section", id="since a heartbeat"
        ),
        pytest.param(
            {"step": 50.0, "forward": 20.0, "inner": 5.0},
            seen(100.0, ("step", 100.0), ("forward", 101.0), ("inner", 102.0)),
            place(102.0, 5.0, "inner"),
            "inner",
            id="inner section",
        ),
        pytest.param(
            {"step": 50.0, "forward": 20.0, "inner": 5.0},
            seen(100.0, ("step", 100.0), ("forward", 101.0), ("inner", 119.0)),
            place(101.0, 20.0, "forward"),
            "forward",
            id="the outer section is due first",
        ),
        pytest.param(
            {"step": 50.0, "outside": 1.0},
            seen(100.0, ("step", 100.0)),
            place(100.0, 50.0, "step"),
            "step",
            id="the limit outside does not hold inside",
        ),
        pytest.param(
            {"step": 5.0},
            seen(104.0, ("step", 100.0)),
            place(100.0, 5.0, "step"),
            "step",
            id="a heartbeat does not lengthen its section",
        ),
        pytest.param({}, seen(50.0, generation=1), place(0.0, 60.0, initial=True), "", id="an old one"),
        pytest.param(
            {}, seen(5.0, closed=7.0, done=True), place(7.0, 1800.0, FINISHING), "", id="done, closed last"
        ),
        pytest.param(
            {},
            seen(9.0, ("step", 3.0), closed=7.0, done=True),
            place(9.0, 1800.0, FINISHING),
            "",
            id="done, a section open",
        ),
    ],
)
def test_a_silence_is_held_against_the_limit_of_its_place(
    limits: dict[str, float], page: HeartbeatSeen | None, expected: tuple[Any, ...], option: str
) -> None:
    liveness = watching(**limits)
    if page is not None:
        liveness.handle(page, 100.0)
    silent = due(liveness)
    assert (silent.section, silent.since, silent.limit, silent.initial) == expected
    assert silent.waited == silent.limit
    assert silent.step == (5 if page is not None and page.beat and page.generation == 2 else -1)
    usual = INITIAL if silent.initial else OUT_OF_SECTION
    assert silent.place == (usual if silent.section is None else silent.section)
    assert option in silent.reason
    assert f"{silent.limit:.2f}" in silent.reason


def test_without_a_timeout_of_its_own_the_setup_is_held_to_the_initial_one() -> None:
    config = FaultToleranceOptions(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=5.0)
    silent = due(started(Timeouts(config)))
    assert (silent.initial, silent.limit) == (True, 60.0)


def test_the_reason_contains_what_the_limit_was_learned_from() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    timeouts.learn({"x": many(2.0, 2.0, 120)})
    liveness = started(timeouts)
    liveness.handle(seen(1.0, ("x", 1.0)), 1.0)
    assert timeouts.origin("x") in only(liveness.tick(13.0)).reason


def test_a_rank_of_a_new_generation_owes_its_first_heartbeat_anew() -> None:
    liveness = watching(start=60.0)
    liveness.handle(seen(50.0), 60.0)
    liveness.handle(RankStarted(0, 3, 61.0), 61.0)
    assert liveness.deadline() == 121.0


def test_a_rank_that_is_done_before_its_first_step_is_held_to_the_time_since_its_spawn() -> None:
    liveness = started(Timeouts(FaultToleranceOptions()), at=90_000.0)
    liveness.handle(seen(0.0, done=True), 90_001.0)
    assert liveness.deadline() == 91_800.0


# Stopped processes


@pytest.mark.parametrize(
    ("limits", "looks", "expected"),
    [
        pytest.param(
            {"forward": 9.0},
            [(93.0, "forward", "step"), (94.0, "forward", "step")],
            (93.0, LEARNED_FLOOR),
            id="soon",
        ),
        pytest.param({"forward": 9.0}, [(93.0, "step", "forward")], (92.6, 9.0), id="a fixed limit holds"),
        pytest.param({}, [(93.0,)], (93.0, LEARNED_FLOOR), id="outside of sections"),
    ],
)
def test_a_stopped_process_is_found_soon_unless_the_user_has_fixed_the_limit_of_its_place(
    limits: dict[str, float], looks: list[Any], expected: tuple[float, float]
) -> None:
    liveness = by_default(**limits)
    for at, *sections in looks:
        opened = [(name, 92.5 + depth / 10) for depth, name in enumerate(sections)]
        liveness.handle(seen(90.0, *opened, stopped=True), at)
    silent = due(liveness)
    assert (silent.since, silent.limit) == expected
    assert f"{silent.limit:.2f}" in silent.reason


def test_a_stopped_process_in_a_section_that_is_open_for_too_long_is_told_as_such() -> None:
    liveness = watching(forward=9.0)
    liveness.handle(seen(90.0, ("forward", 89.0), stopped=True), 90.0)
    assert due(liveness).since == 89.0
    liveness.handle(seen(90.0, ("forward", 95.0), stopped=True), 98.5)
    silent = due(liveness)
    assert (silent.since, silent.limit, silent.section) == (90.0, 9.0, "forward")


def test_a_process_that_is_continued_was_never_stopped() -> None:
    liveness = by_default()
    liveness.handle(seen(90.0, stopped=True), 93.0)
    liveness.handle(seen(90.0), 94.0)
    assert liveness.tick(95.0) == ()
    liveness.handle(seen(90.0, stopped=True), 96.0)
    assert due(liveness).since == 96.0


def test_a_process_that_ran_between_two_looks_was_not_stopped_all_the_time() -> None:
    """cpulimit(1) stops and continues a process many times a second, and each look may find it stopped."""
    liveness = by_default()
    for look in range(8):
        liveness.handle(seen(90.0, stopped=True, ran=7.0 + look), 93.0 + look)
        assert liveness.tick(93.0 + look) == ()
    liveness.handle(seen(90.0, stopped=True, ran=14.0), 101.3)
    assert due(liveness).since == 100.0


def test_a_process_that_is_stopped_before_its_first_heartbeat_is_found_too() -> None:
    liveness = by_default()
    liveness.handle(seen(0.0, stopped=True), 3.0)
    assert due(liveness).place == INITIAL


def test_what_is_switched_off_is_never_due() -> None:
    liveness = watching(start=math.inf)
    assert liveness.deadline() == math.inf
    assert liveness.tick(1e12) == ()


def test_all_silent_ranks_are_reported_in_their_order() -> None:
    liveness = watching(ranks=3)
    liveness.handle(seen(55.0, rank=1), 55.0)
    assert [silent.rank for silent in liveness.tick(61.0)] == [0, 2]
    assert [silent.rank for silent in liveness.tick(65.0)] == [0, 1, 2]


# Patience


def test_an_excused_rank_is_left_alone_until_then_and_no_alarm_clock_rings() -> None:
    liveness = watching(step=5.0, ranks=2)
    for rank in (0, 1):
        liveness.handle(seen(10.0, ("step", 10.0), rank=rank), 10.0)
    liveness.handle(Excused(0, 5, 40.0), 15.0)
    assert [silent.rank for silent in liveness.tick(15.0)] == [1]
    liveness.handle(RankEnded(1), 15.0)
    assert liveness.deadline() == 40.0
    assert due(liveness).waited == 30.0


@pytest.mark.parametrize(
    ("step", "page", "until"),
    [(4, seen(10.0, ("step", 10.0)), 15.0), (5, seen(10.0, ("step", 10.0)), 40.0), (-1, seen(0.0), 40.0)],
    ids=["an earlier step", "its step", "before the first heartbeat"],
)
def test_an_excuse_ends_with_the_step_it_was_given_for(step: int, page: HeartbeatSeen, until: float) -> None:
    liveness = watching(start=5.0, step=5.0)
    liveness.handle(Excused(0, step, 40.0), 5.0)
    liveness.handle(page, 10.0)
    assert liveness.deadline() == until
    assert due(liveness).step == (5 if page.beat else -1)


# A watcher that oversleeps


def look(liveness: Liveness, begin: float, end: float) -> list[float]:
    """Look regularly; return when silence was reported."""
    times = [begin + INTERVAL * turn for turn in range(int((end - begin) / INTERVAL) + 1)]
    return [now for now in times if liveness.tick(now)]


def test_time_that_the_watcher_slept_through_is_held_against_nobody() -> None:
    liveness = watching(INTERVAL, start=5.0)
    assert look(liveness, 0.0, 2.0) == []
    assert liveness.tick(1000.0) == ()
    assert liveness.deadline() == pytest.approx(1000.0 + 5.0 - 2.0 - 3 * INTERVAL)
    assert look(liveness, 1000.25, 1010.0)[0] == 1002.25


@pytest.mark.parametrize("intervals", [1, 2, 3])
def test_being_a_little_late_is_no_sleep_and_brings_nothing_forward(intervals: int) -> None:
    liveness = watching(INTERVAL, start=6.0)
    looks = [turn * intervals * INTERVAL for turn in range(int(6.0 / intervals / INTERVAL) + 1)]
    assert [now for now in looks if liveness.tick(now)] == [6.0]


@pytest.mark.parametrize("began", [990.0, 1000.0, 1003.0])
def test_of_a_silence_that_began_during_the_sleep_the_rest_is_excused_and_nothing_of_a_later_one(
    began: float,
) -> None:
    liveness = watching(INTERVAL, start=5.0, step=5.0)
    liveness.tick(0.0)
    liveness.tick(1000.0)
    liveness.handle(seen(1003.1, ("step", began)), 1003.25)
    assert look(liveness, 1000.25, 1010.0)[0] == max(began, 1000.0) + 5.0


def test_a_sleep_stays_excused_while_inner_sections_move_the_outer_ones_opening() -> None:
    liveness = watching(INTERVAL, step=5.0, forward=4.0)
    liveness.handle(seen(1.0, ("step", 1.0), ("forward", 2.0)), 2.0)
    assert look(liveness, 2.0, 3.0) == []
    for now in [1000.0 + INTERVAL * turn for turn in range(8)]:
        liveness.handle(seen(1.0, ("step", 1.0 + now - 2.0), ("forward", 2.0)), now)
        assert liveness.tick(now) == ()
    assert look(liveness, 1002.0, 1004.0)[0] == 1002.25


def test_sleeps_add_up_and_the_oldest_are_forgotten_in_the_end() -> None:
    liveness = watching(INTERVAL, start=500.0)
    naps = [turn * 1.75 for turn in range(400)]  # a second of each is a sleep; 399 of them, 256 remembered
    assert not any(liveness.tick(now) for now in naps)
    assert liveness.deadline() == pytest.approx(500.0 + 256.0)


def test_a_sleep_is_not_forgotten_while_the_watcher_looks_in_time() -> None:
    liveness = watching(INTERVAL, start=1000.0)
    liveness.tick(0.0)
    assert look(liveness, 900.0, 1900.0)[0] == 1000.0 + 900.0 - 3 * INTERVAL


@settings(max_examples=60)
@given(st.integers(0, 39), st.integers(4, 4000), st.floats(0.5, 9.0))
def test_a_sleep_delays_the_report_by_what_was_slept(before: int, slept: int, limit: float) -> None:
    awake, asleep = watching(INTERVAL, start=limit), watching(INTERVAL, start=limit)
    first = look(awake, 0.0, 10.0)[0]
    if look(asleep, 0.0, before * INTERVAL):
        return
    resumed = before * INTERVAL + slept * INTERVAL
    told = look(asleep, resumed, resumed + 10.0)
    assert told[0] == pytest.approx(max(first + (slept - 3) * INTERVAL, resumed))


def test_silence_is_reported_from_the_deadline_on_and_never_before() -> None:
    counted: Counter[str] = Counter()
    limits = st.fixed_dictionaries(dict.fromkeys(("a", "b", "c", "start", "outside"), st.floats(0.5, 50.0)))
    openings = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3, unique=True)

    @settings(max_examples=300)
    @given(limits, openings, st.floats(0.0, 100.0), st.floats(0.0, 100.0))
    def check(limit: dict[str, float], names: list[str], beat: float, closed: float) -> None:
        liveness = watching(**limit)
        opened = [(name, 100.0 + place) for place, name in enumerate(names)]
        liveness.handle(seen(beat, *opened, closed=closed), 103.0)
        if beat == 0.0:
            at = limit["start"]
        elif opened:
            at = min(at + limit[name] for name, at in opened)
        else:
            at = max(beat, closed) + limit["outside"]
        assert liveness.deadline() == pytest.approx(at)
        assert liveness.tick(at - 0.01) == ()
        assert len(liveness.tick(at + 0.01)) == 1
        counted["start"] += beat == 0.0
        counted["open"] += beat > 0 and len(opened) > 1
        counted["outside"] += beat > 0 and not opened

    check()
    assert min(counted["start"], counted["open"], counted["outside"]) > 2, counted
