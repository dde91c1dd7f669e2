"""What is done with the bytes of copies: digests in memory, files on disk, uploads to the global tier.

On disk one task is done at a time, in a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import chunk_digests, ends_of, row_of
from outlast.checkpoint.content.rank_file import contents_of
from outlast.checkpoint.policy.joint import Complete
from outlast.checkpoint.policy.manifest import (
    CHUNK_BYTES,
    COMMIT,
    MANIFEST,
    Manifest,
    Names,
    Row,
    alike_files,
    place_of,
    rank_files,
    runs_of,
    some,
)
from outlast.checkpoint.policy.resolve import removals
from outlast.checkpoint.policy.table import place_in_meshes
from outlast.checkpoint.tiers import remote
from outlast.checkpoint.tiers.inventory import holds, manifest_of, read_manifest, require_bytes
from outlast.checkpoint.tiers.memory_folder import Members, Stage
from outlast.checkpoint.tiers.remote import content_of
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.errors import CheckpointError, CheckpointMismatch, OutlastError, StaleGeneration
from outlast.fields import DamagedCopy, Fields
from outlast.files import is_outage, write_whole

_PART_BYTES = 32 * CHUNK_BYTES  # a smaller file is digested by one thread
_SHARE = 4  # of the processors that ranks leave, one in so many is for the writer while they train
Staged = Mapping[int, dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """Something that reads or writes a copy.

    Args:
        kind: what is done: "write", "part", "commit", "verify", "send" or "upload".
        name: of the copy.
        job: does it.
    """

    kind: str
    name: str
    job: Callable[[], Any]


@dataclass(frozen=True)
class Done:
    """How a task went.

    Args:
        task: which.
        value: what its job returned.
        error: why it did not; empty: it did.
        outage: the file system refused, and may not refuse a while later.
        stale: this node may not commit; the job may have gone on without it.
    """

    task: Task
    value: Any = None
    error: str = ""
    outage: bool = False
    stale: bool = False


class Tasks:
    """Does one task after another in a thread, which no exception of a task ends.

    Args:
        name: of the thread.
        done: called in the thread after each task.
    """

    def __init__(self, name: str, done: Callable[[], None]) -> None:
        self.done = done
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self.task: Task | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread now; otherwise the first task starts it.

        Raises:
            RuntimeError: there are too many.
        """
        if self._thread.ident is None:
            self._thread.start()

    @property
    def writes(self) -> str:
        """The name of the copy that is being written or committed, "" when none is."""
        return self.task.name if self.task is not None and self.task.kind != "verify" else ""

    def close(self) -> None:
        """End the thread once it has done its task."""
        self._tasks.put(None)

    def begin(self, task: Task) -> None:
        """Begin with a task; only when :attr:`task` is None."""
        self.start()
        self.task = task
        self._tasks.put(task)

    def result(self) -> Done | None:
        """Return how the task went once it is over; then the next one may begin."""
        try:
            done = self._results.get_nowait()
        except queue.Empty:
            return None
        self.task = None
        return done

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                done = Done(task, task.job())
            except Exception as error:  # noqa: BLE001 - the committer reports it, and the next task may go well
                known = isinstance(error, (OSError, OutlastError))
                words = str(error) if known else f"{type(error).__name__}: {error}"
                stale = isinstance(error, StaleGeneration)
                done = Done(task, error=words, outage=is_outage(error), stale=stale)
            self._results.put(done)
            self.done()


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
    ranks = [rank_files(rank, record["world_size"]) for rank, record in sorted(staged.items())]
    own = [_seal(stage, folder, names, threads) for names in ranks]
    return {
        "own": tuple(row for row, _ in own),
        "shared": tuple(row for row, _ in files),
        "contents": runs_of([contents_of(fields.source, fields.values) for _, fields in own]),
    }


def _seal(stage: Stage, folder: Path, names: Names, threads: int) -> tuple[Row, Fields]:
    """Digest three files; return their row, and the fields of the document."""
    view = content_of(folder / names.tensors)
    digests = digests_of(view, threads)
    (folder / names.digests).write_bytes(digests)
    document = stage.read(folder / names.document)
    fields = Fields.parse(names.document, document)
    return row_of(len(view), digests, document, *place_in_meshes(fields)), fields


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


