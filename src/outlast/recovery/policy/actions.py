"""The recovery policy: for each kind of fault the moves that may help, from cheap to expensive.

A move has two axes: the recovery action, and the checkpoint that is loaded. ``COURSES`` are followed from
left to right and never back: the same fault at the same step is new evidence, so it is answered with a later
move. Moves that are impossible or whose budget is used are skipped. After the last move the job ends with a
diagnosis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.errors import ExitCode
from outlast.recovery.policy.events import FaultKind, RecoveryAction, StateSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.recovery.policy.events import Fault


@dataclass(frozen=True)
class Move:
    """One answer to a fault.

    Args:
        kind: the recovery action.
        state: the checkpoint that is loaded.
        chance: repeats the move before it, since an external fault may occur twice at the same step by
            chance; skipped after two moves against the fault.
    """

    kind: RecoveryAction
    state: StateSource = StateSource.NEWEST
    chance: bool = False


_REENTER = Move(RecoveryAction.RESTART_IN_PROCESS)
_RESTART = Move(RecoveryAction.RESTART_IN_JOB)
_AGAIN = Move(RecoveryAction.RESTART_IN_JOB, chance=True)
_OLDER = Move(RecoveryAction.RESTART_IN_JOB, StateSource.OLDER)
_REPLACE = Move(RecoveryAction.REPLACE_NODE)
_SHRINK = Move(RecoveryAction.SHRINK)
_WITHOUT = (_REPLACE, _SHRINK, _RESTART)

COURSES: Mapping[FaultKind, tuple[Move, ...]] = {
    FaultKind.ERROR: (_REENTER, _RESTART, _OLDER, _REPLACE),  # deterministic errors repeat
    FaultKind.CRASH: (_REENTER, _RESTART, _AGAIN, _OLDER, _REPLACE, _SHRINK),
    # The timeout is doubled each time.
    FaultKind.HANG: (_REENTER, _RESTART, _AGAIN, _OLDER, _REPLACE, _SHRINK),
    # Independent of the checkpoint; the nodes that are left decide which move is possible.
    FaultKind.LOST: (*_WITHOUT, *(replace(move, chance=True) for move in _WITHOUT)),
    FaultKind.CORRUPT: (_RESTART, _OLDER, _REPLACE),  # replicas differ, so the state in memory is dropped
    FaultKind.NON_FINITE: (_REENTER, _RESTART, _OLDER, _REPLACE, _SHRINK),
    FaultKind.REFUSED: (),
    FaultKind.FAILING: (_REPLACE,),  # only where a spare is there; else the job goes on
}
# An in-process restart frees no memory (Megatron-LM #2774), and no checkpoint needs less.
OUT_OF_MEMORY = (_RESTART,)
OOM_KILL = ("kernel", "out of memory")  # evidence: the kernel killed the rank
_NO_MEMORY = (
    ("device", ("OutOfMemoryError", "CUDA out of memory", "HIP out of memory")),
    (
        "host",
        (
            "MemoryError",
            "Cannot allocate memory",
            "DefaultCPUAllocator: can't allocate memory",
            "killed by signal: Killed",  # a DataLoader about its worker
        ),
    ),
)
MEMORY = "out of memory"  # such evidence is valid until there is progress
_KILLED = 137  # of a shell after SIGKILL, which a container's limit sends
_NO_CURE = (
    "SyntaxError",
    "IndentationError",
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
)
# A call that does not fit what it calls, and a name that a module does not have: the texts of CPython.
_WRONG_CALL = re.compile(
    r"(\w+\.)*TypeError: .*(unexpected keyword argument|multiple values for (keyword )?argument"
    r"|missing (\d+ )?required|takes .*\barguments?\b|expected .*\barguments?,? got"
    r"|invalid keyword argument|passed as keyword arguments)"
    r"|(\w+\.)*AttributeError: module .* has no attribute"
)
_MISUSE = ("UsageError", "ConfigError")  # of this package
_BAD_ARGUMENT = "exit 2"  # of argparse, click and shells, for a command line that they do not take
_OUTAGES = (FaultKind.ERROR, FaultKind.CRASH, FaultKind.HANG)
# Addresses, ports, process ids and digests differ between two failures of the same cause.
_ACCIDENTS = {
    FaultKind.CORRUPT: re.compile(r"\b[0-9a-f]{8,}\b"),
    FaultKind.ERROR: re.compile(r"0x[0-9a-f]+|\d{4,}", re.IGNORECASE),
    FaultKind.NON_FINITE: re.compile(r"\d+"),
}
_KEY_LENGTH = 200
# SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS: caused by the program
_FROM_WITHIN = {f"signal {number}" for number in (4, 5, 6, 7, 8, 11, 31)}


def cause(fault: Fault) -> str:
    """Return a fault's signature without parts that vary between faults of one cause."""
    pattern = _ACCIDENTS.get(fault.kind)
    return fault.signature if pattern is None else pattern.sub("#", fault.signature)


