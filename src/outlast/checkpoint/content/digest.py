"""Digests of bytes in memory, and the COMMIT line that ends the chain of them.

A file's digest is the xxh3_128 of its chunks' xxh3_64 digests, so the pass over the bytes that
yields the chunk digests (by which a part of a file can be verified) yields the file's too.
xxh3 finds accidents, not forgers.
"""

from __future__ import annotations

import re

from xxhash import xxh3_64_digest, xxh3_128_hexdigest

from outlast.checkpoint.policy.manifest import (
    CHUNK_BYTES,
    COMMIT,
    MANIFEST,
    FileEntry,
    Manifest,
    Row,
    digests_file,
    digests_nbytes,
)
from outlast.fields import FORMAT_VERSION, Damage, DamagedCopy, check_format
from outlast.ports import StoredCopy

_LINE = re.compile(rb"outlast checkpoint ([1-9][0-9]{0,8}) ([0-9a-f]{32}) ([0-9a-f]{16})\n")


def chunk_digest(chunk: memoryview | bytes) -> bytes:
    """Return the digest of one chunk."""
    digest: bytes = xxh3_64_digest(chunk)
    return digest


def chunk_digests(content: memoryview | bytes) -> bytes:
    """Return the digests of all chunks, one behind the other."""
    view = memoryview(content)
    begins = range(0, len(view), CHUNK_BYTES)
    return b"".join(chunk_digest(view[begin : begin + CHUNK_BYTES]) for begin in begins)


def combined(digests: bytes) -> str:
    """Return the digest of a file from those of its chunks."""
    digest: str = xxh3_128_hexdigest(digests)
    return digest


def file_digest(content: memoryview | bytes) -> str:
    """Return the digest of a file's content."""
    return combined(chunk_digests(content))


def read_digests(folder: StoredCopy, file: FileEntry) -> bytes:
    """Return the digests of the chunks of a safetensors file.

    Raises:
        DamagedCopy: they are not those that were committed.
        OSError: the file system refused.
    """
    name = digests_file(file.name)
    found = folder.read(name, digests_nbytes(file.nbytes))
    if combined(found) != file.digest:
        raise DamagedCopy(Damage(name, f"digests that combine to {file.digest}", combined(found)))
    return found


def commit_line(version: int, manifest_digest: str) -> bytes:
    """Return the content of COMMIT.

    The line ends with a digest of itself, so that a bit flipped in the version is damage and
    not a newer format.
    """
    head = f"outlast checkpoint {version} {manifest_digest} ".encode()
    return head + chunk_digest(head).hex().encode() + b"\n"


def ends_of(manifest: Manifest) -> dict[str, bytes]:
    """Return MANIFEST and COMMIT of a copy, in the order in which they are written: the last files of it."""
    content = manifest.to_json().encode()
    return {MANIFEST: content, COMMIT: commit_line(FORMAT_VERSION, file_digest(content))}


def row_of(
    nbytes: int,
    digests: bytes,
    document: bytes,
    begin: int = 0,
    coordinates: tuple[tuple[int, ...], ...] = (),
) -> Row:
    """Return the manifest's row of three files.

    Args:
        nbytes: size of the safetensors file.
        digests: of its chunks: content of the file beside it.
        document: content of the JSON file.
        begin: of the tensors; see :class:`Row`.
        coordinates: of the rank; see :class:`Row`.
    """
    own = (nbytes, combined(digests), file_digest(digests), len(document), file_digest(document))
    return Row(*own, begin, coordinates)


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
