"""What the devices, the digests and the copies of a finding say about each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from outlast.core.rerun_events import Loaded, Reran


def place(loaded: Loaded) -> str:
    """Return tier and name of a copy; empty for a fresh start."""
    return f"{loaded.tier}/{loaded.copy}" if loaded.copy else ""


def held(devices: tuple[str, ...], ranks: Iterable[int]) -> set[str]:
    """Return the devices of some ranks."""
    return {devices[rank] for rank in ranks if rank < len(devices)}


def suspects(devices: tuple[str, ...], ranks: tuple[int, ...]) -> set[str]:
    """Return the devices that a finding can come from: those of its ranks, or all where nobody can say."""
    return held(devices, ranks) if ranks else set(devices)


def pairs(
    ranks: Iterable[int], peers: Mapping[int, int], devices: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Return for each rank another one with another device, none of them twice; empty where one has none."""
    found = tuple((rank, peers.get(rank, -1)) for rank in ranks)
    taken = [one for pair in found for one in pair]
    sound = len(set(taken)) == len(taken) and all(0 <= one < len(devices) for one in taken)
    return found if sound and all(devices[one] != devices[other] for one, other in found) else ()


def differ(digests: tuple[str, ...], rerun: Reran, tolerance: float) -> set[int]:
    """Return the ranks whose results are not those of the run before."""
    differences = rerun.differences or (math.inf,) * len(digests)
    return {
        rank
        for rank, (one, other, apart) in enumerate(zip(digests, rerun.digests, differences, strict=False))
        if one != other and not apart <= tolerance
    }


def named(ranks: tuple[int, ...]) -> str:
    """Return ranks as they are spoken of."""
    if not ranks:
        return "some rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def rejected_on(ranks: tuple[int, ...]) -> str:
    """Say on which ranks a result was rejected, if any."""
    return f"rejected on {named(ranks)}" if ranks else "nothing was rejected"
