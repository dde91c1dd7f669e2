"""A rank's past in a section: when it turns on, and when off."""

from __future__ import annotations

import math

import pytest

from outlast.stragglers.policy.limits import Chance, Limits
from outlast.stragglers.policy.tracks import Standing, Track

NEVER = Chance()  # a healthy rank turns slow once in a hundred thousand windows
NEVER.count(0, 99_900)
ALWAYS = Chance(first=1.0)  # a level that says nothing


def watched(ratios: list[float], chance: Chance = NEVER, tests: int = 1) -> list[bool]:
    """Return after which windows a rank with these ratios is a straggler."""
    track, found = Track(Limits()), []
    for at, ratio in enumerate(ratios):
        track.add(ratio, 2 if ratio >= 1.05 else 0, float(at))
        track.stands((chance, ALWAYS), tests)
        found.append(track.on)
    return found


def test_three_slow_windows_in_a_row_at_least() -> None:
    assert watched([1.5] * 4) == [False, False, True, True]


def test_more_of_them_where_chance_brings_more() -> None:
    """One in a hundred: 1e-2 ** 4 times 10 is below half of the bound, 1e-2 ** 3 is not."""
    assert watched([1.5] * 5, Chance(), tests=10) == [False, False, False, True, True]


def test_a_mean_below_the_limit_is_none() -> None:
    assert not any(watched([1.09] * 20))
    assert watched([1.05, 1.05, 1.05, 1.3])[-1]
    assert watched([1.10] * 3)[-1]


def test_off_at_the_mean_of_as_many_windows() -> None:
    assert watched([1.5] * 3 + [1.0] * 3) == [False, False, True, True, True, False]
    assert watched([1.5] * 3 + [1.06] * 30)[-1]
    assert not watched([1.5] * 3 + [1.04] * 3)[-1]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0], [False]),
        ([1.04], [False]),
        ([1.05, 1.06], [True, True]),
        ([1.5, 1.0, 1.0, 1.0], [True, True, True, False]),
    ],
)
def test_what_an_earlier_leader_found_holds_until_times_deny_it(
    ratios: list[float], expected: list[bool]
) -> None:
    track, found = Track(Limits(), since=7.0), []
    assert (track.on, track.since, track.over) == (True, 7.0, False)
    for at, ratio in enumerate(ratios):
        track.add(ratio, 0, 10.0 + at)
        track.stands((NEVER, ALWAYS), 1)
        found.append(track.on)
    assert found == expected
    assert track.since == 7.0


def test_what_an_earlier_leader_found_is_judged_at_the_higher_level() -> None:
    track = Track(Limits(), since=7.0)
    track.add(1.5, 1, 10.0)
    assert track.stands((NEVER, ALWAYS), 1) == Standing(windows=1, slow=0, ratio=1.5, chance=1.0)
    track.add(1.5, 2, 11.0)
    assert track.stands((NEVER, ALWAYS), 1).slow == 1


def test_slow_now_and_then() -> None:
    ratios = [1.6, 1.0, 1.0] * 6
    assert watched(ratios).index(True) == 6
    assert not any(watched(ratios, Chance(), tests=1000))


def test_what_was_seen() -> None:
    track = Track(Limits())
    assert (track.since, track.seen, track.on, track.slow(), track.over) == (0.0, 0, False, False, True)
    for at, ratio in enumerate([1.0, 1.5, 1.5, 1.0, 2.0, 2.0, 2.0]):
        track.add(ratio, 2 if ratio > 1 else 0, float(at))
    assert (track.slow(), track.run(0), track.since) == (True, 3, 1.0)
    seen = track.stands((NEVER, ALWAYS), 1)
    assert (seen.windows, seen.slow, seen.ratio) == (3, 3, 2.0)
    assert seen.chance == pytest.approx(1e-15, rel=1e-6, abs=0)
    track.add(1.0, 0, 9.0)
    assert (track.slow(), track.run(0)) == (False, 0)
    assert (track.stands((NEVER, ALWAYS), 1).windows, track.on) == (3, True)


def test_each_turn_counts_once_and_staying_slow_by_its_own_chance() -> None:
    chance, track = Chance(), Track(Limits())
    for _ in range(10):
        chance.recovered(after=2)
    for slow in (True, True, False, True):
        track.add(1.5 if slow else 1.0, 2 if slow else 0, 0.0)
    every = track._over(4, 0, (chance, ALWAYS), 2)
    assert (every.windows, every.slow) == (4, 3)
    assert every.chance == pytest.approx(2 * 1140 * 0.01**2 * (10 / 30), rel=1e-6, abs=0)


