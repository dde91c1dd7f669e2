"""Python values to JSON and back, exactly, without pickle.

None, booleans, texts, finite floats, whole numbers of up to 64 bits and lists are themselves.
Everything else is an object with a single key that names its type: ``{"tuple": [...]}``,
``{"tensor": "model.weight"}``. Types are taken exactly: a subclass is refused, because what it
adds would be lost.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from outlast.checkpoint.content.codecs import Coded, codec_of
from outlast.checkpoint.content.typed_forms import DEPTH, Forms, Json
from outlast.errors import UsageError
from outlast.fields import Damage, DamagedCopy

Path = tuple[str, ...]
_DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_NUMPY_KINDS = "biufcSUmM"  # what numpy rebuilds from bytes and a type string; not objects, not records


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a type, without the module."""
    return str(dtype).removeprefix("torch.")


def form_of(tensor: torch.Tensor) -> str:
    """Return type and shape of a tensor as messages show them."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def dtype_of(name: object, source: str = "state") -> torch.dtype:
    """Return the type of a name.

    Raises:
        DamagedCopy: this torch has no such type.
    """
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise DamagedCopy(Damage(source, "the name of a torch.dtype", repr(name)))
    return found


def element_type_of(name: object, source: str) -> torch.dtype:
    """Return the type of a saved tensor's elements by its name.

    Raises:
        DamagedCopy: this torch has no such type, or bytes alone do not make a tensor of it.
    """
    found = dtype_of(name, source)
    if found in _QUANTIZED:
        raise DamagedCopy(Damage(source, "a type of plain tensors", repr(name)))
    return found


class Encoder:
    """Turns values into JSON.

    Args:
        tensor: takes each tensor and its path, and returns what stands for it; None: tensors are refused.
    """

    def __init__(self, tensor: Callable[[torch.Tensor, Path], Json] | None = None) -> None:
        self._tensor = tensor

    def encode(self, value: object, path: Path) -> Json:
        """Return the JSON form of a value.

        Raises:
            UsageError: something in it has no JSON form; names the path and the type.
        """
        encoder = _ENCODERS.get(type(value), Encoder._other)
        return encoder(self, value, path)

    def _other(self, value: Any, path: Path) -> Json:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            codec = codec_of(kind)
            if codec is not None:
                parts = self.encode(dict(codec.take_apart(value)), path)
                return {"codec": [codec.name, form_of(value), parts]}
            if self._tensor is not None:
                return self._tensor(value, path)
        if kind.__module__ == "numpy" and "numpy" in sys.modules:
            return self._numpy(value, path)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self._refuse(
                path,
                f"a {name} has a state of its own",
                "register each such object under a name of its own, not within a dict or list",
            )
        return self._refuse(path, f"a {name} has no form without pickle")

    def _refuse(self, path: Path, why: str, cure: str = "") -> NoReturn:
        cure = cure or "let state_dict() return plain Python values, containers of them and tensors"
        raise UsageError(f"state[{'.'.join(path)!r}]: {why}; the checkpoint was not written; {cure}")

    def _require_end(self, path: Path) -> None:
        if len(path) > DEPTH:
            self._refuse(path[:8], f"nested more than {DEPTH} deep, or contains itself")

    def _items(self, values: Iterable[Any], path: Path) -> list[Json]:
        self._require_end(path)
        return [self.encode(each, (*path, str(place))) for place, each in enumerate(values)]

    def _list(self, value: list[Any], path: Path) -> Json:
        value = list(value)  # a thread of the script may change it
        if set(map(type, value)) == _WHOLE and min(value) >= -_LARGEST and max(value) <= _LARGEST:
            return value  # such as the numbers of 10,000 parameters in an optimizer's state
        return self._items(value, path)

    def _mapping(self, value: dict[Any, Any], path: Path) -> Json:
        self._require_end(path)
        if type(value) is dict and set(map(type, value)) <= _TEXT:
            return {"dict": {key: self.encode(each, (*path, key)) for key, each in value.items()}}
        tag = "map" if type(value) is dict else type(value).__name__
        pairs = [
            [
                key if type(key) is str else _KEYS.encode(key, (*path, "a key")),
                self.encode(each, (*path, str(key))),
            ]
            for key, each in value.items()
        ]
        notes = getattr(value, "_metadata", None)  # a module's state_dict carries the versions of its layers
        if notes is None:
            return {tag: pairs}
        if not isinstance(notes, dict):
            self._refuse(path, f"its _metadata is a {type(notes).__name__}, a dict is expected")
        return {tag: pairs, "metadata": self.encode(notes, (*path, "_metadata"))}

    def _numpy(self, value: Any, path: Path) -> Json:
        import numpy

        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            self._refuse(path, f"a {type(value).__qualname__} of numpy is neither an array nor a scalar")
        if value.dtype.kind not in _NUMPY_KINDS:
            self._refuse(path, f"a numpy array of {value.dtype} has no form without pickle")
        content = _text(value.tobytes())
        if isinstance(value, numpy.generic):
            return {"numpy.generic": [value.dtype.str, content]}
        return {"numpy.ndarray": [value.dtype.str, list(value.shape), content]}


def _text(octets: bytes | bytearray) -> str:
    return base64.b64encode(octets).decode()


_TEXT = {str}
_WHOLE = {int}
_LARGEST = (1 << 64) - 1
_KEYS = Encoder()  # a key of a mapping is no tensor
_ENCODERS: dict[type, Callable[[Encoder, Any, Path], Json]] = {
    **dict.fromkeys((type(None), bool, str), lambda _, value, __: value),
    int: lambda _, value, __: value if value.bit_length() <= 64 else {"int": hex(value)},
    float: lambda _, value, __: value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()},
    bytes: lambda _, value, __: {"bytes": _text(value)},
    bytearray: lambda _, value, __: {"bytearray": _text(value)},
    list: Encoder._list,
    tuple: lambda encoder, value, path: {"tuple": encoder._items(value, path)},
    torch.Size: lambda _, value, __: {"torch.Size": list(value)},
    set: lambda encoder, value, path: {"set": encoder._items(sorted(value, key=repr), path)},
    frozenset: lambda encoder, value, path: {"frozenset": encoder._items(sorted(value, key=repr), path)},
    **dict.fromkeys((dict, OrderedDict, Counter), Encoder._mapping),
    torch.dtype: lambda _, value, __: {"torch.dtype": dtype_name(value)},
    torch.device: lambda _, value, __: {"torch.device": str(value)},
}


def _array(kind: str, shape: list[int], octets: bytearray) -> Any:
    import numpy

    dtype = numpy.dtype(kind)
    if dtype.str != kind or dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"{kind}: no type of numpy's, or one of objects or records")
    return numpy.ndarray(tuple(shape), dtype, octets)


class Decoder(Forms):
    """Turns JSON back into values: those that :class:`Encoder` writes, and nothing else.

    Whoever wrote the file, no byte of it is used as an address, and memory follows from its size.

    Args:
        source: the file it came from, for errors.
        tensors: the tensor of each key.
    """

    size = torch.Size
    dtype = staticmethod(dtype_of)
    device = torch.device
    coded = Coded
    array = staticmethod(_array)
