"""Shares of micro-batches against every way to divide them; samples against a count of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.steps import Proposal, Stage
from outlast.ipc.heartbeat_page import HeartbeatPage, HeartbeatReader
from outlast.parallelism.policy.samples import Cursor, Order, Sampling
from outlast.parallelism.policy.shares import FULL_SPEED, MOST_SLOW, shares, speeds_of

SPEEDS = st.lists(st.sampled_from([100, 250, 333, 500, 700, 1000]), min_size=1, max_size=4)


def every_division(number: int, ranks: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to give micro-batches to ranks."""
    if ranks == 1:
        if number >= least:
            yield (number,)
        return
    for first in range(least, number + 1):
        for others in every_division(number - first, ranks - 1, least):
            yield (first, *others)


def slowest(found: tuple[int, ...], speeds: list[int]) -> float:
    return max(number / speed for number, speed in zip(found, speeds, strict=True))


@given(st.integers(1, 12), st.integers(1, 3), SPEEDS)
def test_no_division_has_a_faster_slowest_rank(number: int, micro: int, speeds: list[int]) -> None:
    found = shares(number * micro, micro, speeds)
    least = 1 if number >= len(speeds) else 0
    assert sum(found) == number
    assert min(found) >= least
    best = min(slowest(one, speeds) for one in every_division(number, len(speeds), least))
    assert slowest(found, speeds) == best


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 300))
def test_equal_ranks_differ_by_one_micro_batch_at_most(batch: int, micro: int, world: int) -> None:
    found = shares(batch, micro, world)
    assert sum(found) == -(-batch // micro)
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)


def test_a_rank_that_is_not_slow_has_full_speed_and_one_at_half_speed_takes_half() -> None:
    assert speeds_of(4, [(1, 250), (3, 999)]) == (1000, 250, 1000, 999)
    assert speeds_of(0, []) == ()
    assert shares(56, 2, speeds_of(4, [(2, FULL_SPEED // 2)])) == (8, 8, 4, 8)


def test_a_page_has_room_for_as_many_slow_ranks_as_shares_follow(tmp_path: Path) -> None:
    said = Proposal(1, Stage.PROPOSED, 1, 5, slow=tuple((rank, 500) for rank in range(MOST_SLOW)))
    agent = HeartbeatReader(tmp_path / "page", rank=0, generation=1, spawned=0.0)
    rank = HeartbeatPage.open(agent.path).agreement
    rank.begin(7, 20)
    agent.agreement.say(said)
    assert rank.read() == said
    assert agent.agreement.read().round == 7, "a rank that begins a step is heard all the same"
    agent.close()


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "named"),
    [
        (0, 2, 2, r"0.*2.*\[1\.0, 1\.0\]"),
        (4, 0, 1, r"4.*0.*\[1\.0\]"),
        (4, 1, 0, r"4.*1.*\[\]"),
        (4, 1, [1.0, 0.0], r"4.*1.*\[1\.0, 0\.0\]"),
    ],
)
def test_what_is_not_positive_is_refused(
    batch: int, micro: int, ranks: int | list[float], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        shares(batch, micro, ranks)


# The order of samples


@given(st.integers(1, 700), st.integers(0, 1 << 70), st.integers(0, 5))
def test_an_order_has_every_number_once(size: int, seed: int, epoch: int) -> None:
    order = Order(size, seed, epoch)
    assert sorted(order[place] for place in range(size)) == list(range(size))


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "first"),
    [
        (1, 0, 0, [0]),
        (2, 0, 0, [1, 0]),
        (7, 0, 0, [1, 0, 6, 2, 4, 3]),
        (8, 0, 0, [1, 0, 6, 2, 7, 3]),
        (9, 1, 0, [4, 2, 8, 1, 0, 5]),
        (64, 0, 0, [39, 0, 27, 20, 46, 54]),
        (65, 0, 0, [63, 8, 46, 34, 15, 54]),
        (100, 7, 3, [65, 95, 10, 52, 91, 56]),
        (1000003, 1 << 70, 1, [666929, 419804, 663845, 116581, 420417, 190599]),
        (1 << 40, 0, 2, [984652464888, 140326049992, 894101807942, 664494811228, 430590874102, 511242418407]),
    ],
)
def test_an_order_is_the_same_in_every_version_so_that_a_run_goes_on_in_it(
    size: int, seed: int, epoch: int, first: list[int]
) -> None:
    order = Order(size, seed, epoch)
    assert [order[place] for place in range(min(size, 6))] == first
    assert len(order) == size


@pytest.mark.parametrize("place", [-1, 5, 6])
def test_a_place_beyond_an_order_is_refused(place: int) -> None:
    with pytest.raises(IndexError, match=f"{place}.*5"):
        Order(5, 0, 0)[place]


@pytest.mark.parametrize("size", [5, 10, 64])
def test_every_sample_is_as_likely_at_the_first_place(size: int) -> None:
    first = Counter(Order(size, 0, epoch)[0] for epoch in range(200 * size))
    squares = sum((first[sample] - 200) ** 2 / 200 for sample in range(size))
    assert squares < size + 4 * (2 * size) ** 0.5  # chi-square with size - 1 degrees, 4 deviations


# Steps of samples


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 8),
    st.sampled_from([None, 0, 7]),
    st.booleans(),
    st.data(),
)
def test_every_sample_is_taken_exactly_once_whatever_the_worlds(
    size: int, batch: int, micro: int, seed: int | None, drop_last: bool, data: st.DataObject
) -> None:
    sampling = Sampling(size, batch, min(micro, batch), seed, drop_last)
    if sampling.problems():
        assert drop_last
        assert size < batch
        return
    cursor, taken = Cursor(), Counter[tuple[int, int]]()
    while cursor.epoch < 2:
        speeds = data.draw(SPEEDS)
        step = sampling.step(cursor)
        if step.epoch == 2:
            break
        divided = shares(step.samples, sampling.micro_batch, speeds)
        order = sampling.order(step.epoch)
        parts = [part for rank in range(len(speeds)) for part in step.of_rank(rank, divided)]
        found = [order[place] for part in parts for place in part]
        assert found == [order[place] for place in step.places]  # what one rank alone would take
        assert len(found) == step.samples
        taken.update((step.epoch, sample) for sample in found)
        cursor = step.after
    assert set(taken.values()) == {1}
    left = size % batch if drop_last else 0
    assert Counter(epoch for epoch, _ in taken) == {0: size - left, 1: size - left}


