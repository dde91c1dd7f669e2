"""What a JSON value from another process may be: its type and how large it is, as data.

A shape says what a value is and bounds it; :func:`misfit` finds the first place where a value is something
else. A table of shapes is the whole of what a reader accepts, so no reader checks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 60  # characters of a value that a message quotes


@dataclass(frozen=True)
class Misfit:
    """Where a value is not of its shape.

    Args:
        place: the field, as a path.
        found: what it is, shortened.
        limit: what it may be.
    """

    place: str
    found: str
    limit: str

    def __str__(self) -> str:
        return f"field {self.place} is {self.found}, expected {self.limit}"


@dataclass(frozen=True)
class Text:
    """A text of so many characters at most."""

    most: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, str):
            return _wrong(value, place, f"a text of at most {self.most} characters")
        if len(value) <= self.most:
            return None
        return Misfit(place, f"a text of {len(value)} characters", f"at most {self.most}")


@dataclass(frozen=True)
class Whole:
    """A whole number within two others."""

    least: int
    most: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        fits = type(value) is int and self.least <= value <= self.most
        return None if fits else _wrong(value, place, f"a whole number from {self.least} to {self.most}")


@dataclass(frozen=True)
class Real:
    """A number whose absolute value is not above another one; ``endless``: or infinity."""

    most: float
    endless: bool = False

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        most = math.inf if self.endless and value == math.inf else self.most
        fits = type(value) in (int, float) and abs(value) <= most
        return None if fits else _wrong(value, place, f"a number from {-self.most:g} to {self.most:g}")


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        return None if isinstance(value, bool) else _wrong(value, place, "true or false")


@dataclass(frozen=True)
class OrNull:
    """A value of a shape, or null."""

    shape: Shape

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        return None if value is None else self.shape.misfit(value, place)


@dataclass(frozen=True)
class Several:
    """A list of values of one shape, so many at most."""

    shape: Shape
    most: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, (list, tuple)):
            return _wrong(value, place, f"a list of at most {self.most} entries")
        if len(value) > self.most:
            return Misfit(place, f"a list of {len(value)} entries", f"at most {self.most}")
        found = (self.shape.misfit(one, f"{place}[{at}]") for at, one in enumerate(value))
        return next((one for one in found if one is not None), None)


@dataclass(frozen=True)
class Row:
    """A list with a shape for each of its values."""

    shapes: tuple[Shape, ...]

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, (list, tuple)) or len(value) != len(self.shapes):
            return _wrong(value, place, f"a list of {len(self.shapes)} values")
        found = (one.misfit(value[at], f"{place}[{at}]") for at, one in enumerate(self.shapes))
        return next((one for one in found if one is not None), None)


@dataclass(frozen=True)
class Table:
    """An object with a shape for each field that is read; of others there may be a few, which are not read.

    Args:
        fields: by name.
        optional: names of those that may be missing.
        others: how many more there may be: a newer version may say more.
    """

    fields: Mapping[str, Shape]
    optional: frozenset[str] = frozenset()
    others: int = 32

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, dict):
            return _wrong(value, place, "an object")
        if len(value) > len(self.fields) + self.others:
            return Misfit(place, f"an object of {len(value)} fields", f"at most {len(self.fields)}")
        for name, shape in self.fields.items():
            inside = f"{place}.{name}" if place else name
            if name not in value:
                if name not in self.optional:
                    return Misfit(inside, "missing", "a value")
                continue
            found = shape.misfit(value[name], inside)
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class Cases:
    """An object of which one field says what another one holds."""

    by: str
    inside: str
    cases: Mapping[str, Table] = field(repr=False)

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, dict):
            return _wrong(value, place, "an object")
        case = value.get(self.by)
        if not isinstance(case, str) or case not in self.cases:
            return _wrong(case, f"{place}.{self.by}", f"one of {', '.join(self.cases)}")
        return self.cases[case].misfit(value.get(self.inside), f"{place}.{self.inside}")


@dataclass(frozen=True)
class Tree:
    """Any JSON value of so many values in all, none of which is deeper or longer than allowed."""

    values: int
    depth: int
    text: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        level: list[Any] = [value]
        seen = 0
        for _ in range(self.depth):
            seen += len(level)
            if seen > self.values:
                return Misfit(place, f"of more than {self.values} values", f"at most {self.values}")
            for one in level:
                if isinstance(one, str) and len(one) > self.text:
                    return Text(self.text).misfit(one, place)
            level = [inner for one in level for inner in _inside(one)]
            if not level:
                return None
        return Misfit(place, f"nested deeper than {self.depth}", f"at most {self.depth}")


Shape = Text | Whole | Real | Flag | OrNull | Several | Row | Table | Cases | Tree


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, tuple)) else []


def _wrong(value: Any, place: str, limit: str) -> Misfit:
    if isinstance(value, (str, list, tuple, dict)):
        return Misfit(place, f"a {type(value).__name__} of {len(value)}", limit)
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 80 else "a number of many digits"
    return Misfit(place, text[:_SHOWN], limit)
