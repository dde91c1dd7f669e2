"""What a job knows of its copies: the trust book, fed with what is seen, and the marks that follow from it.

A copy that is reported without a tier is durable and on this job's own disk: ``local``. Copies in memory are
heard of when they are loaded, or not at all; what a doubted generation has left there is marked as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.checkpoint.policy.manifest import parse_copy_name, place_of, tier_of, training_of
from outlast.checkpoint.policy.resolve import CopyStatus, Mark, of_generation, of_later
from outlast.checkpoint.policy.trust import (
    CleanStep,
    Committed,
    Damaged,
    Event,
    Faulted,
    Loaded,
    Released,
    Removed,
    Trust,
    TrustBook,
)

LOCAL = "local"
_SAME_BYTES = {"memory", LOCAL}  # the writer writes one from the other
_DURABLE = (LOCAL, "global")  # tiers whose copies outlive every process and node of the job
_MARKED = 32  # copies that the ranks are told of, the newest
_NAMED = 3  # copies on disk that they are told of, the newest
_VERSION = 1  # of what is kept between launchers


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


class Copies:
    """The copies of one job, all tiers."""

    def __init__(self) -> None:
        self._book = TrustBook()
        self._digests: dict[str, str] = {}
        self._loaded: tuple[str, ...] = ()
        self._words: dict[str, str] = {}
        self._changes: list[TrustChange] = []

    @property
    def loaded(self) -> tuple[str, ...]:
        """What the present generation has loaded."""
        return self._loaded

    def begin(self, generation: int) -> None:
        """A generation starts; until it has loaded something its state is a fresh one."""
        self._loaded = ()
        self._tell(Loaded(0, (), generation))

    def commit(self, checkpoint: str) -> None:
        """A copy exists."""
        for place in _places(checkpoint):
            self._tell(Committed(place))

    def load(self, step: int, places: Iterable[str], digest: str, generation: int) -> None:
        """The ranks have loaded a copy; ``digest`` of its manifest, empty when that is not known."""
        loaded = {place for one in places for place in _places(one)}
        loaded |= {place for place in self._digests if digest and self._is_same(place, loaded, digest)}
        self._loaded = tuple(sorted(loaded))
        for place in self._loaded:
            self._tell(Committed(place))
            if digest:
                self._digests[place] = digest
        self._tell(Loaded(step, self._loaded, generation))

    def _is_same(self, place: str, loaded: Iterable[str], digest: str) -> bool:
        """Say whether a copy of another tier holds the bytes that were loaded."""
        names = {one.rpartition("/")[2] for one in loaded}
        return self._digests[place] == digest and place.rpartition("/")[2] in names

    def clean(self, step: int) -> None:
        """Every rank has completed a step."""
        self._tell(CleanStep(step))

    def idle_at(self, step: int) -> int:
        """Return the completed steps of what was loaded, if none was done since; -1: one was, or no load."""
        return self._book.idle_at(step)

    def remove(self, checkpoint: str) -> None:
        """A copy is gone."""
        for place in _places(checkpoint):
            self._tell(Removed(place))
            self._digests.pop(place, None)
            self._words.pop(place, None)

    def set_aside(self, checkpoint: str, reason: str) -> None:
        """The ranks or the writer have put a copy into quarantine.

        One that was damaged is gone from its tier, and that is all: the same state, written there anew or in
        another tier, may be sound. One that was set aside because the book said so stays quarantined.
        """
        for place in _places(checkpoint):
            if self._book.trust(place) is not Trust.QUARANTINED:
                self._tell(Damaged(place, reason))
                self.remove(place)

    def fault(self, fault: Faulted) -> None:
        """A fault has ended the present generation."""
        self._tell(fault)
        self._loaded = ()

    def clear_suspicion(self, fault: Faulted, reason: str) -> None:
        """A fault has ended the present generation as it did others, whatever they had loaded."""
        for place in self._book.accused(fault):
            self._tell(Released(place, reason, with_path=True))
        self._loaded = ()

    def _tell(self, event: Event) -> None:
        for change in self._book.handle(event):
            word = _word(change.trust, change.suspect)
            before = self._words.get(change.place, "")
            if word:
                self._words[change.place] = word
            else:
                self._words.pop(change.place, None)
            if word != before and (word or isinstance(event, Released)):
                step = place_of(change.place.rpartition("/")[2])[0]
                self._changes.append(
                    TrustChange(
                        change.place, step, word or "released", change.reason.removeprefix("released: ")
                    )
                )

    def changes(self) -> tuple[TrustChange, ...]:
        """Return what has changed since the last call."""
        found, self._changes = tuple(self._changes), []
        return found

    def another_exists(self) -> bool:
        """Say whether something else than what was loaded may be loaded instead: older, or of other bytes."""
        if not self._loaded:
            return False
        loaded = {place.rpartition("/")[2] for place in self._loaded}
        tiers = set(map(tier_of, self._loaded))
        tiers |= _SAME_BYTES if tiers & _SAME_BYTES else set()
        oldest = min(map(place_of, loaded))
        training = training_of(self._loaded[0])
        for place in self._trusted():
            tier, name = tier_of(place), place.rpartition("/")[2]
            if training_of(place) != training:
                continue
            if name in loaded and tier not in tiers:
                return True
            if name not in loaded and place_of(name)[0] < oldest[0]:
                return True
        return False

    def _trusted(self) -> list[str]:
        """Return the copies that nothing speaks against; those in memory come and go, and do not count."""
        doubtful = set(self._book.suspects())
        return [
            place
            for place in self._book.places()
            if place not in doubtful
            and self._book.trust(place) is not Trust.QUARANTINED
            and tier_of(place) != "memory"
        ]

    def held_back(self) -> tuple[str, ...]:
        """Return the suspects that would be loaded next if they were none, the newest first."""
        newest = max(map(_age, self._trusted()), default=())
        found = [place for place in self._book.suspects() if _age(place) >= newest]
        return tuple(sorted(found, key=_age, reverse=True))

    def has_trusted(self) -> bool:
        """Say whether there is a copy that nothing speaks against."""
        return bool(self._trusted())

    def reason(self, place: str) -> str:
        """Return why a copy is in its state."""
        return self._book.reason(place)

    def newest_durable(self) -> int:
        """Return the step that the next launcher goes on from, -1 when there is none."""
        durable = (place for place in self._book.order(self._book.places()) if tier_of(place) != "memory")
        return max((_age(place)[0] for place in self._trusted() or durable), default=-1)

    def marks(self) -> tuple[str, ...]:
        """Return the marks that the ranks of the next generation get."""
        book = self._book
        aside = [place for place in book.places() if book.trust(place) is Trust.QUARANTINED]
        against = [(place, CopyStatus.QUARANTINED) for place in aside]
        against += [(place, CopyStatus.SUSPECT) for place in book.suspects()]
        against = sorted(against, key=lambda one: (_age(one[0]), one[0]))[-_MARKED:]
        marks = [
            Mark(place, bearing, self._digests.get(place, ""), book.reason(place))
            for place, bearing in against
        ]
        marks += [of_generation(generation, reason) for generation, reason in book.doubted()]
        marks += [of_later(*diverged) for diverged in book.diverged()]
        marks += [Mark(place, CopyStatus.RELEASED) for place in book.released()[-_MARKED:]]
        durable = _newest_of_each((one for one in book.proven() if tier_of(one) == LOCAL), 1)
        marks += [Mark(place, CopyStatus.PROVEN) for place in durable]
        there = (place for place in book.order(book.places()) if tier_of(place) in _DURABLE)
        marks += [Mark(place, CopyStatus.DURABLE) for place in _newest_of_each(there, _NAMED)]
        return tuple(mark.to_text() for mark in marks)

    def standing(self) -> dict[str, tuple[str, str]]:
        """Return for each copy its place, how far it is to be believed in one word, and why."""
        book, doubtful = self._book, set(self._book.suspects())
        found: dict[str, tuple[str, str]] = {}
        for place in book.places():
            trust = book.trust(place)
            assert trust is not None, "it is in the book"
            word = _word(trust, place in doubtful) or trust.value
            found[place] = (word, book.reason(place))
        return found

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher, as JSON values."""
        return {"version": _VERSION, **self._book.state(), "digests": dict(self._digests)}

    def restore(self, state: Mapping[str, Any], released: Mapping[str, str]) -> None:
        """Go on after an earlier launcher.

        Args:
            state: what :meth:`state` returned.
            released: names of copies that a person has released since, each with the reason.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours; nothing was taken over.
        """
        version = state["version"]
        if version != _VERSION:
            raise ValueError(f"trust in copies is kept in version {version!r}, this one knows {_VERSION}")
        book, digests = TrustBook(), {str(place): str(one) for place, one in dict(state["digests"]).items()}
        book.restore(state)
        odd = [place for place in book.places() if not _places(place) or "|" in place or "," in place]
        odd += [digest for digest in digests.values() if not digest.isalnum()]
        if odd:
            raise ValueError(f"{odd[0]!r} is neither the place of a copy nor a digest")
        self._take_over(book, digests)
        for name, reason in released.items():
            for place in book.places():
                if place.rpartition("/")[2] == name:
                    self._tell(Released(place, reason))

    def _take_over(self, book: TrustBook, digests: dict[str, str]) -> None:
        self._book, self._digests, self._loaded, self._changes = book, digests, (), []
        self._words = {place: word for place, (word, _) in self.standing().items()}


def _word(trust: Trust, suspect: bool) -> str:
    if suspect:
        return "suspect"
    return trust.value if trust in (Trust.QUARANTINED, Trust.PROVEN) else ""


def _newest_of_each(places: Iterable[str], count: int) -> list[str]:
    """Return the newest copies of each training, the older ones first."""
    found: dict[str, list[str]] = {}
    for place in sorted(places, key=_age):
        found.setdefault(training_of(place), []).append(place)
    return [place for those in found.values() for place in those[-count:]]


def _places(checkpoint: str) -> tuple[str, ...]:
    """Return a copy's place; none for what is no copy's name."""
    place = checkpoint if "/" in checkpoint else f"{LOCAL}/{checkpoint}"
    return (place,) if parse_copy_name(place.rpartition("/")[2]) is not None else ()


def _age(place: str) -> tuple[int, int]:
    return place_of(place.rpartition("/")[2])