WHOLE, DROPPED = Sampling(10, 4, 2), Sampling(10, 4, 2, drop_last=True)


@pytest.mark.parametrize(
    ("sampling", "taken", "places", "after"),
    [
        (WHOLE, 0, range(4), Cursor(0, 4)),
        (WHOLE, 8, range(8, 10), Cursor(0, 10)),
        (WHOLE, 9, range(9, 10), Cursor(0, 10)),
        (WHOLE, 10, range(4), Cursor(1, 4)),
        (DROPPED, 6, range(6, 10), Cursor(0, 10)),
        (DROPPED, 7, range(4), Cursor(1, 4)),
        (DROPPED, 8, range(4), Cursor(1, 4)),
    ],
)
def test_a_part_that_fills_no_step_is_the_last_step_or_left_out(
    sampling: Sampling, taken: int, places: range, after: Cursor
) -> None:
    step = sampling.step(Cursor(0, taken))
    assert (step.places, step.after) == (places, after)


def test_without_a_seed_samples_come_in_their_order() -> None:
    assert [WHOLE.order(1)[place] for place in range(10)] == [Order(10, 0, 1)[place] for place in range(10)]
    assert Sampling(10, 4, 2, seed=None).order(3) == range(10)


def test_ranks_take_runs_of_micro_batches_and_the_last_one_may_be_short() -> None:
    step = Sampling(10, 7, 2).step(Cursor(0, 1))
    assert step.places == range(1, 8)
    taken = [step.of_rank(rank, (2, 0, 2)) for rank in range(3)]
    assert taken == [[range(1, 3), range(3, 5)], [], [range(5, 7), range(7, 8)]]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(1, 1, 1), []),
        (Sampling(4, 4, 4, drop_last=True), []),
        (Sampling(3, 4, 2), []),
        (Sampling(0, 4, 2), ["dataset"]),
        (Sampling(9, 4, 8), ["micro_batch"]),
        (Sampling(3, 4, 2, drop_last=True), ["drop_last"]),
        (Sampling(9, 0, -1), ["global_batch", "micro_batch"]),
        (Sampling(0, 0, 1), ["global_batch", "dataset"]),
        (Sampling(9, 4.0, 2), ["global_batch"]),  # type: ignore[arg-type]
    ],
)
def test_values_that_make_no_sense_are_named(sampling: Sampling, named: list[str]) -> None:
    assert [line.partition(":")[0] for line in sampling.problems()] == named
