"""Which copies are kept; the rest are removed, each with a reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from outlast.core.manifest import parse_copy_name


@dataclass(frozen=True)
class Removal:
    """A copy that retention gives up."""

    name: str
    reason: str


def removals(
    names: Iterable[str], keep_last_n: int, protected: Collection[str], avoid: Collection[str] = ()
) -> tuple[Removal, ...]:
    """Return the copies to remove, oldest first.

    The ``keep_last_n`` newest stay. Copies that must not be loaded do not count among them as
    long as there are others: they lie on a path that the job has left, and a few new
    checkpoints on the path that it took must not be crowded out by them.

    Args:
        names: folders of committed copies of this run; other names are left alone.
        keep_last_n: how many stay.
        protected: copies that stay in any case: the one that this generation loaded, the newest
            one that was verified.
        avoid: copies that must not be loaded.
    """
    places = {name: place for name in names if (place := parse_copy_name(name)) is not None}
    ordered = sorted(places, key=lambda name: (name not in avoid, places[name]), reverse=True)
    kept, rest = ordered[:keep_last_n], ordered[keep_last_n:]
    if not kept:
        return ()
    return tuple(
        Removal(name, f"{len(kept)} newer ones are kept, from {min(kept, key=places.__getitem__)} on")
        if name not in avoid
        else Removal(name, f"must not be loaded, and {len(kept)} others are kept")
        for name in sorted(rest, key=places.__getitem__)
        if name not in protected
    )
