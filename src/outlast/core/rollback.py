"""Which checkpoint training goes back to when its numbers have gone bad, and what becomes of newer ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outlast.core.manifest import parse_copy_name


@dataclass(frozen=True)
class Plan:
    """What a rollback does to the copies that there are.

    Args:
        put_away: copies of this generation newer than what is to be loaded, which would be saved again.
        avoid: copies of other generations that are to be loaded when nothing else is left.
    """

    put_away: tuple[str, ...]
    avoid: tuple[str, ...]


def plan(names: Collection[str], generation: int, below: int, tried: Collection[str]) -> Plan | None:
    """Return how training goes back; None where there is nothing to go back to.

    Args:
        names: the copies that there are, on any tier.
        generation: the present one, whose names will be given again.
        below: the first bad step; a copy after that many completed steps was made before it.
        tried: what earlier rollbacks have loaded without the numbers getting better: something older is
            taken, if there is anything.
    """
    places = {name: place for name in names if (place := parse_copy_name(name)) is not None}
    old = [name for name, (step, _) in places.items() if step <= below]
    if not old:
        return None
    oldest_tried = min((places[name] for name in tried if name in places), default=None)
    older = [name for name in old if oldest_tried is None or places[name] < oldest_tried]
    target = max(places[name] for name in older or old)
    newer = [name for name, place in places.items() if place > target]
    return Plan(
        tuple(sorted(name for name in newer if places[name][1] == generation)),
        tuple(sorted(name for name in newer if places[name][1] != generation)),
    )
