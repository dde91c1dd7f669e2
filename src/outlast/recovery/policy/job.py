"""The decider of the job: it gets every event and answers with at most one action.

``TRANSITIONS`` are the states of a job. A generation ends once: later events of it are answered with
``RecoveryAction.NONE`` and a reason. Nothing happens because time passes, so the decider has neither ``tick``
nor ``deadline``.

Copies of checkpoints are ordered by trust (:mod:`outlast.checkpoint.policy.copies`): a copy after whose load
a fault came too soon, or came again, is a suspect, and so is all that its generation saved. Suspects are
loaded if nothing else is left; one that ends the same way again is quarantined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.policy.copies import Copies, Faulted, TrustChange
from outlast.checkpoint.policy.manifest import some
from outlast.cluster.policy.codec import Digest, Generation, Rank, Signum
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.errors import ExitCode
from outlast.fields import whole
from outlast.hang.policy.diagnosis import GUESSED, WAITS, looks_like_victim
from outlast.preemption.policy import SIGNALS
from outlast.recovery.policy.actions import cause, gives_back, where
from outlast.recovery.policy.backoff import BackOff
from outlast.recovery.policy.escalation import Answer, Capabilities, Escalation
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction, StateSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.config import FaultToleranceOptions


_RERUN = "rerun the same command"
_NOTHING = "outlast has no checkpoint of this run"
_PROGRAMS = 16  # digests that are kept


@dataclass(frozen=True)
class AllStarted:
    """The workers of a generation were started."""

    generation: Generation


@dataclass(frozen=True)
class WorkerFinished:
    """A rank's process ended with status 0."""

    rank: Rank
    generation: Generation


@dataclass(frozen=True)
class CommitSeen:
    """A checkpoint was committed."""

    step: int
    name: str


@dataclass(frozen=True)
class LoadSeen:
    """The ranks of the current generation loaded a checkpoint.

    Args:
        step: completed steps.
        name: the folder.
        places: tier and name of each copy that shards were read from; empty: the durable one.
        digest: of its manifest; empty: unknown.
    """

    step: int
    name: str
    places: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class CopyGone:
    """A checkpoint was pruned."""

    name: str


@dataclass(frozen=True)
class CopySetAside:
    """A copy was quarantined."""

    name: str
    reason: str


@dataclass(frozen=True)
class StepsDone:
    """Every rank of the current generation has completed this number of steps.

    Args:
        step: the number.
        counted: the number counts optimizer steps of a process, from 0.
        began: the step that follows those with which the script began this generation; -1: it announced none.
        program: digest of the program's files when the generation was started; empty: unknown.
    """

    step: int
    counted: bool = False
    began: int = -1
    program: Digest = ""


@dataclass(frozen=True)
class OwnCheckpoint:
    """The script has a checkpoint of its own at a step.

    Args:
        step: completed steps.
        agreed: the number of that step where ranks agree on one; -1: they do not.
    """

    step: int
    agreed: int = -1


@dataclass(frozen=True)
class NoSaveComes:
    """The script cannot save, so that nothing must wait for a checkpoint."""

    reason: str


@dataclass(frozen=True)
class StopRequested:
    """A signal asks the launcher to end the job."""

    signum: Signum


CopyEvent = CommitSeen | LoadSeen | CopyGone | CopySetAside | StepsDone | OwnCheckpoint | NoSaveComes
Event = Fault | AllStarted | WorkerFinished | StopRequested | CopyEvent


@dataclass(frozen=True)
class SpareCapacity:
    """The nodes that are available without the faulty one.

    Args:
        spare: another one could replace it.
        fewer: the job could continue without it.
    """

    spare: bool
    fewer: bool


class JobState(Enum):
    """The states of the job."""

    STARTING = "starting"  # the first workers of this launcher are starting
    RUNNING = "running"
    RESTARTING = "restarting"  # the workers of the next generation are starting
    ENDED = "ended"


