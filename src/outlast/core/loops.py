"""From faults that came back to a sentence that says where to look, or what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.core.events import FaultKind, Rung, StateSource
from outlast.core.ladder import cause, out_of_memory, where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.core.events import Fault
    from outlast.core.ladder import Move

_ENOUGH = 3  # faults at one step, of whatever causes, are no chance any more
_TOLD = 3
_CHANGE = {
    "device": "a smaller micro-batch, activation checkpointing or more ranks to share the model; "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much is reserved and not allocated",
    "host": "fewer or smaller DataLoader workers, fewer ranks on a node, or a higher memory limit of the "
    "container or allocation",
}


@dataclass(frozen=True)
class Struck:
    """A fault since the last progress, in a few words; ``speaks``: the step may be the cause of it."""

    step: int
    what: str
    speaks: bool

    @classmethod
    def by(cls, fault: Fault) -> Struck:
        """Return what is remembered of a fault."""
        what = f"{fault.kind.value} ({cause(fault):.60}) {where(fault)}"
        return cls(fault.step, what, fault.kind is not FaultKind.LOST)


def came_back(fault: Fault, made: Sequence[Move], repeats: int) -> str:
    """Return the diagnosis for a fault whose course is used up.

    Args:
        fault: that came once more.
        made: the moves that were made against it.
        repeats: how often it was met before.
    """
    times = "twice" if repeats == 1 else f"{repeats + 1} times"
    memory = out_of_memory(fault)
    if memory:
        return f"out of {memory} memory {times} without progress in between; what may help: {_CHANGE[memory]}"
    came = f"the same fault came {times} {where(fault)}"
    if fault.kind is FaultKind.LOST:
        return f"{came}, and the job has no other node in its place"
    rungs = {move.rung for move in made}
    elsewhere = " and on other nodes" if rungs & {Rung.REPLACE_NODE, Rung.SHRINK} else ""
    if fault.step < 0:
        return f"{came}{elsewhere}: the start-up fails; it is the program or its surroundings"
    if _tried_older(made):
        came += f", from every state that was tried{elsewhere}"
        culprits = " or the program" if elsewhere else ", the program or the machine"
        if acquits(fault, made):
            return f"{came}: it is the data of this step{culprits}, and not the checkpoint"
        return f"{came}: it is the data of this step{culprits}, or all of these states are bad"
    return f"{came}{elsewhere}: it is in the program, the data or the machine, and would come again"


def acquits(fault: Fault, made: Sequence[Move]) -> bool:
    """Say whether a fault that came back from every state clears those states of suspicion.

    Numbers that are not finite and corrupt bytes go on speaking against them.
    """
    clears = fault.step >= 0 and fault.kind not in (FaultKind.NON_FINITE, FaultKind.CORRUPT)
    return clears and _tried_older(made)


def _tried_older(made: Sequence[Move]) -> bool:
    return any(move.state is StateSource.OLDER for move in made)


def at_one_step(struck: Sequence[Struck]) -> bool:
    """Say whether one step failed too often for chance, whatever it failed of."""
    steps = {one.step for one in struck}
    return (
        len(struck) >= _ENOUGH and len(steps) == 1 and min(steps) >= 0 and all(one.speaks for one in struck)
    )


def without_progress(struck: Sequence[Struck], newest: int) -> str:
    """Return what the faults since the last progress have in common.

    Args:
        struck: those, the last one at the end.
        newest: step of the newest checkpoint; -1: there is none.
    """
    if at_one_step(struck):
        words = "look at the data of this step and at the program"
        return f"all {len(struck)} faults struck at step {struck[-1].step}: {words}"
    if newest < 0 and all(one.step < 0 for one in struck):
        return f"no step was ever done: the start-up fails; the last fault was {struck[-1].what}"
    return f"the last faults were {', '.join(dict.fromkeys(one.what for one in struck[-_TOLD:]))}"
