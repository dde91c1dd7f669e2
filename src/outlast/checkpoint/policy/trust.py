"""How far each copy of a checkpoint is trusted: which are tried last, and which are not loaded at all.

A digest shows that a copy holds the bytes that were written, not that these bytes are good. So a copy has to
prove itself: training continues from its state for ``clean_steps`` steps. A fault that bad state can cause,
within that many steps of a load, makes the loaded copy a suspect before the device
(``recovery/policy/escalation`` says which faults). Suspects are loaded when nothing else is left, and one
that ends the same way again is quarantined. What ranks saved after they last held the same is quarantined at
once, even if proven: training also continues from wrong numbers. Nothing is deleted for it, and a person can
release it.

A copy is named by its place, ``tier/name``: a checkpoint may be sound in one tier and bad in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.fields import whole
from outlast.recovery.policy.events import FaultKind


@dataclass(frozen=True)
class Committed:
    """A copy exists; of those that an earlier process left this must be said before the load."""

    place: str


@dataclass(frozen=True)
class Damaged:
    """The bytes of a copy are not those that were committed."""

    place: str
    reason: str


@dataclass(frozen=True)
class Released:
    """A person says that a copy may be loaded again, or (``with_path``) the fault was not due to it.

    Args:
        place: the copy.
        reason: why.
        with_path: what was saved after it was loaded is doubted no more for that load.
    """

    place: str
    reason: str
    with_path: bool = False


@dataclass(frozen=True)
class Removed:
    """A copy does not exist any more."""

    place: str


@dataclass(frozen=True)
class Loaded:
    """The ranks go on from a state whose shards were verified; a fresh start is a load of no copy.

    Args:
        step: completed steps.
        places: the copies from which shards were read.
        generation: whose copies are saved on the path that begins here; -1: not known.
    """

    step: int
    places: tuple[str, ...]
    generation: int = -1


@dataclass(frozen=True)
class CleanStep:
    """Every rank has completed a step, and nothing was wrong with it; steps may be left out."""

    step: int


@dataclass(frozen=True)
class Faulted:
    """A fault ended this path of training.

    Args:
        step: completed steps when it happened; -1 before the first one. Of what is told by clean steps and
            by this, the later one counts.
        kind: value of a ``FaultKind``, or ``NON_FINITE``.
        signature: equal for equal causes.
        lasting: nothing is left to be tried but another state, however long ago this one was loaded.
        agreed: ranks that should hold the same last did after so many steps; -1: never since the load.
            None: the fault is not about that.
        speaks: it speaks against the state that was loaded, if it came soon after the load.
    """

    step: int
    kind: str
    signature: str
    lasting: bool = False
    agreed: int | None = None
    speaks: bool = False


Event = Committed | Damaged | Released | Removed | Loaded | CleanStep | Faulted


CLEAN_STEPS = 20  # Megatron-LM #5281: a bad replica showed itself three steps after every load of it
NON_FINITE = FaultKind.NON_FINITE.value
_PATHS_KEPT = 64
_DOUBTED_KEPT = 8
_COPIES_KEPT = 256
_OUTCOMES_KEPT = 8
_SIGNATURE_LENGTH = 200
_RELEASED = "released: "


class Trust(str, Enum):
    """How far a copy is proven; each state but the last contains the ones before it."""

    COMMITTED = "committed"  # it exists
    VERIFIED = "verified"  # its bytes were read to be loaded, and their digests fit
    PROVEN = "proven"  # training ran on from its state
    QUARANTINED = "quarantined"  # not to be loaded, for a reason


@dataclass(frozen=True)
class Change:
    """What an event changed about a copy.

    Args:
        place: the copy.
        trust: its state from now on.
        suspect: whether it is loaded only when nothing else is left.
        reason: why.
    """

    place: str
    trust: Trust
    suspect: bool
    reason: str


@dataclass
class _Entry:
    step: int
    path: int  # on which it was saved; -1: not known
    trust: Trust
    suspicion: str = ""
    reason: str = ""
    outcomes: dict[str, int] = field(default_factory=dict)


class TrustBook:
    """All copies of a run; needs no clock, since nothing in it happens because time passes.

    A path is the training between a load and the next fault. What was saved on a path stands and falls with
    the copy that the path began with.

    Args:
        clean_steps: steps without a fault that prove a copy.
    """

    def __init__(self, clean_steps: int = CLEAN_STEPS) -> None:
        self._clean_steps = clean_steps
        self._entries: dict[str, _Entry] = {}
        self._path = 0
        self._paths: dict[int, int] = {}  # of generations
        self._doubted: dict[int, str] = {}  # paths, with the copy that each began with
        self._diverged: dict[int, int] = {}  # paths, with the step after which replicas last held the same
        self._began: int | None = None
        self._clean = -1
        self._loaded: tuple[str, ...] = ()

    def handle(self, event: Event) -> tuple[Change, ...]:
        """Take in what happened; return what that changed, in the order of places."""
        before = {place: _standing(entry) for place, entry in self._entries.items()}
        match event:
            case Loaded():
                self._on_load(event)
            case CleanStep(step):
                self._on_clean_step(step)
            case Faulted():
                self._on_fault(event)
            case _:
                self._on_copy(event)
        return tuple(
            Change(place, entry.trust, bool(entry.suspicion), entry.suspicion or entry.reason)
            for place, entry in sorted(self._entries.items())
            if _standing(entry) != before.get(place)
        )

    def _on_copy(self, event: Committed | Damaged | Released | Removed) -> None:
        place = event.place
        match event:
            case Committed():
                self._reach(place, Trust.COMMITTED, "committed")
            case Damaged():
                self._quarantine(self._entry(place), event.reason)
            case Released():
                entry = self._entries.get(place)
                if entry is None or entry.suspicion or entry.trust is Trust.QUARANTINED:
                    reason = f"{_RELEASED}{event.reason}"
                    self._entries[place] = _Entry(_step_of(place), -1, Trust.COMMITTED, reason=reason)
                    _trim(self._entries, _COPIES_KEPT)
                if event.with_path:
                    self._doubted = {at: begin for at, begin in self._doubted.items() if begin != place}
            case Removed():
                self._entries.pop(place, None)

    @staticmethod
    def _quarantine(entry: _Entry, reason: str) -> None:
        entry.trust, entry.suspicion, entry.reason = Trust.QUARANTINED, "", reason

    def _entry(self, place: str) -> _Entry:
        if place not in self._entries:
            step, generation = _numbers_of(place)
            path = self._paths.get(generation, self._path)
            entry = _Entry(step, path, Trust.COMMITTED, _begun_with(self._doubted.get(path)))
            if self._is_diverged(path, step):
                self._quarantine(entry, _diverged_after(self._diverged[path]))
            self._entries[place] = entry
            _trim(self._entries, _COPIES_KEPT)
        return self._entries[place]

    def _is_diverged(self, path: int, step: int) -> bool:
        return path in self._diverged and step > self._diverged[path]

    def _reach(self, place: str, trust: Trust, reason: str) -> None:
        entry = self._entry(place)
        if _ORDER.index(entry.trust) < _ORDER.index(trust) or not entry.reason:
            entry.trust, entry.reason = trust, reason

    def _on_load(self, event: Loaded) -> None:
        self._path += 1
        self._began, self._clean, self._loaded = event.step, event.step, event.places
        if event.generation >= 0:
            self._paths[event.generation] = self._path
            _trim(self._paths, _PATHS_KEPT)
        for place in event.places:
            self._reach(place, Trust.VERIFIED, "verified when it was loaded")

    def _on_clean_step(self, step: int) -> None:
        self._clean = max(self._clean, step)
        if self._began is None or step - self._began < self._clean_steps:
            return
        for place in self._loaded:
            self._prove(place, f"{self._clean_steps} clean steps after it was loaded")
        for place, entry in self._entries.items():
            saved_here = entry.path == self._path and entry.step > self._began
            if saved_here and step - entry.step >= self._clean_steps:
                self._prove(place, f"training went on from it for {self._clean_steps} clean steps")

    def _prove(self, place: str, reason: str) -> None:
        entry = self._entries.get(place)
        if entry is not None and entry.trust is not Trust.QUARANTINED:
            entry.trust, entry.suspicion, entry.reason = Trust.PROVEN, "", reason
            entry.outcomes.clear()

    def _on_fault(self, fault: Faulted) -> None:
        began, path, loaded = self._began, self._path, self._loaded
        reached = max(fault.step, self._clean)
        signature = _outcome(fault)
        self._path, self._began, self._loaded = path + 1, None, ()
        if began is None:
            return
        if fault.agreed is not None:
            self._part(path, fault.agreed)
            if fault.agreed >= began and not fault.lasting:
                return  # what was loaded was compared, and was the same on all
        if not fault.lasting and not (fault.speaks and reached - began < self._clean_steps):
            return
        after = f"{reached - began} steps after it was loaded"
        for place in loaded:
            self._suspect(place, signature, f"{fault.kind} ({fault.signature:.60}) {after}")
        if not loaded:
            return
        self._doubted[path] = loaded[0]
        _trim(self._doubted, _DOUBTED_KEPT)
        for entry in self._entries.values():
            if entry.path == path and entry.trust is not Trust.QUARANTINED and not entry.suspicion:
                entry.suspicion = _begun_with(loaded[0])

    def _part(self, path: int, agreed: int) -> None:
        self._diverged[path] = agreed
        _trim(self._diverged, _DOUBTED_KEPT)
        for entry in self._entries.values():
            if entry.path == path and entry.step > agreed and entry.trust is not Trust.QUARANTINED:
                self._quarantine(entry, _diverged_after(agreed))

    def _suspect(self, place: str, signature: str, reason: str) -> None:
        entry = self._entries.get(place)
        if entry is None or entry.trust is Trust.QUARANTINED:
            return
        times = entry.outcomes.pop(signature, 0) + 1
        entry.outcomes[signature] = times
        _trim(entry.outcomes, _OUTCOMES_KEPT)
        if times >= 2:
            self._quarantine(entry, f"{reason}, as after the load before")
        else:
            entry.trust, entry.suspicion = Trust.VERIFIED, reason

    def idle_at(self, step: int) -> int:
        """Return the completed steps of what was loaded, if none was done since; -1: one was, or no load.

        Args:
            step: completed steps; -1: not known.
        """
        began = self._began
        return -1 if began is None or max(step, self._clean) > began else began

    def trust(self, place: str) -> Trust | None:
        """Return the state of a copy; None for one that was never heard of."""
        entry = self._entries.get(place)
        return None if entry is None else entry.trust

    def reason(self, place: str) -> str:
        """Return why a copy is in its state, or under suspicion; empty for one that was never heard of."""
        entry = self._entries.get(place)
        return "" if entry is None else entry.suspicion or entry.reason

    def released(self) -> tuple[str, ...]:
        """Return the copies that may be loaded though their generation is doubted."""
        return tuple(
            sorted(
                place
                for place, entry in self._entries.items()
                if entry.path < 0 and not entry.suspicion and entry.trust is not Trust.QUARANTINED
            )
        )

    def places(self) -> tuple[str, ...]:
        """Return every copy that was heard of and is not known to be gone."""
        return tuple(sorted(self._entries))

    def doubted(self) -> tuple[tuple[int, str], ...]:
        """Return the generations none of whose copies is to be trusted, each with the reason."""
        return tuple(
            (generation, _begun_with(self._doubted[path]))
            for generation, path in self._paths.items()
            if path in self._doubted
        )

    def diverged(self) -> tuple[tuple[int, int, str], ...]:
        """Return the generations whose ranks came to differ, the step at which they last did not, and why."""
        return tuple(
            (generation, self._diverged[path], _diverged_after(self._diverged[path]))
            for generation, path in self._paths.items()
            if path in self._diverged
        )

    def suspects(self) -> tuple[str, ...]:
        """Return the copies that are loaded only when nothing else is left."""
        return tuple(sorted(place for place, entry in self._entries.items() if entry.suspicion))

    def accused(self, fault: Faulted) -> tuple[str, ...]:
        """Return the suspects of a fault: what was loaded before it, and what was saved after that load."""
        outcome = _outcome(fault)
        loaded = [place for place in self.suspects() if outcome in self._entries[place].outcomes]
        reasons = {_begun_with(place) for place in loaded}
        saved = [place for place in self.suspects() if self._entries[place].suspicion in reasons]
        return tuple(sorted({*loaded, *saved}))

    def proven(self) -> tuple[str, ...]:
        """Return the copies from which training ran on, the newest first."""
        found = [
            place for place, one in self._entries.items() if one.trust is Trust.PROVEN and not one.suspicion
        ]
        return tuple(sorted(found, key=lambda place: (-self._entries[place].step, place)))

    def order(self, places: Iterable[str]) -> tuple[str, ...]:
        """Return copies in the order to try them in: as given, suspects last, quarantined ones not at all."""
        wanted = [place for place in places if self.trust(place) is not Trust.QUARANTINED]
        doubtful = set(self.suspects())
        return (
            *(place for place in wanted if place not in doubtful),
            *(place for place in wanted if place in doubtful),
        )

    def state(self) -> dict[str, Any]:
        """Return what must outlive the process, as JSON values."""
        return {
            "path": self._path,
            "paths": {str(generation): path for generation, path in self._paths.items()},
            "doubted": {str(path): place for path, place in self._doubted.items()},
            "parted": {str(path): agreed for path, agreed in self._diverged.items()},
            "copies": {
                place: {
                    "step": entry.step,
                    "path": entry.path,
                    "trust": entry.trust.value,
                    "suspicion": entry.suspicion,
                    "reason": entry.reason,
                    "outcomes": dict(entry.outcomes),
                }
                for place, entry in self._entries.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after an earlier process; the path that it was on has ended with it.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours; nothing was taken over.
        """
        path = whole(state["path"], at_least=0)
        paths = {int(one): whole(at, at_least=0) for one, at in dict(state["paths"]).items()}
        doubted = {int(one): str(begin) for one, begin in dict(state["doubted"]).items()}
        diverged = {int(one): whole(agreed, at_least=-1) for one, agreed in dict(state["parted"]).items()}
        entries = {
            str(place): _Entry(
                whole(one["step"], at_least=-1),
                whole(one["path"], at_least=-1),
                Trust(one["trust"]),
                str(one["suspicion"]),
                str(one["reason"]),
                {str(key): whole(times, at_least=1) for key, times in dict(one["outcomes"]).items()},
            )
            for place, one in dict(state["copies"]).items()
        }
        self._path, self._entries = path + 1, entries
        self._paths, self._doubted, self._diverged = paths, doubted, diverged
        self._began, self._loaded = None, ()


_ORDER = tuple(Trust)


def _standing(entry: _Entry) -> tuple[Trust, bool]:
    return entry.trust, bool(entry.suspicion)


def _outcome(fault: Faulted) -> str:
    return f"{fault.kind}|{fault.signature[:_SIGNATURE_LENGTH]}"


def _begun_with(place: str | None) -> str:
    return "" if place is None else f"saved on the path that began with {place}, which is not to be trusted"


def _diverged_after(agreed: int) -> str:
    if agreed < 0:
        return "saved by ranks that should hold the same and do not"
    return f"saved after step {agreed}, when ranks last held what they should hold alike"


def _trim(found: dict[Any, Any], keep: int) -> None:
    """Forget the oldest."""
    for old in list(found)[:-keep]:
        del found[old]


def _step_of(place: str) -> int:
    return _numbers_of(place)[0]


def _numbers_of(place: str) -> tuple[int, int]:
    found = parse_copy_name(place.rpartition("/")[2])
    if found is None:
        raise ValueError(f"{place!r} is no place of a copy; expected tier/step-000000120.g7")
    return found
