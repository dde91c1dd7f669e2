from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import LEARNED_FLOOR, FaultToleranceOptions
from outlast.hang.policy.monitor import Excused, HeartbeatSeen, Liveness, RankEnded, RankStarted, Silent
from outlast.hang.policy.timeouts import FINISHING, INITIAL, OUT_OF_SECTION, Durations, Timeouts

INTERVAL = 0.25
ALWAYS_LATE = 1e9  # an interval at which no watcher oversleeps


def watching(interval: float = ALWAYS_LATE, ranks: int = 1, **limits: float) -> Liveness:
    """Return a watcher of ranks of generation 2, spawned at 0; ``start`` and ``outside`` are no sections."""
    config = FaultToleranceOptions(
        initial_rank_heartbeat_timeout=limits.pop("start", 60.0),
        rank_out_of_section_timeout=limits.pop("outside", 10.0),
        rank_section_timeouts=limits,
    )
    liveness = Liveness(Timeouts(config), interval)
    for rank in range(ranks):
        liveness.handle(RankStarted(rank, 2, 0.0), 0.0)
    return liveness


def seen(
    beat: float, *sections: tuple[str, float], rank: int = 0, generation: int = 2, closed: float = 0.0
) -> HeartbeatSeen:
    return HeartbeatSeen(rank, generation, int(beat > 0), beat, 5, sections, closed)


def only(found: tuple[Silent, ...]) -> Silent:
    (silent,) = found
    return silent


def test_nobody_is_watched_before_a_rank_starts_or_after_it_ended() -> None:
    liveness = Liveness(Timeouts(FaultToleranceOptions()), INTERVAL)
    assert (liveness.tick(1e6), liveness.deadline()) == ((), None)
    liveness = watching()
    liveness.handle(RankEnded(0), 1.0)
    assert (liveness.tick(1e6), liveness.deadline()) == ((), None)
    liveness.handle(RankEnded(7), 1.0)
    liveness.handle(seen(5.0, rank=7), 1.0)
    assert liveness.tick(2e6) == ()


def test_a_rank_owes_its_first_heartbeat_from_its_spawn_on() -> None:
    liveness = watching(start=1800.0)
    assert liveness.deadline() == 1800.0
    assert liveness.tick(1799.9) == ()
    silent = only(liveness.tick(1800.0))
    assert silent == Silent(0, -1, None, 0.0, 1800.0, 1800.0, silent.reason, initial=True)
    assert silent.place == INITIAL
    assert silent.reason == (
        "rank 0: Did not get initial heartbeat. Waited 1800.00 seconds (timeout 1800.00, fixed; "
        "--ft-initial-rank-heartbeat-timeout=SECONDS sets it, off for a script that never sends a heartbeat)."
    )


def test_sections_before_the_first_heartbeat_belong_to_the_start() -> None:
    liveness = watching(checkpointing=5.0)
    liveness.handle(seen(0.0, ("checkpointing", 1.0)), 1.0)
    assert liveness.tick(59.0) == ()
    assert only(liveness.tick(60.0)).initial


def test_a_timeout_of_the_setup_holds_from_the_spawn_to_the_first_heartbeat() -> None:
    liveness = watching(setup=20.0)
    liveness.handle(seen(0.0, ("checkpointing", 1.0)), 1.0)
    assert liveness.deadline() == 20.0
    assert liveness.tick(19.9) == ()
    silent = only(liveness.tick(20.0))
    assert (silent.section, silent.since, silent.limit, silent.initial) == ("setup", 0.0, 20.0, False)
    assert silent.reason == (
        "rank 0: Section 'setup' has been open for 20.00 seconds (timeout 20.00, fixed; "
        "--ft-rank-section-timeouts=setup:SECONDS sets it)."
    )
    liveness.handle(seen(21.0), 21.0)
    assert liveness.tick(30.0) == ()


