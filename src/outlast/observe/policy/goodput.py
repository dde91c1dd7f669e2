"""Goodput: where the wall time of a job went, as a ledger of the event log.

Every launch of the job (a RunStarted record and what follows it) is on one time axis that starts at 0 with
the first record. Within a launch, and between launches of one boot, monotonic clocks give the distance of two
records; otherwise wall time does, but never less than 0. Events are spans on the axis, each of a category.
Where spans overlap, the first category in the order of :class:`Category` counts; where there is none, the job
was training: so every second is counted once, whatever is in the log.

Times are rounded to 2**-20 s (about 1 us), of which a float holds 2**33 s without error, so that the
categories add up to the wall time exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.recovery.policy import events
from outlast.recovery.policy.events import (
    FaultSeen,
    Loaded,
    Quarantined,
    Record,
    RecoveryAction,
    RunEnded,
    RunStarted,
    Saved,
    SaveLost,
    ScriptSaved,
    StepSource,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_Kind = TypeVar("_Kind", bound=Record)
TICKS = 2.0**20  # to a second
FARTHEST = 2.0**31  # seconds; no clock shows more, and no log is longer than twice that
COUNTED, ANNOUNCED = StepSource.COUNTED.value, StepSource.ANNOUNCED.value
AGENT_DEATH = "agent death"  # the kind of an incident that no fault record tells of
# The mark that ends a phase of a start, and its name. "stop" begins with the fault's record.
PHASES = {
    "spawned": "stop",
    "started": "spawn",
    "session": "import",
    "group": "group",
    "loaded": "load",
    "first_step": "first_step",
}


class Category(str, Enum):
    """The categories of time; where two apply, the first one counts."""

    DOWN = "down"  # nothing ran: from a launcher's last record to the next launcher's first
    LOADING = "loading"  # a checkpoint was loaded
    SAVING = "saving"  # training stood still for a checkpoint
    DETECTING = "detecting"  # progress had ended and nobody knew
    STOPPING = "stopping"  # from the last step to the launcher's last record
    RECOVERING = "recovering"  # from a fault's detection to the next first step
    STARTING = "starting"  # from a launcher's start to its first generation's first step
    LOST_WORK = "lost_work"  # steps that had to be computed again
    TRAINING = "training"  # steps that were kept


Span = tuple[Category, float, float]


@dataclass(frozen=True)
class Incident:
    """A fault that led to an action, or an agent's death, and its recovery.

    Args:
        kind: a fault's kind, or ``AGENT_DEATH``.
        at: seconds from the first record to the end of progress.
        step: completed steps that were known when it happened; -1: none.
        action: the kind; "run again" after an agent's death.
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
class Ledger:
    """The ledger of a job.

    Args:
        began: wall time of the first record.
        wall: seconds from the first record to the last.
        seconds: of each category; they add up to ``wall`` exactly.
        timeouts: in force at the end, by section.
        end: the last launcher's last word; None: it was killed, or goes on.
        own: checkpoints of the script's own that it announced.
        steps_unknown: the script has no session and announced no step, so steps are optimizer steps of one
            process, counted from 0, and nobody knows what it loaded.
        unrestored: its steps are unknown because its session restored nothing.
        spans: which category counted from where to where, in seconds from the first record, without gaps.
    """

    run_id: str
    began: float
    launches: int
    generations: int
    wall: float
    seconds: dict[Category, float]
    incidents: tuple[Incident, ...]
    saves: tuple[Saved, ...]
    lost_saves: tuple[SaveLost, ...]
    quarantined: tuple[Quarantined, ...]
    trust: tuple[events.TrustChanged, ...]
    timeouts: dict[str, float]
    end: RunEnded | None
    own: tuple[ScriptSaved, ...]
    steps_unknown: bool
    unrestored: bool
    spans: tuple[Span, ...]

    @property
    def lost_unknown(self) -> bool:
        """Whether the lost work is unknown; it is then counted as training."""
        return self.steps_unknown and (bool(self.incidents) or self.launches > 1)

    @property
    def goodput(self) -> float | None:
        """The share of the wall time spent on kept steps; 0 for an empty log, None if unknown."""
        if self.lost_unknown:
            return None
        return self.seconds[Category.TRAINING] / self.wall if self.wall else 0.0


