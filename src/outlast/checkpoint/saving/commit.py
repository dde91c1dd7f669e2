"""Writing one copy: each rank its files, one rank the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.checkpoint.content.digest import combined, commit_line, file_digest
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.core.fields import FORMAT_VERSION
from outlast.core.manifest import COMMIT, MANIFEST, FileEntry, Identity, Manifest, copy_name, rank_files

if TYPE_CHECKING:
    from outlast.checkpoint.content.format import Image


def write_rank_files(
    tier: DirectoryTier, temporary: str, image: Image, identity: Identity
) -> tuple[FileEntry, FileEntry]:
    """Write a rank's two files and return their entries; no digest is taken from the disk.

    Raises:
        OSError: the file system refused.
    """
    tensors, document = rank_files(identity.rank, identity.world_size)
    entries = (
        FileEntry(tensors, len(image.tensors), combined(image.digests)),
        FileEntry(document, len(image.document), file_digest(image.document)),
    )
    tier.write(temporary, {tensors: image.tensors, document: image.document})
    return entries


def commit_copy(tier: DirectoryTier, temporary: str, manifest: Manifest) -> str:
    """Write manifest and COMMIT, give the folder its name and return it: from here on the copy exists.

    Raises:
        OSError: the file system refused; the copy may be complete under its name all the same.
    """
    content = manifest.to_json().encode()
    tier.write(temporary, {MANIFEST: content, COMMIT: commit_line(FORMAT_VERSION, file_digest(content))})
    name = copy_name(manifest.step, manifest.generation)
    tier.commit(temporary, name)
    return name
