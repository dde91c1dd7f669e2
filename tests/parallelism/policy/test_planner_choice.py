"""Which layouts the planner names, and why there is none: by hand, with models of a few layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outlast.parallelism.policy import memory
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node
from outlast.parallelism.policy.limits import ModelLimits
from outlast.parallelism.policy.memory import Training
from outlast.parallelism.policy.planner import Job, NoLayout, ranked_layouts, throughput_today
from outlast.parallelism.policy.throughput import Hardware
from tests.parallelism.policy.builders import SMALL, nodes

TINY = ModelLimits("tiny", 4, 1024, 2, 64, 100)
ONLY_DP = frozenset(("tp", "pp", "cp"))


def needed(job: Job, dp: int, micro_batches: int) -> float:
    """Return the bytes of a rank in today's layout with another dp."""
    assert job.today is not None
    rank = memory.parameters_of_rank(job.model, job.today)
    return memory.footprint(job.model, job.today, job.training, rank).needed(dp, micro_batches)


def rows(job: Job, nodes: list[Node]) -> list[tuple[int, int, int, int, int, int, int]]:
    """Return tp, pp, dp, cp, virtual, and the micro-batches of the busiest and of the least busy copy."""
    found = [(one.layout, one.micro_batches, one.fewest) for one in ranked_layouts(job, nodes)]
    return [(one.tp, one.pp, one.dp, one.cp, one.virtual, most, least) for one, most, least in found]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (
            10,  # micro-batches of 2 samples: 5, which do not go round a pipeline of 2 in turns
            [
                *((1, 2, 1, 1, 1, 5, 5), (1, 4, 1, 1, 1, 5, 5), (1, 1, 1, 1, 1, 5, 5)),
                *((2, 2, 1, 1, 1, 5, 5), (2, 1, 1, 1, 1, 5, 5), (1, 2, 1, 2, 1, 5, 5)),
                *((2, 1, 1, 2, 1, 5, 5), (1, 1, 1, 2, 1, 5, 5), (1, 1, 1, 4, 1, 5, 5)),
            ],
        ),
        (
            12,
            [
                *((1, 2, 1, 1, 2, 6, 6), (1, 2, 1, 1, 1, 6, 6), (1, 4, 1, 1, 1, 6, 6)),
                *((1, 1, 1, 1, 1, 6, 6), (2, 2, 1, 1, 1, 6, 6), (2, 2, 1, 1, 2, 6, 6)),
                *((2, 1, 1, 1, 1, 6, 6), (1, 2, 1, 2, 1, 6, 6), (1, 2, 1, 2, 2, 6, 6)),
                *((2, 1, 1, 2, 1, 6, 6), (1, 1, 1, 2, 1, 6, 6), (1, 1, 1, 4, 1, 6, 6)),
            ],
        ),
    ],
)
def test_every_way_to_divide_a_model_is_ranked(batch: int, expected: list[tuple[int, ...]]) -> None:
    job = Job(TINY, batch, Training(2), today=Layout(1, 2, 2, virtual=2))
    assert rows(job, nodes(3, 2)) == expected


def test_copies_of_an_interleaved_pipeline_take_turns_of_pp_micro_batches() -> None:
    today = Layout(1, 4, 3, virtual=3)
    job = Job(SMALL, 80, Training(2), today=today)
    found = {one.layout: one for one in ranked_layouts(job, nodes(6, 2))}[today]
    assert (found.micro_batches, found.fewest, found.share) == (16, 12, 1.0)
    assert found.tokens == throughput_today(job, Hardware(), 2)
    one_turn = {one.layout: one for one in ranked_layouts(replace(job, global_batch=24), nodes(6, 2))}
    assert (one_turn[today].micro_batches, one_turn[today].fewest) == (4, 4)


def test_on_whole_nodes_tp_divides_the_devices_of_a_node() -> None:
    job = Job(TINY, 12, multiple=2)
    assert [(tp, pp, dp, cp) for tp, pp, dp, cp, *_ in rows(job, nodes(2, 3))] == [
        *((1, 4, 1, 1), (1, 2, 1, 1), (1, 2, 1, 2), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 1, 4))
    ]
    assert {one.layout.tp for one in ranked_layouts(replace(job, multiple=1), nodes(2, 3))} == {1, 2}


def test_no_more_copies_are_used_than_make_the_step_shorter() -> None:
    """Of 64 micro-batches 22 copies and 23 compute 3 at most; the 23rd device is a spare then."""
    job = Job(SMALL, 64, today=Layout(1, 1, 32), fixed=ONLY_DP)
    (found,) = ranked_layouts(job, nodes(23, 1))
    assert (found.layout.dp, found.idle, found.micro_batches, found.fewest) == (22, 1, 3, 2)
    (whole,) = ranked_layouts(replace(job, every_device=True), nodes(23, 1))
    assert (whole.layout.dp, whole.idle, whole.micro_batches, whole.fewest) == (23, 0, 3, 2)


