"""The layouts of a job for each number of nodes, from the planner."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.elastic import Nodes, planned_layouts, table, without_layout
from outlast.parallelism.policy.layouts import Node, problems
from outlast.parallelism.policy.limits import PRESETS, ModelLimits
from outlast.parallelism.policy.memory import Training
from outlast.parallelism.policy.planner import Job, NoLayout, ranked_layouts
from tests.parallelism.policy.builders import GIB, SMALL


def test_the_layout_of_each_number_of_nodes_keeps_tp_and_pp_as_long_as_that_is_good() -> None:
    job = Job(SMALL, 64, today=Layout(2, 2, 4))
    nodes = Nodes(Node(2), 1, 8)
    found = planned_layouts(job, nodes)
    assert [one.ranks for one in found] == sorted({one.ranks for one in found}, reverse=True)
    assert found[0] == Layout(tp=2, pp=2, dp=4)
    assert all(one.tp == 2 for one in found)
    assert found[-1] == Layout(tp=2)
    assert re.match("8 nodes: tp 2, pp 2, dp 4;.*; 1 node: tp 2, pp 1, dp 1$", table(found, nodes))


@pytest.mark.parametrize(
    ("job", "nodes", "layouts"),
    [
        (
            Job(SMALL, 64),
            Nodes(Node(8), 1, 4),
            {4: Layout(4, 1, 8), 3: Layout(4, 1, 6), 2: Layout(4, 1, 4), 1: Layout(4, 1, 2)},
        ),
        (
            Job(SMALL, 64, today=Layout(2, 2, 8)),
            Nodes(Node(8), 1, 4),
            {4: Layout(2, 2, 8), 3: Layout(2, 2, 6), 2: Layout(2, 2, 4), 1: Layout(2, 2, 2)},
        ),
        (
            Job(SMALL, 12, even=True),
            Nodes(Node(2), 1, 7),
            {6: Layout(2, 2, 3), 4: Layout(2, 2, 2), 2: Layout(2, 2, 1), 1: Layout(2, 1, 1)},
        ),
        (
            Job(PRESETS["gpt3-7.1b"], 64),
            Nodes(Node(8, 24 * GIB), 2, 4, 2),
            {4: Layout(8, 2, 2), 2: Layout(8, 2, 1)},
        ),
        (Job(SMALL, 64), Nodes(Node(4), 3, 3), {3: Layout(4, 1, 3)}),
        (
            Job(ModelLimits("m", 2, 768, 12, 1024, 50304), 64, today=Layout(1, 2, 1)),
            # with all nodes pp 2 is too slow; what it becomes is not kept for its own sake
            Nodes(Node(2), 1, 3),
            {3: Layout(1, 1, 6), 2: Layout(1, 2, 2), 1: Layout(1, 2, 1)},
        ),
        (
            Job(replace(SMALL, layers=2), 20),  # with two nodes dp 3 and cp 2 are faster, and change more
            Nodes(Node(3), 1, 3),
            {3: Layout(1, 1, 9), 2: Layout(1, 1, 6), 1: Layout(1, 1, 3)},
        ),
    ],
)
def test_each_number_of_nodes_has_its_layout_and_others_have_spares(
    job: Job, nodes: Nodes, layouts: dict[int, Layout]
) -> None:
    found = planned_layouts(job, nodes)
    assert {one.ranks // nodes.node.devices: one for one in found} == layouts
    assert [one.ranks for one in found] == [count * nodes.node.devices for count in layouts]


def every(*counts: int) -> list[Layout]:
    """Return a layout of nodes with two devices for each of these numbers of nodes."""
    return [Layout(dp=2 * count) for count in counts]


@pytest.mark.parametrize(
    ("counts", "shown", "more"),
    [
        ((1,), ["1 node"], ""),
        (range(1, 9), ["1 node", "8 nodes", "dp 16"], ""),
        (range(1, 65, 2), ["15 nodes"], "24"),
    ],
    ids=["one", "eight", "many"],
)
def test_up_to_eight_layouts_are_shown_whole(counts: Sequence[int], shown: list[str], more: str) -> None:
    found = table(every(*counts), Nodes(Node(2), 1, 64))
    assert all(word in found for word in shown)
    assert found.count(";") == min(len(counts), 9) - 1
    assert more in found


@pytest.mark.parametrize(
    ("counts", "of", "missing"),
    [
        (range(1, 18, 2), Nodes(Node(2), 1, 17), "2, 4, 6, 8, 10, 12, 14, 16"),
        ((1, 2, 5), Nodes(Node(2), 1, 5), r"3 \S+ 4"),
        ((1,), Nodes(Node(2), 1, 2), "2"),
        ((2,), Nodes(Node(2), 1, 2), "1"),
        ((1, 2, 4, 8), Nodes(Node(2), 1, 8), r"3, 5 \S+ 7"),
        ((1, 2, 4), Nodes(Node(2), 2, 10, 2), r"6 \S+ 10"),
        (range(1, 65, 2), Nodes(Node(2), 1, 64), "2, 4, 6, 8, 10, 12, 14, 16 .* 24"),
        ((), Nodes(Node(2), 1, 8), None),
        ((1, 2, 4, 8), Nodes(Node(2), 2, 4, 2), None),
    ],
)
def test_numbers_of_nodes_without_a_layout_are_named(
    counts: Sequence[int], of: Nodes, missing: str | None
) -> None:
    found = without_layout(every(*counts), of)
    assert (found == "") is (missing is None)
    assert re.search(rf"\b{missing}\b" if missing else "", found), found


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, Nodes]:
    model = ModelLimits("m", draw(st.sampled_from([2, 6, 12])), 768, 12, 1024, 50304)
    each, group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2]))
    least = draw(st.integers(1, 3)) * group
    most = least + draw(st.integers(0, 4)) * group
    training = Training(1, draw(st.booleans()))
    job = Job(model, draw(st.integers(1, 40)), training, even=draw(st.booleans()))
    return job, Nodes(Node(each, draw(st.sampled_from([0, 2, 4])) * GIB), least, most, group)


def tokens_of(job: Job, nodes: Nodes, count: int, layout: Layout) -> float:
    """Return the tokens a second of a layout on so many nodes."""
    ranked = {one.layout: one.tokens for one in ranked_layouts(job, [nodes.node] * count)}
    return ranked[layout]


outcomes: Counter[str] = Counter()


@settings(max_examples=60)
@given(jobs())
def check(case: tuple[Job, Nodes]) -> None:
    job, nodes = case
    try:
        found = planned_layouts(job, nodes)
    except UsageError:
        outcomes["refused"] += 1
        return
    outcomes["planned"] += 1
    each = nodes.node.devices
    sizes = [one.ranks for one in found]
    assert sizes == sorted({count * each for count in nodes.counts} & set(sizes), reverse=True)
    assert sizes[-1] == nodes.least * each
    for one in found:
        assert not problems(job.model, one)
        assert each % one.tp == 0
    asked = replace(job, multiple=each * nodes.group)
    asked = replace(asked, today=ranked_layouts(asked, [nodes.node] * nodes.most)[0].layout)
    for count in nodes.counts:
        size = max(size for size in sizes if size <= count * each)
        taken = next(one for one in found if one.ranks == size)
        best = ranked_layouts(asked, [nodes.node] * count)[0]
        if taken != best.layout and size > sizes[-1]:
            outcomes["faster"] += 1
            assert tokens_of(asked, nodes, count, taken) >= best.tokens


def test_with_any_number_of_nodes_the_job_is_as_fast_as_in_the_layout_that_the_planner_names() -> None:
    outcomes.clear()
    check()
    assert min(outcomes["planned"], outcomes["refused"]) > 2


@pytest.mark.parametrize(
    ("job", "of", "named"),
    [
        (
            Job(PRESETS["gpt3-7.1b"], 64, today=Layout(8, 2, 2)),
            Nodes(Node(8, 16 * GIB), 1, 4),
            r"gpt3-7\.1b.*tp 8, pp 1, dp 1.*16\.0 GiB.*15\.2 GiB.*--nnodes=2:4",
        ),
        (Job(PRESETS["gpt3-175b"], 64), Nodes(Node(8, 24 * GIB), 1, 2), "^2 nodes.*8.*gpt3-175b"),
        (Job(SMALL, 64, even=True), Nodes(Node(5), 1, 1), "5 ranks"),
    ],
    ids=["the least number has none", "no number has one", "the rule of whole nodes"],
)
def test_nodes_without_a_layout_are_refused_with_what_has_one(job: Job, of: Nodes, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        planned_layouts(job, of)


def test_on_whole_nodes_there_may_be_no_layout() -> None:
    with pytest.raises(NoLayout):
        ranked_layouts(Job(SMALL, 64, even=True, multiple=5), [Node(5)])
