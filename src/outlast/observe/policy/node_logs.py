"""Merge of the event logs of a job's nodes into one, as if one launcher had written it.

Every node has a log, and the leader writes faults and actions into its own one. Two node launches that
overlap belong to one launch of the job. Monotonic clocks compare within one boot of one host; other hosts are
placed by their wall time, which is only as good as their clocks. So nothing of a generation is placed before
the action that began it.

A generation has started, or made its first step, when the slowest node has; its step is that of the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeGuard, TypeVar

from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Note,
    Progress,
    Pruned,
    Quarantined,
    Record,
    RecoveryAction,
    RunEnded,
    RunStarted,
    Saved,
    SaveLost,
    StateSource,
    StepSource,
    TrustChanged,
)

_Kind = TypeVar("_Kind", bound=Record)
COUNTED, ANNOUNCED = StepSource.COUNTED.value, StepSource.ANNOUNCED.value
# What several nodes, or two leaders, may write of one and the same thing: what tells it from others.
_SAME: Mapping[type[Record], tuple[str, ...]] = {
    FaultSeen: ("generation", "fault", "node", "rank", "signature"),
    ActionTaken: ("action", "next_generation"),
    Saved: ("checkpoint",),
    SaveLost: ("generation", "step"),
    Quarantined: ("generation", "checkpoint"),
    Pruned: ("checkpoint",),
    TrustChanged: ("generation", "checkpoint", "trust"),
}


@dataclass(frozen=True)
class _Launch:
    """The records of one node's agent from its start to its end."""

    node: str
    records: tuple[Record, ...]

    @property
    def boot_id(self) -> str:
        head = self.records[0]
        return head.boot_id if isinstance(head, RunStarted) else ""

    @property
    def begin(self) -> float:
        return self.records[0].time

    @property
    def end(self) -> float:
        return max(record.time for record in self.records)

    @property
    def epoch(self) -> float:
        """Wall time when the clock was 0."""
        return self.records[0].time - self.records[0].clock


def merged(logs: Mapping[str, Sequence[Record]]) -> tuple[Record, ...]:
    """Return the job's log.

    Args:
        logs: of each node, in the order of its file.
    """
    launches = [one for node, records in sorted(logs.items()) for one in _launches(node, records)]
    found: list[Record] = []
    for together in _overlapping(launches):
        found += _joined(together)
    return tuple(found)


def _launches(node: str, records: Sequence[Record]) -> Iterator[_Launch]:
    starts = [at for at, record in enumerate(records) if at == 0 or isinstance(record, RunStarted)]
    for start, stop in pairwise([*starts, len(records)]):
        yield _Launch(node, tuple(_of_actions(records[start:stop]))[::-1])


