"""A folder of copies on a local or shared file system.

A copy is written under a temporary name and gets its own in a single rename, so whatever is
called ``step-...`` was complete once. Folders that are dropped are renamed before they are
emptied, so a half-emptied one is never taken for a copy. Nothing here follows a symbolic link, but for the
folder itself: it may be one to another file system, where it is not that of a training with a name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import chunk_digest, chunk_digests, combined
from outlast.checkpoint.policy.manifest import (
    CHUNK_BYTES,
    COMMIT,
    COMMIT_BYTES,
    DOCUMENT_BYTES,
    MANIFEST,
    MANIFEST_BYTES,
    parse_copy_name,
    place_of,
)
from outlast.cluster.lease_file import allowed, wait_for
from outlast.fields import Damage, DamagedCopy
from outlast.files import OUTAGE, make_folder, make_private, names_in, read_whole, sync_folder

Take = Callable[[memoryview], None]

_TEMPORARY = ".tmp-"
_TRASH = ".trash-"
_QUARANTINE = "quarantine"
_REASON = ".reason.json"
_WRITE_BYTES = 16 << 20
_DIRECT_BYTES = 4 << 20  # what is smaller goes through the page cache
_LEASE_PATIENCE = 20.0  # seconds; succession of a leader takes five or so
_BLOCK_BYTES = 4096  # what O_DIRECT wants sizes and places in a file to be multiples of
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}
# Without O_NONBLOCK the open of a named pipe would wait for a writer.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_BYTES = {COMMIT: COMMIT_BYTES, MANIFEST: MANIFEST_BYTES}
_REASON_BYTES = 1 << 20
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}


class CopyFolder:
    """An open copy; it stays readable when its folder is renamed meanwhile.

    Args:
        descriptor: of the folder.
        near: it is in the memory folder of this node; nobody writes to its files during a load.
    """

    def __init__(self, descriptor: int, near: bool = False) -> None:
        self._descriptor = descriptor
        self._near = near

    def is_near(self, file: str) -> bool:  # noqa: ARG002 - a load from several places asks for each file
        """Return whether a file can be used where it is, without a copy in private memory."""
        return self._near

    @contextmanager
    def open(self, file: str, nbytes: int | None = None) -> Iterator[tuple[int, int]]:
        """Open a file of the copy.

        Args:
            file: its name.
            nbytes: the size that it must have; None: any.

        Yields:
            Descriptor and size.

        Raises:
            DamagedCopy: it is missing, no regular file, or of another size.
            OSError: the file system refused.
        """
        try:
            descriptor = os.open(file, READ_FLAGS, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno in _NOT_THERE:
                known = {errno.ELOOP: "a symbolic link", errno.ENOENT: "nothing"}
                found = known.get(error.errno, os.strerror(error.errno))
                raise DamagedCopy(Damage(file, "a regular file", found)) from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedCopy(Damage(file, "a regular file", stat.filemode(status.st_mode)))
            if nbytes is not None and status.st_size != nbytes:
                raise DamagedCopy(Damage(file, f"{nbytes} bytes", f"{status.st_size} bytes"))
            yield descriptor, status.st_size
        except OSError as error:
            error.filename = error.filename or file
            raise
        finally:
            os.close(descriptor)

    def read(self, file: str, nbytes: int | None = None) -> bytes:
        """Return a file's whole content, if it is no larger than its kind can be; see :meth:`open`."""
        with self.open(file, nbytes) as (descriptor, size):
            require_size(file, size)
            content = memoryview(bytearray(size))
            read_exactly(descriptor, content, 0, file)
        return bytes(content)

    def stream(self, file: str, nbytes: int | None, take: Take) -> None:
        """Give a file's content away in order, in parts; see :meth:`open`."""
        with self.open(file, nbytes) as (descriptor, size):
            for chunk in chunks_of(descriptor, size, file):
                take(chunk)

    def require(self, file: str, nbytes: int) -> None:
        """Check that a file is there with its size; see :meth:`open`."""
        with self.open(file, nbytes):
            pass


def require_size(file: str, size: int) -> None:
    """Check that a file is no larger than what is read whole of its kind.

    Raises:
        DamagedCopy: it is.
    """
    most = _MOST_BYTES.get(file, DOCUMENT_BYTES)
    if size > most:
        raise DamagedCopy(Damage(file, f"at most {most} bytes", f"{size} bytes"))


