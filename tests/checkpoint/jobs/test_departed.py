"""Which nodes that left are asked for parts, by whom, and what of their answers is taken."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.load.departed import Departed, _parts
from outlast.checkpoint.policy.placement import Holding, Torn
from outlast.checkpoint.replica.frames import NotUnderstood
from outlast.checkpoint.replica.handshake import Credentials
from outlast.checkpoint.tiers.memory_folder import Left, Members, MemoryFolder, Peer, Together

NODES = tuple(Peer(name, (rank,), f"10.0.0.{rank}", 7000 + rank) for rank, name in enumerate("abcd"))
FIRST = Members(3, "s3", "r", 4, (0,), "/disk", "/memory", 2, together=Together("a", "10.0.0.9", nodes=NODES))


def test_a_node_that_left_is_remembered_with_the_last_session_that_it_was_in(tmp_path: Path) -> None:
    assert FIRST.without("ab") == (
        Left("c", "10.0.0.2", 7002, 3, "s3", "10.0.0.9"),
        Left("d", "10.0.0.3", 7003, 3, "s3", "10.0.0.9"),
    )
    assert FIRST.together is not None
    fewer = replace(FIRST.together, host="10.0.0.8", nodes=NODES[:3])
    second = replace(FIRST, generation=5, session="s5", together=fewer, left=FIRST.without("abc"))
    assert [(one.name, one.session, one.own) for one in second.without("a")] == [
        ("b", "s5", "10.0.0.8"),
        ("c", "s5", "10.0.0.8"),
        ("d", "s3", "10.0.0.9"),
    ]
    alone = replace(second, generation=6, together=None, left=second.without("a"))
    assert alone.knows_others
    assert alone.without("ad") == alone.left[:2]
    folder = MemoryFolder(tmp_path)
    folder.make()
    folder.introduce(alone)
    assert folder.members() == alone


def test_a_session_that_ends_before_its_nodes_have_met_forgets_none_of_the_one_before() -> None:
    unmet = Together("a", "10.0.0.9")
    second = replace(FIRST, generation=4, session="s4", together=unmet, left=FIRST.without("abcd"))
    written = second.until_they_met(FIRST)
    assert [(one.name, one.session) for one in written.without("ad")] == [("b", "s3"), ("c", "s3")]
    third = replace(second, generation=5, session="s5", left=written.without("abcd"))
    assert third.until_they_met(written).left == written.left
    assert second.until_they_met(None) == second


def test_a_node_of_the_last_session_asks_and_who_was_not_in_it_does_not() -> None:
    members = replace(FIRST, left=FIRST.without("ab"))
    said = {
        "a": [{"name": "c", "generation": 3}, {"name": "d", "generation": 3}],
        "b": [{"name": "c", "generation": 2}, {"name": "d", "generation": 3}],
        "e": [],
    }
    found = Departed.of(members, "a", Credentials(), said)
    assert found.askers == {"c": "a", "d": "b"}
    assert found.left.keys() == {"c"}
    assert found.ask(since=4) == {"parts": [], "silent": {}}
    torn = Torn("step-000000005.g3", "session s3", (2,))
    (why,) = found.with_reasons(torn, {"c": "no route"}).why
    assert all(word in why for word in ("node c", "no route"))
    later = replace(torn, name="step-000000005.g4")
    assert found.with_reasons(later, {"c": "no route"}) == later


def test_a_copy_that_a_forgotten_node_may_have_is_refused_and_not_taken_for_lost(tmp_path: Path) -> None:
    """1100 nodes have left, one after the other, while 1024 are remembered."""
    gone = tuple(Left(f"n{at}", "10.1.0.1", 7100, at, f"s{at}", "10.0.0.9") for at in range(2, 1100))
    members = replace(FIRST, generation=1100, left=gone)
    kept = members.without("ab")
    assert {one.name for one in kept} == {"c", "d", *(f"n{at}" for at in range(78, 1100))}
    later = replace(members, left=kept, forgotten=members.forgets("ab"))
    assert later.forgotten == 77
    assert later.forgets("abcd") == 77, "for ever, since who is forgotten is never heard of again"
    unmet = replace(later, left=(), forgotten=-1, together=Together("a", "10.0.0.9"))
    assert unmet.until_they_met(later).forgotten == 78, "b is remembered, too, until the nodes have met"
    folder = MemoryFolder(tmp_path)
    folder.make()
    folder.introduce(later)
    assert folder.members() == later
    found = Departed.of(later, "a", Credentials(), {"a": []}, later.forgotten)
    torn = Torn("step-000000005.g77", "session s77", (2,))
    assert found.with_reasons(torn, {}) != torn
    newer = replace(torn, name="step-000000005.g78")
    assert found.with_reasons(newer, {}) == newer


@pytest.mark.parametrize(
    "change",
    [{"folder": "../../home"}, {"name": "../step"}, {"ranks": ["0"]}, {"ranks": 3}, {"other": 1}],
    ids=str,
)
def test_an_answer_that_could_be_a_path_or_is_none_is_refused(change: dict[str, Any]) -> None:
    sound = asdict(Holding("", "replica-b", "step-000000005.g3", "session s3", (1,), 4, "r"))
    [found] = _parts({"parts": [sound]}, "c")
    assert (found.node, found.owner) == ("c", "b")
    with pytest.raises(NotUnderstood, match="node c"):
        _parts({"parts": [{**sound, **change}]}, "c")
    with pytest.raises(NotUnderstood, match="node c"):
        _parts({}, "c")
