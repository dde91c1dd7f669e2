"""What the checkpoint writer does in one generation: it turns what its ranks staged into committed copies.

Digests are taken of the staged bytes, then documents, manifest and COMMIT are written. All state is in the
folders: a writer that starts later finds what is complete, finishes it, and drops what never will be.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
    in_training,
    place_of,
    rank_files,
    runs_of,
    some,
)
from outlast.checkpoint.policy.resolve import Copy, CopyState
from outlast.checkpoint.policy.table import place_in_meshes
from outlast.checkpoint.replica.frames import Throttle
from outlast.checkpoint.tiers.inventory import Pruner, read_manifest, verify
from outlast.checkpoint.tiers.memory_folder import (
    DamagedRecord,
    Members,
    Stage,
    Status,
    alike_pool,
    staged_file,
    write_whole,
)
from outlast.checkpoint.tiers.remote import content_of
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer.durable import Ahead, Done, Task, Tasks, Uploads, names_of, write_copy
from outlast.errors import CheckpointError, OutlastError
from outlast.fields import Fields
from outlast.ipc.limits import processors
from outlast.recovery.policy.events import Note, Quarantined, Record, Saved, SaveLost

_PART_BYTES = 32 * CHUNK_BYTES  # a smaller file is digested by one thread
NICENESS = 10  # NVRx, AsyncCallsQueue(cpu_priority=10)
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
    with content_of(folder / names.tensors) as view:
        nbytes = len(view)
        digests = digests_of(view, threads)
    (folder / names.digests).write_bytes(digests)
    document = stage.read(folder / names.document)
    fields = Fields.parse(names.document, document)
    return _Sealed(names, row_of(nbytes, digests, document, *place_in_meshes(fields)), fields)


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


_TRY_EVERY = 2.0  # seconds between two tries to write the last copy
_POOLED = 8  # buffers of a rank that are kept for later use


def age(name: str) -> tuple[int, int]:
    """Order copies by when they were made: a newer generation may have begun again at an older step."""
    return place_of(name)[::-1]


def _told_apart(record: dict[str, Any], session: str) -> dict[str, Any]:
    """Return the additional entries in the manifest of a part."""
    ranks = tuple(sorted(record["ranks"]))
    return {"session": session, "part": ranks} if len(ranks) < record["world_size"] else {}


class CopyCommitter:
    """Keeps the copies of one generation, and what it found of earlier ones.

    Args:
        members: who the ranks are.
        disk: works on the durable tier; it may still be at work for the generation before.
        status: how far the writer is.
        sink: takes records.
        lease: file that says whether this node may commit; "" where it is the only one.
    """

    def __init__(
        self,
        members: Members,
        disk: Tasks,
        status: Status,
        sink: Callable[[Record], None],
        lease: str = "",
    ) -> None:
        self.members = members
        self.status = replace(status, durable_step=-1, lost_step=-1)
        self._disk = disk
        self._unverified: list[str] = []  # on disk, of an earlier generation
        self._sink = sink
        self._stage = Stage(members.stage, members.private)
        self._hurry = threading.Event()  # ranks are about to end, or have ended
        hold = Throttle(members.disk_bandwidth, wait=self._hurry.wait).hold
        self._tier = DirectoryTier(members.tier, lease=lease, linked=not members.training, hold=hold)
        self._pruner = Pruner(self._tier, members.run_id, members.keep_last_n, self._record)
        self._wanted: dict[str, dict[str, Any]] = {}  # copies owed to the disk, with a rank's record
        self.succeeded = False  # the writer of another owner waits for the end of this one
        self._over = False
        self._over_at = self._next_try = 0.0  # when it was over; before which no write begins
        self._failing_since = time.monotonic() - status.failing
        self._flushed: set[str] = set()
        self._untidy = False
        self._processors = processors()
        self._niceness = -1  # of the session; as the keeper of an earlier generation left it
        self._uploads = self._open_uploads()
        self._stage.make()
        self._found = frozenset(self._stage.tier.names())  # in memory, of an earlier writer
        self._sweep_disk()  # before a staged state is completed, which is written while it is digested
        for name, session in self._stage.stagings():
            if not self._take(name, session) and session != members.session:
                self._give_up(self._stage.staging(name, session))
        for path in self._stage.staged.glob(".retired-*"):
            shutil.rmtree(path, ignore_errors=True)
        self._parts = self._parts_left()
        self._recall()
        ours = [place[0] for name in self._tier.names() if (place := place_of(name))[1] == members.generation]
        self.status = replace(self.status, session=members.session, durable_step=max(ours, default=-1))

    def _parts_left(self) -> frozenset[str]:
        """Return the copies that several nodes made, where this one is alone now: it has a part of each."""
        found: set[str] = set()
        if self.members.together is not None:
            return frozenset()
        for name in self._stage.tier.names():
            with contextlib.suppress(OutlastError, OSError), self._stage.tier.open(name) as folder:
                if read_manifest(folder, name)[0].part:
                    found.add(name)
        return frozenset(found)

    def _open_uploads(self) -> Uploads | None:
        if not (self.members.global_url and self.members.leads):
            return None
        return Uploads(
            self.members, self._tier, lambda text: self._record(Note, reason=text), self._disk.done
        )

    _last = 1  # copies in memory that go to disk when the owner ends

    @property
    def idle(self) -> bool:
        """Whether disk and global tier have all copies that are due."""
        return (
            not self._wanted and not self._disk.writes and (self._uploads is None or not self._uploads.owed)
        )

    @property
    def incomplete(self) -> bool:
        """Whether some ranks of this session have staged a state that others have not completed yet."""
        current = (one for one in self._stage.stagings() if one[1] == self.members.session)
        return any(self._any_record(self._stage.staging(*one)) is not None for one in current)

    @property
    def stage(self) -> Stage:
        """Where buffers and the tiers in memory are."""
        return self._stage

    def look(self) -> None:
        """Commit what is complete, write what is due, remove what is not needed."""
        self._beside_training()
        self._take_complete()
        self._grant()
        self._settle()
        if self._uploads is not None:
            self._uploads.look(self.members.avoid)
            if self._uploads.newest > self.status.global_step:
                self.status = replace(self.status, global_step=self._uploads.newest)
        names = sorted(self._stage.tier.names(), key=age)
        kept = self._kept(names)
        for name in names:
            if name not in kept and name not in self._wanted and name != self._disk.writes:
                self._give_up(self._stage.tier.folder / name)
        self._drop_replicas()

    def _drop_replicas(self) -> None:
        """Remove the parts of other nodes that no load of this generation needs."""
        if self.members.loaded is None:  # ranks may be bringing parts here
            return
        wanted = self._still_loadable(self._stage.tier.names())
        for tier in self._stage.replica_tiers():
            left = [name for name in tier.names() if name not in wanted]
            with contextlib.suppress(OSError):
                for name in left:
                    tier.discard(name)
                if not tier.names():
                    tier.folder.rmdir()
                    self._stage.replicas.rmdir()

    def _still_loadable(self, names: Collection[str]) -> Collection[str]:
        """Return the copies of several nodes that may still be loaded: none once this generation has its own.

        Args:
            names: of all copies in memory.
        """
        generation, loaded = self.members.generation, self.members.loaded
        if any(place_of(name)[1] == generation for name in names):
            return ()
        others = [name for tier in self._stage.replica_tiers() for name in tier.names()]
        return {name for name in (*self._parts, *others) if loaded in (None, name)}

    def _grant(self) -> None:
        """Order a copy to disk that was first staged for memory only: a step is staged once."""
        for name, session, wish in self._stage.granted():
            record = self._wanted.get(name) or self._any_record(self._stage.tier.folder / name)
            if name in self._on_disk():
                if wish["urgent"] and self._uploads is not None and self._uploads.newest < wish["step"]:
                    self._uploads.offer(name, last=True)
            elif record is None and session == self.members.session:
                self._lost(wish["step"], "it was aborted before it was in memory", {0: wish})
            elif record is not None and (name in self._wanted or not record["durable"]):
                self._take_urgency(wish)
                self._stage.amend(self._stage.tier.folder / name, wish)
                self._wanted[name] = {**record, **wish}

    def _kept(self, names: list[str]) -> Collection[str]:
        """Return which copies in memory stay, of all, the newest last."""
        return {*names[-1:], *self._still_loadable(names)}

    def keep_for_later(self) -> bool:
        """Say whether memory must stay: neither its newest copy nor a later generation's is on disk."""
        for name in sorted(self._stage.tier.names(), key=age)[-1:]:
            generation, committed = place_of(name)[1], self._tier.names()
            if name not in committed and not any(place_of(other)[1] > generation for other in committed):
                reason = (
                    f"{name} could not be brought to disk and stays in memory ({self._stage.tier.folder}):"
                    " the same run started again on this node goes on from it, until the node is restarted"
                )
                self._record(Note, reason=reason)
                return True
        return False

    def _take_complete(self) -> None:
        """Commit what this session has staged; ranks of an older one have no say any more."""
        current = [name for name, session in self._stage.stagings() if session == self.members.session]
        for place, name in enumerate(current):
            if not self._take(name, self.members.session):
                self._leave_overtaken(name, current[place + 1 :])

    def _leave_overtaken(self, name: str, later: list[str]) -> None:
        """Drop a state that a rank cannot complete, because it has completed a later one."""
        folder = self._stage.staging(name, self.members.session)
        first = self._any_record(folder)
        if first is None:
            return
        files = {rank: staged_file(rank, first["world_size"]) for rank in first["ranks"]}
        missing = [rank for rank, file in files.items() if not (folder / file).exists()]
        newer = [self._stage.staging(one, self.members.session) for one in later]
        gone = [rank for rank in missing if any((one / files[rank]).exists() for one in newer)]
        if gone:
            if first["durable"]:
                why = f"rank {some(gone)} has staged a later step, and not this one"
                self._lost(first["step"], why, {0: first})
            self._give_up(folder)

    def finish(self) -> None:
        """Order the newest copy in memory to disk, unless all of it is there."""
        if not self._over:
            self._over, self._over_at = True, time.monotonic()
            self._hurry.set()
        self._take_complete()
        for name in self._newest():
            record = self._any_record(self._stage.tier.folder / name)
            if record is None or name in self._flushed:
                continue
            if name in self._tier.names():
                self._put_away(verify(self._tier, name, self.members.ranks))
            there = name in self._tier.names()
            self._flushed.add(name)
            if not there:
                why = "the newest in memory when the job ended"
                self._wanted.setdefault(name, {**record, "why": why, "blocked": 0.0, "waits_since": None})
            elif self._uploads is not None:
                self._uploads.offer(name, last=True)

    def flush(self, why: str) -> None:
        """Order the newest copy in memory to disk while the ranks still run."""
        self._hurry.set()
        self._take_complete()
        for name in self._newest():
            record = self._any_record(self._stage.tier.folder / name)
            if record is not None and name not in self._on_disk():
                self._wanted.setdefault(name, {**record, "why": why, "blocked": 0.0, "waits_since": None})

    def _on_disk(self) -> Collection[str]:
        """Return the copies on disk; none while the disk does not answer: a write looks again."""
        try:
            return self._tier.names()
        except OSError:
            return ()

    def _newest(self) -> list[str]:
        """Return the copies in memory that may have to go to disk when the job ends."""
        names = set(self._stage.tier.names()) - self._parts
        return sorted(names, key=age)[-self._last :]

    def _recall(self) -> None:
        """Find the copies in memory that are due on disk."""
        there, names = self._tier.names(), self._stage.tier.names()
        self._unverified = sorted(there, key=place_of)[-1:]
        for name in names:
            record = self._any_record(self._stage.tier.folder / name)
            if record is not None and record["durable"] and name not in there and name not in self._parts:
                self._wanted.setdefault(name, record)
        newest = max((place_of(name)[0] for name in names), default=-1)
        self.status = replace(self.status, memory_step=newest)

    def _sweep_disk(self) -> None:
        """Remove what earlier attempts began on disk, unless one is still under way."""
        left = [] if self._disk.writes else self._sweep()
        if left:
            self._record(Note, reason=f"files of earlier attempts cannot be removed: {', '.join(left)}")

    def _sweep(self) -> list[str]:
        return self._tier.sweep()

    def close(self) -> None:
        """End before the keeper of the next generation starts, which waits for what is being written."""
        self._hurry.set()

    def _any_record(self, folder: Path) -> dict[str, Any] | None:
        with contextlib.suppress(DamagedRecord):
            return self._first_record(folder)
        return None

    def _first_record(self, folder: Path) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError):  # somebody removes the memory folder
            for path in folder.glob("*.staged"):
                rank, world = int(path.name[5:10]), int(path.name[14:19])
                return self._stage.record(folder, rank, world)
        return None

    def _take(self, name: str, session: str) -> bool:
        """Commit a staged copy to the memory tier if it is complete; return whether it was, or is lost."""
        folder = self._stage.staging(name, session)
        try:
            staged = self._staged(folder)
        except DamagedRecord as error:
            self._lost(place_of(name)[0], str(error), {0: {"durable": True}})
            self._give_up(folder)
            return True
        if not staged:
            return False
        first = staged[min(staged)]
        errors = [f"rank {rank}: {one['error']}" for rank, one in staged.items() if one["error"]]
        if (self._stage.tier.folder / name).exists():
            self._give_up(folder)
        elif errors:
            self._lost(first["step"], "; ".join(errors), staged)
            self._give_up(folder)
        else:
            try:
                self._commit(name, session, staged)
            except (OSError, OutlastError) as error:
                self._lost(first["step"], f"{self._stage.root}: {error}", staged)
                self._give_up(folder)
        return True

    def _staged(self, folder: Path) -> Staged:
        """Return the records of all ranks of this node; none while one is missing.

        Raises:
            DamagedRecord: one is not as its rank left it.
        """
        first = self._first_record(folder)
        if first is None:
            return {}
        found = {rank: self._stage.record(folder, rank, first["world_size"]) for rank in first["ranks"]}
        staged = {rank: record for rank, record in found.items() if record is not None}
        return staged if len(staged) == len(found) else {}

    def _commit(self, name: str, session: str, staged: Staged) -> None:
        folder = self._stage.staging(name, session)
        first = staged[min(staged)]
        self._take_urgency(first)
        step, generation = place_of(name)
        shared = shared_files(staged)
        ahead = self._write_ahead(name, folder, staged, shared)
        sealed = False
        try:
            if not (folder / COMMIT).exists():
                manifest = Manifest(
                    run_id=first["run_id"],
                    generation=generation,
                    step=step,
                    world_size=first["world_size"],
                    parallelism=first["parallelism"],
                    cursor=first["cursor"],
                    created=time.time(),
                    **seal_ranks(self._stage, folder, staged, shared, self._threads(first)),
                    began=first.get("began"),
                    **_told_apart(first, session),
                )
                seal(folder, manifest)
            os.rename(folder, self._stage.tier.folder / name)
            sealed = True
        finally:
            if ahead is not None:
                ahead.settle(sealed)
        if first["durable"]:
            blocked = max(record["blocked"] for record in staged.values())
            self._wanted[name] = {**first, "blocked": blocked}
        self.status = replace(self.status, memory_step=max(step, self.status.memory_step))
        for other, its in self._stage.stagings():  # some rank never completed these
            if place_of(other)[1] == generation and place_of(other)[0] < step:
                self._give_up(self._stage.staging(other, its))

    def _take_urgency(self, record: Mapping[str, Any]) -> None:
        """Use all processors and the whole bandwidth from a save on after which the ranks end."""
        if record.get("urgent"):
            self._hurry.set()

    def _beside_training(self, *records: Mapping[str, Any]) -> bool:
        """Return whether ranks train, and do not wait for one of these copies; set the priority for it.

        The kernel weighs whole sessions where it groups them (autogroup), so this one's nice value counts
        there; unlike that of a process it can be lowered again without a privilege.
        """
        waits = any(one.get("waits_since") is not None for one in (*records, *self._wanted.values()))
        trains = not (waits or self._hurry.is_set() or self.members.loaded is None)
        niceness = NICENESS if trains else 0
        if niceness != self._niceness:
            with contextlib.suppress(OSError):  # no such groups; or changed a moment ago: the next look does
                Path("/proc/self/autogroup").write_text(str(niceness))
                self._niceness = niceness
        return trains

    def _threads(self, record: Mapping[str, Any]) -> int:
        """Return how many threads digest a copy: one a processor where ranks do not train beside it."""
        if self._beside_training(record):
            return threads_beside(len(self.members.ranks), self._processors)
        return self._processors

    def _write_ahead(self, name: str, folder: Path, staged: Staged, shared: int) -> Ahead | None:
        """Begin to write tensors that are due on disk before they are digested, if the disk has time."""
        first = staged[min(staged)]
        waits = self._disk.task is not None or self._wanted or self.members.together is not None
        if not first["durable"] or waits:
            return None
        files = names_of(sorted(staged), first["world_size"], shared)
        ahead = Ahead(name, folder, files, self._tier)
        self._disk.begin(Task("write", name, partial(ahead.write, self._stage.tier)))
        return ahead

    def _settle(self) -> None:
        """Record what was done on disk, and begin the next task."""
        done = self._disk.result()
        if done is not None:
            self._done(done)
        if self._disk.task is not None:
            return
        if self._wanted and time.monotonic() >= self._next_try:
            name = min(self._wanted, key=age)
            self._disk.begin(Task("write", name, self._write(name)))
        elif not self._wanted and self._unverified and self.members.loaded is not None:
            name = self._unverified.pop()
            self._disk.begin(Task("verify", name, partial(verify, self._tier, name, self.members.ranks)))

    def _write(self, name: str) -> Callable[[], Any]:
        """Return what brings a copy to disk."""
        return partial(write_copy, name, self._stage.tier, self._tier, name in self._found)

    def _done(self, done: Done) -> None:
        if done.task.kind == "write":
            self._written(done)
        elif done.task.kind == "commit":
            self._committed_before(done)
        elif done.value is not None:
            self._put_away(done.value)

    def _committed_before(self, done: Done) -> None:
        """Record a commit over several nodes that the keeper of an earlier session began.

        This node may not lead any more, and steps of another generation are others.
        """
        name, before = done.task.name, self.status
        if done.error:
            reason = f"{name}, whose commit began in an earlier session, is not on disk: {done.error}"
            self._record(Note, reason=reason)
        elif self.members.leads:
            complete: Complete = done.value[0]
            self._saved(name, complete.nbytes, {"step": complete.step, "blocked": complete.blocked})
            if place_of(name)[1] != self.members.generation:
                self.status = before

    def _written(self, done: Done) -> None:
        if done.value is None and not done.error:
            return  # begun ahead of a copy that did not come to be, or is there
        if isinstance(done.value, tuple):
            return  # a part of a copy of several nodes, from a session before; this node is alone now
        name = done.task.name
        record = self._wanted.pop(name, None) or {"step": place_of(name)[0]}
        before = self.status
        if done.outage and self._tries_again(name, done.error):
            self._wanted[name] = record
            return
        if done.error:
            self._lost(record["step"], done.error, {0: record})
        else:
            self._saved(name, done.value, record)
        if place_of(name)[1] != self.members.generation:  # these steps of this generation are others
            durable, lost = before.durable_step, before.lost_step
            self.status = replace(self.status, durable_step=durable, lost_step=lost)

    def _tries_again(self, name: str, error: str) -> bool:
        """Return whether a copy that the disk refused is written again: the last one, for some time."""
        now = time.monotonic()
        patience = 0.0 if self.succeeded else self.members.patience
        if not self._over or name not in self._newest() or now > self._over_at + patience:
            return False
        if not self._next_try:
            self._record(Note, reason=f"{error}: {name}, the last copy, is written again for {patience:g} s")
        self._next_try = now + _TRY_EVERY
        return True

    def _put_away(self, found: Copy) -> None:
        """Quarantine a copy on disk if reading all of it showed damage."""
        if found.state is not CopyState.DAMAGED or not self.members.leads:
            return
        note = {"name": found.name, "reason": found.reason, "time": time.time()}
        reason = f"{found.reason}; found by reading it again while nothing depended on it"
        try:
            self._tier.quarantine(found.name, note)
        except OSError as error:
            self._record(
                Note, reason=f"{found.name} is damaged ({reason}), and cannot be moved away: {error}"
            )
        else:
            self._record(Quarantined, step=found.step, checkpoint=found.name, reason=reason)

    def _saved(self, name: str, nbytes: int, record: dict[str, Any]) -> None:
        step = record["step"]
        newest = max(step, self.status.durable_step)
        self.status = replace(self.status, durable_step=newest, failures=0, failing=0.0, error="")
        seconds, why = record.get("blocked", 0.0), record.get("why", "of the generation before")
        since = record.get("waits_since")
        if since is not None and place_of(name)[1] == self.members.generation:
            seconds += time.monotonic() - since
        self._record(Saved, step=step, checkpoint=name, nbytes=nbytes, seconds=seconds, reason=why)
        if self._uploads is not None:
            self._uploads.offer(name, last=self._over or bool(record.get("urgent")))
        self._pruner.committed(name)
        self._untidy = True

    def tidy(self) -> None:
        """Remove the copies that retention does not keep, after the new copy was reported."""
        if self._untidy:
            self._untidy = False
            self._prune()

    def _prune(self) -> None:
        owed = frozenset[str]() if self._uploads is None else self._uploads.owed
        self._pruner.prune({self.members.loaded or "", *owed}, self.members.avoid)

    def _lost(self, step: int, why: str, staged: Staged) -> None:
        blocked = max(record.get("blocked", 0.0) for record in staged.values())
        newest = max(step, self.status.lost_step)
        now, failures = time.monotonic(), self.status.failures + 1
        if failures == 1:
            self._failing_since = now
        failing = now - self._failing_since
        self.status = replace(self.status, lost_step=newest, failures=failures, failing=failing, error=why)
        self._record(SaveLost, step=step, seconds=blocked, reason=f"{why}; the older checkpoints stay")

    def _give_up(self, folder: Path) -> None:
        ranks = self.members.ranks
        pools = [*map(str, ranks), *map(alike_pool, range(len(ranks)))]
        self._stage.give_up(folder, dict.fromkeys(pools, _POOLED))

    def _record(self, kind: type[Record], **fields: Any) -> None:
        if self.members.leads:
            generation = self.members.generation
            named = in_training(self.members.training, fields)
            self._sink(kind(time=time.time(), clock=time.monotonic(), generation=generation, **named))
