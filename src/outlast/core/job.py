"""The decider of the job: everything that happened goes in, at most one action comes out.

States and what moves them::

    STARTING --all started--> RUNNING --fault--> STARTING (next generation) or ENDED
        |                        |---every rank finished--> ENDED
        '----------fault, stop requested--------------------> ENDED

A fault of an older generation, and a second fault of the present one, are answered with
``Rung.NONE`` and a reason: one generation ends once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outlast.core.config import FaultTolerance
from outlast.core.escalation import Escalation
from outlast.core.events import Action, Fault, Rung, StateSource

_KEEP_NAMES = 64


@dataclass(frozen=True)
class AllStarted:
    """The workers of a generation run."""

    generation: int


@dataclass(frozen=True)
class WorkerFinished:
    """A rank's process ended with status 0."""

    rank: int
    generation: int


@dataclass(frozen=True)
class CommitSeen:
    """A checkpoint was committed."""

    step: int
    name: str


@dataclass(frozen=True)
class LoadSeen:
    """The ranks of the present generation loaded a checkpoint."""

    step: int
    name: str


@dataclass(frozen=True)
class StopRequested:
    """A signal asked the launcher to end the job."""

    signum: int


Event = Fault | AllStarted | WorkerFinished | CommitSeen | LoadSeen | StopRequested


class JobState(Enum):
    """Where the job is."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class JobDecider:
    """Decides what is done about each fault of one job.

    Args:
        config: budgets.
        world_size: ranks of a generation.
    """

    def __init__(self, config: FaultTolerance, world_size: int) -> None:
        self._escalation = Escalation(config)
        self._world_size = world_size
        self._finished: set[int] = set()
        self._commits: dict[str, int] = {}
        self._loaded: str | None = None
        self.state_now = JobState.STARTING
        self.generation = 1

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event; ``now`` is wall time, since budgets outlive a launcher and its clocks."""
        if self.state_now is JobState.ENDED:
            return ()
        if isinstance(event, Fault):
            return (self._on_fault(event, now),)
        if isinstance(event, StopRequested):
            return (self._end(128 + event.signum, f"signal {event.signum} asked for it"),)
        if isinstance(event, WorkerFinished):
            return self._on_finish(event)
        if isinstance(event, AllStarted):
            self.state_now = JobState.RUNNING
        elif isinstance(event, CommitSeen):
            self._remember(event.name, event.step)
            self._escalation.committed(event.step)
        else:
            self._remember(event.name, event.step)
            self._loaded = event.name
        return ()

    def _remember(self, name: str, step: int) -> None:
        self._commits[name] = step
        for old in sorted(self._commits, key=lambda one: self._commits[one])[:-_KEEP_NAMES]:
            del self._commits[old]

    def _on_finish(self, event: WorkerFinished) -> tuple[Action, ...]:
        if event.generation != self.generation:
            return ()
        self._finished.add(event.rank)
        if len(self._finished) < self._world_size:
            return ()
        return (self._end(0, "every rank finished"),)

    def _on_fault(self, fault: Fault, now: float) -> Action:
        if fault.generation != self.generation:
            reason = f"a fault of generation {fault.generation} proves nothing: {self.generation} is in force"
            return Action(Rung.NONE, self.generation, reason)
        answer = self._escalation.answer(fault, self._older_than_loaded(), now)
        if answer.rung is Rung.STOP:
            return self._end(answer.exit_code, answer.reason)
        self.generation += 1
        self.state_now = JobState.STARTING
        self._finished.clear()
        avoid: tuple[str, ...] = ()
        state = answer.state
        if state is StateSource.OLDER and self._loaded is not None:
            step = self._commits[self._loaded]
            avoid = tuple(name for name, at in sorted(self._commits.items()) if at >= step)
        self._loaded = None
        return Action(Rung.RESTART_IN_JOB, self.generation, answer.reason, state, avoid=avoid)

    def _older_than_loaded(self) -> bool:
        if self._loaded is None:
            return False
        step = self._commits[self._loaded]
        return any(at < step for at in self._commits.values())

    def _end(self, exit_code: int, reason: str) -> Action:
        self.state_now = JobState.ENDED
        return Action(Rung.STOP, self.generation, reason, exit_code=exit_code)

    def state(self) -> dict[str, Any]:
        """Return what the next launcher of this run has to know."""
        return {
            "generation": self.generation,
            "commits": dict(self._commits),
            "escalation": self._escalation.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after an earlier launcher, with a generation of one's own.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours.
        """
        generation = int(state["generation"])
        commits = {str(name): int(step) for name, step in state["commits"].items()}
        self._escalation.restore(state["escalation"])
        self.generation = generation + 1
        self._commits = commits
