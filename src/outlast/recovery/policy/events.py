"""What can happen to a job, what is decided about it, and what is written down.

Three families of frozen values, shared by every layer:

- :class:`Fault` is a problem that a detector reports, with its evidence;
- :class:`Action` is the answer of the decider, always with a reason;
- the ``Record`` classes are the lines of the event log. :mod:`outlast.observe.policy.codec`
  turns them into JSON lines and back; a change to a field raises ``SCHEMA_VERSION``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outlast.cluster.policy.codec import ExitCode, Generation, Name, Rank

SCHEMA_VERSION = 1
COVERS = ("parameters", "parameters and optimizers")  # what was compared, without and with tripwire_optimizer


class FaultKind(str, Enum):
    """What went wrong; the words of the glossary."""

    ERROR = "error"  # a worker raised, or exited with a status other than zero
    CRASH = "crash"  # a worker was ended by a signal
    HANG = "hang"  # a worker is alive but silent beyond its timeout
    LOST = "lost"  # a node does not answer
    CORRUPT = "corrupt"  # ranks that should hold the same bytes do not
    REFUSED = "refused"  # a worker declined to go on; no restart changes that
    NON_FINITE = "non-finite"  # a worker says that a loss, a gradient or a parameter is no number


class StepSource(str, Enum):
    """Who says how many steps are completed."""

    SESSION = "session"
    ANNOUNCED = "announced"  # the script, by outlast.progress
    COUNTED = "counted"  # nobody: optimizer steps of a process, which begins at 0


class RecoveryAction(str, Enum):
    """One kind of recovery; the order is the ladder, from cheap to dear."""

    NONE = "none"
    RERUN = "rerun"  # the step is done once more; decided by the step, never by the job
    RESTART_IN_PROCESS = "restart-in-process"  # the ranks that live are entered again
    RESTART_IN_JOB = "restart-in-job"  # new workers on the same nodes
    REPLACE_NODE = "replace-node"  # the same with a spare in the place of a node
    SHRINK = "shrink"  # the same with fewer nodes
    STOP = "stop"


class StateSource(str, Enum):
    """The second axis of recovery: which state the workers load."""

    NEWEST = "newest"  # the newest trusted checkpoint
    OLDER = "older"  # not the one that was loaded when the fault came back
    FRESH = "fresh"  # there is no checkpoint yet


@dataclass(frozen=True)
class Fault:
    """A problem with a rank, as a detector reports it.

    Args:
        kind: what went wrong.
        node: name of the node on which it was seen.
        rank: the culprit's rank; -1 when no rank can be named.
        generation: the generation in which it happened.
        step: completed steps when it happened; -1 before the first step.
        reason: one sentence for the incident log.
        signature: equal for equal causes ("RuntimeError: boom", "signal 9"); compared, never parsed.
        exit_code: how the worker ended (negative: the signal), None while it lives.
        evidence: pairs of a name and a text or path (stacks, page contents, log).
        since: when progress ended, in the node's monotonic seconds.
        agreed: ranks that should hold the same last did after so many steps; -1: never since the load.
            None: the fault is not about that.
        reenters: living ranks can be entered again in their processes, and those that cannot are forked anew;
            None: no rank can, the script is not made for it.
        counted: the step counts optimizer steps of a process, which begins at 0: the script has no session
            and announced no step. It says nothing about the same step in another generation.
        trained: seconds from the first step of the generation (its start, where no step was seen) to the end
            of progress.
    """

    kind: FaultKind
    node: Name
    rank: Rank
    generation: Generation
    step: int
    reason: str
    signature: str
    exit_code: ExitCode | None = None
    evidence: tuple[tuple[str, str], ...] = ()
    since: float = 0.0
    reenters: bool | None = None
    agreed: int | None = None
    counted: bool = False
    trained: float = 0.0


@dataclass(frozen=True)
class Action:
    """What the decider orders.

    Args:
        rung: the kind of recovery.
        generation: the generation that the action starts; the current one for ``STOP``.
        reason: one sentence, also when nothing is done.
        state: which state the workers load.
        exit_code: for ``STOP``, the exit code of the job.
        avoid: what the workers are told of single copies; see :mod:`outlast.checkpoint.policy.resolve`.
        exclude: the node that is used no more from now on; empty: none.
        reenter: workers that live may go on in it, in their processes.
        hung_again: a hang came back, so the timeout that found it is doubled.
    """

    rung: RecoveryAction
    generation: int
    reason: str
    state: StateSource = StateSource.NEWEST
    exit_code: int = 0
    avoid: tuple[str, ...] = ()
    exclude: str = ""
    reenter: bool = False
    hung_again: bool = False


@dataclass(frozen=True)
class Record:
    """A line of the event log; ``time`` is wall time (for display), ``clock`` monotonic seconds."""

    time: float
    clock: float
    generation: int


@dataclass(frozen=True)
class RunStarted(Record):
    """The launcher (or a session without one) opened the run folder."""

    run_id: str
    node: str
    pid: int
    boot_id: str  # clocks of two records compare only where this is equal
    command: tuple[str, ...]
    world_size: int
    reason: str


@dataclass(frozen=True)
class GenerationStarted(Record):
    """The workers of a generation were started."""

    world_size: int
    pids: tuple[int, ...]
    start: str  # "zygote" or "cold: <why>"
    reason: str


@dataclass(frozen=True)
class FirstStep(Record):
    """Every rank of a generation has completed its first step: the job is running again.

    ``marks`` are seconds on the recording node's monotonic clock, the latest over
    ranks: spawned, started (the script runs), session, group, loaded, first_step.
    """

    step: int
    marks: dict[str, float]
    source: str = ""  # of the step, a StepSource


@dataclass(frozen=True)
class FaultSeen(Record):
    """A detector reported a fault; ``since`` is the monotonic time at which progress ended."""

    fault: str
    node: str
    rank: int
    step: int
    since: float
    reason: str
    signature: str
    evidence: dict[str, str] = field(default_factory=dict)
    source: str = ""  # of the step, a StepSource


@dataclass(frozen=True)
class ActionTaken(Record):
    """The decider's answer to a fault."""

    rung: str
    next_generation: int
    state: str
    reason: str


