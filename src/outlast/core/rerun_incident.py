"""An incident as it is kept: what was found, what was tried, and what it came to, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from outlast.core.rerun_events import RESTARTS, Remedy, Verdict

FORMAT = 1


@dataclass
class Attempt:
    """One remedy and its outcome.

    Args:
        remedy: which.
        devices: of all ranks when it was ordered.
        at: when, in seconds.
        reason: why.
        result: what came of it; empty: not known yet.
    """

    remedy: Remedy
    devices: tuple[str, ...]
    at: float
    reason: str
    result: str = ""


@dataclass
class Incident:
    """All findings in one step, over every rerun and restart.

    Args:
        step: index of the step; whatever is found in it again belongs to the same incident.
        check: what was rejected first.
        value: what it was.
        began: when, in seconds.
        ranks: on which it came up; empty: nobody can say.
        devices: of all ranks when it was found last.
        digests: by rank, of the first run.
        since_load: steps between the last load and the finding.
        place: tier and name of the copy that was loaded; empty: a fresh start.
        rejected_on: devices on which it was seen, in that order.
        attempts: what was tried.
        pending: the remedy of which the outcome is awaited.
        pairs: ranks that exchange their data, while that is pending.
        verdict: what it came to.
        culprit: the device or copy that the verdict is about.
        reason: of the verdict.
        skipped: whether the batch is left out whenever the step comes by.
    """

    step: int
    check: str
    value: str
    began: float
    ranks: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    since_load: int = 0
    place: str = ""
    rejected_on: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    pending: Remedy | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    verdict: Verdict | None = None
    culprit: str = ""
    reason: str = ""
    skipped: bool = False

    def tried(self, remedy: Remedy, devices: tuple[str, ...]) -> bool:
        """Say whether a remedy was ordered before while the job had these very devices."""
        return any(
            one.remedy is remedy and frozenset(one.devices) == frozenset(devices) for one in self.attempts
        )

    @property
    def restarts(self) -> int:
        """How many restarts were ordered."""
        return sum(one.remedy in RESTARTS for one in self.attempts)

    def came_to(self, result: str) -> None:
        """Write down the outcome of the remedy that is pending."""
        if self.pending is not None:
            self.attempts[-1].result = result
        self.pending, self.pairs = None, ()

    def judged(self, verdict: Verdict, reason: str, culprit: str = "") -> None:
        """Write down what it comes to."""
        self.verdict, self.reason, self.culprit = verdict, reason, culprit

    def seen_on(self, devices: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        """Write down on which devices the result was rejected."""
        for rank in ranks:
            if rank < len(devices) and devices[rank] not in self.rejected_on:
                self.rejected_on.append(devices[rank])

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"format": FORMAT, **_plain(asdict(self))}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Incident:
        """Read what :meth:`to_record` returned.

        Raises:
            ValueError: it is no such record.
        """
        try:
            return cls._of(dict(record))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"a record of an incident was expected: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Incident:
        version = values.pop("format")
        if version != FORMAT:
            raise ValueError(f"an incident is kept in format {version!r}, this outlast knows {FORMAT}")
        names = {one.name for one in fields(cls)}
        if set(values) != names:
            raise ValueError(f"an incident has the fields {sorted(names)}, found {sorted(values)}")
        if type(values["step"]) is not int or not isinstance(values["began"], (int, float)):
            raise ValueError(f"step and time of an incident are numbers, found {values['step']!r}")
        for name in ("devices", "digests"):
            values[name] = tuple(map(str, values[name]))
        values["ranks"] = tuple(map(int, values["ranks"]))
        values["pairs"] = tuple((int(one), int(other)) for one, other in values["pairs"])
        values["rejected_on"] = list(map(str, values["rejected_on"]))
        values["attempts"] = [
            Attempt(Remedy(one["remedy"]), tuple(one["devices"]), one["at"], one["reason"], one["result"])
            for one in values["attempts"]
        ]
        values["pending"] = None if values["pending"] is None else Remedy(values["pending"])
        values["verdict"] = None if values["verdict"] is None else Verdict(values["verdict"])
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, (Remedy, Verdict)):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
