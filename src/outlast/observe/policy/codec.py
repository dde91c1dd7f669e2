"""Encoding of event log records as JSON lines, and decoding.

A line is one object, ASCII only: ``{"v":1,"kind":"saved","time":...,"clock":...,...}`` with the fields of the
record's class. JSON has no word for a float that is not finite, so these are the strings ``"nan"``, ``"inf"``
and ``"-inf"``; the type of the field distinguishes them from text.

Logs may be newer than the reader: a line of an unknown kind or of a newer version is returned as
:class:`Unknown`. A known kind that lacks a field or has one of another type is a :class:`CodecError`. A field
with a default may be missing, and unknown fields are ignored, so that different writers of one version are
compatible.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from outlast.errors import OutlastError
from outlast.recovery.policy import events
from outlast.recovery.policy.events import SCHEMA_VERSION, Record

KINDS: dict[str, type[Record]] = {
    "run_started": events.RunStarted,
    "generation_started": events.GenerationStarted,
    "first_step": events.FirstStep,
    "fault_seen": events.FaultSeen,
    "action_taken": events.ActionTaken,
    "saved": events.Saved,
    "save_lost": events.SaveLost,
    "loaded": events.Loaded,
    "quarantined": events.Quarantined,
    "pruned": events.Pruned,
    "trust_changed": events.TrustChanged,
    "compared": events.Compared,
    "timeouts_learned": events.TimeoutsLearned,
    "progress": events.Progress,
    "steps_planned": events.StepsPlanned,
    "started_again": events.StartedAgain,
    "script_saved": events.ScriptSaved,
    "cannot_save": events.CannotSave,
    "imports_seen": events.ImportsSeen,
    "imported_ahead": events.ImportedAhead,
    "straggler_seen": events.StragglerSeen,
    "step_times": events.StepTimes,
    "telemetry": events.Telemetry,
    "note": events.Note,
    "run_ended": events.RunEnded,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# The type of a field as its annotation says it -> the JSON type, and the type of what is inside.
_SHAPES: dict[str, tuple[type, str]] = {
    "int": (int, ""),
    "float": (float, ""),
    "str": (str, ""),
    "tuple[int, ...]": (list, "int"),
    "tuple[str, ...]": (list, "str"),
    "dict[str, float]": (dict, "float"),
    "dict[str, str]": (dict, "str"),
}
_MOST = 2**1000  # beyond 2**1023 arithmetic with floats fails
_SHOWN = 120  # characters of a line that an error quotes


class CodecError(OutlastError):
    """A line of the event log, or a record, does not match its kind."""


@dataclass(frozen=True)
class Unknown:
    """A line that a newer version wrote, kept as it is."""

    kind: str
    version: int
    raw: dict[str, Any]


def encode(record: Record) -> str:
    """Return the line of a record, without a line break.

    Raises:
        CodecError: the kind of the record is unknown, or a value cannot be written as JSON.
    """
    name = _NAMES.get(type(record))
    if name is None:
        raise CodecError(f"{type(record).__name__} is no kind of the event log; it was not written")
    line: dict[str, Any] = {"v": SCHEMA_VERSION, "kind": name}
    for spec in fields(record):
        line[spec.name] = plain(getattr(record, spec.name))
    try:
        return json.dumps(line, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(
            f"a record {name!r} cannot be written as JSON: {error}; it was not written"
        ) from error


def plain(value: Any) -> Any:
    """Return a value for JSON: floats that are not finite as strings, tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def decode(line: str) -> Record | Unknown:
    """Return the record of a line.

    Raises:
        CodecError: the line is no JSON object with a kind and a version, or lacks what its kind needs.
    """
    try:
        raw = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _wrong(line, f"not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise _wrong(line, f"a JSON {type(raw).__name__}, expected an object")
    name, version = raw.get("kind"), raw.get("v")
    if not isinstance(name, str):
        raise _wrong(line, f"kind is {name!r}, expected str")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise _wrong(line, f"v is {version!r}, expected a version from 1 on")
    kind = KINDS.get(name)
    if kind is None or version > SCHEMA_VERSION:
        return Unknown(name, version, raw)
    values: dict[str, Any] = {}
    for spec in fields(kind):
        if spec.name in raw:
            try:
                values[spec.name] = _shaped(spec.name, str(spec.type), raw[spec.name])
            except CodecError as error:
                raise _wrong(line, str(error)) from None
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise _wrong(line, f"{name} lacks {spec.name}")
    return kind(**values)


def _shaped(name: str, shape: str, value: Any) -> Any:
    """Return a field's value in the type that its annotation names."""
    json_type: Any
    json_type, inner = _SHAPES[shape]
    if json_type is float:
        value = _as_float(value)
    if isinstance(value, bool) or not isinstance(value, json_type):
        raise CodecError(f"{name} is {value!r:.{_SHOWN}}, expected {shape}")
    if json_type is int and not -_MOST <= value <= _MOST:
        raise CodecError(f"{name} has {value.bit_length()} bits, expected at most 1000")
    if json_type is list:
        return tuple(_shaped(f"{name}[{at}]", inner, item) for at, item in enumerate(value))
    if json_type is dict:
        return {key: _shaped(f"{name}.{key}", inner, item) for key, item in value.items()}
    return value


def _as_float(value: Any) -> Any:
    """Return the value of a float field as float; other values are returned unchanged."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return value
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _wrong(line: str, what: str) -> CodecError:
    shown = line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
    return CodecError(f"not a line of the event log: {what}; the line: {shown!r}")
