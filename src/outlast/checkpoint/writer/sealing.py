"""Digests of what the ranks of a node have staged, and the manifest and COMMIT that vouch for them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import chunk_digests, ends_of, row_of
from outlast.checkpoint.content.rank_file import contents_of
from outlast.checkpoint.policy.manifest import (
    CHUNK_BYTES,
    COMMIT,
    MANIFEST,
    Manifest,
    Names,
    Row,
    alike_files,
    rank_files,
    runs_of,
    some,
)
from outlast.checkpoint.policy.table import place_in_meshes
from outlast.checkpoint.tiers.memory_folder import Stage
from outlast.checkpoint.tiers.remote import content_of
from outlast.errors import CheckpointError
from outlast.fields import Fields
from outlast.files import write_whole

_PART_BYTES = 32 * CHUNK_BYTES  # a smaller file is digested by one thread
_SHARE = 4  # of the processors that ranks leave, one in so many is for the writer while they train
Staged = Mapping[int, dict[str, Any]]


@dataclass(frozen=True)
class _Sealed:
    """Three files that are complete."""

    names: Names
    row: Row
    fields: Fields  # of the document


def shared_files(staged: Staged) -> int:
    """Return the number of shared files that the staged states refer to.

    Raises:
        CheckpointError: one of these files was not written.
    """
    count: int = max(record["shared"] for record in staged.values())
    lacking = set(range(count)) - {record["writes"] for record in staged.values()}
    if lacking:
        raise CheckpointError(
            f"no rank of this node wrote {some(alike_files(number, count)[0] for number in lacking)}, which"
            f" rank {some([rank for rank, record in staged.items() if record['shared']])} shares"
        )
    return count


def seal_ranks(stage: Stage, folder: Path, staged: Staged, shared: int, threads: int) -> dict[str, Any]:
    """Digest what the ranks staged; the first time that these bytes are read.

    Args:
        stage: that the folder is in.
        folder: of the copy.
        staged: the ranks' records.
        shared: from how many files they borrow tensors.
        threads: that digest.

    Returns:
        Fields of the manifest about the files of the ranks and the shared files.

    Raises:
        DamagedCopy: a document is not as a rank leaves it.
        CheckpointMismatch: an outlast with another format has left it.
        OSError: the file system refused.
    """
    files = [_seal(stage, folder, alike_files(number, shared), threads) for number in range(shared)]
    own = [
        _seal(stage, folder, rank_files(rank, staged[rank]["world_size"]), threads) for rank in sorted(staged)
    ]
    contents = runs_of([contents_of(one.names.document, one.fields.values) for one in own])
    return {
        "own": tuple(one.row for one in own),
        "shared": tuple(one.row for one in files),
        "contents": contents,
    }


def _seal(stage: Stage, folder: Path, names: Names, threads: int) -> _Sealed:
    view = content_of(folder / names.tensors)
    digests = digests_of(view, threads)
    (folder / names.digests).write_bytes(digests)
    document = stage.read(folder / names.document)
    fields = Fields.parse(names.document, document)
    return _Sealed(names, row_of(len(view), digests, document, *place_in_meshes(fields)), fields)


def digests_of(view: memoryview, threads: int) -> bytes:
    """Return the digest of each chunk, computed by several threads if the file is large."""
    if len(view) <= _PART_BYTES or threads == 1:
        return chunk_digests(view)
    parts = [view[begin : begin + _PART_BYTES] for begin in range(0, len(view), _PART_BYTES)]
    with ThreadPoolExecutor(threads, "digest") as pool:
        return b"".join(pool.map(chunk_digests, parts))


def threads_beside(ranks: int, processors: int) -> int:
    """Return how many threads may digest while ranks train: a quarter of what they leave, at least one."""
    return max(1, (processors - ranks) // _SHARE)


def seal(folder: Path, manifest: Manifest) -> None:
    """Write manifest and COMMIT, the latter in one piece: from here on the copy is complete.

    Raises:
        OSError: the file system refused.
    """
    ends = ends_of(manifest)
    (folder / MANIFEST).write_bytes(ends[MANIFEST])
    write_whole(folder / COMMIT, ends[COMMIT])
