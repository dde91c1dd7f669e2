"""Faults, recovery actions and the records of the event log: frozen values, shared by every layer.

- :class:`Fault` is a problem that a detector reports, with its evidence;
- :class:`Action` is the answer of the decider, always with a reason;
- the ``Record`` classes are the lines of the event log. :mod:`outlast.observe.policy.codec`
  turns them into JSON lines and back; a change to a field raises ``SCHEMA_VERSION``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outlast.cluster.policy.codec import Digest, ExitCode, Generation, Name, Rank
from outlast.codec import Int64

SCHEMA_VERSION = 1
COVERS = ("parameters", "parameters and optimizers")  # what was compared, without and with tripwire_optimizer


class FaultKind(str, Enum):
    """The kinds of faults."""

    ERROR = "error"  # a worker raised, or exited with a status other than zero
    CRASH = "crash"  # a worker was ended by a signal
    HANG = "hang"  # a worker is alive but silent beyond its timeout
    LOST = "lost"  # a node does not answer
    CORRUPT = "corrupt"  # ranks that should hold the same bytes do not
    REFUSED = "refused"  # a worker declined to continue; a restart will not help
    NON_FINITE = "non-finite"  # a loss, a gradient or a parameter is not finite
    FAILING = "failing"  # a node works, and its health says that it will not for long


class StepSource(str, Enum):
    """Where the number of completed steps comes from."""

    SESSION = "session"
    ANNOUNCED = "announced"  # the script, by outlast.progress
    COUNTED = "counted"  # optimizer steps of a process, from 0


class RecoveryAction(str, Enum):
    """The recovery actions, from cheap to expensive."""

    NONE = "none"
    RESTART_IN_PROCESS = "restart-in-process"  # in the processes of the living ranks
    RESTART_IN_JOB = "restart-in-job"  # new workers on the same nodes
    REPLACE_NODE = "replace-node"  # new workers, a spare replaces a node
    SHRINK = "shrink"  # new workers on fewer nodes
    STOP = "stop"


class StateSource(str, Enum):
    """The second axis of recovery: which checkpoint the workers load."""

    NEWEST = "newest"  # the newest trusted checkpoint
    OLDER = "older"  # not the one that was loaded when the fault came back


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
        agreed: the step after which diverged replicas were last equal; -1: never since the load; None: the
            fault is not about replicas.
        reenters: the living ranks can restart in process (the others are forked); None: the script does not
            use in-process restart.
        counted: the step counts optimizer steps of a process, from 0: the script has no session and announced
            no step, so steps of different generations cannot be compared.
        trained: seconds from the first step of the generation (or its start, if no step was seen) to the end
            of progress.
        program: digest of the program's files when the generation was started; empty: unknown.
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
    program: Digest = ""


@dataclass(frozen=True)
class Action:
    """An order of the decider.

    Args:
        kind: the kind of recovery.
        generation: the generation that the action starts; the current one for ``STOP``.
        reason: one sentence, also when nothing is done.
        state: which state the workers load.
        exit_code: for ``STOP``, the exit code of the job.
        avoid: load flags of single copies; see :mod:`outlast.checkpoint.policy.resolve`.
        exclude: the node that is excluded from the job; empty: none.
        reenter: living workers may restart in process.
        hung_again: a repeated hang, so the timeout that found it is doubled.
        wait: seconds before new workers are started.
    """

    kind: RecoveryAction
    generation: int
    reason: str
    state: StateSource = StateSource.NEWEST
    exit_code: int = 0
    avoid: tuple[str, ...] = ()
    exclude: str = ""
    reenter: bool = False
    hung_again: bool = False
    wait: float = 0.0


@dataclass(frozen=True)
class Record:
    """A line of the event log; ``time`` is wall time (for display), ``clock`` monotonic seconds."""

    time: float
    clock: float
    generation: Int64


@dataclass(frozen=True)
class RunStarted(Record):
    """The launcher (or a session without one) opened the run folder."""

    run_id: str
    node: str
    pid: Int64
    boot_id: str  # clocks of two records compare only where this is equal
    command: tuple[str, ...]
    world_size: Int64
    reason: str


@dataclass(frozen=True)
class GenerationStarted(Record):
    """The workers of a generation were started."""

    world_size: Int64
    pids: tuple[Int64, ...]
    start: str  # "zygote" or "cold: <why>"
    reason: str


@dataclass(frozen=True)
class FirstStep(Record):
    """Every rank of a generation has completed its first step: the job is running again.

    ``marks`` are seconds on the recording node's monotonic clock, the latest over
    ranks: spawned, started (the script runs), session, group, loaded, first_step.
    """

    step: Int64
    marks: dict[str, float]
    source: str = ""  # of the step, a StepSource


@dataclass(frozen=True)
class FaultSeen(Record):
    """A detector reported a fault; ``since`` is the monotonic time at which progress ended."""

    fault: str
    node: str
    rank: Int64
    step: Int64
    since: float
    reason: str
    signature: str
    evidence: dict[str, str] = field(default_factory=dict)
    source: str = ""  # of the step, a StepSource


@dataclass(frozen=True)
class ActionTaken(Record):
    """The decider's answer to a fault; ``wait`` are seconds before new workers are started."""

    action: str
    next_generation: Int64
    state: str
    reason: str
    wait: float = 0.0


