"""Events, orders and incidents of the rerun machine.

A rank is named by its index, a device by an identifier that stays with the hardware (the UUID of a GPU):
after a restart the same rank may have another device.
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
    """The cause of an incident."""

    TRANSIENT = "transient"  # the rerun is clean, and its results count
    PERSISTENT = "persistent"  # a device
    BAD_CHECKPOINT = "bad checkpoint"  # the copy that was loaded
    DATA_OR_MODEL = "data or model"  # it occurs on every device
    INCONCLUSIVE = "inconclusive"


class Remedy(str, Enum):
    """The next action of all ranks, or of the launcher.

    Those of ``IN_PLACE`` run the same step again; those of ``RESTARTS`` end the generation.
    """

    CONTINUE = "continue"
    RERUN = "rerun the step"
    CONFIRM = "rerun the step once more"
    SWAP = "swap the data of two ranks"
    LOAD_OLDER = "load another copy"
    SPARE = "replace the node of the device"
    SKIP_BATCH = "skip the batch"
    ROLL_BACK = "roll back"
    STOP = "stop"


IN_PLACE = frozenset({Remedy.RERUN, Remedy.CONFIRM, Remedy.SWAP})
RESTARTS = frozenset({Remedy.LOAD_OLDER, Remedy.SPARE, Remedy.ROLL_BACK})


@dataclass(frozen=True)
class Means:
    """The remedies that are possible besides a rerun in place.

    Args:
        peers: for a rank another one that can compute its data with the same parameters.
        another_copy: there is a copy besides the loaded one.
        spare: a spare can replace a device's node.
    """

    peers: Mapping[int, int] = field(default_factory=dict)
    another_copy: bool = False
    spare: bool = False


@dataclass(frozen=True)
class Started:
    """A generation has started; ``devices`` by rank."""

    devices: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """The ranks have loaded a copy.

    Args:
        step: completed steps.
        tier: of the copy; empty: a fresh start.
        copy: its name in the tier.
    """

    step: int
    tier: str = ""
    copy: str = ""


@dataclass(frozen=True)
class Found:
    """The result of the first run of a step was rejected.

    Args:
        step: index of the step.
        check: what was rejected: the loss, a gradient.
        value: for messages.
        ranks: whose own results were rejected before the reduction; empty: not known.
        digests: by rank, of what each one computed from its own data before the reduction.
        means: the remedies that are possible.
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
        differences: by rank, relative difference of the loss to the previous run; empty: compare digests.
    """

    rejected: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    differences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Swapped:
    """Pairs of ranks have run the step with each other's data.

    Args:
        rejected: ranks on which the result was rejected.
        same_state: the ranks of each pair had bitwise equal parameters.
    """

    rejected: tuple[int, ...] = ()
    same_state: bool = True


@dataclass(frozen=True)
class Passed:
    """A step was completed on every rank without a rejection, while an incident is open."""

    step: int


Event = Started | Loaded | Found | Reran | Swapped | Passed


@dataclass(frozen=True)
class Order:
    """The answer to an event, equal on every rank that gets the same events.

    Args:
        remedy: what to do.
        reason: one sentence; empty: there is nothing to do.
        verdict: the cause of the incident, if it is known now.
        pairs: ranks that exchange their data.
        device: the faulty one, or the one that a restart replaces.
        place: tier and name of the copy that must not be loaded again.
        exit_code: of the workers, for a restart or the end.
    """

    remedy: Remedy = Remedy.CONTINUE
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
        remedy: what was ordered.
        devices: of all ranks at that time.
        at: when, in seconds.
        reason: one sentence.
        result: in words; empty: not known yet.
    """

    remedy: Remedy
    devices: tuple[str, ...]
    at: float
    reason: str
    result: str = ""


@dataclass
class Incident:
    """All rejected results of one step, over every rerun and restart.

    Args:
        step: index of the step; later findings in it belong to the same incident.
        check: what was rejected first.
        value: of it, for messages.
        began: when, in seconds.
        ranks: whose results were rejected; empty: not known.
        devices: of all ranks at the last finding.
        digests: by rank, of the first run.
        since_load: steps between the last load and the finding.
        place: tier and name of the copy that was loaded; empty: a fresh start.
        rejected_on: devices whose results were rejected, in that order.
        attempts: the remedies so far.
        pending: the remedy whose outcome is not known yet.
        pairs: ranks that exchange their data, while that is pending.
        verdict: the cause, once known.
        culprit: the device or copy that the verdict names.
        reason: of the verdict.
        skipped: whether the batch is skipped whenever the step is trained on.
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
        """Say whether a remedy was ordered before while the job had exactly these devices."""
        return any(
            one.remedy is remedy and frozenset(one.devices) == frozenset(devices) for one in self.attempts
        )

    @property
    def restarts(self) -> int:
        """How many restarts were ordered."""
        return sum(one.remedy in RESTARTS for one in self.attempts)

    def resolve(self, result: str) -> None:
        """Record the outcome of the pending remedy."""
        if self.pending is not None:
            self.attempts[-1].result = result
        self.pending, self.pairs = None, ()

    def conclude(self, verdict: Verdict, reason: str, culprit: str = "") -> None:
        """Record the cause."""
        self.verdict, self.reason, self.culprit = verdict, reason, culprit

    def seen_on(self, devices: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        """Record on which devices the result was rejected."""
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
            ValueError: it is not such a record.
        """
        try:
            return cls._of(dict(record))
        except (AttributeError, KeyError, TypeError, OverflowError) as error:
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