def link_or_write(
    name: str,
    source: DirectoryTier,
    target: DirectoryTier,
    temporary: str,
    contents: Mapping[str, memoryview],
) -> None:
    """Bring files of a copy to a temporary folder: tensors that are staged on its disk by links.

    A linked file does not become a buffer again; see :meth:`Stage.give_up`.

    Raises:
        OSError: the file system refused.
    """
    linked = {
        file
        for file in contents
        if not source.private
        and file.endswith(".safetensors")
        and target.link(temporary, file, source.folder / name / file)
    }
    target.write(temporary, {file: one for file, one in contents.items() if file not in linked})


def commit_parts(source: DirectoryTier, target: DirectoryTier, complete: Complete) -> Complete:
    """Commit a copy that all nodes have written their files of; return what they have written.

    Args:
        source: the tier in memory, which has this node's part.
        target: the durable tier.
        complete: what the nodes have written.

    Raises:
        CheckpointError: files are missing.
        DamagedCopy: manifest or COMMIT in the source are not as they were written.
        OSError: the file system refused.
    """
    name = complete.name
    manifest, _ = manifest_of(source, name)
    if name in target.names():
        require_same(name, source, target)
    else:
        whole = manifest.joined(complete.own, complete.shared)
        temporary = target.begin(name, manifest.session)
        for file in (MANIFEST, COMMIT):
            (target.folder / temporary / file).unlink(missing_ok=True)
        target.write(temporary, ends_of(whole))
        target.commit(temporary, name)
    return complete


def require_same(name: str, source: DirectoryTier, target: DirectoryTier) -> None:
    """Check that what is in a tier under the name of a copy is that copy.

    Raises:
        CheckpointError: it is another one.
        DamagedCopy: manifest or COMMIT are not as they were written.
        OSError: the file system refused.
    """
    manifests = []
    for tier in (source, target):
        manifest, digest = manifest_of(tier, name)
        manifests.append(manifest.session or digest)
    if manifests[0] != manifests[1]:
        raise CheckpointError(
            f"{target.folder}: another {name} is there (manifest {manifests[1]}, {manifests[0]} expected);"
            " nothing was written"
        )


class Ahead:
    """A copy on its way to disk, whose tensors are written while they are still being digested.

    Args:
        name: of the copy.
        folder: where its files are by now.
        files: those of its ranks, and those that all ranks share.
        target: the durable tier.

    Raises:
        OSError: the tensors cannot be read.
    """

    def __init__(self, name: str, folder: Path, files: Sequence[Names], target: DirectoryTier) -> None:
        self._name = name
        self._target = target
        self._small = [file for one in files for file in (one.digests, one.document)]
        self._sealed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._tensors = {file: content_of(folder / file) for file, *_ in files}

    def settle(self, sealed: bool) -> None:
        """Set whether the copy in memory is complete; called once, at any time."""
        self._sealed.put(sealed)

    def write(self, source: DirectoryTier) -> Manifest | None:
        """Write and commit; return the copy's manifest; None: it was not completed in memory, or is there.

        Args:
            source: the tier in memory, which has the rest of it once it is sealed.

        Raises:
            DamagedCopy: manifest or COMMIT in the source are not as they were written.
            OSError: the file system refused; nothing of the copy is left in the target.
        """
        if self._name in self._target.names():  # :func:`write_copy` compares it
            return None
        temporary = self._target.begin(self._name)
        try:
            link_or_write(self._name, source, self._target, temporary, self._tensors)
            if not self._sealed.get():
                self._target.discard(temporary)
                return None
            with source.open(self._name) as folder:
                manifest, _ = read_manifest(folder, self._name)
                rest = {file: folder.read(file) for file in (*self._small, MANIFEST, COMMIT)}
            self._target.write(temporary, rest)
            self._target.commit(temporary, self._name)
        except (OSError, OutlastError):
            with contextlib.suppress(OSError):
                self._target.discard(temporary)
            raise
        return manifest


def names_of(ranks: Iterable[int], world_size: int, shared: int) -> list[Names]:
    """Return the names of the files of ranks, and of those that all ranks share."""
    own = [rank_files(rank, world_size) for rank in ranks]
    return own + [alike_files(number, shared) for number in range(shared)]


