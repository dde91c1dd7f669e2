"""How often a guarded step waits for the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from outlast.numerics.worker.numerics import Gauge


class Calls(TorchDispatchMode):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_norms_of_all_gradients_are_read_at_once() -> None:
    with FakeTensorMode():
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(4, device="cuda")) for _ in range(99))
        for one in model:
            one.grad = torch.empty_like(one)
        gauge = Gauge(model, torch.optim.SGD(model.parameters()))
        gauge.equip(1)
        with Calls() as seen, pytest.raises(RuntimeError, match="_local_scalar_dense"):
            gauge.read()  # a number without content
    reads = {"_to_copy", "item", "is_nonzero", "equal"}
    assert not reads & seen.counts.keys()
    assert (seen.counts["_foreach_norm"], seen.counts["stack"]) == (
        1,
        1,
    )  # then they are read
    assert seen.counts["_local_scalar_dense"] == 1
