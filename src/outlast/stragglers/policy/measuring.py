"""What a rank measured in a window of steps: the rows that it leaves for its agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from outlast.stragglers.policy.rows import Kind

SAMPLER = "outlast-sampler"  # name of the thread that samples, 15 characters at most
MOST_KEPT = 512  # durations of a section that median and p90 of a window are computed from
FIRST_PART = 32  # below this a place is the slot of a section
PARTS = ("step", "communication", "data")  # places from 32 on: what is outside of the script's sections
STEP, COMMUNICATION, DATA = range(FIRST_PART, FIRST_PART + len(PARTS))


class Doing(Enum):
    """What the thread that trains does at a look."""

    COMPUTING = "computing"
    LOADING = "loading"  # data
    COMMUNICATING = "communicating"  # busy for a collective
    WAITING = "waiting"  # for other ranks


Looks = Mapping[int, Mapping[Doing, float]]  # seconds by the place that was open; -1: none


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one place in one window; seconds.

    Args:
        place: the slot of a section; from FIRST_PART on one of PARTS.
        kind: what a rank does there.
        count: how often it was entered.
        median, p90, longest: of one entry.
        total: of all entries.
        waiting: the part of ``total`` in which the rank waited for other ranks.
    """

    place: int
    kind: Kind
    count: int
    median: float
    p90: float
    longest: float
    total: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Window:
    """What one rank measured in a window.

    Args:
        first: number of its first part; a part is as many steps as the agent asked for.
        end: number after its last part.
        rows: one for each place.
    """

    first: int
    end: int
    rows: tuple[Times, ...]


@dataclass
class Entries:
    """The entries of one section, or the steps; seconds."""

    kind: Kind = Kind.COMPUTE
    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    kept: list[float] = field(default_factory=list)

    def add(self, durations: Iterable[float]) -> None:
        """Add entries; the first MOST_KEPT count for median and p90."""
        for one in durations:
            self.count += 1
            self.total += one
            self.longest = max(self.longest, one)
            if len(self.kept) < MOST_KEPT:
                self.kept.append(one)

    def times(self, place: int, most: float, share: float, waiting: float = 0.0) -> Times:
        """Return the row.

        Args:
            place: of the entries.
            most: seconds of the window; an entry that lasted longer began before it.
            share: the part of each entry that counts.
            waiting: seconds.
        """
        ordered = sorted(self.kept) or [0.0]
        figures = (ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10], self.longest)
        median, p90, longest = (one * share for one in figures)
        total = min(self.total, most) * share
        return Times(place, self.kind, self.count, median, p90, longest, total, min(waiting, total))


def rows(
    wall: float, steps: Entries, sections: Mapping[int, Entries], looks: Looks, earlier: Looks
) -> tuple[Times, ...]:
    """Return the rows of a window.

    A section is measured, what is done in it is sampled. Loading data is taken out of sections that are of
    another kind, and busy communication out of those that compute: both go into a row of their own.

    Args:
        wall: seconds of the window, without saves.
        steps: of the window, without what was spent in sections.
        sections: of the script, by slot.
        looks: at the thread that trains.
        earlier: the latest ones of each section, for those that no look fell on in this window.
    """
    apart = dict.fromkeys(Doing, 0.0)
    found = []
    for slot, entries in sections.items():
        parts, total = _shares(looks.get(slot) or earlier.get(slot, {})), min(entries.total, wall)
        moved = {
            Kind.COMPUTE: (Doing.LOADING, Doing.COMMUNICATING),
            Kind.COMMUNICATION: (Doing.LOADING,),
        }.get(entries.kind, ())
        for doing in moved:
            apart[doing] += parts[doing] * total
        share = 1.0 - sum(parts[doing] for doing in moved)
        found.append(entries.times(slot, wall, share, parts[Doing.WAITING] * total))
    outside = dict.fromkeys(Doing, 0.0)
    for slot, looked in looks.items():
        for doing, seconds in looked.items() if slot not in sections else ():
            outside[doing] += seconds
    parts, left = _shares(outside), steps.total
    found.append(steps.times(STEP, wall, parts[Doing.COMPUTING]))
    waiting = parts[Doing.WAITING] * left
    communicating = parts[Doing.COMMUNICATING] * left + apart[Doing.COMMUNICATING] + waiting
    loading = parts[Doing.LOADING] * left + apart[Doing.LOADING]
    found.append(_even(COMMUNICATION, Kind.COMMUNICATION, steps.count, communicating, waiting))
    found.append(_even(DATA, Kind.DATA, steps.count, loading, 0.0))
    return tuple(found)


def _shares(seconds: Mapping[Doing, float]) -> dict[Doing, float]:
    """Return the part of the time of each activity; without a look all of it is computing."""
    whole = sum(seconds.values())
    if whole <= 0:
        return {one: float(one is Doing.COMPUTING) for one in Doing}
    return {one: seconds.get(one, 0.0) / whole for one in Doing}


def _even(place: int, kind: Kind, count: int, total: float, waiting: float) -> Times:
    """Return the row of what is known only as a sum."""
    each = total / max(1, count)
    return Times(place, kind, count, each, each, each, total, waiting)