def _of_actions(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the records backwards; faults and actions with the generation that they end.

    They are written by the leader, which may have no ranks.
    """
    ends = 0
    for record in reversed(records):
        if isinstance(record, ActionTaken):
            ends = record.next_generation - int(_begins(record))
            yield replace(record, generation=ends)
        elif isinstance(record, FaultSeen) and ends:
            yield replace(record, generation=ends)
        else:
            yield record


def _begins(record: Record) -> TypeGuard[ActionTaken]:
    """Say whether a record is an action that begins a generation."""
    return isinstance(record, ActionTaken) and record.action not in (
        RecoveryAction.STOP.value,
        RecoveryAction.NONE.value,
    )


def _overlapping(launches: Iterable[_Launch]) -> Iterator[list[_Launch]]:
    """Yield the node launches of each launch of the job: a node may come later, or restart meanwhile."""
    together: list[_Launch] = []
    end = -math.inf
    for launch in sorted(launches, key=lambda one: one.begin):
        if together and launch.begin > end:
            yield together
            together = []
        together.append(launch)
        end = max(end, launch.end)
    if together:
        yield together


def _joined(launches: Sequence[_Launch]) -> list[Record]:
    base = launches[0]
    placed: list[tuple[str, Record]] = []
    for launch in launches:
        shift = _shift(launch, base)
        for record in launch.records:
            moved = replace(record, clock=record.clock + shift)
            if isinstance(moved, FirstStep):
                moved = replace(moved, marks={name: at + shift for name, at in moved.marks.items()})
            elif isinstance(moved, FaultSeen) and moved.since > 0:
                shift_of_since = _shift(_seen_by(launches, moved, launch), base)
                moved = replace(moved, since=moved.since + shift_of_since)
            placed.append((launch.node, moved))
    placed = list(_in_order(placed))
    found = [*_of_all(placed), *_next_generation_begun(placed), *_once(placed)]
    found.sort(key=lambda record: (record.clock, record.generation))
    return [*_head(base), *found, *_end(placed)]


def _in_order(placed: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
    """Yield the records by generation, none before the action that began its generation."""
    begun: dict[int, float] = {}
    for node, record in sorted(placed, key=lambda one: (one[1].generation, one[1].clock)):
        clock = max(record.clock, begun.get(record.generation, record.clock))
        moved = replace(record, clock=clock)
        if isinstance(moved, FaultSeen) and moved.since > 0:
            moved = replace(moved, since=min(moved.since + (clock - record.clock), clock))
        if _begins(moved):
            begun.setdefault(moved.next_generation, clock)
        yield node, moved


def _shift(launch: _Launch, base: _Launch) -> float:
    """Return the offset from a launch's clock to that of the base."""
    same = launch.boot_id and launch.boot_id == base.boot_id
    shift = 0.0 if same else launch.epoch - base.epoch
    return shift if math.isfinite(shift) else 0.0


def _seen_by(launches: Sequence[_Launch], fault: FaultSeen, teller: _Launch) -> _Launch:
    """Return the launch of the node that saw a fault: the latest one before it, or who tells of it."""
    own = [one for one in launches if one.node == fault.node] or [teller]
    return ([one for one in own if one.begin <= fault.time] or own[:1])[-1]


def _head(base: _Launch) -> Iterator[Record]:
    if isinstance(base.records[0], RunStarted):
        yield base.records[0]


def _once(placed: Sequence[tuple[str, Record]]) -> Iterator[Record]:
    """Yield the records about the job from any node, each once, as first written."""
    told: set[tuple[object, ...]] = set()
    for _, record in placed:
        if isinstance(record, (RunStarted, RunEnded, GenerationStarted, FirstStep, Progress, Loaded, Note)):
            continue
        key = (type(record), *(getattr(record, name) for name in _SAME.get(type(record), ())))
        if len(key) > 1 and key in told:
            continue
        told.add(key)
        yield record


def _next_generation_begun(placed: Sequence[tuple[str, Record]]) -> Iterator[Record]:
    """Yield an action for each generation that began without a fault: the job grew or was restarted."""
    begun = {one.next_generation for _, one in placed if _begins(one)}
    starts: dict[int, GenerationStarted] = {}
    for _, record in placed:
        if isinstance(record, GenerationStarted):
            starts.setdefault(record.generation, record)
    for (ended, _), (number, one) in pairwise(starts.items()):
        if number not in begun:
            words = "the previous generation ended without a fault: the job grew or was restarted"
            kind = RecoveryAction.RESTART_IN_JOB.value
            yield ActionTaken(one.time, one.clock, ended, kind, number, StateSource.NEWEST.value, words)


def _of_all(placed: Sequence[tuple[str, Record]]) -> Iterator[Record]:
    """Yield one record of the job for the records of all nodes: the slowest node counts."""
    together: dict[int, list[tuple[str, Record]]] = {}
    for node, record in placed:
        together.setdefault(record.generation, []).append((node, record))
    for _, here in sorted(together.items()):
        started = _by_node(here, GenerationStarted)
        yield from _slowest(started.values())
        yield from _slowest(_by_node(here, Loaded).values())
        first = _by_node(here, FirstStep)
        if first and (not started or first.keys() >= started.keys()):
            yield _first_step(list(first.values()))
        yield from _progress(here, set(started) or {node for node, _ in here})


def _by_node(placed: Iterable[tuple[str, Record]], kind: type[_Kind]) -> dict[str, _Kind]:
    return {node: record for node, record in placed if isinstance(record, kind)}


def _slowest(records: Iterable[_Kind]) -> Iterator[_Kind]:
    found = list(records)
    if found:
        yield max(found, key=lambda record: record.clock)


def _first_step(records: Sequence[FirstStep]) -> FirstStep:
    names = dict.fromkeys(name for record in records for name in record.marks)
    marks = {name: max(one.marks[name] for one in records if name in one.marks) for name in names}
    last = max(records, key=lambda record: record.clock)
    said = [record for record in records if record.source != COUNTED] or records
    return replace(last, step=min(one.step for one in said), marks=marks, source=said[0].source)


def _progress(placed: Iterable[tuple[str, Record]], nodes: set[str]) -> Iterator[Progress]:
    """Yield a record when the slowest node has advanced."""
    found = [(node, one) for node, one in placed if isinstance(one, (Progress, FirstStep))]
    announced = {node for node, one in found if one.source == ANNOUNCED}
    if announced:  # then nothing else tells how far the job is
        found = [(node, one) for node, one in found if one.source != COUNTED]
    before = -1
    steps = dict.fromkeys(announced or nodes, before)
    for node, record in found:
        if node in steps:
            steps[node] = max(steps[node], record.step)
            if isinstance(record, Progress) and min(steps.values()) > before:
                before = min(steps.values())
                yield replace(record, step=before)


def _end(placed: Sequence[tuple[str, Record]]) -> Iterator[RunEnded]:
    """Yield the end of the job: the last one of a node of its last generation."""
    newest = max(record.generation for _, record in placed)
    ends = [one for _, one in placed if isinstance(one, RunEnded) and one.generation == newest]
    if ends:
        clock = max(record.clock for _, record in placed)
        last = max(ends, key=lambda one: (one.clock, one.step))
        yield replace(last, clock=clock, step=max(one.step for one in ends))
