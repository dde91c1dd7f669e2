"""The reference and the spread of a group of peers."""

from __future__ import annotations

import math
import random
from statistics import median_high, median_low

import pytest

from outlast.stragglers.policy.limits import Limits
from outlast.stragglers.policy.peers import ENOUGH, Moves, references, spread


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_the_reference_is_the_median_of_the_others_that_is_nearer(count: int) -> None:
    values = [float(2**at) for at in range(count)]
    low, high = references(values)
    assert low == median_high(values[:-1])
    assert high == median_low(values[1:])


def test_the_spread_is_the_deviation_of_a_normal_distribution(seed: int) -> None:
    draw = random.Random(seed)
    values = sorted(math.exp(draw.gauss(0, 0.05)) for _ in range(20_000))
    assert spread(values) == pytest.approx(0.05, rel=0.2)
    assert spread(values[::100]) == pytest.approx(0.05, rel=0.3)
    assert spread([*values[: len(values) * 3 // 4], *[9.0] * (len(values) // 4)]) < 0.1


def test_the_spread_of_few_values_by_hand() -> None:
    assert spread([1.0, math.e, math.e**2, math.e**4]) == pytest.approx(1.4826 * 1.5)
    assert spread([1e-4 * math.e**at for at in (0, 1, 3, 4, 9)]) == pytest.approx(1.4826 * 2)
    assert spread([1.0, 1.0, 1.0, 50.0]) == 0.0
    assert spread([1.0, 2.0, 3.0]) == 0.0
    assert spread([0.0] * 4) == 0.0


def test_a_rank_that_is_always_slow_does_not_move() -> None:
    moves = Moves(Limits(moves=4))
    for _ in range(3):
        assert moves.spread == math.inf
        moves.begin()
        moves.add({0: 1.0, 1: 2.0}, [1.0, 2.0])
    assert moves.spread == 0.0


def test_moves_are_changes_against_the_peers() -> None:
    """Twice, rank 1 goes from 1 to e times the other and back; the whole job's pace does not count."""
    moves = Moves(Limits(moves=2))
    for pace, ratio in ((1.0, 1.0), (3.0, math.e), (0.5, 1.0)):
        moves.begin()
        values = {0: pace, 1: pace * ratio}
        moves.add(values, sorted(values.values()))
    assert moves.spread == pytest.approx(1.4826 / math.sqrt(2))


def test_one_change_is_enough_where_the_limits_say_so() -> None:
    """Rank 1 has gone, rank 2 has come."""
    moves = Moves(Limits(moves=1))
    for values in ({0: 1.0, 1: 1.0}, {0: 1.0, 2: 1.0}):
        assert moves.spread == math.inf
        moves.begin()
        moves.add(values, [1.0, 1.0])
    assert moves.spread == 0.0


def test_a_window_gives_no_more_moves_than_are_needed() -> None:
    """Groups of eight, of which those beyond 256 ranks change; the latest 256 moves count."""
    moves = Moves(Limits(moves=1))
    for value in (1.0, 5.0):
        moves.begin()
        for group in range(64):
            ranks = range(8 * group, 8 * group + 8)
            values = {rank: value if group >= 32 and rank % 8 < 4 else 1.0 for rank in ranks}
            moves.add(values, sorted(values.values()))
    assert moves.spread == 0.0


@pytest.mark.parametrize(("ranks", "noted"), [(256, True), (257, False)])
def test_so_many_ranks_have_room(ranks: int, noted: bool) -> None:
    moves = Moves(Limits(moves=1))
    for _ in range(2):
        moves.begin()
        moves.add(dict.fromkeys(range(ranks), 1.0), [1.0] * ranks)
    assert (moves.spread == 0.0) is noted


def test_nothing_is_noted_before_a_window_begins() -> None:
    moves = Moves(Limits(moves=0))
    moves.add({0: 1.0, 1: 1.0}, [1.0, 1.0])
    moves.begin()
    moves.add({0: 1.0, 1: 9.0}, [1.0, 9.0])
    moves.begin()
    moves.add({0: 1.0, 1: 9.0}, [1.0, 9.0])
    assert moves.spread == 0.0


def test_the_median_of_an_even_number_of_moves_lies_between_two() -> None:
    moves = Moves(Limits(moves=2))
    for late in (1.0, 1.0, math.e):
        moves.begin()
        moves.add({0: 1.0, 1: late}, [1.0, late])
    assert moves.spread == pytest.approx(1.4826 * 0.5 / math.sqrt(2))


def test_how_many_peers_are_enough() -> None:
    assert ENOUGH == 16


def test_noise_that_lasts_for_some_windows_is_seen_in_changes_over_several() -> None:
    """Rank 1 stays at e times the other for four windows, then at the same for four, and so on."""
    moves = Moves(Limits(moves=10))
    for at in range(40):
        moves.begin()
        late = math.e if at // 4 % 2 else 1.0
        moves.add({0: 1.0, 1: late}, sorted([1.0, late]))
    assert moves.spread == pytest.approx(1.4826 / math.sqrt(2))
    assert not moves.settled


def test_independent_noise_is_settled_once_enough_changes_are_known(seed: int) -> None:
    moves, draw, after = Moves(Limits()), random.Random(seed), []
    for _ in range(100):
        moves.begin()
        values = {rank: math.exp(draw.gauss(0, 0.2)) for rank in range(8)}
        moves.add(values, sorted(values.values()))
        after.append(moves.settled)
    assert after.index(True) >= 7
    assert after[-1]


def told(steps: list[float], windows: int = 40, least: int = 4) -> tuple[Moves, list[bool]]:
    """Return two ranks, of which the second goes up or down by these steps in turn, and when they settle."""
    moves, height, after = Moves(Limits(moves=least)), 50.0, []
    for at in range(windows):
        moves.begin()
        moves.add({0: 1.0, 1: math.exp(height)}, sorted([1.0, math.exp(height)]))
        height += steps[at % len(steps)]
        after.append(moves.settled)
    return moves, after


def test_ranks_that_do_not_change_are_settled_after_changes_over_four_windows() -> None:
    """The fifth window has two of them, the sixth has four."""
    assert told([0.0], windows=8)[1] == [False] * 5 + [True] * 3


def test_changes_over_four_windows_count() -> None:
    """A rank that drifts away changes four times as much as in one window."""
    moves, after = told([0.1])
    assert moves.spread == pytest.approx(1.4826 * 0.4 / math.sqrt(2))
    assert not any(after)


def test_changes_that_add_up_as_in_a_random_walk_are_not_settled() -> None:
    """Twice as much in four windows as in one."""
    moves, after = told([0.1, 0.1, 0.1, -0.1])
    assert moves.spread == pytest.approx(1.4826 * 0.2 / math.sqrt(2))
    assert not any(after)
