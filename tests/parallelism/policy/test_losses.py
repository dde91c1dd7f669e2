"""What a job does after the loss of nodes."""

from __future__ import annotations

import pytest

from outlast.errors import UsageError
from outlast.parallelism.policy.checkpoints import Loadable
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node
from outlast.parallelism.policy.limits import PRESETS, ModelLimits
from outlast.parallelism.policy.losses import after_losses, remaining, require, usual_losses
from outlast.parallelism.policy.planner import Job, NoLayout, ranked_layouts

GIB = 2**30
SMALL = ModelLimits("small", 12, 768, 12, 1024, 50304)
JOB = Job(SMALL, 64, today=Layout(2, 2, 2))


def test_a_row_for_each_loss() -> None:
    rows = after_losses(JOB, [Node(8)], [0, 1, 4, 8], "outlast")
    assert [(row.lost, row.devices, row.possible) for row in rows] == [
        (0, 8, True),
        (1, 7, True),
        (4, 4, True),
        (8, 0, False),
    ]
    assert rows[0].best is not None
    assert rows[0].best.layout == JOB.today
    assert [row.share > 0.3 for row in rows] == [True, True, True, False]
    assert rows[0].share == 1.0
    assert rows[0].why == rows[0].best.reason
    assert rows[3].why == "no device is left"
    assert (rows[3].best, rows[3].checkpoint) == (None, Loadable(False, ""))


def test_shares_are_of_todays_throughput() -> None:
    nodes = [Node(8)] * 2
    none, one = after_losses(Job(SMALL, 64, today=Layout(2, 2, 4)), nodes, [0, 1], "outlast")
    assert none.best is not None
    assert one.best is not None
    assert one.share == one.best.tokens / none.best.tokens
    assert 0.4 < one.share < 0.7


def test_the_layout_is_the_first_that_the_checkpoint_allows() -> None:
    free, bound = (after_losses(JOB, [Node(8)], [2], form, None)[0] for form in ("outlast", "megatron"))
    assert free.best is not None
    assert bound.best is not None
    assert free.best.layout == Layout(2, 1, 3)
    assert bound.best.layout == Layout(2, 2, 1)
    assert bound.possible
    assert bound.share < free.share
    (stuck,) = after_losses(JOB, [Node(8)], [2], "torch-save", None)
    assert stuck.best is not None
    assert stuck.best.layout == Layout(2, 1, 3)
    assert not stuck.possible
    assert "save with outlast or DCP" in stuck.checkpoint.why


def test_without_a_layout_of_today_the_best_one_is_taken() -> None:
    nodes = [Node(8)] * 2
    rows = after_losses(Job(SMALL, 64), nodes, [0, 1], "torch-save")
    assert rows[0].best is not None
    assert rows[0].best.layout == ranked_layouts(Job(SMALL, 64), nodes)[0].layout
    assert rows[0].possible
    assert rows[0].share == 1.0
    assert not rows[1].possible


def test_a_loss_that_leaves_too_little_memory_says_so() -> None:
    job = Job(PRESETS["gpt3-7.1b"], 64, today=Layout(4, 2, 1))
    whole, half = after_losses(job, [Node(4, 24 * GIB)] * 2, [0, 1], "outlast")
    assert whole.possible
    assert (half.best, half.share) == (None, 0.0)
    assert half.devices == 4
    assert "fits into the memory of 4 devices" in half.why
    assert half.checkpoint.why == ""
    assert not half.checkpoint.can


def test_todays_layout_has_to_have_room() -> None:
    after_losses(Job(SMALL, 64, today=Layout(2, 2, 2)), [Node(3)] * 4, [0], "outlast")
    with pytest.raises(UsageError, match=r"8 ranks in groups of 2 within a node; 3 nodes with 9 devices"):
        after_losses(Job(SMALL, 64, today=Layout(2, 2, 2)), [Node(3)] * 3, [0], "outlast")
    with pytest.raises(UsageError, match="every degree is at least 1"):
        after_losses(Job(SMALL, 64, today=Layout(0, 2, 2)), [Node(8)], [0], "outlast")
    with pytest.raises(NoLayout):
        after_losses(Job(SMALL, 64), [Node(1, GIB)], [0], "outlast")


def test_the_largest_nodes_are_lost_first() -> None:
    nodes = [Node(4), Node(8), Node(6), Node(8)]
    assert remaining(nodes, 0) == [Node(8), Node(8), Node(6), Node(4)]
    assert remaining(nodes, 2) == [Node(6), Node(4)]
    assert remaining(nodes, 4) == []


def test_devices_of_the_only_node_are_lost_one_by_one() -> None:
    node = Node(4, GIB, 0.5)
    assert remaining([node], 1) == [Node(3, GIB, 0.5)]
    assert remaining([node], 3) == [Node(1, GIB, 0.5)]
    assert remaining([node], 4) == []


@pytest.mark.parametrize(
    ("nodes", "losses"),
    [
        ([Node(8)] * 64, [0, 1, 2, 3, 4, 8, 16, 32]),
        ([Node(8)] * 63, [0, 1, 2, 3, 4, 8, 16]),
        ([Node(8)] * 2, [0, 1]),
        ([Node(8)], [0, 1, 2, 3, 4]),
        ([Node(16)], [0, 1, 2, 3, 4, 8]),
        ([Node(1)], [0]),
    ],
)
def test_the_usual_losses(nodes: list[Node], losses: list[int]) -> None:
    assert usual_losses(nodes) == losses


def test_an_impossible_loss_is_known_before_it_happens() -> None:
    rows = after_losses(JOB, [Node(8)], [0, 1, 8], "outlast")
    require(rows, 7, "outlast")
    with pytest.raises(
        UsageError, match="would end with the loss of 8: no device is left; nothing was started"
    ):
        require(rows, 8, "outlast")
    stuck = after_losses(JOB, [Node(8)], [0, 2], "torch-save")
    require(stuck, 1, "torch-save")
    with pytest.raises(
        UsageError, match="loss of 2: its torch-save checkpoint cannot be loaded: torch-save allows"
    ):
        require(stuck, 2, "torch-save")
