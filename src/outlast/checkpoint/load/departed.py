"""What nodes that left have in memory: a spare's checkpoint writer goes on to serve its last session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from outlast.checkpoint.policy.manifest import is_label, parse_copy_name, place_of
from outlast.checkpoint.policy.placement import Holding, Torn
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import TIMEOUT, NotUnderstood, PeerError
from outlast.checkpoint.replica.handshake import Credentials, Party
from outlast.checkpoint.replica.server import PARTS
from outlast.checkpoint.tiers.memory_folder import Left, Members

_ASK_SECONDS = 5.0  # a host that is down does not answer at all, and the ranks wait for it
_AT_ONCE = 16  # nodes that are asked


@dataclass(frozen=True)
class Departed:
    """The nodes that left, and which node of this session asks each of them.

    A writer answers a node of the session that it serves, and no other one. What it is asked carries the
    proof of that session under the key of the run.

    Args:
        members: of this node.
        node: this one.
        credentials: what it proves to the others.
        left: by node that left, how this node reaches it; only those that this node asks.
        askers: by node that left, the node that asks it.
        generations: by node that left, the last one in which it had ranks.
        forgotten: the last generation in which a node had ranks that nobody remembers; -1: all are known.
    """

    members: Members
    node: str
    credentials: Credentials
    left: Mapping[str, Left]
    askers: Mapping[str, str]
    generations: Mapping[str, int]
    forgotten: int = -1

    @classmethod
    def of(
        cls,
        members: Members,
        node: str,
        credentials: Credentials,
        said: Mapping[str, Sequence[Mapping[str, Any]]],
        forgotten: int = -1,
    ) -> Departed:
        """Divide the nodes that left among those which know them.

        Args:
            members: of this node.
            node: this one.
            credentials: what it proves to the others.
            said: by node, name, generation and session of each node that left.
            forgotten: the last generation in which a node had ranks that one of these has forgotten.
        """
        generations: dict[str, int] = {}
        knowing: dict[str, list[str]] = {}
        for asker, gone in said.items():
            for one in gone:
                name, generation = one["name"], one["generation"]
                if generation > generations.get(name, -1):
                    generations[name], knowing[name] = generation, []
                if generation == generations[name]:
                    knowing[name].append(asker)
        askers = {name: knowing[name][at % len(knowing[name])] for at, name in enumerate(sorted(knowing))}
        left = {one.name: one for one in members.left if askers.get(one.name) == node}
        return cls(members, node, credentials, left, askers, generations, forgotten)

    def client(self, name: str, timeout: float = TIMEOUT) -> PeerClient:
        """Return what asks a node that left.

        Raises:
            BadSecurity: a file for TLS cannot be used.
        """
        left, known = self.left[name], self.credentials
        party = Party(
            self.node,
            known.key,
            self.members.run_id,
            left.generation,
            left.session,
            left.own,
            known.encryption(),
        )
        return PeerClient((left.host, left.port), party, timeout, expected=name)

    def ask(self, since: int) -> dict[str, Any]:
        """Return the parts that the nodes have which this one asks, and why some do not answer.

        Args:
            since: nodes that had no ranks in this generation or a later one are not asked.
        """
        names = [name for name in self.left if self.generations[name] >= since]
        parts: list[Holding] = []
        silent = {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for name, found in zip(names, pool.map(self._ask, names), strict=True):
                if isinstance(found, PeerError):
                    silent[name] = str(found)
                else:
                    parts += found
        return {"parts": [asdict(one) for one in parts], "silent": silent}

    def _ask(self, name: str) -> list[Holding] | PeerError:
        try:
            return _parts(self.client(name, _ASK_SECONDS).ask({"asks": PARTS}), name)
        except PeerError as error:
            return error

    def with_reasons(self, torn: Torn, silent: Mapping[str, str]) -> Torn:
        """Return a torn copy with those nodes that are not heard and may have its missing part."""
        _, generation = place_of(torn.name)
        why = [
            f"node {name} does not answer, which left and may have it: {text}"
            for name, text in sorted(silent.items())
            if self.generations[name] >= generation
        ]
        if self.forgotten >= generation:
            why.append(
                f"more nodes have left than are remembered, those of generation {self.forgotten} among them,"
                " and one of these may have it"
            )
        return torn.because(*why)


def _parts(answer: Mapping[str, Any], node: str) -> list[Holding]:
    """Read which parts a node has.

    Raises:
        NotUnderstood: the answer does not say that.
    """
    found: list[Holding] = []
    try:
        found = [Holding(**{**one, "node": node, "ranks": tuple(one["ranks"])}) for one in answer[PARTS]]
        sound = all(
            is_label(one.folder)
            and parse_copy_name(one.name) is not None
            and all(type(rank) is int for rank in (*one.ranks, one.world_size))
            for one in found
        )
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise NotUnderstood(f"node {node}", "the parts that it has", str(answer))
    return found
