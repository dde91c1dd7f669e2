"""The fault history of a job: which fault came where, at which step, how often, and what was tried.

It is the only memory of faults. The restart policy (:mod:`outlast.recovery.policy.escalation`) reads the next
move, failing nodes (:mod:`outlast.recovery.policy.fault_history`) and the diagnosis
(:mod:`outlast.recovery.policy.fault_history`) from it. Trust in checkpoints and timeouts are told what
follows from it, with each answer.

Which node keeps failing: faults of its own, by node, within a day, read from the fault history.

A node is struck by a fault whose culprit is on it. The same fault at the same step counts once, since that
speaks against the step; a node that is lost, or a fault whose step is not known, counts each time. A node is
bad with ``ENOUGH`` strikes, if all others together have fewer: a program that fails everywhere convicts no
node.

From faults that came back to a sentence that says where to look, or what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.fields import moment, whole
from outlast.hang.policy.diagnosis import looks_like_victim
from outlast.recovery.policy.actions import MEMORY, cause, course_of, evidence_of, out_of_memory, where
from outlast.recovery.policy.events import FaultKind, RecoveryAction

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.recovery.policy.events import Fault


_KEPT = 256


@dataclass(frozen=True)
class Met:
    """A fault, and what was tried against it.

    Args:
        evidence: equal for equal faults at the same step.
        what: the fault in words.
        node: on which it was seen.
        step: completed steps when it happened; -1: before the first one, or not known.
        at: wall time.
        counted: the step counts optimizer steps of one process, so it cannot be compared.
        own: its node may be the cause.
        place: of the move in the course of the fault; -1: the move was none of the course.
        loaded: the copies that its generation had loaded.
    """

    evidence: str
    what: str
    node: str
    step: int
    at: float
    counted: bool = False
    own: bool = False
    place: int = -1
    loaded: tuple[str, ...] = ()

    @classmethod
    def of(cls, fault: Fault, at: float, own: bool = False, loaded: tuple[str, ...] = ()) -> Met:
        """Return what is remembered of a fault."""
        what = f"{fault.kind.value} ({cause(fault):.60}) {where(fault)}"
        step = -1 if fault.counted else fault.step
        return cls(evidence_of(fault), what, fault.node, step, at, fault.counted, own, -1, loaded)


class FaultHistory:
    """The faults of one job that were answered with a move, the oldest first."""

    def __init__(self) -> None:
        self._met: list[Met] = []
        self._recent = 0

    def before(self, fault: Fault) -> tuple[Met, ...]:
        """Return when the same fault came at the same step; nothing where its step is not known."""
        if fault.counted:
            return ()
        evidence = evidence_of(fault)
        return tuple(one for one in self._met if one.evidence == evidence and not one.counted)

    @property
    def all(self) -> tuple[Met, ...]:
        """Every fault that is remembered."""
        return tuple(self._met)

    @property
    def recent(self) -> tuple[Met, ...]:
        """The faults since the last progress."""
        return tuple(self._met[len(self._met) - self._recent :])

    def add(self, met: Met) -> None:
        """Remember one more fault."""
        self._met = [*self._met, met][-_KEPT:]
        self._recent = min(self._recent + 1, _KEPT)

    def amend(self, place: int) -> None:
        """Note that another move was made against the latest fault; it counts once all the same."""
        self._met[-1] = replace(self._met[-1], place=place)

    def progressed(self) -> None:
        """Begin anew what counts since the last progress; that memory ran out is no evidence any more."""
        self._recent = 0
        self._met = [one for one in self._met if not one.evidence.startswith(MEMORY)]

    def settle(self, now: float) -> None:
        """Let no fault lie in the future: the clock was set back."""
        self._met = [one if one.at <= now else replace(one, at=now) for one in self._met]

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher, as JSON values."""
        return {
            "faults": [{**asdict(one), "loaded": list(one.loaded)} for one in self._met],
            "recent": self._recent,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> FaultHistory:
        """Return the history that an earlier launcher left.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours.
        """
        found = cls()
        found._met = [_read(one) for one in state["faults"]][-_KEPT:]
        found._recent = min(whole(state["recent"], at_least=0), len(found._met))
        return found


def _read(one: Mapping[str, Any]) -> Met:
    evidence, what, node = one["evidence"], one["what"], one["node"]
    loaded: Sequence[object] = one["loaded"]
    if not all(isinstance(text, str) for text in (evidence, what, node, *loaded)):
        raise TypeError(f"{one!r:.200} is no fault of a history: a text is none")
    counted, own = one["counted"], one["own"]
    if not isinstance(counted, bool) or not isinstance(own, bool) or isinstance(loaded, str):
        raise TypeError(f"{one!r:.200} is no fault of a history")
    step, place = whole(one["step"], at_least=-1), whole(one["place"], at_least=-1)
    return Met(evidence, what, node, step, moment(one["at"]), counted, own, place, tuple(map(str, loaded)))


ENOUGH = 3  # as many as restarts without progress by default
DAY = 86_400.0  # seconds


def against(node: str, faults: Iterable[Met], now: float) -> str:
    """Return why a node is bad, in a few words; empty: it is not known to be.

    Args:
        node: its name.
        faults: of all nodes.
        now: wall time.
    """
    strikes: list[str] = []
    known: set[tuple[str, str]] = set()
    for one in faults:
        if not one.own or now - one.at >= DAY:
            continue
        key = (one.node, one.evidence)
        if key not in known or one.counted or one.evidence.startswith(FaultKind.LOST.value):
            strikes.append(one.node)
        known.add(key)
    own = strikes.count(node)
    return f"{node} had {own} faults of its own in 24 h" if own >= ENOUGH and 2 * own > len(strikes) else ""


def is_own(fault: Fault) -> bool:
    """Say whether the node may be the cause of a fault on it."""
    if fault.kind is FaultKind.LOST:
        return True
    return fault.rank >= 0 and not out_of_memory(fault) and not looks_like_victim(fault.signature)


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
    elsewhere = " and on other nodes" if rungs & {RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK} else ""
    if fault.step < 0:
        return f"{came}{elsewhere}: the start-up fails; check the program and its environment"
    if _older_was_loaded(before, loaded):
        came += f", from every state that was tried{elsewhere}"
        culprits = " or the program" if elsewhere else ", the program or the machine"
        if clear_suspicion(fault, before, loaded):
            return f"{came}: it is the data of this step{culprits}, and not the checkpoint"
        return f"{came}: it is the data of this step{culprits}, or all of these states are bad"
    return f"{came}{elsewhere}: it is in the program, the data or the machine; a restart will not help"


def clear_suspicion(fault: Fault, before: Sequence[Met], loaded: tuple[str, ...]) -> bool:
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