class Move(Enum):
    """The transitions of a job."""

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
    """Decides about each fault of one job.

    Args:
        config: budgets.
        world_size: ranks of a generation; an elastic job has one for each generation.
    """

    def __init__(self, config: FaultToleranceOptions, world_size: int) -> None:
        self._escalation = Escalation(config)
        self.world_size = world_size
        self._finished: set[int] = set()
        self._copies = Copies()
        self._answer: Answer | None = None  # the latest one
        self._knows_steps = False  # in some generation, a session or the script reported steps
        self._own = -1  # step of the newest checkpoint of the script's own
        self._reached = -1  # completed steps, as told last
        self._began = -1  # the first step that the script completes in this generation, if it announces steps
        self._trained: tuple[str, ...] = ()  # programs of which a generation has completed a step
        self._complete = -1  # completed steps when every rank had finished; -1: training went on since
        self.state_now = JobState.STARTING
        self._generation = 1

    @property
    def generation(self) -> int:
        """The number of the current generation; nothing else in the job counts it."""
        return self._generation

    @property
    def avoid(self) -> tuple[str, ...]:
        """The load flags of single copies that the current generation got."""
        return self._copies.marks()

    @property
    def saved(self) -> int:
        """The step of the checkpoint that the job would go on from, ours or the script's own; -1: none."""
        ours = self._copies.newest_durable()
        return ours if ours >= 0 else self._own

    def trust_changes(self) -> tuple[TrustChange, ...]:
        """Return the copies that became suspect, quarantined, proven or released since the last call."""
        return self._copies.changes()

    def signs(self, node: str, now: float) -> tuple[str, ...]:
        """Return the faults of the last day that a node may be the cause of, in words, the oldest first."""
        return self._escalation.signs(node, now)

    def shortage(self, now: float) -> str:
        """Return, in a sentence, that earlier launches have left no restart; empty: some are left."""
        return self._escalation.shortage(now)

    def handle(self, event: Event, now: float, room: SpareCapacity | None = None) -> tuple[Action, ...]:
        """Handle one event; ``now`` is wall time, since budgets outlive a launcher and its clocks.

        Args:
            event: what happened.
            now: in seconds.
            room: for a fault, the nodes that are available; None: the job has one node.
        """
        if isinstance(event, CopyEvent):
            self._on_copy(event)
            return ()
        if self.state_now is JobState.ENDED:
            return (self._none(f"ignored: {_name(event)} after the end of the job"),)
        if isinstance(event, StopRequested):
            reason = f"stopped by {_signal(event.signum)}; {self._outlook()}"
            return (self._stop(128 + event.signum, reason),)
        if event.generation != self.generation:
            stale = f"from stale generation {event.generation} (current {self.generation})"
            return (self._none(f"ignored: {_name(event)} {stale}"),)
        if isinstance(event, Fault):
            return (self._on_fault(event, now, room),)
        return self._on_rank(event)

    def _on_rank(self, event: WorkerFinished | AllStarted) -> tuple[Action, ...]:
        if isinstance(event, WorkerFinished):
            self._finished.add(event.rank)
            if len(self._finished) >= self.world_size:
                self._complete = max(self._reached, self._copies.newest_durable())
                self._escalation.done()
                return (self._stop(0, "every rank finished"),)
        elif Move.ALL_STARTED in TRANSITIONS[self.state_now]:
            self._move(Move.ALL_STARTED)
            self._copies.begin(self.generation)
        return ()

    def _move(self, move: Move) -> None:
        self.state_now = TRANSITIONS[self.state_now][move]

    def next_generation(self) -> int:
        """Begin a generation without a fault; it costs no budget. Return its number."""
        self._move(Move.RESTART)
        self._generation += 1
        self._began = -1
        self._finished.clear()
        return self._generation

    def begin_after(self, generation: int) -> None:
        """Make the first generation younger than one that is known to have been."""
        if self._generation <= generation:
            self._generation = generation
            self.next_generation()

    def _none(self, reason: str) -> Action:
        return Action(RecoveryAction.NONE, self.generation, reason)

    def _on_copy(self, event: CopyEvent) -> None:
        match event:
            case CommitSeen(step, name):
                self._knows_steps = True
                self._copies.commit(name)
                self._escalation.committed(step)
            case LoadSeen(step, name, places, digest):
                self._copies.load(step, places or (name,), digest, self.generation)
            case CopyGone(name):
                self._copies.remove(name)
            case CopySetAside(name, reason):
                self._copies.set_aside(name, reason)
            case OwnCheckpoint(step):
                self._knows_steps = True
                self._own = max(self._own, step)
                self._escalation.committed(step)
            case StepsDone():
                self._on_steps(event)

    def _on_steps(self, event: StepsDone) -> None:
        match event:
            case StepsDone(step, counted=False, began=began):
                self._knows_steps, self._began = True, began
                self._copies.clean(step)
                self._reached = step
                if step > self._complete:
                    self._complete = -1
                self._escalation.committed(began - 1)  # it resumed from there, so it has a checkpoint of that
        if not self._is_stepless(event.step, event.counted):
            self._escalation.back_off.stepped()
            if event.program not in self._trained:
                self._trained = (*self._trained, event.program)[-_PROGRAMS:]

    def _is_stepless(self, step: int, counted: bool) -> bool:
        """Say whether a step is none that the ranks of this generation have completed."""
        return step < (1 if counted else max(self._began, 0))

    def keeps(self, fault: Fault, now: float, room: SpareCapacity | None) -> str:
        """Return why a failing node stays in the job; empty: a spare can replace it."""
        return self._escalation.keeps(fault, room is not None and room.spare, now)

    def _on_fault(self, fault: Fault, now: float, room: SpareCapacity | None) -> Action:
        kept = self.keeps(fault, now, room) if fault.kind is FaultKind.FAILING else ""
        if kept:
            return self._none(f"{fault.reason}: {kept}, so the job goes on with {fault.node}")
        if gives_back(fault):
            return self._stop(int(ExitCode.PREEMPTED), f"the job was preempted; {self._outlook()}")
        if fault.counted and fault.step < 0 and self._knows_steps:
            fault = replace(fault, counted=False)  # it reports steps, but did not yet in this generation
        answer = self._answer = self._escalation.answer(fault, self._means(fault, room), now)
        lasting = answer.state is StateSource.OLDER
        words = (fault.step, fault.kind.value, cause(fault))
        faulted = Faulted(*words, lasting, fault.agreed, answer.speaks)
        if answer.clear_suspicion:
            self._copies.clear_suspicion(
                faulted, f"the same fault occurred {where(fault)} from other checkpoints"
            )
        else:
            self._copies.fault(faulted)
        if answer.kind is not RecoveryAction.STOP:
            self.next_generation()
        return self._ordered(answer, _in_words(fault, answer), _spares_the_living(fault, answer))

    def escalate(self, fault: Fault, why: str, now: float, room: SpareCapacity | None = None) -> Action:
        """Answer a fault again after a failed in-process restart, in the same generation.

        The fault is not counted again.

        Args:
            fault: the same as before.
            why: the reason of the failure, in one sentence.
            now: as in :meth:`handle`.
            room: likewise.
        """
        assert self._answer is not None, "a fault was answered before"
        answer = self._escalation.answer_again(fault, self._answer, self._means(fault, room), now)
        return self._ordered(answer, f"{why}; {_in_words(fault, answer)}", spares_living=False)

    def _means(self, fault: Fault, room: SpareCapacity | None) -> Capabilities:
        spare, fewer = (None, False) if room is None else (room.spare, room.fewer)
        loaded = self._copies.loaded
        complete = 0 <= self._complete <= self._copies.idle_at(fault.step)
        stepless = self._is_stepless(fault.step, fault.counted)
        known = {fault.program, ""}  # what could not be read may be the same
        trained = bool(self._trained) and (not fault.program or not known.isdisjoint(self._trained))
        return Capabilities(
            *(self._copies.another_exists(), fault.reenters, spare, fewer, loaded, complete),
            stepless=stepless,
            trained=trained,
        )

    def _ordered(self, answer: Answer, reason: str, spares_living: bool) -> Action:
        """Return the action for an answer, with the checkpoints that may be loaded."""
        if answer.kind is RecoveryAction.STOP:
            return self._stop(answer.exit_code, reason)
        state = answer.state
        held_back = self._copies.held_back()
        if held_back:
            left = self._copies.has_trusted()
            state = StateSource.OLDER if left else StateSource.NEWEST
            reason += f"; {some(held_back)} {'are' if len(held_back) > 1 else 'is'} suspect"
            reason += f" ({self._copies.reason(held_back[-1])})" + (
                "" if left else ", and no other checkpoint is left"
            )
        again = answer.kind is RecoveryAction.RESTART_IN_PROCESS or spares_living
        return Action(
            kind=answer.kind,
            generation=self.generation,
            reason=reason,
            state=state,
            avoid=self.avoid,
            exclude=answer.exclude,
            reenter=again,
            hung_again=answer.hung_again,
            wait=answer.wait,
        )

    def _outlook(self) -> str:
        newest = self._copies.newest_durable()
        if newest >= 0:
            return f"{_RERUN} to resume from step {newest} or later"
        if self._own >= 0:
            return f"the script announced a checkpoint of its own at step {self._own}"
        begins = "the same command starts from step 0, unless the script loads a checkpoint of its own"
        return f"{_NOTHING}: {begins}"

    def _stop(self, exit_code: int, reason: str) -> Action:
        self._move(Move.STOP)
        return Action(RecoveryAction.STOP, self.generation, reason, exit_code=exit_code)

    def state(self) -> dict[str, Any]:
        """Return what the next launcher of this run must know."""
        return {
            "generation": self.generation,
            "copies": self._copies.state(),
            "escalation": self._escalation.state(),
            "back_off": self._escalation.back_off.state(),
            "knows_steps": self._knows_steps,
            "own": self._own,
            "complete": self._complete,
            "trained": list(self._trained),
        }

    def restore(self, state: Mapping[str, Any], in_force: bool = False) -> None:
        """Continue the run of an earlier launcher, with a new generation.

        Args:
            state: that it left.
            in_force: its generation is still running, and continues.

        Raises:
            KeyError, TypeError, ValueError: the state is invalid; nothing was taken over.
        """
        generation = whole(state["generation"], at_least=1)
        released = dict(state.get("released", {}))
        copies = Copies.restored(
            state["copies"], {str(name): str(reason) for name, reason in released.items()}
        )
        knows_steps, own = state["knows_steps"], whole(state["own"], at_least=-1)
        complete = whole(state.get("complete", -1), at_least=-1)
        trained = tuple(map(str, state.get("trained", ())))[-_PROGRAMS:]
        if not isinstance(knows_steps, bool):
            raise TypeError(f"knows_steps is {knows_steps!r}, expected true or false")
        waits = BackOff.of(state.get("back_off", {}))
        self._escalation.restore(state["escalation"])
        self._escalation.back_off = waits if in_force else BackOff()  # a new launch does not wait
        self._copies, self._knows_steps, self._own = copies, knows_steps, own
        self._complete, self._trained = complete, trained
        if in_force:
            self._generation, self.state_now = generation, JobState.RUNNING
            copies.begin(generation)
        else:
            self._generation = generation + 1


