"""Records of the event log to JSON lines and back.

A line is one object: ``{"v": 1, "kind": "saved", "time": ..., ...}``. A reader meets newer logs
than itself: an unknown kind or version comes back as :class:`Unknown`, whole. A known kind with
a field missing or of the wrong shape is a :class:`CodecError`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from outlast.core import events
from outlast.core.errors import OutlastError
from outlast.core.events import SCHEMA_VERSION, Record

_WORD = re.compile(r"(?<!^)(?=[A-Z])")
KINDS: dict[str, type[Record]] = {
    _WORD.sub("_", kind.__name__).lower(): kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_SHAPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "tuple[str, ...]": (list,),
    "tuple[int, ...]": (list,),
    "dict[str, float]": (dict,),
    "dict[str, str]": (dict,),
}
_NOT_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class CodecError(OutlastError):
    """A line of the event log is not what its kind says."""


@dataclass(frozen=True)
class Unknown:
    """A line that a newer version wrote; kept as it is."""

    kind: str
    version: int
    raw: dict[str, Any]


def encode(record: Record) -> str:
    """Return the line of a record, without a line break."""
    line: dict[str, Any] = {"v": SCHEMA_VERSION, "kind": _NAMES[type(record)]}
    for spec in fields(record):
        line[spec.name] = _plain(getattr(record, spec.name))
    return json.dumps(line, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def decode(line: str) -> Record | Unknown:
    """Return the record of a line.

    Raises:
        CodecError: the line is no JSON object, or lacks what its kind needs.
    """
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise CodecError(f"event log line is no JSON: {error}: {line[:80]!r}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str) or not isinstance(raw.get("v"), int):
        raise CodecError(f"event log line without kind and version: {line[:80]!r}")
    kind = KINDS.get(raw["kind"])
    if kind is None or raw["v"] > SCHEMA_VERSION:
        return Unknown(raw["kind"], raw["v"], raw)
    values: dict[str, Any] = {}
    for spec in fields(kind):
        if spec.name in raw:
            values[spec.name] = _shaped(raw["kind"], spec.name, str(spec.type), raw[spec.name])
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise CodecError(f"event log line {raw['kind']!r} lacks {spec.name!r}: {line[:80]!r}")
    return kind(**values)


def _shaped(kind: str, name: str, shape: str, value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"float"} and value["float"] in _NOT_NUMBERS:
        value = _NOT_NUMBERS[value["float"]]
    if isinstance(value, bool) or not isinstance(value, _SHAPES[shape]):
        raise CodecError(f"event log line {kind!r}: {name} is {value!r}, expected {shape}")
    if shape == "float":
        return float(value)
    if shape.startswith("tuple"):
        inner = "str" if "str" in shape else "int"
        return tuple(_shaped(kind, name, inner, item) for item in value)
    if shape.startswith("dict"):
        inner = "float" if shape.endswith("float]") else "str"
        return {key: _shaped(kind, f"{name}.{key}", inner, item) for key, item in value.items()}
    return value
