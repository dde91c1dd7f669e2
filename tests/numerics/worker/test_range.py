"""Gradients whose squares do not fit their type, and gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from outlast.numerics.worker.numerics import Gauge, bad_gradients


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [1.0, 1e20, 3e38, math.inf, math.nan])
def test_a_norm_is_not_finite_only_where_a_gradient_is_not(value: float, kind: torch.dtype) -> None:
    model = torch.nn.Linear(2, 2, dtype=kind)
    model.weight.grad = torch.full((2, 2), value, dtype=kind)
    model.bias.grad = torch.ones(2, dtype=kind)
    gauge = Gauge(model, torch.optim.SGD(model.parameters()))
    gauge.equip(1)
    norm = gauge.read().norm
    assert norm is not None
    bad = [] if math.isfinite(value) else ["weight"]
    assert (math.isfinite(norm), gauge.bad, bad_gradients(model)) == (not bad, bad, bad)
    if not bad:
        assert norm == pytest.approx(math.hypot(2 * value, math.sqrt(2)), rel=0.01)
