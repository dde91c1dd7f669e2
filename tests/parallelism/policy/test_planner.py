"""The planner, against brute force and by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.parallelism.policy import memory, throughput
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node, problems
from outlast.parallelism.policy.limits import PRESETS, ModelLimits
from outlast.parallelism.policy.memory import Training
from outlast.parallelism.policy.planner import Job, NoLayout, Ranked, ranked_layouts, throughput_today
from outlast.parallelism.policy.throughput import Hardware
from tests.parallelism.policy.builders import GIB, SMALL, nodes

BIG = PRESETS["gpt3-175b"]
H100 = Node(8, 80 * GIB)
UNSHRUNK = (Phase.explicit, Phase.generate)  # to shrink an example by brute force takes minutes


def first(job: Job, nodes: Sequence[Node], hardware: Hardware | None = None) -> Ranked:
    return ranked_layouts(job, nodes, hardware)[0]


def spread(job: Job, layout: Layout) -> list[int]:
    """Return the micro-batches of each copy, dealt one by one (in turns of pp with virtual stages)."""
    unit = layout.pp if layout.virtual > 1 else 1
    if job.micro_batches % unit:
        return []
    copies = [0] * layout.dp
    for index in range(job.micro_batches // unit):
        copies[index % layout.dp] += unit
    return copies if min(copies) > 0 and (not job.even or min(copies) == max(copies)) else []


def everything(job: Job, nodes: Sequence[Node], virtual: set[int]) -> Iterator[tuple[Layout, float]]:
    """Yield each legal layout and its tokens a second, for each choice of least memory and speed."""
    devices = sum(node.devices for node in nodes)
    degrees = range(1, devices + 1)
    floors = {(least.memory, slow.speed) for least in nodes for slow in nodes}
    for tp, pp, cp in itertools.product(range(1, max(node.devices for node in nodes) + 1), degrees, degrees):
        if tp * pp * cp > devices or (job.multiple > 1 and nodes[0].devices % tp):
            continue
        for dp, ep in itertools.product(range(1, devices // (tp * pp * cp) + 1), (1, 2, 4)):
            for chunks in virtual | {1} if pp > 1 else {1}:
                layout = Layout(tp, pp, dp, cp, ep, chunks)
                copies = spread(job, layout)
                if problems(job.model, layout) or not copies:
                    continue
                if layout.ranks % job.multiple or (job.every_device and layout.ranks != devices):
                    continue
                if any(getattr(layout, name) != getattr(job.today, name) for name in job.fixed):
                    continue
                for floor in floors:
                    used = [node for node in nodes if node.memory >= floor[0] and node.speed >= floor[1]]
                    tokens = speed_on(job, layout, copies, used)
                    if tokens:
                        yield layout, tokens


def speed_on(job: Job, layout: Layout, copies: list[int], nodes: Sequence[Node]) -> float:
    """Return the tokens a second on these nodes; 0: the layout has no room on them."""
    if not nodes or sum(node.devices // layout.tp for node in nodes) * layout.tp < layout.ranks:
        return 0.0
    rank = memory.parameters_of_rank(job.model, layout)
    needs = memory.footprint(job.model, layout, job.training, rank)
    room = min(node.memory for node in nodes)
    if room and needs.needed(layout.dp, max(copies)) > 0.95 * room:
        return 0.0
    slow = Hardware(flops=140e12 * min(node.speed for node in nodes))
    largest = max(node.devices for node in nodes)
    times = throughput.pace((job.model, job.training), layout, rank, slow, largest)
    return job.global_batch * job.model.sequence / times.step(layout, max(copies))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Job, list[Node]]:
    model = ModelLimits(
        "m",
        draw(st.sampled_from([2, 6, 12])),
        draw(st.sampled_from([768, 1536])),
        12,
        draw(st.sampled_from([8, 12, 1024])),
        50304,
        kv_heads=draw(st.sampled_from([1, 4, 12])),
        experts=draw(st.sampled_from([0, 0, 4])),
    )
    memory_of_a_device = draw(st.sampled_from([0, 2 * GIB, 4 * GIB, 8 * GIB]))
    node = st.builds(
        Node,
        st.integers(1, 8),
        st.sampled_from([memory_of_a_device, 3 * memory_of_a_device]),
        st.sampled_from([1.0, 1.0, 0.5]),
    )
    nodes = draw(st.lists(node, min_size=1, max_size=8))
    training = Training(draw(st.sampled_from([1, 2])), draw(st.booleans()), draw(st.booleans()))
    batch = draw(st.integers(1, 70)) * training.micro_batch
    job = Job(model, batch, training, even=draw(st.booleans()), every_device=draw(st.booleans()))
    if draw(st.booleans()):
        return job, nodes
    each = nodes[0].devices
    return replace(job, multiple=each * draw(st.sampled_from([1, 2]))), [
        replace(one, devices=each) for one in nodes
    ]


@settings(max_examples=40, phases=UNSHRUNK)
@given(situations())
def test_brute_force_finds_no_other_and_no_faster_layout(situation: tuple[Job, list[Node]]) -> None:
    job, nodes = situation
    wanted: dict[Layout, float] = {}
    whole = [nodes] if job.every_device else []
    for layout, tokens in everything(job, nodes, set()):
        if whole and not speed_on(job, layout, spread(job, layout), nodes):
            continue
        wanted[layout.shape] = max(wanted.get(layout.shape, 0.0), tokens)
    try:
        found = ranked_layouts(job, nodes)
    except NoLayout:
        found = []
    assert {one.layout.shape for one in found} == set(wanted)
    for one in found:
        assert one.tokens == pytest.approx(wanted[one.layout.shape], rel=1e-9)
        copies = spread(job, one.layout)
        assert (one.micro_batches, one.fewest) == (max(copies), min(copies))
        assert one.idle == sum(node.devices for node in nodes) - one.layout.ranks
    assert found == sorted(found, key=lambda one: -one.score)


@settings(max_examples=25, phases=UNSHRUNK)
@given(situations(), st.sampled_from([1, 2, 3]), st.integers(0, 3), st.sets(st.sampled_from(["tp", "pp"])))
def test_brute_force_agrees_when_a_layout_is_in_force(
    situation: tuple[Job, list[Node]], virtual: int, place: int, fixed: set[str]
) -> None:
    """Nodes without limits of memory; today's layout is one of the best, with nothing lost yet."""
    job, nodes = replace(situation[0], every_device=False), [replace(one, memory=0) for one in situation[1]]
    options = ranked_layouts(replace(job, even=False), nodes)
    today = options[min(place, len(options) - 1)].layout
    if today.pp > 1 and job.model.layers % (today.pp * virtual) == 0:
        today = replace(today, virtual=virtual)
    job = replace(job, today=today, fixed=frozenset(fixed))
    if job.micro_batches < today.dp * (today.pp if today.virtual > 1 else 1):
        return
    left = nodes[: max(1, len(nodes) - 1)]
    wanted: dict[Layout, float] = {}
    for layout, tokens in everything(job, left, {today.virtual}):
        wanted[layout.shape] = max(wanted.get(layout.shape, 0.0), tokens)
    try:
        found = ranked_layouts(job, left)
    except NoLayout:
        found = []
    assert {one.layout.shape for one in found} == set(wanted)
    devices = sum(node.devices for node in left)
    ideal = throughput_today(job, Hardware(), max(node.devices for node in left)) * devices / today.ranks
    tiers = []
    for one in found:
        slack = 1.01 if one.layout == today else 1 + 1e-9
        assert wanted[one.layout.shape] / slack <= one.tokens * (1 + 1e-12)
        assert one.share == pytest.approx(one.tokens / ideal)
        kept = [one.layout.shape == today.shape, one.layout.pp == today.pp, True, False]
        good = one.layout.tp == today.tp and one.share >= 0.9
        tiers.append(kept.index(True) if good else 3)
        assert one.tier == tiers[-1]
    assert found == sorted(found, key=lambda one: (one.tier, -one.score))


