"""A rank's past in a section: when it turns on and when off, by its peers' spread and by chance."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median_high, median_low

import pytest

from outlast.stragglers.policy.limits import Chance, Limits, Seen
from outlast.stragglers.policy.peers import Moves, references, spread
from outlast.stragglers.policy.tracks import Track

NEVER = Chance()  # a healthy rank turns slow once in a hundred thousand windows
NEVER.count(0, 99_900)
ALWAYS = Chance(first=1.0)  # a level that tells nothing


def add(track: Track, ratios: Sequence[float], level: int = 2) -> None:
    for ratio in ratios:
        track.add(ratio, level if ratio >= 1.05 else 0, 0.0)


def watched(ratios: Sequence[float], chance: Chance = NEVER, tests: int = 1) -> list[bool]:
    """Return after which windows a rank with these ratios is a straggler."""
    track, found = Track(Limits()), []
    for ratio in ratios:
        add(track, [ratio])
        track.stands((chance, ALWAYS), tests)
        found.append(track.on)
    return found


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([1.5] * 4, [False, False, True, True]),  # three slow windows in a row at least
        ([1.09] * 20, [False] * 20),
        ([1.05, 1.05, 1.05, 1.3], [False, False, False, True]),
        ([1.10] * 3, [False, False, True]),
        ([1.5] * 3 + [1.0] * 3, [False, False, True, True, True, False]),
        ([1.5] * 3 + [1.06] * 30, [False, False] + [True] * 31),
        ([1.5] * 3 + [1.04] * 3, [False, False, True, True, True, False]),
        ([1.6, 1.0, 1.0] * 3, [False] * 6 + [True] * 3),
    ],
)
def test_on_after_several_slow_windows_and_off_at_the_mean_of_as_many(
    ratios: list[float], found: list[bool]
) -> None:
    assert watched(ratios) == found


def test_more_slow_windows_are_needed_where_chance_brings_more() -> None:
    """One in a hundred: 1e-2 ** 4 times 44 is below half of nine tenths of the bound."""
    assert [watched([1.5] * 6, Chance(), tests).index(True) for tests in (44, 46)] == [3, 4]
    assert not any(watched([1.6, 1.0, 1.0] * 6, Chance(), tests=1000))


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
    assert (found, track.since) == (expected, 7.0)


def test_many_windows_of_the_lower_level_do_what_few_of_the_higher_one_do() -> None:
    """A tenth of the bound: 0.1 ** 8 is below a twentieth of 1e-6, 0.1 ** 7 is not."""
    track, lower, on = Track(Limits()), Chance(0.1), []
    lower.count(turned=1, windows=0)  # its own turn
    for _ in range(10):
        add(track, [1.5], level=1)
        track.stands((Chance(), lower), tests=1)
        on.append(track.on)
    assert on.index(True) == 7
    assert (track.slow(), track.slow(1), track.run(0), track.run(1)) == (False, True, 0, 10)


@pytest.mark.parametrize(
    "slow",
    [
        [False, True, True] * 3,
        [False, False, True, False, True, True, True, False, False, True, True, True, True],
        [True, False, True, True, False, False, True, True],
    ],
)
def test_the_chance_at_the_lower_level_is_that_of_the_other_ranks(slow: list[bool]) -> None:
    """A rank is not held against itself: ``every`` has learned from it, too, ``others`` has not."""
    others, every, track = Chance(0.1), Chance(0.1), Track(Limits())
    for chance in (others, every):
        chance.count(turned=20, windows=2000)
        for after in (2, 5, 3) * 4:
            chance.recovered(after)
    for one in slow:
        if one and not track.slow(1):
            every.count(turned=1, windows=0)
        if track.slow(1) and not one:
            every.recovered(track.run(1))
        add(track, [1.5 if one else 1.0], level=1)
    turns = sum(now and not before for before, now in zip([False, *slow], slow, strict=False))
    found = track._over(len(slow), 1, (ALWAYS, every), tests=1)
    choices = math.comb(20, sum(slow))
    assert (found.windows, found.slow) == (len(slow), sum(slow))
    assert found.chance == pytest.approx(others.of_healthy(sum(slow), turns, choices), rel=1e-9, abs=0)


# Chance


def test_what_is_learned_replaces_the_first_guess_and_older_windows_lose_weight() -> None:
    chance = Chance()
    assert (chance.turns(), chance.stays()) == (0.01, 0.01)
    for _ in range(20):
        chance.recovered(after=2)
    chance.count(turned=999, windows=99_900)
    assert (chance.turns(), chance.stays()) == (0.01, 20 / 50)
    chance.count(turned=1000, windows=0)
    assert (chance.turns(), chance.stays()) == (0.02, 20 / 50)
    chance.count(turned=0, windows=100_000)
    assert (chance.turns(), chance.stays()) == (0.01, 10 / 30)
    chance.count(turned=1_000_000, windows=0)
    assert chance.turns() == 1.0, "a rank cannot turn slow more than always"


def test_the_bound_counts_every_rank_section_turn_and_window_that_stays_slow() -> None:
    chance = Chance()
    assert chance.of_healthy(3, 3, 1) == pytest.approx(1e-6)
    assert chance.of_healthy(3, 3, 1000) == pytest.approx(1e-3)
    assert chance.of_healthy(1, 1, 1000) == 1.0
    for _ in range(90):
        chance.recovered(after=2)
    assert chance.of_healthy(slow=3, turns=1, ways=1) == pytest.approx(0.01 * (90 / 190) ** 2)


def test_what_a_rank_itself_brought_in_is_left_out() -> None:
    others, every, own = Chance(), Chance(), Seen(turned=3)
    for chance in (others, every):
        chance.count(turned=9, windows=900)
        for after in (2, 2, 6, 8):
            chance.recovered(after)
    every.count(turned=3, windows=0)
    for after in (5, 4):
        every.recovered(after)
        own.recovered(after)
    assert (every.turns(), every.stays()) == (13 / 1000, 21 / 37)
    assert (every.turns(own), every.stays(own)) == (others.turns(), others.stays()) == (0.01, 14 / 28)
    assert every.of_healthy(4, 2, 7, own) == others.of_healthy(4, 2, 7)
    every.count(turned=0, windows=100_000)
    every.count(turned=0, windows=100_000)  # older windows lose weight; a rank's own do not
    assert every.turns(own) > 0.0
    assert every.stays(own) >= every.turns(own)


def test_4096_healthy_ranks_stay_below_the_bound_in_100_000_windows(seed: int) -> None:
    """The windows of all ranks would take hours: 4 million drawn windows, then the bound for the rest.

    Windows are slow with probability 0.002 and stay so with 0.3, which the decider has to learn.
    """
    draw, limits, chance = random.Random(seed), Limits(), Chance()
    tests, alarms = 4096 * 4, 0
    for _ in range(1000):
        turned = 8  # 0.002 of 4,000 windows
        chance.count(turned, 4000)
        for _ in range(turned):
            track, length = Track(limits), 1
            add(track, [1.5])
            while draw.random() < 0.3:
                add(track, [1.5])
                length += 1
                track.stands((chance, Chance(1.0)), tests)
                if track.on:
                    alarms += 1
                    break
            if not track.on:
                chance.recovered(length)
    bound = 0.9 * limits.false_alarms / 2
    shortest = next(n for n in range(3, 99) if chance.of_healthy(n, 1, tests) <= bound)
    assert (chance.turns(), chance.stays()) == (pytest.approx(0.002, rel=0.2), pytest.approx(0.3, rel=0.15))
    # What chance does in truth to all ranks, sections and windows of the long job.
    assert tests * 100_000 * 0.002 * 0.3 ** (shortest - 1) < 0.5
    assert alarms <= 1


# Peers


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_the_reference_is_the_median_of_the_others_that_is_nearer(count: int) -> None:
    values = [float(2**at) for at in range(count)]
    assert references(values) == (median_high(values[:-1]), median_low(values[1:]))


def test_the_spread_is_the_deviation_of_a_normal_distribution(seed: int) -> None:
    draw = random.Random(seed)
    values = sorted(math.exp(draw.gauss(0, 0.05)) for _ in range(20_000))
    assert spread(values) == pytest.approx(0.05, rel=0.2)
    assert spread(values[::100]) == pytest.approx(0.05, rel=0.3)
    assert spread([*values[: len(values) * 3 // 4], *[9.0] * (len(values) // 4)]) < 0.1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.e, math.e**2, math.e**4], 1.4826 * 1.5),
        ([1e-4 * math.e**at for at in (0, 1, 3, 4, 9)], 1.4826 * 2),
        ([1.0, 1.0, 1.0, 50.0], 0.0),
        ([1.0, 2.0, 3.0], 0.0),
        ([0.0] * 4, 0.0),
    ],
)
def test_the_spread_of_few_values(values: list[float], expected: float) -> None:
    assert spread(values) == pytest.approx(expected)


def moved(heights: Sequence[float], least: int, paces: Sequence[float] = ()) -> tuple[Moves, list[bool]]:
    """Return two ranks, the second one by its logarithm to the first, and when they settle."""
    moves, after = Moves(Limits(moves=least)), []
    for at, height in enumerate(heights):
        moves.begin()
        pace = paces[at] if paces else 1.0
        values = {0: pace, 1: pace * math.exp(height)}
        moves.add(values, sorted(values.values()))
        after.append(moves.settled)
    return moves, after


@pytest.mark.parametrize(
    ("heights", "least", "expected"),
    [
        pytest.param([0.7] * 3, 4, 0.0, id="always slow"),
        pytest.param([0.7] * 2, 4, math.inf, id="too few"),
        pytest.param([0.0, 1.0, 0.0], 2, 1.0, id="there and back"),
        pytest.param([0.0, 0.0, 1.0], 2, 0.5, id="between two moves"),
        pytest.param([at // 4 % 2 for at in range(40)], 10, 1.0, id="lasting for four windows"),
        pytest.param([0.1 * at for at in range(40)], 4, 0.4, id="drifting"),
        pytest.param([0.2 * (at // 4) + 0.1 * (at % 4) for at in range(40)], 4, 0.2, id="random walk"),
    ],
)
def test_the_spread_of_moves_is_that_of_one_window(heights: list[float], least: int, expected: float) -> None:
    """A change over four windows counts, too."""
    moves, after = moved(heights, least)
    assert moves.spread == pytest.approx(1.4826 * expected / math.sqrt(2))
    assert not any(after)


def test_independent_noise_is_settled_once_enough_changes_are_known(seed: int) -> None:
    draw = random.Random(seed)
    _, after = moved([draw.gauss(0, 0.3) for _ in range(300)], 30)
    assert after.index(True) >= 7
    assert after[-1]
    assert moved([0.0] * 8, 4)[1] == [False] * 5 + [True] * 3


@pytest.mark.parametrize(("ranks", "noted"), [(256, True), (257, False)])
def test_a_window_gives_no_more_moves_than_of_256_ranks(ranks: int, noted: bool) -> None:
    moves = Moves(Limits(moves=1))
    moves.add(dict.fromkeys(range(ranks), 1.0), [1.0] * ranks)
    for _ in range(2):
        assert moves.spread == math.inf
        moves.begin()
        moves.add(dict.fromkeys(range(ranks), 1.0), [1.0] * ranks)
    assert (moves.spread == 0.0) is noted
