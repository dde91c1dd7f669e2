"""How many micro-batches of a step each rank takes, so that the slowest rank takes the least time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

FULL_SPEED = 1000  # thousandths; a rank at 500 takes twice as long for a micro-batch
Slow = tuple[tuple[int, int], ...]  # ranks below full speed, each with its speed in thousandths
MOST_SLOW = 4  # slow ranks that shares can follow: they fit into the words of a heartbeat page


def shares(global_batch: int, micro_batch: int, ranks: int | Sequence[float]) -> tuple[int, ...]:
    """Return the micro-batches of each rank, in the order of ranks; the global batch stays what it is.

    The largest time of a rank, its micro-batches over its speed, is as small as it can be. Every rank takes
    at least one micro-batch where there are enough of them.

    Args:
        global_batch: samples of the step.
        micro_batch: samples of a micro-batch; the last one of a step may have fewer.
        ranks: how many there are, all equally fast; or the speed of each, in any unit.

    Raises:
        ValueError: a size or a speed is not positive.
    """
    speeds = [1.0] * ranks if isinstance(ranks, int) else list(ranks)
    if not speeds or min(global_batch, micro_batch, *speeds) <= 0:
        raise ValueError(
            f"shares: found global_batch {global_batch}, micro_batch {micro_batch}, speeds {speeds};"
            " expected positive numbers, and one rank or more"
        )
    number = -(-global_batch // micro_batch)
    each = 1 if number >= len(speeds) else 0
    found = [each] * len(speeds)
    after_next = [((each + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(after_next)
    for _ in range(number - sum(found)):
        _, rank = after_next[0]
        found[rank] += 1
        heapq.heapreplace(after_next, ((found[rank] + 1) / speeds[rank], rank))
    return tuple(found)


def speeds_of(world: int, slow: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the speed of each rank in thousandths, from those of the slow ones."""
    known = dict(slow)
    return tuple(known.get(rank, FULL_SPEED) for rank in range(world))
