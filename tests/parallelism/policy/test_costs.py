"""Memory of the fullest rank and the model of throughput, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.limits import PRESETS, ModelLimits
from outlast.parallelism.policy.memory import USABLE, Footprint, Training, footprint, parameters_of_rank
from outlast.parallelism.policy.throughput import Hardware, Pace, communication, compute, pace
from tests.parallelism.policy.builders import model

MODEL, MIXED = model(), model(experts=8)
ONE = Layout(1, 1, 1)
ATTENTION, FFN, EMBEDDING = 4 * 64 + 32, 2 * 8 * 32, 800
LAYER_BYTES = 16 * 34 * 8  # of activations; the feed-forward part is four times as wide
INPUT = 16 * 16  # bytes of activations that each stage keeps besides


def needs(layout: Layout, training: Training | None = None, of: ModelLimits = MODEL) -> Footprint:
    return footprint(of, layout, training or Training(), parameters_of_rank(of, layout))


@pytest.mark.parametrize(
    ("of", "layout", "dense", "experts"),
    [
        (MODEL, Layout(1, 1, 3), MODEL.parameters, 0),
        (model(tied=False), ONE, model(tied=False).parameters, 0),
        (MODEL, Layout(2, 4, 1), (ATTENTION + FFN + EMBEDDING) / 2, 0),
        (model(tied=False), Layout(2, 4, 1), (ATTENTION + FFN + EMBEDDING) / 2, 0),
        (MIXED, Layout(2, 2, 4, ep=4), (2 * (ATTENTION + 64) + EMBEDDING) / 2, 2 * 8 / 4 * FFN / 2),
    ],
    ids=["whole", "whole, untied", "a stage", "a stage, untied", "experts by ep and tp"],
)
def test_parameters_of_the_fullest_rank(
    of: ModelLimits, layout: Layout, dense: float, experts: float
) -> None:
    found = parameters_of_rank(of, layout)
    assert (found.dense, found.experts) == (dense, experts)


def test_state_is_6_bytes_and_12_shared_ones_a_parameter() -> None:
    shared, whole = needs(ONE), needs(ONE, Training(sharded_optimizer=False))
    assert (shared.shared, whole.shared) == (12 * MODEL.parameters, 0)
    assert whole.fixed - shared.fixed == 12 * MODEL.parameters
    assert needs(Layout(cp=2)).shared == 6 * MODEL.parameters
    layout = Layout(1, 2, 8, ep=4)
    rank, found = parameters_of_rank(MIXED, layout), needs(layout, of=MIXED)
    assert found.shared == 12 * (rank.dense + 4 * rank.experts), "experts are shared by fewer ranks"
    assert found.fixed == 6 * (rank.dense + rank.experts)


def test_a_twentieth_of_a_device_is_left_free() -> None:
    assert USABLE == 0.95


@pytest.mark.parametrize(
    ("layout", "training", "in_flight"),
    [
        (ONE, Training(), 4 * LAYER_BYTES + INPUT),
        (Layout(1, 2, 1), Training(), 4 * LAYER_BYTES + 2 * INPUT),
        (Layout(2, 2, 1), Training(), (4 * LAYER_BYTES + 2 * INPUT) / 2),
        (Layout(1, 2, 1, cp=2), Training(), (4 * LAYER_BYTES + 2 * INPUT) / 2),
        (Layout(1, 2, 1), Training(micro_batch=3), 3 * (4 * LAYER_BYTES + 2 * INPUT)),
        (Layout(1, 2, 1), Training(recompute=True), 4 * 2 * 16 * 8 + 2 * INPUT),
        (Layout(1, 4, 1), Training(), 4 * LAYER_BYTES + 4 * INPUT),
    ],
    ids=["one", "stages", "by tp", "by cp", "times the micro-batch", "recomputed", "deep pipeline"],
)
def test_activations(layout: Layout, training: Training, in_flight: float) -> None:
    assert needs(layout, training).in_flight == in_flight


def test_what_is_needed_of_a_device() -> None:
    found = needs(ONE)
    assert found.fixed == 6 * MODEL.parameters + 4 * 16 * (8 + 100)
    assert found.depth == 1
    assert found.needed(2, 5) == found.fixed + found.in_flight + 6 * MODEL.parameters
    assert needs(Layout(2, 1, 1)).fixed == found.fixed / 2
    deep = needs(Layout(1, 4, 1))
    assert deep.needed(1, 4) == deep.needed(1, 9) == deep.fixed + deep.in_flight + deep.shared
    assert deep.needed(1, 1) == deep.fixed + deep.in_flight / 4 + deep.shared
    plain, virtual = needs(Layout(1, 2, 1)), needs(Layout(1, 2, 1, virtual=2))
    assert virtual.needed(1, 2) - plain.needed(1, 2) == pytest.approx(plain.in_flight / 4)
    assert virtual.needed(1, 1) == virtual.needed(1, 2)
    assert virtual.depth == 1
    assert needs(Layout(1, 2, 1), Training(recompute=True)).fixed - plain.fixed == LAYER_BYTES


@pytest.mark.parametrize(
    ("fields", "more"),
    [({}, 2), ({"experts": 4, "experts_per_token": 3}, 3 * 6 - 4)],
    ids=["gated", "gated experts"],
)
def test_gated_parts_and_experts_keep_more(fields: dict[str, Any], more: int) -> None:
    gated = model(ffn=32, gated=True, **fields)
    plain, found = (needs(Layout(1, 2, 1), of=one).in_flight for one in (MODEL, gated))
    assert found - plain == 4 * 16 * more * 32


def test_the_largest_model_of_megatron_needs_what_its_estimate_computes() -> None:
    """175B with tp 8, pp 8 and dp 2, as theoretical_memory_usage.py computes it."""
    weights = (12 * 96 * 12288**2 + 2 * 2 * 96 * 12288) / 8 + 51200 * 12288
    activations = 2048 * (34 * 12288 * 96 + (8 + 12288) * 8)
    found = needs(Layout(8, 8, 2), of=PRESETS["gpt3-175b"])
    assert found.needed(2, 8) == pytest.approx(weights / 8 * (6 + 12 / 2) + activations / 8, rel=1e-9)


# Throughput

FEW = model(kv_heads=2)
LAYER = 2 * 8 * 2 * (4 + 2) + 32 + 2 * 8 * 32
LAYERS = 4 * (2 * LAYER + 4 * 16 * 8)
OUTPUT = 3 * 2 * 800
UNIT = Hardware(flops=1.0, node_bandwidth=1.0, network_bandwidth=0.5)
WIDE = 2 * 16 * 8  # bytes of the activations of a micro-batch
KEYS = 2 * 4 * 2 * 2 * 2  # bytes: 4 tokens, keys and values, 2 heads of 2
TENSORS = 4 * 4 * 2 * WIDE / 2
EXPERTS = model(experts=8, experts_per_token=3)


@pytest.mark.parametrize(
    ("layout", "seconds"),
    [
        (Layout(1, 4, 1), 16.0),
        (Layout(1, 4, 4, cp=2), 16 + 10 * 7 / 8 + 4 * 7 / 8),
        (Layout(1, 4, 4, cp=2, ep=4), 16 + 10 * 7 / 8 + 4 * 1 / 2),
    ],
)
def test_a_step_is_micro_batches_bubble_and_gradients(layout: Layout, seconds: float) -> None:
    assert Pace(micro=2.0, bubble=3.0, dense=10.0, experts=4.0).step(layout, 5) == seconds


def test_63_of_64_nodes_in_the_bubble_alone() -> None:
    """tp 8, pp 4, 1024 micro-batches: 16 copies have 64 each, 15 have 69, and 8, which divide evenly, 128."""
    times = Pace(1.0, 3.0, 0.0, 0.0)
    full = times.step(Layout(8, 4, 16), 64)
    assert full / times.step(Layout(8, 4, 15), math.ceil(1024 / 15)) == pytest.approx(0.931, abs=5e-4)
    assert full / times.step(Layout(8, 4, 8), 128) == pytest.approx(0.511, abs=5e-4)


@pytest.mark.parametrize(
    ("of", "layout", "training", "operations"),
    [
        (FEW, ONE, Training(), 16 * (3 * LAYERS + OUTPUT)),
        (FEW, ONE, Training(3, recompute=True), 48 * (4 * LAYERS + OUTPUT)),
        (FEW, Layout(1, 4, 1), Training(), 16 * (3 * LAYERS / 4 + OUTPUT)),
        (FEW, Layout(2, 1, 1, cp=4), Training(), 2 * (3 * LAYERS + OUTPUT)),
        (
            replace(FEW, experts=8, experts_per_token=3),  # only the experts of a token compute
            Layout(1, 1, 8, ep=8),
            Training(),
            16 * (3 * 4 * (2 * (LAYER + 2 * 512 + 64) + 4 * 16 * 8) + OUTPUT),
        ),
    ],
    ids=["one", "recomputed", "stages", "tp and cp", "experts"],
)
def test_operations_of_a_micro_batch(
    of: ModelLimits, layout: Layout, training: Training, operations: float
) -> None:
    assert compute(of, layout, training) == operations


@pytest.mark.parametrize(
    ("of", "layout", "node", "micro_batch", "seconds"),
    [
        (FEW, Layout(1, 1, 5), 8, 1, 0),
        (FEW, Layout(2, 1, 1), 8, 1, TENSORS),
        (FEW, Layout(4, 1, 1), 8, 1, TENSORS * 3 / 2),
        (FEW, Layout(4, 1, 1), 3, 1, 2 * TENSORS * 3 / 2),
        (FEW, Layout(2, 1, 1), 8, 3, 3 * TENSORS),
        (FEW, Layout(cp=4), 8, 1, 4 * 3 * KEYS * 3),
        (FEW, Layout(cp=4), 3, 1, 2 * 4 * 3 * KEYS * 3),
        (FEW, Layout(4, 1, 1, cp=2), 8, 1, 4 * 4 * 2 * WIDE / 2 * 3 / 4 + 4 * 3 * (2 * 8 * 2 * 2)),
        (EXPERTS, Layout(1, 1, 8, ep=4), 8, 1, 4 * 4 * 3 * WIDE * 3 / 4),
        (EXPERTS, Layout(1, 1, 8, ep=4), 3, 1, 2 * 4 * 4 * 3 * WIDE * 3 / 4),
        (EXPERTS, Layout(2, 1, 8, ep=4), 8, 1, TENSORS + 4 * 4 * 3 * WIDE / 2 * 3 / 4),
        (FEW, Layout(1, 2, 1), 8, 1, 2 * WIDE / 0.5),
        (FEW, Layout(1, 2, 1, virtual=2), 8, 1, 4 * WIDE / 0.5),
        (FEW, Layout(2, 2, 1), 8, 1, TENSORS / 2 + WIDE / 0.5),
    ],
    ids=[
        *("nobody", "tp", "tp 4", "tp over the network", "larger micro-batch", "cp", "cp over the network"),
        *("tp and cp: one head at least", "ep", "ep over the network", "tp and ep"),
        *("pp", "virtual stages", "tp and pp"),
    ],
)
def test_seconds_of_communication(
    of: ModelLimits, layout: Layout, node: int, micro_batch: int, seconds: float
) -> None:
    assert communication(of, layout, Training(micro_batch), UNIT, node) == seconds


def test_the_pace_of_a_layout() -> None:
    layout, hardware = Layout(2, 4, 8, ep=4, virtual=2), Hardware(7.0, 3.0, 0.5)
    rank = parameters_of_rank(MIXED, layout)
    found = pace((MIXED, Training()), layout, rank, hardware, 4)
    waits = communication(MIXED, layout, Training(), hardware, 4)
    assert found.micro == compute(MIXED, layout, Training()) / 7.0 + waits
    assert (found.bubble, found.dense, found.experts) == (1.5, 12 * rank.dense, 12 * rank.experts)


def test_the_defaults_are_those_of_the_documents() -> None:
    assert Hardware() == Hardware(140e12, 300e9, 25e9, 1e9, 30.0, 0.0)


@pytest.mark.parametrize(
    ("devices", "hours"), [(8, 24.0), (2083, 24.0), (2084, 50_000 / 2084), (16384, 50_000 / 16384)]
)
def test_the_next_change_is_a_failure_or_a_repair(devices: int, hours: float) -> None:
    assert Hardware().until_change(devices) == pytest.approx(hours * 3600)
    assert Hardware(horizon=7.0).until_change(devices) == 7.0
