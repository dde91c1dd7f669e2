"""Ranks that compare digests in rounds: who differs from its peers, in what, and since when."""

from __future__ import annotations

import hashlib
import re
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


def difference(world: World, agreed: int = -1) -> tuple[Difference, int, int]:
    found, rounds, most = compare(world, agreed)
    assert isinstance(found, Difference)
    return found, rounds, most


def world_of(ranks: int, tensors: int, *flips: tuple[int, int]) -> World:
    """Return ranks that hold the same but for these tensors, by rank and number."""
    world: World = {rank: {"whole": list(range(tensors))} for rank in range(ranks)}
    for rank, tensor in flips:
        world[rank]["whole"][tensor] ^= 1 << 20
    return world


def test_ranks_that_hold_the_same_agree_in_one_round() -> None:
    outcome, rounds, _ = compare(world_of(3, 5000))
    assert isinstance(outcome, Agreement)
    assert (outcome.peers, rounds) == ({"whole": 3}, 1)


@pytest.mark.parametrize(
    ("world", "blamed", "tensors", "undecided"),
    [
        pytest.param(world_of(3, 5000, (2, 4711)), (2,), ("whole.4711",), False, id="one of three"),
        pytest.param(world_of(2, 10, (1, 3)), (), ("whole.3",), True, id="one of two"),
        pytest.param(
            world_of(3, 200, (0, 3), (2, 150)), (0, 2), ("whole.3", "whole.150"), False, id="two of three"
        ),
        pytest.param(
            world_of(4, 3, (0, 0), (1, 0), (3, 2)), (3,), ("whole.0", "whole.2"), True, id="half of four"
        ),
    ],
)
def test_a_rank_that_differs_from_a_majority_is_named(
    world: World, blamed: tuple[int, ...], tensors: tuple[str, ...], undecided: bool
) -> None:
    found, rounds, _ = difference(world, agreed=5)
    assert (found.ranks, found.tensors, found.undecided) == (blamed, tensors, undecided)
    assert (found.step, found.agreed, found.holders) == (7, 5, tuple(world))
    at = int(tensors[0].partition(".")[2])
    assert found.digests == {rank: _digest(held, "whole", (at, at + 1)) for rank, held in world.items()}
    assert rounds <= 4


def test_only_holders_of_the_same_part_are_compared() -> None:
    found, _, _ = difference({0: {"a": [1]}, 1: {"b": [2]}, 2: {"a": [1]}, 3: {"b": [3]}})
    assert (found.holders, found.tensors, found.ranks) == ((1, 3), ("b.0",), ())


@pytest.mark.parametrize("wrong", [1, 8, 9, 64])
def test_eight_tensors_are_named_and_that_there_are_more(wrong: int) -> None:
    found, _, _ = difference(world_of(3, 512, *((1, 8 * number) for number in range(wrong))))
    assert found.tensors == tuple(f"whole.{8 * number}" for number in range(min(wrong, 8)))
    assert (found.more, found.ranks) == (wrong > 8, (1,))


@pytest.mark.parametrize("wrong", [8, 9])
def test_single_tensors_of_many_bundles_count_alike(wrong: int) -> None:
    world: World = {rank: {f"k{number}": [number] for number in range(12)} for rank in range(3)}
    for number in range(wrong):
        world[2][f"k{number}"][0] += 100
    found, rounds, _ = difference(world)
    assert (len(found.tensors), found.more, found.ranks, rounds) == (8, wrong > 8, (2,), 1)


def test_thousands_of_tensors_that_differ_cost_few_and_short_rounds() -> None:
    found, rounds, most = difference(world_of(3, 3000, *((1, number) for number in range(3000))))
    assert (found.ranks, found.more) == ((1,), True)
    assert rounds <= 8
    assert most < 20 * replica_check.SPANS


