from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import TripwireOptions
from outlast.consistency import policy as replica_check
from outlast.consistency.policy import Agreement, Bundle, Comparison, Difference, Span

World = dict[int, dict[str, list[int]]]  # rank -> key -> what its tensors hold


def _digest(held: Mapping[str, list[int]], key: str, span: Span) -> str:
    return hashlib.sha256(repr(held[key][slice(*span)]).encode()).hexdigest()[:16]


def compare(world: World, agreed: int = -1) -> tuple[Agreement | Difference, int, int]:
    """Return the outcome, how many rounds it took and how many digests a rank handed in at once at most."""
    ranks = []
    for held in world.values():
        bundles = [Bundle(key, tuple(f"{key}.{n}" for n in range(len(own)))) for key, own in held.items()]
        ranks.append(Comparison(7, agreed, bundles, lambda key, span, held=held: _digest(held, key, span)))
    most, bound = 0, 40
    for rounds in range(1, bound):
        texts = [rank.text() for rank in ranks]
        most = max(most, *(text.count('"') for text in texts))
        outcomes = [rank.hear(texts) for rank in ranks]
        assert all(one == outcomes[0] for one in outcomes), "every rank draws the same conclusion"
        if outcomes[0] is not None:
            return outcomes[0], rounds, most
    raise AssertionError(f"no outcome after {bound} rounds")


def world_of(ranks: int, tensors: int) -> World:
    return {rank: {"whole": list(range(tensors))} for rank in range(ranks)}


def test_ranks_that_hold_the_same_agree_in_one_round() -> None:
    outcome, rounds, _ = compare(world_of(3, 5000))
    assert isinstance(outcome, Agreement)
    assert (outcome.peers, rounds) == ({"whole": 3}, 1)


def test_of_three_the_one_that_differs_is_named() -> None:
    world = world_of(3, 5000)
    world[2]["whole"][4711] ^= 1
    outcome, rounds, _ = compare(world, agreed=5)
    assert isinstance(outcome, Difference)
    assert (outcome.ranks, outcome.tensors, outcome.undecided) == ((2,), ("whole.4711",), False)
    assert rounds <= 4
    assert "rank 2 differs from the majority" in outcome.reason
    assert "they agreed after step 5" in outcome.reason


def test_of_two_nobody_is_named_and_the_verdict_says_so() -> None:
    world = world_of(2, 10)
    world[1]["whole"][3] ^= 1
    outcome, _, _ = compare(world)
    assert isinstance(outcome, Difference)
    assert (outcome.ranks, outcome.tensors, outcome.undecided) == ((), ("whole.3",), True)
    assert "the wrong rank is not known" in outcome.reason
    assert outcome.digests.keys() == {0, 1}


def test_ranks_that_are_wrong_in_different_tensors_are_all_named() -> None:
    world = world_of(3, 200)
    world[0]["whole"][3] ^= 1
    world[2]["whole"][150] ^= 1
    outcome, _, _ = compare(world)
    assert isinstance(outcome, Difference)
    assert (outcome.ranks, outcome.tensors) == ((0, 2), ("whole.3", "whole.150"))


def test_only_holders_of_the_same_part_are_compared() -> None:
    world: World = {0: {"a": [1]}, 1: {"b": [2]}, 2: {"a": [1]}, 3: {"b": [3]}}
    outcome, _, _ = compare(world)
    assert isinstance(outcome, Difference)
    assert (outcome.holders, outcome.tensors, outcome.ranks) == ((1, 3), ("b.0",), ())


def test_many_tensors_that_differ_are_not_all_named() -> None:
    world = world_of(3, 3000)
    world[1]["whole"] = [value ^ 1 for value in world[1]["whole"]]
    outcome, rounds, most = compare(world)
    assert isinstance(outcome, Difference)
    assert (outcome.ranks, outcome.more) == ((1,), True)
    assert 1 <= len(outcome.tensors) <= 8
    assert rounds <= 8
    assert most < 20 * replica_check.SPANS


