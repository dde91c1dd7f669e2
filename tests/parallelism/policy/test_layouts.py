"""Which layouts a table, a model and a checkpoint allow, and how nodes are pooled."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.parallelism.policy.checkpoints import FORMATS, Loadable, loadable
from outlast.parallelism.policy.degrees import NAMES, Layout, ParallelismOptions, layout_for, refusals
from outlast.parallelism.policy.layouts import Node, Pool, divisors, pools, problems, shapes
from outlast.parallelism.policy.limits import ModelLimits
from tests.parallelism.policy.builders import GIB, model, nodes

FEW = st.integers(1, 64)
TABLE = ParallelismOptions([{"tp": 2, "pp": 2, "dp": 2}, {"tp": 2, "pp": 2}, {"tp": 2}, {}])


@given(st.builds(Layout, tp=FEW, pp=FEW, dp=FEW, cp=FEW))
def test_a_layout_is_read_back_from_its_text(layout: Layout) -> None:
    assert Layout.parse(layout.text) == layout
    assert Layout.parse("tp=2,dp=4") == Layout(tp=2, dp=4), "the other dimensions are 1"


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=-2", "tp=2,tp=2", "xp=2", "tp=2;dp=2", "dp=4,ep=3"])
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=repr(text)):
        Layout.parse(text)


def test_a_layout_has_ranks_a_shape_and_a_text() -> None:
    layout = Layout(2, 3, 5, 7, 1, 2)
    assert (layout.ranks, layout.shape, layout.problem()) == (210, Layout(2, 3, 1, 7, 1, 2), "")
    assert str(layout) == "tp 2, pp 3, dp 5, cp 7, virtual stages 2"
    assert str(Layout(1, 1, 4, ep=2)) == "tp 1, pp 1, dp 4, ep 2"


def test_each_number_of_ranks_has_its_layout() -> None:
    assert TABLE.problems() == ()
    assert [one.ranks for one in TABLE.chosen] == [8, 4, 2, 1]
    assert layout_for(TABLE.chosen, 4) == Layout(tp=2, pp=2)
    assert layout_for(TABLE.chosen, 6) is None
    (refusal,) = refusals(TABLE.chosen, {"eight": 8, "six": 6})
    assert refusal.startswith("six")
    assert refusal.endswith("1, 2, 4, 8")
    assert refusals((), {"six": 6}) == []


PLANNED = ParallelismOptions(model="gpt3-345m", global_batch=64, preferred={"tp": 2}, fixed=["tp"])


def listed(*layouts: dict[str, int]) -> ParallelismOptions:
    return ParallelismOptions(list(layouts))


def planned(**changes: Any) -> ParallelismOptions:
    return replace(PLANNED, **changes)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (planned(), None),
        (planned(preferred={"tp": 2, "pp": 1}), None),
        (listed({"tp": 0}), r"layouts\.0: .*tp.*0"),
        (listed({}, {"dp": 4, "ep": 3}), r"layouts\.1: .*ep.*3.*4"),
        (listed({"tp": 2, "virtual": 2}), r"layouts\.0: .*virtual.*2.*pp"),
        (listed({"tp": 2}, {"pp": 2}), r"layouts\.1: .*2.*layouts\.0"),
        (listed({"vp": 2}), r"layouts\.0: .*vp.*tp, pp, dp, cp, ep, virtual"),
        (planned(layouts=[{}]), "layouts, model:"),
        (planned(global_batch=0), "global_batch:"),
        (planned(sequence=-1), "sequence: .*-1.*0"),
        (planned(micro_batch=0), "micro_batch: .*0.*1"),
        (planned(memory=math.nan), "memory: .*nan.*0"),
        (planned(memory=math.inf), "memory: .*inf.*0"),
        (planned(preferred={"tp": 2, "pp": 0}), r"preferred\.pp: .*0.*tp, pp, dp"),
        (planned(preferred={"vp": 2}), r"preferred\.vp: .*2.*tp, pp, dp, cp, ep, virtual"),
        (planned(fixed=["dp"]), "fixed: .*dp.*tp, pp, cp, ep"),
        (planned(preferred={}), "fixed: .*preferred"),
    ],
)
def test_what_is_wrong_in_the_table_is_named(options: ParallelismOptions, named: str | None) -> None:
    found = options.problems()
    assert len(found) == (named is not None)
    for line in found:
        assert re.match(named or "", line), line


def test_every_option_of_the_planner_needs_a_model() -> None:
    options = ParallelismOptions([], "", 1, 1, 2, 1.0, {"tp": 2}, ["tp"], True, True, True)
    names = [spec.name for spec in fields(options) if spec.name not in ("layouts", "model")]
    assert [line.partition(":")[0] for line in options.problems()] == names


# What a checkpoint allows

TODAY = Layout(2, 2, 4, 1, 2)
CHANGES = {"dp": 2, "tp": 1, "pp": 1, "cp": 2, "ep": 1, "virtual": 2}
ALL = set(CHANGES)


@pytest.mark.parametrize(
    ("form", "allowed", "instead"),
    [
        ("outlast", ALL, ""),
        ("dcp", ALL, ""),
        ("megatron", {"dp"}, "--dist-ckpt-optim-fully-reshardable"),
        ("megatron-fully-reshardable", ALL, ""),
        ("deepspeed", set(), ""),
        ("deepspeed-universal", ALL - {"ep"}, ""),
        ("torch-save", set(), "DCP"),
    ],
)
def test_what_each_format_allows_to_change(form: str, allowed: set[str], instead: str) -> None:
    assert loadable(form, TODAY, TODAY) == Loadable(True, "")
    answers = {name: loadable(form, TODAY, replace(TODAY, **{name: CHANGES[name]})) for name in NAMES}
    assert {name for name, one in answers.items() if one.can} == allowed
    for name, one in answers.items():
        assert one.can or (name in one.why and form in one.why and instead in one.why)


def test_every_format_is_known_and_dtensors_are_a_condition_of_ours() -> None:
    assert set(FORMATS) >= {"outlast", "dcp", "torch-save"}
    assert "DTensors" in loadable("outlast", TODAY, replace(TODAY, dp=2)).why
    assert "tp, pp" in loadable("megatron", TODAY, Layout(1, 1, 8, 1, 2)).why


# What a model allows

MODEL = ModelLimits("m", 12, 48, 8, 64, 100, kv_heads=2, ffn=96, experts=6)


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (Layout(1, 1, 1), []),
        (Layout(2, 3, 1), []),
        (Layout(4, 1, 1), []),  # a multiple of the heads of keys and values
        (Layout(3, 1, 1), ["8 % tp 3", "2.*tp 3", "64 % 3"]),
        (Layout(16, 1, 1), ["8 % tp 16"]),
        (Layout(1, 5, 1), ["12 % (pp 5 x virtual 1)"]),
        (Layout(1, 4, 1, virtual=2), ["12 % (pp 4 x virtual 2)"]),
        (Layout(1, 2, 1, virtual=2), []),
        (Layout(1, 1, 1, virtual=2), ["pp"]),
        (Layout(1, 1, 1, cp=32), []),
        (Layout(1, 1, 1, cp=64), ["64 % 128 (tp 1, cp 64)"]),
        (Layout(2, 1, 1, cp=16), []),
        (Layout(2, 1, 1, cp=32), ["64 % 128"]),
        (Layout(1, 1, 6, ep=6), []),
        (Layout(1, 1, 3, cp=2, ep=6), []),
        (Layout(1, 1, 4, ep=6), ["dp 4 x cp 1 % ep 6"]),
        (Layout(1, 1, 3, cp=2, ep=4), ["6 % ep 4", "dp 3 x cp 2 % ep 4"]),
        (Layout(1, 1, 4, ep=4), ["6 % ep 4"]),
    ],
    ids=str,
)
def test_each_rule(layout: Layout, named: list[str]) -> None:
    found = problems(MODEL, layout)
    assert len(found) == len(named), found
    for words, line in zip(named, found, strict=True):
        assert all(word in line for word in words.split(".*")), line


def test_tp_divides_hidden_size_and_ffn_and_without_experts_ep_is_1() -> None:
    odd = ModelLimits("m", 2, 12, 8, 64, 100, ffn=20, head_size=4)
    first, second = problems(odd, Layout(8, 1, 1))
    assert "12 % tp 8" in first
    assert "20 % tp 8" in second
    assert len(problems(model(), Layout(1, 1, 2, ep=2))) == 1


def test_ranks_that_divide_a_sequence_need_it_divided_twice_over() -> None:
    found = [
        (one.tp, one.pp, one.cp) for one in shapes(model(layers=2, sequence=20), Pool(0, 1.0, ((8, 1),)), ())
    ]
    assert found == [
        *((1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 1, 5)),
        *((2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1)),
    ]


MODELS = st.builds(
    ModelLimits,
    st.just("m"),
    st.integers(1, 8),
    st.sampled_from([8, 12, 16, 48]),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([8, 12, 32, 64]),
    st.just(100),
    kv_heads=st.sampled_from([1, 2]),
    ffn=st.sampled_from([16, 24, 48]),
    experts=st.sampled_from([0, 2, 4]),
)


@given(MODELS, st.lists(st.integers(1, 8), min_size=1, max_size=3), st.sampled_from([(), (1,), (2,), (3,)]))
def test_shapes_are_all_that_the_rules_allow(
    of: ModelLimits, sizes: list[int], virtual: tuple[int, ...]
) -> None:
    (pool,) = pools([Node(size) for size in sizes])
    most = sum(sizes)
    wanted = set()
    for tp in range(1, max(sizes) + 1):
        groups = sum(size // tp for size in sizes)
        for pp in range(1, most + 1):
            for cp in range(1, most + 1):
                for ep in range(1, 5):
                    for chunks in {1, *virtual} if pp > 1 else {1}:
                        for dp in range(1, groups // (pp * cp) + 1):
                            layout = Layout(tp, pp, dp, cp, ep, chunks)
                            if not problems(of, layout):
                                wanted.add(layout)
                                break
    found = list(shapes(of, pool, virtual))
    assert len(found) == len(set(found))
    assert set(found) == wanted


@pytest.mark.parametrize(
    ("number", "found"), [(1, [1]), (2, [1, 2]), (36, [1, 2, 3, 4, 6, 9, 12, 18, 36]), (31, [1, 31])]
)
def test_divisors(number: int, found: list[int]) -> None:
    assert divisors(number) == found


# Nodes


def test_groups_of_tensor_parallel_ranks_lie_within_nodes() -> None:
    pool = Pool(0, 1.0, ((7, 2), (8, 3)))
    assert [pool.groups(tp) for tp in (1, 2, 4, 8)] == [38, 18, 8, 3]
    assert (pool.devices, pool.largest) == (38, 8)


@pytest.mark.parametrize(
    ("of", "found"),
    [
        ([*nodes(5, 8, 1), *nodes(1, 6, 1)], [(1, 1.0, ((6, 1), (8, 5)))]),
        ([*nodes(1, 8, 1, 0.5), *nodes(2, 8, 2)], [(1, 0.5, ((8, 3),)), (2, 1.0, ((8, 2),))]),
        (
            [*nodes(1, 4, 1), *nodes(1, 4, 2, 0.5)],
            [(1, 0.5, ((4, 2),)), (1, 1.0, ((4, 1),)), (2, 0.5, ((4, 1),))],
        ),
    ],
    ids=["equal", "slow", "crossed"],
)
def test_nodes_are_a_pool_for_each_least_memory_and_speed(of: list[Node], found: list[Any]) -> None:
    assert pools(of) == [Pool(gib * GIB, speed, sizes) for gib, speed, sizes in found]


KINDS = [Node(1, 0, 1 + index / 100) for index in range(17)]


@pytest.mark.parametrize(
    "of", [[], nodes(1, 0), [Node(1, -1)], nodes(1, 1, 0, 0.0), nodes(1, 1, 0, math.inf), KINDS]
)
def test_impossible_nodes_are_refused(of: list[Node]) -> None:
    with pytest.raises(UsageError):
        pools(of)


def test_sixteen_kinds_of_device_are_planned_for() -> None:
    assert len(pools(KINDS[:16])) == 16
