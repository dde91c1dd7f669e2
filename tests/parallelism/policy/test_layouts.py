"""Which layouts a model allows, and how nodes are pooled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node, Pool, divisors, pools, problems, shapes
from outlast.parallelism.policy.limits import ModelLimits

MODEL = ModelLimits("m", 12, 48, 8, 64, 100, kv_heads=2, ffn=96, experts=6)
GIB = 2**30


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(1, 1, 1), []),
        (Layout(2, 3, 1), []),
        (Layout(4, 1, 1), []),  # a multiple of the heads of keys and values
        (Layout(3, 1, 1), ["attention heads 8 % tp 3", "neither divides", "sequence 64 % 3"]),
        (Layout(16, 1, 1), ["attention heads 8 % tp 16"]),
        (Layout(1, 5, 1), ["layers 12 % (pp 5 x virtual 1) is 2"]),
        (Layout(1, 4, 1, virtual=2), ["layers 12 % (pp 4 x virtual 2) is 4"]),
        (Layout(1, 2, 1, virtual=2), []),
        (Layout(1, 1, 1, virtual=2), ["2 virtual stages need pp of at least 2"]),
        (Layout(1, 1, 1, cp=32), []),
        (Layout(1, 1, 1, cp=64), ["sequence 64 % 128 (tp 1, cp 64) is 64"]),
        (Layout(2, 1, 1, cp=16), []),
        (Layout(2, 1, 1, cp=32), ["sequence 64 % 128"]),
        (Layout(1, 1, 6, ep=6), []),
        (Layout(1, 1, 3, cp=2, ep=6), []),
        (Layout(1, 1, 4, ep=6), ["dp 4 x cp 1 % ep 6 is 4"]),
        (Layout(1, 1, 3, cp=2, ep=4), ["experts 6 % ep 4 is 2", "dp 3 x cp 2 % ep 4 is 2"]),
        (Layout(1, 1, 4, ep=4), ["experts 6 % ep 4 is 2"]),
    ],
    ids=str,
)
def test_each_rule(layout: Layout, words: list[str]) -> None:
    found = problems(MODEL, layout)
    assert len(found) == len(words), found
    assert all(word in line for word, line in zip(words, found, strict=True)), found


def test_tp_divides_hidden_size_and_ffn() -> None:
    model = ModelLimits("m", 2, 12, 8, 64, 100, ffn=20, head_size=4)
    assert problems(model, Layout(8, 1, 1)) == ["hidden size 12 % tp 8 is 4", "ffn 20 % tp 8 is 4"]


def test_a_model_without_experts_has_ep_1() -> None:
    assert problems(ModelLimits("m", 2, 8, 4, 64, 100), Layout(1, 1, 2, ep=2)) == ["experts 0 % ep 2 is 1"]


def test_a_layout_tells_its_ranks_and_its_shape() -> None:
    layout = Layout(2, 3, 5, 7, 1, 2)
    assert layout.ranks == 210
    assert layout.shape == Layout(2, 3, 1, 7, 1, 2)
    assert str(layout) == "tp 2, pp 3, dp 5, cp 7, virtual stages 2"
    assert str(Layout(1, 1, 4, ep=2)) == "tp 1, pp 1, dp 4, ep 2"


def test_groups_of_tensor_parallel_ranks_lie_within_nodes() -> None:
    pool = Pool(0, 1.0, ((7, 2), (8, 3)))
    assert [pool.groups(tp) for tp in (1, 2, 4, 8)] == [38, 18, 8, 3]
    assert (pool.devices, pool.largest) == (38, 8)


def test_equal_nodes_are_one_pool() -> None:
    assert pools([Node(8, GIB)] * 5 + [Node(6, GIB)]) == [Pool(GIB, 1.0, ((6, 1), (8, 5)))]


def test_unequal_nodes_are_a_pool_for_each_least_memory_and_speed() -> None:
    small, fast = Node(8, GIB, 0.5), Node(8, 2 * GIB, 1.0)
    assert pools([small, fast, fast]) == [
        Pool(GIB, 0.5, ((8, 3),)),
        Pool(2 * GIB, 1.0, ((8, 2),)),
    ]
    crossed = pools([Node(4, GIB, 1.0), Node(4, 2 * GIB, 0.5)])
    assert crossed == [
        Pool(GIB, 0.5, ((4, 2),)),
        Pool(GIB, 1.0, ((4, 1),)),
        Pool(2 * GIB, 0.5, ((4, 1),)),
    ]


@pytest.mark.parametrize(
    ("nodes", "word"),
    [
        ([], "no device is left"),
        ([Node(0)], "at least one device"),
        ([Node(1, -1)], "at least one device"),
        ([Node(1, 0, 0.0)], "a speed above 0"),
        ([Node(1, 0, float("inf"))], "a speed above 0"),
        ([Node(1, 0, 1 + index / 100) for index in range(17)], "more than 16 kinds"),
    ],
)
def test_impossible_nodes_are_refused(nodes: list[Node], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        pools(nodes)


def test_sixteen_kinds_of_device_are_planned_for() -> None:
    assert len(pools([Node(1, 0, 1 + index / 100) for index in range(16)])) == 16


@pytest.mark.parametrize(
    ("number", "found"),
    [(1, [1]), (2, [1, 2]), (36, [1, 2, 3, 4, 6, 9, 12, 18, 36]), (31, [1, 31])],
)
def test_divisors(number: int, found: list[int]) -> None:
    assert divisors(number) == found


def test_ranks_that_divide_a_sequence_need_it_divided_twice_over() -> None:
    model = ModelLimits("m", 2, 8, 4, 20, 100)
    found = [(one.tp, one.pp, one.cp) for one in shapes(model, Pool(0, 1.0, ((8, 1),)), ())]
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
    model: ModelLimits, sizes: list[int], virtual: tuple[int, ...]
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
                            if not problems(model, layout):
                                wanted.add(layout)
                                break
    found = list(shapes(model, pool, virtual))
    assert len(found) == len(set(found))
    assert set(found) == wanted