def test_ranks_that_are_not_in_step_are_not_compared() -> None:
    one = Comparison(3, -1, [Bundle("k", ("t",))], lambda *_: "d")
    other = Comparison(4, -1, [Bundle("k", ("t",))], lambda *_: "d")
    with pytest.raises(ValueError, match="after steps 3, 4"):
        one.hear([one.text(), other.text()])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, World]:
    """Return a world and what it should be: bundles of some ranks each, and bits flipped here and there."""
    ranks = draw(st.integers(1, 6))
    sound: World = {rank: {} for rank in range(ranks)}
    for number in range(draw(st.integers(1, 3))):
        holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
        tensors = draw(st.integers(1, 300))
        for rank in holders:
            sound[rank][f"k{number}"] = [number * 1000 + place for place in range(tensors)]
    found = {rank: {key: list(own) for key, own in held.items()} for rank, held in sound.items()}
    places = [(rank, key, at) for rank in found for key, own in found[rank].items() for at in range(len(own))]
    for rank, key, at in draw(st.lists(st.sampled_from(places), max_size=5, unique=True)):
        found[rank][key][at] += draw(st.sampled_from([10**6, 10**7]))
    return found, sound


@given(worlds())
def test_what_differs_between_peers_is_found_and_nothing_else(given_: tuple[World, World]) -> None:
    world, _ = given_
    outcome, _, _ = compare(world)
    expected, blamed, undecided = set(), set(), False
    for key in {key for held in world.values() for key in held}:
        holders = {rank: held[key] for rank, held in world.items() if key in held}
        for at in range(len(next(iter(holders.values())))):
            values = [own[at] for own in holders.values()]
            if len(set(values)) > 1:
                expected.add(f"{key}.{at}")
                winners = [one for one in set(values) if 2 * values.count(one) > len(values)]
                undecided = undecided or not winners
                blamed |= {rank for rank, own in holders.items() if winners and own[at] != winners[0]}
    if not expected:
        assert isinstance(outcome, Agreement)
        return
    assert isinstance(outcome, Difference)
    assert set(outcome.tensors) == expected
    assert set(outcome.ranks) == blamed
    assert outcome.undecided == undecided


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tripwire_interval": 0}, "0 is not a positive number of steps"),
        (
            {"tripwire_interval": 5, "tripwire_action": "shout"},
            "found 'shout', expected warn, raise, rollback",
        ),
        ({"tripwire_optimizer": True}, "tripwire_optimizer: has no effect without tripwire_interval"),
        ({"tripwire_interval": 5, "tripwire_replicas": [[0, 1], [1, 2]]}, "rank 1 is named twice"),
        ({"tripwire_interval": 5, "tripwire_replicas": [[0]]}, "nothing could be compared"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], problem: str) -> None:
    (found,) = TripwireOptions(**options).problems()  # type: ignore[arg-type]
    assert problem in found
    assert TripwireOptions().problems() == TripwireOptions(tripwire_interval=5).problems() == ()


def test_every_option_without_an_interval_and_every_bad_group_is_named() -> None:
    idle = TripwireOptions(
        tripwire_action="raise", tripwire_optimizer=True, tripwire_replicas=[[0, 1], [2, 3]]
    )
    assert idle.problems() == tuple(
        f"tripwire_{name}: has no effect without tripwire_interval"
        for name in ("action", "optimizer", "replicas")
    )
    bad = TripwireOptions(tripwire_interval=1, tripwire_replicas=[[4], [0, 1, 2], [1, 2], []])
    assert bad.problems() == (
        "tripwire_replicas: rank 1 is named twice; a rank is in one group at most",
        "tripwire_replicas: the group [4] has one rank; nothing could be compared",
        "tripwire_replicas: the group [] has one rank; nothing could be compared",
    )
    assert TripwireOptions(tripwire_interval=1, tripwire_replicas=[[0, 1], [2, 3]]).problems() == ()


