"""Copies in an object store (S3, GCS, Azure), in the format of a folder of copies.

Object stores cannot rename. A copy exists exactly when its COMMIT does, which is put last and only
where there is none yet, and no marker in ``quarantine/`` sets it aside. A folder without COMMIT is an
attempt that died or is still at work. For processes without an event loop of their own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from outlast.checkpoint.content.digest import file_digest, parse_commit
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, Manifest, parse_copy_name
from outlast.checkpoint.tiers.object_access import Failure, Limits, Store
from outlast.checkpoint.tiers.tier import require_size
from outlast.fields import Damage, DamagedCopy

_QUARANTINE = "quarantine"
_REASON = ".reason.json"
_LOOKS = 16  # small requests at a time


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

    def stream(self, file: str, nbytes: int | None, take: Callable[[memoryview], None]) -> None:
        """Give a file's content away in order, in parts; raises as :meth:`read` does."""
        size = self.require(file, nbytes)
        self._store.run(self._store.stream(f"{self._name}/{file}", size, take), size)


class ObjectTier:
    """Copies below a URL of an object store.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://account/container/prefix``, ``file://`` or ``memory://``.
        options: obstore's settings of the store and of its HTTP client; what is not named here comes
            from the environment, as the store's own tools have it.
        name: what messages call it.
        limits: how long to wait, and how much to have in flight.

    Raises:
        UsageError: obstore is not installed, the URL is none of these, or an option is unknown.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        name: str = "global",
        limits: Limits | None = None,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._store = Store(url, dict(options or {}), name, limits or Limits())

    def names(self) -> list[str]:
        """Return the names of all copies, sound or not."""

        async def look() -> list[str]:
            folders, marked = await asyncio.gather(self._copies(), self._markers())
            return await self._committed([name for name in folders if name not in marked])

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
        yield ObjectCopy(self._store, name, {file: meta["size"] for file, meta in found.items()})

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
        if {COMMIT, MANIFEST} & set(files):
            raise ValueError(f"{MANIFEST} and {COMMIT} of {name} are put by commit(), not by upload()")
        if COMMIT in self._store.run(self._listing(name)):
            found = "upload: the copy is committed already"
            raise self._store.error(Failure.CONFLICT, f"{name}/{COMMIT}", found)
        for file, content in files.items():
            self._store.run(
                self._store.put(f"{name}/{file}", memoryview(content).cast("B")), memoryview(content).nbytes
            )
        stored = self._store.run(self._listing(name))
        for file, content in files.items():
            size, nbytes = stored.get(file, {}).get("size"), memoryview(content).nbytes
            if size != nbytes:
                found = f"upload: {nbytes} bytes were sent, {'none' if size is None else size} are stored"
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
        if parse_commit(commit) != file_digest(manifest):
            raise DamagedCopy(Damage(COMMIT, f"digest {file_digest(manifest)}", parse_commit(commit)))
        content = Manifest.from_json(manifest)
        if (content.step, content.generation) != parse_copy_name(name):
            written = f"step {content.step} of generation {content.generation}"
            raise DamagedCopy(Damage(MANIFEST, f"that of {name}", f"that of {written}"))
        with self.open(name) as copy:
            for entry in content.needed():
                copy.require(entry.name, entry.nbytes)
        self._store.run(self._put_once(f"{name}/{MANIFEST}", manifest))
        self._store.run(self._put_once(f"{name}/{COMMIT}", commit))

    def discard(self, name: str) -> None:
        """Remove a copy, its COMMIT first, so that what a death leaves is no copy; gone already is fine."""

        async def remove() -> None:
            files = await self._listing(name)
            if COMMIT in files:
                await self._store.delete([f"{name}/{COMMIT}"])
            await self._store.delete([f"{name}/{file}" for file in files if file != COMMIT])
            if name in await self._markers():
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

    async def _copies(self) -> list[str]:
        folders, _ = await self._store.under()
        return sorted(name for name in folders if parse_copy_name(name) is not None)

    async def _markers(self) -> list[str]:
        """Return the names of the copies that are set aside."""
        _, files = await self._store.under(_QUARANTINE)
        names = (file.removesuffix(_REASON) for file in files if file.endswith(_REASON))
        return sorted(name for name in names if parse_copy_name(name) is not None)

    async def _committed(self, names: list[str]) -> list[str]:
        at_once = asyncio.Semaphore(_LOOKS)

        async def look(name: str) -> bool:
            async with at_once:
                return await self._store.exists(f"{name}/{COMMIT}")

        there = await asyncio.gather(*map(look, names))
        return [name for name, committed in zip(names, there, strict=True) if committed]

    async def _listing(self, name: str) -> dict[str, Any]:
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
