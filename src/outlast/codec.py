"""The codec of what outlast writes and reads again: records, messages, files, configuration.

All of it is JSON of frozen dataclasses, in ASCII, by msgspec. The annotations of a class are what a reader
checks by: types, and bounds such as ``Annotated[int, Meta(ge=0)]``. Unknown fields are passed over, since
another version may have written them, unless :func:`decode` is to refuse them. A float that is not finite,
for which JSON has no word, is the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from outlast.errors import OutlastError

__all__ = ["Int64", "Malformed", "Meta", "convert", "decode", "encode", "plain", "values_of"]

T = TypeVar("T")
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # beyond, floats overflow
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TYPE = re.compile(r"`(\w+)( \| null)?`")
_TYPES = {  # msgspec's names
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_SHOWN = 200  # characters of an error


class Malformed(OutlastError):
    """Content does not fit its type; the text names the field."""


def encode(value: object) -> bytes:
    """Return a value as JSON without spaces.

    Raises:
        Malformed: JSON has no form for a part of it.
    """
    try:
        try:
            found = msgspec.json.encode(value)
        except UnicodeEncodeError:  # a lone surrogate, as in the name of a file that is no UTF-8
            found = b""
        if not found or not found.isascii() or b"null" in found:  # null may be a float that is not finite
            return json.dumps(values_of(value), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Malformed(f"{type(value).__name__}: no JSON: {error}") from error
    return found


def values_of(value: object) -> Any:
    """Return a value as what the json module reads and writes."""
    return plain(msgspec.to_builtins(value))


def plain(value: Any) -> Any:
    """Return a value for JSON: floats that are not finite as texts, tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def decode(content: bytes | str, kind: type[T], *, exactly: bool = False) -> T:
    """Return the value that a JSON text stands for.

    Args:
        content: the text; the caller bounds its size.
        kind: the value's type.
        exactly: refuse a text that no :func:`encode` wrote for the value: it has unknown or doubled fields,
            or lacks some, or has spaces.

    Raises:
        Malformed: it stands for none.
    """
    try:
        found = msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # or what only Python's decoder takes
        found = convert(_with_floats(_parsed(content), kind), kind)
    if exactly:
        raw = _parsed(content)
        written = encode(raw) == (content.encode() if isinstance(content, str) else content)
        if not written or raw != values_of(found):  # 0 and 0.0 are the same
            raise Malformed("unknown, doubled or missing fields, or spaces, which no encode() writes")
    return found


def convert(value: object, kind: type[T]) -> T:
    """Return the value that parsed TOML, YAML or JSON stands for.

    Raises:
        Malformed: it stands for none.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        text = _TYPE.sub(lambda found: _TYPES.get(found[1], found[0]), str(error)[:_SHOWN])
        raise Malformed(text[:1].lower() + text[1:].replace(" - at `$.", " at `")) from error


def _parsed(content: bytes | str) -> Any:
    try:
        return json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}"[:_SHOWN]) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _with_floats(value: Any, kind: Any) -> Any:
    """Return parsed JSON with floats for the texts that stand for some, where a type has floats."""
    if kind is float:
        return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    args = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return _with_floats(value, next(one for one in args if one is not NoneType))
    if isinstance(value, dict) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return {key: _with_floats(each, hints.get(key)) for key, each in value.items()}
    if isinstance(value, dict) and get_origin(kind) is dict:
        return {key: _with_floats(each, args[1]) for key, each in value.items()}
    if isinstance(value, list) and args:
        return [_with_floats(each, args[0]) for each in value]
    return value
