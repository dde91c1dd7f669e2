"""Faults of this node's workers: which rank failed first, the launcher's error file, and announcements.

Where ``TORCHELASTIC_ERROR_FILE`` is set in the launcher's environment, the error file of the rank that failed
first is copied there with its exit code, as torchrun does (torch 2.13,
elastic/multiprocessing/errors/error_handler.py); schedulers read it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.checkpoint.policy.copies import Trust, TrustChange
from outlast.cluster.policy.events import Judged
from outlast.errors import ExitCode
from outlast.hang.policy.diagnosis import Death, cause_of, first_failed, looks_like_victim
from outlast.ipc import limits
from outlast.launcher.journal import Journal
from outlast.launcher.output.logs import Failure, error_document
from outlast.launcher.output.screen import Console
from outlast.launcher.workers.generation import Generation
from outlast.recovery.policy.actions import OOM_KILL, gives_back
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.stragglers.policy.watch import Noticed, RankTimes

SETTLE = 0.2  # the error of a victim may arrive before the end of the culprit
KNOWN_SETTLE = (
    5.0  # the same, where it names a rank that lives on this node, or one of these is about to exit
)


@dataclass(frozen=True)
class End:
    """How one worker ended, and its error file, or what NCCL's watchdog said before it ended the worker."""

    rank: int
    exit_code: int
    at: float
    failure: Failure | None
    gone: bool = True  # the process has ended; else its function has raised
    given_back: bool = False  # it ended because of a preemption notice


class Ends:
    """Collects the ends of a generation's workers."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._ends: list[End] = []
        self._settled_at = 0.0
        self._oom_kills = 0

    def begin(self) -> None:
        """Begin a generation."""
        self._ends.clear()
        self._settled_at = 0.0
        self._oom_kills = limits.oom_kills()

    def collect(self, generation: Generation, now: float, others: Container[int] = ()) -> list[End]:
        """Return the workers that have ended since the last call, without the pids of ``others``."""
        found: list[End] = []
        for worker in generation.living():
            code = None if worker.pid in others else worker.poll()
            if code is None:
                continue
            failure = generation.failure(worker.rank) if code > 0 else None
            if code == -signal.SIGABRT:
                failure = generation.watchdog(worker.rank)
            given_back = generation.pages[worker.rank].given_back
            found.append(End(worker.rank, code, now, failure, given_back=given_back))
        self._note(found, now, generation)
        if found and self._only_victims:
            self.leaving(generation, now)  # the cause may have closed its connections, and not have ended yet
        return found

    def raised(self, generation: Generation | None, pid: int, number: int, now: float) -> None:
        """Record that a worker's function has raised in a generation; its process continues."""
        if generation is None or number != generation.number:
            return
        ranks = [worker.rank for worker in generation.living() if worker.pid == pid]
        code = int(ExitCode.FAILED)
        ends = [End(rank, code, now, generation.failure(rank), gone=False) for rank in ranks]
        self._note(ends, now, generation)

    def leaving(self, generation: Generation, now: float) -> bool:
        """Record living ranks that have written an error file; say whether there is one.

        The end of an interpreter may take seconds or for ever: the silence of such a rank, and of those that
        wait for it, is not a hang.
        """
        known = {end.rank for end in self._ends if end.exit_code}
        ranks = [one.rank for one in generation.living() if os.path.lexists(generation.error_file(one.rank))]
        code = int(ExitCode.FAILED)
        fresh = [
            End(rank, code, now, generation.failure(rank), gone=False) for rank in ranks if rank not in known
        ]
        self._note(fresh, now, generation)
        return bool(ranks)

    def _note(self, found: list[End], now: float, generation: Generation) -> None:
        """Record ends; no more are waited for when one of them cannot be a consequence."""
        failed = [end for end in found if end.exit_code != 0]
        if failed:
            messages = [end.failure.message if end.failure else None for end in failed]
            living = {worker.rank for worker in generation.living()}
            settled = now
            if all(map(looks_like_victim, messages)):
                known = not living.isdisjoint(map(cause_of, messages)) or any(map(generation.exits, living))
                settled += KNOWN_SETTLE if known else SETTLE
            self._settled_at = min(self._settled_at, settled) if self.failed else settled
        self._ends += found

    @property
    def _only_victims(self) -> bool:
        """Say whether workers have failed, and each of them looks like the victim of another one."""
        failed = [end for end in self._ends if end.exit_code]
        return bool(failed) and all(
            looks_like_victim(end.failure.message if end.failure else None) for end in failed
        )

    @property
    def failed(self) -> bool:
        """Say whether a worker of this generation has ended with an error."""
        return any(end.exit_code for end in self._ends)

    def deadline(self) -> float | None:
        """Return when to decide which rank failed first; None: none has failed."""
        return self._settled_at if self.failed else None

    def fault(self, generation: int, step: int, now: float) -> Fault | None:
        """Return the fault of the first failed rank once the ends have settled.

        Args:
            generation: number of the generation.
            step: completed steps of its slowest rank.
            now: monotonic seconds.
        """
        limit = self.deadline()
        if limit is None or now < limit:
            return None
        deaths = tuple(self._death(end) for end in self._ends if end.exit_code)
        verdict = first_failed(deaths)
        end = next(one for one in self._ends if one.rank == verdict.rank)
        starved = end.exit_code == -signal.SIGKILL and limits.oom_kills() > self._oom_kills
        reason = _reason(end) + (": killed by the kernel (out of memory)" if starved else "")
        if verdict.waiting:
            reason += f" ({verdict.reason})"
        left = sorted(one.rank for one in self._ends if not one.exit_code) if self._only_victims else []
        if left:
            who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
            reason = f"{who} exited with status 0 while others went on: {_reason(end)}"
        return Fault(
            kind=_kind(end),
            node=self._node,
            rank=left[0] if left else _culprit(end),
            generation=generation,
            step=step,
            reason=reason,
            signature=_signature(end),
            exit_code=_status(end),
            evidence=(OOM_KILL,) if starved else (),
            since=end.at,
            agreed=end.failure.agreed if end.failure is not None and end.failure.replicas_differ else None,
        )

    def _death(self, end: End) -> Death:
        failure = end.failure
        at = failure.clock if failure is not None and failure.clock else end.at
        return Death(end.rank, at, end.exit_code, failure.message if failure else None)