def test_without_a_timeout_of_its_own_the_setup_is_held_to_the_initial_one() -> None:
    config = FaultToleranceOptions(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=5.0)
    liveness = Liveness(Timeouts(config), ALWAYS_LATE)
    liveness.handle(RankStarted(0, 2, 0.0), 0.0)
    assert liveness.tick(59.0) == ()
    assert only(liveness.tick(60.0)).initial


def test_outside_of_sections_the_silence_counts_from_the_last_sign_of_life() -> None:
    liveness = watching(outside=10.0)
    liveness.handle(seen(100.0, closed=105.0), 105.0)
    assert liveness.deadline() == 115.0
    liveness.handle(seen(107.0, closed=105.0), 107.0)
    assert liveness.deadline() == 117.0
    assert liveness.tick(116.9) == ()
    silent = only(liveness.tick(117.0))
    assert (silent.step, silent.section, silent.place, silent.since) == (5, None, OUT_OF_SECTION, 107.0)
    assert silent.reason == (
        "rank 0: Did not get subsequent heartbeat. Waited 10.00 seconds (timeout 10.00, fixed; "
        "--ft-rank-out-of-section-timeout=SECONDS sets it)."
    )


def test_every_open_section_is_held_against_its_own_timeout() -> None:
    liveness = watching(step=50.0, forward=20.0, inner=5.0)
    liveness.handle(seen(100.0, ("step", 100.0), ("forward", 101.0), ("inner", 102.0)), 102.0)
    assert liveness.deadline() == 107.0
    assert only(liveness.tick(107.0)).section == "inner"
    liveness.handle(seen(100.0, ("step", 100.0), ("forward", 101.0), ("inner", 119.0)), 119.0)
    assert liveness.deadline() == 121.0
    silent = only(liveness.tick(121.0))
    assert (silent.section, silent.place, silent.since, silent.limit) == ("forward", "forward", 101.0, 20.0)
    assert silent.reason == (
        "rank 0: Section 'forward' has been open for 20.00 seconds (timeout 20.00, fixed; "
        "--ft-rank-section-timeouts=forward:SECONDS sets it)."
    )


def test_an_open_section_is_not_held_against_the_limit_outside_of_sections() -> None:
    liveness = watching(step=50.0, outside=1.0)
    liveness.handle(seen(100.0, ("step", 100.0)), 100.0)
    assert liveness.tick(149.0) == ()


def test_a_heartbeat_does_not_lengthen_the_section_that_it_is_in() -> None:
    liveness = watching(step=5.0)
    liveness.handle(seen(104.0, ("step", 100.0)), 104.0)
    assert liveness.tick(104.9) == ()
    assert only(liveness.tick(105.0)).reason == (
        "rank 0: Section 'step' has been open for 5.00 seconds (timeout 5.00, fixed; "
        "--ft-rank-section-timeouts=step:SECONDS sets it)."
    )


def test_the_reason_says_what_the_limit_was_learned_from() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    timeouts.learn({"x": Durations(120, 2.0, 2.0)})
    liveness = Liveness(timeouts, ALWAYS_LATE)
    liveness.handle(RankStarted(0, 1, 0.0), 0.0)
    liveness.handle(seen(1.0, ("x", 1.0), generation=1), 1.0)
    assert only(liveness.tick(13.0)).reason == (
        "rank 0: Section 'x' has been open for 12.00 seconds (timeout 10.00, learned from 120 samples; "
        "--ft-rank-section-timeouts=x:SECONDS sets it)."
    )


def test_a_heartbeat_of_an_older_generation_proves_nothing() -> None:
    liveness = watching(start=60.0)
    liveness.handle(seen(50.0, generation=1), 50.0)
    assert only(liveness.tick(60.0)).initial
    liveness.handle(seen(50.0, generation=2), 60.0)
    liveness.handle(RankStarted(0, 3, 61.0), 61.0)
    assert liveness.deadline() == 121.0


