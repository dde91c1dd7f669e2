"""The global tier: whole copies go there and come back, verified; in a folder, or in an object store.

Object stores (S3, GCS, Azure) have copies in the format of a folder of copies, and cannot rename. A copy
exists there exactly when its COMMIT does, which is put last and only where there is none yet, and no marker
in ``quarantine/`` sets it aside. A folder without COMMIT is an attempt that died or is still at work. For
processes without an event loop of their own.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from outlast import plugins
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, parse_copy_name
from outlast.checkpoint.tiers.inventory import parse_ends, read_manifest
from outlast.checkpoint.tiers.object_access import Failure, Limits, Store, connect
from outlast.checkpoint.tiers.tier import DirectoryTier, Take, require_size
from outlast.fields import Damage, DamagedCopy
from outlast.ports import Tier

_QUARANTINE = "quarantine"
_REASON = ".reason.json"
_LOOKS = 16  # small requests at a time
_SWITCHES: Mapping[str, str | bool] = {"true": True, "false": False}


def tier_of(url: str, options: Mapping[str, str]) -> Tier:
    """Return the tier of a URL: a folder, what is registered for its scheme, or an object store.

    Args:
        url: of an object store or a registered tier, or the absolute path of a folder.
        options: of the tier.

    Raises:
        UsageError: the URL is none that is known, or what it needs is not installed.
    """
    scheme, _, _ = url.partition("://")
    if url.startswith("/"):
        return DirectoryTier(url, "global")
    if scheme in plugins.names(plugins.TIERS):
        registered: Tier = plugins.load(plugins.TIERS, scheme)(url, options)
        return registered
    return ObjectTier(url, _switched(options))


def check(url: str, options: Mapping[str, str]) -> None:
    """Refuse what :func:`tier_of` would refuse; no tier is made, and no store is asked.

    Raises:
        UsageError: the URL is none that is known, obstore is not installed, or does not know an option.
    """
    scheme, _, _ = url.partition("://")
    if not url.startswith("/") and scheme not in plugins.names(plugins.TIERS):
        # obstore makes the folder of a file URL at once.
        connect("global", "memory:///" if scheme == "file" else url, _switched(options), Limits())


def _switched(options: Mapping[str, str]) -> dict[str, str | bool]:
    return {key: _SWITCHES.get(text, text) for key, text in options.items()}


def put(tier: Tier, name: str, source: DirectoryTier) -> int:
    """Bring a whole copy to a tier and return its size; a copy of that name in the tier stays as it is.

    Raises:
        DamagedCopy: manifest or COMMIT are not as they were written.
        OSError: it cannot be read, or the store did not answer, or refused.
    """
    if name in tier.names():
        return 0
    with source.open(name) as folder:
        manifest, _ = read_manifest(folder, name)
        ends = {file: folder.read(file) for file in (MANIFEST, COMMIT)}
        place = source.folder / name
        tier.add(name, {entry.name: content_of(place / entry.name) for entry in manifest.needed()}, ends)
    return manifest.nbytes


def get(tier: Tier, name: str, target: DirectoryTier) -> int:
    """Bring a copy into a folder of copies and return its size; every byte is compared with its digest.

    Raises:
        DamagedCopy: it is not as it was committed; nothing of it stays in the folder.
        OSError: the store did not answer, or refused, or the file system did.
    """
    with target.writing(name) as temporary, tier.open(name) as copy:
        target.write(temporary, {file: copy.read(file) for file in (MANIFEST, COMMIT)})
        with target.open(temporary) as folder:
            manifest, _ = read_manifest(folder, name)
        for entry in manifest.needed():
            found = target.receive(temporary, entry.name, partial(copy.stream, entry.name, entry.nbytes))
            if found != entry.digest:
                raise DamagedCopy(Damage(entry.name, f"digest {entry.digest}", found))
    return manifest.nbytes


def content_of(path: Path) -> memoryview:
    """Return a file's content without copying it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")


class ObjectCopy:
    """An open copy: its files as they were listed when it was opened."""

    def __init__(self, store: Store, name: str, sizes: Mapping[str, int]) -> None:
        self._store = store
        self._name = name
        self._sizes = sizes

    def require(self, file: str, nbytes: int | None) -> int:
        """Check that a file is there with its size, and return the size.

        Raises:
            DamagedCopy: it is missing, or of another size.
        """
        size = self._sizes.get(file)
        if size is None:
            raise DamagedCopy(Damage(file, "an object", "none"))
        if nbytes is not None and size != nbytes:
            raise DamagedCopy(Damage(file, f"{nbytes} bytes", f"{size} bytes"))
        return size

    def read(self, file: str, nbytes: int | None = None) -> bytes:
        """Return a file's whole content.

        Raises:
            DamagedCopy: it is missing, or of another size.
            ObjectStoreError: the store did not answer, or refused.
        """
        require_size(file, self._sizes.get(file, 0))
        parts: list[bytes] = []
        self.stream(file, nbytes, lambda part: parts.append(bytes(part)))
        return b"".join(parts)

    def stream(self, file: str, nbytes: int | None, take: Take) -> None:
        """Pass a file's content on in order, in parts; raises as :meth:`read` does."""
        size = self.require(file, nbytes)
        self._store.run(self._store.stream(f"{self._name}/{file}", size, take), size)


