"""What a rerun machine hears and says: findings, results of reruns, loads and starts; orders and verdicts.

A rank is named by its index, a device by an identifier that stays with the hardware (the UUID of a GPU): the
same index is another device after a restart, and another index may be the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


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