def test_a_rank_that_said_done_may_take_its_time_to_end() -> None:
    liveness = watching(ranks=2, start=math.inf)
    liveness.handle(HeartbeatSeen(0, 2, 1, 5.0, 5, closed=7.0, done=True), 7.0)
    liveness.handle(HeartbeatSeen(1, 2, 1, 9.0, 5, (("step", 3.0),), closed=7.0, done=True), 9.0)
    assert liveness.deadline() == 1807.0
    silent = only(liveness.tick(1807.0))
    assert (silent.rank, silent.section, silent.since) == (0, FINISHING, 7.0)
    assert [silent.rank for silent in liveness.tick(1809.0)] == [0, 1]


def test_a_rank_that_is_done_before_its_first_step_is_held_to_the_time_since_its_spawn() -> None:
    liveness = Liveness(Timeouts(FaultToleranceOptions()), ALWAYS_LATE)
    liveness.handle(RankStarted(0, 2, 90_000.0), 90_000.0)
    liveness.handle(HeartbeatSeen(0, 2, 0, 0.0, -1, done=True), 90_001.0)
    assert liveness.tick(90_003.0) == ()
    assert liveness.deadline() == 91_800.0


def stopped(beat: float, *sections: tuple[str, float]) -> HeartbeatSeen:
    return HeartbeatSeen(0, 2, int(beat > 0), beat, 5, sections, stopped=True)


def test_a_stopped_process_is_found_soon_whatever_it_was_doing() -> None:
    liveness = Liveness(Timeouts(FaultToleranceOptions(rank_section_timeouts={"forward": 9.0})), ALWAYS_LATE)
    liveness.handle(RankStarted(0, 2, 0.0), 0.0)
    liveness.handle(stopped(90.0, ("forward", 91.0), ("step", 92.0)), 93.0)
    liveness.handle(stopped(90.0, ("forward", 91.0), ("step", 92.0)), 94.0)
    assert liveness.deadline() == 94.4
    silent = only(liveness.tick(94.4))
    assert (silent.section, silent.since, silent.limit) == ("step", 93.0, LEARNED_FLOOR)
    assert silent.reason == (
        "rank 0: Its process has been stopped for 1.40 seconds (timeout 1.40, default of stopped processes; "
        "--ft-rank-section-timeouts=step:SECONDS sets it)."
    )
    liveness.handle(stopped(90.0, ("step", 91.0), ("forward", 92.0)), 95.0)
    assert liveness.deadline() == 101.0, "the user has fixed how long it may be in there"


def test_a_stopped_process_is_held_to_the_limit_that_the_user_has_fixed_for_its_place() -> None:
    liveness = watching(forward=9.0)
    liveness.handle(stopped(90.0, ("forward", 89.0)), 90.0)
    assert "open for 9.00 seconds" in only(liveness.tick(98.0)).reason, "it was open before"
    liveness.handle(stopped(90.0, ("forward", 95.0)), 98.5)
    assert liveness.tick(98.9) == ()
    assert only(liveness.tick(99.0)).reason == (
        "rank 0: Its process has been stopped for 9.00 seconds (timeout 9.00, fixed; "
        "--ft-rank-section-timeouts=forward:SECONDS sets it)."
    )


def test_a_process_that_is_continued_was_never_stopped() -> None:
    liveness = Liveness(Timeouts(FaultToleranceOptions()), ALWAYS_LATE)
    liveness.handle(RankStarted(0, 2, 0.0), 0.0)
    liveness.handle(stopped(90.0), 93.0)
    liveness.handle(seen(90.0), 94.0)
    assert liveness.tick(95.0) == ()
    liveness.handle(stopped(90.0), 96.0)
    assert liveness.tick(97.3) == ()
    assert only(liveness.tick(97.4)).since == 96.0


def test_a_process_that_ran_between_two_looks_was_not_stopped_all_the_time() -> None:
    """cpulimit(1) stops and continues a process many times a second, and each look may find it stopped."""
    liveness = Liveness(Timeouts(FaultToleranceOptions()), ALWAYS_LATE)
    liveness.handle(RankStarted(0, 2, 0.0), 0.0)
    for look in range(8):
        liveness.handle(replace(stopped(90.0), ran=7.0 + look), 93.0 + look)
        assert liveness.tick(93.0 + look) == ()
    liveness.handle(replace(stopped(90.0), ran=14.0), 101.3)
    assert liveness.tick(101.3) == ()
    assert only(liveness.tick(101.4)).since == 100.0


