"""Who gets which ranks: seats are kept, and a free one goes to the spare that fits best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from outlast.cluster.policy.members import Member
from outlast.cluster.policy.rank_assignment import RankAssignment, seats
from tests.cluster.builders import member

A, B, C, D = (("rack", "a"),), (("rack", "b"),), (("rack", "c"),), (("rack", "d"),)


def _node(name: str, domains: tuple[tuple[str, str], ...] = (), **other: Any) -> Member:
    return member(name, domains=domains, **other)


def _seats(
    nodes: Iterable[Member], previous: Sequence[str] = (), most: int = 9, group_size: int = 1
) -> tuple[RankAssignment, ...]:
    return seats({one.name: one for one in nodes}, previous, most, group_size)


def _names(nodes: Iterable[Member], previous: str = "", most: int = 9, group_size: int = 1) -> str:
    return "".join(one.name for one in _seats(nodes, tuple(previous), most, group_size))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_node("b", node_rank=0), _node("a", node_rank=1)),
        (_node("b", (("rack", "r2"),)), _node("a", (("rack", "r10"),))),
        (_node("b", (("row", "1"), ("rack", "9"))), _node("a", (("row", "2"), ("rack", "1")))),
        (_node("b", (("rack", "x"),), group="9"), _node("a", (("rack", "x"),), group="10")),
        (_node("b", order=2), _node("a", order=10)),
        (_node("n2"), _node("n10")),
        (_node("n2a"), _node("n2b")),
        (_node("nx"), _node("7")),
        (_node("b", node_rank=0, domains=B), _node("a", node_rank=1, domains=A)),
        (_node("b", domains=A, order=2), _node("a", domains=B, order=1)),
        (_node("b", group="1", order=2), _node("a", group="2", order=1)),
    ],
)
def test_ranks_follow_the_given_node_ranks_then_the_topology_then_the_names(
    first: Member, second: Member
) -> None:
    for nodes in ((first, second), (second, first)):
        assert [one.name for one in _seats(nodes)] == [first.name, second.name]


def test_a_name_of_digits_that_are_no_number_is_a_name_like_any_other() -> None:
    assert [one.name for one in _seats([_node("²"), _node("1²"), _node("n")])] == ["n", "²", "1²"]


def test_each_node_gets_as_many_ranks_as_it_offers_one_after_another() -> None:
    found = _seats([_node("a", slots=2), _node("b", slots=4), _node("c")])
    assert [list(one.ranks) for one in found] == [[0, 1], [2, 3, 4, 5], [6]]
    assert [one.address for one in found] == ["a:1", "b:1", "c:1"]


def test_no_more_nodes_than_wanted_get_ranks_and_the_first_in_order_do() -> None:
    assert _names(map(_node, "dbca"), most=3) == "abc"
    assert _names([_node("a", last_choice="quarantine"), _node("b"), _node("c")], most=2) == "bc"


def test_who_has_ranks_keeps_them_whoever_comes() -> None:
    assert _names(map(_node, "abcd"), "dc", most=4) == "dcab"
    assert _names([_node("a"), _node("z", last_choice="at risk")], "z", most=1) == "z"


@pytest.mark.parametrize(
    ("spares", "chosen"),
    [
        ([_node("x"), _node("y")], "x"),
        ([_node("x"), _node("y", B)], "y"),
        ([_node("x"), _node("y", D)], "y"),
        ([_node("x"), _node("y", A)], "x"),
        ([_node("x"), _node("y", (("rack", "e"),))], "x"),
        ([_node("x", D), _node("y", B)], "x"),
        ([_node("x", B), _node("y", D)], "x"),
        ([_node("x", last_choice="quarantine"), _node("y")], "y"),
        ([_node("x", last_choice="quarantine"), _node("y", last_choice="burn-in")], "x"),
        ([_node("x", B, last_choice="quarantine"), _node("y")], "y"),
    ],
)
def test_a_free_seat_goes_to_a_good_node_then_to_one_near_its_neighbours_then_to_who_waits_longest(
    spares: list[Member], chosen: str
) -> None:
    sat = [_node("a", A), _node("b", B), _node("d", D), _node("e", (("rack", "e"),))]
    assert _names([*sat, *spares], "ab.de", most=5) == f"ab{chosen}de"


def test_seats_side_by_side_are_filled_one_after_the_other() -> None:
    sat, near = _node("c", C), _node("z", C)
    assert _names([sat, _node("x"), near], "..c", most=3) == "xzc"
    assert _names([sat, _node("x"), near], "c..", most=3) == "czx"


@pytest.mark.parametrize(
    ("here", "most", "left"),
    [("acd", 4, "adc"), ("cd", 4, "dc"), ("abc", 4, "abc"), ("acd", 3, "adc"), ("acdx", 3, "adc")],
)
def test_without_a_spare_the_last_node_moves_into_a_gap(here: str, most: int, left: str) -> None:
    assert _names(map(_node, here), "abcd", most=most) == left


@pytest.mark.parametrize(
    ("here", "most", "left"), [("abcd", 3, "abc"), ("acd", 2, "ad"), ("acdx", 2, "ad"), ("d", 1, "d")]
)
def test_a_smaller_job_moves_no_more_nodes_than_it_has_to(here: str, most: int, left: str) -> None:
    assert _names(map(_node, here), "abcd", most=most) == left


def _grouped(names: str, group: str) -> list[Member]:
    return [_node(name, group=group) for name in names]


def test_a_group_that_lacks_a_node_gets_no_ranks() -> None:
    nodes = [*_grouped("ab", "1"), *_grouped("c", "2"), *_grouped("de", "3")]
    assert _names(nodes, group_size=2, most=8) == "abde"


def test_a_group_with_a_node_too_many_keeps_those_that_had_ranks() -> None:
    assert _names(_grouped("abc", "1"), "cb", group_size=2, most=2) == "cb"
    assert _names(_grouped("abc", "1"), group_size=2, most=2) == "ab"
    assert _names(_grouped("acd", "1"), "ab", group_size=2, most=2) == "ac"
    assert _names(_grouped("acd", "1"), "bd", group_size=2, most=2) == "ad"


def test_nodes_of_one_group_are_seated_alone_where_groups_do_not_matter() -> None:
    assert _names(_grouped("ab", "1"), most=1) == "a"


def test_the_place_of_a_group_is_that_of_its_first_node() -> None:
    nodes = [
        _node("a", group="1", node_rank=0),
        _node("d", group="1", node_rank=3),
        _node("b", group="2", node_rank=1),
        _node("c", group="2", node_rank=2),
    ]
    assert _names(nodes, group_size=2) == "adbc"


def test_a_group_is_replaced_as_a_whole_and_one_with_a_bad_node_comes_last() -> None:
    sat, lone = _grouped("cd", "2"), _grouped("a", "1")
    bad = [_node("e", group="3"), _node("f", group="3", last_choice="quarantine")]
    good = _grouped("gh", "4")
    assert _names([*sat, *lone, *bad, *good], "abcd", most=4, group_size=2) == "ghcd"
    assert _names([*sat, *lone, *bad], "abcd", most=4, group_size=2) == "efcd"
    assert _names([*sat, *lone], "abcd", most=4, group_size=2) == "cd"
    assert _names([*sat, *bad, *good], most=4, group_size=2) == "cdgh"


@pytest.mark.parametrize(("here", "left"), [("abcdef", "abcd"), ("abef", "abef"), ("cdefgh", "efcd")])
def test_a_smaller_job_leaves_whole_groups(here: str, left: str) -> None:
    nodes = [_node(name, group=str("abcdefgh".index(name) // 2)) for name in here]
    assert _names(nodes, "abcdef", most=4, group_size=2) == left
