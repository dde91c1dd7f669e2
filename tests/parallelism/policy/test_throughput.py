"""The model of throughput, against sums by hand."""

from __future__ import annotations

import math

import pytest

from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.limits import ModelLimits
from outlast.parallelism.policy.memory import Training, parameters_of_rank
from outlast.parallelism.policy.throughput import Hardware, Pace, communication, compute, pace

MODEL = ModelLimits("m", 4, 8, 4, 16, 100, kv_heads=2)
LAYER = 2 * 8 * 2 * (4 + 2) + 32 + 2 * 8 * 32
UNIT = Hardware(flops=1.0, node_bandwidth=1.0, network_bandwidth=0.5)
WIDE = 2 * 16 * 8  # bytes of the activations of a micro-batch


def waits(layout: Layout, model: ModelLimits = MODEL, node: int = 8, micro_batch: int = 1) -> float:
    return communication(model, layout, Training(micro_batch), UNIT, node)


def test_a_step_is_micro_batches_bubble_and_gradients() -> None:
    times = Pace(micro=2.0, bubble=3.0, dense=10.0, experts=4.0)
    assert times.step(Layout(1, 4, 1), 5) == 16.0
    assert times.step(Layout(1, 4, 4, cp=2), 5) == 16 + 10 * 7 / 8 + 4 * 7 / 8
    assert times.step(Layout(1, 4, 4, cp=2, ep=4), 5) == 16 + 10 * 7 / 8 + 4 * 1 / 2


def test_63_of_64_nodes_in_the_bubble_alone() -> None:
    """tp 8, pp 4, 1024 micro-batches: 16 copies have 64 each, 15 have 69, and 8, which divide evenly, 128."""
    times = Pace(1.0, 3.0, 0.0, 0.0)
    full = times.step(Layout(8, 4, 16), 64)
    assert full / times.step(Layout(8, 4, 15), math.ceil(1024 / 15)) == pytest.approx(0.931, abs=5e-4)
    assert full / times.step(Layout(8, 4, 8), 128) == pytest.approx(0.511, abs=5e-4)


def test_operations_of_a_micro_batch() -> None:
    layers = 4 * (2 * LAYER + 4 * 16 * 8)
    output = 3 * 2 * 800
    assert compute(MODEL, Layout(1, 1, 1), Training()) == 16 * (3 * layers + output)
    assert compute(MODEL, Layout(1, 1, 1), Training(3, recompute=True)) == 48 * (4 * layers + output)
    assert compute(MODEL, Layout(1, 4, 1), Training()) == 16 * (3 * layers / 4 + output)
    assert compute(MODEL, Layout(2, 1, 1, cp=4), Training()) == 2 * (3 * layers + output)


def test_only_the_experts_of_a_token_compute() -> None:
    model = ModelLimits("m", 4, 8, 4, 16, 100, kv_heads=2, experts=8, experts_per_token=3)
    layers = 4 * (2 * (LAYER + 2 * 512 + 64) + 4 * 16 * 8)
    assert compute(model, Layout(1, 1, 8, ep=8), Training()) == 16 * (3 * layers + 4800)


def test_one_rank_communicates_with_nobody() -> None:
    assert waits(Layout(1, 1, 5)) == 0


def test_tensor_parallel_ranks_reduce_four_times_a_layer() -> None:
    assert waits(Layout(2, 1, 1)) == 4 * 4 * 2 * WIDE / 2
    assert waits(Layout(4, 1, 1)) == 4 * 4 * 2 * WIDE * 3 / 4
    assert waits(Layout(4, 1, 1), node=3) == 2 * waits(Layout(4, 1, 1))
    assert waits(Layout(2, 1, 1), micro_batch=3) == 3 * waits(Layout(2, 1, 1))


def test_keys_and_values_go_round_the_ring_three_times() -> None:
    keys = 2 * 4 * 2 * 2 * 2  # bytes: 4 tokens, keys and values, 2 heads of 2
    assert waits(Layout(1, 1, 1, cp=4)) == 4 * 3 * keys * 3
    assert waits(Layout(1, 1, 1, cp=4), node=3) == 2 * 4 * 3 * keys * 3
    both = waits(Layout(4, 1, 1, cp=2)) - 4 * 4 * 2 * WIDE / 2 * 3 / 4
    assert both == 4 * 3 * (2 * 8 * 2 * 2 * 1)  # a rank has one head at least


def test_tokens_go_to_their_experts_and_back() -> None:
    model = ModelLimits("m", 4, 8, 4, 16, 100, experts=8, experts_per_token=3)
    assert waits(Layout(1, 1, 8, ep=4), model) == 4 * 4 * 3 * WIDE * 3 / 4
    assert waits(Layout(1, 1, 8, ep=4), model, node=3) == 2 * 4 * 4 * 3 * WIDE * 3 / 4
    tensors = 4 * 4 * 2 * WIDE / 2
    assert waits(Layout(2, 1, 8, ep=4), model) - tensors == 4 * 4 * 3 * WIDE / 2 * 3 / 4


def test_stages_pass_activations_on() -> None:
    assert waits(Layout(1, 2, 1)) == 2 * WIDE / 0.5
    assert waits(Layout(1, 2, 1, virtual=2)) == 4 * WIDE / 0.5
    assert waits(Layout(2, 2, 1)) == 2 * 4 * 2 * WIDE / 2 + WIDE / 0.5


def test_the_pace_of_a_layout() -> None:
    model = ModelLimits("m", 4, 8, 4, 16, 100, experts=8)
    layout = Layout(2, 4, 8, ep=4, virtual=2)
    rank = parameters_of_rank(model, layout)
    hardware = Hardware(flops=7.0, node_bandwidth=3.0, network_bandwidth=0.5)
    found = pace((model, Training()), layout, rank, hardware, 4)
    waited = communication(model, layout, Training(), hardware, 4)
    assert found.micro == compute(model, layout, Training()) / 7.0 + waited
    assert found.bubble == 1.5
    assert (found.dense, found.experts) == (12 * rank.dense, 12 * rank.experts)


def test_the_defaults_are_those_of_the_documents() -> None:
    assert Hardware() == Hardware(140e12, 300e9, 25e9, 1e9, 30.0, 0.0)


@pytest.mark.parametrize(
    ("devices", "hours"), [(8, 24.0), (2083, 24.0), (2084, 50_000 / 2084), (16384, 50_000 / 16384)]
)
def test_the_next_change_is_a_failure_or_a_repair(devices: int, hours: float) -> None:
    assert Hardware().until_change(devices) == pytest.approx(hours * 3600)
    assert Hardware(horizon=7.0).until_change(devices) == 7.0
