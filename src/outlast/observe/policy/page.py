"""What the page of a run shows: the ledger of its log, cut to a size that a browser can show.

:class:`History` keeps of a log what the page needs while the log grows; :func:`view` makes the page's
content from it. A run of any length gives a view of the same size: the newest of each kind, and how many are
left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from outlast.observe.policy import goodput, heat, node_logs
from outlast.observe.policy.goodput import Category, Incident, Ledger
from outlast.observe.policy.heat import Heat, Temperatures
from outlast.recovery.policy import events
from outlast.recovery.policy.events import Record, StepTimes, Telemetry

MOST_INCIDENTS = 100
MOST_GENERATIONS = 200
MOST_CHECKPOINTS = 50
MOST_SIGNS = 50  # XIDs and silent devices
MOST_SAVES = 400  # marks of checkpoints in the timeline
MOST_RECORDS = 200_000  # of a run that are kept; older ones are dropped
_MOST_TIMES = 2_000  # records of step times that are kept
_HEAT_ROWS, _HEAT_COLUMNS = 32, 96
_PASSING = (
    events.Note,
    events.Compared,
    events.ImportsSeen,
    events.ImportedAhead,
    events.StartedAgain,
    StepTimes,
    Telemetry,
)  # of several in a row the last one says how far the log goes
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Part:
    """A category of the wall time.

    Args:
        seconds: the parts of a run add up to its wall time.
        share: of the wall time, from 0 to 1.
        unknown: what it says cannot be known: the script keeps its own checkpoints.
    """

    category: Category
    seconds: float
    share: float
    unknown: bool


@dataclass(frozen=True)
class GenerationSeen:
    """A generation of workers.

    Args:
        began, ended: seconds from the first record of the run; ended: where the next one began.
        start: "zygote" or "cold: <why>".
    """

    number: int
    began: float
    ended: float
    ranks: int
    start: str
    reason: str


@dataclass(frozen=True)
class Numbered:
    """An incident, with its number among all of the run, from 1."""

    number: int
    incident: Incident


@dataclass(frozen=True)
class CheckpointSeen:
    """A checkpoint that was committed, loaded, or set aside.

    Args:
        time: wall time of the newest record about it.
        tiers: where copies were, as far as the log says.
        trust: the latest word: "committed", "loaded", "proven", "suspect", "quarantined", "released" or
            "pruned".
    """

    name: str
    step: int
    time: float
    tiers: tuple[str, ...]
    trust: str
    reason: str


@dataclass(frozen=True)
class View:
    """The content of a page.

    Args:
        began: wall time of the first record.
        wall: seconds from the first record to the last.
        parts: of the wall time; without time, none.
        generations, incidents, checkpoints, signs: the newest, in their order.
        saves: seconds from the first record at which a checkpoint was committed.
        loads: likewise, at which one was loaded.
        launches: likewise, at which a launcher began.
        limits: timeouts in force, by section.
        dropped: records that were too old to be kept; the page begins after them.
    """

    run_id: str = ""
    began: float = 0.0
    wall: float = 0.0
    goodput: float | None = None
    parts: tuple[Part, ...] = ()
    steps_unknown: bool = False
    generations: tuple[GenerationSeen, ...] = ()
    generations_left_out: int = 0
    incidents: tuple[Numbered, ...] = ()
    incidents_left_out: int = 0
    checkpoints: tuple[CheckpointSeen, ...] = ()
    checkpoints_left_out: int = 0
    lost_saves: tuple[events.SaveLost, ...] = ()
    saves: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    launches: tuple[float, ...] = ()
    steps: Heat = field(default_factory=Heat)
    temperatures: Heat = field(default_factory=Heat)
    signs: tuple[Telemetry, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


class History:
    """Keeps the records of a run that its page needs.

    Args:
        most: records that are kept; beyond that a log loses its oldest one with each new one.
    """

    def __init__(self, most: int = MOST_RECORDS) -> None:
        self._most = most
        self._logs: dict[str, deque[Record]] = {}
        self._times: deque[StepTimes] = deque(maxlen=_MOST_TIMES)
        self._temperatures = Temperatures()
        self._signs: deque[Telemetry] = deque(maxlen=MOST_SIGNS)
        self._kept = self._dropped = 0

    def take(self, record: Record, node: str = "") -> None:
        """Take the next record of a node's log; "": the job has one node."""
        if isinstance(record, Telemetry):
            self._temperatures.take(record)
            if record.what in ("xid", "silence"):
                self._signs.append(record)
        elif isinstance(record, StepTimes):
            self._times.append(record)
        log = self._logs.setdefault(node, deque())
        if log and isinstance(record, _PASSING) and isinstance(log[-1], _PASSING):
            log.pop()
            self._kept -= 1
        log.append(record)
        self._kept += 1
        if self._kept > self._most:
            log.popleft()
            self._kept -= 1
            self._dropped += 1

    def view(self) -> View:
        """Return the content of the page."""
        logs = {name: list(log) for name, log in self._logs.items()}
        records = node_logs.merged(logs) if logs.keys() - {""} else logs.get("", [])
        return replace(
            view(records),
            steps=heat.of_steps(list(self._times), _HEAT_ROWS, _HEAT_COLUMNS),
            temperatures=self._temperatures.heat(_HEAT_ROWS, _HEAT_COLUMNS),
            signs=tuple(self._signs),
            dropped=self._dropped,
        )


