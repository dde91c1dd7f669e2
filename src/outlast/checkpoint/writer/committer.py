"""What the checkpoint writer does in one generation: it turns what its ranks staged into committed copies.

Digests are taken of the staged bytes, then documents, manifest and COMMIT are written. Where ranks are on
several nodes, the writers of all have a part of each copy, and the one that leads commits it. All state is in
the folders: a writer that starts later finds what is complete, finishes it, and drops what never will be.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outlast.checkpoint.policy.joint import Answer, Complete, Member, Written
from outlast.checkpoint.policy.manifest import (
    COMMIT,
    Manifest,
    copy_name,
    in_training,
    place_of,
    some,
)
from outlast.checkpoint.policy.resolve import Copy, CopyState
from outlast.checkpoint.replica.frames import Throttle
from outlast.checkpoint.replica.handshake import Credentials
from outlast.checkpoint.tiers.inventory import Pruner, read_manifest, verify
from outlast.checkpoint.tiers.memory_folder import (
    DamagedRecord,
    Members,
    Stage,
    Status,
    alike_pool,
    staged_file,
)
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer.cluster import WriterCluster
from outlast.checkpoint.writer.durable import (
    Ahead,
    Done,
    Staged,
    Task,
    Tasks,
    Uploads,
    commit_parts,
    names_of,
    seal,
    seal_ranks,
    shared_files,
    threads_beside,
    write_copy,
)
from outlast.errors import OutlastError
from outlast.ipc.limits import processors
from outlast.recovery.policy.events import Note, Quarantined, Record, Saved, SaveLost

NICENESS = 10  # NVRx, AsyncCallsQueue(cpu_priority=10)
_TRY_EVERY = 2.0  # seconds between two tries to write the last copy
_POOLED = 8  # buffers of a rank that are kept for later use
_ROUNDS = 2  # of replicas: the present one, and the one before, whose end this node may not have heard of
_OF_SAVES = ("durable_step", "lost_step", "failures", "failing", "error")  # of Answer and Status
_LAST_WORD_SECONDS = 10.0  # how long the others are waited for when the owner has ended


def age(name: str) -> tuple[int, int]:
    """Order copies by when they were made: a newer generation may have begun again at an older step."""
    return place_of(name)[::-1]


class CopyCommitter:
    """Keeps the copies of one generation on one node, and what it found of earlier ones.

    Args:
        members: who the ranks are.
        disk: works on the durable tier; it may still be at work for the generation before.
        status: how far the writer is.
        sink: takes records.
        credentials: what this node proves to the writers of others.
        lease: file that says whether this node may commit; "" where nobody watches over that.
    """

    def __init__(
        self,
        members: Members,
        disk: Tasks,
        status: Status,
        sink: Callable[[Record], None],
        credentials: Credentials,
        lease: str = "",
    ) -> None:
        self.members = members
        self.status = replace(status, durable_step=-1, lost_step=-1, replicated_step=-1)
        self.succeeded = False  # the writer of another owner waits for the end of this one
        self._credentials = credentials
        self._node = "" if members.together is None else members.together.node
        self._member = Member(self._node, members.session, copies=1 if self._alone else 2)
        self._disk = disk
        self._sink = sink
        self.stage = Stage(members.stage, members.private)
        self._hurry = threading.Event()  # ranks are about to end, or have ended
        hold = Throttle(members.disk_bandwidth, wait=self._hurry.wait).hold
        self._tier = DirectoryTier(members.tier, lease=lease, linked=not members.training, hold=hold)
        self._pruner = Pruner(self._tier, members.run_id, members.keep_last_n, self._record)
        self._owed: dict[str, dict[str, Any]] = {}  # copies that are to come to disk, with a rank's record
        self._told: set[str] = set()  # of these, written by this node; the leading writer reports their end
        self._complete: dict[str, Complete] = {}  # of these, written by all nodes; this one commits them
        self._barred = ""  # why nothing can be committed any more
        self._over = False
        self._over_at = self._next_try = 0.0  # when it was over; before which no write begins
        self._done_since = 0.0  # the last time at which this node still had work
        self._flushed: set[str] = set()
        self._untidy = False
        self._unswept = False  # what earlier attempts began on disk
        self._swept = False  # what earlier sessions began on disk, once no node works at that any more
        self._silent = ""  # why replicas do not go out, as it was reported last
        self._processors = processors()
        self._niceness = -1  # of the session; as the committer of an earlier generation left it
        self._uploads = Uploads(members, self._tier, lambda text: self._record(Note, reason=text), disk.done)
        on_disk = set(self._tier.names())
        self._unverified = sorted(on_disk, key=place_of)[-1:]  # of an earlier generation
        durable_step = max(map(_step, filter(self._is_of_this_generation, on_disk)), default=-1)
        self.status = replace(self.status, session=members.session, durable_step=durable_step)
        self.team = self._meet() if self._alone else None  # until the table of nodes is there
        self.stage.make()
        self._found = set(self.stage.tier.names())  # in memory, of an earlier writer
        self._inherited: set[str] = set()  # in memory, of earlier sessions
        self._torn: set[str] = set()  # in memory, parts of copies that this node alone cannot complete
        self._sweep_disk()  # before a staged state is completed, which is written while it is digested
        for name, session in self.stage.stagings():
            if not self._take(name, session) and session != members.session:
                self._give_up(self.stage.staging(name, session))
        for path in self.stage.staged.glob(".retired-*"):
            shutil.rmtree(path, ignore_errors=True)
        self._inherited_replicas = {
            (tier.name, name)
            for tier in self.stage.replica_tiers()
            for name in tier.names()
            if (found := self._manifest(tier, name)) is None or found.session != members.session
        }
        names = sorted(self.stage.tier.names())
        for name in names:
            manifest = self._manifest(self.stage.tier, name)
            record = self._any_record(self.stage.tier.folder / name)
            ours = self._is_of_this_generation(name) and (manifest is not None or self._alone)
            if manifest is not None and manifest.part:
                ours = manifest.session == self.members.session
            if ours:
                self._member.made(_step(name))
            else:
                self._inherited.add(name)
            if manifest is not None and manifest.part and self._alone:
                self._torn.add(name)
                self._owed.pop(name, None)
            elif record is not None and record["durable"] and name not in on_disk:
                self._owed.setdefault(name, record)
        self.status = replace(self.status, memory_step=max(map(_step, names), default=-1))

    def _meet(self) -> WriterCluster | None:
        """Return the nodes of this session; None while their table is not there."""
        together, status = self.members.together, self.status
        if together is not None and not together.nodes:
            return None
        answer = Answer(**{name: getattr(status, name) for name in _OF_SAVES})
        return WriterCluster(self.members, answer, self._disk.done, self._credentials)

    @property
    def _alone(self) -> bool:
        """Whether all ranks are on this node."""
        return self.members.together is None

    def _is_of_this_generation(self, name: str) -> bool:
        return place_of(name)[1] == self.members.generation

    def _is_older(self, name: str) -> bool:
        """Return whether a later step of this generation is on disk."""
        return self._is_of_this_generation(name) and _step(name) < self.status.durable_step

    def _manifest(self, tier: DirectoryTier, name: str) -> Manifest | None:
        """Return the manifest of a copy in memory; None: it cannot be read."""
        with contextlib.suppress(OutlastError, OSError), tier.open(name) as folder:
            return read_manifest(folder, name)[0]
        return None

    @property
    def idle(self) -> bool:
        """Whether disk, global tier and other nodes have all that is due, or the wait for these is over."""
        if not self._is_done:
            return False
        if self.team is None or not (self._told or self._complete or self.team.waits()):
            return True
        heard = 0.0 if self.succeeded else min(self.team.last_word, self._over_at + self.members.patience)
        since = max(self._done_since, self._over_at, heard)
        return self._over and time.monotonic() - since > _LAST_WORD_SECONDS

    @property
    def _is_done(self) -> bool:
        """Whether this node itself has nothing to do for disk and global tier."""
        if not self._alone and self.team is None:
            return True
        untold = self._alone and self._member.pending  # the next look records their end
        return not (untold or self._due or self._disk.writes or self._uploads.owed)

    @property
    def _due(self) -> Collection[str]:
        """The copies, or this node's parts of them, that are to be written."""
        return self._owed.keys() - self._told

    @property
    def incomplete(self) -> bool:
        """Whether some ranks of this session have staged a state that others have not completed yet."""
        current = (one for one in self.stage.stagings() if one[1] == self.members.session)
        return any(self._any_record(self.stage.staging(*one)) is not None for one in current)

    def look(self) -> None:
        """Commit what is complete, write, send and remove what is due.

        Of several nodes nothing is committed before the table of nodes is there.
        """
        self.team = self.team or self._meet()
        if self.team is None:
            return
        self._beside_training()
        self._take_complete()
        self._grant()
        self._settle(self.team)
        self._uploads.look(self.members.avoid)
        self.status = replace(self.status, global_step=max(self._uploads.newest, self.status.global_step))
        names = sorted(self.stage.tier.names(), key=age)
        kept = self._kept(names)
        for name in names:
            if name not in kept and name not in self._owed and name != self._disk.writes:
                self._give_up(self.stage.tier.folder / name)
        self._drop_replicas()
        self._replicate(self.team)
        self._exchange(self.team)
        if not self._is_done:
            self._done_since = time.monotonic()

    def _exchange(self, team: WriterCluster) -> None:
        """Report this node's progress, and process what the leading writer and the other nodes report."""
        answer, found = team.tell(self._member.report)
        if answer is not None:
            self._hear(answer)
        self._complete |= {complete.name: complete for complete in found}
        for complete in [one for one in self._complete.values() if one.errors or not self._in_parts]:
            self._end(complete, "; ".join(complete.errors))

    @property
    def _in_parts(self) -> bool:
        """Whether each node writes a part of a copy on disk, which the leading writer commits."""
        return self.members.together is not None and self.members.together.shared

    def _release_inherited(self) -> None:
        """Release what earlier sessions owe to the disk, except what this one began with, if still needed.

        A part of it may have been on a node that has left: it would never be complete, and keep its buffers.
        """
        owed = self._inherited & (self._owed.keys() - self._complete.keys())
        released = sorted(name for name in owed if not self._is_owed(name))
        self._release(released)
        if released and self.members.leads:
            self._note(
                f"{some(released)}, saved before this generation, did not come to disk in time: it began with"
                f" {self.members.loaded or 'nothing'}, and what it saves takes their place"
            )

    def _release(self, names: Iterable[str]) -> None:
        """Owe copies to the disk no more."""
        for name in names:
            self._owed.pop(name, None)
            self._told.discard(name)
            self._complete.pop(name, None)

    def _is_owed(self, name: str) -> bool:
        """Return whether a copy in memory is still to be brought to disk."""
        if self._alone or name not in self._inherited or self.members.loaded is None:
            return True
        return name == self.members.loaded and self.status.durable_step < 0 and not self._supersedes()

    def _supersedes(self) -> bool:
        """Return whether this session has made something better than what it found in memory."""
        together = self.members.together
        return self._member.supersedes(together is not None and bool(together.holders))

    def _may_serve(self, name: str) -> bool:
        """Return whether a part that an earlier session left may still be loaded.

        After a load only the loaded copy may be: the parts of others hold buffers that this session needs.
        """
        return self.members.loaded in (None, name) and not self._supersedes()

    def _kept(self, names: Sequence[str]) -> Collection[str]:
        """Return which copies in memory stay, of all, the newest last."""
        ours = {name: _step(name) for name in names if name not in self._inherited}
        steps = self._member.keep(ours.values())
        kept = {name for name, step in ours.items() if step in steps}
        old = [name for name in names if name in self._inherited]
        if self._alone and not self._supersedes():
            kept |= set(old[-1:])  # though it may be doubted: it may be all that is left
            old = [name for name in old if name in self._torn]
        return kept | set(filter(self._may_serve, old))

    def _drop_replicas(self) -> None:
        """Remove the parts of other nodes that are not needed any more."""
        if self._alone and self.members.loaded is None:  # ranks may be bringing parts here
            return
        replicated = self._member.answer.replicated
        for tier in self.stage.replica_tiers():
            names = tier.names()
            sent = {
                name: _step(name)
                for name in names
                if self._is_of_this_generation(name) and (tier.name, name) not in self._inherited_replicas
            }
            kept = {*sorted(sent.values())[-_ROUNDS:], replicated}  # others: rounds that failed
            for name in names:
                stays = replicated <= sent[name] in kept if name in sent else self._may_serve(name)
                if not stays:
                    with contextlib.suppress(OSError):
                        tier.discard(name)
            if self._alone and not tier.names():
                with contextlib.suppress(OSError):
                    tier.folder.rmdir()
                    self.stage.replicas.rmdir()

    def _grant(self) -> None:
        """Order a copy to disk that was first staged for memory only: a step is staged once."""
        for name, session, wish in self.stage.granted():
            record = self._owed.get(name) or self._any_record(self.stage.tier.folder / name)
            if name in self._on_disk():
                if wish["urgent"] and self._uploads.newest < wish["step"]:
                    self._uploads.offer(name, last=True)
            elif record is None and session == self.members.session:
                self._lost(name, "it was aborted before it was in memory", {0: wish})
            elif record is None or name in self._torn:
                continue
            elif name in self._owed or not record["durable"]:
                self._take_urgency(wish)
                self.stage.amend(self.stage.tier.folder / name, wish)
                self._owed[name] = {**record, **wish}

    def keep_for_later(self) -> bool:
        """Return whether memory must stay: neither its newest copy nor a later generation's is on disk."""
        for name in sorted(self.stage.tier.names(), key=age)[-1:]:
            generation, committed = place_of(name)[1], self._tier.names()
            if name not in committed and not any(place_of(other)[1] > generation for other in committed):
                reason = (
                    f"{name} could not be brought to disk and stays in memory ({self.stage.tier.folder}):"
                    " the same run started again on this node goes on from it, until the node is restarted"
                )
                self._record(Note, reason=reason)
                return True
        return False

    def _take_complete(self) -> None:
        """Commit what this session has staged; ranks of an older one have no say any more."""
        current = [name for name, session in self.stage.stagings() if session == self.members.session]
        for place, name in enumerate(current):
            if not self._take(name, self.members.session):
                self._leave_overtaken(name, current[place + 1 :])

    def _leave_overtaken(self, name: str, later: list[str]) -> None:
        """Drop a state that a rank cannot complete, because it has completed a later one."""
        folder = self.stage.staging(name, self.members.session)
        first = self._any_record(folder)
        if first is None:
            return
        files = {rank: staged_file(rank, first["world_size"]) for rank in first["ranks"]}
        missing = [rank for rank, file in files.items() if not (folder / file).exists()]
        newer = [self.stage.staging(one, self.members.session) for one in later]
        gone = [rank for rank in missing if any((one / files[rank]).exists() for one in newer)]
        if gone:
            if first["durable"]:
                why = f"rank {some(gone)} has staged a later step, and not this one"
                self._lost(name, why, {0: first})
            self._give_up(folder)

    def finish(self) -> None:
        """Order the newest copy that all nodes have in memory to disk, unless all of it is there."""
        if not self._over:
            self._over, self._over_at = True, time.monotonic()
            self._hurry.set()
        self._take_complete()
        for name in self._newest():
            if name in self._flushed:
                continue
            if name in self._tier.names():
                self._put_away(verify(self._tier, name, self.members.ranks))
            there = name in self._tier.names()
            self._flushed.add(name)
            lost = self.status.durable_step < _step(name) <= self.status.lost_step
            if not there or (lost and not self._alone and self._is_of_this_generation(name)):
                self._order(name, "the newest in memory when the job ended")
            else:
                self._uploads.offer(name, last=True)
        together = self.members.together
        if together is not None and self.idle and (self.members.leads or not together.shared):
            with contextlib.suppress(OSError):  # what other nodes have not completed never will be
                if self._tier.may_commit(self.members.generation):
                    self._tier.sweep()
                else:
                    self._tier.sweep(self.members.session, only=True)

    def flush(self, why: str) -> None:
        """Order the newest copy in memory to disk while the ranks still run."""
        self._hurry.set()
        self._take_complete()
        for name in self._newest():
            if name not in self._on_disk():
                self._order(name, why)

    def _order(self, name: str, why: str) -> None:
        """Order a copy in memory to disk, unless it is already on its way."""
        record = self._any_record(self.stage.tier.folder / name)
        if record is not None:
            self._owed.setdefault(name, {**record, "why": why, "blocked": 0.0, "waits_since": None})

    def _on_disk(self) -> Collection[str]:
        """Return the copies on disk; none while the disk does not answer: a write looks again."""
        try:
            return self._tier.names()
        except OSError:
            return ()

    def _newest(self) -> list[str]:
        """Return the copies in memory that may have to go to disk when the job ends.

        Two nodes may differ by one save: one of a node's two newest copies is the newest that all nodes have.
        """
        names = sorted(set(self.stage.tier.names()) - self._torn, key=age)
        return [name for name in names[-self._member.copies :] if not self._is_older(name)]

    def _sweep_disk(self) -> None:
        """Remove what earlier attempts began on disk; once none is under way any more."""
        self._unswept = bool(self._disk.writes)
        left = [] if self._unswept else self._sweep()
        if left:
            self._record(Note, reason=f"files of earlier attempts cannot be removed: {', '.join(left)}")

    def _sweep(self) -> list[str]:
        together = self.members.together
        if together is None:
            return self._tier.sweep()
        return self._tier.sweep(self.members.session) if self.members.leads or not together.shared else []

    def close(self) -> None:
        """End before the committer of the next generation starts, which waits for what is being written."""
        self._hurry.set()
        self._uploads.close()
        if self.team is not None:
            self.team.close()

    def _any_record(self, folder: Path) -> dict[str, Any] | None:
        with contextlib.suppress(DamagedRecord):
            return self._first_record(folder)
        return None

    def _first_record(self, folder: Path) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError):  # somebody removes the memory folder
            for path in folder.glob("*.staged"):
                rank, world = int(path.name[5:10]), int(path.name[14:19])
                return self.stage.record(folder, rank, world)
        return None

    def _take(self, name: str, session: str) -> bool:
        """Commit a staged copy to the memory tier if it is complete; return whether it was, or is lost."""
        folder = self.stage.staging(name, session)
        try:
            staged = self._staged(folder)
        except DamagedRecord as error:
            self._lost(name, str(error), {0: {"durable": True}})
            self._give_up(folder)
            return True
        if not staged:
            return False
        errors = [f"rank {rank}: {one['error']}" for rank, one in staged.items() if one["error"]]
        if (self.stage.tier.folder / name).exists():
            self._give_up(folder)
        elif errors:
            self._lost(name, "; ".join(errors), staged)
            self._give_up(folder)
        else:
            try:
                self._commit(name, session, staged)
            except (OSError, OutlastError) as error:
                self._lost(name, f"{self.stage.root}: {error}", staged)
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
        found = {rank: self.stage.record(folder, rank, first["world_size"]) for rank in first["ranks"]}
        staged = {rank: record for rank, record in found.items() if record is not None}
        return staged if len(staged) == len(found) else {}

    def _commit(self, name: str, session: str, staged: Staged) -> None:
        folder = self.stage.staging(name, session)
        first = staged[min(staged)]
        ranks = tuple(sorted(first["ranks"]))
        apart = len(ranks) < first["world_size"]
        self._take_urgency(first)
        step, generation = place_of(name)
        shared = shared_files(staged)
        threads = self._processors
        if self._beside_training(first):
            threads = threads_beside(len(self.members.ranks), threads)
        ahead, sealed = None, False
        before = (folder / COMMIT).exists()  # an earlier writer took the digests
        if before:
            self._found.add(name)
        elif apart and self._alone:
            self._torn.add(name)
        else:
            ahead = self._write_ahead(name, folder, staged, shared)
        try:
            if not before:
                manifest = Manifest(
                    run_id=first["run_id"],
                    generation=generation,
                    step=step,
                    world_size=first["world_size"],
                    parallelism=first["parallelism"],
                    cursor=first["cursor"],
                    created=time.time(),
                    **seal_ranks(self.stage, folder, staged, shared, threads),
                    began=first.get("began"),
                    session=session if apart else "",
                    part=ranks if apart else (),
                )
                seal(folder, manifest)
            os.rename(folder, self.stage.tier.folder / name)
            sealed = True
        finally:
            if ahead is not None:
                ahead.settle(sealed)
        if first["durable"] and name not in self._torn:
            blocked = max(record["blocked"] for record in staged.values())
            self._owed[name] = {**first, "blocked": blocked}
        self.status = replace(self.status, memory_step=max(step, self.status.memory_step))
        if session == self.members.session:
            self._member.made(step)
        for other, its in self.stage.stagings():  # some rank never completed these
            if place_of(other)[1] == generation and place_of(other)[0] < step:
                self._give_up(self.stage.staging(other, its))

    def _take_urgency(self, record: Mapping[str, Any]) -> None:
        """Use all processors and the whole bandwidth from a save on after which the ranks end."""
        if record.get("urgent"):
            self._hurry.set()

    def _beside_training(self, *records: Mapping[str, Any]) -> bool:
        """Return whether ranks train, and do not wait for one of these copies; set the priority for it.

        The kernel weighs whole sessions where it groups them (autogroup), so this one's nice value counts
        there; unlike that of a process it can be lowered again without a privilege.
        """
        waits = any(one.get("waits_since") is not None for one in (*records, *self._owed.values()))
        trains = not (waits or self._hurry.is_set() or self.members.loaded is None)
        niceness = NICENESS if trains else 0
        if niceness != self._niceness:
            with contextlib.suppress(OSError):  # no such groups; or changed a moment ago: the next look does
                Path("/proc/self/autogroup").write_text(str(niceness))
                self._niceness = niceness
        return trains

    def _write_ahead(self, name: str, folder: Path, staged: Staged, shared: int) -> Ahead | None:
        """Begin to write tensors that are due on disk before they are digested, if the disk has time."""
        first = staged[min(staged)]
        if not first["durable"] or self._disk.task is not None or self._due or self._in_parts:
            return None
        if not self.stage.private:  # what is on disk is linked, once it is complete
            return None
        files = names_of(sorted(staged), first["world_size"], shared)
        ahead = Ahead(name, folder, files, self._tier)
        self._disk.begin(Task("write", name, partial(ahead.write, self.stage.tier)))
        return ahead

    def _settle(self, team: WriterCluster) -> None:
        """Record what was done on disk, and begin the next task."""
        done = self._disk.result()
        if done is not None:
            self._done(done)
        self._exchange(team)
        self._release_inherited()
        if self._barred:
            self._drop_all()
        if self._disk.task is None and self._unswept:
            self._sweep_disk()
        if self._disk.task is not None:
            return
        may = time.monotonic() >= self._next_try
        if self._complete and may:
            complete = next(iter(self._complete.values()))
            job = partial(commit_parts, self.stage.tier, self._tier, complete)
            self._disk.begin(Task("commit", complete.name, job))
        elif self._due and may:
            self._disk.begin(self._write(min(self._due, key=age)))
        elif not self._due and self._unverified and self.members.loaded is not None:
            name = self._unverified.pop()
            self._disk.begin(Task("verify", name, partial(verify, self._tier, name, self.members.ranks)))

    def _write(self, name: str) -> Task:
        """Return what brings a copy, or this node's part of it, to disk."""
        kind, together = "write", self.members.together
        job = partial(write_copy, name, self.stage.tier, self._tier, name in self._found)
        if together is not None and together.shared:
            names = [peer.name for peer in together.nodes]
            kind, job = "part", partial(job, (names.index(self._node), len(names)))
        return Task(kind, name, job)

    def _end(self, complete: Complete, error: str = "", counts: bool = True) -> None:
        """Record that a copy is on disk, or lost; only where this node leads.

        Args:
            complete: the copy.
            error: why it is not on disk; empty: it is.
            counts: its step is one that this generation was to save, if the copy is of this generation.
        """
        assert self.team is not None
        name, ours = complete.name, self._is_of_this_generation(complete.name)
        record = self._owed.get(name, {})
        self._release([name])
        if error and complete.session and not self._alone:
            with contextlib.suppress(OSError):
                self._tier.discard(self._tier.begin(name, complete.session))
        self._hear(self.team.settled(complete, error, counts and ours))
        seconds, since = complete.blocked, record.get("waits_since")
        if error:
            self._record(
                SaveLost, step=_step(name), seconds=seconds, reason=f"{error}; the older checkpoints stay"
            )
            return
        if since is not None and ours:
            seconds += time.monotonic() - since
        why = record.get("why", "of the generation before")
        self._record(
            Saved, step=_step(name), checkpoint=name, nbytes=complete.nbytes, seconds=seconds, reason=why
        )
        self._uploads.offer(name, last=self._over or bool(record.get("urgent")))
        self._pruner.committed(name)
        self._untidy = True
        if not self._alone and not self._swept:
            self._swept = True
            self._sweep_disk()

    def _drop_all(self) -> None:
        """Record the loss of all that is due: each copy would be refused as the latest was, after a wait."""
        for complete in list(self._complete.values()):
            self._end(complete, self._barred)
        for name in list(self._due):
            self._lost(name, self._barred, {0: self._owed.pop(name)})

    def _done(self, done: Done) -> None:
        name = done.task.name
        if done.stale and self._over:
            self._barred = done.error
        if done.task.kind == "verify":
            if done.value is not None:
                self._put_away(done.value)
        elif done.task.kind != "commit":
            self._written(done)
        elif self.members.leads:  # else it began in an earlier session, and another node leads now
            complete = self._complete.get(name)
            again = done.outage and self._tries_again(name, done.error) if complete else name in self._owed
            if not (done.error and again):
                self._end(done.value or complete or Complete(name), done.error)

    def _written(self, done: Done) -> None:
        """Record what was written; of several nodes, report it to the writer that leads."""
        name, kind = done.task.name, done.task.kind
        if kind == "write" and done.value is None and not done.error:
            return  # begun ahead of a copy that did not come to be, or is there
        manifest = done.value or self._manifest(self.stage.tier, name)
        if self._alone and (kind == "part" or name in self._torn):
            self._release([name])  # a part of a copy of several nodes, from a session before
            return
        if done.outage and self._tries_again(name, done.error):
            return
        if not self._alone and (self._is_older(name) or not self._is_owed(name)):
            self._release([name])  # all nodes have brought a later one to disk meanwhile
            return
        by_step = self._is_of_this_generation(name) and _step(name) > self.status.lost_step
        self._told.add(name)
        told = Written(
            name,
            blocked=self._owed.setdefault(name, {}).get("blocked", 0.0),
            error=done.error,
            session=self.members.session if manifest is None else manifest.session,
            ends=-1 if by_step and not self._alone else self._member.ends(name),
        )
        if manifest is None:
            told = replace(told, error=done.error or "it cannot be read in memory any more")
        elif not done.error:
            own = tuple(zip(manifest.ranks, manifest.own, strict=True))
            told = replace(told, own=own, shared=manifest.shared, contents=manifest.contents)
        self._member.wrote(told)

    def _tries_again(self, name: str, error: str) -> bool:
        """Return whether a copy that the disk refused is written again: the last one, for some time."""
        now = time.monotonic()
        patience = 0.0 if self.succeeded else self.members.patience
        if not self._over or name not in self._newest() or now > self._over_at + patience:
            return False
        if not self._next_try:
            self._note(f"{error}: the write of {name}, the last copy, is retried for {patience:g} s")
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

    def tidy(self) -> None:
        """Remove the copies that retention does not keep, after the new copy was reported."""
        if self._untidy:
            self._untidy = False
            self._pruner.prune({self.members.loaded or "", *self._uploads.owed}, self.members.avoid)

    def _lost(self, name: str, why: str, staged: Staged) -> None:
        """Record a save that is lost; of several nodes, report that this one has no part of it."""
        due = any(record.get("durable") for record in staged.values())
        blocked = max(record.get("blocked", 0.0) for record in staged.values())
        if due and self._is_of_this_generation(name):
            session, ends = self.members.session, self._member.ends(name) if self._alone else -1
            self._member.wrote(Written(name, blocked=blocked, error=why, session=session, ends=ends))
        elif self.members.leads and self.team is not None:
            self._end(Complete(name, blocked=blocked), why, counts=self._alone)
        else:
            self._note(f"step {_step(name)} is not in memory: {why}")

    def _give_up(self, folder: Path) -> None:
        ranks = self.members.ranks
        pools = [*map(str, ranks), *map(alike_pool, range(len(ranks)))]
        self.stage.give_up(folder, dict.fromkeys(pools, _POOLED))

    def _hear(self, answer: Answer) -> None:
        self._member.hear(answer)
        if not self.members.leads:
            self._release(self._told - set(self._member.pending))
            together = self.members.together
            if answer.durable_step > self.status.durable_step:
                self._pruner.committed(copy_name(answer.durable_step, self.members.generation))
                self._untidy = together is not None and not together.shared
        saves = {name: getattr(answer, name) for name in _OF_SAVES}
        self.status = replace(self.status, replicated_step=self._member.answer.replicated, **saves)

    def _replicate(self, team: WriterCluster) -> None:
        """Send the replicas that are due, and record the result."""
        done = team.sender.result()
        if done is not None:
            self._member.sent(_step(done.task.name), not done.error)
            if done.error and done.error != self._silent:
                self._silent = done.error
                self._note(f"{done.task.name} was not replicated: {done.error}")
        if team.sender.task is not None or not team.holders:
            return
        held = {_step(name): name for name in self.stage.tier.names() if name not in self._inherited}
        step = self._member.wanted(held.keys())
        if step >= 0:
            name = held[step]
            team.sender.begin(Task("send", name, partial(team.send, name, self.stage.tier)))

    def _note(self, text: str) -> None:
        self._send(Note, reason=text if self._alone else f"node {self._node}: {text}")

    def _record(self, kind: type[Record], **fields: Any) -> None:
        if self.members.leads:
            self._send(kind, **fields)

    def _send(self, kind: type[Record], **fields: Any) -> None:
        generation, named = self.members.generation, in_training(self.members.training, fields)
        self._sink(kind(time=time.time(), clock=time.monotonic(), generation=generation, **named))


def _step(name: str) -> int:
    return place_of(name)[0]