def test_a_tensor_of_which_many_parts_differ_is_named_once() -> None:
    bundles = [Bundle(f"part {rank // 2}", ("w",)) for rank in range(20)]
    ranks = [Comparison(7, -1, [one], partial("{} {} {}".format, rank)) for rank, one in enumerate(bundles)]
    found = ranks[0].hear([rank.text() for rank in ranks])
    assert isinstance(found, Difference)
    assert (found.tensors, found.more, found.undecided) == (("w",), False, True)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Return bundles of some ranks each, with bits flipped here and there."""
    ranks = draw(st.integers(1, 6))
    found: World = {rank: {} for rank in range(ranks)}
    for number in range(draw(st.integers(1, 3))):
        tensors = draw(st.integers(1, 300))
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            found[rank][f"k{number}"] = [number * 1000 + place for place in range(tensors)]
    places = [(rank, key, at) for rank in found for key, own in found[rank].items() for at in range(len(own))]
    for rank, key, at in draw(st.lists(st.sampled_from(places), max_size=5, unique=True)):
        found[rank][key][at] += draw(st.sampled_from([10**6, 10**7]))
    return found


@given(worlds())
def test_what_differs_between_peers_is_found_and_nothing_else(world: World) -> None:
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
    assert (set(outcome.tensors), set(outcome.ranks), outcome.undecided) == (expected, blamed, undecided)


def test_ranks_of_another_step_or_round_are_refused() -> None:
    one, other = (Comparison(step, -1, [Bundle("k", ("t",))], lambda *_: "d") for step in (3, 4))
    with pytest.raises(ValueError, match=r"3\b.*\b4"):
        one.hear([one.text(), other.text()])
    names = tuple(map(str, range(200)))
    ranks = [Comparison(7, -1, [Bundle("k", names)], partial("{} {} {}".format, own)) for own in range(2)]
    first = [rank.text() for rank in ranks]
    assert ranks[1].hear(first) is None
    second = [first[0], ranks[1].text()]
    for rank, answers in ((ranks[0], second), (ranks[1], second), (ranks[1], first)):
        with pytest.raises(ValueError, match=r"\w"):
            rank.hear(answers)


DIFFERENCE = Difference(7, -1, ("w.0",), False, (0, 1), (), True, {1: "b", 0: "a"})
EIGHT = "0, 1, 2, 3, 4, 5, 6, 7"


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (DIFFERENCE, r" 0, 1 .*\b7 .*tripwire_replicas.*: w\.0; [^;]*; w\.0: .*0: a, .*1: b"),
        (
            replace(DIFFERENCE, agreed=0, holders=tuple(range(9)), ranks=(0,), undecided=False, more=True),
            rf" {EIGHT} \.\.\. .*\b7 .* 0\).*: w\.0 .*; [^;]* 0 [^;]*; w\.0: .*0: a, .*1: b",
        ),
        (
            replace(DIFFERENCE, agreed=5, tensors=("w.0", "w.1"), holders=tuple(range(8)), ranks=(2, 3)),
            rf" {EIGHT} [^.]*\b7 .* 5\): w\.0, w\.1; .* 2, 3 .*; .*; w\.0: .*0: a, .*1: b",
        ),
    ],
    ids=["never agreed", "agreed", "two ranks"],
)
def test_a_difference_names_holders_steps_tensors_ranks_and_digests(found: Difference, names: str) -> None:
    assert re.search(names, found.reason)


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({}, ()),
        ({"tripwire_interval": 5}, ()),
        ({"tripwire_interval": 1, "tripwire_replicas": [[0, 1], [2, 3]]}, ()),
        ({"tripwire_interval": 0}, ["tripwire_interval: 0"]),
        (
            {"tripwire_interval": 5, "tripwire_action": "shout"},
            ["tripwire_action.*shout.*warn, raise, rollback"],
        ),
        (
            {"tripwire_action": "raise", "tripwire_optimizer": True, "tripwire_replicas": [[0, 1], [2, 3]]},
            [f"tripwire_{name}: .*tripwire_interval" for name in ("action", "optimizer", "replicas")],
        ),
        (
            {"tripwire_interval": 1, "tripwire_replicas": [[4], [0, 1, 2], [1, 2], []]},
            [rf"tripwire_replicas: .*{what} " for what in (1, r"\[4\]", r"\[\]")],
        ),
    ],
)
def test_an_option_without_sense_or_effect_is_named(options: dict[str, object], problems: list[str]) -> None:
    found = TripwireOptions(**options).problems()  # type: ignore[arg-type]
    assert len(found) == len(problems)
    for line, names in zip(found, problems, strict=True):
        assert re.match(names, line)
