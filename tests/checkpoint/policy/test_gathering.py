"""Which parts nodes fetch before they load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.placement import Gathering, Holding, gatherings
from outlast.checkpoint.policy.resolve import Copy, CopyState, CopyStatus, Mark

NODES = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}


def holding(node: str, owner: str, step: int, session: str = "s", run_id: str = "r") -> Holding:
    return part(node, owner, step, NODES[owner], 6, session, run_id)


def part(
    node: str, owner: str, step: int, ranks: tuple[int, ...], world: int, session: str = "s", run: str = "r"
) -> Holding:
    tier = "memory" if node == owner else f"replica/{owner}"
    copy = Copy(copy_name(step, 1), CopyState.WHOLE, "", None, run, world, session, ranks, tier)
    return Holding(node, copy)


def test_the_newest_that_is_there_whole_comes_first_and_only_what_lacks_is_fetched() -> None:
    held = [holding("a", "a", 9), holding("c", "c", 9), holding("c", "b", 9), holding("a", "a", 10)]
    torn, found = gatherings(held, NODES, "r", ())
    assert (torn.name, found.name) == (copy_name(10, 1), copy_name(9, 1))
    assert (bool(torn.reason), found.reason) == (True, "")
    [fetched] = found.fetch["b"]
    assert (fetched.node, fetched.folder, fetched.owner) == ("c", "replica-b", "b")
    assert found.fetch["a"] == found.fetch["c"] == ()


def test_copies_that_cannot_be_loaded_have_a_reason_and_the_newest_comes_first() -> None:
    held = [
        holding("a", "a", 9),
        holding("b", "b", 9),
        holding("a", "a", 10),
        holding("c", "c", 9, run_id="x"),
        holding("c", "c", 9, session="t"),
        *(holding(node, node, 8) for node in NODES),
    ]
    *others, whole = gatherings(held, NODES, "r", ())
    assert others == [
        Gathering(copy_name(10, 1), "s", missing=(2, 3, 4, 5)),
        Gathering(copy_name(9, 1), "s", missing=(4, 5)),
        Gathering(copy_name(9, 1), "t", missing=(0, 1, 2, 3)),
    ]
    assert "2, 3, 4" in others[0].reason
    assert (whole.name, whole.reason) == (copy_name(8, 1), "")
    aside = Mark(f"memory/{copy_name(10, 1)}", CopyStatus.QUARANTINED, reason="NaN").to_text()
    *others, last = gatherings(held, NODES, "r", [aside])
    assert [one.missing for one in others] == [(4, 5), (0, 1, 2, 3), ()]
    assert (last.missing, "in quarantine: NaN" in last.reason) == ((), True)
    assert gatherings([], NODES, "r", ()) == ()


def test_a_part_that_is_missing_may_be_with_a_node_that_has_left_since() -> None:
    held = [holding("a", "a", 9), holding("b", "b", 9)]
    for left in (-1, 0, 1, 2):
        [found] = gatherings(held, NODES, "r", (), left)
        assert bool(found.why) == (left >= 1), left
        assert all(word in found.reason for word in ("4, 5", found.why))


def test_what_must_not_be_loaded_or_is_of_another_run_or_session_does_not_count() -> None:
    held = [holding(node, node, 9) for node in NODES]
    aside = Mark(f"memory/{copy_name(9, 1)}", CopyStatus.QUARANTINED)
    [apart] = gatherings(held, NODES, "r", [aside.to_text()])
    assert apart.reason
    assert gatherings(held, NODES, "another", ()) == ()
    mixed = [holding("a", "a", 9), holding("b", "b", 9), holding("c", "c", 9, session="t")]
    assert all(one.reason for one in gatherings(mixed, NODES, "r", ()))


def test_suspects_are_put_together_last() -> None:
    held = [holding(node, node, step) for step in (7, 9) for node in NODES]
    found = gatherings(held, NODES, "r", [Mark(f"replica/a/{copy_name(9, 1)}").to_text()])
    assert [one.name for one in found] == [copy_name(7, 1), copy_name(9, 1)]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.sampled_from("abcd"), st.integers(1, 3)),
        min_size=4,
        max_size=30,
    ),
    st.sampled_from(["abcd", "ab", "abc", "eab", "e"]),
)
def test_where_every_part_exists_somewhere_all_nodes_get_all_that_they_need(
    draws: list[tuple[str, str, int]], seated: str
) -> None:
    """Nodes a to d saved, the same, others or fewer go on: what has all parts can be loaded."""

    def held(node: str, owner: str, step: int) -> Holding:
        return part(node, owner, step, ("abcd".index(owner),), 4)

    nodes = {node: (rank,) for rank, node in enumerate(seated)}
    here = [held(*one) for one in draws if one[0] in nodes]
    found = [one for one in gatherings(here, nodes, "r", ()) if not one.reason]
    parts = [{one.owner for one in here if one.copy.name == copy_name(step, 1)} for step in (3, 2, 1)]
    whole = [copy_name(3 - at, 1) for at, owners in enumerate(parts) if owners == set("abcd")]
    assert [one.name for one in found] == whole
    for copy in found:
        assert copy.joined == (seated != "abcd")
        for node, ranks in nodes.items():
            assert all(one in here for one in copy.fetch[node])
            had = [one for one in here if one.node == node and one.copy.name == copy.name]
            has = {rank for one in (*had, *copy.fetch[node]) for rank in one.copy.part}
            assert has >= (set(range(4)) if copy.joined else set(ranks))
