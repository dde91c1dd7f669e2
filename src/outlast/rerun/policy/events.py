"""What a rerun machine hears and says: findings, results of reruns, loads and starts; orders and verdicts.

A rank is named by its index, a device by an identifier that stays with the hardware (the UUID of a GPU): the
same index is another device after a restart, and another index may be the same one.

An incident as it is kept: what was found, what was tried, and what it came to, in plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any


class RerunMode(str, Enum):
    """What reruns are for (Megatron-LM, ``--rerun-mode``)."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"  # every step twice, to measure the differences


class Verdict(str, Enum):
    """What an incident came to."""

    TRANSIENT = "transient"  # gone in the rerun, whose results count
    PERSISTENT = "persistent"  # it stays with a device
    BAD_CHECKPOINT = "bad checkpoint"  # it stays with a copy
    DATA_OR_MODEL = "data or model"  # it comes on every device
    INCONCLUSIVE = "inconclusive"  # nothing is left that could tell


class Remedy(str, Enum):
    """What all ranks, or the launcher, are to do.

    Those of ``IN_PLACE`` are runs of the same step; those of ``RESTARTS`` end the generation.
    """

    GO_ON = "go on"
    RERUN = "rerun the step"
    CONFIRM = "run the step once more"
    SWAP = "swap the data of two ranks"
    LOAD_OLDER = "load another copy"
    SPARE = "put a spare in the place of the device"
    PERMUTE = "permute the ranks"
    EXCLUDE = "ask the scheduler for another node"
    SKIP_BATCH = "skip the batch"
    ROLL_BACK = "roll back"
    STOP = "stop"


IN_PLACE = frozenset({Remedy.RERUN, Remedy.CONFIRM, Remedy.SWAP})
RESTARTS = frozenset({Remedy.LOAD_OLDER, Remedy.SPARE, Remedy.PERMUTE, Remedy.EXCLUDE, Remedy.ROLL_BACK})


@dataclass(frozen=True)
class Means:
    """What can be done at present besides a rerun in place.

    Args:
        peers: for a rank another one that can compute its data with the same parameters.
        another_copy: there is a copy besides the loaded one that nothing speaks against.
        spare: a spare can take a device's place.
        permute: a restart can give ranks other devices.
        exclude: the scheduler can be told to give another node.
    """

    peers: Mapping[int, int] = field(default_factory=dict)
    another_copy: bool = False
    spare: bool = False
    permute: bool = False
    exclude: bool = False


@dataclass(frozen=True)
class Started:
    """The ranks of a generation run; ``devices`` by rank."""

    devices: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """The ranks go on from a copy.

    Args:
        step: completed steps.
        tier: where it was loaded from; empty: a fresh start.
        copy: its name there.
    """

    step: int
    tier: str = ""
    copy: str = ""


@dataclass(frozen=True)
class Found:
    """The first run of a step has a result that was rejected.

    Args:
        step: index of the step.
        check: what was rejected: the loss, a gradient.
        value: what it was, for people.
        ranks: on which it came up before anything was reduced; empty: nobody can say.
        digests: by rank, of what each one computed from its own data before anything was reduced.
        means: what can be done at present.
    """

    step: int
    check: str
    value: str = ""
    ranks: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    means: Means = Means()


@dataclass(frozen=True)
class Reran:
    """All ranks have run the step again, with the same data, states and random numbers.

    Args:
        rejected: ranks on which the result was rejected.
        digests: by rank, as in :class:`Found`.
        differences: by rank, of the loss from the run before, relative; empty: only digests tell.
    """

    rejected: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    differences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Swapped:
    """Ranks have run the step with each other's data.

    Args:
        rejected: ranks on which the result was rejected.
        same_state: the ranks of each pair had bitwise the same parameters.
    """

    rejected: tuple[int, ...] = ()
    same_state: bool = True


@dataclass(frozen=True)
class Passed:
    """Every rank has done a step in which nothing was rejected; told while an incident is open."""

    step: int


Event = Started | Loaded | Found | Reran | Swapped | Passed


@dataclass(frozen=True)
class Order:
    """What follows an event, equal on every rank that hears the same events.

    Args:
        remedy: which.
        reason: one sentence; empty where there is nothing to do.
        verdict: what the incident came to, where that is clear now.
        pairs: ranks that exchange their data.
        device: the convicted one, or the one that a restart is to replace.
        place: tier and name of the copy that is not to be loaded again.
        exit_code: of the workers, for a restart or the end.
    """

    remedy: Remedy = Remedy.GO_ON
    reason: str = ""
    verdict: Verdict | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    device: str = ""
    place: str = ""
    exit_code: int = 0


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
