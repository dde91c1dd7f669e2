"""The files of copies, as far as a peer may reach them.

A peer names a copy and a file; both must have the form of such a name, and what has the name must be
a regular file in a folder in the tier that is offered. No path is ever put together from what a
peer said, and no symbolic link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from xxhash import xxh3_128_hexdigest

from outlast.checkpoint.policy.manifest import (
    COMMIT,
    MANIFEST,
    alike_files,
    is_label,
    parse_copy_name,
    rank_files,
)
from outlast.checkpoint.replica.frames import CHUNK_BYTES, Channel, Mismatch, PeerRefused, Refusal, WrongBytes

_NAME_BYTES = 255  # NAME_MAX of Linux
_COMMIT_BYTES = 200  # more than any COMMIT has
_FILE = re.compile(r"(?:rank|alike)-([0-9]{5,9})-of-([0-9]{5,9})\.(?:safetensors|json)")
# Without O_NONBLOCK the open of a named pipe would wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Target = Callable[[int, memoryview], None] | bytearray | memoryview


@dataclass(frozen=True)
class Listing:
    """A copy in a peer's folder: its files with their sizes, and its COMMIT line, "" without one."""

    name: str
    files: dict[str, int]
    commit: str


@dataclass(frozen=True)
class Promise:
    """What a file must be when it has arrived; the digest is that of its entry in the manifest."""

    file: str
    nbytes: int
    digest: str


class Shelf(Protocol):
    """Where replicas are put; a tier of copies in the saver. Called from several threads."""

    def begin(self, name: str) -> str:
        """Make the folder in which a copy is written and return its temporary name."""
        ...

    def open_for_write(self, temporary: str, file: str) -> int:
        """Make a new file in it and return its descriptor; the caller closes it."""
        ...

    def commit(self, temporary: str, name: str) -> None:
        """Give a complete folder its name, down to the disk; an OSError when the name is taken."""
        ...

    def discard(self, temporary: str) -> None:
        """Remove a folder that was begun."""
        ...


def check_copy_name(name: object) -> str:
    """Return a name that a copy can have.

    Raises:
        PeerRefused: it is none.
    """
    if isinstance(name, str) and len(name) <= _NAME_BYTES and parse_copy_name(name) is not None:
        return name
    raise PeerRefused(Refusal.MALFORMED, f"the name of a copy expected, {str(name)[:100]!r} found")


def check_label(name: object) -> str:
    """Return a name that a folder of copies, or a node, can have.

    Raises:
        PeerRefused: it is none.
    """
    if isinstance(name, str) and is_label(name):
        return name
    raise PeerRefused(Refusal.MALFORMED, f"the name of a folder expected, {str(name)[:100]!r} found")


def check_file_name(name: object) -> str:
    """Return a name that a file of a copy can have.

    Raises:
        PeerRefused: it is none.
    """
    if isinstance(name, str) and _is_file_name(name):
        return name
    raise PeerRefused(Refusal.MALFORMED, f"the name of a copy's file expected, {str(name)[:100]!r} found")


def _is_file_name(name: str) -> bool:
    if name in (MANIFEST, COMMIT):
        return True
    match = _FILE.fullmatch(name)
    if match is None:
        return False
    number, count = int(match[1]), int(match[2])
    return number < count and name in (*rank_files(number, count), *alike_files(number, count))


