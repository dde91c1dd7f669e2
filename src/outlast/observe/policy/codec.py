"""Encoding of event log records as JSON lines, and decoding.

A line is one object: ``{"v":1,"kind":"saved","time":...,"clock":...,...}`` with the fields of the record's
class, as :mod:`outlast.codec` writes them.

Logs may be newer than the reader: a line of an unknown kind or of a newer version is returned as
:class:`Unknown`. A known kind that lacks a field or has one of another type is a :class:`CodecError`. A field
with a default may be missing, and unknown fields are ignored, so that different writers of one version are
compatible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from outlast import codec
from outlast.codec import Malformed, Meta
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
_SHOWN = 120  # characters of a line that an error quotes


@dataclass(frozen=True)
class _Head:
    v: Annotated[int, Meta(ge=1)]
    kind: str


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
    try:
        return f'{{"v":{SCHEMA_VERSION},"kind":"{name}",{codec.encode(record).decode()[1:]}'
    except Malformed as error:
        raise CodecError(f"a record {name!r} was not written: {error}") from error


def decode(line: str | bytes) -> Record | Unknown:
    """Return the record of a line.

    Raises:
        CodecError: the line is no JSON object with a kind and a version, or lacks what its kind needs.
    """
    try:
        head = codec.decode(line, _Head)
        kind = KINDS.get(head.kind)
        if kind is None or head.v > SCHEMA_VERSION:
            return Unknown(head.kind, head.v, codec.decode(line, dict[str, Any]))
        return codec.decode(line, kind)
    except Malformed as error:
        shown = line if len(line) <= _SHOWN else line[:_SHOWN]
        raise CodecError(f"not a line of the event log: {error}; the line: {shown!r}") from error