@pytest.mark.parametrize(("tests", "windows"), [(44, 4), (46, 5)])
def test_nine_twentieths_of_the_bound_are_for_each_of_the_two_ways_to_be_found(
    tests: int, windows: int
) -> None:
    assert watched([1.5] * 6, Chance(), tests).index(True) == windows - 1


def test_nothing_is_left_to_remember_after_the_latest_windows() -> None:
    track = Track(Limits(latest=4))
    track.add(1.5, 2, 0.0)
    for _ in range(3):
        track.add(1.0, 0, 0.0)
        assert not track.over
    track.add(1.0, 0, 0.0)
    assert track.over


def test_many_windows_of_the_lower_level_do_what_few_of_the_higher_one_do() -> None:
    """A tenth of the bound: 0.1 ** 8 is below a twentieth of 1e-6, 0.1 ** 7 is not."""
    track, lower, on = Track(Limits()), Chance(0.1), []
    lower.count(turned=1, windows=0)  # its own turn
    for at in range(10):
        track.add(1.5, 1, float(at))
        track.stands((Chance(), lower), tests=1)
        on.append(track.on)
    assert on.index(True) == 7
    assert (track.slow(), track.slow(1), track.run(0), track.run(1)) == (False, True, 0, 10)


def test_at_the_lower_level_a_rank_is_not_held_against_itself() -> None:
    """Two of three windows are slow; what it taught of staying slow would hide it."""
    chance, track, on = Chance(0.1), Track(Limits()), []
    chance.count(0, 1000)
    for at in range(60):
        slow = at % 3 > 0
        if slow and not track.slow(1):
            chance.count(1, 0)
        if track.slow(1) and not slow:
            chance.recovered(track.run(1))
        track.add(1.5 if slow else 1.0, int(slow), float(at))
        track.stands((Chance(), chance), tests=1)
        on.append(track.on)
    assert on.index(True) < 20


@pytest.mark.parametrize(
    "slow",
    [
        [False, True, True] * 3,
        [False, False, True, False, True, True, True, False, False, True, True, True, True],
        [True, False, True, True, False, False, True, True],
    ],
)
def test_the_chance_at_the_lower_level_is_that_of_the_other_ranks(slow: list[bool]) -> None:
    """``every`` has learned from the rank, too, ``others`` has not."""
    others, every, track = Chance(0.1), Chance(0.1), Track(Limits())
    for chance in (others, every):
        chance.count(turned=20, windows=2000)
        for after in (2, 5, 3) * 4:
            chance.recovered(after)
    for at, one in enumerate(slow):
        if one and not track.slow(1):
            every.count(turned=1, windows=0)
        if track.slow(1) and not one:
            every.recovered(track.run(1))
        track.add(1.5 if one else 1.0, int(one), float(at))
    turns = sum(now and not before for before, now in zip([False, *slow], slow, strict=False))
    found = track._over(len(slow), 1, (ALWAYS, every), tests=1)
    choices = math.comb(20, sum(slow))
    assert (found.windows, found.slow) == (len(slow), sum(slow))
    assert found.chance == pytest.approx(others.of_healthy(sum(slow), turns, choices), rel=1e-9, abs=0)
    assert found.chance < every.of_healthy(sum(slow), turns, choices)


def test_until_a_rank_is_found_its_slow_windows_in_a_row_are_told() -> None:
    track = Track(Limits())
    track.add(1.5, 2, 0.0)
    assert track.stands((Chance(), ALWAYS), 1) == Standing(1, 1, 1.5, pytest.approx(0.01))
    track.add(1.0, 0, 1.0)
    track.add(1.7, 2, 2.0)
    assert track.stands((Chance(), ALWAYS), 1) == Standing(1, 1, 1.7, pytest.approx(0.01))
    assert not track.on


def test_a_chance_equal_to_the_bound_is_small_enough() -> None:
    """0.5 ** 3 is an eighth."""
    half = Chance(first=0.5)
    for false_alarms, on in ((0.25, True), (0.2499, False)):
        track = Track(Limits(false_alarms=false_alarms, share_of_alarms=(1.0, 0.0)))
        for at in range(3):
            track.add(1.5, 2, float(at))
        track.stands((half, ALWAYS), tests=1)
        assert track.on is on
