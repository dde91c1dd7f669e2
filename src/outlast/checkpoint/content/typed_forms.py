"""The forms of :mod:`outlast.checkpoint.content.typed_json`, checked without torch and numpy."""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from outlast.fields import Damage, DamagedCopy

Json = Any  # what the json module reads and writes
DEPTH = 100
_MOST_LEVELS = 2 * DEPTH + 2  # a tensor with a codec takes two levels
_BEYOND = 1 << 62  # no size of a tensor or an array
_SHOWN = 200  # characters of what was found, in a message
_NUMPY_TYPE = re.compile(r"([<>|])([biufcSUmM])([0-9]{1,9})(\[[0-9A-Za-z/]{1,30}\])?")
_SIZES = {  # bytes of an element, of each kind that has no others
    "b": (1,),
    "i": (1, 2, 4, 8),
    "u": (1, 2, 4, 8),
    "f": (2, 4, 8, 12, 16),
    "c": (8, 16, 24, 32),
    "m": (8,),
    "M": (8,),
}
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,40}")
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")


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


class Forms:
    """Takes JSON apart, and refuses what is no typed JSON; values that are torch's or numpy's stay texts.

    Args:
        source: the file it came from, for errors.
        tensors: what stands for the tensor of each key.
    """

    def __init__(self, source: str, tensors: Mapping[str, Any]) -> None:
        self._source = source
        self._tensors = tensors
        self._depth = 0

    def decode(self, value: Json) -> Any:
        """Return the value of a JSON form.

        Raises:
            DamagedCopy: it is not a form that the encoder writes.
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
            decoder = DECODERS.get(tag)
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

    def _tensor(self, key: Json) -> Any:
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

    def _size(self, content: Json) -> Any:
        return tuple(self._shape(content))

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

    def _dtype(self, name: Json) -> Any:
        if not _DTYPE.fullmatch(self._text(name)):
            self._refuse("the name of a torch.dtype", name)
        return name

    def _device(self, name: Json) -> Any:
        if not _DEVICE.fullmatch(self._text(name)):
            self._refuse("the name of a torch.device", name)
        return name

    def _coded(self, content: Json) -> Any:
        name, form, parts = self._list(content, 3)
        decoded = self._decode(parts)
        if type(decoded) is not dict:
            self._refuse("the parts of a tensor by name", parts)
        return self._revivable(self._text(name), self._text(form), decoded)

    def _revivable(self, name: str, form: str, parts: dict[str, Any]) -> Any:  # noqa: ARG002 - see Decoder
        return name

    def _array(self, content: Json) -> Any:
        kind, shape, data = self._list(content, 3)
        return self._numpy(kind, self._shape(shape), data)

    def _generic(self, content: Json) -> Any:
        kind, data = self._list(content, 2)
        return self._numpy(kind, [], data)[()]

    def _numpy(self, kind: Json, shape: list[int], data: Json) -> Any:
        """Return an array of plain elements: of objects, its bytes would be addresses."""
        form = _NUMPY_TYPE.fullmatch(self._text(kind))
        octets = bytearray(self._octets(data))
        if form is None or not _is_numpys(form[1], form[2], int(form[3])):
            self._refuse("a type of numpy's that is no object and no record", kind)
        nbytes = math.prod(shape) * int(form[3]) * (4 if form[2] == "U" else 1)
        if nbytes != len(octets):
            self._refuse(f"{nbytes} bytes of {kind}{shape}", len(octets))
        if form[2] == "U" and octets:
            points = array("I", bytes(octets))
            if form[1] == ">":
                points.byteswap()
            if max(points) > sys.maxunicode:
                self._refuse("characters of Unicode", max(points))
        return self._elements(kind, shape, octets)

    def _elements(self, kind: str, shape: list[int], octets: bytearray) -> Any:  # noqa: ARG002 - see Decoder
        return Scalar()


class Scalar:
    """Stands for an array of numpy's, or for a scalar."""

    __hash__ = None  # type: ignore[assignment]  # as of an array

    def __getitem__(self, place: tuple[()]) -> str:
        return "a scalar"


def _is_numpys(order: str, kind: str, size: int) -> bool:
    """Say whether numpy has elements of a kind and size in an order of bytes, and names them so."""
    sizes = _SIZES.get(kind)
    return (sizes is None or size in sizes) and (order == "|") == (kind == "S" or (kind != "U" and size == 1))


DECODERS: dict[str, Callable[[Forms, Json], Any]] = {
    "tensor": lambda forms, key: forms._tensor(key),
    "int": Forms._int,
    "float": Forms._float,
    "bytes": Forms._octets,
    "bytearray": lambda forms, text: bytearray(forms._octets(text)),
    "tuple": lambda forms, items: tuple(forms._items(items)),
    "torch.Size": lambda forms, content: forms._size(content),
    "set": lambda forms, items: set(forms._items(items)),
    "frozenset": lambda forms, items: frozenset(forms._items(items)),
    "dict": Forms._dict,
    "map": lambda forms, pairs: dict(forms._pairs(pairs)),
    "OrderedDict": lambda forms, pairs: OrderedDict(forms._pairs(pairs)),
    "Counter": Forms._counter,
    "torch.dtype": lambda forms, name: forms._dtype(name),
    "torch.device": lambda forms, name: forms._device(name),
    "codec": lambda forms, content: forms._coded(content),
    "numpy.generic": Forms._generic,
    "numpy.ndarray": Forms._array,
}
