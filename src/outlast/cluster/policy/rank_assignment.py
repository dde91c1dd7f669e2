"""Which of the nodes that are there get ranks, and which ranks.

Units are seated: a node, or a group of nodes that is taken or left as a whole. A unit that had a seat keeps
it. A seat that has become free goes to a spare, one near to the seats beside it if there is a choice, then
the one that has waited for longest. A node that the node ledger has in quarantine or burn-in comes after all
others. If there is none, and the job goes on with fewer nodes, the last units move into the gaps: no fewer
can move, as ranks have no gaps. At the first time, and for what comes in later, the order is that of the node
ranks that the user gave, then that of the topology.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outlast.cluster.policy.codec import Address, Name, Rank, Ranks


@dataclass(frozen=True)
class RankAssignment:
    """A node's ranks in a generation: ``slots`` of them from ``first_rank`` on."""

    name: Name
    address: Address
    first_rank: Rank
    slots: Ranks

    @property
    def ranks(self) -> range:
        """Return its ranks."""
        return range(self.first_rank, self.first_rank + self.slots)


class Seatable(Protocol):
    """What has to be known of a node."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def address(self) -> str:
        """Return where others reach it."""

    @property
    def slots(self) -> int:
        """Return how many ranks it takes."""

    @property
    def group(self) -> str:
        """Return the group that it is taken or left with; empty: none."""

    @property
    def domains(self) -> tuple[tuple[str, str], ...]:
        """Return what it shares with others, from wide to narrow."""

    @property
    def order(self) -> int:
        """Return its place in the topology; -1: not known."""

    @property
    def node_rank(self) -> int:
        """Return the place that the user gave it; -1: none."""

    @property
    def last_choice(self) -> str:
        """Return why it gets ranks only where no other node is left; empty: it does not."""


@functools.lru_cache(maxsize=4096)
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts n2 before n10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def _key(node: Seatable) -> tuple[object, ...]:
    # What the user said goes first; then a group is kept together, and the domains from wide to narrow.
    domains = tuple(natural(name) for _, name in node.domains)
    return node.node_rank, domains, natural(node.group), node.order, natural(node.name)


def _units(nodes: Mapping[str, Seatable], sat: Collection[str], group_size: int) -> list[tuple[str, ...]]:
    """Return the complete units in the order of the topology; in each, those that had a seat come first."""
    members: dict[str, list[Seatable]] = {}
    for node in sorted(nodes.values(), key=_key):
        members.setdefault(node.group if group_size > 1 else node.name, []).append(node)
    whole = []
    for unit in members.values():
        if len(unit) >= group_size:
            first = sorted(unit, key=lambda node: node.name not in sat)[:group_size]
            whole.append(tuple(node.name for node in sorted(first, key=_key)))
    return sorted(whole, key=lambda unit: _key(nodes[unit[0]]))


def _shared(one: Seatable, others: Sequence[Seatable]) -> int:
    """Return how many domains a node has in common with others."""
    return sum(len(set(one.domains) & set(other.domains)) for other in others)


def _reluctant(unit: Sequence[str], nodes: Mapping[str, Seatable]) -> bool:
    return any(nodes[name].last_choice for name in unit)


def _stay(
    unit_of: Mapping[str, tuple[str, ...]], previous: Sequence[str], group_size: int
) -> list[tuple[str, ...] | None]:
    """Return for each seat of a unit what may keep it, every node where it was; None: it is free."""
    places: list[tuple[str, ...] | None] = []
    for at in range(0, len(previous), group_size):
        before = previous[at : at + group_size]
        unit = next((unit_of[name] for name in before if name in unit_of), None)
        if unit is not None:
            fresh = iter(name for name in unit if name not in before)
            unit = tuple(name if name in unit else next(fresh) for name in before)
        places.append(unit)
    return places


def _names(places: Iterable[tuple[str, ...] | None]) -> Iterator[str]:
    return itertools.chain.from_iterable(filter(None, places))


def _fill_a_gap(places: list[tuple[str, ...] | None]) -> None:
    """Move the last unit into the first free place, or drop the last place if that is free."""
    last = places.pop()
    if last is not None:
        places[places.index(None)] = last


def seats(
    nodes: Mapping[str, Seatable], previous: Sequence[str], most: int, group_size: int
) -> tuple[RankAssignment, ...]:
    """Return the seats of the next generation.

    Args:
        nodes: those that are there, by name, in the order in which they came.
        previous: names in the order of their ranks in the generation before; empty: there was none.
        most: nodes at most; a multiple of the group's size.
        group_size: nodes of a unit.
    """
    units = _units(nodes, set(previous), group_size)
    places = _stay({name: unit for unit in units for name in unit}, previous, group_size)
    seated = set(_names(places))
    free = [unit for unit in units if unit[0] not in seated]
    free.sort(key=lambda unit: _reluctant(unit, nodes))
    joined = {name: at for at, name in enumerate(nodes)}
    while len(places) > most // group_size and None in places:
        _fill_a_gap(places)
    places = places[: most // group_size]
    for at, place in enumerate(places):
        if place is None and free:
            around = [one for one in (*places[max(0, at - 1) : at], *places[at + 1 : at + 2]) if one]
            beside = [nodes[one[0]] for one in around]
            best = max(
                range(len(free)),
                key=lambda n: (
                    not _reluctant(free[n], nodes),
                    _shared(nodes[free[n][0]], beside),
                    -joined[free[n][0]],
                ),
            )
            places[at] = free.pop(best)
    while None in places:
        _fill_a_gap(places)
    places += free[: most // group_size - len(places)]
    found: list[RankAssignment] = []
    rank = 0
    for name in _names(places):
        node = nodes[name]
        found.append(RankAssignment(name, node.address, rank, node.slots))
        rank += node.slots
    return tuple(found)
