"""Before a load: what a node lacks of the newest copy in memory is fetched from the nodes that have it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outlast.checkpoint.surroundings import Surroundings
from outlast.checkpoint.tiers.inventory import evidence, read_manifest
from outlast.checkpoint.tiers.memory_folder import Members, Peer, Stage
from outlast.core.errors import CheckpointError, CheckpointMismatch, UsageError
from outlast.core.events import Note
from outlast.core.fields import Damage, DamagedCopy
from outlast.core.gathering import Gathering, Holding, gatherings
from outlast.core.manifest import COMMIT, MANIFEST, parse_copy_name
from outlast.transport.peer_auth import Party
from outlast.transport.peer_client import PeerClient
from outlast.transport.peer_frames import PeerError, PeerRefused, Refusal

_GREETING_SECONDS = 10.0
_TRIES = 3  # copies that are tried; behind them is what is on disk


def gather_parts(around: Surroundings, stage: Stage, members: Members, party: Party) -> None:
    """Bring the newest copy in memory together, if it is newer than what is on disk.

    What comes lies among the replicas of the node that it came from. What does not come is no error: an
    older copy is loaded then.

    Args:
        around: this rank's ties to the world.
        stage: the tiers in memory.
        members: who the ranks are; with the table of nodes.
        party: what this node proves to the others.

    Raises:
        UsageError: nodes do not have the same token.
        CheckpointError: a node could not look.
    """
    together = members.together
    assert together is not None
    speaks = around.identity.rank == members.ranks[0]

    def look() -> dict[str, Any]:
        _greet_leader(members, party)
        return _look(stage, around, together.node)

    agreed = around.rounds.hold("parts", lambda: look() if speaks else {})
    agreed.raise_common(CheckpointError)
    said = [report.data for report in agreed.reports if report.data]
    holdings = [Holding(**{**one, "ranks": tuple(one["ranks"])}) for data in said for one in data["parts"]]
    on_disk = max((tuple(data["disk"]) for data in said), default=(-1, -1))
    nodes = {peer.name: peer.ranks for peer in together.nodes}
    peers = {peer.name: peer for peer in together.nodes}
    for found in gatherings(holdings, nodes, members.run_id, members.avoid)[:_TRIES]:
        if (parse_copy_name(found.name) or (-1, -1)) <= on_disk or not any(found.fetch.values()):
            return
        part = _Fetch(stage, found, peers, party)
        agreed = around.rounds.hold("fetched", lambda part=part: part.of(together.node) if speaks else {})  # type: ignore[misc]
        nbytes = sum(report.data.get("nbytes", 0) for report in agreed.reports)
        if agreed.fine:
            around.record(Note, reason=f"{found.name}: {nbytes} bytes were fetched from other nodes' memory")
            return
        around.record(Note, reason=f"{found.name}: not all of it came from other nodes: {agreed.text}")


def _greet_leader(members: Members, party: Party) -> None:
    """See that the saver to which this node's saver will report takes it for one of the job's.

    Raises:
        UsageError: the two nodes do not have the same token.
    """
    assert members.together is not None
    leader = next(peer for peer in members.together.nodes if 0 in peer.ranks)
    if leader.name == party.node:
        return
    try:
        PeerClient((leader.host, leader.port), party, _GREETING_SECONDS, expected=leader.name).greet()
    except PeerRefused as error:
        if error.refusal is Refusal.TOKEN:
            raise UsageError(
                f"nodes {party.node} and {leader.name} do not have the same token (OUTLAST_TOKEN_FILE,"
                " OUTLAST_TOKEN, or the file in the run folder); nothing was started"
            ) from error
    except PeerError:  # it is not reached now, and may be later; its silence is told by the saver
        return


def _look(stage: Stage, around: Surroundings, node: str) -> dict[str, Any]:
    """Return the sound parts that this node has in memory, and the newest copy in its durable folder."""
    parts = []
    for tier in (stage.tier, *stage.replica_tiers()):
        for name in tier.names():
            with contextlib.suppress(DamagedCopy, CheckpointMismatch, OSError), tier.open(name) as folder:
                manifest, digest = read_manifest(folder, name)
                if manifest.part:
                    said = evidence(manifest, digest)
                    label, world, run_id = tier.name.replace("/", "-"), manifest.world_size, manifest.run_id
                    parts.append(asdict(Holding(node, label, name, said, manifest.part, world, run_id)))
    places = (parse_copy_name(name) or (-1, -1) for name in around.tier.names())
    return {"parts": parts, "disk": max(places, default=(-1, -1))}


class _Fetch:
    """What nodes fetch of one copy."""

    def __init__(self, stage: Stage, gathering: Gathering, peers: Mapping[str, Peer], party: Party) -> None:
        self._stage = stage
        self._gathering = gathering
        self._peers = peers
        self._party = party

    def of(self, node: str) -> dict[str, Any]:
        """Fetch what a node lacks.

        Raises:
            CheckpointError: it did not come, or not as it was committed.
            OSError: the file system refused.
        """
        nbytes = 0
        for holding in self._gathering.fetch[node]:
            try:
                nbytes += self._fetch(holding)
            except (PeerError, DamagedCopy) as error:
                raise CheckpointError(f"node {node} from {holding.node}: {error}") from error
        return {"nbytes": nbytes}

    def _fetch(self, holding: Holding) -> int:
        peer, name = self._peers[holding.node], holding.name
        client = PeerClient((peer.host, peer.port), self._party, expected=peer.name)
        tier = self._stage.replica(holding.owner)
        with tier.writing(name) as temporary:
            for file in (MANIFEST, COMMIT):
                _take(client, holding, tier.open_for_write(temporary, file), file)
            with tier.open(temporary) as folder:
                manifest, _ = read_manifest(folder, name)
            for entry in manifest.files:
                digest = _take(client, holding, tier.open_for_write(temporary, entry.name), entry.name)
                if digest != entry.digest:
                    raise DamagedCopy(Damage(entry.name, f"digest {entry.digest}", digest))
            if name in tier.names():
                tier.discard(name)
        return sum(entry.nbytes for entry in manifest.files)


def _take(client: PeerClient, holding: Holding, descriptor: int, file: str) -> str:
    """Fetch a file into a descriptor, which is closed, and return its digest."""
    try:

        def write(at: int, chunk: memoryview) -> None:
            while chunk:
                done = os.pwrite(descriptor, chunk, at)
                at, chunk = at + done, chunk[done:]

        return client.fetch(holding.folder, holding.name, file, write).digest
    finally:
        os.close(descriptor)
