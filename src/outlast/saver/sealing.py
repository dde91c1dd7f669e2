"""Making a copy of what the ranks of a node staged: digests at the source, documents, manifest, commit."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import CHUNK_BYTES, chunk_digests, combined, commit_line, file_digest
from outlast.checkpoint.content.document import finished
from outlast.checkpoint.tiers.memory_folder import Claims, Stage, write_whole
from outlast.checkpoint.tiers.remote import content_of
from outlast.core.alike import ALL, chunks_of, differing, in_chunks
from outlast.core.fields import FORMAT_VERSION
from outlast.core.manifest import (
    COMMIT,
    MANIFEST,
    FileEntry,
    Manifest,
    Shard,
    alike_files,
    rank_files,
    some,
)

_HASHERS = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "digest")
_PART_BYTES = 32 * CHUNK_BYTES  # what is smaller is not worth handing over
Staged = Mapping[int, dict[str, Any]]


class Unlike(Exception):
    """Ranks do not hold alike what is written once for all of them.

    Args:
        text: which do not, and what.
        keys: of the tensors that each rank must write itself from now on.
    """

    def __init__(self, text: str, keys: Collection[str]) -> None:
        super().__init__(text)
        self.keys = tuple(sorted(keys))


@dataclass(frozen=True)
class _Sealed:
    """A pair of files, complete."""

    entries: tuple[FileEntry, FileEntry]
    digests: tuple[str, ...]
    document: bytes


def shared_files(stage: Stage, folder: Path, staged: Staged) -> int:
    """Return from how many files ranks borrow tensors in what they staged.

    Raises:
        Unlike: one of these files was not written.
        OSError: the file system refused.
    """
    said = {rank: stage.said(folder, rank, one["world_size"])[0] for rank, one in staged.items()}
    count = max(claims.files for claims in said.values())
    lacking = set(range(count)) - {claims.writes for claims in said.values()}
    if lacking:
        borrowers = some([rank for rank, claims in said.items() if claims.files])
        raise Unlike(
            f"no rank wrote {some(alike_files(number, count)[0] for number in lacking)}, from which rank"
            f" {borrowers} borrows tensors; from now on each rank writes all of its own",
            (ALL,),
        )
    return count


def seal_ranks(stage: Stage, folder: Path, staged: Staged, shared: int) -> tuple[FileEntry, ...]:
    """Digest what the ranks staged and write their documents; the first time that these bytes are read.

    Args:
        stage: that the folder is in.
        folder: of the copy.
        staged: the ranks' records.
        shared: from how many files they borrow tensors.

    Raises:
        Unlike: a rank does not hold what it borrows.
        OSError: the file system refused.
    """
    files: list[_Sealed] = []
    for number in range(shared):
        files.append(_seal(folder, alike_files(number, shared), stage.draft(folder, number, shared)))
    found = [entry for one in files for entry in one.entries]
    for rank in sorted(staged):
        world_size = staged[rank]["world_size"]
        claims, unfinished = stage.said(folder, rank, world_size)
        if claims.files:
            _require_held(rank, claims, files)
        found += _seal(folder, rank_files(rank, world_size), unfinished).entries
    return tuple(found)


def _require_held(rank: int, claims: Claims, files: Sequence[_Sealed]) -> None:
    """Check that a rank holds, bit for bit, what others wrote for it.

    Raises:
        Unlike: it does not.
    """
    for number, file in enumerate(files):
        if number == claims.writes:
            continue
        unlike = set(differing(file.digests, claims.digests.get(number, ())))
        if not unlike:
            continue
        text = json.loads(file.document)["shard"]
        entries = Shard.from_json(text["file"], text).tensors
        keys = in_chunks(entries, unlike, text["chunk_bytes"])
        apart = entries.keys() & set(claims.apart)
        explained = {one for key in apart for one in chunks_of(entries[key], text["chunk_bytes"])}
        if keys <= apart and unlike <= explained:
            continue
        about = {one for key in keys for one in chunks_of(entries[key], text["chunk_bytes"])}
        beside = in_chunks(entries, about, text["chunk_bytes"])  # they are in chunks that may differ later
        raise Unlike(
            f"rank {rank} does not hold what another rank of this node wrote for all ({some(keys - apart)} in"
            f" {text['file']}): ranks that should hold the same do not, which may be silent corruption; from"
            " now on each rank writes these tensors itself",
            beside or (ALL,),
        )


def _seal(folder: Path, files: tuple[str, str], unfinished: bytes) -> _Sealed:
    tensors, document = files
    with content_of(folder / tensors) as view:
        nbytes = len(view)
        digests = _digests(view)
    content = finished(unfinished, digests)
    (folder / document).write_bytes(content)
    entries = (
        FileEntry(tensors, nbytes, combined(digests)),
        FileEntry(document, len(content), file_digest(content)),
    )
    return _Sealed(entries, digests, content)


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
