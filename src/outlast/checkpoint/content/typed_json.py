"""Python values to JSON and back, exactly, without pickle.

None, booleans, texts, finite floats, whole numbers of up to 64 bits and lists are themselves.
Everything else is an object with a single key that names its type: ``{"tuple": [...]}``,
``{"tensor": "model.weight"}``. Types are taken exactly: a subclass is refused, because what it
adds would be lost.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from outlast.checkpoint.content.codecs import Coded, codec_of
from outlast.errors import UsageError
from outlast.fields import Damage, DamagedCopy

Json = Any  # what the json module reads and writes
Path = tuple[str, ...]
_DEPTH = 100
_DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_NUMPY_KINDS = "biufcSUmM"  # what numpy rebuilds from bytes and a type string; not objects, not records
_NUMPY_TYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9A-Za-z/]{1,30}\])?")
_MOST_LEVELS = 2 * _DEPTH + 2  # a tensor with a codec takes two levels
_BEYOND = 1 << 62  # no size of a tensor or an array
_SHOWN = 200  # characters of what was found, in a message


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
            if len(path) > _DEPTH:
                self._refuse(path[:8], f"nested more than {_DEPTH} deep, or contains itself")
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


def references(value: Json) -> set[str]:
    """Return the keys of all tensors in an encoded value."""
    found: set[str] = set()
    rest = [value]
    while rest:
        each = rest.pop()
        if type(each) is list:
            rest += each
        elif type(each) is dict:
            key = each.get("tensor")
            if type(key) is str and len(each) == 1:
                found.add(key)
            else:
                rest += each["dict"].values() if type(each.get("dict")) is dict else each.values()
    return found


class Decoder:
    """Turns JSON back into values: those that :class:`Encoder` writes, and nothing else.

    Whoever wrote the file, no byte of it is used as an address, and memory follows from its size.

    Args:
        source: the file it came from, for errors.
        tensors: the tensor of each key.
    """

    def __init__(self, source: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._source = source
        self._tensors = tensors
        self._depth = 0

    def decode(self, value: Json) -> Any:
        """Return the value of a JSON form.

        Raises:
            DamagedCopy: it is not a form that :class:`Encoder` writes.
        """
        self._depth = 0
        try:
            return self._decode(value)
        except (DamagedCopy, MemoryError):
            raise
        except Exception as error:  # whatever fails here fails because of the file's bytes
            found = f"{type(error).__name__}: {error}"
            raise DamagedCopy(Damage(self._source, "typed JSON", found[:_SHOWN])) from error

    def _refuse(self, expected: str, found: object) -> NoReturn:
        raise DamagedCopy(Damage(self._source, expected, repr(found)[:_SHOWN]))

    def _decode(self, value: Json) -> Any:
        if type(value) is not list and type(value) is not dict:
            return value
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            self._refuse(f"values nested at most {_MOST_LEVELS} deep", "more")
        decoded: Any
        if isinstance(value, list):
            decoded = [self._decode(each) for each in value]
        else:
            tag = next(iter(value), "")
            decoder = _DECODERS.get(tag)
            if decoder is None:
                self._refuse("a tag of typed JSON", tag)
            decoded = decoder(self, value[tag])
            if len(value) > 1:
                self._add_metadata(decoded, value, tag)
        self._depth -= 1
        return decoded

    def _add_metadata(self, decoded: Any, value: dict[str, Json], tag: str) -> None:
        notes = self._decode(value["metadata"]) if value.keys() == {tag, "metadata"} else None
        if type(decoded) is not OrderedDict or not isinstance(notes, dict):
            self._refuse("one tag, and metadata where it is of a module's state", list(value))
        decoded._metadata = notes  # type: ignore[attr-defined]

    def _text(self, content: Json, expected: str = "a text") -> str:
        if type(content) is not str:
            self._refuse(expected, content)
        return content

    def _list(self, content: Json, length: int | None = None) -> list[Json]:
        if type(content) is not list or (length is not None and len(content) != length):
            self._refuse("a list" if length is None else f"a list of {length}", content)
        return content

    def _tensor(self, key: Json) -> torch.Tensor:
        found = self._tensors.get(self._text(key))
        if found is None:
            self._refuse("the key of a tensor", key)
        return found

    def _int(self, digits: Json) -> int:
        return int(self._text(digits), 16)

    def _float(self, bits: Json) -> float:
        found: float = struct.unpack(">d", bytes.fromhex(self._text(bits)))[0]
        return found

    def _octets(self, text: Json) -> bytes:
        return base64.b64decode(self._text(text), validate=True)

    def _items(self, content: Json) -> list[Any]:
        return [self._decode(each) for each in self._list(content)]

    def _size(self, content: Json) -> torch.Size:
        return torch.Size(self._shape(content))

    def _shape(self, content: Json) -> list[int]:
        sizes = self._list(content)
        if any(type(size) is not int or not 0 <= size < _BEYOND for size in sizes):
            self._refuse("a shape", content)
        return sizes

    def _dict(self, content: Json) -> dict[str, Any]:
        if type(content) is not dict:
            self._refuse("a JSON object", content)
        return {key: self._decode(each) for key, each in content.items()}

    def _pairs(self, content: Json) -> list[tuple[Any, Any]]:
        pairs = (self._list(pair, 2) for pair in self._list(content))
        return [(self._decode(key), self._decode(each)) for key, each in pairs]

    def _counter(self, content: Json) -> Counter[Any]:
        return Counter(dict(self._pairs(content)))

    def _device(self, name: Json) -> torch.device:
        return torch.device(self._text(name))

    def _coded(self, content: Json) -> Coded:
        name, form, parts = self._list(content, 3)
        decoded = self._decode(parts)
        if type(decoded) is not dict:
            self._refuse("the parts of a tensor by name", parts)
        return Coded(self._text(name), self._text(form), decoded)

    def _array(self, content: Json) -> Any:
        kind, shape, data = self._list(content, 3)
        return self._numpy(kind, self._shape(shape), data)

    def _generic(self, content: Json) -> Any:
        kind, data = self._list(content, 2)
        return self._numpy(kind, [], data)[()]

    def _numpy(self, kind: Json, shape: list[int], data: Json) -> Any:
        """Return an array of plain elements: of objects, its bytes would be addresses."""
        import numpy

        if not _NUMPY_TYPE.fullmatch(self._text(kind)):
            self._refuse("a type of numpy's that is no object and no record", kind)
        dtype, octets = numpy.dtype(kind), bytearray(self._octets(data))
        if dtype.str != kind or dtype.kind not in _NUMPY_KINDS:
            self._refuse("a type of numpy's that is no object and no record", kind)
        if math.prod(shape) * dtype.itemsize != len(octets):
            self._refuse(f"{math.prod(shape) * dtype.itemsize} bytes of {kind}{shape}", len(octets))
        if dtype.kind == "U" and octets:
            points = numpy.frombuffer(octets, dtype.byteorder + "u4")
            if int(points.max()) > sys.maxunicode:
                self._refuse("characters of Unicode", int(points.max()))
        return numpy.ndarray(tuple(shape), dtype, octets)


_DECODERS: dict[str, Callable[[Decoder, Json], Any]] = {
    "tensor": Decoder._tensor,
    "int": Decoder._int,
    "float": Decoder._float,
    "bytes": Decoder._octets,
    "bytearray": lambda decoder, text: bytearray(decoder._octets(text)),
    "tuple": lambda decoder, items: tuple(decoder._items(items)),
    "torch.Size": Decoder._size,
    "set": lambda decoder, items: set(decoder._items(items)),
    "frozenset": lambda decoder, items: frozenset(decoder._items(items)),
    "dict": Decoder._dict,
    "map": lambda decoder, pairs: dict(decoder._pairs(pairs)),
    "OrderedDict": lambda decoder, pairs: OrderedDict(decoder._pairs(pairs)),
    "Counter": Decoder._counter,
    "torch.dtype": lambda _, name: dtype_of(name),
    "torch.device": Decoder._device,
    "codec": Decoder._coded,
    "numpy.generic": Decoder._generic,
    "numpy.ndarray": Decoder._array,
}