def test_63_of_64_nodes_keep_0_93_of_the_throughput() -> None:
    job = Job(BIG, 1024, today=Layout(8, 4, 16))
    full, less = first(job, [H100] * 64), first(job, [H100] * 63)
    assert (full.layout, full.share, full.idle) == (job.today, pytest.approx(1.0), 0)
    assert less.layout == Layout(8, 4, 15)
    assert (less.micro_batches, less.fewest, less.idle, less.tier) == (69, 68, 24, 0)
    assert less.tokens / full.tokens >= 0.93
    for value in ("tp 8", "pp 4", "dp 16", "480", "504", "69", "68", "0.95"):
        assert value in less.reason
    even = [one for one in ranked_layouts(replace(job, even=True), [H100] * 63) if one.layout.tp == 8]
    kept = next(one for one in even if one.layout.pp == 4 and one.layout.cp == 1)
    assert kept.layout.dp == 8
    assert kept.tokens / full.tokens < 0.53


@pytest.mark.parametrize(("today", "share"), [(None, 0.95), (Layout(1, 1, 1), 1.0)], ids=["new", "in force"])
def test_95_percent_of_a_memory_are_used_and_all_of_it_by_the_layout_in_force(
    today: Layout | None, share: float
) -> None:
    job = Job(SMALL, 8)
    alone = first(job, nodes(1, 1)).memory
    job = replace(job, today=today)
    assert first(job, [Node(1, int(alone / share) + 2)]).layout == Layout(1, 1, 1)
    with pytest.raises(NoLayout, match=r"tp 1, pp 1, dp 1.*GiB"):
        ranked_layouts(job, [Node(1, int(alone / share) - 2)])


