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

GIB = 2**30
BIG = PRESETS["gpt3-175b"]
SMALL = ModelLimits("small", 12, 768, 12, 1024, 50304)
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
    assert full.layout == job.today
    assert full.reason == "today's layout, 512 of 512 devices, 1.00 of the ideal"
    assert less.layout == Layout(8, 4, 15)
    assert (less.micro_batches, less.fewest, less.idle, less.tier) == (69, 68, 24, 0)
    assert less.tokens / full.tokens >= 0.93
    assert less.reason == (
        "keeps tp 8 and pp 4: only dp 16 to 15, 480 of 504 devices, copies compute 69 or 68 micro-batches,"
        " 0.95 of the ideal"
    )
    even = [one for one in ranked_layouts(replace(job, even=True), [H100] * 63) if one.layout.tp == 8]
    kept = next(one for one in even if one.layout.pp == 4 and one.layout.cp == 1)
    assert kept.layout.dp == 8
    assert kept.tokens / full.tokens < 0.53


def test_a_rank_more_of_memory_is_not_used_than_95_percent() -> None:
    job = Job(SMALL, 8)
    alone = first(job, [Node(1)]).memory
    assert first(job, [Node(1, int(alone / 0.95) + 2)]).layout == Layout(1, 1, 1)
    with pytest.raises(NoLayout, match=r"leanest, tp 1, pp 1, dp 1, needs 2\.\d GiB a device, and 2\.\d GiB"):
        ranked_layouts(job, [Node(1, int(alone / 0.95) - 2)])


def test_the_layout_in_force_fits_whatever_the_estimate_says() -> None:
    job = Job(SMALL, 8)
    alone = first(job, [Node(1)]).memory
    running = replace(job, today=Layout(1, 1, 1))
    assert first(running, [Node(1, int(alone) + 1)]).layout == Layout(1, 1, 1)
    with pytest.raises(NoLayout):
        ranked_layouts(running, [Node(1, int(alone) - 1)])


def test_pp_changes_when_keeping_it_leaves_too_much_idle() -> None:
    job = Job(SMALL, 64, today=Layout(2, 2, 2))
    found = ranked_layouts(job, [Node(6)])
    assert found[0].layout == Layout(2, 1, 3)
    assert found[0].tier == 2
    assert "changes pp 2 to 1, dp 2 to 3" in found[0].reason
    assert "the best with tp 2 and pp 2 reaches 0." in found[0].reason
    kept = next(one for one in found if one.layout.shape == Layout(2, 2, 1))
    assert (kept.tier, kept.idle) == (3, 2)


def test_tp_changes_when_no_group_has_room() -> None:
    found = first(Job(SMALL, 64, today=Layout(4, 1, 2)), [Node(3), Node(3)])
    assert found.layout.tp in (1, 2, 3)
    assert found.reason.endswith("no layout with tp 4 fits")


def test_fixed_degrees_stay() -> None:
    job = Job(SMALL, 64, today=Layout(4, 2, 2), fixed=frozenset(("tp", "pp")))
    assert {(one.layout.tp, one.layout.pp) for one in ranked_layouts(job, [Node(8)] * 2)} == {(4, 2)}
    with pytest.raises(NoLayout, match="tp 4 is fixed, and the largest node has 3 devices"):
        ranked_layouts(job, [Node(3)] * 4)
    with pytest.raises(NoLayout, match=r"has its fixed degrees \(pp 2, tp 4\) on 7 devices"):
        ranked_layouts(job, [Node(7)])


def test_a_prime_number_of_devices_leaves_some_idle() -> None:
    job = Job(SMALL, 512, today=Layout(2, 2, 8))
    found = first(job, [Node(8)] * 3 + [Node(7)])
    assert (found.layout, found.idle) == (Layout(2, 2, 7), 3)
    whole = replace(job, every_device=True, even=True)
    with pytest.raises(NoLayout) as caught:
        ranked_layouts(whole, [Node(8)] * 3 + [Node(7)])
    assert str(caught.value) == (
        "no layout for small on 31 devices (a prime number) uses all of them and divides 512 micro-batches"
        " evenly; without this rule there is one"
    )


