"""The fault history of a job: which fault came where, at which step, how often, and what was tried.

It is the only memory of faults. The restart policy (:mod:`outlast.core.escalation`) reads the next move,
failing nodes (:mod:`outlast.core.strikes`) and the diagnosis (:mod:`outlast.core.loops`) from it. Trust in
checkpoints and timeouts are told what follows from it, with each answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from outlast.core.fields import moment, whole
from outlast.core.ladder import MEMORY, cause, evidence_of, where

if TYPE_CHECKING:
    from outlast.core.events import Fault

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
