"""A run as slices on tracks, in the trace event format that Perfetto and chrome://tracing read.

Times are those of the goodput ledger's axis: 0 is the first record, and the slices of the first track add up
to the ledger's seconds. A track's slices never overlap unless one lies within the other, as the format wants.

Source of the format: Google's "Trace Event Format", phases X (slice), C (counter) and M (name).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outlast.codec import plain
from outlast.observe.policy import goodput
from outlast.recovery.policy import events

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from outlast.observe.policy.goodput import Incident, Ledger
    from outlast.recovery.policy.events import Record

MOST = 50_000  # slices of a track; of more, the newest are kept
JOB = "job"
TIME, GENERATIONS, CHECKPOINTS, STEPS = "where the time went", "generations", "checkpoints", "step"
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Slice:
    """What a track shows from ``begin`` to ``end``, in seconds; ``within``: what is shown below it."""

    name: str
    begin: float
    end: float
    told: dict[str, Any] = field(default_factory=dict)
    within: tuple[Slice, ...] = ()


Tracks = dict[tuple[str, str], list[Slice]]  # by process (the job, or a node) and track


def tracks(records: Sequence[Record], ledger: Ledger) -> Tracks:
    """Return the slices of a run, by process and track.

    Args:
        records: the event log of the job.
        ledger: made of the same records.
    """
    found: Tracks = defaultdict(list)
    found[JOB, TIME] = [Slice(name.value, begin, end) for name, begin, end in ledger.spans]
    placed = list(goodput.placed(records))
    found[JOB, GENERATIONS] = list(_generations(placed, ledger.wall))
    for at, record in placed:
        if isinstance(record, (events.Saved, events.SaveLost, events.Loaded)):
            found[JOB, CHECKPOINTS].append(_checkpoint(at, record))
    for one in ledger.incidents:
        found[one.node or JOB, _rank(one.rank)].append(_incident(one, ledger.wall))
    for slow, begin, end in _slow(placed, ledger.wall):
        told = {"reason": slow.reason, "slowdown": slow.slowdown, "section": slow.section, "step": slow.step}
        name = f"slow: {slow.section or slow.activity}"
        found[slow.node or JOB, f"{_rank(slow.rank)}, slow"].append(Slice(name, begin, end, told))
    return {where: _apart(slices) for where, slices in found.items() if slices}


def steps(records: Sequence[Record]) -> list[tuple[float, int]]:
    """Return the steps of the slowest rank, each with the second at which the log told it."""
    told = (events.FirstStep, events.Progress)
    return [(at, one.step) for at, one in goodput.placed(records) if isinstance(one, told)]


def trace_events(shown: Tracks, counted: Sequence[tuple[float, int]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: names of processes and tracks, slices, and the step as a counter."""
    nodes = {node: at for at, node in enumerate(dict.fromkeys([JOB, *(node for node, _ in shown)]), 1)}
    for node, pid in nodes.items():
        name = node if node == JOB else f"node {node}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for at, ((node, track), slices) in enumerate(shown.items(), 1):
        where = {"pid": nodes[node], "tid": at}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": track}}
        for one in slices[-MOST:]:
            yield from _told(one, where)
    for second, step in counted[-MOST:]:
        told = {"ts": second * _MICROSECONDS, "pid": nodes[JOB], "tid": 0, "args": {STEPS: step}}
        yield {"ph": "C", "name": STEPS, **told}


def left_out(shown: Tracks, counted: Sequence[tuple[float, int]]) -> int:
    """Return how many slices and steps a trace does not show, because there are too many."""
    return sum(max(0, len(one) - MOST) for one in (*shown.values(), counted))


def _told(one: Slice, where: dict[str, int]) -> Iterator[dict[str, Any]]:
    begin, length = one.begin * _MICROSECONDS, (one.end - one.begin) * _MICROSECONDS
    event = {"ph": "X", "name": one.name, "cat": "outlast", "ts": begin, "dur": length, **where}
    yield {**event, "args": plain(one.told)}
    for inner in one.within:
        yield from _told(inner, where)


