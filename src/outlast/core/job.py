"""The decider of the job: everything that happened goes in, at most one action comes out.

``TRANSITIONS`` says what moves a job from state to state. One generation ends once: whatever else
is heard of it afterwards is answered with ``Rung.NONE`` and a reason. The decider needs no clock
of its own: nothing in it happens because time passes, so it has neither ``tick`` nor ``deadline``.

The state axis. What a generation loads is ordered by trust (:mod:`outlast.core.copies`): a copy after whose
load a fault came too soon, or came back, is a suspect like all that its generation saved; suspects are loaded
when nothing else is left, and one that ends in the same way again is quarantined.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from outlast.core.copies import Copies, TrustChange
from outlast.core.escalation import Escalation, cause, whole
from outlast.core.events import Action, Fault, Rung, StateSource
from outlast.core.manifest import some
from outlast.core.trust_events import Faulted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.core.config import FaultTolerance

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
    """The ranks of the present generation loaded a checkpoint.

    Args:
        step: completed steps.
        name: the folder.
        places: tier and name of each copy that shards were read from; none: the durable one.
        digest: of its manifest; empty: not known.
    """

    step: int
    name: str
    places: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class CopyGone:
    """A checkpoint was pruned: it can be loaded no more."""

    name: str


@dataclass(frozen=True)
class CopySetAside:
    """A copy was put into quarantine."""

    name: str
    reason: str


@dataclass(frozen=True)
class StepsDone:
    """Every rank of the present generation has completed that many steps."""

    step: int


@dataclass(frozen=True)
class StopRequested:
    """A signal asked the launcher to end the job."""

    signum: int


CopyEvent = CommitSeen | LoadSeen | CopyGone | CopySetAside | StepsDone
Event = Fault | AllStarted | WorkerFinished | StopRequested | CopyEvent


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
        self._copies = Copies()
        self.state_now = JobState.STARTING
        self.generation = 1

    @property
    def avoid(self) -> tuple[str, ...]:
        """What the present generation is told of single copies; see :mod:`outlast.core.marks`."""
        return self._copies.marks()

    def trust_changes(self) -> tuple[TrustChange, ...]:
        """Return the copies that became suspect, quarantined, proven or released since the last call."""
        return self._copies.changes()

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event; ``now`` is wall time, since budgets outlive a launcher and its clocks."""
        if isinstance(event, (CommitSeen, LoadSeen, CopyGone, CopySetAside, StepsDone)):
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
            self._copies.begin(self.generation)
        return ()

    def _move(self, move: Move) -> None:
        self.state_now = TRANSITIONS[self.state_now][move]

    def _none(self, reason: str) -> Action:
        return Action(Rung.NONE, self.generation, reason)

    def _on_copy(self, event: CopyEvent) -> None:
        match event:
            case CommitSeen(step, name):
                self._copies.commit(name)
                self._escalation.committed(step)
            case LoadSeen(step, name, places, digest):
                self._copies.load(step, places or (name,), digest, self.generation)
            case CopyGone(name):
                self._copies.remove(name)
            case CopySetAside(name, reason):
                self._copies.set_aside(name, reason)
            case StepsDone(step):
                self._copies.clean(step)

    def _on_fault(self, fault: Fault, now: float) -> Action:
        answer = self._escalation.answer(fault, self._copies.another_exists(), now)
        lasting = answer.state is StateSource.OLDER
        self._copies.fault(Faulted(fault.step, fault.kind.value, cause(fault), lasting))
        if answer.rung is Rung.STOP:
            return self._stop(answer.exit_code, answer.reason)
        self._move(Move.RESTART)
        self.generation += 1
        self._finished.clear()
        state, reason = answer.state, answer.reason
        held_back = self._copies.held_back()
        if held_back:
            left = self._copies.has_trusted()
            state = StateSource.OLDER if left else StateSource.NEWEST
            reason += f"; {some(held_back)} {'are' if len(held_back) > 1 else 'is'} suspect"
            reason += f" ({self._copies.reason(held_back[-1])})" + (
                "" if left else ", and nothing else is left"
            )
        return Action(Rung.RESTART_IN_JOB, self.generation, reason, state, avoid=self.avoid)

    def _outlook(self) -> str:
        newest = self._copies.newest_durable()
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
            "copies": self._copies.state(),
            "escalation": self._escalation.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after an earlier launcher, with a generation of one's own.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours; nothing was taken over.
        """
        generation = whole(state["generation"], at_least=1)
        copies = Copies()
        if "copies" in state:
            released = dict(state.get("released", {}))
            copies.restore(state["copies"], {str(name): str(reason) for name, reason in released.items()})
        else:
            commits = {str(name): whole(step, at_least=0) for name, step in dict(state["commits"]).items()}
            copies.restore_names(commits, map(str, dict(state.get("avoid", {}))))
        self._escalation.restore(state["escalation"])
        self.generation, self._copies = generation + 1, copies


def _name(event: Event) -> str:
    if isinstance(event, Fault):
        return f"a fault ({event.signature:.60})"
    if isinstance(event, WorkerFinished):
        return f"the end of rank {event.rank}"
    return "a start" if isinstance(event, AllStarted) else "a request to stop"


def _signal(number: int) -> str:
    return f"signal {number} ({_SIGNALS[number]})" if number in _SIGNALS else f"signal {number}"
