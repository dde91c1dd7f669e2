"""How often a guarded step waits for the device."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outlast.numerics.worker.numerics import Gauge
from tests.support.calls import Calls, until_a_number_is_read


def test_the_norms_of_all_gradients_are_read_at_once() -> None:
    with FakeTensorMode():
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(4, device="cuda")) for _ in range(99))
        for one in model:
            one.grad = torch.empty_like(one)
        gauge = Gauge(model, torch.optim.SGD(model.parameters()))
        gauge.equip(1)
        with Calls() as seen, until_a_number_is_read():
            gauge.read()  # a number without content
    reads = {"_to_copy", "item", "is_nonzero", "equal"}
    assert not reads & seen.counts.keys()
    assert (seen.counts["_foreach_norm"], seen.counts["stack"]) == (
        1,
        1,
    )  # then they are read
    assert seen.counts["_local_scalar_dense"] <= 1
