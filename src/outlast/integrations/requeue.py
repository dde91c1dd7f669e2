"""Decides whether a job asks its scheduler for another allocation, from how the last one ended.

The shells are :mod:`outlast.integrations.slurm.supervise` and :mod:`outlast.integrations.schedulers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from outlast.errors import ExitCode

LEDGER_FORMAT = 1

# What another allocation cannot cure, and what a person has to do first.
PERMANENT: Mapping[int, str] = {
    ExitCode.USAGE: "the command line or the configuration is wrong",
    ExitCode.RUN_FOLDER_BUSY: "another launcher holds the run folder",
    ExitCode.CHECKPOINT_REFUSED: "no checkpoint can be used; nothing was changed",
    ExitCode.SCRIPT_NOT_FOUND: "there is no such script",
    ExitCode.RUN_FOLDER_UNUSABLE: "the run folder cannot be written",
    ExitCode.SAVE_FAILED: "saves could not be written; make room",
    ExitCode.DO_NOT_REQUEUE: "it said that the same fault would come back",
    126: "the program cannot be executed",
    127: "the program was not found",
}
# A person or the cluster ended the job; it is not asked for again.
ENDED_FOR_GOOD = ("CANCELLED", "DEADLINE", "OUT_OF_MEMORY")
# Slurm is ending the job or has put it back, whatever the batch step would ask for.
ALREADY_DECIDED = ("COMPLETING", "PENDING", "REQUEUED")


class Outcome(Enum):
    """What the batch step does after its agents have ended."""

    FINISH = "finish"
    REQUEUE = "requeue"
    GIVE_UP = "give up"
    LEAVE = "leave"  # Slurm has decided already


@dataclass(frozen=True)
class NodeEnd:
    """The records of one node.

    Args:
        node: its name.
        exit_code: of its agent; None: it was killed before it could say.
        signals: numbers that reached the step there, in their order.
    """

    node: str
    exit_code: int | None
    signals: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ending:
    """What is known when ``srun`` has ended.

    Args:
        srun_code: its exit status, 128 + n for signal n.
        nodes: what each node noted.
        expected: how many nodes should have.
        step: the newest committed step; -1: none.
        state: the job's state as ``squeue`` tells it; empty: it does not.
        overrun: the time limit has passed.
    """

    srun_code: int
    nodes: tuple[NodeEnd, ...]
    expected: int
    step: int
    state: str = ""
    overrun: bool = False


@dataclass(frozen=True)
class Limits:
    """How often a job may ask for another allocation.

    Args:
        no_progress: allocations in a row that may end without a newer committed step (NVRx's
            max_no_progress_cycles, 3).
        requeues: in all.
    """

    no_progress: int = 3
    requeues: int = 1000


@dataclass(frozen=True)
class Ledger:
    """What survives a requeue: the budget, and what was done with it.

    Args:
        job_id: whose; another job starts with full budgets.
        best_step: the newest step that was ever committed; -1: none.
        no_progress: allocations in a row that ended without a newer one.
        requeues: asked for so far.
        open: an allocation has begun, and its end was not written.
        history: one entry an allocation, the newest last.
    """

    job_id: str
    best_step: int = -1
    no_progress: int = 0
    requeues: int = 0
    open: bool = False
    history: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Return it as written to the run folder."""
        return {"format": LEDGER_FORMAT, **asdict(self), "history": [dict(one) for one in self.history]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any] | None, job_id: str) -> Ledger:
        """Return the ledger of a job: the one found if it is this job's, else a new one.

        Raises:
            KeyError, TypeError, ValueError: what was found is no ledger.
        """
        if found is None or found["job_id"] != job_id:
            return cls(job_id)
        if found["format"] != LEDGER_FORMAT:
            raise ValueError(f"format {found['format']!r}, expected {LEDGER_FORMAT}")
        numbers = {name: int(found[name]) for name in ("best_step", "no_progress", "requeues")}
        return cls(job_id, **numbers, open=bool(found["open"]), history=tuple(map(dict, found["history"])))


@dataclass(frozen=True)
class Decision:
    """What to do, why, and with which exit code the batch step ends."""

    outcome: Outcome
    reason: str
    exit_code: int


