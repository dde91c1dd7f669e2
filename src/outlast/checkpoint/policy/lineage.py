"""Which copies are on the path that a run has taken, and which are on one that it has left.

A generation begins from a copy, or from nothing. What was saved after that copy by the generation that wrote
it was not used, and what the new generation saves takes its place: from its first copy on, the path of the
run leads through the new generation. A copy that an earlier one left somewhere, as in the memory of a node
that was away, does not come back before those of the path, whatever its step is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from outlast.checkpoint.policy.manifest import parse_copy_name


def left_behind(began: Mapping[str, str | None]) -> frozenset[str]:
    """Return the copies that are not on the path of the newest generation that nothing else began from.

    Args:
        began: by the name of each copy that can be loaded, the copy that the generation which wrote it began
            from; "": it began from nothing; None: not known, then what older generations saved is taken to be
            on its path.
    """
    places = {name: place for name in began if (place := parse_copy_name(name)) is not None}
    origins: dict[int, str | None] = {}
    for name in sorted(places, key=places.__getitem__):
        origins[places[name][1]] = began[name]
    paths = {generation: _path(generation, origins) for generation in origins}
    older = {one for generation, path in paths.items() for one in path if one != generation}
    head = max(origins.keys() - older or origins.keys(), default=None)
    if head is None:
        return frozenset()
    path = paths[head]
    oldest = list(path)[-1]
    unknown = origins.get(oldest) is None  # also where none of its copies is there any more
    limit = path[oldest]
    return frozenset(
        name
        for name, (step, generation) in places.items()
        if step > path.get(generation, limit if unknown and generation < oldest else -1)
    )


def _path(generation: int, origins: Mapping[int, str | None]) -> dict[int, float]:
    """Return by generation, the newest first, the last step of it that a generation builds on."""
    path: dict[int, float] = {generation: math.inf}
    while (place := parse_copy_name(origins.get(generation) or "")) is not None and place[1] not in path:
        step, generation = place
        path[generation] = step
    return path
