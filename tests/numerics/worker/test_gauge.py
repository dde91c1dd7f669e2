"""The norm of the gradients: right for any size and type, and read from the device once."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outlast.numerics.worker.numerics import Gauge, bad_gradients
from tests.support.calls import Calls, until_a_number_is_read


def gauge_of(model: torch.nn.Module) -> Gauge:
    gauge = Gauge(model, torch.optim.SGD(model.parameters()))
    gauge.equip(1)
    return gauge


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [1.0, 1e20, 3e38, math.inf, math.nan])
def test_a_norm_is_not_finite_only_where_a_gradient_is_not(value: float, kind: torch.dtype) -> None:
    model = torch.nn.Linear(2, 2, dtype=kind)
    model.weight.grad = torch.full((2, 2), value, dtype=kind)
    model.bias.grad = torch.ones(2, dtype=kind)
    gauge = gauge_of(model)
    norm = gauge.read().norm
    assert norm is not None
    bad = [] if math.isfinite(value) else ["weight"]
    assert (math.isfinite(norm), gauge.bad, bad_gradients(model)) == (not bad, bad, bad)
    assert bad or norm == pytest.approx(math.hypot(2 * value, math.sqrt(2)), rel=0.01)


def test_the_norms_of_all_gradients_are_read_at_once() -> None:
    with FakeTensorMode():
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(4, device="cuda")) for _ in range(99))
        for one in model:
            one.grad = torch.empty_like(one)
        gauge = gauge_of(model)
        with Calls() as seen, until_a_number_is_read():
            gauge.read()  # a number without content
    assert not {"_to_copy", "item", "is_nonzero", "equal"} & seen.counts.keys()
    assert (seen.counts["_foreach_norm"], seen.counts["stack"]) == (1, 1)
    assert seen.counts["_local_scalar_dense"] <= 1