@pytest.mark.parametrize(
    ("today", "devices", "chosen"),
    [
        (23, 23, 23),  # 22 would be faster by less than a hundredth
        (22, 23, 22),
        (31, 31, 31),
        (24, 23, 22),  # has no room
        (16, 31, 22),  # 22 copies are faster by more than that
        (40, 64, 64),
    ],
)
def test_todays_copies_are_kept_where_others_would_hardly_be_faster(
    today: int, devices: int, chosen: int
) -> None:
    job = Job(SMALL, 64, today=Layout(1, 1, today), fixed=ONLY_DP)
    (found,) = ranked_layouts(job, nodes(devices, 1))
    assert found.layout.dp == chosen


def test_todays_copies_are_kept_only_as_the_rules_for_ranks_allow() -> None:
    job = Job(SMALL, 64, today=Layout(1, 1, 23), fixed=ONLY_DP)
    assert rows(replace(job, multiple=2), nodes(23, 1)) == [(1, 1, 22, 1, 1, 3, 2)]
    assert rows(replace(job, even=True), nodes(23, 1)) == [(1, 1, 16, 1, 1, 4, 4)]


def test_as_many_copies_as_need_be_share_the_optimizer() -> None:
    job = Job(SMALL, 12, today=Layout(1, 1, 12), fixed=ONLY_DP)
    room = Node(1, math.ceil(needed(job, 7, 2) / 0.95))
    assert rows(job, [room] * 11) == [(1, 1, 7, 1, 1, 2, 1)]
    assert rows(replace(job, multiple=3), [room] * 11) == [(1, 1, 9, 1, 1, 2, 1)]
    assert rows(job, [replace(room, memory=room.memory - 2)] * 11) == [(1, 1, 8, 1, 1, 2, 1)]
    with pytest.raises(NoLayout, match=r"11.*12"):  # 7 copies would not compute as many each, 6 have no room
        ranked_layouts(replace(job, even=True), [room] * 11)


def test_a_layout_in_force_fits_into_a_memory_that_it_fills() -> None:
    """Its need is the limit then, to the byte: no rounding may refuse it."""
    model = ModelLimits("m", 2, 768, 4, 1024, 50304)
    for dp in range(2, 13):
        job = Job(model, 16, today=Layout(1, 1, dp), fixed=ONLY_DP)
        need = needed(job, dp, -(-16 // dp))
        assert [row[2] for row in rows(job, [Node(1, math.ceil(need))] * dp)] == [dp]
    alone = Job(SMALL, 8, today=Layout(1, 1, 1))
    assert needed(alone, 1, 8).is_integer()
    assert rows(alone, [Node(1, int(needed(alone, 1, 8)))]) == [(1, 1, 1, 1, 1, 8, 8)]


def test_a_change_loads_the_experts_of_a_rank() -> None:
    job = Job(ModelLimits("moe", 2, 1024, 1, 4, 100, experts=4), 12, today=Layout(1, 1, 4, ep=2))
    job = replace(job, training=Training(sharded_optimizer=False))
    for one in ranked_layouts(job, nodes(3, 2)):
        rank = memory.parameters_of_rank(job.model, one.layout)
        same = one.layout.shape == Layout(1, 1, 1, ep=2)
        expected = 30 + (12 if same else 14) * (rank.dense + rank.experts) / 1e9
        assert one.pause == pytest.approx(30.0 if one.layout == job.today else expected)


@pytest.mark.parametrize(
    ("rules", "pp", "devices", "named"),
    [
        ({"every_device": True}, 2, 7, "7 devices"),
        ({"every_device": True}, 4, 6, "6 devices"),
        ({"multiple": 2}, 1, 1, "1 device .*2 ranks"),
        ({"even": True, "every_device": True}, 1, 7, "7 devices.*10 micro-batches"),
        ({"even": True, "multiple": 14}, 1, 4, "4 devices.*10 micro-batches.*14 ranks"),
        ({}, 2, 1, "cp 1, pp 2, tp 1"),
        ({"every_device": True}, 2, 1, "cp 1, pp 2, tp 1"),  # there is none without this rule either
        ({"even": True}, 2, 1, "cp 1, pp 2, tp 1"),
        ({"multiple": 2}, 2, 1, "cp 1, pp 2, tp 1"),
    ],
)
def test_the_rule_that_prevents_every_layout_is_named(
    rules: dict[str, Any], pp: int, devices: int, named: str
) -> None:
    job = Job(TINY, 10, today=Layout(1, pp, 1 if devices > 1 or pp == 1 else 2), fixed=ONLY_DP, **rules)
    with pytest.raises(NoLayout, match=named):
        ranked_layouts(job, nodes(devices, 1))
