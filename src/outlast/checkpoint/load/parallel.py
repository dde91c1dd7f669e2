"""The shared files of a copy are read from the storage once: ranks read parts, nodes exchange them.

Under DDP every rank needs all of the model and the optimizer; 1,000 ranks would read 1,000 times what was
saved. So each rank first reads and verifies a part, into files in the memory of its node, and the nodes fetch
what is missing from the checkpoint writers of the others. Then each rank loads from memory. What has landed
there becomes buffers of later saves.

What a node does not get from another one it reads from the disk. Where there is no room in memory, or little
in common, each rank reads for itself. (Megatron's ``fully_parallel_load`` exchanges on the devices.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from outlast.agreement.worker.reports import Agreed, Outcome
from outlast.checkpoint.content.digest import read_digests
from outlast.checkpoint.content.memory import Loan, in_threads
from outlast.checkpoint.load.reading import read_verified
from outlast.checkpoint.policy.manifest import CHUNK_BYTES, FileEntry, Manifest, is_shared
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import PeerError, PeerLost
from outlast.checkpoint.replica.handshake import Credentials
from outlast.checkpoint.save.host_memory import RESERVE, room_beside
from outlast.checkpoint.tiers.inventory import evidence, read_manifest
from outlast.checkpoint.tiers.memory_folder import LANDING, Members, Peer, Stage
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.errors import CheckpointError
from outlast.fields import DamagedCopy
from outlast.recovery.policy.events import Note

if TYPE_CHECKING:
    from outlast.checkpoint.context import SaveContext

_LEAST_BYTES = 16 << 20  # of shared files; less than that each rank reads for itself
_LEAST_CHUNKS = 4  # of a file that a rank reads, so that many ranks do not fetch crumbs from many others
_BLOCK = 512  # bytes, of st_blocks
_FETCHERS = 4  # connections of a node at once; a writer refuses more than eight


def part_of(nbytes: int, readers: range, count: int) -> tuple[int, int]:
    """Return the range of a file that some of its readers read, in whole chunks; of a small file not all do.

    Args:
        nbytes: of the file.
        readers: their numbers, in a row.
        count: how many readers there are.
    """
    chunks = -(-nbytes // CHUNK_BYTES)
    count = min(count, max(1, chunks // _LEAST_CHUNKS))
    begin, end = (chunks * min(at, count) // count * CHUNK_BYTES for at in (readers.start, readers.stop))
    return min(begin, nbytes), min(end, nbytes)


_NO_ROOM = "there is no room"


class ParallelLoad:
    """One rank's part in it; every rank calls the same methods in the same order.

    Args:
        around: this rank's ties to the world.
        stage: the tiers in memory of this node.
        members: who the ranks are, with the table of nodes where there are several.
        node: this one.
        credentials: what it proves to the others.
    """

    def __init__(
        self, around: SaveContext, stage: Stage, members: Members, node: str, credentials: Credentials
    ) -> None:
        self._around = around
        self._stage = stage
        self._ranks = members.ranks
        self._node = node
        together = members.together
        self._shared = together is None or together.shared
        self._peers: Sequence[Peer] = (Peer(node, members.ranks, "", 0),)
        if together is not None:
            self._peers = together.nodes
            self._party = members.party(credentials)
        self._landed = ""

    def land(self, name: str, commit: str, needs: Callable[[], bool]) -> Agreed | None:
        """Bring the shared files of a copy on disk into the memory of the nodes that need it.

        Args:
            name: of the copy.
            commit: what ranks know it by.
            needs: says whether this rank would read it from the disk.

        Returns:
            The round in which ranks found it damaged; None: they did not.

        Raises:
            ExchangeFailed: ranks did not answer.
        """
        around, speaks = self._around, self._around.identity.rank == self._ranks[0]
        self._landed = ""

        def prepare() -> dict[str, Any]:
            return {"why": self._prepare(name, commit) if needs() else "it is in memory"}

        agreed = around.rounds.hold("landing", lambda: prepare() if speaks else {})
        if not agreed.fine:  # the ranks find out why when they examine it
            return None
        why = {peer.name: agreed.reports[peer.ranks[0]].data["why"] for peer in self._peers}
        for node, text in why.items():
            if text.startswith(_NO_ROOM):
                reason = f"{name}: each rank of node {node} reads the shared files itself: {text}"
                around.record(Note, reason=reason)
        landing = [peer for peer in self._peers if not why[peer.name]]
        if not self._shared or sum(len(peer.ranks) for peer in landing) < 2:
            landing = [peer for peer in landing if len(peer.ranks) > 1]
        here = self._node in {peer.name for peer in landing}
        group = [peer for peer in landing if self._shared or peer.name == self._node]
        topics = ("read", "exchanged") if self._shared and len(landing) > 1 else ("read",)
        done = []
        for topic in topics if landing else ():
            bring = partial(self._bring, name, group, topic)
            agreed = around.rounds.hold(topic, bring if here else dict)
            if not agreed.fine:
                if speaks:
                    self._stage.drop_landing()
                if agreed.worst[1].outcome is Outcome.DAMAGED:
                    return agreed
                around.record(Note, reason=f"{name}: each rank reads the shared files itself: {agreed.text}")
                return None
            done += [report.data for report in agreed.reports if report.data]
        if landing:
            read, fetched = (sum(one[key] for one in done) >> 20 for key in ("read", "fetched"))
            text = f"{name}: {read} MiB of shared files came from the disk, {fetched} MiB from other nodes"
            failed = next((f"; not all that was asked for: {one['why']}" for one in done if one["why"]), "")
            around.record(Note, reason=text + failed)
        self._landed = name if here else ""
        return None

    @contextlib.contextmanager
    def over(self, folder: CopyFolder) -> Iterator[CopyFolder]:
        """Yield a copy on disk with the shared files that have landed of it; see :meth:`has_landed`."""
        with self._stage.landing.open(self._landed) as landed:
            yield _Overlay(landed, folder)

    def has_landed(self, name: str) -> bool:
        """Return whether the shared files of a copy are in the memory of this node."""
        return self._landed == name

    def _prepare(self, name: str, commit: str) -> str:
        """Make the files in memory; return why not, where nothing is to land."""
        stage = self._stage
        stage.drop_landing()
        if not stage.private:
            return "states are staged on the disk"
        with self._around.tier.open(name) as folder:
            manifest, digest = read_manifest(folder, name)
            nbytes = sum(row.nbytes for row in manifest.shared)
            if evidence(manifest, digest) != commit or nbytes < _LEAST_BYTES:
                return "it has little in common"
            place = stage.land(name, [tensors.name for tensors, _, _ in _shared(manifest)])
            there = sum(one.stat().st_blocks * _BLOCK for one in place.iterdir())
            room = room_beside(stage.root) - min(nbytes, RESERVE * len(self._ranks))
            if nbytes - there > room:
                stage.drop_landing()
                return f"{_NO_ROOM} for {nbytes >> 20} MiB in {stage.root}, {max(room, 0) >> 20} MiB are free"
            for tensors, digests, document in _shared(manifest):
                (place / digests.name).write_bytes(read_digests(folder, tensors))
                (place / document.name).write_bytes(folder.read(document.name, document.nbytes))
                os.truncate(place / tensors.name, tensors.nbytes)
        return ""

    def _bring(self, name: str, group: Sequence[Peer], topic: str) -> dict[str, Any]:
        """Bring this rank's part of each file into memory, or the parts that ranks of other nodes have read.

        Each node begins with its neighbour. What does not come from there, or not in half of the time for
        which ranks wait, is read from the disk.

        Args:
            name: of the copy.
            group: the nodes that do so together.
            topic: "read" from the disk, or "exchanged".

        Raises:
            DamagedCopy: it is not as it was committed.
            CheckpointError: the digests in memory are not those that were put there.
            OSError: a file system refused.
        """
        readers = [rank for peer in group for rank in peer.ranks]
        rank, fetchers = self._around.identity.rank, min(_FETCHERS, len(self._ranks))
        at, own = self._ranks.index(rank), [peer.name for peer in group].index(self._node)
        sources: list[tuple[Peer | None, int, int]] = [(None, readers.index(rank), 1)]
        if topic == "exchanged":
            others = (*group[own + 1 :], *group[:own]) if at < fetchers else ()
            sources = [(peer, readers.index(peer.ranks[0]), len(peer.ranks)) for peer in others]
        deadline = time.monotonic() + self._around.settings.timeout / 2
        read, fetched, failed = [0], [0], [""]
        with self._around.tier.open(name) as folder, self._stage.landing.open(name) as landed:
            files = [tensors for tensors, _, _ in _shared(read_manifest(folder, name)[0])]
            parts = [
                (peer, entry, *part_of(entry.nbytes, range(first, first + count), len(readers)))
                for peer, first, count in sources
                for entry in files
            ]
            parts = [part for part in parts if part[2] < part[3]]
            parts = parts[at::fetchers] if topic == "exchanged" else parts

            def bring(number: int) -> None:
                peer, entry, begin, end = parts[number]
                with self._opened(name, entry) as loan:
                    if peer is not None:
                        try:
                            self._fetch(name, peer, entry, loan, range(begin, end), deadline)
                        except PeerError as error:
                            failed.append(f"node {self._node} from {peer.name}: {error}")
                        else:
                            fetched.append(end - begin)
                            return
                    try:
                        digests = read_digests(landed, entry)
                    except DamagedCopy as error:
                        raise CheckpointError(f"node {self._node}: what has landed: {error}") from error
                    read_verified(folder, entry, digests, loan, self._around.threads, (begin, end))
                    read.append(end - begin)

            threads = _FETCHERS // len(self._ranks) if topic == "exchanged" else 1
            in_threads(lambda: bring, len(parts), max(1, threads))
        return {"read": sum(read), "fetched": sum(fetched), "why": failed[-1]}

    def _fetch(
        self, name: str, peer: Peer, entry: FileEntry, loan: Loan, part: range, deadline: float
    ) -> None:
        """Fetch a part of a file from the writer of another node.

        Raises:
            PeerError: it did not come.
            OSError: the file system refused.
        """
        client = PeerClient((peer.host, peer.port), self._party, expected=peer.name)
        begin = part.start
        for chunk in client.fetch(LANDING, name, entry.name, begin, part.stop):
            loan.reserve(begin, len(chunk))
            loan.memory[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
            if time.monotonic() > deadline:
                raise PeerLost(peer.name, f"fetching {entry.name}", begin, "it took too long")

    @contextlib.contextmanager
    def _opened(self, name: str, entry: FileEntry) -> Iterator[Loan]:
        """Map a file that lands."""
        descriptor = self._stage.open_buffer(self._stage.landing.folder / name / entry.name)
        try:
            memory = mmap.mmap(descriptor, entry.nbytes)
            yield Loan(memory, partial(os.posix_fallocate, descriptor))
        finally:
            os.close(descriptor)


class _Overlay(CopyFolder):
    """A copy on disk whose shared files are read from the memory of this node."""

    def __init__(self, landed: CopyFolder, folder: CopyFolder) -> None:
        self._landed = landed
        self._folder = folder

    @contextlib.contextmanager
    def open(self, file: str, nbytes: int | None = None) -> Iterator[tuple[int, int]]:
        """Open a file of the copy; see :meth:`CopyFolder.open`."""
        of = self._landed if is_shared(file) else self._folder
        with of.open(file, nbytes) as found:
            yield found

    def is_near(self, file: str) -> bool:
        """Return whether a file has landed."""
        return is_shared(file)


def _shared(manifest: Manifest) -> list[tuple[FileEntry, FileEntry, FileEntry]]:
    return [manifest.of_shared(number) for number in range(len(manifest.shared))]
