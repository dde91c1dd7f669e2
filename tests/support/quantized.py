"""A weight like those of quantized training: eight bits a number, and a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Quantized(torch.Tensor):
    """Looks like float32; is int8 data and scales."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.data8, made.scale = data8, scale
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> Quantized:
        scale = values.abs().amax(dim=1, keepdim=True) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantized({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        if func is torch.ops.aten.copy_.default and isinstance(args[1], Quantized):
            args[0].data8.copy_(args[1].data8)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        plain = [one.data8 * one.scale if isinstance(one, Quantized) else one for one in args]
        return func(*plain, **(kwargs or {}))


def take_apart(tensor: Quantized) -> Mapping[str, Any]:
    return {"data8": tensor.data8, "scale": tensor.scale}


def put_together(parts: Mapping[str, Any]) -> torch.Tensor:
    return Quantized(parts["data8"], parts["scale"])
