"""The global tier as saving and loading need it: whole copies go there and come back, verified."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from outlast import plugins
from outlast.checkpoint.content.digest import chunk_digests, combined
from outlast.checkpoint.policy.manifest import CHUNK_BYTES, COMMIT, MANIFEST, FileEntry, Manifest
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.object_access import Limits, connect
from outlast.checkpoint.tiers.tier import DirectoryTier, write_all
from outlast.fields import Damage, DamagedCopy
from outlast.ports import StoredCopy, Tier

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def content_of(path: Path) -> Iterator[memoryview]:
    """Open a file's content without copying it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            yield memoryview(b"")
            return
        # Not closed here: an error on its way up still holds parts of the view.
        yield memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))


class Remote:
    """A global tier.

    Args:
        url: of an object store or a registered tier, or the absolute path of a folder.
        options: of the tier.

    Raises:
        UsageError: the URL is none that is known, or what it needs is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url
        self.tier = _tier(url, options)

    def names(self) -> list[str]:
        """Return the names of all copies.

        Raises:
            OSError: the store did not answer, or refused.
        """
        return self.tier.names()

    def put(self, name: str, source: DirectoryTier) -> int:
        """Bring a whole copy there and return its size; one of that name that is there stays as it is.

        Raises:
            DamagedCopy: manifest or COMMIT are not as they were written.
            OSError: it cannot be read, or the store did not answer, or refused.
        """
        if name in self.names():
            return 0
        with source.open(name) as folder, ExitStack() as stack:
            manifest, _ = read_manifest(folder, name)
            ends = {file: folder.read(file) for file in (MANIFEST, COMMIT)}
            contents = {
                entry.name: stack.enter_context(content_of(source.folder / name / entry.name))
                for entry in manifest.needed()
            }
            self.tier.add(name, contents, ends)
        return manifest.nbytes

    def get(self, name: str, target: DirectoryTier) -> int:
        """Bring a copy into a folder of copies and return its size; every byte is compared with its digest.

        Raises:
            DamagedCopy: it is not as it was committed; nothing of it stays in the folder.
            OSError: the store did not answer, or refused, or the file system did.
        """
        with target.writing(name) as temporary, self.tier.open(name) as copy:
            target.write(temporary, {file: copy.read(file) for file in (MANIFEST, COMMIT)})
            with target.open(temporary) as folder:
                manifest, _ = read_manifest(folder, name)
            for entry in manifest.needed():
                fetch(copy, entry, target.folder / temporary / entry.name)
        return manifest.nbytes

    def manifest(self, name: str) -> Manifest:
        """Return a copy's manifest; raises as :meth:`get` does."""
        with self.tier.open(name) as copy:
            return read_manifest(copy, name)[0]


def check(url: str, options: Mapping[str, str]) -> None:
    """Refuse what :class:`Remote` would refuse; no tier is made, and no store is asked.

    Raises:
        UsageError: the URL is none that is known, obstore is not installed, or does not know an option.
    """
    scheme, _, _ = url.partition("://")
    if not url.startswith("/") and scheme not in plugins.names(plugins.TIERS):
        # obstore makes the folder of a file URL at once.
        connect("global", "memory:///" if scheme == "file" else url, _switched(options), Limits())


def _tier(url: str, options: Mapping[str, str]) -> Tier:
    """Return the tier of a URL: a folder, what is registered for its scheme, or an object store."""
    scheme, _, _ = url.partition("://")
    if url.startswith("/"):
        return DirectoryTier(url, "global")
    if scheme in plugins.names(plugins.TIERS):
        registered: Tier = plugins.load(plugins.TIERS, scheme)(url, options)
        return registered
    from outlast.checkpoint.tiers.objects import ObjectTier

    return ObjectTier(url, _switched(options))


def _switched(options: Mapping[str, str]) -> dict[str, str | bool]:
    switches = {"true": True, "false": False}
    return {key: switches.get(text, text) for key, text in options.items()}


def fetch(copy: StoredCopy, entry: FileEntry, target: Path) -> None:
    """Bring a file of a copy down; it gets its name when its digest is right and it is on the disk.

    The folder of the target is not synced: the caller that commits does that.

    Raises:
        DamagedCopy: it is missing, or not what the manifest says; the target is untouched.
        OSError: the tier did not answer, or refused, or the file system did.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    digests = bytearray()
    rest = b""  # of a chunk that is not complete

    def take(part: memoryview) -> None:
        nonlocal rest
        content = memoryview(rest + bytes(part)) if rest else part
        whole = len(content) - len(content) % CHUNK_BYTES
        digests.extend(chunk_digests(content[:whole]))
        rest = bytes(content[whole:])
        try:
            write_all(descriptor, part)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from error

    copy.require(entry.name, entry.nbytes)
    descriptor = os.open(partial, _CREATE, 0o644)
    try:
        copy.stream(entry.name, entry.nbytes, take)
        found = combined(bytes(digests) + chunk_digests(rest))
        if found != entry.digest:
            raise DamagedCopy(Damage(entry.name, f"digest {entry.digest}", found))
        os.fsync(descriptor)
        os.rename(partial, target)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(partial)
