"""What is said about slow ranks: rows of measured times, the places of the ranks, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Group = tuple[int, tuple[int, ...], str]
# Sections in which outlast.Batches has its micro-batches measured: the last of a step, and the others.
MICRO_STEP, LAST_MICRO_STEP = "micro-step", "last-micro-step"
BENCHMARK = "outlast.benchmark"  # a section that is no part of a step: the same product on every rank


class Kind(str, Enum):
    """What a rank does in a section."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    DATA = "data"
    OTHER = "other"


class State(str, Enum):
    """What a verdict says of a rank."""

    ON = "on"  # it slows the job
    OFF = "off"  # it no longer does
    UNKNOWN = "unknown"  # its times are missing or are no numbers; it may be slow or not


@dataclass(frozen=True, slots=True)
class Row:
    """The times of one section on one rank in one window; seconds, nan: unknown.

    Args:
        window: the number of the window, counted by steps; equal on all ranks.
        count: how often the section was entered.
        median, p90, longest: of one entry.
        total: of all entries.
        waiting: the part of ``total`` in which the rank waited for other ranks. A row whose count is 0, whose
            total is no number from 0 on, or whose waiting is neither unknown nor a part of the total, tells
            nothing.
    """

    rank: int
    section: str
    kind: Kind
    window: int
    count: int
    median: float
    p90: float
    longest: float
    total: float
    waiting: float


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and what it computes.

    Args:
        device: the model of the device; "" if unknown.
        stage: the pipeline stage.
        coordinates: along the axes that give ranks different work, such as expert and context
            parallelism. Not those that give equal work: data and tensor parallelism.
    """

    rank: int
    node: str
    device: str = ""
    stage: int = 0
    coordinates: tuple[int, ...] = ()

    @property
    def group(self) -> Group:
        """What peers share: ranks of one group have the same work and the same device."""
        return (self.stage, self.coordinates, self.device)


@dataclass(frozen=True)
class Verdict:
    """What is known of a rank that slows the job, no longer does, or cannot be judged.

    Args:
        node: of the rank; "" if unknown.
        section: "" for the rank as a whole.
        slowdown: its time in the section over that of its peers; 1: as fast as they are, nan: unknown.
        share_of_steps: the part of the latest windows in which it was slow; 0 to 1.
        confidence: 1 minus the probability that healthy ranks look like this; 0 to 1.
        job_slowdown: an estimate of the time of the job's step over what it would be with this rank as
            fast as its peers; too high where the rank hides another wait. 1: no loss, nan: unknown.
        windows: how many windows in a row say so.
        reason: one sentence.
    """

    rank: int
    node: str
    kind: Kind
    section: str
    slowdown: float
    share_of_steps: float
    confidence: float
    job_slowdown: float
    windows: int
    reason: str
    state: State