def test_pp_changes_when_keeping_it_leaves_too_much_idle() -> None:
    found = ranked_layouts(Job(SMALL, 64, today=Layout(2, 2, 2)), nodes(1, 6))
    assert (found[0].layout, found[0].tier) == (Layout(2, 1, 3), 2)
    kept = next(one for one in found if one.layout.shape == Layout(2, 2, 1))
    assert (kept.tier, kept.idle) == (3, 2)


def test_tp_changes_when_no_group_has_room() -> None:
    found = first(Job(SMALL, 64, today=Layout(4, 1, 2)), nodes(2, 3))
    assert found.layout.tp in (1, 2, 3)
    assert "tp 4" in found.reason


def test_fixed_degrees_stay() -> None:
    job = Job(SMALL, 64, today=Layout(4, 2, 2), fixed=frozenset(("tp", "pp")))
    assert {(one.layout.tp, one.layout.pp) for one in ranked_layouts(job, nodes(2))} == {(4, 2)}


@pytest.mark.parametrize(
    ("job", "of", "named"),
    [
        (Job(SMALL, 64, today=Layout(4, 2, 2), fixed=frozenset(("tp", "pp"))), nodes(4, 3), "tp 4.*3"),
        (Job(SMALL, 64, today=Layout(4, 2, 2), fixed=frozenset(("tp", "pp"))), nodes(1, 7), "pp 2, tp 4.*7"),
        (
            Job(SMALL, 512, today=Layout(2, 2, 8), every_device=True, even=True),
            [*nodes(3), *nodes(1, 7)],
            "small.*31.*512",
        ),
        (Job(BIG, 64), [H100, *nodes(8, 8, 1)], r"76\.0 GiB.*80\.0 GiB"),
    ],
    ids=["a group has no room", "fixed degrees have no room", "rules", "memory"],
)
def test_where_there_is_no_layout_the_numbers_that_prevent_it_are_named(
    job: Job, of: list[Node], named: str
) -> None:
    with pytest.raises(NoLayout, match=named):
        ranked_layouts(job, of)