def test_a_process_that_is_stopped_before_its_first_heartbeat_is_found_too() -> None:
    liveness = Liveness(Timeouts(FaultToleranceOptions()), ALWAYS_LATE)
    liveness.handle(RankStarted(0, 2, 0.0), 0.0)
    liveness.handle(stopped(0.0), 3.0)
    assert only(liveness.tick(4.4)).place == INITIAL


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
    assert liveness.tick(39.9) == ()
    assert only(liveness.tick(40.0)).waited == 30.0


def test_an_excuse_ends_with_the_step_it_was_given_for() -> None:
    liveness = watching(step=5.0)
    liveness.handle(Excused(0, 4, 40.0), 15.0)
    liveness.handle(seen(10.0, ("step", 10.0)), 10.0)
    assert liveness.deadline() == 15.0
    assert only(liveness.tick(15.0)).step == 5


def test_an_excuse_before_the_first_heartbeat_is_for_step_minus_one() -> None:
    liveness = watching(start=5.0)
    liveness.handle(Excused(0, -1, 40.0), 5.0)
    liveness.handle(seen(0.0), 5.0)
    assert liveness.tick(39.0) == ()
    assert only(liveness.tick(40.0)).step == -1


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


@pytest.mark.parametrize("later", [0.0, 3.0])
def test_a_silence_that_began_after_the_sleep_is_not_excused(later: float) -> None:
    liveness = watching(INTERVAL, start=5.0, step=5.0)
    liveness.tick(0.0)
    liveness.tick(1000.0)
    liveness.handle(seen(1003.1, ("step", 1000.0 + later)), 1003.25)
    assert look(liveness, 1000.25, 1010.0)[0] == 1005.0 + later


def test_of_a_silence_that_began_during_the_sleep_only_the_rest_is_excused() -> None:
    liveness = watching(INTERVAL, step=5.0)
    liveness.tick(0.0)
    liveness.handle(seen(990.0, ("step", 990.0)), 1000.0)
    assert liveness.tick(1000.0) == ()
    assert look(liveness, 1000.25, 1010.0)[0] == 1005.0


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
    deadline = liveness.deadline()
    assert deadline == pytest.approx(500.0 + 256.0)


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
            due = limit["start"]
        elif opened:
            due = min(at + limit[name] for name, at in opened)
        else:
            due = max(beat, closed) + limit["outside"]
        assert liveness.deadline() == pytest.approx(due)
        assert liveness.tick(due - 0.01) == ()
        assert len(liveness.tick(due + 0.01)) == 1
        counted["start"] += beat == 0.0
        counted["open"] += beat > 0 and len(opened) > 1
        counted["outside"] += beat > 0 and not opened

    check()
    assert min(counted["start"], counted["open"], counted["outside"]) > 2, counted


def test_a_sleep_is_not_forgotten_while_the_watcher_looks_in_time() -> None:
    liveness = watching(INTERVAL, start=1000.0)
    liveness.tick(0.0)
    slept = 900.0 - 3 * INTERVAL
    looks = [900.0 + INTERVAL * look for look in range(4 * 1000)]
    told = [now for now in looks if liveness.tick(now)]
    assert told[0] == 1000.0 + slept


def test_a_sleep_delays_the_report_by_what_was_slept() -> None:
    @settings(max_examples=60)
    @given(st.integers(0, 39), st.integers(4, 4000), st.floats(0.5, 9.0))
    def check(before: int, slept: int, limit: float) -> None:
        awake, asleep = watching(INTERVAL, start=limit), watching(INTERVAL, start=limit)
        first = look(awake, 0.0, 10.0)[0]
        told = look(asleep, 0.0, before * INTERVAL)
        if told:
            return
        resumed = before * INTERVAL + slept * INTERVAL
        told = look(asleep, resumed, resumed + 10.0)
        assert told[0] == pytest.approx(max(first + (slept - 3) * INTERVAL, resumed))

    check()