def _spares_the_living(fault: Fault, answer: Answer) -> bool:
    """Say whether living workers may restart in process: a node was lost, at this step for the first time."""
    lost = fault.kind is FaultKind.LOST and answer.kind is RecoveryAction.REPLACE_NODE
    return lost and bool(fault.reenters) and not answer.repeats


def _in_words(fault: Fault, answer: Answer) -> str:
    reason = answer.reason
    if answer.passed:
        reason += f" (skipped: {'; '.join(answer.passed)})"
    if fault.agreed is not None:
        after = f" after step {fault.agreed}" if fault.agreed >= 0 else ""
        reason += f"; checkpoints that diverged replicas saved{after} are not loaded"
    if answer.exclude:
        reason += f"; {answer.exclude} is excluded from the job"
    return reason


def _name(event: Event) -> str:
    if isinstance(event, Fault):
        return f"a fault ({event.signature:.60})"
    if isinstance(event, WorkerFinished):
        return f"the end of rank {event.rank}"
    return "a start" if isinstance(event, AllStarted) else "a request to stop"


def _signal(number: int) -> str:
    return f"signal {number} ({SIGNALS[number]})" if number in SIGNALS else f"signal {number}"


VICTIM_WAITS = 0.3  # seconds; the end of the culprit is known within milliseconds of the error
HANG_WAITS = 1.0  # nodes detect the same hang within two checks of each other


