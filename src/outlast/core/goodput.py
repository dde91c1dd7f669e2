"""Where the wall time of a job went: the event log, folded into a ledger.

Every launch of the job (a RunStarted record and what follows it) has its place on one axis that
starts at 0 with the first record. Within a launch, and between launches of one boot, monotonic
clocks say how far apart two records are; between others it is wall time, and never less than
nothing. What happened is painted on the axis as spans, each of a category. Where spans overlap,
the first in the order of :class:`Category` counts, and where there is none the job was training:
so every second is counted once, whatever is in the log.

Times are rounded to 2**-20 s (about 1 us), of which a float holds 2**33 s without error: the
categories add up to the wall time exactly, not nearly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from outlast.core.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Progress,
    Quarantined,
    Record,
    Rung,
    RunEnded,
    RunStarted,
    Saved,
    SaveLost,
    TimeoutsLearned,
)

TICKS = 2.0**20  # to a second
FARTHEST = 2.0**31  # seconds; no clock shows more, and no log is longer than twice that
AGENT_DEATH = "agent death"  # the kind of an incident that no fault record tells of
PHASES = {  # the mark that ends a phase of a start -> its name
    "spawned": "stop",  # from the fault's detection: evidence, verdict, the old workers' end
    "started": "spawn",
    "session": "import",
    "group": "group",
    "loaded": "load",
    "first_step": "first_step",
}


class Category(str, Enum):
    """What a second was spent on. Where two apply, the one further up counts."""

    DOWN = "down"  # nothing ran: from a launcher's last record to the next launcher's first
    LOADING = "loading"  # a checkpoint was loaded
    SAVING = "saving"  # training stood still for a checkpoint
    DETECTING = "detecting"  # progress had ended and nobody knew
    STOPPING = "stopping"  # from the last step to the launcher's last record
    RECOVERING = "recovering"  # from a fault's detection to the next first step
    STARTING = "starting"  # from a launcher's start to its first generation's first step
    LOST_WORK = "lost_work"  # steps that had to be computed again
    TRAINING = "training"  # steps that were kept


@dataclass(frozen=True)
class Incident:
    """A fault that led to an action, or an agent's death, and what followed.

    Args:
        kind: a fault's kind, or ``AGENT_DEATH``.
        at: seconds from the first record to the end of progress.
        step: completed steps that were known when it happened; -1: none.
        action: the rung; "run again" after an agent's death.
        detected_after: seconds from the end of progress to the fault's record; None: not known.
        running_again_after: seconds from the end of progress to the next first step of every
            rank; None: it did not come to that.
        steps_lost: steps that had to be computed again; None: nothing was loaded afterwards.
        phases: seconds of each phase of the start that followed, by :data:`PHASES`.
    """

    kind: str
    at: float
    node: str
    rank: int
    generation: int
    step: int
    reason: str
    action: str
    action_reason: str
    detected_after: float | None = None
    running_again_after: float | None = None
    steps_lost: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SavesSeen:
    """What the log says about checkpoints.

    Args:
        committed: how many were committed.
        failed: how many could not be written.
        median_seconds: how long training stood still for one that was committed; None: there is none.
        last_step: step of the newest; None: there is none.
        quarantined: name and reason of each copy that was set aside.
    """

    committed: int
    failed: int
    median_seconds: float | None
    last_step: int | None
    quarantined: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Ledger:
    """The account of a job.

    Args:
        began: wall time of the first record.
        wall: seconds from the first record to the last.
        seconds: of each category; they add up to ``wall`` exactly.
        stepped: whether any step was recorded; without one nothing can count as training.
        timeouts: in force at the end, by section.
        end: the last launcher's last word; None: it was killed, or goes on.
    """

    run_id: str
    began: float
    launches: int
    generations: int
    wall: float
    seconds: dict[Category, float]
    stepped: bool
    incidents: tuple[Incident, ...]
    saves: SavesSeen
    timeouts: dict[str, float]
    end: RunEnded | None

    @property
    def goodput(self) -> float:
        """The share of the wall time that became kept steps; 0 of an empty log."""
        return self.seconds[Category.TRAINING] / self.wall if self.wall else 0.0


def fold(records: Iterable[Record]) -> Ledger:
    """Return the ledger of a log; the order of the records is that of the file."""
    account = _Account()
    for launch in _launches(list(records)):
        account.take(launch)
    return account.ledger()


@dataclass(frozen=True)
class _Launch:
    """One launcher's records, in the order of their places on the axis."""

    records: tuple[tuple[float, Record], ...]
    begin: float
    end: float
    origin: float  # the clock at ``begin``
    last: Record  # the one at ``end``
    boot_id: str

    def place(self, clock: float) -> float:
        """Return where on the axis a clock of this launch stands."""
        return min(self.end, self.begin + max(0.0, _ticks(clock - self.origin)))


def _ticks(seconds: float) -> float:
    """Round to what adds up without error; what is no time at all is none."""
    if math.isnan(seconds):
        return 0.0
    return round(max(-FARTHEST, min(FARTHEST, seconds)) * TICKS) / TICKS


def _launches(records: Sequence[Record]) -> Iterable[_Launch]:
    starts = [at for at, record in enumerate(records) if at == 0 or isinstance(record, RunStarted)]
    previous: _Launch | None = None
    for start, stop in zip(starts, [*starts[1:], len(records)], strict=True):
        previous = _launch(records[start:stop], previous)
        yield previous


def _launch(records: Sequence[Record], previous: _Launch | None) -> _Launch:
    head = records[0]
    boot_id = head.boot_id if isinstance(head, RunStarted) else ""
    begin = 0.0
    if previous is not None:
        if boot_id and boot_id == previous.boot_id:
            gap = head.clock - previous.last.clock
        else:
            gap = head.time - previous.last.time
        begin = min(2 * FARTHEST, previous.end + max(0.0, _ticks(gap)))
    origin = head.clock if math.isfinite(head.clock) else 0.0

    def place(clock: float) -> float:
        return min(2 * FARTHEST, begin + max(0.0, _ticks(clock - origin)))

    last = max(records, key=lambda record: place(record.clock))
    placed = sorted(((place(_moment(record)), record) for record in records), key=lambda pair: pair[0])
    return _Launch(tuple(placed), begin, place(last.clock), origin, last, boot_id)


def _moment(record: Record) -> float:
    """Return when it happened; a first step is older than its record by the agent's next look."""
    if isinstance(record, FirstStep):
        mark = record.marks.get("first_step", record.clock)
        return mark if 0 < mark < record.clock else record.clock
    return record.clock


@dataclass
class _Spans:
    """Spans on the axis, and how long each category is the first of those that overlap."""

    edges: list[tuple[float, int, Category]] = field(default_factory=list)

    def paint(self, category: Category, begin: float, end: float) -> None:
        if begin < end:
            self.edges += [(begin, 1, category), (end, -1, category)]

    def seconds(self, wall: float) -> dict[Category, float]:
        """Return the seconds of each category between 0 and ``wall``."""
        found = dict.fromkeys(reversed(Category), 0.0)
        open_spans = dict.fromkeys(Category, 0)
        open_spans[Category.TRAINING] = 1
        at = 0.0
        for edge, change, category in [*sorted(self.edges), (wall, 0, Category.TRAINING)]:
            if edge > at:
                found[next(name for name in Category if open_spans[name])] += edge - at
                at = edge
            open_spans[category] += change
        return found