DIFFERENCE = Difference(7, -1, ("w.0",), False, (0, 1), (), True, {1: "b", 0: "a"})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            DIFFERENCE,
            "ranks 0, 1 should hold the same and do not after step 7 (they never agreed; if they need not be"
            " equal, set tripwire_replicas): w.0; there is no majority, so the wrong rank is not known;"
            " w.0: rank 0: a, rank 1: b",
        ),
        (
            replace(DIFFERENCE, agreed=0, holders=tuple(range(9)), ranks=(0,), undecided=False, more=True),
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 ... should hold the same and do not after step 7 (they agreed after"
            " step 0): w.0 and more; rank 0 differs from the majority; w.0: rank 0: a, rank 1: b",
        ),
        (
            replace(DIFFERENCE, agreed=5, tensors=("w.0", "w.1"), holders=tuple(range(8)), ranks=(2, 3)),
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 should hold the same and do not after step 7 (they agreed after"
            " step 5): w.0, w.1; rank 2, 3 differs from the majority; for the rest there is no majority, so"
            " the wrong rank is not known; w.0: rank 0: a, rank 1: b",
        ),
    ],
)
def test_a_difference_says_who_differs_where_and_since_when(found: Difference, reason: str) -> None:
    assert found.reason == reason


@pytest.mark.parametrize("wrong", [1, 7, 8, 9, 64])
def test_so_many_tensors_are_named_and_of_more_it_is_said(wrong: int) -> None:
    world = world_of(3, 512)
    for number in range(wrong):
        world[1]["whole"][number * 8] ^= 1
    outcome, _, _ = compare(world)
    assert isinstance(outcome, Difference)
    assert outcome.tensors == tuple(f"whole.{number * 8}" for number in range(min(wrong, 8)))
    assert (outcome.more, outcome.ranks) == (wrong > 8, (1,))
    assert outcome.digests == {rank: _digest(world[rank], "whole", (0, 1)) for rank in world}


@pytest.mark.parametrize("wrong", [8, 9])
def test_single_tensors_that_differ_in_many_parts_are_all_told_of(wrong: int) -> None:
    world: World = {rank: {f"k{number}": [number] for number in range(12)} for rank in range(3)}
    for number in range(wrong):
        world[2][f"k{number}"][0] += 100
    outcome, rounds, _ = compare(world)
    assert isinstance(outcome, Difference)
    assert (len(outcome.tensors), outcome.more, outcome.ranks, rounds) == (8, wrong > 8, (2,), 1)


def test_a_tensor_of_which_many_parts_differ_is_named_once_and_is_not_more() -> None:
    bundles = [Bundle(f"part {rank // 2}", ("w",)) for rank in range(20)]
    ranks = [Comparison(7, -1, [one], partial("{} {} {}".format, rank)) for rank, one in enumerate(bundles)]
    found = ranks[0].hear([rank.text() for rank in ranks])
    assert isinstance(found, Difference)
    assert (found.tensors, found.more, found.undecided) == (("w",), False, True)


def test_no_rank_is_blamed_where_half_of_them_hold_something_else() -> None:
    world = world_of(4, 3)
    world[0]["whole"][0] = world[1]["whole"][0] = 77
    world[3]["whole"][2] = 77
    outcome, _, _ = compare(world)
    assert isinstance(outcome, Difference)
    assert (outcome.ranks, outcome.undecided, outcome.holders) == ((3,), True, (0, 1, 2, 3))
    assert outcome.tensors == ("whole.0", "whole.2")


def test_a_rank_that_is_in_another_round_is_refused() -> None:
    names = tuple(map(str, range(200)))
    ranks = [Comparison(7, -1, [Bundle("k", names)], partial("{} {} {}".format, own)) for own in range(2)]
    first = [rank.text() for rank in ranks]
    assert ranks[1].hear(first) is None
    second = ranks[1].text()
    with pytest.raises(ValueError, match="longer"):
        ranks[0].hear([first[0], second])
    for answers in ([first[0], second], first):
        with pytest.raises(ValueError, match=r"longer|shorter"):
            ranks[1].hear(answers)
