"""Which nodes hold the replicas of a node's part, and which parts a node fetches before it loads.

Replicas are placed in one of two ways. By arithmetic on ranks, with NVRx's and Megatron's parameters. Or by
the failure domains that nodes declare (a rack, a power feed, a pipeline group): then every part survives the
loss of any one of these, or the placement says which loss a part does not survive, and why.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.checkpoint.policy.manifest import place_of, some
from outlast.checkpoint.policy.resolve import Copy, CopyStatus, Marks
from outlast.errors import UsageError


def replication_groups(
    world_size: int, replication_jump: int, replication_factor: int
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that hold each other's shards: n, n + jump, ..., n + (factor - 1) jump.

    Names and meaning are those of NVRx and of Megatron's ``--replication-jump`` and ``--replication-factor``.

    Args:
        world_size: number of ranks.
        replication_jump: distance between two ranks of a group, as a rule the ranks of a node.
        replication_factor: ranks of a group, so copies of a shard; its owner's is one of them.

    Raises:
        UsageError: the ranks do not divide into such groups.
    """
    for name, value in (("replication_jump", replication_jump), ("replication_factor", replication_factor)):
        if value < 1:
            raise UsageError(f"{name}: {value} is not a positive number of ranks")
    span = replication_jump * replication_factor
    if world_size < 1 or world_size % span:
        raise UsageError(
            f"replication_jump {replication_jump} times replication_factor {replication_factor} is {span},"
            f" which does not divide {world_size} ranks; choose numbers that do, or leave both out and"
            " declare failure domains"
        )
    return tuple(
        tuple(range(begin + n, begin + span, replication_jump))
        for begin in range(0, world_size, span)
        for n in range(replication_jump)
    )


@dataclass(frozen=True)
class Node:
    """A node and what it shares with others.

    Args:
        name: of the node.
        domains: kind and name of each thing that fails as a whole: ``{"rack": "r7", "pipeline": "p2"}``.
    """

    name: str
    domains: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gap:
    """A loss that some shards would not survive.

    Args:
        kind: of the domain; "node" for a node alone.
        name: of the domain.
        nodes: whose shards would be lost.
        reason: why no placement avoids that.
    """

    kind: str
    name: str
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Placement:
    """Who holds what.

    Args:
        holders: by node, the peers that hold copies of its shards; itself is not among them.
        gaps: losses that are not survived; empty as it should be.
    """

    holders: Mapping[str, tuple[str, ...]]
    gaps: tuple[Gap, ...]

    def held_by(self, node: str) -> tuple[str, ...]:
        """Return the nodes whose shards a node holds, besides its own."""
        return tuple(owner for owner, peers in self.holders.items() if node in peers)


