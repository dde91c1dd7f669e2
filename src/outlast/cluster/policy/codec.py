"""Frozen dataclasses to JSON and back; what does not fit the type or the bound of a field is refused.

The annotations of a class are all that a reader checks by: ``Annotated[str, AtMost(256)]``,
``Annotated[int, Within(0, 8)]``. A type without a bound of its own has that of its kind (``_TEXT`` and the
constants beside it). A peer that proved that it knows the token is believed in what it says, not in how much.

In JSON a dataclass is an object with its fields. One of several possible classes has its name as ``type``.
Fields that have a default may be missing (those that are None by default are, where they are None), and a few
unknown ones are ignored: they are another version's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from outlast.errors import OutlastError

T = TypeVar("T")
Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class AtMost:
    """Bound of a text's characters, or of the entries of a list."""

    most: int


@dataclass(frozen=True)
class Within:
    """Bounds of a number."""

    least: float
    most: float


@dataclass(frozen=True)
class Tree:
    """Bounds of any JSON value: values in all, depth, and characters of a text."""

    values: int
    depth: int
    text: int


_TEXT, _LIST = AtMost(1 << 16), AtMost(1024)
_WHOLE, _REAL = Within(-(1 << 53), 1 << 53), Within(-1e15, 1e15)
_UNKNOWN_FIELDS = 32
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
_SHOWN = 60  # characters of a value that an error quotes

MOST_NODES = 20_000
MOST_RANKS = 1 << 20
Name = Annotated[str, AtMost(256)]
Digest = Annotated[str, AtMost(64)]
Identity = Annotated[str, AtMost(321)]  # a node's name and its incarnation
Address = Annotated[str, AtMost(512)]
Count = Annotated[int, Within(0, 1 << 53)]
Generation = Annotated[int, Within(0, 1 << 31)]
Rank = Annotated[int, Within(-1, MOST_RANKS)]
Ranks = Annotated[int, Within(0, MOST_RANKS)]  # how many
Port = Annotated[int, Within(-65535, 65535)]  # negative: rank 0 serves the store there
ExitCode = Annotated[int, Within(-(1 << 31), 1 << 31)]
Signum = Annotated[int, Within(0, 128)]
Identities = Annotated[frozenset[Identity], AtMost(MOST_NODES)]


class MessageError(OutlastError):
    """What another process wrote does not fit its type; it is ignored."""


class Misfit(MessageError):
    """Where a value does not fit.

    Args:
        place: the field, as a path.
        found: what it is, shortened.
        limit: what it may be.
    """

    def __init__(self, place: str, found: str, limit: str) -> None:
        self.place, self.found, self.limit = place, found, limit
        super().__init__(f"field {place} is {found}, expected {limit}" if place else f"{found}, not {limit}")

    def inside(self, outer: str) -> Misfit:
        """Return the same one as seen from around: ``outer`` is a field, an index or a class."""
        dot = "." if self.place and not self.place.startswith("[") else ""
        return Misfit(f"{outer}{dot}{self.place}", self.found, self.limit)


class Codec(Generic[T]):
    """Converts values of one type.

    Args:
        kind: a dataclass, or a union of dataclasses.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def to_json(self, value: T) -> dict[str, Any]:
        """Return a value as JSON values."""
        encode = _encoder(self._kind)
        assert encode is not None, "a dataclass"
        found: dict[str, Any] = encode(value)
        return found

    def from_json(self, found: Any) -> T:
        """Return the value that JSON values stand for.

        Raises:
            MessageError: they stand for none.
        """
        value: T = _decoder(self._kind)(found)
        return value

    def write(self, value: T) -> str:
        """Return a value as JSON text."""
        return _ENCODER.encode(self.to_json(value))

    def read(self, text: str | bytes) -> T:
        """Return the value that a JSON text stands for.

        Raises:
            MessageError: it stands for none.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"no JSON ({str(error)[:100]})") from error
        return self.from_json(found)


# Writing. None stands for: as it is.


@cache
def _encoder(kind: Any) -> Convert | None:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _union_encoder(tuple(one for one in args if one is not NoneType))
    if origin is frozenset:
        return sorted
    if origin is tuple:
        inner = _encoder(args[0])  # None for a row, whose values are plain
        return list if inner is None else lambda value: list(map(inner, value))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value.value
    return _object_encoder(kind) if isinstance(kind, type) and is_dataclass(kind) else None


@cache
def _object_encoder(kind: type) -> Convert:
    hints = get_type_hints(kind)
    specs = [(one.name, _encoder(hints[one.name]), one.default is None) for one in fields(kind)]

    def encode(value: Any) -> dict[str, Any]:
        found = {}
        for name, convert, optional in specs:
            inner = getattr(value, name)
            if inner is not None:
                found[name] = inner if convert is None else convert(inner)
            elif not optional:
                found[name] = None
        return found

    return encode


def _union_encoder(kinds: tuple[Any, ...]) -> Convert | None:
    if len(kinds) == 1:
        return _encoder(kinds[0])
    encoders = {kind: _object_encoder(kind) for kind in kinds}
    return lambda value: {"type": type(value).__name__, **encoders[type(value)](value)}


# Reading.