def fold(records: Iterable[Record]) -> Ledger:
    """Return the ledger of a log; the order of the records is that of the file."""
    log = list(records)
    launches = list(_launches(log))
    unknown = _steps_unknown(log)
    account = _Account(unknown)
    for launch in launches:
        account.take(launch)
    wall = launches[-1].end if launches else 0.0
    account.paint(Category.TRAINING, 0.0, wall)
    spans = _spans(account.edges)
    timeouts: dict[str, float] = {}
    for learned in _only(log, events.TimeoutsLearned):
        timeouts.update(learned.timeouts)
    return Ledger(
        run_id=next((start.run_id for start in reversed(_only(log, RunStarted))), ""),
        began=log[0].time if log else 0.0,
        launches=len(launches),
        generations=len(_only(log, events.GenerationStarted)),
        wall=wall,
        seconds=_seconds(spans),
        incidents=tuple(account.incidents),
        saves=tuple(_only(log, Saved)),
        lost_saves=tuple(_only(log, SaveLost)),
        quarantined=tuple(_only(log, Quarantined)),
        trust=tuple(_only(log, events.TrustChanged)),
        timeouts=timeouts,
        end=account.end,
        own=tuple(_only(log, ScriptSaved)),
        steps_unknown=unknown,
        unrestored=unknown and any("session" in one.marks for one in _only(log, events.FirstStep)),
        spans=tuple(spans),
    )


def placed(records: Iterable[Record]) -> Iterator[tuple[float, Record]]:
    """Yield the records of a log, each with its place on the ledger's axis in seconds, launch by launch."""
    for launch in _launches(list(records)):
        yield from launch.records


def _steps_unknown(log: Sequence[Record]) -> bool:
    """Say whether all steps of a log were counted by a process, and none reported."""
    said = (StepSource.SESSION.value, StepSource.ANNOUNCED.value)
    steps = [one.source for one in log if isinstance(one, (events.FirstStep, events.Progress, FaultSeen))]
    told = any(isinstance(one, (Loaded, Saved, SaveLost, ScriptSaved)) for one in log)
    return COUNTED in steps and not told and not any(source in said for source in steps)


def _only(records: Iterable[Record], kind: type[_Kind]) -> list[_Kind]:
    return [record for record in records if isinstance(record, kind)]


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
        """Return the position on the axis of a clock value of this launch."""
        return min(self.end, self.begin + max(0.0, _ticks(clock - self.origin)))

    def before(self, at: float, seconds: float) -> float:
        return max(self.begin, at - max(0.0, _ticks(seconds)))

    def has(self, *kinds: type[Record]) -> bool:
        return any(isinstance(record, kinds) for _, record in self.records)

    @property
    def unwatched(self) -> bool:
        """Whether a session without a launcher wrote it, so that the begin of its steps is unknown."""
        return self.has(Saved, SaveLost, Loaded) and not self.has(events.GenerationStarted)


def _ticks(seconds: float) -> float:
    """Round to a multiple of 2**-20 s, within the range of the axis; NaN becomes 0."""
    if math.isnan(seconds):
        return 0.0
    return round(max(-FARTHEST, min(FARTHEST, seconds)) * TICKS) / TICKS


def _launches(records: Sequence[Record]) -> Iterable[_Launch]:
    starts = [at for at, record in enumerate(records) if at == 0 or isinstance(record, RunStarted)]
    previous: _Launch | None = None
    for start, stop in pairwise([*starts, len(records)]):
        previous = _launch(records[start:stop], previous)
        yield previous


def _launch(records: Sequence[Record], previous: _Launch | None) -> _Launch:
    """Place each record on the axis; a first step at its mark, since the agent looks periodically."""
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
    placed, answered = [], begin
    for record in records:
        at = place(record.clock)
        if isinstance(record, events.ActionTaken):
            answered = at
        elif isinstance(record, events.FirstStep):
            at = max(answered, min(at, place(record.marks.get("first_step", record.clock))))
        placed.append((at, record))
    placed.sort(key=lambda pair: pair[0])
    return _Launch(tuple(placed), begin, place(last.clock), origin, last, boot_id)


def _spans(edges: Iterable[tuple[float, int, Category]]) -> list[Span]:
    """Return which category was the first among the spans that were open, and from where to where."""
    found: list[Span] = []
    open_spans = dict.fromkeys(Category, 0)
    for (begin, change, category), (end, _, _) in pairwise(sorted(edges)):
        open_spans[category] += change
        if begin < end:
            first = next(name for name in Category if open_spans[name] > 0)
            since = found.pop()[1] if found and found[-1][0] is first else begin
            found.append((first, since, end))
    return found


def _seconds(spans: Iterable[Span]) -> dict[Category, float]:
    found = dict.fromkeys(reversed(Category), 0.0)
    for category, begin, end in spans:
        found[category] += end - begin
    return found


