"""Memory of the fullest rank, against sums by hand."""

from __future__ import annotations

import pytest

from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.limits import PRESETS, ModelLimits
from outlast.parallelism.policy.memory import USABLE, Footprint, Training, footprint, parameters_of_rank

MODEL = ModelLimits("m", 4, 8, 4, 16, 100)
ATTENTION, FFN, EMBEDDING = 4 * 64 + 32, 2 * 8 * 32, 800
LAYER_BYTES = 16 * 34 * 8  # of activations; the feed-forward part is four times as wide


def needs(layout: Layout, training: Training | None = None, model: ModelLimits = MODEL) -> Footprint:
    return footprint(model, layout, training or Training(), parameters_of_rank(model, layout))


def test_parameters_of_one_rank_are_those_of_the_model() -> None:
    rank = parameters_of_rank(MODEL, Layout(1, 1, 3))
    assert (rank.dense, rank.experts) == (MODEL.parameters, 0)
    untied = ModelLimits("m", 4, 8, 4, 16, 100, tied=False)
    assert parameters_of_rank(untied, Layout(1, 1, 1)).dense == untied.parameters


def test_a_stage_has_its_layers_and_one_embedding() -> None:
    untied = ModelLimits("m", 4, 8, 4, 16, 100, tied=False)
    for model in (MODEL, untied):
        rank = parameters_of_rank(model, Layout(2, 4, 1))
        assert rank.dense == (ATTENTION + FFN + EMBEDDING) / 2


def test_experts_are_divided_by_ep_and_tp() -> None:
    model = ModelLimits("m", 4, 8, 4, 16, 100, experts=8)
    rank = parameters_of_rank(model, Layout(2, 2, 4, ep=4))
    assert rank.dense == (2 * (ATTENTION + 8 * 8) + EMBEDDING) / 2
    assert rank.experts == 2 * 8 / 4 * FFN / 2


def test_state_is_6_bytes_and_12_shared_ones_a_parameter() -> None:
    everything = MODEL.parameters
    shared, whole = needs(Layout(1, 1, 1)), needs(Layout(1, 1, 1), Training(sharded_optimizer=False))
    assert shared.shared == 12 * everything
    assert whole.shared == 0
    assert whole.fixed - shared.fixed == 12 * everything
    assert needs(Layout(1, 1, 1, cp=2)).shared == 6 * everything


def test_experts_are_shared_by_fewer_ranks() -> None:
    model = ModelLimits("m", 4, 8, 4, 16, 100, experts=8)
    rank = parameters_of_rank(model, Layout(1, 2, 8, ep=4))
    found = needs(Layout(1, 2, 8, ep=4), model=model)
    assert found.shared == 12 * (rank.dense + 4 * rank.experts)
    assert found.fixed == 6 * (rank.dense + rank.experts)


def test_a_twentieth_of_a_device_is_left_free() -> None:
    assert USABLE == 0.95


def test_activations_of_one_stage() -> None:
    found = needs(Layout(1, 1, 1))
    assert found.in_flight == 4 * LAYER_BYTES + 16 * 16
    assert found.fixed == 6 * MODEL.parameters + 4 * 16 * (8 + 100)
    assert found.depth == 1
    assert found.needed(2, 5) == found.fixed + found.in_flight + 6 * MODEL.parameters
    assert needs(Layout(2, 1, 1)).fixed == found.fixed / 2


def test_activations_are_divided_by_tp_and_cp_and_multiplied_by_the_micro_batch() -> None:
    one, divided = needs(Layout(1, 2, 1)), needs(Layout(2, 2, 1))
    assert divided.in_flight == one.in_flight / 2
    assert needs(Layout(1, 2, 1, cp=2)).in_flight == one.in_flight / 2
    assert needs(Layout(1, 2, 1), Training(micro_batch=3)).in_flight == 3 * one.in_flight


def test_a_pipeline_keeps_as_many_micro_batches_as_it_has_stages() -> None:
    found = needs(Layout(1, 4, 1))
    assert found.in_flight == 4 * LAYER_BYTES + 16 * 16 * 4
    assert found.needed(1, 4) == found.needed(1, 9) == found.fixed + found.in_flight + found.shared
    assert found.needed(1, 1) == found.fixed + found.in_flight / 4 + found.shared


def test_virtual_stages_keep_more() -> None:
    plain, found = needs(Layout(1, 2, 1)), needs(Layout(1, 2, 1, virtual=2))
    assert found.needed(1, 2) - plain.needed(1, 2) == pytest.approx(plain.in_flight / 4)
    assert found.needed(1, 1) == found.needed(1, 2)
    assert found.depth == 1


def test_recomputation_keeps_the_input_of_a_layer() -> None:
    found = needs(Layout(1, 2, 1), Training(recompute=True))
    assert found.in_flight == 4 * 2 * 16 * 8 + 16 * 16 * 2
    assert found.fixed - needs(Layout(1, 2, 1)).fixed == LAYER_BYTES


def test_gated_parts_and_experts_keep_more() -> None:
    gated = ModelLimits("m", 4, 8, 4, 16, 100, ffn=32, gated=True)
    both = ModelLimits("m", 4, 8, 4, 16, 100, ffn=32, gated=True, experts=4, experts_per_token=3)
    plain = needs(Layout(1, 2, 1)).in_flight
    assert needs(Layout(1, 2, 1), model=gated).in_flight - plain == 4 * 16 * 2 * 32
    assert needs(Layout(1, 2, 1), model=both).in_flight - plain == 4 * 16 * (3 * 6 - 4) * 32


def test_the_largest_model_of_megatron_needs_what_its_estimate_says() -> None:
    """175B with tp 8, pp 8 and dp 2, as theoretical_memory_usage.py computes it."""
    model = PRESETS["gpt3-175b"]
    found = needs(Layout(8, 8, 2), model=model)
    weights = (12 * 96 * 12288**2 + 2 * 2 * 96 * 12288) / 8 + 51200 * 12288
    activations = 2048 * (34 * 12288 * 96 + (8 + 12288) * 8)
    assert found.needed(2, 8) == pytest.approx(weights / 8 * (6 + 12 / 2) + activations / 8, rel=1e-9)
