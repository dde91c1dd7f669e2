"""From faults that came back to a sentence that says where to look, or what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.core.events import FaultKind, Rung
from outlast.core.ladder import course_of, out_of_memory, where
from outlast.core.manifest import parse_copy_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.core.events import Fault
    from outlast.core.history import Met

_ENOUGH = 3  # faults at one step, of whatever causes, are no chance any more
_TOLD = 3
_CHANGE = {
    "device": "a smaller micro-batch, activation checkpointing or more ranks to share the model; "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much is reserved and not allocated",
    "host": "fewer or smaller DataLoader workers, fewer ranks on a node, or a higher memory limit of the "
    "container or allocation",
}


def came_back(fault: Fault, before: Sequence[Met], loaded: tuple[str, ...]) -> str:
    """Return the diagnosis for a fault whose course is used up.

    Args:
        fault: that came once more.
        before: the times that it came before, with the moves that were made.
        loaded: the copies that the present generation had loaded.
    """
    times = "twice" if len(before) == 1 else f"{len(before) + 1} times"
    memory = out_of_memory(fault)
    if memory:
        return f"out of {memory} memory {times} without progress in between; what may help: {_CHANGE[memory]}"
    came = f"the same fault came {times} {where(fault)}"
    if fault.kind is FaultKind.LOST:
        return f"{came}, and the job has no other node in its place"
    course = course_of(fault)
    rungs = {course[one.place].rung for one in before if 0 <= one.place < len(course)}
    elsewhere = " and on other nodes" if rungs & {Rung.REPLACE_NODE, Rung.SHRINK} else ""
    if fault.step < 0:
        return f"{came}{elsewhere}: the start-up fails; check the program and its environment"
    if _older_was_loaded(before, loaded):
        came += f", from every state that was tried{elsewhere}"
        culprits = " or the program" if elsewhere else ", the program or the machine"
        if acquits(fault, before, loaded):
            return f"{came}: it is the data of this step{culprits}, and not the checkpoint"
        return f"{came}: it is the data of this step{culprits}, or all of these states are bad"
    return f"{came}{elsewhere}: it is in the program, the data or the machine; a restart will not help"


def acquits(fault: Fault, before: Sequence[Met], loaded: tuple[str, ...]) -> bool:
    """Say whether a fault that came back from every state clears those states of suspicion.

    Numbers that are not finite and replicas that differ go on speaking against them.
    """
    clears = fault.step >= 0 and fault.kind not in (FaultKind.NON_FINITE, FaultKind.CORRUPT)
    return clears and _older_was_loaded(before, loaded)


def _older_was_loaded(before: Sequence[Met], loaded: tuple[str, ...]) -> bool:
    """Say whether the fault came from a state, and later from an older one or from another tier's."""
    states = [*(one.loaded for one in before if one.loaded), *([loaded] if loaded else [])]
    return any(_is_older(later, first) for at, first in enumerate(states) for later in states[at + 1 :])


def _is_older(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    steps = [min(map(_step_of, places)) for places in (one, other)]
    same_bytes = {place.replace("memory/", "local/") for place in one} & {
        place.replace("memory/", "local/") for place in other
    }
    return steps[0] < steps[1] or (steps[0] == steps[1] and not same_bytes)


def _step_of(place: str) -> int:
    return (parse_copy_name(place.rpartition("/")[2]) or (-1, -1))[0]


def at_one_step(recent: Sequence[Met]) -> bool:
    """Say whether one step failed too often for chance, whatever it failed of."""
    steps = {one.step for one in recent}
    speaks = all(not one.counted and not one.evidence.startswith(FaultKind.LOST.value) for one in recent)
    return len(recent) >= _ENOUGH and len(steps) == 1 and min(steps) >= 0 and speaks


def common_cause(recent: Sequence[Met], newest: int) -> str:
    """Return what the faults since the last progress have in common.

    Args:
        recent: those, the last one at the end.
        newest: step of the newest checkpoint; -1: there is none.
    """
    if at_one_step(recent):
        words = "look at the data of this step and at the program"
        return f"all {len(recent)} faults struck at step {recent[-1].step}: {words}"
    if newest < 0 and all(one.step < 0 and not one.counted for one in recent):
        return f"no step was ever done: the start-up fails; the last fault was {recent[-1].what}"
    return f"the last faults were {', '.join(dict.fromkeys(one.what for one in recent[-_TOLD:]))}"
