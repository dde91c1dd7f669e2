"""The decider of the job: everything that happened goes in, at most one action comes out.

``TRANSITIONS`` says what moves a job from state to state. One generation ends once: whatever else
is heard of it afterwards is answered with ``Rung.NONE`` and a reason. The decider needs no clock
of its own: nothing in it happens because time passes, so it has neither ``tick`` nor ``deadline``.

The state axis. When the same fault comes back after a checkpoint was loaded, that checkpoint and
all newer ones are suspect: they are avoided, and stay so over later faults of any kind, until the
job has committed a step beyond all of them. What the failed generation had staged in memory since is
unknown here, so a name of its generation at the suspect's step stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from outlast.core.escalation import Escalation, whole
from outlast.core.events import Action, Fault, Rung, StateSource
from outlast.core.manifest import copy_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.core.config import FaultTolerance

_KEEP_NAMES = 64
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 10: "SIGUSR1", 12: "SIGUSR2", 15: "SIGTERM"}


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
class CopyGone:
    """A checkpoint was pruned or put into quarantine: it can be loaded no more."""

    name: str


@dataclass(frozen=True)
class StopRequested:
    """A signal asked the launcher to end the job."""

    signum: int


Event = Fault | AllStarted | WorkerFinished | CommitSeen | LoadSeen | CopyGone | StopRequested


class JobState(Enum):
    """Where the job is."""

    STARTING = "starting"  # the first workers of this launcher are on their way
    RUNNING = "running"
    RESTARTING = "restarting"  # the workers of the next generation are on their way
    ENDED = "ended"  # the last word was said


class Move(Enum):
    """What moves a job from state to state."""

    ALL_STARTED = "all started"
    RESTART = "restart"
    STOP = "stop"


TRANSITIONS: Mapping[JobState, Mapping[Move, JobState]] = {
    JobState.STARTING: {
        Move.ALL_STARTED: JobState.RUNNING,
        Move.RESTART: JobState.RESTARTING,
        Move.STOP: JobState.ENDED,
    },
    JobState.RUNNING: {Move.RESTART: JobState.RESTARTING, Move.STOP: JobState.ENDED},
    JobState.RESTARTING: {
        Move.ALL_STARTED: JobState.RUNNING,
        Move.RESTART: JobState.RESTARTING,
        Move.STOP: JobState.ENDED,
    },
    JobState.ENDED: {},
}


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
        self._avoid: dict[str, int] = {}
        self._loaded: str | None = None
        self.state_now = JobState.STARTING
        self.generation = 1

    @property
    def avoid(self) -> tuple[str, ...]:
        """The checkpoints that the present generation must not load."""
        return tuple(self._avoid)

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event; ``now`` is wall time, since budgets outlive a launcher and its clocks."""
        if isinstance(event, (CommitSeen, LoadSeen, CopyGone)):
            self._on_copy(event)
            return ()
        if self.state_now is JobState.ENDED:
            return (self._none(f"the job has ended; {_name(event)} changes nothing"),)
        if isinstance(event, StopRequested):
            reason = f"{_signal(event.signum)} asked for it; {self._outlook()}"
            return (self._stop(128 + event.signum, reason),)
        if event.generation != self.generation:
            words = f"{_name(event)} of generation {event.generation} proves nothing"
            return (self._none(f"{words}: {self.generation} is in force"),)
        if isinstance(event, Fault):
            return (self._on_fault(event, now),)
        if isinstance(event, WorkerFinished):
            self._finished.add(event.rank)
            if len(self._finished) < self._world_size:
                return ()
            return (self._stop(0, "every rank finished"),)
        if Move.ALL_STARTED in TRANSITIONS[self.state_now]:
            self._move(Move.ALL_STARTED)
        return ()

    def _move(self, move: Move) -> None:
        self.state_now = TRANSITIONS[self.state_now][move]

    def _none(self, reason: str) -> Action:
        return Action(Rung.NONE, self.generation, reason)

    def _on_copy(self, event: CommitSeen | LoadSeen | CopyGone) -> None:
        if isinstance(event, CopyGone):
            self._commits.pop(event.name, None)
            self._avoid.pop(event.name, None)
            return
        self._commits[event.name] = event.step
        for old in sorted(self._commits, key=lambda one: self._commits[one])[:-_KEEP_NAMES]:
            del self._commits[old]
        if isinstance(event, LoadSeen):
            self._loaded = event.name
            return
        self._escalation.committed(event.step)
        if event.step > max(self._avoid.values(), default=-1):
            self._avoid.clear()

    def _on_fault(self, fault: Fault, now: float) -> Action:
        suspects = self._suspects()
        oldest = min(suspects.values(), default=-1)
        older_exists = any(step < oldest for step in self._commits.values())
        answer = self._escalation.answer(fault, older_exists, now)
        if answer.rung is Rung.STOP:
            return self._stop(answer.exit_code, answer.reason)
        if answer.state is StateSource.OLDER:
            self._avoid.update(suspects)
            self._avoid[copy_name(oldest, fault.generation)] = oldest  # what it had in memory, too
        self._move(Move.RESTART)
        self.generation += 1
        self._finished.clear()
        self._loaded = None
        state, reason = answer.state, answer.reason
        if self._avoid and state is StateSource.NEWEST:
            state = StateSource.OLDER
            reason += f"; the suspect checkpoints from step {min(self._avoid.values())} on are still avoided"
        return Action(Rung.RESTART_IN_JOB, self.generation, reason, state, avoid=self.avoid)

    def _suspects(self) -> dict[str, int]:
        """Return the checkpoint that was loaded and all that are as new, in the order of their names."""
        if self._loaded is None or self._loaded not in self._commits:
            return {}
        loaded = self._commits[self._loaded]
        return {name: step for name, step in sorted(self._commits.items()) if step >= loaded}

    def _outlook(self) -> str:
        newest = max(self._commits.values(), default=-1)
        if newest < 0:
            return "no checkpoint was committed, so the same command starts anew"
        return f"the same command goes on from step {newest}"

    def _stop(self, exit_code: int, reason: str) -> Action:
        self._move(Move.STOP)
        return Action(Rung.STOP, self.generation, reason, exit_code=exit_code)

    def state(self) -> dict[str, Any]:
        """Return what the next launcher of this run has to know."""
        return {
            "generation": self.generation,
            "commits": dict(self._commits),
            "avoid": dict(self._avoid),
            "escalation": self._escalation.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after an earlier launcher, with a generation of one's own.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours; nothing was taken over.
        """
        generation = whole(state["generation"], at_least=1)
        commits = {str(name): whole(step, at_least=0) for name, step in dict(state["commits"]).items()}
        avoid = {str(name): whole(step, at_least=0) for name, step in dict(state.get("avoid", {})).items()}
        self._escalation.restore(state["escalation"])
        self.generation = generation + 1
        self._commits, self._avoid = commits, avoid


def _name(event: Event) -> str:
    if isinstance(event, Fault):
        return f"a fault ({event.signature:.60})"
    if isinstance(event, WorkerFinished):
        return f"the end of rank {event.rank}"
    return "a start" if isinstance(event, AllStarted) else "a request to stop"


def _signal(number: int) -> str:
    return f"signal {number} ({_SIGNALS[number]})" if number in _SIGNALS else f"signal {number}"
