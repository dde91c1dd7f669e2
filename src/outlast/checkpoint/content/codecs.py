"""Tensors that are more than their bytes: how each registered kind is taken apart and put together again.

A subclass such as a quantized weight keeps scales or layouts beside its data. Copying its bytes would
lose them, so what has no codec is refused by name (Megatron-LM issue 5281 came of such a copy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outlast.core.errors import UsageError

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
