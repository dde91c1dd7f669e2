"""Whether ranks of all nodes can be entered again, and until when they are waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.cluster.policy.messages import NodeStatus
from outlast.inprocess.policy import Gates, late
from outlast.recovery.policy.events import Fault, FaultKind

FAULT = Fault(FaultKind.ERROR, "n0", 0, 1, 5, "rank 0 raised E: x", "E: x")
NODES = ("n0", "n1", "n2")


def gates(*able: bool | None) -> Gates:
    found = Gates(5.0)
    for name, one in zip(NODES, able, strict=True):
        found.told(name, NodeStatus(able=one, patience=10.0 * (1 + NODES.index(name)) if one else 0.0))
    return found


@pytest.mark.parametrize(
    ("able", "reenters", "expected"),
    [
        ((True, True, True), True, True),
        ((None, True, True), None, True),  # the only rank of n0 has died
        ((False, True, True), True, True),  # the fault is its node's last word
        ((False, True, True), None, False),
        ((True, False, True), True, False),
        ((True, None, None), True, True),
        ((False, False, False), None, None),
        ((None, None, None), None, None),
    ],
)
def test_ranks_are_entered_again_where_every_node_with_living_ones_can(
    able: tuple[bool | None, ...], reenters: bool | None, expected: bool | None
) -> None:
    assert gates(*able).able(replace(FAULT, reenters=reenters), NODES) is expected


def test_a_node_of_which_nothing_was_heard_is_no_obstacle_and_no_help() -> None:
    assert Gates(5.0).able(FAULT, NODES) is None
    assert Gates(5.0).able(replace(FAULT, reenters=True), NODES) is True
    assert Gates(5.0).able(replace(FAULT, node="n9", reenters=True), NODES) is None


def test_the_longest_is_waited_for_and_letters_take_time() -> None:
    found = gates(True, True, None)
    assert [found.patience(nodes) for nodes in (NODES, NODES[:1], ("n9",), ())] == [25.0, 15.0, 5.0, 5.0]


def test_those_that_are_late_are_named() -> None:
    assert late({"n2", "n1"}).startswith("n1, n2 ")