def view(records: Sequence[Record]) -> View:
    """Return what the page shows of a log, heat maps left out.

    Args:
        records: of the job, merged where it has several nodes.
    """
    ledger = goodput.fold(records)
    generations = _generations(records, ledger)
    checkpoints = _checkpoints(records)
    incidents = [Numbered(number, one) for number, one in enumerate(ledger.incidents, 1)]
    shown, hidden = _newest(generations, MOST_GENERATIONS)
    copies, copies_hidden = _newest(checkpoints, MOST_CHECKPOINTS)
    newest, older = _newest(incidents, MOST_INCIDENTS)
    return View(
        run_id=ledger.run_id,
        began=ledger.began,
        wall=ledger.wall,
        goodput=ledger.goodput,
        parts=_parts(ledger),
        steps_unknown=ledger.steps_unknown,
        generations=shown,
        generations_left_out=hidden,
        incidents=newest,
        incidents_left_out=older,
        checkpoints=copies,
        checkpoints_left_out=copies_hidden,
        lost_saves=_newest(ledger.lost_saves, MOST_CHECKPOINTS)[0],
        saves=_places(records, ledger, events.Saved),
        loads=_places(records, ledger, events.Loaded),
        launches=_places(records, ledger, events.RunStarted),
        limits=ledger.timeouts,
    )


def _newest(found: Sequence[_Item], most: int) -> tuple[tuple[_Item, ...], int]:
    """Return the last of a list, and how many are before them."""
    return tuple(found[-most:]), max(0, len(found) - most)


def _parts(ledger: Ledger) -> tuple[Part, ...]:
    if not ledger.wall:
        return ()
    return tuple(
        Part(
            category,
            seconds,
            seconds / ledger.wall,
            ledger.lost_unknown and category in (Category.LOST_WORK, Category.TRAINING),
        )
        for category, seconds in ledger.seconds.items()
    )


def _place(ledger: Ledger, time: float) -> float:
    """Return seconds from the first record by wall time; clocks of hosts may differ, so it is kept within."""
    return min(max(0.0, time - ledger.began), ledger.wall)


def _places(records: Sequence[Record], ledger: Ledger, kind: type[Record]) -> tuple[float, ...]:
    """Return the places of records of a kind; of many, as many as can be told apart."""
    found = [_place(ledger, one.time) for one in records if isinstance(one, kind)]
    if len(found) <= MOST_SAVES or not ledger.wall:
        return tuple(found[-MOST_SAVES:])
    return tuple(sorted({int(at / ledger.wall * MOST_SAVES): at for at in found}.values()))


def _generations(records: Sequence[Record], ledger: Ledger) -> list[GenerationSeen]:
    starts = [one for one in records if isinstance(one, events.GenerationStarted)]
    began = [_place(ledger, one.time) for one in starts]
    return [
        GenerationSeen(one.generation, at, max(at, until), one.world_size, one.start, one.reason)
        for one, at, until in zip(starts, began, [*began[1:], ledger.wall], strict=False)
    ]


def _checkpoints(records: Sequence[Record]) -> list[CheckpointSeen]:
    """Return every checkpoint that the log names, those with the newest word last."""
    found: dict[str, CheckpointSeen] = {}

    def told(record: Record, name: str, step: int, trust: str, *, tiers: Sequence[str] = ()) -> None:
        before = found.pop(name, None)
        known = before.tiers if before is not None else ()
        reason = str(getattr(record, "reason", ""))
        step = max(step, before.step) if before is not None else step
        places = () if trust == "pruned" else tuple(dict.fromkeys([*known, *tiers]))
        found[name] = CheckpointSeen(name, step, record.time, places, trust, reason)

    for one in records:
        match one:
            case events.Saved():
                told(one, one.checkpoint, one.step, "committed", tiers=("disk",))
            case events.Loaded():
                places = [place.partition("/")[0] for place in one.places]
                told(one, one.checkpoint, one.step, _kept(found, one.checkpoint), tiers=places)
            case events.Quarantined():
                told(one, one.checkpoint, one.step, "quarantined")
            case events.TrustChanged():
                tier, _, name = one.checkpoint.rpartition("/")
                told(one, name, one.step, one.trust, tiers=(tier,) if tier else ())
            case events.Pruned():
                told(one, one.checkpoint, -1, "pruned")
            case _:
                pass
    return list(found.values())


def _kept(found: Mapping[str, CheckpointSeen], name: str) -> str:
    """Return the trust of a checkpoint that is loaded: the load changes no word but "committed"."""
    before = found.get(name)
    return "loaded" if before is None or before.trust == "committed" else before.trust