def write_copy(
    name: str, source: DirectoryTier, target: DirectoryTier, found: bool, place: tuple[int, int] | None = None
) -> Manifest:
    """Copy one copy from tier to tier, byte for byte, and commit it; return its manifest.

    If it is there already, it stays as it is.

    Args:
        name: of the copy.
        source: the tier in memory.
        target: the durable tier.
        found: an earlier writer made the copy. Its bytes are compared with their digests, because retention
            may remove an older, sound copy once this one is on disk.
        place: number of this node, and how many there are, where all write into one folder, which the leading
            writer commits. Of the files that all ranks share, which every node has, each node writes some.
            A file that is there as it should be stays: the leading writer may count on it already.

    Raises:
        CheckpointError: another copy has that name.
        DamagedCopy: a byte in the source is not as it was written.
        OSError: the file system refused; nothing of a copy that this node writes alone is left in the target.
    """
    with source.open(name) as here:
        manifest, _ = read_manifest(here, name)
        if name in target.names():
            require_same(name, source, target)
            return manifest
        if place is None:
            for entry in manifest.needed() if found else ():
                require_bytes(here, entry)
            files = names_of(manifest.ranks, manifest.world_size, len(manifest.shared))
            ahead = Ahead(name, source.folder / name, files, target)
            ahead.settle(True)
            return ahead.write(source) or manifest
        shared = range(place[0], len(manifest.shared), place[1])
        rows = *map(manifest.of_rank, manifest.ranks), *map(manifest.of_shared, shared)
        temporary = target.begin(name, manifest.session)
        contents = {}
        with target.open(temporary) as there:
            for entry in itertools.chain(*rows):
                if holds(there, entry):  # a writer that was here before may have reported it
                    target.sync(temporary, entry.name)
                    continue
                if found:
                    require_bytes(here, entry)
                (target.folder / temporary / entry.name).unlink(missing_ok=True)
                contents[entry.name] = content_of(source.folder / name / entry.name)
    link_or_write(name, source, target, temporary, contents)
    return manifest


class Uploads:
    """Brings some of the copies on disk to the global tier.

    Args:
        members: have the URL, and how many copies go there; the leading node uploads.
        source: the durable folder.
        note: takes a sentence for the event log.
        ring: called when there is something to look at.
    """

    def __init__(
        self,
        members: Members,
        source: DirectoryTier,
        note: Callable[[str], None],
        ring: Callable[[], None],
    ) -> None:
        self._members = members
        self._url = members.global_url if members.leads else ""
        self._source = source
        self._note = note
        self._tasks = Tasks("uploads", ring)
        self._seen = 0
        self.newest = -1  # step of the newest copy that arrived
        self._next = ""
        self._began = 0.0

    @property
    def owed(self) -> frozenset[str]:
        """The copies that must stay on disk: one is being uploaded, or is the next."""
        task = self._tasks.task
        return frozenset(filter(None, (self._next, task.name if task is not None else "")))

    def offer(self, name: str, last: bool = False) -> None:
        """Take in a new copy on disk.

        Args:
            name: of the copy.
            last: it is the last one of the job, so it goes there in any case.
        """
        due = last or self._seen % self._members.global_every == 0
        self._seen += 0 if last else 1
        if not (self._url and due) or name in self.owed:
            return
        if self._next:
            self._note(f"{self._next} did not go to the global tier: it takes less than is to go there")
        self._next = name

    def close(self) -> None:
        """End once the upload under way is done."""
        self._tasks.close()

    def look(self, avoid: tuple[str, ...]) -> None:
        """Record what was done, and begin the next upload."""
        done = self._tasks.result()
        if done is not None and done.error:
            self._note(f"{done.task.name} did not go to the global tier {self._url}: {done.error}")
        elif done is not None:
            seconds = time.monotonic() - self._began
            self.newest = max(self.newest, place_of(done.task.name)[0])
            self._note(
                f"{done.task.name} is in the global tier {self._url}: {done.value} bytes in {seconds:.1f} s"
            )
        if self._tasks.task is None and self._next:
            name, self._next, self._began = self._next, "", time.monotonic()
            self._tasks.begin(Task("upload", name, partial(self._upload, name, avoid)))

    def _upload(self, name: str, avoid: tuple[str, ...]) -> int:
        members = self._members
        tier = remote.tier_of(self._url, members.global_options)
        nbytes = remote.put(tier, name, self._source)
        ours: dict[str, str | None] = {}
        for one in tier.names():
            with contextlib.suppress(DamagedCopy, CheckpointMismatch):
                manifest, _ = manifest_of(tier, one)
                if manifest.run_id == members.run_id:  # retention neither counts nor removes another's
                    ours[one] = manifest.began
        for removal in removals(ours, members.keep_last_n, {name}, avoid, members.keep_ancestors):
            tier.discard(removal.name)
        return nbytes
