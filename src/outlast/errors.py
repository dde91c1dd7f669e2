"""The exception tree, and the exit code that each branch ends a job with.

    OutlastError                 1   any refusal or failure of outlast itself
    ├── UsageError               2   the command line or an API call is wrong
    │   └── ConfigError          2   a configuration file is wrong; lists every problem
    ├── RunFolderBusy           64   another run holds the run folder
    ├── CheckpointError         65   a checkpoint cannot be used
    │   ├── NoUsableCheckpoint  65   copies exist or existed, none of them can be used
    │   ├── CheckpointMismatch  65   an intact copy of another world size, model or run
    │   ├── TierUnreachable     75   the tier that may hold the newest checkpoint does not answer
    │   └── CorruptCopy         65   one copy failed its verification; another one may not
    ├── ScriptNotFound          66   the training script does not exist
    ├── NodeUnfit               69   this node failed its preflight
    ├── RunFolderUnusable       73   the run folder cannot be created or written
    ├── NonFinite                1   a loss, a gradient or a parameter is not finite
    ├── ObjectReused             1   trained objects were reused, with no checkpoint to load
    ├── PeerFailed               1   another rank has failed
    ├── ReplicasDiffer           1   ranks that should hold the same bytes do not
    ├── SaveFailed              74   checkpoints could not be written several times in a row
    ├── StaleGeneration         76   a rank of an older generation tried to write
    └── RestartsSpent           93   a resilient function has used all its restarts

The numbers 64 to 76 are those of sysexits.h where one fits. Exit codes that no
exception carries are in :class:`ExitCode`.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Every exit code of ``outlast run``; ``docs/reference/exit-codes.md`` explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    RUN_FOLDER_BUSY = 64
    CHECKPOINT_REFUSED = 65
    SCRIPT_NOT_FOUND = 66
    NODE_UNFIT = 69
    RUN_FOLDER_UNUSABLE = 73
    SAVE_FAILED = 74
    PREEMPTED = 75  # EX_TEMPFAIL: nothing is lost, rerun the same command to resume; Slurm: RequeueExit=75
    STALE_GENERATION = 76
    DO_NOT_REQUEUE = 93  # NVRx: --ft-no-restart-exit-code; a restart will not help
    SIGNAL_BASE = 128  # plus the number of the signal that ended the job


class OutlastError(Exception):
    """Base of all errors of outlast; the text says what was found, expected, and what happens next."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(OutlastError):
    """The command line or an API call is wrong."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError, ValueError):
    """A configuration is wrong; the text has one line for each problem, with the path of its key."""

    def __init__(self, source: str, problems: tuple[str, ...]) -> None:
        self.source = source
        self.problems = problems
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{source}: {len(problems)} problem(s); nothing was started\n{lines}")


class RunFolderBusy(OutlastError):
    """Another process holds the run folder."""

    exit_code = ExitCode.RUN_FOLDER_BUSY


class CheckpointError(OutlastError):
    """A checkpoint cannot be used."""

    exit_code = ExitCode.CHECKPOINT_REFUSED


class NoUsableCheckpoint(CheckpointError):
    """Copies exist or existed, and none can be used; the run does not start from scratch instead."""


class CheckpointMismatch(CheckpointError):
    """A copy is intact, but of another world size, model or run."""


class TierUnreachable(CheckpointError):
    """The tier that may hold the newest checkpoint does not answer; rerun the same command later."""

    exit_code = ExitCode.PREEMPTED


class CorruptCopy(CheckpointError):
    """One copy of a checkpoint failed its verification."""


class ScriptNotFound(OutlastError):
    """The training script does not exist."""

    exit_code = ExitCode.SCRIPT_NOT_FOUND


class NodeUnfit(OutlastError):
    """This node failed its preflight; another one may pass."""

    exit_code = ExitCode.NODE_UNFIT


class RunFolderUnusable(OutlastError):
    """The run folder cannot be created or written."""

    exit_code = ExitCode.RUN_FOLDER_UNUSABLE


class NonFinite(OutlastError, FloatingPointError):
    """A number of the training is not finite; the loaded state may be bad. Scripts may raise it.

    Args:
        what: the loss, a gradient, a parameter; by its name.
        value: what it is.
        step: index of the step.

    ``ranks`` are those of a device that was found faulty; empty: none was.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, what: str, value: float, step: int) -> None:
        self.what = what
        self.value = value
        self.step = step
        super().__init__(f"{what} is {float(value)} in step {step}")


class DeviceUnusable(OutlastError):
    """The device of this process failed after an in-process restart; a new process takes its place."""


class ObjectReused(OutlastError):
    """Trained objects were reused after an in-process restart, and there is no checkpoint to load."""


class PeerFailed(OutlastError):
    """Another rank raised an error in a step that all ranks take together; the text names rank and error."""


class ReplicasDiffer(OutlastError):
    """Ranks that should hold the same bytes do not.

    Args:
        reason: what differs, on which ranks, and which rank is wrong if that is known.
        step: completed steps at the comparison.
        agreed: completed steps at the last comparison without a difference; -1: there was none.
        ranks: those that differ from most of their peers; empty: not known.
    """

    def __init__(self, reason: str, step: int, agreed: int, ranks: tuple[int, ...]) -> None:
        self.step = step
        self.agreed = agreed
        self.ranks = ranks
        super().__init__(reason)


class SaveFailed(OutlastError):
    """Checkpoints could not be written several times in a row."""

    exit_code = ExitCode.SAVE_FAILED


class StaleGeneration(OutlastError):
    """A rank of an older generation tried to write; nothing was written."""

    exit_code = ExitCode.STALE_GENERATION


class RestartsSpent(OutlastError):
    """A resilient function has used all restarts that its script allows."""

    exit_code = ExitCode.DO_NOT_REQUEUE