@dataclass(frozen=True)
class Saved(Record):
    """A checkpoint was committed."""

    step: Int64
    checkpoint: str
    nbytes: Int64
    seconds: float  # for which training was paused
    reason: str


@dataclass(frozen=True)
class SaveLost(Record):
    """A checkpoint could not be written; older ones are kept."""

    step: Int64
    seconds: float
    reason: str


@dataclass(frozen=True)
class Loaded(Record):
    """The ranks agreed on a checkpoint and loaded it, from ``places`` (tier and name)."""

    step: Int64
    checkpoint: str
    nbytes: Int64
    seconds: float
    reason: str
    places: tuple[str, ...] = ()
    digest: str = ""  # of its manifest


@dataclass(frozen=True)
class Quarantined(Record):
    """A copy was set aside."""

    step: Int64
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

    step: Int64
    checkpoint: str
    trust: str
    reason: str


@dataclass(frozen=True)
class Compared(Record):
    """Replicas were compared; they were last equal after step ``agreed``."""

    step: Int64
    digest: str  # of all replicas; empty: they differ
    reason: str
    agreed: Int64 = -1
    ranks: tuple[Int64, ...] = ()  # those in the minority
    tensors: tuple[str, ...] = ()  # those that differ
    covers: str = ""  # one of COVERS


@dataclass(frozen=True)
class TimeoutsLearned(Record):
    """The timeouts were computed again from observations."""

    timeouts: dict[str, float]
    reason: str


@dataclass(frozen=True)
class Progress(Record):
    """The step of the slowest rank; written periodically so that lost work can be counted."""

    step: Int64
    source: str = ""  # of the step, a StepSource
    resumed: Int64 = -1  # completed steps that a framework began this generation with; -1: it reported none


@dataclass(frozen=True)
class StepsPlanned(Record):
    """The script said after how many steps, counted over all restarts, its loop ends."""

    total: Int64


@dataclass(frozen=True)
class StragglerSeen(Record):
    """A rank slows the job, no longer does, or cannot be judged; see ``stragglers.policy.rows.Verdict``."""

    step: Int64
    rank: Int64
    node: str
    state: str
    activity: str  # what it is slow at, a stragglers.policy.rows.Kind
    section: str
    slowdown: float
    job_slowdown: float
    share_of_steps: float
    confidence: float
    windows: Int64
    reason: str


@dataclass(frozen=True)
class StepTimes(Record):
    """How long ranks were busy in a step: the median over ranks, and the ratio of each rank to it."""

    step: Int64
    seconds: float
    ratios: dict[str, float]


@dataclass(frozen=True)
class ScriptSaved(Record):
    """The script says that a checkpoint of its own exists at a step."""

    step: Int64
    agreed: Int64 = -1  # number of that step where the ranks agree on one; -1: they do not


@dataclass(frozen=True)
class CannotSave(Record):
    """The ranks were to save, and their framework has no place for a checkpoint: none will come."""

    step: Int64
    reason: str


@dataclass(frozen=True)
class StartedAgain(Record):
    """A rank was started again in a new interpreter: its script set variables that the zygote lacked."""

    rank: Int64
    variables: tuple[str, ...]
    reason: str
    package: str = ""  # of the modules that were imported ahead; empty: what every zygote imports


@dataclass(frozen=True)
class ImportsSeen(Record):
    """A rank has listed the modules that it imported up to one of its first steps."""

    rank: Int64
    modules: Int64
    heartbeats: Int64


@dataclass(frozen=True)
class ImportedAhead(Record):
    """A zygote has imported what the ranks import; ``seconds`` of a processor are saved by each rank.

    ``left_out`` has the modules that ranks import themselves, and why; at most 20.
    """

    modules: Int64
    seconds: float
    left_out: dict[str, str]
    reason: str


@dataclass(frozen=True)
class Telemetry(Record):
    """A device or the host was read, or the collector has something to report; ``what`` says which."""

    node: str
    what: str  # "device", "host", "xid" or "silence"
    device: Int64  # -1: none
    uuid: str
    values: dict[str, float]
    reason: str


@dataclass(frozen=True)
class Note(Record):
    """A message without effect on decisions."""

    reason: str


@dataclass(frozen=True)
class RunEnded(Record):
    """The launcher has ended."""

    step: Int64
    exit_code: Int64
    reason: str