def out_of_memory(fault: Fault) -> str:
    """Return which memory ran out, "device" or "host"; empty: none."""
    if OOM_KILL in fault.evidence or fault.exit_code == _KILLED:
        return "host"
    if fault.kind is not FaultKind.ERROR:
        return ""
    found = (name for name, words in _NO_MEMORY if any(word in fault.signature for word in words))
    return next(found, "")


def signature_of(fault: Fault) -> str:
    """Return the key of a fault's kind and cause, whatever its step."""
    return f"{fault.kind.value}|{cause(fault)[:_KEY_LENGTH]}"


def evidence_of(fault: Fault) -> str:
    """Return the key of a fault: kind, cause and step; of a lack of memory without the step, which varies."""
    memory = out_of_memory(fault)
    if memory:
        return f"{MEMORY}|{memory}"
    step = "?" if fault.counted else fault.step
    return f"{signature_of(fault)}|{step}"


def in_program(fault: Fault, trained: bool) -> bool:
    """Say whether the program or its command line has an error that a restart cannot fix.

    Args:
        fault: an import fails in an outage, too.
        trained: the same files have completed a step, so only a wrong use of this package is such an error.
    """
    name = fault.signature.partition(":")[0].rpartition(".")[2]  # a log includes the module
    if fault.kind is not FaultKind.ERROR or trained:
        return fault.kind is FaultKind.ERROR and name.startswith(_MISUSE)
    if fault.signature == _BAD_ARGUMENT:
        return fault.step < 0 or (fault.counted and fault.step == 0)
    return name.startswith((*_NO_CURE, *_MISUSE)) or _WRONG_CALL.match(fault.signature) is not None


def waits_out(fault: Fault) -> bool:
    """Say whether the cause of a fault at a start may be an outage that ends."""
    return fault.kind in _OUTAGES and not out_of_memory(fault)


def gives_back(fault: Fault) -> bool:
    """Say whether a rank ended in order after a preemption notice: the job is over, and nothing is wrong."""
    return fault.exit_code == ExitCode.PREEMPTED and fault.kind is not FaultKind.REFUSED


def course_of(fault: Fault) -> tuple[Move, ...]:
    """Return the moves against a fault, in the order in which they are tried."""
    if out_of_memory(fault):
        return OUT_OF_MEMORY
    course = COURSES[fault.kind]
    if fault.kind is FaultKind.CRASH and fault.signature in _FROM_WITHIN:
        return tuple(move for move in course if not move.chance)
    return course


ALWAYS_SPEAK = (FaultKind.NON_FINITE, FaultKind.CORRUPT)


def speaks_against_state(fault: Fault, tried: int, repeats: int) -> bool:
    """Say whether a fault is evidence against the loaded checkpoint.

    Numbers that are not finite and replicas that differ always are. Another fault is if it occurred again
    after every plain restart that its policy has before an older checkpoint.

    Args:
        fault: the present one.
        tried: the number of moves of its policy that were made or skipped before.
        repeats: the number of earlier occurrences.
    """
    if fault.kind in ALWAYS_SPEAK:
        return True
    course = course_of(fault)
    older = next((place for place, move in enumerate(course) if move.state is StateSource.OLDER), 0)
    left = [move for move in course[tried:older] if not (move.chance and repeats >= 2)]
    return bool(older) and not left and not fault.counted


def where(fault: Fault) -> str:
    """Return the step of a fault in words."""
    if fault.counted:
        words = f"after {fault.step} optimizer steps of its process"
        return words if fault.step > 0 else "before an optimizer step was seen"
    return f"at step {fault.step}" if fault.step >= 0 else "before the first step"