def _culprit(first: End) -> int:
    """Return the rank to blame: for a wrong replica or a faulty device all ranks raise, and name it."""
    accused = first.failure.ranks if first.failure is not None else ()
    if _kind(first) is FaultKind.HANG:
        return -1  # it has waited for another rank
    if _kind(first) is FaultKind.CORRUPT:
        return next(iter(accused), -1)
    return accused[0] if accused and first.rank not in accused else first.rank


def _gave_back(end: End) -> bool:
    return end.exit_code == ExitCode.PREEMPTED and end.given_back


def _status(end: End) -> int:
    """Return the exit code that the exception asked for; a program's own use of a reserved code is FAILED."""
    if end.failure is not None and end.failure.exit_code:
        return end.failure.exit_code
    if _gave_back(end):
        return end.exit_code
    own = end.exit_code in (ExitCode.PREEMPTED, ExitCode.NODE_UNFIT)
    return int(ExitCode.FAILED) if own else end.exit_code


def _kind(end: End) -> FaultKind:
    if end.exit_code < 0:
        return FaultKind.CRASH if end.failure is None else FaultKind.HANG
    refused = (
        *(ExitCode.CHECKPOINT_REFUSED, ExitCode.SAVE_FAILED, ExitCode.RUN_FOLDER_UNUSABLE),
        ExitCode.DO_NOT_REQUEUE,
        ExitCode.NODE_UNFIT,  # a result that stays rejected
        ExitCode.PREEMPTED,  # the tier that is needed does not answer
    )
    if end.failure is not None and end.failure.exit_code in refused:
        return FaultKind.REFUSED
    if end.failure is not None and end.failure.not_finite:
        return FaultKind.NON_FINITE
    if end.failure is not None and end.failure.replicas_differ:
        return FaultKind.CORRUPT
    return FaultKind.ERROR


def _signature(end: End) -> str:
    if _kind(end) is FaultKind.HANG:
        return "NCCL watchdog"
    if end.exit_code < 0:
        return f"signal {-end.exit_code}"
    return end.failure.message if end.failure is not None else f"exit {end.exit_code}"


