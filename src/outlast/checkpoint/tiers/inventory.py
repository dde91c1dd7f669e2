"""What is there: the copies of a tier, looked at without reading their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outlast.checkpoint.content.digest import CHUNK_BYTES, chunk_digest, combined, file_digest, parse_commit
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier, read_exactly
from outlast.core.errors import CheckpointMismatch
from outlast.core.fields import Damage, DamagedCopy
from outlast.core.manifest import COMMIT, MANIFEST, Manifest, parse_copy_name, rank_files
from outlast.core.resolve import Copy, CopyState


def read_manifest(folder: CopyFolder, name: str) -> tuple[Manifest, str]:
    """Return a copy's manifest and the manifest's digest, both vouched for by COMMIT.

    Raises:
        DamagedCopy: a byte of one of them is not as it was committed.
        CheckpointMismatch: a newer version wrote them.
        OSError: the file system refused.
    """
    digest = parse_commit(folder.read(COMMIT))
    content = folder.read(MANIFEST)
    found = file_digest(content)
    if found != digest:
        raise DamagedCopy(Damage(MANIFEST, f"digest {digest}", found))
    manifest = Manifest.from_json(content)
    if (manifest.step, manifest.generation) != parse_copy_name(name):
        written = f"step {manifest.step} of generation {manifest.generation}"
        raise DamagedCopy(Damage(MANIFEST, f"that of {name}", f"that of {written}"))
    return manifest, digest


def evidence(manifest: Manifest, digest: str) -> str:
    """Return by what ranks tell that they see the same copy: its manifest, or who staged it part by part.

    Args:
        manifest: of the copy.
        digest: the manifest's.
    """
    return f"session {manifest.session}" if manifest.session else digest


def serves(copy: Copy, rank: int, world_size: int) -> bool:
    """Say whether a copy has what a rank of such a world needs, as far as its part tells."""
    return not copy.part or (rank in copy.part and copy.world_size == world_size)


def verify(tier: DirectoryTier, name: str, ranks: Iterable[int] | None) -> Copy:
    """Look at a copy and read every byte of it; like :func:`inspect` otherwise."""
    found = inspect(tier, name, ranks)
    if found.state is not CopyState.WHOLE:
        return found
    world = found.world_size
    try:
        with tier.open(name) as folder:
            manifest, _ = read_manifest(folder, name)
            for rank in manifest.ranks if ranks is None else (rank for rank in ranks if rank < world):
                for file in rank_files(rank, world):
                    entry = manifest.file(file)
                    digest = _digest_of(folder, file, entry.nbytes)
                    if digest != entry.digest:
                        raise DamagedCopy(Damage(file, f"digest {entry.digest}", digest))
    except DamagedCopy as error:
        return replace(found, state=CopyState.DAMAGED, reason=str(error), damage=error.damage)
    except OSError as error:
        return replace(found, state=CopyState.UNREADABLE, reason=str(error))
    return found


def _digest_of(folder: CopyFolder, file: str, nbytes: int) -> str:
    scratch = memoryview(bytearray(CHUNK_BYTES))
    digests = []
    with folder.open(file, nbytes) as (descriptor, size):
        for begin in range(0, size, CHUNK_BYTES):
            chunk = scratch[: min(CHUNK_BYTES, size - begin)]
            read_exactly(descriptor, chunk, begin, file)
            digests.append(chunk_digest(chunk))
    return combined(digests)


def inspect(tier: DirectoryTier, name: str, ranks: Iterable[int] | None) -> Copy:
    """Look at a copy without reading its tensors.

    Args:
        tier: where it is.
        name: its folder.
        ranks: whose files must be there with their sizes; None: everybody's.
    """
    step, generation = parse_copy_name(name) or (-1, -1)
    try:
        with tier.open(name) as folder:
            manifest, digest = read_manifest(folder, name)
            world = manifest.world_size
            for rank in manifest.ranks if ranks is None else (rank for rank in ranks if rank < world):
                for file in rank_files(rank, world):
                    folder.require(file, manifest.file(file).nbytes)
    except DamagedCopy as error:
        return Copy(name, step, generation, CopyState.DAMAGED, str(error), error.damage)
    except CheckpointMismatch as error:
        return Copy(name, step, generation, CopyState.NEWER, str(error))
    except OSError as error:
        return Copy(name, step, generation, CopyState.UNREADABLE, str(error))
    return Copy(
        name,
        step,
        generation,
        CopyState.WHOLE,
        run_id=manifest.run_id,
        world_size=manifest.world_size,
        commit=evidence(manifest, digest),
        part=manifest.part,
    )
