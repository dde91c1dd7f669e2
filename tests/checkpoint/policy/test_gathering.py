"""Which parts nodes fetch before they load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.placement import Holding, gatherings, torn
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


def test_a_copy_of_which_a_part_is_missing_is_named_with_the_ranks_of_that_part() -> None:
    held = [
        holding("a", "a", 9),
        holding("b", "b", 9),
        holding("a", "a", 7),
        holding("c", "c", 9, run_id="x"),
    ]
    assert torn(held, "r") == (copy_name(9, 1), (4, 5))
    assert torn([holding(node, node, 9) for node in NODES], "r") == ("", ())
    assert torn([], "r") == ("", ())


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
