"""Making a copy of what the ranks of a node staged: digests at the source, documents, manifest, commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import CHUNK_BYTES, chunk_digests, combined, commit_line, file_digest
from outlast.checkpoint.content.document import finished
from outlast.checkpoint.tiers.memory_folder import Stage, write_whole
from outlast.checkpoint.tiers.remote import content_of
from outlast.core.fields import FORMAT_VERSION
from outlast.core.manifest import COMMIT, MANIFEST, FileEntry, Manifest, rank_files

_HASHERS = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "digest")
_PART_BYTES = 32 * CHUNK_BYTES  # what is smaller is not worth handing over
Staged = Mapping[int, dict[str, Any]]


def seal_ranks(stage: Stage, folder: Path, staged: Staged) -> tuple[FileEntry, ...]:
    """Digest what the ranks staged and write their documents; the first time that these bytes are read.

    Args:
        stage: that the folder is in.
        folder: of the copy.
        staged: the ranks' records.

    Raises:
        OSError: the file system refused.
    """
    found: list[FileEntry] = []
    for rank in sorted(staged):
        world_size = staged[rank]["world_size"]
        found += _seal_rank(folder, rank_files(rank, world_size), stage.document(folder, rank, world_size))
    return tuple(found)


def _seal_rank(folder: Path, files: tuple[str, str], unfinished: bytes) -> tuple[FileEntry, FileEntry]:
    tensors, document = files
    with content_of(folder / tensors) as view:
        nbytes = len(view)
        digests = _digests(view)
    content = finished(unfinished, digests)
    (folder / document).write_bytes(content)
    return (
        FileEntry(tensors, nbytes, combined(digests)),
        FileEntry(document, len(content), file_digest(content)),
    )


def _digests(view: memoryview) -> tuple[str, ...]:
    if len(view) <= _PART_BYTES:
        return chunk_digests(view)
    parts = [view[begin : begin + _PART_BYTES] for begin in range(0, len(view), _PART_BYTES)]
    return tuple(digest for part in _HASHERS.map(chunk_digests, parts) for digest in part)


def seal(folder: Path, manifest: Manifest) -> None:
    """Write manifest and COMMIT, the latter in one piece: from here on the copy is complete.

    Raises:
        OSError: the file system refused.
    """
    content = manifest.to_json().encode()
    (folder / MANIFEST).write_bytes(content)
    write_whole(folder / COMMIT, commit_line(FORMAT_VERSION, file_digest(content)))
