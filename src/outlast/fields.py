"""Strict reading of JSON objects in copies, and the error that says where one is damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from outlast.errors import CheckpointMismatch, CorruptCopy

FORMAT_VERSION = 3  # of everything in a copy; other versions are refused
_FAR = 1e15  # seconds; later than any clock
_MISSING = object()


@dataclass(frozen=True)
class Damage:
    """A difference between a copy and what was committed."""

    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: {self.expected} expected, {self.found} found"


class DamagedCopy(CorruptCopy):
    """A copy failed its verification; ``damage`` says where."""

    def __init__(self, damage: Damage) -> None:
        self.damage = damage
        super().__init__(str(damage))


class Fields:
    """A JSON object whose fields must exist and have the expected type.

    Args:
        source: name of its file, for errors.
        value: the object.

    Raises:
        DamagedCopy: it is not an object; every method raises it for a field that is not as expected.
    """

    def __init__(self, source: str, value: object) -> None:
        if not isinstance(value, dict):
            raise DamagedCopy(Damage(source, "a JSON object", type(value).__name__))
        self.source = source
        self.values: Mapping[str, Any] = value

    @classmethod
    def parse(cls, source: str, text: str | bytes) -> Fields:
        """Parse a file that names its format version.

        Raises:
            DamagedCopy: the text is not a JSON object.
            CheckpointMismatch: it is in another format than this version reads.
        """
        try:
            fields = cls(source, json.loads(text))
        except (ValueError, RecursionError) as error:
            raise DamagedCopy(Damage(source, "JSON", str(error)[:200])) from error
        check_format(source, fields.count("format", least=1))
        return fields

    def refuse(self, name: str, expected: str, found: str) -> NoReturn:
        """Raise that a field is not as expected."""
        raise DamagedCopy(Damage(self.source, f"{name}: {expected}", found[:200]))

    def value(self, name: str, kind: type) -> Any:
        """Return a field of exactly this type; ``object`` takes any."""
        found = self.values.get(name, _MISSING)
        if found is _MISSING or (kind is not object and type(found) is not kind):
            self.refuse(name, f"a {kind.__name__}", "nothing" if found is _MISSING else repr(found))
        return found

    def has(self, name: str) -> bool:
        """Say whether there is a field of this name; for those that are left out where they say nothing."""
        return name in self.values

    def text(self, name: str) -> str:
        """Return a field that is a text."""
        found: str = self.value(name, str)
        return found

    def count(self, name: str, *, least: int = 0) -> int:
        """Return a field that is a whole number of at least ``least``."""
        found: int = self.value(name, int)
        if found < least:
            self.refuse(name, f"a whole number of at least {least}", str(found))
        return found

    def counts(self, name: str) -> tuple[int, ...]:
        """Return a field that is a list of whole numbers, none negative."""
        found = self.value(name, list)
        if any(type(each) is not int or each < 0 for each in found):
            self.refuse(name, "whole numbers", repr(found))
        return tuple(found)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a field that is a JSON object."""
        found: dict[str, Any] = self.value(name, dict)
        return found


def check_format(source: str, version: int) -> None:
    """Refuse another format version.

    Raises:
        CheckpointMismatch: names both formats.
    """
    if version != FORMAT_VERSION:
        raise CheckpointMismatch(
            f"{source}: written in format {version}, this outlast reads format {FORMAT_VERSION};"
            " nothing was loaded or changed; use the outlast that wrote it"
        )


def whole(value: object, at_least: int) -> int:
    """Return a whole number read from a file.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is too small.
    """
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    if value < at_least:
        raise ValueError(f"{value} is less than {at_least}")
    return value


def moment(value: object) -> float:
    """Return a time read from a file, in seconds.

    Raises:
        ValueError: it is not a time.
    """
    if isinstance(value, (int, float)) and abs(value) < _FAR:
        return float(value)
    raise ValueError(f"{value!r} is no time")