@contextmanager
def open_file(folder: Path, copy: str, file: str) -> Iterator[tuple[int, int]]:
    """Open a file of a copy for reading.

    Yields:
        Descriptor and size.

    Raises:
        PeerRefused: the names are none, or what has the name is no regular file.
        OSError: it is missing, or the file system refused.
    """
    with _opened(folder, check_copy_name(copy)) as place:
        descriptor = os.open(check_file_name(file), _READ, dir_fd=place)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PeerRefused(Refusal.MISSING, f"{copy}/{file} is no regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


@contextmanager
def _opened(folder: Path, copy: str) -> Iterator[int]:
    tier = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(copy, _READ | os.O_DIRECTORY, dir_fd=tier)
    finally:
        os.close(tier)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def list_copies(folder: Path) -> list[Listing]:
    """Return the copies in a folder, sound or not; one that goes meanwhile, or is no folder, is left out.

    Raises:
        OSError: the file system refused.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        if parse_copy_name(name) is None:
            continue
        try:
            with _opened(folder, name) as place:
                found.append(Listing(name, _sizes(place), _commit_line(folder, name)))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
    return found


def _sizes(place: int) -> dict[str, int]:
    sizes = {}
    for file in sorted(filter(_is_file_name, os.listdir(place))):
        with suppress(FileNotFoundError):
            status = os.stat(file, dir_fd=place, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                sizes[file] = status.st_size
    return sizes


def _commit_line(folder: Path, copy: str) -> str:
    try:
        with open_file(folder, copy, COMMIT) as (descriptor, _):
            return os.pread(descriptor, _COMMIT_BYTES, 0).decode("ascii", "replace")
    except (FileNotFoundError, PeerRefused):
        return ""


@contextmanager
def open_source(path: Path) -> Iterator[tuple[int, int]]:
    """Open a file of this node's own; yield descriptor and size.

    Raises:
        OSError: it is missing, a symbolic link, or the file system refused.
    """
    descriptor = os.open(path, _READ)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def chunks_of_file(descriptor: int, begin: int, end: int, file: str) -> Iterator[memoryview]:
    """Yield the chunks of a part of a file, each in the same memory.

    Raises:
        OSError: the file system refused, or the file ends before.
    """
    buffer = memoryview(bytearray(min(CHUNK_BYTES, end - begin)))
    for at in range(begin, end, CHUNK_BYTES):
        chunk = buffer[: end - at]
        done = 0
        while done < len(chunk):
            got = os.preadv(descriptor, [chunk[done:]], at + done)
            if not got:
                raise OSError(errno.EIO, f"{end} bytes expected, it ends at {at + done}", file)
            done += got
        yield chunk


def chunks_of_bytes(content: memoryview | bytes) -> Iterator[memoryview]:
    """Yield the chunks of bytes in memory."""
    view = memoryview(content).cast("B")
    for at in range(0, len(view), CHUNK_BYTES):
        yield view[at : at + CHUNK_BYTES]


def receive_file(channel: Channel, file: str, begin: int, end: int, into: Target) -> tuple[str, ...]:
    """Receive a part of a file and return the digests of its chunks, counted from ``begin``.

    Args:
        channel: the next frames on it are the chunks.
        file: what errors call it.
        begin: first byte.
        end: byte after the last.
        into: takes each verified chunk with its place in the file, in memory that the next one
            overwrites; or the memory itself for the whole part.

    Raises:
        WrongBytes: a chunk is not as it was read; ``into`` was not called with it.
        PeerError: see :class:`Channel`.
    """
    taker, whole = (into, None) if callable(into) else (None, memoryview(into).cast("B"))
    buffer = memoryview(bytearray(min(CHUNK_BYTES, end - begin))) if whole is None else whole[: end - begin]
    digests = []
    channel.done = 0
    for at in range(begin, end, CHUNK_BYTES):
        place = 0 if whole is None else at - begin
        chunk = buffer[place : place + min(CHUNK_BYTES, end - at)]
        digests.append(f"{channel.receive_chunk(chunk, file, at):016x}")
        if taker is not None:
            taker(at, chunk)
        channel.done += len(chunk)
    return tuple(digests)


def file_digest(digests: Iterable[str]) -> str:
    """Return the digest of a file from those of its chunks, as its manifest entry has it."""
    digest: str = xxh3_128_hexdigest(bytes.fromhex("".join(digests)))
    return digest


class ReplicaWriter:
    """One copy on its way onto a shelf; without :meth:`commit` nothing of it stays.

    Args:
        shelf: where it goes.
        copy: its name.
    """

    def __init__(self, shelf: Shelf, copy: str) -> None:
        self._shelf = shelf
        self._copy = copy
        self._temporary = ""

    def __enter__(self) -> ReplicaWriter:
        self._temporary = self._shelf.begin(self._copy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary:
            with suppress(OSError):
                self._shelf.discard(self._temporary)

    def receive(self, channel: Channel, promise: Promise) -> None:
        """Write a file from the chunks that come, down to the disk.

        Raises:
            WrongBytes: a chunk was damaged on its way, or the file is not the one that was promised.
            OSError: the file system refused.
            PeerError: see :class:`Channel`.
        """
        label = f"{self._copy}/{promise.file}"
        descriptor = self._shelf.open_for_write(self._temporary, promise.file)
        try:

            def write(_: int, chunk: memoryview) -> None:
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]

            found = file_digest(receive_file(channel, label, 0, promise.nbytes, write))
            if found != promise.digest:
                raise WrongBytes(channel.peer, Mismatch(label, 0, promise.nbytes, promise.digest, found))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def commit(self) -> None:
        """Give the copy its name.

        Raises:
            OSError: the file system refused, or a copy of this name is there.
        """
        self._shelf.commit(self._temporary, self._copy)
        self._temporary = ""
