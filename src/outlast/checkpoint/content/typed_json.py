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
from collections.abc import Callable, Mapping
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
        tensor: called with each tensor and its path, returns the key under which it is stored;
            None: tensors are refused.
    """

    def __init__(self, tensor: Callable[[torch.Tensor, Path], str] | None = None) -> None:
        self._tensor = tensor

    def encode(self, value: object, path: Path) -> Json:
        """Return the JSON form of a value.

        Raises:
            UsageError: something in it has no JSON form; names the path and the type.
        """
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            if len(path) > DEPTH:
                self._refuse(path[:8], f"nested more than {DEPTH} deep, or contains itself")
            return encoder(self, value, path)
        codec = codec_of(kind)
        if codec is not None and isinstance(value, torch.Tensor):
            parts = self.encode(dict(codec.take_apart(value)), path)
            return {"codec": [codec.name, form_of(value), parts]}
        if isinstance(value, torch.Tensor) and self._tensor is not None:
            return {"tensor": self._tensor(value, path)}
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

    def _int(self, value: int, path: Path) -> Json:  # noqa: ARG002 - one signature for all encoders
        return value if value.bit_length() <= 64 else {"int": hex(value)}

    def _float(self, value: float, path: Path) -> Json:  # noqa: ARG002 - one signature for all encoders
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}

    def _bytes(self, value: bytes | bytearray, path: Path) -> Json:  # noqa: ARG002 - one signature for all encoders
        return {type(value).__name__: base64.b64encode(value).decode()}

    def _items(self, values: Any, path: Path) -> list[Json]:
        return [self.encode(each, (*path, str(place))) for place, each in enumerate(values)]

    def _list(self, value: list[Any], path: Path) -> Json:
        value = list(value)  # a thread of the script may change it
        if set(map(type, value)) == _WHOLE and min(value) >= -_LARGEST and max(value) <= _LARGEST:
            return value  # such as the numbers of 10,000 parameters in an optimizer's state
        return self._items(value, path)

    def _tuple(self, value: Any, path: Path) -> Json:
        return {_SEQUENCES[type(value)]: self._items(value, path)}

    def _set(self, value: Any, path: Path) -> Json:
        return {type(value).__name__: self._items(sorted(value, key=repr), path)}

    def _mapping(self, value: dict[Any, Any], path: Path) -> Json:
        if type(value) is dict and set(map(type, value)) <= _TEXT:
            return {"dict": {key: self.encode(each, (*path, key)) for key, each in value.items()}}
        pairs = [
            [
                key if type(key) is str else _KEYS.encode(key, (*path, "a key")),
                self.encode(each, (*path, str(key))),
            ]
            for key, each in value.items()
        ]
        notes = getattr(value, "_metadata", None)  # a module's state_dict carries the versions of its layers
        if notes is None:
            return {_MAPPINGS[type(value)]: pairs}
        if not isinstance(notes, dict):
            self._refuse(path, f"its _metadata is a {type(notes).__name__}, a dict is expected")
        return {_MAPPINGS[type(value)]: pairs, "metadata": self.encode(notes, (*path, "_metadata"))}

    def _dtype(self, value: torch.dtype, path: Path) -> Json:  # noqa: ARG002 - one signature for all encoders
        return {"torch.dtype": dtype_name(value)}

    def _device(self, value: torch.device, path: Path) -> Json:  # noqa: ARG002 - one signature for all encoders
        return {"torch.device": str(value)}

    def _numpy(self, value: Any, path: Path) -> Json:
        import numpy

        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            self._refuse(path, f"a {type(value).__qualname__} of numpy is neither an array nor a scalar")
        if value.dtype.kind not in _NUMPY_KINDS:
            self._refuse(path, f"a numpy array of {value.dtype} has no form without pickle")
        content = base64.b64encode(value.tobytes()).decode()
        if isinstance(value, numpy.generic):
            return {"numpy.generic": [value.dtype.str, content]}
        return {"numpy.ndarray": [value.dtype.str, list(value.shape), content]}


_TEXT = {str}
_WHOLE = {int}
_LARGEST = (1 << 64) - 1
_KEYS = Encoder()  # a key of a mapping is no tensor
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "torch.Size"}
_MAPPINGS: dict[type, str] = {dict: "map", OrderedDict: "OrderedDict", Counter: "Counter"}
_ENCODERS: dict[type, Callable[[Encoder, Any, Path], Json]] = {
    int: Encoder._int,
    float: Encoder._float,
    bytes: Encoder._bytes,
    bytearray: Encoder._bytes,
    list: Encoder._list,
    **dict.fromkeys(_SEQUENCES, Encoder._tuple),
    **dict.fromkeys((set, frozenset), Encoder._set),
    **dict.fromkeys(_MAPPINGS, Encoder._mapping),
    torch.dtype: Encoder._dtype,
    torch.device: Encoder._device,
}


class Decoder(Forms):
    """Turns JSON back into values: those that :class:`Encoder` writes, and nothing else.

    Whoever wrote the file, no byte of it is used as an address, and memory follows from its size.

    Args:
        source: the file it came from, for errors.
        tensors: the tensor of each key.
    """

    def __init__(self, source: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(source, tensors)

    def _size(self, content: Json) -> torch.Size:
        return torch.Size(self._shape(content))

    def _dtype(self, name: Json) -> torch.dtype:
        return dtype_of(name)

    def _device(self, name: Json) -> torch.device:
        return torch.device(self._text(name))

    def _revivable(self, name: str, form: str, parts: dict[str, Any]) -> Coded:
        return Coded(name, form, parts)

    def _elements(self, kind: str, shape: list[int], octets: bytearray) -> Any:
        import numpy

        dtype = numpy.dtype(kind)
        if dtype.str != kind or dtype.kind not in _NUMPY_KINDS:
            self._refuse("a type of numpy's that is no object and no record", kind)
        return numpy.ndarray(tuple(shape), dtype, octets)
