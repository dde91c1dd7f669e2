"""What is in a tier: copies looked at without reading their tensors, verified, and removed by retention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from outlast.checkpoint.content.digest import file_digest, parse_commit, read_digests
from outlast.checkpoint.content.rank_file import RankFile, parse_alike_file, parse_rank_file
from outlast.checkpoint.content.typed_forms import Forms
from outlast.checkpoint.policy.manifest import (
    COMMIT,
    MANIFEST,
    FileEntry,
    Identity,
    Manifest,
    parse_copy_name,
)
from outlast.checkpoint.policy.placement import Holding
from outlast.checkpoint.policy.resolve import Copy, CopyState, removals
from outlast.checkpoint.policy.table import Shard
from outlast.checkpoint.tiers.memory_folder import Stage
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier, digest_of
from outlast.errors import CheckpointMismatch
from outlast.fields import Damage, DamagedCopy
from outlast.ports import StoredCopy, Tier
from outlast.recovery.policy.events import Note, Pruned


def read_manifest(folder: StoredCopy, name: str) -> tuple[Manifest, str]:
    """Return a copy's manifest and the manifest's digest, both vouched for by COMMIT.

    Raises:
        DamagedCopy: a byte of one of them is not as it was committed.
        CheckpointMismatch: another version wrote them.
        OSError: the file system refused.
    """
    return parse_ends(name, folder.read(COMMIT), folder.read(MANIFEST))


def manifest_of(tier: Tier, name: str) -> tuple[Manifest, str]:
    """Return the manifest of a copy in a tier, and its digest; see :func:`read_manifest`."""
    with tier.open(name) as folder:
        return read_manifest(folder, name)


def parse_ends(name: str, commit: bytes, content: bytes) -> tuple[Manifest, str]:
    """Return a copy's manifest and its digest, given the contents of COMMIT and MANIFEST.

    Raises:
        DamagedCopy: they do not belong together, or to a copy of this name.
        CheckpointMismatch: another version wrote them.
    """
    digest, found = parse_commit(commit), file_digest(content)
    if found != digest:
        raise DamagedCopy(Damage(MANIFEST, f"digest {digest}", found))
    manifest = Manifest.from_json(content)
    if (manifest.step, manifest.generation) != parse_copy_name(name):
        written = f"step {manifest.step} of generation {manifest.generation}"
        raise DamagedCopy(Damage(MANIFEST, f"that of {name}", f"that of {written}"))
    return manifest, digest


def read_rank_file(
    folder: StoredCopy, manifest: Manifest, rank: int, known: dict[int, Shard] | None = None
) -> RankFile:
    """Return what a rank's JSON file says, after all checks that need none of the tensors' bytes.

    Args:
        folder: the copy.
        manifest: its manifest.
        rank: whose file.
        known: what files that all ranks share say, by number; those that are read are added.

    Raises:
        DamagedCopy: it is not as it was committed, or contradicts itself or the manifest.
        CheckpointMismatch: another version wrote it.
        OSError: the file system refused.
    """
    _, _, document = manifest.of_rank(rank)
    writer = Identity(manifest.run_id, manifest.generation, rank, manifest.world_size)
    content = _read_document(folder, document)
    found = parse_rank_file(content, manifest.step, writer, manifest.row(rank), manifest.contents_of(rank))
    known = {} if known is None else known
    for number in set(found.borrowed.values()) - known.keys():
        known[number] = read_alike_file(folder, manifest, number)
    return found.lending(known)


def read_alike_file(folder: StoredCopy, manifest: Manifest, number: int) -> Shard:
    """Return what a file that all ranks share says of itself; see :func:`read_rank_file`."""
    _, _, document = manifest.of_shared(number)
    anyone = Identity(manifest.run_id, manifest.generation, 0, manifest.world_size)
    content = _read_document(folder, document)
    place = (number, len(manifest.shared))
    return parse_alike_file(content, manifest.step, anyone, manifest.shared[number], place)


def _read_document(folder: StoredCopy, entry: FileEntry) -> bytes:
    content = folder.read(entry.name, entry.nbytes)
    _require_digest(entry.name, entry.digest, file_digest(content))
    return content


def _require_digest(what: str, expected: str, found: str) -> None:
    if expected != found:
        raise DamagedCopy(Damage(what, f"digest {expected}", found))


def evidence(manifest: Manifest, digest: str) -> str:
    """Return by what ranks tell that they see the same copy: its manifest, or who staged it part by part.

    Args:
        manifest: of the copy.
        digest: the manifest's.
    """
    return f"session {manifest.session}" if manifest.session else digest


def held_parts(stage: Stage, node: str) -> list[Holding]:
    """Return the sound parts of copies that a node has in memory."""
    tiers = (stage.tier, *stage.replica_tiers())
    found = (replace(inspect(tier, name, ()), tier=tier.name) for tier in tiers for name in tier.names())
    return [Holding(node, copy) for copy in found if copy.part]


def serves(copy: Copy, rank: int, world_size: int) -> bool:
    """Return whether a copy has what a rank of such a world needs, as far as its part tells."""
    return not copy.part or (rank in copy.part and copy.world_size == world_size)


def verify(
    tier: DirectoryTier,
    name: str,
    ranks: Iterable[int] | None,
    advance: Callable[[int], None] = lambda _: None,
) -> Copy:
    """Look at a copy and read every byte of it; like :func:`inspect` otherwise.

    A file that all ranks share is read with the rank of its number, so that those who divide the ranks among
    themselves read it once; of a part of a copy all files are read.

    Args:
        tier: where it is.
        name: its folder.
        ranks: whose files are read; None: everybody's.
        advance: takes the number of bytes that were read since the last call.
    """
    chosen = None if ranks is None else tuple(ranks)
    found = inspect(tier, name, chosen)

    def read(folder: CopyFolder, manifest: Manifest, _: Copy) -> None:
        Forms(MANIFEST, {}).decode(manifest.cursor)
        known: dict[int, Shard] = {}
        world = manifest.world_size
        for rank in manifest.ranks if chosen is None else [rank for rank in chosen if rank < world]:
            file = read_rank_file(folder, manifest, rank, known)
            _require_forms(manifest.of_rank(rank)[2].name, file)
            _require_content(folder, manifest.of_rank(rank), advance)
        for number in range(len(manifest.shared)):
            if chosen is None or number in chosen or manifest.part:
                read_alike_file(folder, manifest, number)
                _require_content(folder, manifest.of_shared(number), advance)

    return _looked(tier, found, read) if found.state is CopyState.WHOLE else found


def _require_forms(source: str, file: RankFile) -> None:
    """Check that a load could decode what a rank says, without torch."""
    forms = Forms(source, dict.fromkeys(file.tensors, True))
    for value in file.values.values():
        forms.decode(value)
    for entry in file.tensors.values():
        if entry.dtype.startswith(("qint", "quint")):
            raise DamagedCopy(Damage(source, "a type of plain tensors", entry.dtype))
    random = forms.decode(file.random)
    if type(random) is not dict or not {"python", "torch"} <= random.keys():
        raise DamagedCopy(Damage(source, "states of random generators", repr(random)[:200]))


def _require_content(
    folder: CopyFolder, files: tuple[FileEntry, FileEntry, FileEntry], advance: Callable[[int], None]
) -> None:
    """Check that every byte of a safetensors file, and the digests beside it, are as they were committed."""
    read_digests(folder, files[0])
    require_bytes(folder, files[0])
    advance(sum(one.nbytes for one in files))


def require_bytes(folder: CopyFolder, entry: FileEntry) -> None:
    """Check that a folder has a file with every byte of an entry.

    Raises:
        DamagedCopy: it is missing, or another one.
        OSError: the file system refused.
    """
    with folder.open(entry.name, entry.nbytes) as (descriptor, size):
        _require_digest(entry.name, entry.digest, digest_of(descriptor, size, entry.name))


def holds(folder: CopyFolder, entry: FileEntry) -> bool:
    """Return whether a folder has a file with every byte of an entry.

    Raises:
        OSError: the file system refused.
    """
    try:
        require_bytes(folder, entry)
    except DamagedCopy:
        return False
    return True


def inspect(tier: Tier, name: str, ranks: Iterable[int] | None) -> Copy:
    """Look at a copy without reading its tensors.

    Args:
        tier: where it is.
        name: its folder.
        ranks: whose files must be there with their sizes; None: everybody's.
    """
    return _looked(
        tier, Copy(name, CopyState.UNREADABLE), lambda folder, manifest, _: _require(folder, manifest, ranks)
    )


def inspect_for(tier: Tier, name: str, rank: int, world_size: int) -> Copy:
    """Look at a rank's share of a copy: at its own files, or at some of another world's copy.

    Nothing but the manifest is looked at where the copy does not serve the rank; see :func:`serves`.
    """

    def check(folder: StoredCopy, manifest: Manifest, copy: Copy) -> None:
        served = serves(copy, rank, world_size)
        _require(folder, manifest, range(rank, copy.world_size, world_size) if served else ())

    return _looked(tier, Copy(name, CopyState.UNREADABLE), check)


def _require(folder: StoredCopy, manifest: Manifest, ranks: Iterable[int] | None) -> None:
    """Check that the files of ranks are there with their sizes."""
    for entry in manifest.needed(ranks):
        folder.require(entry.name, entry.nbytes)


def _looked(tier: Tier, known: Copy, check: Callable[[Any, Manifest, Copy], None]) -> Copy:
    """Return what a copy's manifest and a further check show; after a failure what was known before."""
    try:
        with tier.open(known.name) as folder:
            manifest, digest = read_manifest(folder, known.name)
            found = replace(
                known,
                state=CopyState.WHOLE,
                run_id=manifest.run_id,
                world_size=manifest.world_size,
                commit=evidence(manifest, digest),
                part=manifest.part,
                began=manifest.began,
            )
            check(folder, manifest, found)
            return found
    except DamagedCopy as error:
        return replace(known, state=CopyState.DAMAGED, reason=str(error), damage=error.damage)
    except CheckpointMismatch as error:
        return replace(known, state=CopyState.INCOMPATIBLE, reason=str(error))
    except OSError as error:
        return replace(known, state=CopyState.UNREADABLE, reason=str(error))