@pytest.mark.parametrize(
    ("job", "of", "idle"),
    [
        (Job(SMALL, 512, today=Layout(2, 2, 8)), [*nodes(3), *nodes(1, 7)], {3}),
        (Job(SMALL, 64), [*nodes(3), *nodes(1, speed=0.25)], set(range(8, 32))),
        (Job(SMALL, 64), [*nodes(1), *nodes(1, speed=0.95)], {0}),
        (Job(BIG, 64), [*[H100] * 8, *nodes(8, 8, 1)], set(range(64, 128))),
    ],
    ids=["a prime number", "slow ones", "hardly slow ones", "too little memory"],
)
def test_devices_that_would_slow_the_others_are_left_idle(job: Job, of: list[Node], idle: set[int]) -> None:
    assert first(job, of).idle in idle


def test_a_change_takes_longer_if_more_is_loaded() -> None:
    job = Job(SMALL, 64, today=Layout(2, 2, 2))
    by_shape = {one.layout.shape: one for one in ranked_layouts(job, nodes(2))}
    rank = memory.parameters_of_rank(SMALL, Layout(2, 2, 1))
    kept = by_shape[Layout(2, 2, 1)]
    assert kept.layout.dp == 4
    assert kept.pause == pytest.approx(30 + 12 * rank.dense / 4 / 1e9)
    other = by_shape[Layout(1, 2, 1)]
    rank = memory.parameters_of_rank(SMALL, other.layout)
    assert other.pause == pytest.approx(30 + (12 / other.layout.dp + 2) * rank.dense / 1e9)
    today = {one.layout: one for one in ranked_layouts(job, nodes(1))}[Layout(2, 2, 2)]
    assert today.pause == 30
    whole = replace(job, training=Training(sharded_optimizer=False))
    all_state = {one.layout.shape: one for one in ranked_layouts(whole, nodes(2))}[Layout(2, 2, 1)]
    rank = memory.parameters_of_rank(SMALL, Layout(2, 2, 1))
    assert all_state.pause == pytest.approx(30 + 12 * rank.dense / 1e9)


def test_the_score_is_what_is_trained_until_the_next_change() -> None:
    job = Job(SMALL, 64, today=Layout(2, 2, 2))
    one = first(job, nodes(2), Hardware(horizon=100.0))
    assert one.score == pytest.approx(one.tokens * (100 - one.pause))
    assert first(job, nodes(2), Hardware(horizon=20.0)).score == 0


def test_a_new_job_has_no_ideal() -> None:
    one = first(Job(SMALL, 64), nodes(1))
    assert (one.share, one.tier, one.idle) == (0.0, 3, 0)


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (Job(SMALL, 0), "0.*1"),
        (Job(SMALL, 7, Training(2)), "7.*2"),
        (Job(SMALL, 1, Training(2)), "1.*2"),
        (Job(SMALL, 4, Training(0)), "0"),
        (Job(SMALL, 4, fixed=frozenset(("tp",))), "tp"),
        (Job(SMALL, 4, today=Layout(0, 1, 1)), "1"),
        (Job(SMALL, 4, today=Layout(5, 1, 1)), r"small.*tp 5, pp 1, dp 1"),
        (Job(SMALL, 4, today=Layout(1, 1, 5)), "4.*dp 5"),
        (Job(SMALL, 4, today=Layout(1, 3, 2, virtual=2)), "4.*dp 2"),
    ],
)
def test_an_impossible_job_is_refused(job: Job, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ranked_layouts(job, nodes(1))


def test_a_batch_limits_the_copies() -> None:
    assert first(Job(SMALL, 4, today=Layout(1, 1, 4)), nodes(1)).layout.dp <= 4


def test_16384_devices_are_planned_for() -> None:
    """127 copies have room; 121 compute 17 micro-batches each at most, too, and leave six as spares."""
    found = first(Job(BIG, 2048, today=Layout(8, 16, 128)), [H100] * 2047)
    assert (found.layout, found.micro_batches) == (Layout(8, 16, 121), 17)