def read_exactly(descriptor: int, target: memoryview, offset: int, file: str) -> None:
    """Fill ``target`` from an offset of a file.

    Raises:
        DamagedCopy: the file ends before.
    """
    done = 0
    while done < len(target):
        got = os.preadv(descriptor, [target[done:]], offset + done)
        if got == 0:
            raise DamagedCopy(Damage(file, f"{len(target)} bytes from byte {offset} on", f"{done} bytes"))
        done += got


def chunks_of(descriptor: int, end: int, file: str, begin: int = 0) -> Iterator[memoryview]:
    """Yield the chunks of a file, or of a part of it, each in the same memory.

    Raises:
        DamagedCopy: the file ends before.
        OSError: the file system refused.
    """
    buffer = memoryview(bytearray(min(CHUNK_BYTES, end - begin)))
    for place in range(begin, end, CHUNK_BYTES):
        chunk = buffer[: end - place]
        read_exactly(descriptor, chunk, place, file)
        yield chunk


def digest_of(descriptor: int, end: int, file: str, begin: int = 0) -> str:
    """Return the digest of a file, or of a part of it; see :func:`chunks_of`."""
    return combined(b"".join(map(chunk_digest, chunks_of(descriptor, end, file, begin))))


class DirectoryTier:
    """Copies in a folder.

    Args:
        folder: made when the first copy is written.
        name: what messages call it.
        lease: file that says whether this node may commit here; "" where no other could.
        private: the folder, and those above it that are missing, are made for this account alone.
        linked: the folder itself may be a symbolic link.
        hold: called with a number of bytes of a large file before they are written; returns when they may be.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        name: str = "local",
        lease: str = "",
        private: bool = False,
        linked: bool = True,
        hold: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.name = name
        self._lease = lease
        self.private = private
        self._linked = linked
        self._hold = hold

    def names(self) -> list[str]:
        """Return the names of all copies, sound or not."""
        return [name for name in names_in(self.folder) if parse_copy_name(name) is not None]

    def quarantined(self) -> dict[str, str]:
        """Return what was set aside, by name, each with its reason."""
        place = self.folder / _QUARANTINE
        found = {}
        for entry in names_in(place) if place.is_dir() and not place.is_symlink() else ():
            name = entry.removesuffix(_REASON)
            if name.startswith("step-") and name not in found:
                found[name] = self._reason(place / f"{name}{_REASON}")
        return found

    def remember(self, name: str, reason: dict[str, Any]) -> None:
        """Leave the reason why a copy of another tier was dropped, so that its loss is not forgotten.

        The first of several ranks that do so leaves it; what is there stays.

        Raises:
            OSError: the file system refused.
        """
        self._require_unlinked(_QUARANTINE)
        make_folder(self.folder / _QUARANTINE, self.private)
        note = f"{name}.memory{_REASON}"
        with suppress(FileExistsError):
            self.write(_QUARANTINE, {note: json.dumps(reason, indent=1).encode() + b"\n"})

    def _reason(self, path: Path) -> str:
        try:
            return str(json.loads(read_whole(path, _REASON_BYTES))["reason"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "its reason cannot be read"

    def _require_unlinked(self, *below: str) -> None:
        """Check that no symbolic link is in the place of the folder, or of one in it.

        Raises:
            OSError: one is.
        """
        places = [*([] if self._linked else [self.folder]), *(self.folder / name for name in below)]
        for place in places:
            if place.is_symlink():
                why = "a folder is expected; it is a symbolic link, and none is followed here"
                raise OSError(errno.ELOOP, why, str(place))

    @contextmanager
    def open(self, name: str) -> Iterator[CopyFolder]:
        """Open a copy for reading.

        Raises:
            DamagedCopy: what has the name is no folder.
            OSError: the file system refused, or the copy is gone.
        """
        try:
            descriptor = os.open(self.folder / name, READ_FLAGS | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise DamagedCopy(Damage(name, "a folder", "something else")) from error
            raise
        try:
            yield CopyFolder(descriptor, self.private)
        finally:
            os.close(descriptor)

    def make(self) -> None:
        """Make the folder; not those above it, where a run may have been moved away meanwhile.

        Raises:
            OSError: the file system refused, the folder above it is gone, or a link is in its place.
        """
        self._require_unlinked()
        if self.private:
            make_private(self.folder)
            return
        try:
            with suppress(FileExistsError):
                os.mkdir(self.folder)
        except FileNotFoundError as error:
            why = "it was moved, renamed or removed; nothing is written there until it is back"
            raise FileNotFoundError(error.errno, why, str(self.folder.parent)) from error

    def begin(self, name: str, together: str = "") -> str:
        """Make the folder in which a copy is written and return its temporary name.

        Args:
            name: of the copy.
            together: a word that all who write parts of it know: each begins, and the folder is the same.
        """
        self._require_unlinked()
        if not self.folder.is_dir():
            self.make()
            sync_folder(self.folder.parent)
        temporary = f"{_TEMPORARY}{name}-{together or uuid.uuid4().hex[:8]}"
        (self.folder / temporary).mkdir(exist_ok=bool(together))
        return temporary

    def _create(self, temporary: str, file: str) -> int:
        return os.open(self.folder / temporary / file, _CREATE, 0o644)

    def write(self, temporary: str, files: Mapping[str, memoryview | bytes]) -> None:
        """Write new files into a temporary folder, down to the disk.

        All are written before the first is synced: the file system then commits them together.

        Raises:
            OSError: the file system refused; the message names the file.
        """
        with ExitStack() as stack:
            opened: list[tuple[Path, int]] = []
            for file, content in files.items():
                path = self.folder / temporary / file
                descriptor = self._create(temporary, file)
                stack.callback(os.close, descriptor)
                opened.append((path, descriptor))
                with _naming(path):
                    _write(descriptor, memoryview(content), self._hold)
            for path, descriptor in opened:
                with _naming(path):
                    os.fsync(descriptor)

    def link(self, temporary: str, file: str, path: Path) -> bool:
        """Make a hard link to a file in a temporary folder, and sync it. Nobody may change the file any more.

        Args:
            temporary: name of the folder.
            file: its name there.
            path: of the file.

        Returns:
            Whether it was linked; False: it is on another file system, or this one has no links.

        Raises:
            OSError: the file system refused.
        """
        place = self.folder / temporary / file
        try:
            os.link(path, place, follow_symlinks=False)
        except OSError as error:
            if error.errno in OUTAGE:
                raise
            return False
        if place.lstat().st_nlink < 2:  # not counted: nothing would tell that the file is no buffer any more
            place.unlink()
            return False
        self.sync(temporary, file)
        return True

    def sync(self, temporary: str, file: str) -> None:
        """Bring a file that somebody has written into a temporary folder down to the disk.

        Raises:
            OSError: the file system refused.
        """
        with self.open(temporary) as folder, folder.open(file) as (descriptor, _):
            os.fsync(descriptor)

    def receive(self, temporary: str, file: str, deliver: Callable[[Take], object]) -> str:
        """Write a new file into a temporary folder, down to the disk, and return its digest.

        Args:
            temporary: name of the folder.
            file: its name there.
            deliver: calls what it is given with the parts of the file, of any size, in order.

        Raises:
            OSError: the file system refused; the message names the file.
        """
        path, digests = self.folder / temporary / file, bytearray()
        rest = b""  # of a chunk that is not complete

        def take(part: memoryview) -> None:
            nonlocal rest
            content = memoryview(rest + part) if rest else part
            whole = len(content) - len(content) % CHUNK_BYTES
            digests.extend(chunk_digests(content[:whole]))
            rest = bytes(content[whole:])
            with _naming(path):
                while part:
                    part = part[os.write(descriptor, part) :]

        descriptor = self._create(temporary, file)
        try:
            deliver(take)
            with _naming(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return combined(bytes(digests) + chunk_digests(rest))

    def write_chunks(self, temporary: str, file: str, chunks: Iterable[memoryview]) -> str:
        """Write a new file from its chunks; see :meth:`receive`."""

        def deliver(take: Take) -> None:
            for chunk in chunks:
                take(chunk)

        return self.receive(temporary, file, deliver)

    def add(self, name: str, *groups: Mapping[str, memoryview | bytes]) -> None:
        """Write a copy and commit it; of groups of files each is on the disk before the next one is written.

        Raises:
            OSError: the file system refused; nothing of the copy is left.
        """
        with self.writing(name) as temporary:
            for files in groups:
                self.write(temporary, files)

    @contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Begin a copy, yield its temporary name, and commit it; whatever is raised leaves nothing of it."""
        temporary = self.begin(name)
        try:
            yield temporary
            self.commit(temporary, name)
        except BaseException:  # raised again: Ctrl-C, too, leaves no half of a folder behind
            with suppress(OSError):  # what does not go is swept at the next start
                self.discard(temporary)
            raise

    def commit(self, temporary: str, name: str) -> None:
        """Give a complete temporary folder its name, down to the disk.

        Raises:
            StaleGeneration: this node may not, and did not come to: the job goes on elsewhere.
        """
        sync_folder(self.folder / temporary)
        wait_for(self._lease, place_of(name)[1], _LEASE_PATIENCE)
        os.rename(self.folder / temporary, self.folder / name)
        sync_folder(self.folder)

    def discard(self, name: str) -> None:
        """Remove a folder, committed or temporary; a committed one vanishes at once."""
        if parse_copy_name(name) is None:
            shutil.rmtree(self.folder / name)
            return
        trash = self.folder / f"{_TRASH}{name}-{uuid.uuid4().hex[:8]}"
        os.rename(self.folder / name, trash)
        shutil.rmtree(trash)

    def sweep(self, together: str = "", only: bool = False) -> list[str]:
        """Remove the files of attempts that died, and return the names of what would not go.

        Args:
            together: see :meth:`begin`; what was begun with this word stays.
            only: what was begun with this word goes, and the rest stays.
        """
        if not self._linked and self.folder.is_symlink():
            return [f"{self.folder} (a symbolic link, which is not followed)"]
        left = []
        for name in names_in(self.folder):
            known = bool(together) and name.endswith(f"-{together}")
            if name.startswith((_TEMPORARY, _TRASH)) and known == only:
                try:
                    shutil.rmtree(self.folder / name)
                except OSError:
                    left.append(name)
        return left

    def may_commit(self, generation: int) -> bool:
        """Return whether a generation is in force on this node, as far as another one could be."""
        try:
            may, left = allowed(self._lease) if self._lease else (generation, 1.0)
        except OSError:
            return False
        return may == generation and left > 0

    def quarantine(self, name: str, reason: dict[str, Any]) -> str:
        """Move a copy aside, with its reason beside it, and return the name it has there.

        Raises:
            OSError: the file system refused; the copy stays where it is.
        """
        self._require_unlinked(_QUARANTINE)
        place = self.folder / _QUARANTINE
        place.mkdir(exist_ok=True)
        aside = f"{name}~{uuid.uuid4().hex[:8]}" if name in names_in(place) else name
        note = f"{aside}{_REASON}"
        try:
            (place / note).unlink(missing_ok=True)
            self.write(_QUARANTINE, {note: json.dumps(reason, indent=1).encode() + b"\n"})
            os.rename(self.folder / name, place / aside)
        except OSError:
            (place / note).unlink(missing_ok=True)
            raise
        sync_folder(place)
        sync_folder(self.folder)
        return aside

    def take_back(self, aside: str, name: str) -> None:
        """Move a copy out of the quarantine, and remove its reason.

        Raises:
            OSError: the file system refused.
        """
        place = self.folder / _QUARANTINE
        os.rename(place / aside, self.folder / name)
        (place / f"{aside}{_REASON}").unlink(missing_ok=True)
        sync_folder(self.folder)
        sync_folder(place)


def _write(descriptor: int, content: memoryview, hold: Callable[[int], object]) -> None:
    """Write to a new file, all but the last bytes past the page cache if it is large and may be.

    The page cache would take as much memory again, and most of a processor while it is filled.
    """
    place, large = 0, len(content) >= _DIRECT_BYTES
    whole = len(content) - len(content) % _BLOCK_BYTES
    if large and _set_direct(descriptor, True):
        try:
            while place < whole:
                hold(min(_WRITE_BYTES, whole - place))
                place += os.write(descriptor, content[place : min(place + _WRITE_BYTES, whole)])
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
        _set_direct(descriptor, False)
    while place < len(content):
        if large:
            hold(min(_WRITE_BYTES, len(content) - place))
        place += os.write(descriptor, content[place : place + _WRITE_BYTES])


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Have a file written past the page cache, or through it; return whether the file system does that."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name into an error that came from its descriptor."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
