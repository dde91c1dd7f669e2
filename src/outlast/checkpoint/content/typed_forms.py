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
from typing import Annotated, Any

from outlast.codec import Meta, convert
from outlast.fields import Damage, DamagedCopy

Json = Any  # what the json module reads and writes
DEPTH = 100
_MOST_LEVELS = 2 * DEPTH + 2  # a tensor with a codec takes two levels
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
_Sizes = list[Annotated[int, Meta(ge=0, lt=1 << 62)]]  # of a tensor or an array
_Dtype = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,40}\Z")]
_Device = Annotated[str, Meta(pattern=r"^[a-z]{1,20}(:[0-9]{1,4})?\Z")]


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


class Scalar:
    """Stands for an array of numpy's, or for a scalar."""

    __hash__ = None  # type: ignore[assignment]  # as of an array

    def __getitem__(self, place: tuple[()]) -> str:
        return "a scalar"


class Forms:
    """Takes JSON apart, and refuses what is no typed JSON; values that are torch's or numpy's stay texts.

    Args:
        source: the file it came from, for errors.
        tensors: what stands for the tensor of each key.
    """

    size: Callable[[list[int]], Any] = tuple
    dtype: Callable[[str], Any] = str
    device: Callable[[str], Any] = str
    coded: Callable[[str, str, dict[str, Any]], Any] = staticmethod(lambda *_: "a tensor")
    array: Callable[[str, list[int], bytearray], Any] = staticmethod(lambda *_: Scalar())

    def __init__(self, source: str, tensors: Mapping[str, Any]) -> None:
        self._source = source
        self.tensors = tensors
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

    def _decode(self, value: Json) -> Any:
        if type(value) is not list and type(value) is not dict:
            return value
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            raise ValueError(f"values nested more than {_MOST_LEVELS} deep")
        decoded: Any
        if isinstance(value, list):
            decoded = self.each(value)
        else:
            tag = next(iter(value), "")
            kind, decoder = DECODERS[tag]
            content = value[tag]
            if type(content) is not kind:
                content = convert(content, kind)
            decoded = decoder(self, content)
            if len(value) > 1:
                notes = self._decode(value["metadata"]) if value.keys() == {tag, "metadata"} else None
                if type(decoded) is not OrderedDict or not isinstance(notes, dict):
                    raise ValueError(f"more than one tag, or metadata of no module's state: {list(value)}")
                decoded._metadata = notes  # type: ignore[attr-defined]
        self._depth -= 1
        return decoded

    def each(self, items: list[Json]) -> list[Any]:
        """Return the values of JSON forms."""
        return [self._decode(one) for one in items]

    def pairs(self, content: list[Json]) -> dict[Any, Any]:
        """Return the mapping that pairs of JSON forms stand for."""
        if not all(type(pair) is list for pair in content):
            raise TypeError("pairs expected")
        return {self._decode(key): self._decode(each) for key, each in content}

    def revivable(self, name: Json, form: Json, parts: Json) -> Any:
        """Return what stands for a tensor with a codec."""
        decoded = self._decode(parts)
        if type(decoded) is not dict:
            raise TypeError("the parts of a tensor by name expected")
        return self.coded(convert(name, str), convert(form, str), decoded)

    def elements(self, kind: str, shape: list[int], data: str) -> Any:
        """Return an array of plain elements: of objects, its bytes would be addresses."""
        form, octets = _NUMPY_TYPE.fullmatch(kind), bytearray(_octets(data))
        if form is None or not _is_numpys(form[1], form[2], int(form[3])):
            raise ValueError(f"{kind}: no type of numpy's, or one of objects or records")
        nbytes = math.prod(shape) * int(form[3]) * (4 if form[2] == "U" else 1)
        if nbytes != len(octets):
            raise ValueError(f"{nbytes} bytes of {kind}{shape} expected, {len(octets)} found")
        if form[2] == "U" and octets:
            points = array("I", bytes(octets))
            if form[1] == ">":
                points.byteswap()
            if max(points) > sys.maxunicode:
                raise ValueError(f"{max(points)} is no character of Unicode")
        return self.array(kind, shape, octets)


def _is_numpys(order: str, kind: str, size: int) -> bool:
    """Return whether numpy has elements of a kind and size in an order of bytes, and names them so."""
    sizes = _SIZES.get(kind)
    return (sizes is None or size in sizes) and (order == "|") == (kind == "S" or (kind != "U" and size == 1))


def _octets(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


DECODERS: dict[str, tuple[Any, Callable[[Forms, Any], Any]]] = {  # type of the content, and its value
    "tensor": (str, lambda forms, key: forms.tensors[key]),
    "int": (str, lambda _, digits: int(digits, 16)),
    "float": (str, lambda _, bits: struct.unpack(">d", bytes.fromhex(bits))[0]),
    "bytes": (str, lambda _, text: _octets(text)),
    "bytearray": (str, lambda _, text: bytearray(_octets(text))),
    "tuple": (list, lambda forms, items: tuple(forms.each(items))),
    "torch.Size": (_Sizes, lambda forms, sizes: forms.size(sizes)),
    "set": (list, lambda forms, items: set(forms.each(items))),
    "frozenset": (list, lambda forms, items: frozenset(forms.each(items))),
    "dict": (dict, lambda forms, items: {key: forms._decode(one) for key, one in items.items()}),
    "map": (list, lambda forms, pairs: forms.pairs(pairs)),
    "OrderedDict": (list, lambda forms, pairs: OrderedDict(forms.pairs(pairs))),
    "Counter": (list, lambda forms, pairs: Counter(forms.pairs(pairs))),
    "torch.dtype": (_Dtype, lambda forms, name: forms.dtype(name)),
    "torch.device": (_Device, lambda forms, name: forms.device(name)),
    "codec": (list, lambda forms, content: forms.revivable(*content)),
    "numpy.generic": (tuple[str, str], lambda forms, of: forms.elements(of[0], [], of[1])[()]),
    "numpy.ndarray": (tuple[str, _Sizes, str], lambda forms, content: forms.elements(*content)),
}
