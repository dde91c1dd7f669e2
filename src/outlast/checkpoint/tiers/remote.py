"""The global tier, as saving and loading need it: whole copies go there and come back.

It is an object store by URL, or a folder that outlives the nodes by its absolute path.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, FileEntry, Manifest
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import DirectoryTier, chunks_of
from outlast.fields import Damage, DamagedCopy

if TYPE_CHECKING:
    from outlast.checkpoint.tiers.objects import ObjectTier


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
        url: of the object store (see :class:`ObjectTier`), or the absolute path of a folder.
        options: of the object store.

    Raises:
        UsageError: the URL is none that is known, or what it needs is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url
        self.tier: DirectoryTier | ObjectTier
        if url.startswith("/"):
            self.tier = DirectoryTier(url, "global")
        else:
            from outlast.checkpoint.tiers.objects import ObjectTier

            switches = {"true": True, "false": False}
            self.tier = ObjectTier(url, {key: switches.get(text, text) for key, text in options.items()})

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
                for entry in manifest.files
            }
            if isinstance(self.tier, DirectoryTier):
                self.tier.add(name, contents, ends)
            else:
                self.tier.upload(name, contents)
                self.tier.commit(name, ends[MANIFEST], ends[COMMIT])
        return sum(entry.nbytes for entry in manifest.files)

    def get(self, name: str, target: DirectoryTier) -> int:
        """Bring a copy into a folder of copies and return its size; every byte is compared with its digest.

        Raises:
            DamagedCopy: it is not as it was committed; nothing of it stays in the folder.
            OSError: the store did not answer, or refused, or the file system did.
        """
        with target.writing(name) as temporary:
            with self.tier.open(name) as copy:
                ends = {file: copy.read(file) for file in (MANIFEST, COMMIT)}
            target.write(temporary, ends)
            with target.open(temporary) as folder:
                manifest, _ = read_manifest(folder, name)
            for entry in manifest.files:
                self._fetch(name, entry, target, temporary)
        return sum(entry.nbytes for entry in manifest.files)

    def _fetch(self, name: str, entry: FileEntry, target: DirectoryTier, temporary: str) -> None:
        if not isinstance(self.tier, DirectoryTier):
            path = target.folder / temporary / entry.name
            self.tier.fetch(name, entry.name, entry.nbytes, entry.digest, path)
            return
        with self.tier.open(name) as copy, copy.open(entry.name, entry.nbytes) as (source, size):
            found = target.write_chunks(temporary, entry.name, chunks_of(source, size, entry.name))
        if found != entry.digest:
            raise DamagedCopy(Damage(entry.name, f"digest {entry.digest}", found))

    def manifest(self, name: str) -> Manifest:
        """Return a copy's manifest; raises as :meth:`get` does."""
        with self.tier.open(name) as copy:
            reader: Any = copy
            return read_manifest(reader, name)[0]