def with_saved(reason: str, step: int) -> str:
    """Return why a job ended, with the step that was saved after that was decided."""
    for outlook in (_RERUN, _NOTHING):
        why, found, _ = reason.partition(f"; {outlook}")
        if found:
            return f"{why}; {_RERUN} to resume from step {step}"
    return f"{reason}; step {step} was saved since"


def waits(fault: Fault, ping_timeout: float) -> float:
    """Return for how long a fault may turn out to be the consequence of another one, in seconds.

    If ranks only wait, and the timeout was not set by the user, the network may be down for a moment: wait as
    long as a node may be silent.
    """
    if fault.kind is FaultKind.ERROR and looks_like_victim(fault.signature):
        return VICTIM_WAITS
    if fault.kind is FaultKind.HANG and (fault.rank < 0 or WAITS in fault.evidence):
        return HANG_WAITS + (ping_timeout if GUESSED in fault.evidence else 0.0)
    return 0.0


def laid_to_its_node(fault: Fault, seats: Iterable[RankAssignment]) -> Fault:
    """Return the fault with the node of its rank.

    Any rank may report a wrong replica or a faulty device, and a waiting node a hung rank.
    """
    told_elsewhere = fault.kind is FaultKind.HANG and WAITS in fault.evidence
    if not told_elsewhere and fault.kind not in (FaultKind.CORRUPT, FaultKind.REFUSED):
        return fault
    return next((replace(fault, node=seat.name) for seat in seats if fault.rank in seat.ranks), fault)


def is_nobodys(fault: Fault) -> bool:
    """Say whether replicas differ and it is not known which is wrong, so that no node is to blame."""
    return fault.kind is FaultKind.CORRUPT and fault.rank < 0
