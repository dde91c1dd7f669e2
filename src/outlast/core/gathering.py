"""Which parts of a copy a node fetches from others before it loads, so that each has its own ranks'."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outlast.core.manifest import parse_copy_name
from outlast.core.marks import Bearing, Marks

MEMORY = "memory"  # the name under which a saver serves what its node has staged
REPLICA = "replica-"  # and, with the owner's name behind it, what came from another node


@dataclass(frozen=True)
class Holding:
    """A part of a copy that a node has in memory, its own or another one's.

    Args:
        node: that has it.
        folder: the name under which its saver serves it.
        name: of the copy.
        evidence: equal for the parts of one copy.
        ranks: whose files it has.
        world_size: ranks that wrote the copy.
        run_id: of the run that wrote it.
    """

    node: str
    folder: str
    name: str
    evidence: str
    ranks: tuple[int, ...]
    world_size: int
    run_id: str

    @property
    def owner(self) -> str:
        """The node whose part it is."""
        return self.folder.removeprefix(REPLICA) if self.folder != MEMORY else self.node


@dataclass(frozen=True)
class Gathering:
    """A copy whose parts are all there, somewhere.

    Args:
        name: of the copy.
        fetch: by node, the parts that it lacks.
    """

    name: str
    fetch: Mapping[str, tuple[Holding, ...]]


def gatherings(
    holdings: Sequence[Holding], nodes: Mapping[str, Sequence[int]], run_id: str, avoid: Collection[str]
) -> tuple[Gathering, ...]:
    """Return the copies that can be put together, the newest first and suspects last.

    Args:
        holdings: of all nodes.
        nodes: ranks of this job by node.
        run_id: this run; what another one wrote is left alone.
        avoid: marks, see :mod:`outlast.core.marks`.
    """
    marks = Marks(avoid)
    world = sum(map(len, nodes.values()))
    copies: dict[tuple[str, str], list[Holding]] = {}
    for one in holdings:
        mark = marks.against(one.name)
        allowed = mark is None or mark.bearing is not Bearing.QUARANTINED
        if one.world_size == world and one.run_id == run_id and allowed:
            copies.setdefault((one.name, one.evidence), []).append(one)
    found = []
    ordered = sorted(
        copies.items(),
        key=lambda item: (not marks.doubted(item[0][0]), parse_copy_name(item[0][0]) or ()),
        reverse=True,
    )
    for (name, _), held in ordered:
        if {rank for one in held for rank in one.ranks} == set(range(world)):
            fetch = {node: _lacking(node, ranks, held) for node, ranks in nodes.items()}
            found.append(Gathering(name, fetch))
    return tuple(found)


def _lacking(node: str, ranks: Sequence[int], held: Sequence[Holding]) -> tuple[Holding, ...]:
    """Return what a node fetches: as few parts as a greedy choice finds."""
    missing = set(ranks) - {rank for one in held if one.node == node for rank in one.ranks}
    found = []
    while missing:
        best = max(held, key=lambda one: (len(missing & set(one.ranks)), one.node, one.folder))
        found.append(best)
        missing -= set(best.ranks)
    return tuple(found)