class _Account:
    """Walks over the launches in order; the attributes are the state that is still open."""

    def __init__(self, unknown: bool) -> None:
        self._unknown = unknown  # nobody says what the steps are
        self._own: list[tuple[float, int]] = []  # checkpoints of the script's own: place, step
        self._resumed: set[int] = set()  # generations of this launch of which is known where they went on
        self.edges: list[tuple[float, int, Category]] = []  # +1 where a span begins, -1 where it ends
        self.incidents: list[Incident] = []
        self.end: RunEnded | None = None
        self._launch: _Launch | None = None
        self._unloaded: list[int] = []  # incidents after which nothing was loaded yet
        self._down: list[int] = []  # incidents after which no step was completed yet
        self._waiting: tuple[Category, float] | None = None  # for a first step, and since when
        self._fault: tuple[float, Incident] | None = None  # place of its record; not answered yet
        self._seen: float | None = None  # place of the last fault's record in this launch
        self._stopping: float | None = None
        self._known: list[tuple[float, int]] = []  # places at which a step was known to be completed
        self._step: int  # the furthest of the generation in force
        self._step_at: float  # when it was known
        self._count: int  # steps that the process has counted in the generation in force
        self._early = False  # ``_step_at`` is that of a first step, and more steps may have been completed
        self._loaded: set[int] = set()  # generations of this launch that loaded a checkpoint
        self._commits: dict[str, float] = {}  # places of checkpoints

    def take(self, launch: _Launch) -> None:
        self._begin(launch)
        for at, record in launch.records:
            handler = _HANDLERS.get(type(record))
            if handler is not None:
                handler(self, launch, at, record)
        if self._waiting is not None:
            self.paint(*self._waiting, launch.end)
        if self._stopping is not None:
            self.paint(Category.STOPPING, self._stopping, launch.end)

    def paint(self, category: Category, begin: float, end: float) -> None:
        """Say that a category applies from one place to another one."""
        self.edges += [(begin, 1, category), (max(begin, end), -1, category)]

    def _begin(self, launch: _Launch) -> None:
        """Close the previous launch; one with a launcher and without an end was killed."""
        previous, self._launch = self._launch, launch
        head = launch.records[0][1]
        if previous is not None:
            self.paint(Category.DOWN, previous.end, launch.begin)
            if self.end is None and previous.has(events.GenerationStarted):
                self._bury(previous, head)
        self._waiting = self._fault = self._seen = self._stopping = self.end = None
        self._step, self._step_at, self._count, self._early = -1, launch.begin, 0, False
        self._loaded.clear()
        self._resumed.clear()
        if isinstance(head, RunStarted):
            self._waiting = (Category.STARTING, launch.begin)
            if launch.unwatched and not launch.has(Loaded):
                self._running(launch.begin, head.generation)

    def _bury(self, launch: _Launch, successor: Record) -> None:
        head, generation = launch.records[0][1], launch.last.generation
        node, pid = (head.node, f" (pid {head.pid})") if isinstance(head, RunStarted) else ("", "")
        why = successor.reason if isinstance(successor, RunStarted) else ""
        what = f"the launcher{pid} wrote no end of its run"
        self._down.append(len(self.incidents))
        self._add(Incident(AGENT_DEATH, launch.end, node, -1, generation, self._step, what, "run again", why))

    def _add(self, incident: Incident) -> None:
        self._unloaded.append(len(self.incidents))
        self.incidents.append(incident)

    def _on_first_step(self, launch: _Launch, at: float, record: events.FirstStep) -> None:
        phases: dict[str, float] = {}
        begin = self._seen
        for phase, mark in ((PHASES[name], record.marks[name]) for name in PHASES if name in record.marks):
            end = launch.place(mark)
            if begin is not None:
                phases[phase] = max(0.0, end - begin)
            begin = end if begin is None else max(begin, end)
        if self._down:
            self.incidents[self._down[-1]] = replace(self.incidents[self._down[-1]], phases=phases)
        self._running(at, record.generation, record.source)
        self._count = 0
        self._took_step(at, record)

    def _running(self, at: float, generation: int, source: str = "") -> None:
        """Every rank is training (again)."""
        if self._waiting is None:
            return
        category, since = self._waiting
        self.paint(category, since, at)
        self._waiting = None
        if generation not in self._loaded and source not in (COUNTED, ANNOUNCED):
            self._redo(0.0, since, 0)
        for index in self._down:
            after = max(0.0, at - self.incidents[index].at)
            self.incidents[index] = replace(self.incidents[index], running_again_after=after)
        self._down.clear()

    def _redo(self, begin: float, end: float, step: int) -> None:
        """Training continues from ``step``, reached at ``begin``: later training was lost."""
        self.paint(Category.LOST_WORK, begin, end)
        for index in self._unloaded:
            lost = max(0, self.incidents[index].step - step)
            self.incidents[index] = replace(self.incidents[index], steps_lost=lost)
        self._unloaded.clear()

    def _advance(self, at: float, step: int) -> None:
        if step > self._step:
            self._step, self._step_at = step, at
            self._known.append((at, step))

    def _on_progress(self, launch: _Launch, at: float, record: events.Progress) -> None:
        if record.source == ANNOUNCED and record.generation not in self._resumed:
            self._resumed.add(record.generation)
            since = launch.begin if self._seen is None else self._seen
            if record.resumed >= 0:
                self._redo(self._reached(record.resumed), since, record.resumed)
            else:
                self._resume(record.step, since)
        self._took_step(at, record)

    def _took_step(self, at: float, record: events.FirstStep | events.Progress) -> None:
        counted = record.source == COUNTED
        if self._early and record.step == (self._count if counted else self._step):
            self._step_at = at
        elif not counted:
            self._advance(at, record.step)
        elif record.step > self._count:
            self._count, self._step_at = record.step, at
        self._early = isinstance(record, events.FirstStep)

    def _resume(self, first: int, since: float) -> None:
        """The script announced ``first`` as its first step, after it had stopped at ``since``.

        It resumed from its newest checkpoint before that step. If one of that step existed when the script
        stopped, the script announced the step that it resumed from.
        """
        own = [step for at, step in self._own if step < first or (step == first and at <= since)]
        step = max(own, default=max(0, first - 1))
        self._redo(self._reached(step), since, step)

    def _reached(self, step: int) -> float:
        """Return the place at which a step was reached: where its checkpoint was announced, if it was."""
        saved = next((at for at, own in reversed(self._own) if own == step), None)
        if saved is not None:
            return saved
        return next((at for at, known in reversed(self._known) if known <= step), 0.0)

    def _on_own(self, _: _Launch, at: float, record: ScriptSaved) -> None:
        self._own.append((at, record.step))

    def _on_save(self, launch: _Launch, at: float, record: Saved | SaveLost) -> None:
        begin = launch.before(at, record.seconds)
        self.paint(Category.SAVING, begin, at)
        self._running(begin, record.generation)
        self._advance(at, record.step)
        if isinstance(record, Saved):
            self._commits[record.checkpoint] = at

    def _on_load(self, launch: _Launch, at: float, record: Loaded) -> None:
        self.paint(Category.LOADING, launch.before(at, record.seconds), at)
        reached = self._commits.get(record.checkpoint)
        if reached is None:
            reached = next((where for where, step in reversed(self._known) if step <= record.step), 0.0)
        self._redo(reached, at, record.step)
        self._loaded.add(record.generation)
        self._step, self._step_at = record.step, at
        if launch.unwatched:
            self._running(at, record.generation)

    def _on_fault(self, launch: _Launch, at: float, record: events.FaultSeen) -> None:
        known = 0.0 < record.since <= record.clock
        since = launch.place(record.since) if known else at
        self.paint(Category.DETECTING, since, at)
        incomparable = record.source == COUNTED and not self._unknown
        step = self._step if incomparable else max(record.step, self._step)
        who = (record.node, record.rank, record.generation, step)
        incident = Incident(record.fault, since, *who, record.reason, "", "", evidence=record.evidence)
        self._fault = (at, replace(incident, detected_after=at - since if known else None))

    def _on_action(self, _: _Launch, at: float, record: events.ActionTaken) -> None:
        seen, incident = self._fault or (at, None)
        self._fault = None
        if record.action == RecoveryAction.NONE.value:
            return
        if incident is not None:
            self._down.append(len(self.incidents))
            self._add(replace(incident, action=record.action, action_reason=record.reason))
        if record.action == RecoveryAction.STOP.value:
            self._stopping = seen
            return
        if self._waiting is not None:
            self.paint(*self._waiting, seen)
        self._waiting, self._seen, self._step = (Category.RECOVERING, seen), seen, -1

    def _on_end(self, _: _Launch, at: float, record: RunEnded) -> None:
        self.end = record
        self._down.clear()
        self._stopping = at if self._stopping is None else self._stopping
        if record.exit_code == 0 and self._waiting is None:
            self._stopping = min(self._stopping, self._step_at)


_HANDLERS: dict[type[Record], Callable[[_Account, _Launch, float, Any], None]] = {
    events.FirstStep: _Account._on_first_step,
    events.Progress: _Account._on_progress,
    ScriptSaved: _Account._on_own,
    events.FaultSeen: _Account._on_fault,
    events.ActionTaken: _Account._on_action,
    Saved: _Account._on_save,
    SaveLost: _Account._on_save,
    Loaded: _Account._on_load,
    RunEnded: _Account._on_end,
}
