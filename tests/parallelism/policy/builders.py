"""Models and nodes of a few layers and devices, small enough for sums by hand."""

from __future__ import annotations

from typing import Any

from outlast.parallelism.policy.layouts import Node
from outlast.parallelism.policy.limits import ModelLimits

GIB = 2**30
SMALL = ModelLimits("small", 12, 768, 12, 1024, 50304)


def model(**fields: Any) -> ModelLimits:
    """Return a model of 4 layers of width 8."""
    usual = {"name": "m", "layers": 4, "hidden": 8, "heads": 4, "sequence": 16, "vocabulary": 100}
    return ModelLimits(**{**usual, **fields})


def nodes(count: int, devices: int = 8, gib: float = 0, speed: float = 1.0) -> list[Node]:
    """Return equal nodes; ``gib`` is the memory of a device, 0: without a limit."""
    return [Node(devices, int(gib * GIB), speed)] * count
