"""Distributed tensors (DTensor): which part of the whole a rank has, and how a loaded part becomes one.

torch.distributed.tensor is public from torch 2.5 on. It is not imported here: where nothing else has
imported it, no tensor is distributed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from outlast.core.reslice import Part, Split, part_of

Distributed = Any  # torch.distributed.tensor.DTensor
_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor.

    Args:
        global_shape: of the whole tensor.
        part: where in it.
    """

    global_shape: tuple[int, ...]
    part: Part


def distributed(value: object) -> TypeGuard[Distributed]:
    """Say whether a value is a distributed tensor, and nothing that was derived from one."""
    module = sys.modules.get(_MODULE)
    return module is not None and type(value) is getattr(module, "DTensor", None)


def possible() -> bool:
    """Say whether there can be distributed tensors in this process."""
    return _MODULE in sys.modules


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is in this process; of a plain one that is all of it."""
    if distributed(tensor):
        local: torch.Tensor = tensor.detach().to_local()
        return local
    return tensor


def piece_of(tensor: torch.Tensor) -> Piece:
    """Return which part of the whole this process has of a tensor that :func:`unsupported` accepts."""
    whole = tuple(tensor.shape)
    return Piece(whole, part_of(whole, _splits(tensor)) if distributed(tensor) else Part.whole(whole))


def unsupported(tensor: Distributed) -> str:
    """Return why the place of this rank's part is not known for certain; empty when it is."""
    kinds = sys.modules[_MODULE]
    known = (kinds.Shard, kinds.Replicate)
    for dimension, placement in enumerate(tensor.placements):
        if type(placement) not in known and _factor(tensor, dimension) is None:
            return (
                f"is distributed as {tuple(tensor.placements)}; of {placement!r} it is not known which part a"
                " rank has; Shard, Replicate and what fully_shard makes of a sharded tensor are supported"
            )
    if tensor.device_mesh.get_coordinate() is None:
        return f"is distributed over {tensor.device_mesh}, which this rank is not in"
    found, expected = tuple(local_of(tensor).shape), piece_of(tensor).part.shape
    if found != expected:
        return (
            f"is distributed as {tuple(tensor.placements)}, so that this rank's part has the shape"
            f" {list(expected)}; it has {list(found)}: only the division that torch.chunk makes is supported"
        )
    return ""


def _splits(tensor: Distributed) -> list[Split]:
    """Return the divisions that lead to this rank's part, the first one first.

    They go along the mesh from its first dimension to its last, but for one: fully_shard divides what
    is divided already, and calls that a strided shard, though its dimension of the mesh comes first.
    """
    mesh, shard = tensor.device_mesh, sys.modules[_MODULE].Shard
    coordinate = mesh.get_coordinate()
    plain, strided = [], []
    for dimension, placement in enumerate(tensor.placements):
        if type(placement) is shard:
            plain.append(Split(placement.dim, mesh.size(dimension), coordinate[dimension]))
        elif _factor(tensor, dimension) is not None:
            strided.append(Split(placement.dim, mesh.size(dimension), coordinate[dimension]))
    return plain + strided


def _factor(tensor: Distributed, dimension: int) -> int | None:
    """Return the split factor of a strided shard if it is one that comes after all others of its axis."""
    placement, shard = tensor.placements[dimension], sys.modules[_MODULE].Shard
    factor: int | None = getattr(placement, "split_factor", None)
    if factor is None:
        return None
    alike = [
        place for place, one in enumerate(tensor.placements) if getattr(one, "dim", None) == placement.dim
    ]
    later = [place for place in alike if place > dimension and type(tensor.placements[place]) is shard]
    last = len(alike) == 1 + len(later)
    return factor if last and factor == math.prod(map(tensor.device_mesh.size, later)) else None


def adopt(template: Any, saved: Any) -> Any:
    """Make distributed tensors of the loaded parts whose counterparts are distributed.

    Args:
        template: a live object's content, or as much of it as is known.
        saved: what was loaded, in the same form; its containers are changed.

    Returns:
        ``saved``, or the distributed tensor that it became.
    """
    if distributed(template):
        if not isinstance(saved, torch.Tensor):
            return saved
        whole = torch.empty_like(template, dtype=saved.dtype, requires_grad=False)
        local_of(whole).copy_(saved)
        return whole
    if isinstance(template, Mapping) and isinstance(saved, dict):
        for key in saved.keys() & template.keys():
            saved[key] = adopt(template[key], saved[key])
    elif isinstance(template, list) and isinstance(saved, list):
        saved[: len(template)] = [adopt(*pair) for pair in zip(template, saved, strict=False)]
    return saved