@cache
def _decoder(kind: Any, bound: Any = None) -> Convert:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _decoder(args[0], args[1])
    if origin in (Union, UnionType):
        return _union_decoder(args)
    if origin in (tuple, frozenset):
        if origin is tuple and args[-1] is not Ellipsis:
            return _row_decoder(tuple(_decoder(one) for one in args))
        return _list_decoder(origin, _decoder(args[0]), (bound or _LIST).most)
    leaf = _LEAVES.get(kind)
    if leaf is not None:
        return leaf(bound)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_decoder(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _object_decoder(kind)
    return _tree_decoder(bound)


def _misfit(value: Any, limit: str) -> Misfit:
    if isinstance(value, (str, list, dict)):
        return Misfit("", f"a {type(value).__name__} of {len(value)}", limit)
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 80 else "a number of many digits"
    return Misfit("", text[:_SHOWN], limit)


def _text_decoder(most: int) -> Convert:
    def decode(value: Any) -> str:
        if type(value) is not str:
            raise _misfit(value, f"a text of at most {most} characters")
        if len(value) > most:
            raise Misfit("", f"a text of {len(value)} characters", f"at most {most}")
        return value

    return decode


def _number_decoder(kind: type, bound: Within) -> Convert:
    kinds, word = ((int,), "a whole number") if kind is int else ((int, float), "a number")
    least, most = bound.least, bound.most

    def decode(value: Any) -> Any:
        if type(value) not in kinds or not least <= value <= most:
            raise _misfit(value, f"{word} from {least} to {most}")
        try:
            return kind(value)
        except OverflowError:
            raise _misfit(value, f"{word} from {least} to {most}") from None

    return decode


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _misfit(value, "true or false")
    return value


def _enum_decoder(kind: type[Enum]) -> Convert:
    known = {one.value: one for one in kind}

    def decode(value: Any) -> Enum:
        if type(value) is not str or value not in known:
            shown = repr(value)[:_SHOWN] if type(value) is str else type(value).__name__
            raise Misfit("", shown, f"one of {', '.join(known)}")
        return known[value]

    return decode


_LEAVES: dict[Any, Callable[[Any], Convert]] = {
    str: lambda bound: _text_decoder((bound or _TEXT).most),
    int: lambda bound: _number_decoder(int, bound or _WHOLE),
    float: lambda bound: _number_decoder(float, bound or _REAL),
    bool: lambda _: _flag,
}


def _list_decoder(kind: type, inner: Convert, most: int) -> Convert:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _misfit(value, f"a list of at most {most} entries")
        if len(value) > most:
            raise Misfit("", f"a list of {len(value)} entries", f"at most {most}")
        return kind(_each(value, inner))

    return decode


def _each(values: list[Any], inner: Convert) -> list[Any]:
    found: list[Any] = []
    try:
        for value in values:
            found.append(inner(value))
    except Misfit as error:
        raise error.inside(f"[{len(found)}]") from None
    return found


def _row_decoder(inner: tuple[Convert, ...]) -> Convert:
    def decode(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(inner):
            raise _misfit(value, f"a list of {len(inner)} values")
        found: list[Any] = []
        try:
            for convert, one in zip(inner, value, strict=True):
                found.append(convert(one))
        except Misfit as error:
            raise error.inside(f"[{len(found)}]") from None
        return tuple(found)

    return decode


@cache
def _object_decoder(kind: type) -> Convert:
    hints = get_type_hints(kind, include_extras=True)
    specs = [(one.name, _decoder(hints[one.name]), one.default is MISSING) for one in fields(kind)]
    most = len(specs) + _UNKNOWN_FIELDS

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _misfit(value, "an object")
        if len(value) > most:
            raise Misfit("", f"an object of {len(value)} fields", f"at most {len(specs)}")
        found = {}
        name = ""
        try:
            for name, convert, required in specs:
                if name in value:
                    found[name] = convert(value[name])
                elif required:
                    raise Misfit("", "missing", "a value")
        except Misfit as error:
            raise error.inside(name) from None
        return kind(**found)

    return decode


def _union_decoder(kinds: tuple[Any, ...]) -> Convert:
    rest = tuple(one for one in kinds if one is not NoneType)
    inner = _decoder(rest[0]) if len(rest) == 1 else _tagged_decoder(rest)
    if len(rest) == len(kinds):
        return inner
    return lambda value: None if value is None else inner(value)


def _tagged_decoder(kinds: tuple[Any, ...]) -> Convert:
    known = {kind.__name__: _object_decoder(kind) for kind in kinds}

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _misfit(value, "an object")
        kind = value.get("type")
        if type(kind) is not str or kind not in known:
            shown = repr(kind)[:_SHOWN] if type(kind) in (str, int, float) else type(kind).__name__
            raise Misfit("type", shown, f"one of {', '.join(known)}")
        try:
            return known[kind](value)
        except Misfit as error:
            raise error.inside(kind) from None

    return decode


def _tree_decoder(bound: Tree) -> Convert:
    def decode(value: Any) -> Any:
        level: list[Any] = [value]
        seen = 0
        for _ in range(bound.depth):
            seen += len(level)
            if seen > bound.values:
                raise Misfit("", f"of more than {bound.values} values", f"at most {bound.values}")
            for one in level:
                if isinstance(one, str) and len(one) > bound.text:
                    raise Misfit("", f"a text of {len(one)} characters", f"at most {bound.text}")
            level = [inner for one in level for inner in _inside(one)]
            if not level:
                return value
        raise Misfit("", f"nested deeper than {bound.depth}", f"at most {bound.depth}")

    return decode


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list) else []