class ObjectTier:
    """Copies below a URL of an object store.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://account/container/prefix``, ``file://`` or ``memory://``.
        options: obstore's settings of the store and of its HTTP client; what is not named here comes
            from the environment, as the store's own tools have it.
        limits: how long to wait, and how much to have in flight.

    Raises:
        UsageError: obstore is not installed, the URL is none of these, or an option is unknown.
    """

    name = "global"

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, limits: Limits | None = None
    ) -> None:
        self._store = Store(url, options or {}, self.name, limits or Limits())

    def names(self) -> list[str]:
        """Return the names of all copies, sound or not."""

        async def look() -> list[str]:
            folders, marked = await asyncio.gather(self._store.folders(), self._store.listing(_QUARANTINE))
            names = [name for name in sorted(folders) if parse_copy_name(name) is not None]
            at_once = asyncio.Semaphore(_LOOKS)

            async def committed(name: str) -> bool:
                async with at_once:
                    return await self._store.exists(f"{name}/{COMMIT}")

            there = [name for name in names if f"{name}{_REASON}" not in marked]
            found = await asyncio.gather(*map(committed, there))
            return [name for name, is_committed in zip(there, found, strict=True) if is_committed]

        return self._store.run(look())

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectCopy]:
        """Open a copy for reading, also one that is set aside or was never committed.

        Raises:
            ObjectStoreError: the store refused, or nothing has the name.
        """
        found = self._store.run(self._listing(name))
        if not found:
            raise self._store.error(Failure.MISSING, name, "open: there is no such copy")
        yield ObjectCopy(self._store, name, found)

    def add(self, name: str, *groups: Mapping[str, memoryview | bytes]) -> None:
        """Put a whole copy; see :meth:`upload` and :meth:`commit`."""
        files = {file: content for group in groups for file, content in group.items()}
        manifest, commit = (bytes(files.pop(file)) for file in (MANIFEST, COMMIT))
        self.upload(name, files)
        self.commit(name, manifest, commit)

    def upload(self, name: str, files: Mapping[str, memoryview | bytes]) -> None:
        """Put files of a copy that is not committed yet; the same once more is no error.

        Large files go in parts, some at a time; their bytes are not copied. An upload that dies may
        leave parts that no listing shows; the bucket's lifecycle rule has to remove them.

        Raises:
            ObjectStoreError: the copy is committed already, the store refused, or holds another size.
        """
        if COMMIT in self._store.run(self._listing(name)):
            found = "upload: the copy is committed already"
            raise self._store.error(Failure.CONFLICT, f"{name}/{COMMIT}", found)
        views = {file: memoryview(content).cast("B") for file, content in files.items()}
        for file, content in views.items():
            self._store.run(self._store.put(f"{name}/{file}", content), content.nbytes)
        stored = self._store.run(self._listing(name))
        for file, content in views.items():
            if stored.get(file) != content.nbytes:
                found = f"upload: {content.nbytes} bytes were sent, {stored.get(file, 'none')} are stored"
                raise self._store.error(Failure.FAILED, f"{name}/{file}", found)

    def commit(self, name: str, manifest: bytes, commit: bytes) -> None:
        """Put MANIFEST, then COMMIT: from here on the copy exists; the same once more is no error.

        Args:
            name: of the copy.
            manifest: content of MANIFEST.json.
            commit: content of COMMIT.

        Raises:
            DamagedCopy: a file that the manifest lists is not there with its size, or the three
                do not belong together; nothing was put.
            ObjectStoreError: another writer has put other content under this name, or the store
                refused; the copy may exist all the same when COMMIT itself got no answer.
        """
        with self.open(name) as copy:
            for entry in parse_ends(name, commit, manifest)[0].needed():
                copy.require(entry.name, entry.nbytes)
        self._store.run(self._put_once(f"{name}/{MANIFEST}", manifest))
        self._store.run(self._put_once(f"{name}/{COMMIT}", commit))

    def discard(self, name: str) -> None:
        """Remove a copy, its COMMIT first, so that what a death leaves is no copy; gone already is fine."""

        async def remove() -> None:
            files = await self._listing(name)
            await self._store.delete([f"{name}/{file}" for file in files if file == COMMIT])
            await self._store.delete([f"{name}/{file}" for file in files if file != COMMIT])
            if f"{name}{_REASON}" in await self._store.listing(_QUARANTINE):
                await self._store.delete([_marker(name)])

        self._store.run(remove())

    def quarantine(self, name: str, reason: dict[str, Any]) -> str:
        """Set a copy aside by a marker with the reason, and return its name; its bytes stay where they are.

        A copy that is set aside already keeps its first reason.

        Raises:
            ObjectStoreError: the store refused, or nothing has the name.
        """
        with self.open(name):
            content = json.dumps(reason, indent=1).encode() + b"\n"
            self._store.run(self._store.create(_marker(name), content))
        return name

    async def _listing(self, name: str) -> dict[str, int]:
        if parse_copy_name(name) is None:
            raise ValueError(f"{name!r} is not the name of a copy")
        return await self._store.listing(name)

    async def _put_once(self, path: str, content: bytes) -> None:
        """Put what is not there; equal content is fine, for an earlier attempt may have got so far."""
        if await self._store.create(path, content):
            return
        found = await self._store.content(path)
        if found != content:
            what = f"put: another writer has put other content ({len(found)} bytes, {len(content)} expected)"
            raise self._store.error(Failure.CONFLICT, path, what)


def _marker(name: str) -> str:
    return f"{_QUARANTINE}/{name}{_REASON}"
