"""What a job does after the loss of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.errors import UsageError
from outlast.parallelism.policy.checkpoints import Loadable
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node
from outlast.parallelism.policy.limits import PRESETS
from outlast.parallelism.policy.losses import after_losses, remaining, require, usual_losses
from outlast.parallelism.policy.planner import Job, NoLayout, ranked_layouts
from tests.parallelism.policy.builders import GIB, SMALL, nodes

JOB = Job(SMALL, 64, today=Layout(2, 2, 2))


def test_a_row_for_each_loss() -> None:
    rows = after_losses(JOB, nodes(1), [0, 1, 4, 8], "outlast")
    assert [(row.lost, row.devices, row.possible, row.share > 0.3) for row in rows] == [
        *((0, 8, True, True), (1, 7, True, True), (4, 4, True, True), (8, 0, False, False))
    ]
    assert rows[0].best is not None
    assert (rows[0].best.layout, rows[0].share, rows[0].why) == (JOB.today, 1.0, rows[0].best.reason)
    assert (rows[3].best, rows[3].checkpoint) == (None, Loadable(False, ""))


def test_shares_are_of_todays_throughput() -> None:
    none, one = after_losses(Job(SMALL, 64, today=Layout(2, 2, 4)), nodes(2), [0, 1], "outlast")
    assert none.best is not None
    assert one.best is not None
    assert one.share == one.best.tokens / none.best.tokens
    assert 0.4 < one.share < 0.7


@pytest.mark.parametrize(
    ("form", "layout", "possible"),
    [
        ("outlast", Layout(2, 1, 3), True),
        ("megatron", Layout(2, 2, 1), True),
        ("torch-save", Layout(2, 1, 3), False),
    ],
)
def test_the_layout_is_the_first_that_the_checkpoint_allows(
    form: str, layout: Layout, possible: bool
) -> None:
    (row,) = after_losses(JOB, nodes(1), [2], form, None)
    assert row.best is not None
    assert (row.best.layout, row.possible) == (layout, possible)


def test_without_a_layout_of_today_the_best_one_is_taken() -> None:
    whole, less = after_losses(Job(SMALL, 64), nodes(2), [0, 1], "torch-save")
    assert whole.best is not None
    assert whole.best.layout == ranked_layouts(Job(SMALL, 64), nodes(2))[0].layout
    assert (whole.possible, whole.share, less.possible) == (True, 1.0, False)


def test_a_loss_that_leaves_too_little_memory_leaves_no_layout() -> None:
    job = Job(PRESETS["gpt3-7.1b"], 64, today=Layout(4, 2, 1))
    whole, half = after_losses(job, nodes(2, 4, 24), [0, 1], "outlast")
    assert whole.possible
    assert (half.best, half.share, half.devices, half.checkpoint) == (None, 0.0, 4, Loadable(False, ""))
    assert half.why


@pytest.mark.parametrize(
    ("today", "of", "named"),
    [(Layout(2, 2, 2), nodes(3, 3), "8.*2.*3.*9"), (Layout(0, 2, 2), nodes(1), "1")],
    ids=["no room", "no layout"],
)
def test_todays_layout_has_to_have_room(today: Layout, of: list[Node], named: str) -> None:
    after_losses(Job(SMALL, 64, today=Layout(2, 2, 2)), nodes(4, 3), [0], "outlast")
    with pytest.raises(UsageError, match=named):
        after_losses(Job(SMALL, 64, today=today), of, [0], "outlast")
    with pytest.raises(NoLayout):
        after_losses(Job(SMALL, 64), nodes(1, 1, 1), [0], "outlast")


FOUR = [Node(4), Node(8), Node(6), Node(8)]


@pytest.mark.parametrize(
    ("of", "lost", "left"),
    [
        (FOUR, 0, [Node(8), Node(8), Node(6), Node(4)]),
        (FOUR, 2, [Node(6), Node(4)]),
        (FOUR, 4, []),
        ([Node(4, GIB, 0.5)], 1, [Node(3, GIB, 0.5)]),
        ([Node(4, GIB, 0.5)], 3, [Node(1, GIB, 0.5)]),
        ([Node(4, GIB, 0.5)], 4, []),
    ],
)
def test_the_largest_nodes_are_lost_first_and_devices_of_the_only_one(
    of: list[Node], lost: int, left: list[Node]
) -> None:
    assert remaining(of, lost) == left


@pytest.mark.parametrize(
    ("of", "losses"),
    [
        (nodes(64), [0, 1, 2, 3, 4, 8, 16, 32]),
        (nodes(63), [0, 1, 2, 3, 4, 8, 16]),
        (nodes(2), [0, 1]),
        (nodes(1), [0, 1, 2, 3, 4]),
        (nodes(1, 16), [0, 1, 2, 3, 4, 8]),
        (nodes(1, 1), [0]),
    ],
)
def test_the_usual_losses(of: list[Node], losses: list[int]) -> None:
    assert usual_losses(of) == losses


@pytest.mark.parametrize(("form", "lost", "named"), [("outlast", 8, "8"), ("torch-save", 2, "2.*torch-save")])
def test_an_impossible_loss_is_known_before_it_happens(form: str, lost: int, named: Any) -> None:
    rows = after_losses(JOB, nodes(1), [0, 1 if form == "outlast" else 0, lost], form)
    require(rows, lost - 1, form)
    with pytest.raises(UsageError, match=named):
        require(rows, lost, form)
