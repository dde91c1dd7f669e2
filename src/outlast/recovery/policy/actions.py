"""The table of recoveries: for each kind of fault the moves that may cure it, from cheap to dear.

A move is a point on two axes: where to go on (the rung), and from which state. ``COURSES`` is followed from
left to right and never back: the same fault at the same step is new evidence, so the answer to it is a later
move. What cannot be done now, or was spent, is passed over. A course that is used up ends the job with a
diagnosis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.recovery.policy.events import FaultKind, RecoveryAction, StateSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.recovery.policy.events import Fault


@dataclass(frozen=True)
class Move:
    """One answer to a fault.

    Args:
        rung: where to go on.
        state: from which checkpoint.
        chance: the same as the move before it, for faults that may come from outside twice at the same step;
            it is not made when the fault was met with two moves already.
    """

    rung: RecoveryAction
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
    FaultKind.ERROR: (_REENTER, _RESTART, _OLDER, _REPLACE),  # a program that raises will raise again
    FaultKind.CRASH: (_REENTER, _RESTART, _AGAIN, _OLDER, _REPLACE, _SHRINK),
    # Each time with twice the timeout.
    FaultKind.HANG: (_REENTER, _RESTART, _AGAIN, _OLDER, _REPLACE, _SHRINK),
    # No state loses a node; which of the moves is possible depends on the nodes that are left.
    FaultKind.LOST: (*_WITHOUT, *(replace(move, chance=True) for move in _WITHOUT)),
    FaultKind.CORRUPT: (_RESTART, _OLDER, _REPLACE),  # replicas differ, so what is in memory is not kept
    FaultKind.NON_FINITE: (_REENTER, _RESTART, _OLDER, _REPLACE, _SHRINK),
    FaultKind.REFUSED: (),
}
# Entering a process again frees none of its memory (Megatron-LM #2774), and no state needs less.
OUT_OF_MEMORY = (_RESTART,)
OOM_KILL = ("kernel", "out of memory")  # evidence: the kernel killed the rank for want of memory
_NO_MEMORY = (
    ("device", ("OutOfMemoryError", "CUDA out of memory", "HIP out of memory")),
    (
        "host",
        (
            "MemoryError",
            "Cannot allocate memory",
            "DefaultCPUAllocator: can't allocate memory",
            "killed by signal: Killed",  # what a DataLoader says of its worker
        ),
    ),
)
MEMORY = "out of memory"  # such evidence holds until there is progress
_KILLED = 137  # a shell's word for SIGKILL, which a container's limit sends
_NO_CURE = (
    "SyntaxError",
    "IndentationError",
    "ImportError",
    "ModuleNotFoundError",
    "UsageError",
    "ConfigError",
)
# Addresses, ports, process ids and digests differ between two failures of the same cause; so does where it
# is noticed.
_ACCIDENTS = {
    FaultKind.CORRUPT: re.compile(r"\b[0-9a-f]{8,}\b"),
    FaultKind.ERROR: re.compile(r"0x[0-9a-f]+|\d{4,}", re.IGNORECASE),
    FaultKind.NON_FINITE: re.compile(r"\d+"),
}
_KEY_LENGTH = 200
# SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS: nobody outside sends them
_FROM_WITHIN = {f"signal {number}" for number in (4, 5, 6, 7, 8, 11, 31)}


def cause(fault: Fault) -> str:
    """Return a fault's signature without what differs between two faults of one cause."""
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


def evidence_of(fault: Fault) -> str:
    """Return what two faults share that are the same evidence: kind, cause and step.

    Memory does not run out at the same step each time, so the step is none of that evidence.
    """
    memory = out_of_memory(fault)
    if memory:
        return f"{MEMORY}|{memory}"
    step = "?" if fault.counted else fault.step
    return f"{fault.kind.value}|{cause(fault)[:_KEY_LENGTH]}|{step}"


def in_program(fault: Fault) -> bool:
    """Say whether the program itself is wrong, so that no restart can help."""
    name = fault.signature.partition(":")[0].rpartition(".")[2]  # a log names the module, too
    return fault.kind is FaultKind.ERROR and name.startswith(_NO_CURE)


def course_of(fault: Fault) -> tuple[Move, ...]:
    """Return the moves that may cure a fault, in the order in which they are tried."""
    if out_of_memory(fault):
        return OUT_OF_MEMORY
    course = COURSES[fault.kind]
    if fault.kind is FaultKind.CRASH and fault.signature in _FROM_WITHIN:
        return tuple(move for move in course if not move.chance)
    return course


def speaks_against_state(fault: Fault, tried: int, repeats: int) -> bool:
    """Say whether a fault speaks against the state that was loaded.

    Numbers that are not finite and replicas that differ do at once. Another fault does when it came back
    after every plain restart that its course has before an older checkpoint.

    Args:
        fault: that came.
        tried: so many moves of its course were passed before.
        repeats: how often it was met before.
    """
    if fault.kind in (FaultKind.NON_FINITE, FaultKind.CORRUPT):
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
