"""How often healthy ranks look slow: the bound on false alarms."""

from __future__ import annotations

import random

import pytest

from outlast.stragglers.policy.limits import Chance, Limits, Seen
from outlast.stragglers.policy.tracks import Track


def test_the_limits_are_those_of_the_documents() -> None:
    """docs/explanation/stragglers.md has a reason for each."""
    assert Limits() == Limits(
        ratio=1.05,
        seconds=0.001,
        share=0.01,
        deviations=(3.0, 1.5),
        first=(0.01, 0.1),
        share_of_alarms=(0.9, 0.1),
        most=8,
        on=1.10,
        off=1.04,
        windows=3,
        latest=20,
        false_alarms=1e-6,
        moves=30,
        missing=10,
    )


def test_older_windows_lose_weight() -> None:
    chance = Chance()
    for _ in range(20):
        chance.recovered(after=2)
    chance.count(turned=999, windows=99_900)
    assert (chance.turns(), chance.stays()) == (0.01, 20 / 50)
    chance.count(turned=1000, windows=0)
    assert (chance.turns(), chance.stays()) == (0.02, 20 / 50)
    chance.count(turned=0, windows=100_000)
    assert (chance.turns(), chance.stays()) == (0.01, 10 / 30)
    chance.count(turned=2000, windows=0)
    assert chance.turns() == 0.03


def test_a_rank_cannot_turn_slow_more_than_always() -> None:
    chance = Chance()
    chance.count(turned=1000, windows=0)
    assert chance.turns() == 1.0


def test_what_is_learned_replaces_the_first_guess() -> None:
    chance = Chance()
    assert chance.turns() == 0.01
    chance.count(turned=0, windows=100_000 - 100)
    assert chance.turns() == pytest.approx(1e-5)
    chance.count(turned=50_000, windows=100_000)
    assert chance.turns() > 0.2


def test_slow_windows_that_come_together_are_learned_from_those_who_recovered() -> None:
    chance = Chance()
    assert chance.stays() == chance.turns()
    for _ in range(90):
        chance.recovered(after=2)
    assert chance.stays() == pytest.approx(90 / 190)
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


def test_what_a_rank_brought_in_may_weigh_more_than_what_is_left_of_it() -> None:
    """Older windows lose weight; a rank's own do not."""
    chance, own = Chance(), Seen(turned=2)
    own.recovered(11)
    chance.count(turned=1, windows=0)
    chance.recovered(11)
    chance.count(turned=0, windows=100_000)
    assert chance.stays() == 5 / (5 + 0.5 + 10)
    assert chance.turns(own) == chance.stays(own) == 0.5 / 50_050


def test_the_bound_counts_every_rank_and_section() -> None:
    chance = Chance()
    assert chance.of_healthy(3, 3, 1) == pytest.approx(1e-6)
    assert chance.of_healthy(3, 3, 1000) == pytest.approx(1e-3)
    assert chance.of_healthy(1, 1, 1000) == 1.0


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
            track.add(1.5, 2, 0.0)
            while draw.random() < 0.3:
                track.add(1.5, 2, 0.0)
                length += 1
                track.stands((chance, Chance(1.0)), tests)
                if track.on:
                    alarms += 1
                    break
            if not track.on:
                chance.recovered(length)
    bound = 0.9 * limits.false_alarms / 2
    shortest = next(n for n in range(3, 99) if chance.of_healthy(n, 1, tests) <= bound)
    assert chance.turns() == pytest.approx(0.002, rel=0.2)
    assert chance.stays() == pytest.approx(0.3, rel=0.15)
    # What chance does in truth to all ranks, sections and windows of the long job.
    assert tests * 100_000 * 0.002 * 0.3 ** (shortest - 1) < 0.5
    assert alarms <= 1