def begin(ledger: Ledger, step: int, limits: Limits) -> tuple[Ledger, Decision | None]:
    """Take an allocation into the ledger; refuse it when earlier ones were cut off without progress.

    Args:
        ledger: as it was found.
        step: the newest committed step.
        limits: of the budget.
    """
    if not ledger.open:
        return replace(ledger, open=True, best_step=max(ledger.best_step, step)), None
    counted = _count(ledger, step)
    reason = "the allocation ended before its batch step could write"
    entry = {"outcome": "cut off", "step": step, "reason": reason}
    counted = replace(counted, open=True, requeues=ledger.requeues + 1, history=(*ledger.history, entry))
    refusal = _refusal(counted, limits)
    if refusal:
        return replace(counted, open=False), Decision(Outcome.GIVE_UP, refusal, ExitCode.DO_NOT_REQUEUE)
    return counted, None


def decide(ledger: Ledger, ending: Ending, limits: Limits) -> tuple[Ledger, Decision]:
    """Say what follows the end of the agents, and return the ledger that goes with it."""
    counted = replace(_count(ledger, ending.step), open=False)
    code = exit_code(ending)
    signalled = sorted({number for node in ending.nodes for number in node.signals})
    decision = _decide(counted, ending, limits, code, signalled)
    entry = {
        "outcome": decision.outcome.value,
        "step": ending.step,
        "exit_code": code,
        "signals": signalled,
        "reason": decision.reason,
    }
    asked = int(decision.outcome is Outcome.REQUEUE)
    return replace(counted, requeues=counted.requeues + asked, history=(*counted.history, entry)), decision


def exit_code(ending: Ending) -> int:
    """Return the exit code that speaks for the job: what cannot be cured first, then what failed.

    Of several agents none ends with 0 before all ranks have finished, whatever became of lost nodes.
    """
    codes = [node.exit_code for node in ending.nodes if node.exit_code is not None]
    if ending.expected > 1 and 0 in codes:
        return 0
    for code in codes:
        if code in PERMANENT:
            return code
    failed = [code for code in codes if code]
    if failed:
        return failed[0]
    if len(codes) < max(1, ending.expected):  # srun itself ends with 0 when it has lost a node
        return ending.srun_code or ExitCode.FAILED
    return 0


def _decide(ledger: Ledger, ending: Ending, limits: Limits, code: int, signalled: Sequence[int]) -> Decision:
    state = ending.state.partition(" ")[0]
    if state in ENDED_FOR_GOOD:
        return Decision(Outcome.GIVE_UP, f"Slurm says that the job is {state}", code or ExitCode.FAILED)
    if code in PERMANENT:
        return Decision(Outcome.GIVE_UP, f"exit code {code}: {PERMANENT[code]}", code)
    if code == 0 and not signalled:
        return Decision(Outcome.FINISH, "every agent ended with exit code 0 and no signal came", 0)
    why = _cause(code, signalled)
    if state in ALREADY_DECIDED and not ending.overrun:
        return Decision(
            Outcome.LEAVE, f"{why}; the job is {state}: Slurm ends or requeues it by itself", code
        )
    refusal = _refusal(ledger, limits)
    if refusal:
        return Decision(Outcome.GIVE_UP, f"{why}; {refusal}", ExitCode.DO_NOT_REQUEUE)
    newest = f"step {ending.step} is committed" if ending.step >= 0 else "no step is committed"
    budget = (
        f"{ledger.no_progress} of {limits.no_progress} allocations in a row brought no newer one"
        if ledger.no_progress
        else "newer than ever"
    )
    return Decision(Outcome.REQUEUE, f"{why}; {newest}, {budget}", 0)


def _cause(code: int, signalled: Sequence[int]) -> str:
    if signalled and code in (0, *(ExitCode.SIGNAL_BASE + number for number in signalled)):
        return f"stopped by signal {', '.join(map(str, signalled))} (exit code {code})"
    if code > ExitCode.SIGNAL_BASE:
        return f"ended by signal {code - ExitCode.SIGNAL_BASE}"
    if code == ExitCode.PREEMPTED:
        return f"given back (exit code {code})"
    return f"failed with exit code {code}"


def _count(ledger: Ledger, step: int) -> Ledger:
    if step > ledger.best_step:
        return replace(ledger, best_step=step, no_progress=0)
    return replace(ledger, no_progress=ledger.no_progress + 1)


def _refusal(ledger: Ledger, limits: Limits) -> str:
    if ledger.no_progress >= limits.no_progress:
        best = f"none newer than {ledger.best_step}" if ledger.best_step >= 0 else "none at all"
        return f"{ledger.no_progress} allocations in a row committed no newer step ({best}): no further one"
    if ledger.requeues >= limits.requeues:
        return f"{ledger.requeues} requeues were asked for, the limit is {limits.requeues}"
    return ""