def place(nodes: Sequence[Node], copies: int = 1) -> Placement:
    """Choose for each node the peers that hold copies of its shards.

    Each node holds as many copies as are made of its own shards, and more only where the domains leave no
    other choice: losing shards would be worse.

    Args:
        nodes: all of the job, in the order of their ranks.
        copies: peers for each node, besides itself; fewer where there are not so many others.

    Raises:
        UsageError: a node is named twice, or the number of copies is not positive.
    """
    names = [node.name for node in nodes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(f"nodes: {some(twice)} named twice; each node of a job has a name of its own")
    if copies < 1:
        raise UsageError(f"copies: {copies} is not a positive number of peers")
    slots = [slot for node in nodes for slot in _slots(node, nodes, copies)]
    peers = _matched(names, slots, copies)
    holders = {
        name: tuple(peers[at] for at, slot in enumerate(slots) if slot.owner == name) for name in names
    }
    return Placement(holders, tuple(_gaps(nodes, holders)))


@dataclass(frozen=True)
class _Slot:
    """One copy of a node's shards, and who may hold it."""

    owner: str
    peers: frozenset[str]


def _slots(node: Node, nodes: Sequence[Node], copies: int) -> list[_Slot]:
    """Return what to look for: peers that between them leave as many of the node's domains as is possible.

    The nodes that leave the same domains are alike, and there are few such sorts, so all combinations of
    sorts are compared: those that leave most, then those that need fewer peers for it, then those of which
    there are more.
    """
    leaves = {
        other.name: frozenset(kind for kind, name in node.domains.items() if other.domains.get(kind) != name)
        for other in nodes
        if other.name != node.name
    }
    sorts = sorted(set(leaves.values()), key=sorted)
    count = min(copies, len(leaves))
    combinations = itertools.chain.from_iterable(
        itertools.combinations(sorts, size) for size in range(min(count, len(sorts)) + 1)
    )

    def rank(chosen: tuple[frozenset[str], ...]) -> tuple[int, int, int]:
        fit = [sum(sort <= left for left in leaves.values()) for sort in chosen]
        return -len(frozenset().union(*chosen)), len(chosen), -min(fit, default=0)

    best = min(combinations, key=rank)
    wanted = [*best, *[frozenset[str]()] * (count - len(best))]
    return [
        _Slot(node.name, frozenset(name for name, left in leaves.items() if sort <= left)) for sort in wanted
    ]


def _matched(names: Sequence[str], slots: Sequence[_Slot], load: int) -> dict[int, str]:
    """Return a peer for each slot, so that no node holds more than it must.

    Others move only if need be, and the load is raised only if that fails. No path to a peer with room means
    that no matching of this load exists (C. Berge, 1957), so the load that is reached in the end is the least
    possible.

    Args:
        names: of all nodes.
        slots: to be filled.
        load: copies that a node may hold, to begin with.
    """
    index = {name: i for i, name in enumerate(names)}
    found: dict[int, str] = {}
    held: dict[str, list[int]] = {name: [] for name in names}

    def candidates(slot: _Slot) -> list[str]:
        """Return who may hold it: the least loaded first, then the next in the order of nodes."""
        here = index[slot.owner]
        return sorted(slot.peers, key=lambda peer: (len(held[peer]), (index[peer] - here) % len(index)))

    def augment(start: int) -> bool:
        takes_over: dict[int, int] = {start: start}  # by slot, the one that may get its peer
        queue = deque([start])
        while queue:
            slot = queue.popleft()
            for peer in candidates(slots[slot]):
                own = [one for one in held[peer] if slots[one].owner == slots[slot].owner]
                if not own and len(held[peer]) < load:
                    shift(slot, peer, takes_over)
                    return True
                for one in own or held[peer]:
                    if one not in takes_over:
                        takes_over[one] = slot
                        queue.append(one)
        return False

    def shift(slot: int, peer: str, takes_over: Mapping[int, int]) -> None:
        """Give a slot a peer, the slot that takes over the peer that this one had, and so on."""
        while peer:
            left = found.get(slot, "")
            if left:
                held[left].remove(slot)
            found[slot] = peer
            held[peer].append(slot)
            slot, peer = takes_over[slot], left

    for slot in range(len(slots)):
        while not augment(slot):
            load += 1
    return found


def _gaps(nodes: Sequence[Node], holders: Mapping[str, tuple[str, ...]]) -> Iterable[Gap]:
    members: dict[tuple[str, str], set[str]] = {}
    for node in nodes:
        for domain in node.domains.items():
            members.setdefault(domain, set()).add(node.name)
    if len(nodes) == 1:
        members["node", nodes[0].name] = {nodes[0].name}
    for (kind, name), inside in sorted(members.items()):
        lost = tuple(
            node.name for node in nodes if node.name in inside and inside.issuperset(holders[node.name])
        )
        if not lost:
            continue
        if len(inside) == len(nodes):
            reason = f"all nodes of the job ({len(nodes)}) are in it"
        else:
            kinds = next(node.domains for node in nodes if node.name == lost[0])
            left = ", ".join(f"{one} {its}" for one, its in sorted(kinds.items()))
            reason = (
                f"for {lost[0]} no {len(holders[lost[0]])} peer(s) are outside of everything that it is in"
                f" ({left}); more copies would do, or fewer domains in common"
            )
        yield Gap(kind, name, lost, reason)


MEMORY = "memory"  # the name under which a writer serves what its node has staged
REPLICA = "replica-"  # and, with the owner's name behind it, what came from another node


@dataclass(frozen=True)
class Holding:
    """A part of a copy that a node has in memory, its own or another one's."""

    node: str
    copy: Copy

    @property
    def folder(self) -> str:
        """The name under which the writer of the node serves it."""
        return self.copy.tier.replace("/", "-")

    @property
    def owner(self) -> str:
        """The node whose part it is."""
        return self.folder.removeprefix(REPLICA) if self.folder != MEMORY else self.node


@dataclass(frozen=True)
class Gathering:
    """A copy in the memory of nodes: it can be put together, or there is a reason why not.

    Args:
        name: of the copy.
        evidence: equal for the parts of the copy.
        fetch: by node, the parts that it lacks; empty where the copy cannot be loaded.
        joined: another number of ranks wrote it, so each node gets all parts and joins them.
        missing: ranks that saved what none of these nodes has.
        why: why it must not be loaded, or where the missing part may be; empty: neither is known.
    """

    name: str
    evidence: str
    fetch: Mapping[str, tuple[Holding, ...]] = field(default_factory=dict)
    joined: bool = False
    missing: tuple[int, ...] = ()
    why: str = ""

    @property
    def reason(self) -> str:
        """Why it cannot be loaded; empty: it can."""
        lost = f"the part of rank(s) {some(self.missing)} is in the memory of none of these nodes"
        return "; ".join(filter(None, (lost if self.missing else "", self.why)))


def gatherings(
    holdings: Iterable[Holding],
    nodes: Mapping[str, Sequence[int]],
    run_id: str,
    avoid: Collection[str],
    left: int = -1,
) -> tuple[Gathering, ...]:
    """Return the copies whose parts nodes have, the newest first and suspects last.

    Args:
        holdings: of all nodes.
        nodes: ranks of this job by node.
        run_id: this run; what another one wrote is left alone.
        avoid: marks, see :mod:`outlast.checkpoint.policy.resolve`.
        left: the last generation in which a node had ranks that has none now; -1: there was none.
    """
    marks = Marks(avoid)
    world = sum(map(len, nodes.values()))
    copies: dict[tuple[str, str], list[Holding]] = {}
    for one in holdings:
        if one.copy.run_id == run_id:
            copies.setdefault((one.copy.name, one.copy.commit), []).append(one)
    found = []
    for (name, evidence), held in copies.items():
        saved = range(held[0].copy.world_size)
        missing = set(saved).difference(*(one.copy.part for one in held))
        mark = marks.against(name)
        if mark is not None and mark.bearing is CopyStatus.QUARANTINED:
            why = f"it is in quarantine: {mark.reason}; `outlast ckpt release` lets it be loaded again"
            found.append(Gathering(name, evidence, why=why))
        elif missing:
            why = "a node that has left the job since it was saved may have it"
            since = place_of(name)[1] <= left
            found.append(Gathering(name, evidence, missing=tuple(sorted(missing)), why=why if since else ""))
        else:
            other = len(saved) != world  # which parts a rank needs is known once all are described
            fetch = {node: _lacking(node, saved if other else ranks, held) for node, ranks in nodes.items()}
            found.append(Gathering(name, evidence, fetch, other))
    newest = sorted(found, key=lambda one: place_of(one.name), reverse=True)
    return tuple(sorted(newest, key=lambda one: marks.doubted(one.name)))


def _lacking(node: str, ranks: Sequence[int], held: Sequence[Holding]) -> tuple[Holding, ...]:
    """Return what a node fetches: as few parts as a greedy choice finds."""
    missing = set(ranks).difference(*(one.copy.part for one in held if one.node == node))
    found = []
    while missing:
        best = max(held, key=lambda one: (len(missing & set(one.copy.part)), one.node, one.folder))
        found.append(best)
        missing -= set(best.copy.part)
    return tuple(found)