def _ends(placed: Iterable[tuple[float, Record]]) -> Iterator[tuple[float, Record, float | None]]:
    """Yield each record with its place and, where it ends a generation, the place of that end."""
    last: float | None = None
    for at, record in placed:
        dead = (
            last if isinstance(record, events.RunStarted) else None
        )  # its launcher wrote nothing since then
        yield at, record, at if isinstance(record, events.GenerationStarted) else dead
        last = at


def _generations(placed: Iterable[tuple[float, Record]], wall: float) -> Iterator[Slice]:
    """Yield each generation, from the start of its workers to the next one or the end of its launcher."""
    open_one: tuple[float, events.GenerationStarted] | None = None
    for at, record, end in _ends(placed):
        if open_one is not None and end is not None:
            yield _generation(*open_one, end)
            open_one = None
        if isinstance(record, events.GenerationStarted):
            open_one = (at, record)
    if open_one is not None:
        yield _generation(*open_one, wall)


def _generation(begin: float, record: events.GenerationStarted, end: float) -> Slice:
    told = {"ranks": record.world_size, "start": record.start, "reason": record.reason}
    return Slice(f"generation {record.generation}", begin, end, told)


def _checkpoint(at: float, record: events.Saved | events.SaveLost | events.Loaded) -> Slice:
    """Return the time for which training stood still; the record is written at its end."""
    names = {events.Saved: "save", events.SaveLost: "save lost", events.Loaded: "load"}
    told = {"step": record.step, "reason": record.reason}
    if not isinstance(record, events.SaveLost):
        told |= {"checkpoint": record.checkpoint, "bytes": record.nbytes}
    begin = min(at, max(0.0, at - record.seconds))
    return Slice(f"{names[type(record)]} step {record.step}", begin, at, told)


def _incident(one: Incident, wall: float) -> Slice:
    """Return an incident from the end of progress to the next first step, with the parts of its recovery."""
    end = wall if one.running_again_after is None else min(wall, one.at + one.running_again_after)
    told = {
        "reason": one.reason,
        "action": one.action,
        "action_reason": one.action_reason,
        "step": one.step,
        "steps_lost": one.steps_lost,
        "generation": one.generation,
    }
    at = min(end, one.at + (one.detected_after or 0.0))
    within = [Slice("detect", one.at, at)] if at > one.at else []
    at = max(at, end - sum(one.phases.values()))  # after an agent's death nothing ran before the first phase
    for name, seconds in one.phases.items():
        until = min(end, at + seconds)
        if until > at:
            within.append(Slice(name, at, until))
            at = until
    return Slice(f"{one.kind}: {one.action}", one.at, max(one.at, end), told, tuple(within))


def _slow(
    placed: Iterable[tuple[float, Record]], wall: float
) -> Iterator[tuple[events.StragglerSeen, float, float]]:
    """Yield each time for which a rank slowed the job; it ends with the verdict or with its generation."""
    open_ones: dict[tuple[int, str], tuple[float, events.StragglerSeen]] = {}
    for at, record, end in _ends(placed):
        if end is not None:
            yield from ((one, begin, end) for begin, one in open_ones.values())
            open_ones.clear()
        elif isinstance(record, events.StragglerSeen):
            key = (record.rank, record.section)
            if record.state == "on":
                open_ones.setdefault(key, (at, record))
            elif key in open_ones:
                begin, one = open_ones.pop(key)
                yield one, begin, at
    yield from ((one, begin, wall) for begin, one in open_ones.values())


def _rank(rank: int) -> str:
    return "no rank named" if rank < 0 else f"rank {rank}"


def _apart(slices: list[Slice]) -> list[Slice]:
    """Return the slices by time, each cut where the next one begins."""
    ordered = sorted(slices, key=lambda one: (one.begin, one.end))
    limits = [*(one.begin for one in ordered[1:]), float("inf")]
    return list(map(_cut, ordered, limits))


def _cut(one: Slice, end: float) -> Slice:
    within = tuple(_cut(inner, end) for inner in one.within if inner.begin < end)
    return replace(one, end=min(one.end, end), within=within)