def _reason(end: End) -> str:
    if end.exit_code < 0:
        try:
            name = signal.Signals(-end.exit_code).name
        except ValueError:
            name = "unknown"
        said = f": {end.failure.summary}" if end.failure is not None else ""
        return f"rank {end.rank} was terminated by signal {-end.exit_code} ({name}){said}"
    text = end.failure.summary if end.failure is not None else ""
    if not end.gone:
        return f"rank {end.rank} raised {text}" if text else f"the function of rank {end.rank} raised"
    how = f"exited with status {end.exit_code}"
    if _gave_back(end):
        how = f"gave the job back (exit code {end.exit_code})"
    return f"rank {end.rank} {how}{': ' + text if text else ''}"


@dataclass(frozen=True)
class RootCause:
    """The failure that a job ends with.

    Args:
        generation: in which it happened.
        error_file: of the rank.
        exit_code: of the rank's process, negative for a signal; 0: it had not ended.
        reason: in words.
    """

    generation: int
    error_file: Path
    exit_code: int
    reason: str


def hand_over(target: str, cause: RootCause | None, reason: str) -> str:
    """Write the launcher's error file; return the error, "" for none.

    Args:
        target: its path; empty: none is wanted.
        cause: the failure of a rank; None: the job ended for another reason.
        reason: why the job ended.
    """
    if not target:
        return ""
    found = error_document(cause.error_file) if cause is not None else None
    found = found or message(reason if cause is None else cause.reason)
    if cause is not None and cause.exit_code and isinstance(found["message"], dict):
        found["message"]["errorCode"] = cause.exit_code
    try:
        text = json.dumps(found)
    except RecursionError:
        text = json.dumps(message(reason))
    try:
        descriptor = os.open(
            target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
        with open(descriptor, "w") as file:  # a FIFO without a reader is an error, not a wait
            file.write(text)
    except OSError as error:
        return f"TORCHELASTIC_ERROR_FILE={target} could not be written: {error.strerror}"
    return ""


def message(text: str) -> dict[str, Any]:
    """Return the content of an error file with only a message."""
    return {
        "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    }


class Announcer:
    """Announces faults and actions on the console and in the journal.

    Args:
        console: of the user.
        journal: the event log.
        decides: faults of this node are judged in this process.
    """

    def __init__(self, console: Console, journal: Journal, decides: bool) -> None:
        self._console = console
        self._journal = journal
        self._decides = decides

    def judged(self, judged: Judged, generation: Generation | None) -> None:
        """Announce an action and its fault."""
        action, fault = judged.action, judged.fault
        if action.kind is RecoveryAction.NONE:
            self._journal.note(action.reason)
            return
        if fault is not None:
            in_order = gives_back(fault)
            if in_order:
                self._journal.note(fault.reason)
            else:
                self._journal.fault(fault)
            follows = (
                f"{'stop' if action.kind is RecoveryAction.STOP else action.kind.value}: {action.reason}"
            )
            if self._decides or in_order:
                self._describe(fault, generation, follows)
            else:
                words = f"{fault.kind.value} on {fault.node}: {fault.reason}"
                self._console.say(f"{words}\n  -> {follows}")
        elif action.exit_code:
            self._console.say(f"{action.kind.value}: {action.reason}")
        self._journal.action(action)

    def reported(self, fault: Fault, generation: Generation | None) -> None:
        """Announce a fault of this node that the leader decides about."""
        if not self._decides:
            self._describe(fault, generation, "reported to the leader")

    def found(self, found: TrustChange | Noticed | RankTimes) -> None:
        """Announce a change of trust in a copy, or a verdict about a slow rank; times are only written."""
        match found:
            case TrustChange():
                self._journal.trust(found)
                if found.trust == Trust.QUARANTINED.value:
                    self._console.say(f"{found.place} is {found.trust}: {found.reason}")
            case Noticed():
                self._journal.straggler(found)
                self._console.say(f"step {found.step}: {found.verdict.reason}")
            case RankTimes():
                self._journal.times(found)

    def _describe(self, fault: Fault, generation: Generation | None, follows: str) -> None:
        """Show a fault with its rank's log and traceback, or that a rank gave the job back."""
        if gives_back(fault):
            self._console.say(f"{fault.reason}\n  -> {follows}")
            return
        log, text = None, ""
        if generation is not None and fault.rank in generation.ranks:
            place = generation.logs[fault.rank]
            log = place.stderr or place.stdout
            failure = generation.failure(fault.rank) if (fault.exit_code or 0) > 0 else None
            text = failure.traceback if failure is not None and place.hides_errors else ""
        self._console.fault(fault, log, text, follows)
