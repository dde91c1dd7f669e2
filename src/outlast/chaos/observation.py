"""What is observed of a run while it goes on: its event log and the traces of its ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from outlast.chaos.targets import Follower
from outlast.core.events import (
    FirstStep,
    GenerationStarted,
    Progress,
    Record,
    RunStarted,
    Saved,
    TimeoutsLearned,
)
from outlast.core.scenario import Observation

if TYPE_CHECKING:
    from pathlib import Path

_TAIL = 4096  # bytes; a line of a trace is shorter


class Observer:
    """Follows a run from outside; never touches it.

    Args:
        events: path of the event log; it need not exist yet.
        traces: folder with a trace a rank, from which the step is exact; None: the event log's
            own records of progress, which come now and then.
    """

    def __init__(self, events: Path, traces: Path | None = None) -> None:
        self.records: list[Record] = []
        self._follower = Follower(events)
        self._traces = traces
        self._generation = 0
        self._step = 0
        self._running = False
        self._learned = False
        self._saves = 0
        self._pids: tuple[int, ...] = ()
        self.agents: list[int] = []
        self.workers: list[int] = []

    def look(self) -> Observation:
        """Read what is new and return what is known now."""
        for record in self._follower.records():
            self.records.append(record)
            self._take(record)
        if self._traces is not None and self._running:
            self._step = self._traced_step()
        return Observation(self._generation, self._step, self._running, self._learned, self._saves)

    def newest_workers(self) -> tuple[int, ...]:
        """Return the pids of the newest generation, by rank."""
        return self._pids

    def _take(self, record: Record) -> None:
        if isinstance(record, RunStarted):
            self._running = False
            self.agents.append(record.pid)
        elif isinstance(record, GenerationStarted):
            self._generation, self._running, self._pids = record.generation, False, record.pids
            self.workers.extend(record.pids)
        elif isinstance(record, FirstStep):
            self._running = record.generation == self._generation
            self._step = record.step
        elif isinstance(record, Progress):
            self._step = record.step
        elif isinstance(record, TimeoutsLearned):
            self._learned = True
        elif isinstance(record, Saved):
            self._saves += 1

    def _traced_step(self) -> int:
        assert self._traces is not None
        steps = [_last_step(self._traces / f"rank-{rank:05d}.jsonl") for rank in range(len(self._pids))]
        return min(steps, default=-1) + 1


def _last_step(trace: Path) -> int:
    """Return the step of the last whole line of a trace, -1 when there is none."""
    try:
        with open(trace, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - _TAIL))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return -1
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else -1
