"""The fault history of a job: each fault with its node and step, and the move against it.

It is the only memory of faults. The restart policy (:mod:`outlast.recovery.policy.escalation`) gets from it
the next move, failing nodes (:func:`against`) and the diagnosis (:func:`came_back`, :func:`common_cause`).

A node is blamed after ``ENOUGH`` faults of its own within a day, if all other nodes together have fewer. The
same fault at the same step counts once; a lost node, or a fault without a known step, counts each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.errors import ExitCode
from outlast.fields import moment, whole
from outlast.hang.policy.diagnosis import looks_like_victim
from outlast.recovery.policy.actions import (
    ALWAYS_SPEAK,
    MEMORY,
    cause,
    course_of,
    evidence_of,
    out_of_memory,
    where,
)
from outlast.recovery.policy.events import FaultKind, RecoveryAction

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.recovery.policy.events import Fault


_KEPT = 256


@dataclass(frozen=True)
class Met:
    """A fault, and the move against it.

    Args:
        evidence: equal for equal faults at the same step.
        what: the fault in words.
        node: on which it was seen.
        step: completed steps at the fault; -1: before the first one, or unknown.
        at: wall time.
        counted: the step counts optimizer steps of one process, so it cannot be compared.
        own: its node may be the cause.
        place: index of the move in the policy of the fault; -1: another move.
        loaded: the copies that its generation had loaded.
    """

    evidence: str
    what: str
    node: str
    step: int
    at: float
    counted: bool
    own: bool
    place: int
    loaded: tuple[str, ...]

    @classmethod
    def of(cls, fault: Fault, at: float, own: bool = False, loaded: tuple[str, ...] = ()) -> Met:
        """Return the entry for a fault."""
        what = f"{fault.kind.value} ({cause(fault):.60}) {where(fault)}"
        step = -1 if fault.counted else fault.step
        return cls(evidence_of(fault), what, fault.node, step, at, fault.counted, own, -1, loaded)


class FaultHistory:
    """The faults of one job that were answered with a move, the oldest first."""

    def __init__(self) -> None:
        self._met: list[Met] = []
        self._recent = 0

    def before(self, fault: Fault) -> tuple[Met, ...]:
        """Return earlier occurrences of the fault at its step; none if the step is unknown."""
        if fault.counted:
            return ()
        evidence = evidence_of(fault)
        return tuple(one for one in self._met if one.evidence == evidence and not one.counted)

    @property
    def all(self) -> tuple[Met, ...]:
        """All faults."""
        return tuple(self._met)

    @property
    def recent(self) -> tuple[Met, ...]:
        """The faults since the last progress."""
        return tuple(self._met[len(self._met) - self._recent :])

    def add(self, met: Met) -> None:
        """Add a fault."""
        self._met = [*self._met, met][-_KEPT:]
        self._recent = min(self._recent + 1, _KEPT)

    def amend(self, place: int) -> None:
        """Replace the move against the latest fault, which still counts once."""
        self._met[-1] = replace(self._met[-1], place=place)

    def progressed(self) -> None:
        """Reset what counts since the last progress, and drop faults for lack of memory."""
        self._recent = 0
        self._met = [one for one in self._met if not one.evidence.startswith(MEMORY)]

    def settle(self, now: float) -> None:
        """Move faults in the future to now: the clock was set back."""
        self._met = [replace(one, at=min(one.at, now)) for one in self._met]

    def signs(self, node: str, now: float) -> tuple[str, ...]:
        """Return the faults of the last day that a node may be the cause of, in words, the oldest first."""
        return tuple(one.what for one in self._met if one.own and one.node == node and now - one.at < DAY)

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
            KeyError, TypeError, ValueError: the state is invalid.
        """
        found = cls()
        found._met = [_read(one) for one in state["faults"]][-_KEPT:]
        found._recent = min(whole(state["recent"], at_least=0), len(found._met))
        return found


def _read(one: Mapping[str, Any]) -> Met:
    evidence, what, node = one["evidence"], one["what"], one["node"]
    loaded: Sequence[object] = one["loaded"]
    if not all(isinstance(text, str) for text in (evidence, what, node, *loaded)):
        raise TypeError(f"{one!r:.200} is not a fault of a history: text expected")
    counted, own = one["counted"], one["own"]
    if not isinstance(counted, bool) or not isinstance(own, bool) or isinstance(loaded, str):
        raise TypeError(f"{one!r:.200} is not a fault of a history")
    step, place = whole(one["step"], at_least=-1), whole(one["place"], at_least=-1)
    return Met(evidence, what, node, step, moment(one["at"]), counted, own, place, tuple(map(str, loaded)))


