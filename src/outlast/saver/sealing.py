"""Making a copy of what the ranks of a node staged: digests at the source, documents, manifest, commit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outlast.checkpoint.digest import CHUNK_BYTES, chunk_digests, combined, commit_line, file_digest
from outlast.checkpoint.remote import content_of
from outlast.core.fields import FORMAT_VERSION
from outlast.core.manifest import COMMIT, MANIFEST, FileEntry, Manifest, rank_files

_HASHERS = min(4, os.cpu_count() or 1)
_PART_BYTES = 32 * CHUNK_BYTES
Staged = Mapping[int, dict[str, Any]]


def seal_ranks(folder: Path, staged: Staged) -> tuple[FileEntry, ...]:
    """Digest what the ranks staged and write their documents; the first time that these bytes are read.

    Args:
        folder: of the copy.
        staged: the ranks' records.

    Raises:
        OSError: the file system refused.
    """
    with ThreadPoolExecutor(_HASHERS) as pool:
        found = [_seal_rank(folder, rank, staged[rank], pool) for rank in sorted(staged)]
    return tuple(entry for entries in found for entry in entries)


def _seal_rank(
    folder: Path, rank: int, record: dict[str, Any], pool: ThreadPoolExecutor
) -> tuple[FileEntry, FileEntry]:
    tensors, document = rank_files(rank, record["world_size"])
    with content_of(folder / tensors) as view:
        nbytes = len(view)
        parts = (view[begin : begin + _PART_BYTES] for begin in range(0, nbytes, _PART_BYTES))
        digests = tuple(digest for part in pool.map(chunk_digests, parts) for digest in part)
    record["document"]["shard"]["digests"] = digests
    content = json.dumps(record["document"], separators=(",", ":"), allow_nan=False).encode()
    (folder / document).write_bytes(content)
    return (
        FileEntry(tensors, nbytes, combined(digests)),
        FileEntry(document, len(content), file_digest(content)),
    )


def seal(folder: Path, manifest: Manifest) -> None:
    """Write manifest and COMMIT: from here on the copy is complete.

    Raises:
        OSError: the file system refused.
    """
    content = manifest.to_json().encode()
    (folder / MANIFEST).write_bytes(content)
    (folder / COMMIT).write_bytes(commit_line(FORMAT_VERSION, file_digest(content)))
