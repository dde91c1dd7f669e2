"""Marks: what the ranks of a generation are told of single copies, as texts that fit into an environment.

The job's decider makes them of its trust book (:mod:`outlast.core.copies`); the ranks order what they load by
them, set aside what is marked so, and retention heeds them. A text without a bearing, a bare name, marks that
copy as a suspect in every tier.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from outlast.core.manifest import parse_copy_name

ANYWHERE = "*"
_LATER = ">"
_REASON_LENGTH = 160


class Bearing(str, Enum):
    """What a mark says; of two that cover a copy the one further down counts."""

    RELEASED = "released"  # what is said of all that its generation saved does not hold for it
    PROVEN = "proven"  # retention keeps it
    SUSPECT = "suspect"  # loaded when nothing else is left
    QUARANTINED = "quarantined"  # never loaded; the ranks set it aside


_STRICTNESS = tuple(Bearing)
_AGAINST = (Bearing.SUSPECT, Bearing.QUARANTINED)


@dataclass(frozen=True)
class Mark:
    """What is said of one copy, or of all that a generation saved.

    Args:
        place: ``tier/name``; with ``*`` for the tier, in every one; ``*/*.g7``: whatever generation 7 saved;
            ``*/>120.g7``: whatever it saved after more than 120 steps.
        bearing: what is said.
        digest: of the manifest of what was loaded from there; a copy of that name with that digest in another
            tier holds the same bytes, so the mark covers it too. Empty: not known.
        reason: why, for people.
    """

    place: str
    bearing: Bearing = Bearing.SUSPECT
    digest: str = ""
    reason: str = ""

    @property
    def is_general(self) -> bool:
        """Whether it is about all that a generation saved."""
        return self.name.startswith((f"{ANYWHERE}.g", _LATER))

    @property
    def name(self) -> str:
        """The copy's folder."""
        return self.place.rpartition("/")[2]

    def to_text(self) -> str:
        """Return it in ASCII and without commas."""
        reason = json.dumps(self.reason[:_REASON_LENGTH]).replace(",", "\\u002c").replace("|", "\\u007c")
        return f"{self.place}|{self.bearing.value}|{self.digest}|{reason}"

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Read what :meth:`to_text` wrote, or the bare name of a copy.

        Raises:
            ValueError: it is neither.
        """
        place, *rest = text.split("|")
        place = place if "/" in place else f"{ANYWHERE}/{place}"
        if not rest:
            return cls(place)
        if len(rest) != 3:
            raise ValueError(f"{text!r} is no mark; expected place|bearing|digest|reason")
        return cls(place, Bearing(rest[0]), rest[1], str(json.loads(rest[2])))

    def covers(self, tier: str, name: str, digest: str) -> bool:
        """Say whether it is about a copy; ``digest`` of its manifest, empty when that is not known."""
        if self.name.startswith(f"{ANYWHERE}.g"):
            return name.endswith(self.name[1:])
        if self.name.startswith(_LATER):
            after, _, generation = self.name.removeprefix(_LATER).partition(".g")
            found = parse_copy_name(name)
            return found is not None and found[0] > int(after) and found[1] == int(generation)
        if self.name != name:
            return False
        return self.place.rpartition("/")[0] in (ANYWHERE, tier) or (bool(digest) and digest == self.digest)


def of_generation(generation: int, reason: str) -> Mark:
    """Return the mark of whatever a generation saved, known or not: all of it lies on one path."""
    return Mark(f"{ANYWHERE}/{ANYWHERE}.g{generation}", reason=reason)


def of_later(generation: int, after: int, reason: str) -> Mark:
    """Return the mark that keeps from being loaded what a generation saved after a step, known or not."""
    return Mark(f"{ANYWHERE}/{_LATER}{after}.g{generation}", Bearing.QUARANTINED, reason=reason)


class Marks:
    """All marks that a generation was given.

    Args:
        texts: see :meth:`Mark.parse`.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._marks = tuple(map(Mark.parse, texts))

    def of(self, tier: str, name: str, digest: str = "") -> Mark | None:
        """Return what speaks against a copy, the strictest of it; None when nothing does."""
        found = [mark for mark in self._marks if mark.covers(tier, name, digest)]
        if any(mark.bearing is Bearing.RELEASED for mark in found):
            found = [mark for mark in found if not mark.is_general]
        against = [mark for mark in found if mark.bearing in _AGAINST]
        return max(against, key=strictness, default=None)

    def against(self, name: str) -> Mark | None:
        """Return what speaks against a copy of this name in some tier, the strictest of it."""
        tiers = {mark.place.rpartition("/")[0] for mark in self._marks}
        found = (self.of(tier, name) for tier in sorted(tiers))
        return max(found, key=strictness, default=None)

    def doubted(self, name: str) -> bool:
        """Say whether something speaks against a copy of this name in some tier."""
        return self.against(name) is not None

    @property
    def proven(self) -> frozenset[str]:
        """Names of proven copies that are not to be lost."""
        names = (mark.name for mark in self._marks if mark.bearing is Bearing.PROVEN)
        return frozenset(name for name in names if parse_copy_name(name) is not None)


def strictness(mark: Mark | None) -> int:
    """Return how much a mark takes away, -1 for none."""
    return -1 if mark is None else _STRICTNESS.index(mark.bearing)
