"""The layouts of a job for each number of nodes, from the planner."""

from __future__ import annotations

from collections import Counter
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

GIB = 1 << 30
SMALL = ModelLimits("small", 12, 768, 12, 1024, 50304)


def test_the_layout_of_each_number_of_nodes_keeps_tp_and_pp_as_long_as_that_is_good() -> None:
    job = Job(SMALL, 64, today=Layout(2, 2, 4))
    nodes = Nodes(Node(2), 1, 8)
    found = planned_layouts(job, nodes)
    assert [one.ranks for one in found] == sorted({one.ranks for one in found}, reverse=True)
    assert found[0] == Layout(tp=2, pp=2, dp=4)
    assert all(one.tp == 2 for one in found)
    assert found[-1] == Layout(tp=2)
    assert table(found, nodes).startswith("8 nodes: tp 2, pp 2, dp 4; ")
    assert table(found, nodes).endswith("; 1 node: tp 2, pp 1, dp 1")


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
            Nodes(
                Node(2), 1, 3
            ),  # with all nodes pp 2 is too slow; what it becomes is not kept for its own sake
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


def test_up_to_eight_layouts_are_shown_whole() -> None:
    nodes = Nodes(Node(2), 1, 9)
    shown = table([Layout(dp=2 * count) for count in range(1, 9)], nodes)
    assert shown.endswith("; 8 nodes: tp 1, pp 1, dp 16")
    assert table([Layout(dp=2)], nodes) == "1 node: tp 1, pp 1, dp 2"
    few = [Layout(dp=2 * count) for count in range(1, 18, 2)]
    missing = "2, 4, 6, 8, 10, 12, 14, 16 nodes: the job then"
    assert f"no layout for {missing}" in without_layout(few, Nodes(Node(2), 1, 17))
    assert "no layout for 3 to 4 nodes: " in without_layout(
        [Layout(dp=2 * count) for count in (1, 2, 5)], Nodes(Node(2), 1, 5)
    )
    assert "no layout for 2 nodes: " in without_layout([Layout(dp=2)], Nodes(Node(2), 1, 2))
    assert "no layout for 1 node: " in without_layout([Layout(dp=4)], Nodes(Node(2), 1, 2))


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


def test_a_least_number_of_nodes_without_a_layout_is_refused_with_what_has_one() -> None:
    job = Job(PRESETS["gpt3-7.1b"], 64, today=Layout(8, 2, 2))
    with pytest.raises(UsageError) as caught:
        planned_layouts(job, Nodes(Node(8, 16 * GIB), 1, 4))
    assert str(caught.value) == (
        "1 node with 8 rank(s) each: no layout for gpt3-7.1b fits into the memory of 8 devices: the leanest,"
        " tp 8, pp 1, dp 1, needs 16.0 GiB a device, and 15.2 GiB of 16.0 GiB may be used; recompute"
        " activations, or keep more devices; the least number of nodes that has a layout is 2: --nnodes=2:4"
    )


def test_nodes_that_have_too_little_memory_together_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^2 nodes with 8 rank\(s\) each: no layout for gpt3-175b fits"):
        planned_layouts(Job(PRESETS["gpt3-175b"], 64), Nodes(Node(8, 24 * GIB), 1, 2))


def test_numbers_of_nodes_without_a_layout_are_named() -> None:
    nodes = Nodes(Node(2), 1, 8)
    layouts = [Layout(tp=2, dp=ranks) for ranks in (1, 2, 4, 8)]
    assert without_layout(layouts, nodes).startswith("[parallelism] has no layout for 3, 5 to 7 nodes: ")
    assert without_layout([], nodes) == ""
    assert without_layout(layouts, Nodes(Node(2), 2, 4, 2)) == ""
    assert "no layout for 6 to 10 nodes: " in without_layout(layouts[:-1], Nodes(Node(2), 2, 10, 2))


def test_a_message_names_a_few_of_many() -> None:
    nodes = Nodes(Node(2), 1, 64)
    layouts = [Layout(dp=2 * count) for count in range(1, 65, 2)]
    said = without_layout(layouts, nodes)
    assert "no layout for 2, 4, 6, 8, 10, 12, 14, 16 and 24 more numbers of nodes: " in said
    assert table(layouts, nodes).endswith("15 nodes: tp 1, pp 1, dp 30; and 24 more")


def test_without_a_layout_at_all_the_planner_says_why() -> None:
    job = Job(SMALL, 64, even=True)
    with pytest.raises(
        UsageError, match="has a multiple of 5 ranks, on whole nodes; without this rule there is one"
    ):
        planned_layouts(job, Nodes(Node(5), 1, 1))
    with pytest.raises(NoLayout):
        ranked_layouts(Job(SMALL, 64, even=True, multiple=5), [Node(5)])