def test_slow_devices_are_left_idle_where_they_slow_the_others_too_much() -> None:
    job = Job(SMALL, 64)
    fast, slow = Node(8, 0, 1.0), Node(8, 0, 0.25)
    assert first(job, [fast, fast, fast, slow]).idle >= 8
    assert first(job, [fast, replace(slow, speed=0.95)]).layout.ranks == 16


def test_devices_with_too_little_memory_are_left_idle() -> None:
    job = Job(BIG, 64)
    assert first(job, [H100] * 8 + [Node(8, GIB)] * 8).layout.ranks <= 64
    with pytest.raises(NoLayout, match=r"and 76\.0 GiB of 80\.0 GiB may be used"):
        ranked_layouts(job, [H100] + [Node(8, GIB)] * 8)


def test_a_change_takes_longer_if_more_is_loaded() -> None:
    job = Job(SMALL, 64, today=Layout(2, 2, 2))
    by_shape = {one.layout.shape: one for one in ranked_layouts(job, [Node(8)] * 2)}
    rank = memory.parameters_of_rank(SMALL, Layout(2, 2, 1))
    kept = by_shape[Layout(2, 2, 1)]
    assert kept.layout.dp == 4
    assert kept.pause == pytest.approx(30 + 12 * rank.dense / 4 / 1e9)
    other = by_shape[Layout(1, 2, 1)]
    rank = memory.parameters_of_rank(SMALL, other.layout)
    assert other.pause == pytest.approx(30 + (12 / other.layout.dp + 2) * rank.dense / 1e9)
    today = {one.layout: one for one in ranked_layouts(job, [Node(8)])}[Layout(2, 2, 2)]
    assert today.pause == 30
    whole = replace(job, training=Training(sharded_optimizer=False))
    all_state = {one.layout.shape: one for one in ranked_layouts(whole, [Node(8)] * 2)}[Layout(2, 2, 1)]
    rank = memory.parameters_of_rank(SMALL, Layout(2, 2, 1))
    assert all_state.pause == pytest.approx(30 + 12 * rank.dense / 1e9)


def test_the_score_is_what_is_trained_until_the_next_change() -> None:
    job = Job(SMALL, 64, today=Layout(2, 2, 2))
    one = first(job, [Node(8)] * 2, Hardware(horizon=100.0))
    assert one.score == pytest.approx(one.tokens * (100 - one.pause))
    assert first(job, [Node(8)] * 2, Hardware(horizon=20.0)).score == 0


def test_a_new_job_has_no_ideal() -> None:
    one = first(Job(SMALL, 64), [Node(8)])
    assert (one.share, one.tier) == (0.0, 3)
    assert one.reason.startswith("no layout of today to keep, 8 of 8 devices")


@pytest.mark.parametrize(
    ("job", "word"),
    [
        (Job(SMALL, 0), "a global batch of 0 samples is no whole number of micro-batches of 1"),
        (Job(SMALL, 7, Training(2)), "a global batch of 7"),
        (Job(SMALL, 1, Training(2)), "a global batch of 1"),
        (Job(SMALL, 4, Training(0)), "micro-batches of 0"),
        (Job(SMALL, 4, fixed=frozenset(("tp",))), "tp: fixed, but no layout of today"),
        (Job(SMALL, 4, today=Layout(0, 1, 1)), "every degree is at least 1"),
        (
            Job(SMALL, 4, today=Layout(5, 1, 1)),
            r"small cannot have today's layout \(tp 5, pp 1, dp 1\): attention",
        ),
        (Job(SMALL, 4, today=Layout(1, 1, 5)), "4 micro-batches are too few for dp 5"),
        (Job(SMALL, 4, today=Layout(1, 3, 2, virtual=2)), "4 micro-batches are too few for dp 2"),
    ],
)
def test_an_impossible_job_is_refused(job: Job, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        ranked_layouts(job, [Node(8)])


def test_a_batch_limits_the_copies() -> None:
    assert first(Job(SMALL, 4, today=Layout(1, 1, 4)), [Node(8)]).layout.dp <= 4


def test_16384_devices_are_planned_for() -> None:
    """127 copies have room; 121 compute 17 micro-batches each at most, too, and leave six as spares."""
    found = first(Job(BIG, 2048, today=Layout(8, 16, 128)), [H100] * 2047)
    assert (found.layout, found.micro_batches) == (Layout(8, 16, 121), 17)