class Pruner:
    """Removes copies from one tier.

    Args:
        tier: where.
        run_id: other runs' copies are neither counted nor removed.
        keep_last_n: how many stay.
        record: takes a record's kind and fields.
    """

    def __init__(self, tier: Tier, run_id: str, keep_last_n: int, record: Callable[..., None]) -> None:
        self._tier = tier
        self._run_id = run_id
        self._keep_last_n = keep_last_n
        self._record = record
        self._ours: dict[str, str | None] = {}
        self._newest = ""

    def committed(self, name: str) -> None:
        """Keep the copy that this process has written last, whatever else is there."""
        self._newest = name

    def prune(self, protected: Collection[str], avoid: Collection[str]) -> None:
        """Remove what retention does not keep; see :func:`outlast.checkpoint.policy.resolve.removals`."""
        try:
            names = [name for name in self._tier.names() if self._is_ours(name)]
        except OSError as error:
            self._record(Note, reason=f"retention: {error}; nothing was removed")
            return
        began = {name: self._ours[name] for name in names}
        for removal in removals(began, self._keep_last_n, {*protected, self._newest}, avoid):
            try:
                self._tier.discard(removal.name)
            except OSError as error:
                self._record(Note, reason=f"retention: {removal.name} could not be removed: {error}")
            else:
                self._ours.pop(removal.name, None)
                self._record(Pruned, checkpoint=removal.name, reason=removal.reason)

    def _is_ours(self, name: str) -> bool:
        """Whether a copy is a sound one of this run; others are not for retention to count or to remove."""
        if name not in self._ours:
            found = inspect(self._tier, name, ())
            if found.state is not CopyState.WHOLE or found.run_id != self._run_id:
                return False
            self._ours[name] = found.began
        return True
