"""Tensors that are more than their bytes: subclasses with a codec, and parts of distributed tensors.

A subclass such as a quantized weight keeps scales or layouts beside its data. Copying its bytes would lose
them, so a subclass without a codec is refused by name (compare Megatron-LM issue 5281).

Of a distributed tensor (DTensor) a rank saves its part and where that is in the whole.
torch.distributed.tensor is public from torch 2.5 on. It is not imported here: where nothing else has
imported it, no tensor is distributed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from outlast import _torch_compat
from outlast.errors import UsageError
from outlast.parallelism.policy.slices import Part, Split, part_of

Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Codec:
    """How one kind of tensor is saved.

    Args:
        kind: exactly this type, not its subclasses.
        name: stands for it in checkpoints.
        take_apart: returns plain tensors and plain values by name, from which all of it follows.
        put_together: returns a tensor of the kind from what ``take_apart`` returned.
    """

    kind: type[torch.Tensor]
    name: str
    take_apart: Callable[[Any], Parts]
    put_together: Callable[[Parts], torch.Tensor]


@dataclass(frozen=True)
class Coded:
    """A saved tensor that is still in parts; its kind may have no codec in this process.

    Args:
        name: of its codec.
        form: type and shape that it had as a whole, for comparisons.
        parts: by name.
    """

    name: str
    form: str
    parts: dict[str, Any]


_CODECS: dict[str, Codec] = {}


def register_codec(
    kind: type[torch.Tensor],
    take_apart: Callable[[Any], Parts] | None = None,
    put_together: Callable[[Parts], torch.Tensor] | None = None,
    name: str = "",
) -> None:
    """Have tensors of a kind saved through a codec; before the first save or load.

    Args:
        kind: the type of tensor.
        take_apart: returns plain tensors and plain values by name; None: by ``__tensor_flatten__``, torch's
            own protocol of such types.
        put_together: the way back.
        name: stands for it in checkpoints; "": the type's module and name.

    Raises:
        UsageError: the type is no tensor's, lacks torch's protocol where that is to be used, or only one way
            is given.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise UsageError(f"register_codec: a subclass of torch.Tensor expected, {kind!r} found")
    if (take_apart is None) != (put_together is None):
        raise UsageError(
            f"register_codec({kind.__qualname__}): both ways expected, or neither; one was given"
        )
    if take_apart is None and not hasattr(kind, "__tensor_flatten__"):
        raise UsageError(
            f"register_codec({kind.__qualname__}): it has no __tensor_flatten__; take_apart and put_together"
            " are needed"
        )
    name = name or f"{kind.__module__}.{kind.__qualname__}"
    _CODECS[name] = Codec(kind, name, take_apart or _flatten, put_together or _unflatten(kind))


def codec_of(kind: type) -> Codec | None:
    """Return the codec of a type, None when it has none."""
    for codec in _CODECS.values():  # no generator: asked for each tensor of each save
        if codec.kind is kind:
            return codec
    return None


def unknown(value: Any) -> set[str]:
    """Return the codecs that a decoded value needs and this process has not registered."""
    if isinstance(value, Coded):
        return ({value.name} - _CODECS.keys()) | unknown(value.parts)
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(unknown, each))


def revived(value: Any) -> Any:
    """Put every tensor in a decoded value together that is in parts; containers are changed in place."""
    if isinstance(value, Coded):
        return _CODECS[value.name].put_together(revived(value.parts))
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = revived(each)
    elif type(value) is list:
        value[:] = map(revived, value)
    elif type(value) is tuple:
        return tuple(map(revived, value))
    return value


def _flatten(tensor: Any) -> Parts:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    return {"tensors": inner, "context": context, "size": tensor.size(), "stride": tensor.stride()}


def _unflatten(kind: Any) -> Callable[[Parts], torch.Tensor]:
    def put_together(parts: Parts) -> torch.Tensor:
        found: torch.Tensor = kind.__tensor_unflatten__(
            dict(parts["tensors"]), parts["context"], parts["size"], parts["stride"]
        )
        return found

    return put_together


Distributed = Any  # torch.distributed.tensor.DTensor
_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor.

    Args:
        global_shape: of the whole tensor.
        part: where in it.
        mesh: over which the tensor is distributed; None: over none.
        cuts: the divisions that lead to the part, the first one first: dimensions of tensor and mesh.
    """

    global_shape: tuple[int, ...]
    part: Part
    mesh: Any = field(default=None, compare=False)
    cuts: tuple[tuple[int, int], ...] = field(default=(), compare=False)


def distributed(value: object) -> TypeGuard[Distributed]:
    """Return whether a value is a distributed tensor, and nothing that was derived from one."""
    module = sys.modules.get(_MODULE)
    return module is not None and type(value) is getattr(module, "DTensor", None)


def possible() -> bool:
    """Return whether there can be distributed tensors in this process."""
    return _MODULE in sys.modules


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is in this process; of a plain one that is all of it."""
    if not distributed(tensor):
        return tensor
    local, _ = _torch_compat.local_and_placement(tensor)
    return local if type(local) is torch.Tensor and not local.requires_grad else tensor.detach().to_local()


def piece_of(tensor: torch.Tensor) -> Piece:
    """Return which part of the whole this process has of a tensor that :func:`unsupported` accepts."""
    whole = tuple(tensor.shape)
    if not distributed(tensor):
        return Piece(whole, Part.whole(whole))
    mesh, cuts = tensor.device_mesh, _cuts(tensor)
    coordinate = mesh.get_coordinate()
    splits = [Split(axis, mesh.size(along), coordinate[along]) for axis, along in cuts]
    return Piece(whole, part_of(whole, splits), mesh, tuple(cuts))


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


def _cuts(tensor: Distributed) -> list[tuple[int, int]]:
    """Return the divisions that lead to a rank's part, the first one first: dimensions of tensor and mesh.

    They go along the mesh from its first dimension to its last, but for one: fully_shard divides what
    is divided already, and calls that a strided shard, though its dimension of the mesh comes first.
    """
    shard = sys.modules[_MODULE].Shard
    plain, strided = [], []
    for dimension, placement in enumerate(tensor.placements):
        if type(placement) is shard:
            plain.append((placement.dim, dimension))
        elif _factor(tensor, dimension) is not None:
            strided.append((placement.dim, dimension))
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
        local = local_of(template)
        # Fused kernels step both in the order of their memory; a part that is not on the mesh's devices, as
        # with FSDP2's offloading, would be moved there.
        if saved.stride() == local.stride() and saved.device.type == template.device_mesh.device_type:
            return _torch_compat.distributed_like(template, saved)
        whole = torch.empty_like(template, dtype=saved.dtype, requires_grad=False)
        local_of(whole).copy_(saved)
        return whole
    if isinstance(template, Mapping) and isinstance(saved, dict):
        for key in saved.keys() & template.keys():
            saved[key] = adopt(template[key], saved[key])
    elif isinstance(template, list) and isinstance(saved, list):
        saved[: len(template)] = [adopt(*pair) for pair in zip(template, saved, strict=False)]
    return saved