ENOUGH = 3  # as many as restarts without progress by default
DAY = 86_400.0  # seconds


def against(node: str, faults: Iterable[Met], now: float) -> str:
    """Return why a node is to blame, in a few words; empty: it is not.

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
    return f"{node} caused {own} faults in 24 h" if own >= ENOUGH and 2 * own > len(strikes) else ""


def is_own(fault: Fault) -> bool:
    """Say whether the node may be the cause of a fault on it."""
    if fault.kind is FaultKind.LOST:
        return True
    return fault.rank >= 0 and not out_of_memory(fault) and not looks_like_victim(fault.signature)


_ENOUGH = 3  # faults of any cause at one step are no longer chance
_TOLD = 3
_CHANGE = {
    "device": "a smaller micro-batch, activation checkpointing or more ranks to share the model; "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much is reserved and not allocated",
    "host": "fewer or smaller DataLoader workers, fewer ranks on a node, or a higher memory limit of the "
    "container or allocation",
}


def came_back(fault: Fault, before: Sequence[Met], loaded: tuple[str, ...]) -> str:
    """Return the diagnosis for a fault whose policy is used up.

    Args:
        fault: the present one.
        before: its earlier occurrences, with the moves against them.
        loaded: the copies that the current generation had loaded.
    """
    times = "twice" if len(before) == 1 else f"{len(before) + 1} times"
    memory = out_of_memory(fault)
    if memory:
        return f"out of {memory} memory {times} without progress; try: {_CHANGE[memory]}"
    came = f"the same fault occurred {times} {where(fault)}"
    if fault.kind is FaultKind.LOST:
        return f"{came}, and no other node can replace it"
    course = course_of(fault)
    kinds = {course[one.place].kind for one in before if 0 <= one.place < len(course)}
    elsewhere = " and on other nodes" if kinds & {RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK} else ""
    if fault.exit_code == ExitCode.SAVE_FAILED:
        return (
            f"{came}{elsewhere}: checkpoints cannot be written; make room, then start the same command again"
        )
    if fault.step < 0:
        return f"{came}{elsewhere}: the start-up fails; check the program and its environment"
    if _older_was_loaded(before, loaded):
        came += f", from every checkpoint that was tried{elsewhere}"
        culprits = " or the program" if elsewhere else ", the program or the machine"
        if clear_suspicion(fault, before, loaded):
            return f"{came}: the cause is the data of this step{culprits}, not the checkpoint"
        return f"{came}: the cause is the data of this step{culprits}, or all of these checkpoints are bad"
    return f"{came}{elsewhere}: the cause is the program, the data or the machine; a restart will not help"


def clear_suspicion(fault: Fault, before: Sequence[Met], loaded: tuple[str, ...]) -> bool:
    """Say whether a fault that occurred from several checkpoints clears them of suspicion.

    Numbers that are not finite and replicas that differ do not.
    """
    clears = fault.step >= 0 and fault.kind not in ALWAYS_SPEAK
    return clears and _older_was_loaded(before, loaded)


def _older_was_loaded(before: Sequence[Met], loaded: tuple[str, ...]) -> bool:
    """Say whether the fault occurred again from an older checkpoint, or from another tier's copy."""
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
    """Say whether all faults since the last progress were at one step, and too many for chance."""
    steps = {one.step for one in recent}
    lost = any(one.evidence.startswith(FaultKind.LOST.value) for one in recent)
    return len(recent) >= _ENOUGH and len(steps) == 1 and min(steps) >= 0 and not lost


def common_cause(recent: Sequence[Met], newest: int) -> str:
    """Return what the faults since the last progress have in common.

    Args:
        recent: these faults, the latest last.
        newest: step of the newest checkpoint; -1: none.
    """
    if at_one_step(recent):
        words = "check the data of this step and the program"
        return f"all {len(recent)} faults occurred at step {recent[-1].step}: {words}"
    if newest < 0 and all(one.step < 0 and not one.counted for one in recent):
        return f"no step was completed: the start-up fails; last fault: {recent[-1].what}"
    return f"last faults: {latest(recent)}"


def latest(faults: Sequence[Met]) -> str:
    """Return the latest of some faults in words, equal ones once."""
    return ", ".join(dict.fromkeys(one.what for one in faults[-_TOLD:]))
