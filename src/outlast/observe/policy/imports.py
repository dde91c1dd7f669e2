"""What the imports of ranks cost: a fold of the event log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outlast.recovery.policy.events import GenerationStarted, ImportedAhead, Record, RunStarted


@dataclass(frozen=True)
class ImportCosts:
    """What was imported ahead of restarts, and what that saved.

    Args:
        modules: of the latest zygote.
        seconds: of a processor that each rank takes to import them itself.
        starts: generations whose ranks were forked from such a zygote.
        saved: seconds of a processor that each rank of those generations saved, added up.
        left_out: modules that ranks import themselves, and why.
    """

    modules: int
    seconds: float
    starts: int
    saved: float
    left_out: Mapping[str, str] = field(default_factory=dict)


def fold(records: Iterable[Record]) -> ImportCosts | None:
    """Return the costs that a log tells of; None: nothing was imported ahead."""
    latest: ImportedAhead | None = None
    zygote: ImportedAhead | None = None  # of this launch
    starts, saved = 0, 0.0
    for record in records:
        if isinstance(record, RunStarted):
            zygote = None
        elif isinstance(record, ImportedAhead):
            latest = zygote = record
        elif zygote is not None and _forked(record):
            starts, saved = starts + 1, saved + zygote.seconds
    if latest is None:
        return None
    return ImportCosts(latest.modules, latest.seconds, starts, saved, latest.left_out)


def _forked(record: Record) -> bool:
    return isinstance(record, GenerationStarted) and record.start.startswith("zygote")
