"""Digests of bytes in memory, and the COMMIT line that ends the chain of them.

A file's digest is the xxh3_128 of its chunks' xxh3_64 digests, so the pass over the bytes that
yields the chunk digests (by which a part of a file can be verified) yields the file's too.
xxh3 finds accidents, not forgers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, FileEntry, Manifest
from outlast.fields import FORMAT_VERSION, Damage, DamagedCopy, check_format

CHUNK_BYTES = 1 << 20  # small enough that a chunk is still in the cache when it is copied and digested
_LINE = re.compile(rb"outlast checkpoint ([1-9][0-9]{0,8}) ([0-9a-f]{32}) ([0-9a-f]{16})\n")


def chunk_digest(chunk: memoryview | bytes) -> str:
    """Return the digest of one chunk."""
    digest: str = xxh3_64_hexdigest(chunk)
    return digest


def chunk_digests(content: memoryview | bytes) -> tuple[str, ...]:
    """Return the digest of each chunk."""
    view = memoryview(content)
    return tuple(
        chunk_digest(view[begin : begin + CHUNK_BYTES]) for begin in range(0, len(view), CHUNK_BYTES)
    )


def combined(digests: Iterable[str]) -> str:
    """Return the digest of a file from those of its chunks."""
    digest: str = xxh3_128_hexdigest(bytes.fromhex("".join(digests)))
    return digest


def file_digest(content: memoryview | bytes) -> str:
    """Return the digest of a file's content."""
    return combined(chunk_digests(content))


def commit_line(version: int, manifest_digest: str) -> bytes:
    """Return the content of COMMIT.

    The line ends with a digest of itself, so that a bit flipped in the version is damage and
    not a newer format.
    """
    head = f"outlast checkpoint {version} {manifest_digest} ".encode()
    return head + chunk_digest(head).encode() + b"\n"


def ends_of(manifest: Manifest) -> dict[str, bytes]:
    """Return MANIFEST and COMMIT of a copy, in the order in which they are written: the last files of it."""
    content = manifest.to_json().encode()
    return {MANIFEST: content, COMMIT: commit_line(FORMAT_VERSION, file_digest(content))}


def entries_of(
    files: tuple[str, str], nbytes: int, digests: Iterable[str], document: bytes
) -> tuple[FileEntry, FileEntry]:
    """Return the manifest's entries of a safetensors file and of the JSON file beside it.

    Args:
        files: their names.
        nbytes: size of the safetensors file.
        digests: of its chunks.
        document: content of the JSON file.
    """
    tensors, beside = files
    return (
        FileEntry(tensors, nbytes, combined(digests)),
        FileEntry(beside, len(document), file_digest(document)),
    )


def parse_commit(content: bytes) -> str:
    """Return the manifest's digest.

    Raises:
        DamagedCopy: a byte is not as it was written.
        CheckpointMismatch: another version wrote it.
    """
    match = _LINE.fullmatch(content)
    if match is None:
        raise DamagedCopy(Damage(COMMIT, "one line of commit", repr(content[:100])))
    version, digest = int(match[1]), match[2].decode()
    if commit_line(version, digest) != content:
        raise DamagedCopy(Damage(COMMIT, "a line that ends with its own digest", repr(content)))
    check_format(COMMIT, version)
    return digest