@dataclass(frozen=True)
class Saved(Record):
    """A checkpoint was committed."""

    step: int
    checkpoint: str
    nbytes: int
    seconds: float  # how long training stood still for it
    reason: str


@dataclass(frozen=True)
class SaveLost(Record):
    """A checkpoint could not be written; the older ones stay."""

    step: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class Loaded(Record):
    """The ranks agreed on a checkpoint and loaded it, from ``places`` (tier and name)."""

    step: int
    checkpoint: str
    nbytes: int
    seconds: float
    reason: str
    places: tuple[str, ...] = ()
    digest: str = ""  # of its manifest


@dataclass(frozen=True)
class Quarantined(Record):
    """A copy was set aside."""

    step: int
    checkpoint: str
    reason: str


@dataclass(frozen=True)
class Pruned(Record):
    """Retention removed a copy."""

    checkpoint: str
    reason: str


@dataclass(frozen=True)
class TrustChanged(Record):
    """A copy (tier and name) became suspect, quarantined, proven or released."""

    step: int
    checkpoint: str
    trust: str
    reason: str


@dataclass(frozen=True)
class Compared(Record):
    """Ranks that should hold the same bytes were compared; they last agreed after step ``agreed``."""

    step: int
    digest: str  # of all that they hold; empty: they differ
    reason: str
    agreed: int = -1
    ranks: tuple[int, ...] = ()  # those in the minority
    tensors: tuple[str, ...] = ()  # those that differ
    covers: str = ""  # one of COVERS


@dataclass(frozen=True)
class TimeoutsLearned(Record):
    """Timeouts in force were computed anew from what was observed."""

    timeouts: dict[str, float]
    reason: str


@dataclass(frozen=True)
class Progress(Record):
    """How far the slowest rank is; written now and then so that lost work can be counted."""

    step: int
    source: str = ""  # of the step, a StepSource


@dataclass(frozen=True)
class ScriptSaved(Record):
    """The script says that a checkpoint of its own exists at a step."""

    step: int


@dataclass(frozen=True)
class StartedAgain(Record):
    """A rank began again as a cold interpreter: its script set variables that the zygote did not have."""

    rank: int
    variables: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Note(Record):
    """Something worth keeping that changes no decision."""

    reason: str


@dataclass(frozen=True)
class RunEnded(Record):
    """The launcher is done."""

    step: int
    exit_code: int
    reason: str
