"""Which copies of one tier are kept; the rest are removed, each with a reason.

Beside the newest ones, older ancestors may be kept at distances that double. Corruption that is noticed late
has its beginning behind every one of the newest copies, and how far behind nobody knows: with the distance
doubling, a few copies reach far back, and what is lost by going to the next older one is in proportion to
how late it was noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.checkpoint.policy.resolve import Marks, left_behind


@dataclass(frozen=True)
class Removal:
    """A copy that retention gives up."""

    name: str
    reason: str


def removals(
    began: Mapping[str, str | None],
    keep_last_n: int,
    protected: Collection[str],
    avoid: Collection[str] = (),
    keep_ancestors: int = 0,
) -> tuple[Removal, ...]:
    """Return the copies to remove, oldest first.

    The ``keep_last_n`` newest stay. Copies that must not be loaded, or that are on a path which the run has
    left, do not count among them as long as there are others: a few new checkpoints on the path that it took
    must not be crowded out by them.

    Args:
        began: by the folder of each committed copy of this run, the copy that its generation began from
            (:func:`outlast.checkpoint.policy.resolve.left_behind`); other names are left alone.
        keep_last_n: how many stay; at least one.
        protected: copies that stay in any case: the one that this generation loaded, one that is being
            copied to another tier, the newest one that was verified or proven.
        avoid: marks (:mod:`outlast.checkpoint.policy.resolve`): suspects do not count, proven copies stay.
        keep_ancestors: how many older ones stay at most, besides.
    """
    places = {name: place for name in began if (place := parse_copy_name(name)) is not None}
    marks = Marks(avoid)
    avoid = {name for name in places if marks.doubted(name)}
    trusted = {name: began[name] for name in places.keys() - avoid}
    left = left_behind(trusted) - marks.released
    avoid |= left
    protected = {*protected, *marks.proven}
    ordered = sorted(places, key=lambda name: (name not in avoid, places[name]), reverse=True)
    kept, rest = ordered[:keep_last_n], ordered[keep_last_n:]
    good = [name for name in ordered if name not in avoid]
    ancestors = _ancestors(good, places, keep_last_n, keep_ancestors)
    older = f", and {len(ancestors)} older ones" if ancestors else ""
    return tuple(
        Removal(name, f"{len(kept)} newer ones are kept, from {min(kept, key=places.__getitem__)} on{older}")
        if name not in avoid
        else Removal(
            name,
            f"{'is on a path that the run has left' if name in left else 'must not be loaded'},"
            f" and {len(kept) + len(ancestors)} others are kept",
        )
        for name in sorted(rest, key=places.__getitem__)
        if name not in protected and name not in ancestors
    )


def _ancestors(
    good: Sequence[str], places: Mapping[str, tuple[int, int]], keep_last_n: int, count: int
) -> set[str]:
    """Return for each distance the oldest copy of the window of steps before the newest copy's own window.

    Windows are powers of two wide and lie at their multiples, so the first copy of a window is the first of a
    window half as wide, too: what a distance needs tomorrow is what a shorter one keeps today. The narrowest
    is no wider than the newest copies reach. A copy is thus one to two windows back (unless none was made
    in that time, then it is the next older one), and neighbours are at most about four times apart.

    Args:
        good: copies that may be loaded, the newest first.
        places: step and generation of each.
        keep_last_n: how many of them stay without this.
        count: how many distances there are.
    """
    if not good:
        return set()
    newest = places[good[0]][0]
    reach = newest - places[good[:keep_last_n][-1]][0]
    width = 1 << max(0, reach.bit_length() - 1)
    found = set()
    for _ in range(count):
        older = [name for name in good if places[name][0] < newest // width * width]
        if not older:
            break
        window = places[older[0]][0] // width
        inside = [name for name in older if places[name][0] // width == window]
        found.add(min(inside, key=lambda name: (places[name][0], -places[name][1])))
        width *= 2
    return found - set(good[:keep_last_n])
