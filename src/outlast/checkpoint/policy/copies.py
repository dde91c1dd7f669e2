"""How far each copy of a checkpoint is trusted: which are tried last, and which are not loaded at all.

A digest shows that a copy holds the bytes that were written, not that these bytes are good. So a copy has to
prove itself: training continues from its state for ``CLEAN_STEPS`` steps. A fault that bad state can cause,
within that many steps of a load, makes the loaded copy a suspect before the device
(``recovery/policy/escalation`` says which faults), and with it all that its generation saved after the load.
Suspects are loaded when nothing else is left, and one that ends the same way again is quarantined. What ranks
saved after they last held the same is quarantined at once, even if proven: training also goes on from wrong
numbers. Nothing is deleted for it, and a person can release it.

A copy is named by its place, ``tier/name``: a checkpoint may be sound in one tier and bad in another. One
that is reported without a tier is durable and on this job's own disk: ``local``. Copies in memory become
known when they are loaded, or not at all; so what a doubted generation left there gets one mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any

from outlast import codec
from outlast.checkpoint.policy.manifest import parse_copy_name, place_of, tier_of, training_of
from outlast.checkpoint.policy.resolve import CopyStatus, Mark, of_later
from outlast.codec import Malformed, Meta
from outlast.recovery.policy.events import FaultKind

LOCAL = "local"
CLEAN_STEPS = 20  # Megatron-LM #5281: a bad replica showed itself three steps after every load of it
NON_FINITE = FaultKind.NON_FINITE.value
_SAME_BYTES = {"memory", LOCAL}  # the writer writes one from the other
_DURABLE = (LOCAL, "global")  # tiers whose copies outlive every process and node of the job
_MARKED = 32  # copies that the ranks are told of, the newest
_NAMED = 3  # copies on disk that they are told of, the newest
_DOUBTED_KEPT = 8
_COPIES_KEPT = 256
_OUTCOMES_KEPT = 8
_SIGNATURE_LENGTH = 200
_VERSION = 2  # of what is kept between launchers


class Trust(str, Enum):
    """How far a copy is trusted."""

    COMMITTED = "committed"  # it exists
    VERIFIED = "verified"  # its bytes were read to be loaded, and their digests fit
    PROVEN = "proven"  # training ran on from its state
    SUSPECT = "suspect"  # loaded only when nothing else is left
    QUARANTINED = "quarantined"  # not to be loaded, for a reason


_FOR = (Trust.COMMITTED, Trust.VERIFIED, Trust.PROVEN)
_AGAINST = (Trust.SUSPECT, Trust.QUARANTINED)


@dataclass(frozen=True)
class Faulted:
    """A fault ended a generation.

    Args:
        step: completed steps when it happened; -1 before the first one. If a later step was
            clean, that one counts.
        kind: value of a ``FaultKind``, or ``NON_FINITE``.
        signature: equal for equal causes.
        lasting: nothing is left to be tried but another state, however long ago this one was loaded.
        agreed: completed steps after which ranks last held what they should hold alike; -1: never since
            the load; None: the fault is another one.
        speaks: it speaks against the state that was loaded, if it came soon after the load.
    """

    step: int
    kind: str
    signature: str
    lasting: bool = False
    agreed: int | None = None
    speaks: bool = False

    @property
    def outcome(self) -> str:
        """Equal for faults that are the same, as far as copies are concerned."""
        return f"{self.kind}|{self.signature[:_SIGNATURE_LENGTH]}"


@dataclass(frozen=True)
class TrustChange:
    """What a person is told about a copy.

    Args:
        place: tier and name.
        step: completed steps.
        trust: suspect, quarantined, proven or released.
        reason: why.
    """

    place: str
    step: int
    trust: str
    reason: str


@dataclass
class _Copy:
    """What is known of a copy.

    Args:
        trust: how far it is trusted.
        reason: why.
        digest: of its manifest; empty: not known.
        released: what is known of its generation does not hold for it.
        outcomes: the latest faults that made it a suspect.
    """

    trust: Trust
    reason: str
    digest: Annotated[str, Meta(pattern=r"^[0-9A-Za-z]*\Z")] = ""
    released: bool = False
    outcomes: tuple[str, ...] = ()


@dataclass
class _State:
    """What outlives a launcher.

    Args:
        version: of this.
        copies: by place, in the order in which they became known.
        doubted: generations, with the copy that each has loaded last.
        diverged: generations, with the step after which replicas last held the same.
    """

    version: int
    copies: dict[str, _Copy]
    doubted: tuple[tuple[int, str], ...]
    diverged: tuple[tuple[int, Annotated[int, Meta(ge=-1)]], ...]


class Copies:
    """The copies of one job, all tiers; needs no clock, since nothing in it happens because time passes.

    A fault speaks against the copy that its generation loaded last, and against what was saved since then.

    Attributes:
        loaded: what the present generation has loaded.
    """

    def __init__(self) -> None:
        self._copies: dict[str, _Copy] = {}
        self._doubted: dict[int, str] = {}  # what a generation saved after it has loaded this copy
        self._diverged: dict[int, int] = {}
        self._generation = -1
        self._began: int | None = None  # completed steps of what the present generation has loaded
        self._clean = -1
        self._saved: set[str] = set()  # by the present generation since its latest load
        self.loaded: tuple[str, ...] = ()
        self._changes: list[TrustChange] = []

    def begin(self, generation: int) -> None:
        """Record that a generation starts; until it has loaded something its state is a fresh one.

        Or it continues under another launcher, which does not know what it has loaded.
        """
        self.load(0, (), "", generation)
        self._saved = {place for place in self._copies if _age(place)[1] == generation}

    def commit(self, checkpoint: str) -> None:
        """Record that a copy exists; call it before the load for copies that an earlier process left."""
        for place in _places(checkpoint):
            self._known(place)
            if self._began is not None and _age(place)[1] == self._generation:
                self._saved.add(place)

    def _known(self, place: str) -> _Copy:
        if place not in self._copies:
            self._copies[place] = _Copy(Trust.COMMITTED, "committed")
            _trim(self._copies, _COPIES_KEPT)
            self._judge(place)
        return self._copies[place]

    def _judge(self, place: str) -> None:
        """Apply to a copy what is known of the latest load of the generation that saved it."""
        step, generation = _age(place)
        copy, agreed = self._copies[place], self._diverged.get(generation)
        if copy.released or copy.trust is Trust.QUARANTINED:
            return
        if agreed is not None and step > agreed:
            self._set(place, Trust.QUARANTINED, _diverged_after(agreed))
            return
        begin = self._doubted.get(generation, "")
        if begin and step > _last_before(begin, generation) and copy.trust is not Trust.SUSPECT:
            self._set(place, Trust.SUSPECT, _begun_with(begin))

    def _set(self, place: str, trust: Trust, reason: str) -> None:
        copy = self._copies[place]
        if trust is not copy.trust and trust not in (Trust.COMMITTED, Trust.VERIFIED):
            self._changes.append(TrustChange(place, _age(place)[0], trust.value, reason))
        copy.trust, copy.reason = trust, reason

    def load(self, step: int, places: Iterable[str], digest: str, generation: int) -> None:
        """Record that the ranks continue from a copy whose bytes were verified.

        Args:
            step: completed steps.
            places: the copies from which shards were read.
            digest: of the manifest, empty when that is not known.
            generation: of the ranks.
        """
        loaded = {place for one in places for place in _places(one)}
        names = set(map(_name, loaded))
        loaded |= {
            place
            for place, copy in self._copies.items()
            if digest and copy.digest == digest and _name(place) in names
        }
        self._generation, self._began, self._clean, self._saved = generation, step, step, set()
        self.loaded = tuple(sorted(loaded))
        for place in self.loaded:
            copy = self._known(place)
            copy.digest = digest or copy.digest
            if copy.trust is Trust.COMMITTED:
                self._set(place, Trust.VERIFIED, "verified when it was loaded")

    def clean(self, step: int) -> None:
        """Record that every rank has completed a step without a fault; steps may be left out."""
        self._clean = max(self._clean, step)
        if self._began is None or step - self._began < CLEAN_STEPS:
            return
        for place in sorted(self._copies):
            saved = _age(place)[0]
            went_on = place in self._saved and saved > self._began and step - saved >= CLEAN_STEPS
            if self._copies[place].trust is not Trust.QUARANTINED and (went_on or place in self.loaded):
                reason = f"{CLEAN_STEPS} clean steps after it was loaded"
                if went_on:
                    reason = f"training went on from it for {CLEAN_STEPS} clean steps"
                self._set(place, Trust.PROVEN, reason)
                self._copies[place].outcomes = ()

    def idle_at(self, step: int) -> int:
        """Return the completed steps of what was loaded, if none was done since; -1: one was, or no load.

        Args:
            step: completed steps; -1: not known.
        """
        began = self._began
        return -1 if began is None or max(step, self._clean) > began else began

    def remove(self, checkpoint: str) -> None:
        """Record that a copy was removed."""
        for place in _places(checkpoint):
            self._copies.pop(place, None)

    def set_aside(self, checkpoint: str, reason: str) -> None:
        """Record that the ranks or the writer have put a copy into quarantine.

        A damaged one is only forgotten in its tier: the same state, written there anew or in
        another tier, may be sound. One that was set aside because it is quarantined here stays quarantined.
        """
        for place in _places(checkpoint):
            if place not in self._of(Trust.QUARANTINED):
                self._copies.pop(place, None)
                self._changes.append(TrustChange(place, _age(place)[0], Trust.QUARANTINED.value, reason))

    def fault(self, fault: Faulted) -> None:
        """Record that a fault has ended the present generation."""
        began, loaded, generation = self._began, self.loaded, self._generation
        reached = max(fault.step, self._clean)
        self._began, self.loaded = None, ()
        if began is None:
            return
        if fault.agreed is not None:
            # Never since the load: the fault shows nothing about what this generation saved before it.
            before = _last_before(loaded[0], generation) if loaded else -1
            self._diverged[generation] = before if fault.agreed < 0 else fault.agreed
            _trim(self._diverged, _DOUBTED_KEPT)
        was_alike = fault.agreed is not None and fault.agreed >= began  # what was loaded was compared, too
        soon = fault.speaks and reached - began < CLEAN_STEPS and not was_alike
        if loaded and (fault.lasting or soon):
            after = f"{reached - began} steps after it was loaded"
            for place in loaded:
                self._suspect(place, fault.outcome, f"{fault.kind} ({fault.signature:.60}) {after}")
            self._doubted[generation] = loaded[0]
            _trim(self._doubted, _DOUBTED_KEPT)
        for place in sorted(self._saved & self._copies.keys()):
            self._judge(place)

    def _suspect(self, place: str, outcome: str, reason: str) -> None:
        copy = self._copies.get(place)
        if copy is None or copy.trust is Trust.QUARANTINED:
            return
        if outcome in copy.outcomes:
            self._set(place, Trust.QUARANTINED, f"{reason}, as after the load before")
        else:
            self._set(place, Trust.SUSPECT, reason)
            copy.outcomes = (*copy.outcomes, outcome)[-_OUTCOMES_KEPT:]

    def clear_suspicion(self, fault: Faulted, reason: str) -> None:
        """A fault has ended the present generation as it did others, whatever they had loaded."""
        self._began, self.loaded = None, ()
        suspects = self._of(Trust.SUSPECT)
        loaded = [place for place in suspects if fault.outcome in self._copies[place].outcomes]
        saved = set(map(_begun_with, loaded))
        for place in suspects:
            if place in loaded or self._copies[place].reason in saved:
                self._release(place, reason)
                self._doubted = {one: begin for one, begin in self._doubted.items() if begin != place}

    def _release(self, place: str, reason: str) -> None:
        copy = self._copies[place]
        if copy.trust in _AGAINST:
            why = f"released: {reason}"
            self._copies[place] = _Copy(Trust.COMMITTED, why, digest=copy.digest, released=True)
            self._changes.append(TrustChange(place, _age(place)[0], "released", reason))

    def changes(self) -> tuple[TrustChange, ...]:
        """Return the copies that became suspect, quarantined, proven or released since the last call."""
        found, self._changes = tuple(self._changes), []
        return found

    def another_exists(self) -> bool:
        """Return whether another copy may be loaded: an older one than the loaded, or one of other bytes."""
        if not self.loaded:
            return False
        loaded = set(map(_name, self.loaded))
        tiers = set(map(tier_of, self.loaded))
        tiers |= _SAME_BYTES if tiers & _SAME_BYTES else set()
        oldest, training = min(map(_age, self.loaded)), training_of(self.loaded[0])
        return any(
            tier_of(place) not in tiers if _name(place) in loaded else _age(place)[0] < oldest[0]
            for place in self._trusted()
            if training_of(place) == training
        )

    def _of(self, *trust: Trust) -> list[str]:
        """Return the places of the copies that are trusted so far."""
        return sorted(place for place, copy in self._copies.items() if copy.trust in trust)

    def _trusted(self) -> list[str]:
        """Return the copies that nothing speaks against; those in memory come and go, and do not count."""
        return [place for place in self._of(*_FOR) if tier_of(place) != "memory"]

    def held_back(self) -> tuple[str, ...]:
        """Return the suspects that would be loaded next if they were none, the newest first."""
        newest = max(map(_age, self._trusted()), default=(-1, -1))
        found = [place for place in self._of(Trust.SUSPECT) if _age(place) >= newest]
        return tuple(sorted(found, key=_age, reverse=True))

    def has_trusted(self) -> bool:
        """Return whether there is a copy that nothing speaks against."""
        return bool(self._trusted())

    def reason(self, place: str) -> str:
        """Return why a copy that is known is trusted so far."""
        return self._copies[place].reason

    def newest_durable(self) -> int:
        """Return the step that the next launcher goes on from, -1 when there is none."""
        suspects = (place for place in self._of(Trust.SUSPECT) if tier_of(place) != "memory")
        return max((_age(place)[0] for place in self._trusted() or suspects), default=-1)

    def marks(self) -> tuple[str, ...]:
        """Return the marks that the ranks of the next generation get."""
        against = sorted(self._of(*_AGAINST), key=lambda place: (_age(place), place))[-_MARKED:]
        released = [place for place in self._of(*_FOR) if self._copies[place].released]
        proven = (place for place in self._of(Trust.PROVEN) if tier_of(place) == LOCAL)
        durable = (place for place in self._of(*_FOR, Trust.SUSPECT) if tier_of(place) in _DURABLE)
        marks = (
            *(
                Mark(place, CopyStatus(copy.trust.value), copy.digest, copy.reason)
                for place, copy in ((place, self._copies[place]) for place in against)
            ),
            *(
                of_later(one, _last_before(begin, one), CopyStatus.SUSPECT, _begun_with(begin))
                for one, begin in self._doubted.items()
            ),
            *(
                of_later(one, agreed, CopyStatus.QUARANTINED, _diverged_after(agreed))
                for one, agreed in self._diverged.items()
            ),
            *(Mark(place, CopyStatus.RELEASED) for place in released[-_MARKED:]),
            *(Mark(place, CopyStatus.PROVEN) for place in _newest_of_each(proven, 1)),
            *(Mark(place, CopyStatus.DURABLE) for place in _newest_of_each(durable, _NAMED)),
        )
        return tuple(mark.to_text() for mark in marks)

    def standing(self) -> dict[str, tuple[str, str]]:
        """Return for each copy its place, how far it is trusted in one word, and why."""
        return {place: (copy.trust.value, copy.reason) for place, copy in sorted(self._copies.items())}

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher, as JSON values."""
        doubted, diverged = tuple(self._doubted.items()), tuple(self._diverged.items())
        found: dict[str, Any] = codec.values_of(_State(_VERSION, self._copies, doubted, diverged))
        return found

    @classmethod
    def restored(cls, state: Mapping[str, Any], released: Mapping[str, str]) -> Copies:
        """Return the copies as an earlier launcher knew them; the generation that it had has ended with it.

        Args:
            state: what :meth:`state` returned.
            released: names of copies that a person has released since, each with the reason.

        Raises:
            ValueError: the state is not one of ours.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            raise ValueError(f"trust in copies is kept in version {version!r}, this one knows {_VERSION}")
        try:
            found = codec.convert(state, _State)
        except Malformed as error:
            raise ValueError(f"no trust in copies: {error}") from error
        odd = [place for place in found.copies if _places(place) != (place,)]
        if odd:
            raise ValueError(f"{odd[0]!r} is not the place of a copy")
        copies = cls()
        copies._copies = found.copies
        copies._doubted, copies._diverged = dict(found.doubted), dict(found.diverged)
        for place in sorted(copies._copies):
            if _name(place) in released:
                copies._release(place, released[_name(place)])
        return copies


def _newest_of_each(places: Iterable[str], count: int) -> list[str]:
    """Return the newest copies of each training, the older ones first."""
    found: dict[str, list[str]] = {}
    for place in sorted(places, key=_age):
        found.setdefault(training_of(place), []).append(place)
    return [place for those in found.values() for place in those[-count:]]


def _last_before(place: str, generation: int) -> int:
    """Return the last step that a generation may have saved before it loaded a copy."""
    step, saved = _age(place)
    return step if saved == generation else step - 1  # of another's the same step may be saved again


def _begun_with(place: str) -> str:
    return f"saved on the path that began with {place}, which is not to be trusted"


def _diverged_after(agreed: int) -> str:
    since = f" after step {agreed}" if agreed >= 0 else ""
    return f"saved{since} by ranks that should hold the same and did not"


def _trim(found: dict[Any, Any], keep: int) -> None:
    """Drop the oldest."""
    for old in list(found)[:-keep]:
        del found[old]


def _places(checkpoint: str) -> tuple[str, ...]:
    """Return a copy's place; none for what is no copy's name, or does not fit into a mark."""
    place = checkpoint if "/" in checkpoint else f"{LOCAL}/{checkpoint}"
    is_one = parse_copy_name(_name(place)) is not None and place.isascii() and not {"|", ","} & set(place)
    return (place,) if is_one else ()


def _name(place: str) -> str:
    return place.rpartition("/")[2]


@lru_cache(maxsize=2 * _COPIES_KEPT)
def _age(place: str) -> tuple[int, int]:
    return place_of(_name(place))
