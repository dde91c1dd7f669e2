"""Before a load: parts of the newest copy come from other nodes, whole copies from the global tier."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from outlast import codec
from outlast.checkpoint.content.digest import ends_of
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.policy.manifest import (
    COMMIT,
    MANIFEST,
    Manifest,
    Row,
    place_of,
)
from outlast.checkpoint.policy.placement import Gathering, Holding, gatherings
from outlast.checkpoint.policy.resolve import Marks
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import PeerError, PeerRefused, Refusal
from outlast.checkpoint.replica.handshake import Credentials, Party
from outlast.checkpoint.tiers import remote
from outlast.checkpoint.tiers.inventory import evidence, held_parts, manifest_of, read_manifest
from outlast.checkpoint.tiers.memory_folder import Members, Peer, Stage
from outlast.checkpoint.tiers.object_access import ObjectStoreError
from outlast.errors import CheckpointError, CheckpointMismatch, TierUnreachable, UsageError
from outlast.fields import Damage, DamagedCopy
from outlast.ports import Tier
from outlast.recovery.policy.events import Note, Quarantined

_GREETING_SECONDS = 10.0
_TRIES = 3  # copies that are tried; behind them is what is on disk


def gather_parts(
    around: SaveContext, stage: Stage, members: Members, node: str, credentials: Credentials
) -> tuple[Gathering, ...]:
    """Bring the newest copy in memory together, if it is newer than what is on disk.

    What comes lies among the replicas of the node that it came from. A copy of another number of ranks is
    joined on each node: one folder with links to the files of all parts, of which each rank reads what it
    needs. A part that does not arrive is no error: an older copy is loaded then.

    Args:
        around: this rank's ties to the world.
        stage: the tiers in memory.
        members: who the ranks are; with the table of nodes where there are several.
        node: this one.
        credentials: what this node proves to the others.

    Returns:
        The newer copies of which a part is missing, or that must not be loaded.

    Raises:
        UsageError: nodes do not have the same token.
        CheckpointError: a node could not look.
    """
    speaks = around.identity.rank == members.ranks[0]
    table: tuple[Peer, ...] = (Peer(node, members.ranks, "", 0),)
    clients: dict[str, PeerClient] = {}
    if members.together is not None:
        table, party = members.together.nodes, members.party(credentials)
        clients = {one.name: PeerClient((one.host, one.port), party, expected=one.name) for one in table}

    def look() -> dict[str, Any]:
        stage.drop_joined()
        leader = next(peer for peer in table if 0 in peer.ranks)
        if leader.name != node:
            _greet(leader, party)
        newest = max(map(place_of, around.tier.names()), default=(-1, -1))
        left = max(members.left.values(), default=-1)
        return {"parts": codec.values_of(held_parts(stage, node)), "disk": newest, "left": left}

    def fetch(found: Gathering) -> dict[str, Any]:
        nbytes = 0
        for one in found.fetch[node]:
            try:
                nbytes += _fetch(stage, one, clients[one.node])
            except (PeerError, DamagedCopy) as error:
                raise CheckpointError(f"node {node} from {one.node}: {error}") from error
        if found.joined:
            _join(stage, found)
        return {"nbytes": nbytes}

    def fetched(found: Gathering) -> str:
        """Bring a copy together, with all ranks; return why that is not possible; empty: it is there."""
        if not found.joined and not any(found.fetch.values()):
            return ""
        agreed = around.rounds.hold("fetched", lambda: fetch(found) if speaks else {})
        reason = f"not all of it came from other nodes: {agreed.text}"
        if agreed.fine:
            nbytes = sum(report.data.get("nbytes", 0) for report in agreed.reports)
            reason = f"{nbytes} bytes were fetched from other nodes' memory"
        around.record(Note, reason=f"{found.name}: {reason}")
        return "" if agreed.fine else reason

    agreed = around.rounds.hold("parts", lambda: look() if speaks else {})
    agreed.raise_common(CheckpointError)
    said = [report.data for report in agreed.reports if report.data]
    holdings = codec.convert([one for data in said for one in data["parts"]], list[Holding])
    on_disk = max(tuple(data["disk"]) for data in said)
    nodes = {peer.name: peer.ranks for peer in table}
    left = max(data["left"] for data in said)
    copies = gatherings(holdings, nodes, members.run_id, members.avoid, left)
    whole = [one for one in copies if not one.reason]
    failed: dict[str, Gathering] = {}
    marks, than = Marks(members.avoid), on_disk
    for found in whole[:_TRIES]:
        why = "" if place_of(found.name) <= on_disk else fetched(found) and fetched(found)
        if not why:
            than = max(than, place_of(found.name))
            break
        failed[found.name] = replace(found, why=why)
    sure = [one.name for one in whole if not marks.doubted(one.name) and one.name not in failed]
    than = max([than, *map(place_of, sure)])
    torn = [failed.get(one.name, one) for one in copies]
    return tuple(one for one in torn if one.reason and place_of(one.name) > than)


def _greet(leader: Peer, party: Party) -> None:
    """See that the writer to which this node's writer will report takes it for one of the job's.

    Raises:
        UsageError: the two nodes do not have the same token.
    """
    try:
        PeerClient((leader.host, leader.port), party, _GREETING_SECONDS, expected=leader.name).greet()
    except PeerRefused as error:
        if error.refusal is Refusal.TOKEN:
            raise UsageError(
                f"nodes {party.node} and {leader.name} do not have the same token (OUTLAST_TOKEN_FILE,"
                " OUTLAST_TOKEN, or the file in the run folder); nothing was started"
            ) from error
    except PeerError:  # it is not reached now, and may be later; its silence is told by the writer
        return


def _fetch(stage: Stage, holding: Holding, client: PeerClient) -> int:
    """Fetch a part of a copy from the memory of another node; return its size."""
    name, tier = holding.copy.name, stage.replica(holding.owner)
    with tier.writing(name) as temporary:
        for file in (MANIFEST, COMMIT):
            tier.write_chunks(temporary, file, client.fetch(holding.folder, name, file))
        with tier.open(temporary) as folder:
            manifest, digest = read_manifest(folder, name)
        if (found := evidence(manifest, digest)) != holding.copy.commit:
            raise DamagedCopy(Damage(MANIFEST, holding.copy.commit, found))
        _require_room(stage, manifest.nbytes)
        for entry in manifest.needed():
            chunks = client.fetch(holding.folder, name, entry.name)
            digest = tier.write_chunks(temporary, entry.name, chunks)
            if digest != entry.digest:
                raise DamagedCopy(Damage(entry.name, f"digest {entry.digest}", digest))
        if name in tier.names():
            tier.discard(name)
    return manifest.nbytes


def _require_room(stage: Stage, nbytes: int) -> None:
    """Check that there is room for what is about to be fetched.

    Raises:
        CheckpointError: there is not.
    """
    disk = os.statvfs(stage.root)
    room = disk.f_bavail * disk.f_frsize
    if room < nbytes:
        raise CheckpointError(f"{stage.root} has room for {room >> 20} MiB, {nbytes >> 20} are needed")


def _join(stage: Stage, gathering: Gathering) -> None:
    """Make one copy of all parts of a copy that this node has in memory; its files are links to theirs.

    Raises:
        CheckpointError: they do not make a whole copy.
        DamagedCopy: one of them is not as it was committed.
        OSError: the file system refused.
    """
    name = gathering.name
    parts: dict[int, tuple[Row, dict[str, str]]] = {}
    paths: dict[str, Path] = {}
    manifest: Manifest | None = None
    for tier in (stage.tier, *stage.replica_tiers()):
        if name not in tier.names():
            continue
        found, digest = manifest_of(tier, name)
        if evidence(found, digest) != gathering.evidence:
            continue
        manifest = manifest or found
        mine = found.parts()
        if found.shared != manifest.shared or any(parts.get(rank, one) != one for rank, one in mine.items()):
            raise CheckpointError(f"{name}: files of the same name are not the same in two nodes' parts")
        parts |= mine
        paths |= {entry.name: tier.folder / name / entry.name for entry in found.needed()}
    assert manifest is not None, "the parts were looked at, or have just come"
    whole = manifest.joined(parts, manifest.shared)
    with stage.joined.writing(name) as temporary:
        for file, path in paths.items():
            os.link(path, stage.joined.folder / temporary / file)
        stage.joined.write(temporary, ends_of(whole))


class Recall:
    """Brings copies from the global tier into the durable folder; every rank calls it, the leading one works.

    Args:
        around: this rank's ties to the world.
        avoid: marks, see :mod:`outlast.checkpoint.policy.resolve`; a doubted copy is not
            brought.
    """

    def __init__(self, around: SaveContext, avoid: Collection[str]) -> None:
        self._around = around
        self._marks = Marks(avoid)
        self._tried: set[str] = set()
        self._silent = False

    def newer(self, than: tuple[int, int] | None) -> bool:
        """Bring the newest copy that was not tried and is newer than what is near; say whether one came.

        Args:
            than: step and generation of the copy that would be loaded; None: there is none, or only suspects.

        Raises:
            TierUnreachable: nothing is near, and the store does not answer: it may not be empty.
            CheckpointError: nothing is near, and the store refuses.
        """
        around = self._around
        agreed = around.rounds.hold("global", lambda: self._work(than) if around.leads else {})
        agreed.raise_common(CheckpointError)
        said = agreed.reports[0].data
        if said.get("note"):
            around.record(Note, reason=said["note"])
        return bool(said["brought"])

    def _work(self, than: tuple[int, int] | None) -> dict[str, Any]:
        around, url = self._around, self._around.settings.global_url
        if self._silent and than is not None:
            return {"brought": False}
        known = {*self._tried, *around.tier.names()}
        failed = f"the global tier {url} cannot be read"
        try:
            tier = remote.tier_of(url, around.settings.global_options)
            for name in sorted(tier.names(), key=place_of, reverse=True):
                newer = place_of(name) > (than or (-1, -1))
                if not newer or name in known or self._marks.doubted(name):
                    continue
                failed = f"{name} did not come from the global tier"
                self._tried.add(name)
                if self._fetch(tier, name):
                    return {"brought": True}
        except OSError as error:
            if than is not None:  # a copy that is near is loaded
                self._silent = True
                return {"brought": False, "note": f"{failed}: {error}"}
            passes = isinstance(error, ObjectStoreError) and error.passes
            raise (TierUnreachable if passes else CheckpointError)(
                f"{failed}: {error}; nothing was loaded, and the run does not start anew while it may have"
                " checkpoints there"
            ) from error
        return {"brought": False}

    def _fetch(self, tier: Tier, name: str) -> bool:
        around, url, began = self._around, self._around.settings.global_url, time.monotonic()
        step, _ = place_of(name)
        try:
            run_id = manifest_of(tier, name)[0].run_id
            if run_id != around.identity.run_id:
                raise CheckpointMismatch(
                    f"{url}: {name} was written by run {run_id!r}, this is"
                    f" run {around.identity.run_id!r}; nothing was changed; each run needs its own URL"
                )
            nbytes = remote.get(tier, name, around.tier)
        except DamagedCopy as error:
            reason = f"in the global tier: {error}"
            tier.quarantine(name, {"name": name, "reason": reason, "time": around.clock.wall()})
            around.record(Quarantined, step=step, checkpoint=f"global/{name}", reason=reason)
            return False
        seconds = time.monotonic() - began
        reason = f"{name} came from the global tier {url}: {nbytes} bytes in {seconds:.1f} s"
        around.record(Note, reason=reason)
        return True
