"""How ranks agree: each reports how its part went, and all draw the same conclusion from all reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outlast.errors import (
    CheckpointError,
    CheckpointMismatch,
    OutlastError,
    PeerFailed,
    StaleGeneration,
    TierUnreachable,
    UsageError,
)
from outlast.fields import Damage, DamagedCopy
from outlast.ports import Exchange, ExchangeFailed


class Outcome(str, Enum):
    """How a rank's part went; of several, the one that comes first here decides."""

    STALE = "stale"  # a newer generation is at work: StaleGeneration on every rank
    USAGE = "usage"  # the caller asked for what cannot be: UsageError on every rank
    DAMAGED = "damaged"  # the copy is not what was committed
    MISMATCH = "mismatch"  # a sound copy that does not fit: CheckpointMismatch on every rank
    UNREACHABLE = "unreachable"  # a tier does not answer: TierUnreachable on every rank
    SYSTEM = "system"  # the operating system refused
    RAISED = "raised"  # an exception that is not ours, as one of an object's own state_dict
    FAILED = "failed"  # anything else
    FINE = "fine"


_ORDER = {outcome: place for place, outcome in enumerate(Outcome)}
_OUTCOME_OF: tuple[tuple[type[BaseException], Outcome], ...] = (
    (StaleGeneration, Outcome.STALE),
    (UsageError, Outcome.USAGE),
    (DamagedCopy, Outcome.DAMAGED),
    (CheckpointMismatch, Outcome.MISMATCH),
    (TierUnreachable, Outcome.UNREACHABLE),
    (OSError, Outcome.SYSTEM),
    (OutlastError, Outcome.FAILED),
)
_RAISED: dict[Outcome, type[OutlastError]] = {
    Outcome.STALE: StaleGeneration,
    Outcome.USAGE: UsageError,
    Outcome.MISMATCH: CheckpointMismatch,
    Outcome.UNREACHABLE: TierUnreachable,
}


@dataclass(frozen=True)
class Report:
    """What one rank says of its part.

    Args:
        outcome: how it went.
        text: why it did not go well.
        data: what the others need of it.
        damage: where a copy is damaged.
    """

    outcome: Outcome
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    damage: Damage | None = None

    @classmethod
    def of(cls, error: Exception) -> Report:
        """Return the report of a part that ended with an error."""
        outcome = next((out for kind, out in _OUTCOME_OF if isinstance(error, kind)), Outcome.RAISED)
        text = str(error) if isinstance(error, OutlastError) else f"{type(error).__name__}: {error}"
        return cls(outcome, text, damage=error.damage if isinstance(error, DamagedCopy) else None)

    def to_json(self) -> str:
        """Return the report as a text for the other ranks."""
        damage = vars(self.damage) if self.damage else None
        return json.dumps([self.outcome.value, self.text, self.data, damage])

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: it is no report.
        """
        try:
            outcome, reason, data, damage = json.loads(text)
            return cls(Outcome(outcome), reason, data, Damage(**damage) if damage else None)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no report of a rank: {text[:80]!r} ({error})") from error


@dataclass(frozen=True)
class Agreed:
    """All reports of a round, equal on every rank.

    Args:
        reports: by rank.
        error: what this rank's own part raised.
    """

    reports: tuple[Report, ...]
    error: Exception | None = None

    @property
    def worst(self) -> tuple[int, Report]:
        """The rank whose report decides, and the report; the lowest rank of equals."""
        rank = min(range(len(self.reports)), key=lambda each: _ORDER[self.reports[each].outcome])
        return rank, self.reports[rank]

    @property
    def fine(self) -> bool:
        """Whether every rank's part went well."""
        return self.worst[1].outcome is Outcome.FINE

    @property
    def text(self) -> str:
        """What went wrong, of each rank where something did; the deciding one first."""
        first, _ = self.worst
        others = [rank for rank, report in enumerate(self.reports) if report.text and rank != first]
        return "; ".join(f"rank {rank}: {self.reports[rank].text}" for rank in (first, *others)[:4])

    def raise_common(self, fallback: type[OutlastError] | None = None) -> None:
        """Raise what every rank raises for the deciding report, if its kind calls for an exception.

        Args:
            fallback: for outcomes that have no exception of their own; None: they raise nothing.
                With CheckpointError, which says nothing of the copies, an exception that is not ours stays
                what it is on the rank where it came up, and is PeerFailed on the others.
        """
        outcome = self.worst[1].outcome
        if outcome is Outcome.RAISED and fallback is CheckpointError:
            if self.error is not None:
                raise self.error
            raise PeerFailed(f"this rank ends because another one failed: {self.text}")
        kind = _RAISED.get(outcome, fallback)
        if kind is not None and outcome is not Outcome.FINE:
            raise kind(self.text) from self.error


class Rounds:
    """Rounds of reports over an exchange.

    Args:
        exchange: between the ranks.
        timeout: seconds that ranks wait for each other in a round.
    """

    def __init__(self, exchange: Exchange, timeout: float) -> None:
        self._exchange = exchange
        self._timeout = timeout

    def hold(self, topic: str, part: Callable[[], dict[str, Any]]) -> Agreed:
        """Do this rank's part, report how it went, and return all reports.

        Whatever the part raises reaches every rank as a report; none is left waiting.

        Args:
            topic: what the round is about.
            part: what this rank does; returns what the others need of it.

        Raises:
            ExchangeFailed: ranks did not answer.
        """
        error: Exception | None = None
        try:
            report = Report(Outcome.FINE, data=part())
        except ExchangeFailed:
            raise
        except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            error, report = caught, Report.of(caught)
        answers = self._exchange.gather(topic, report.to_json(), self._timeout)
        return Agreed(tuple(map(Report.from_json, answers)), error)
