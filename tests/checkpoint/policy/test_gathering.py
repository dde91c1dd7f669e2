"""Which parts nodes fetch before they load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.placement import Holding, Torn, gatherings, through, torn, wanted
from outlast.checkpoint.policy.resolve import CopyStatus, Mark

NODES = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}


def holding(node: str, owner: str, step: int, session: str = "s", run_id: str = "r") -> Holding:
    folder = "memory" if node == owner else f"replica-{owner}"
    return Holding(node, folder, copy_name(step, 1), session, NODES[owner], 6, run_id)


def test_the_newest_that_is_there_whole_comes_first_and_only_what_lacks_is_fetched() -> None:
    held = [holding("a", "a", 9), holding("c", "c", 9), holding("c", "b", 9), holding("a", "a", 10)]
    [found] = gatherings(held, NODES, "r", ())
    assert found.name == copy_name(9, 1)
    [fetched] = found.fetch["b"]
    assert (fetched.node, fetched.folder, fetched.owner) == ("c", "replica-b", "b")
    assert found.fetch["a"] == found.fetch["c"] == ()


def test_copies_of_which_a_part_is_missing_are_named_newest_first_with_the_ranks_of_that_part() -> None:
    held = [
        holding("a", "a", 9),
        holding("b", "b", 9),
        holding("a", "a", 10),
        holding("c", "c", 9, run_id="x"),
        holding("c", "c", 9, session="t"),
        *(holding(node, node, 8) for node in NODES),
        holding("a", "a", 7),
    ]
    assert torn(held, "r", (), (8, 1)) == (
        Torn(copy_name(10, 1), "s", (2, 3, 4, 5)),
        Torn(copy_name(9, 1), "s", (4, 5)),
        Torn(copy_name(9, 1), "t", (0, 1, 2, 3)),
    )
    assert torn(held, "r", (), (10, 1)) == torn([], "r", (), (-1, -1)) == ()
    aside = Mark(f"memory/{copy_name(10, 1)}", CopyStatus.QUARANTINED, reason="NaN").to_text()
    first, *others = torn(held, "r", [aside], (8, 1))
    assert [one.missing for one in others] == [(4, 5), (0, 1, 2, 3)]
    assert first.missing == ()
    assert "in quarantine: NaN" in first.reason


def test_a_copy_that_is_there_whole_is_not_torn_though_an_older_one_is_loaded_first() -> None:
    held = [holding(node, node, step) for node in NODES for step in (7, 9)]
    assert torn(held, "r", [Mark(f"memory/{copy_name(9, 1)}").to_text()], (7, 1)) == ()


def test_why_a_missing_part_did_not_come_is_added_and_what_is_in_quarantine_has_its_reason() -> None:
    missing = Torn(copy_name(9, 1), "s", (2, 3)).because("d: no answer").because("e: gone")
    assert all(words in missing.reason for words in ("2, 3", "d: no answer", "e: gone"))
    aside = Torn(copy_name(9, 1), "s", (), ("it is in quarantine: NaN",))
    assert aside.because("d: no answer") == aside
    assert aside.reason == "it is in quarantine: NaN"


def test_of_a_node_that_left_only_what_is_missing_is_wanted() -> None:
    lacking = torn([holding("a", "a", 9), holding("b", "b", 9)], "r", (), (-1, -1))
    offered = [
        holding("d", "c", 9),
        holding("d", "b", 9),
        holding("d", "c", 9, session="t"),
        holding("d", "c", 10),
    ]
    assert wanted(lacking, offered) == (offered[0],)


def test_one_node_gets_the_part_of_a_node_that_left_and_the_others_get_it_from_there() -> None:
    held = [holding("a", "a", 9), holding("b", "b", 9), holding("gone", "c", 9)]
    [found] = gatherings(held, {"a": (0, 1, 2), "b": (3, 4)}, "r", ())
    first, then = through(found, {"gone": "b"})
    assert first == {"b": (held[2],)}
    assert set(then.fetch["a"]) == {held[1], Holding("b", "replica-c", held[2].name, "s", (4, 5), 6, "r")}
    assert then.fetch["b"] == (held[0],)


def test_what_must_not_be_loaded_or_is_of_another_run_or_session_does_not_count() -> None:
    held = [holding(node, node, 9) for node in NODES]
    aside = Mark(f"memory/{copy_name(9, 1)}", CopyStatus.QUARANTINED)
    assert gatherings(held, NODES, "r", [aside.to_text()]) == ()
    assert gatherings(held, NODES, "another", ()) == ()
    mixed = [holding("a", "a", 9), holding("b", "b", 9), holding("c", "c", 9, session="t")]
    assert gatherings(mixed, NODES, "r", ()) == ()


def test_suspects_are_put_together_last() -> None:
    held = [holding(node, node, step) for step in (7, 9) for node in NODES]
    found = gatherings(held, NODES, "r", [Mark(f"replica/a/{copy_name(9, 1)}").to_text()])
    assert [one.name for one in found] == [copy_name(7, 1), copy_name(9, 1)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc"), st.integers(1, 3)), max_size=20))
def test_after_the_fetch_every_node_has_its_ranks(draws: list[tuple[str, str, int]]) -> None:
    held = [holding(node, owner, step) for node, owner, step in draws]
    for found in gatherings(held, NODES, "r", ()):
        for node, ranks in NODES.items():
            had = [one for one in held if one.node == node and one.name == found.name]
            assert set(ranks) <= {rank for one in (*had, *found.fetch[node]) for rank in one.ranks}
            assert all(one in held for one in found.fetch[node])


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.integers(1, 3)),
        min_size=4,
        max_size=30,
    ),
    st.sampled_from(["ab", "abc", "eab", "e"]),
)
def test_where_every_part_exists_somewhere_all_nodes_get_all_that_they_need(
    draws: list[tuple[str, str, int]], seated: str
) -> None:
    """Nodes a to d saved, others or fewer go on: the newest step of which all parts exist can be loaded."""

    def held(node: str, owner: str, step: int) -> Holding:
        label = "memory" if node == owner else f"replica-{owner}"
        return Holding(node, label, copy_name(step, 1), "s", ("abcd".index(owner),), 4, "r")

    everywhere = [held(*one) for one in draws]
    nodes = {node: (rank,) for rank, node in enumerate(seated)}
    here = [one for one in everywhere if one.node in nodes]
    lacking = torn(here, "r", (), (-1, -1))
    offered = wanted(lacking, [one for one in everywhere if one.node not in nodes])
    found = gatherings([*here, *offered], nodes, "r", ())
    known = {one.name for one in here}
    whole = {
        copy_name(step, 1) for step in (1, 2, 3) if {o for _, o, at in draws if at == step} == set("abcd")
    }
    assert {one.name for one in found} == whole & known
    for copy in found:
        askers = {gone: seated[-1] for gone in "abcd" if gone not in nodes}
        first, then = through(copy, askers)
        for node, ranks in nodes.items():
            brought = first.get(node, ())
            assert all(one in everywhere and one.node not in nodes for one in brought)
            assert all(one.node in nodes for one in then.fetch[node])
            came = [one for parts in first.values() for one in parts]
            assert all(
                one in here or any(one.owner == each.owner for each in came) for one in then.fetch[node]
            )
            had = [one for one in here if one.node == node and one.name == copy.name]
            has = {rank for one in (*had, *brought, *then.fetch[node]) for rank in one.ranks}
            assert has >= (set(range(4)) if copy.other_world else set(ranks))
