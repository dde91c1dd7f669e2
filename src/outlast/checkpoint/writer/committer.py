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
from collections.abc import Callable, Collection, Mapping, Sequence
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
from outlast.checkpoint.writer.cluster import Ties, WriterCluster
from outlast.checkpoint.writer.durable import (
    Ahead,
    Done,
    Task,
    Tasks,
    Uploads,
    commit_parts,
    names_of,
    write_copy,
    write_part,
)
from outlast.checkpoint.writer.sealing import Staged, seal, seal_ranks, shared_files, threads_beside
from outlast.errors import OutlastError
from outlast.ipc.limits import processors
from outlast.recovery.policy.events import Note, Quarantined, Record, Saved, SaveLost

NICENESS = 10  # NVRx, AsyncCallsQueue(cpu_priority=10)
_TRY_EVERY = 2.0  # seconds between two tries to write the last copy
_POOLED = 8  # buffers of a rank that are kept for later use
_ROUNDS = 2  # of replicas: the present one, and the one before, whose end this node may not have heard of
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
        ties: wake this committer, and prove to the writers of other nodes who it is.
        lease: file that says whether this node may commit; "" where nobody watches over that.
    """

    def __init__(
        self,
        members: Members,
        disk: Tasks,
        status: Status,
        sink: Callable[[Record], None],
        ties: Ties,
        lease: str = "",
    ) -> None:
        self.members = members
        self.status = replace(status, durable_step=-1, lost_step=-1, replicated_step=-1)
        self.succeeded = False  # the writer of another owner waits for the end of this one
        self.team: WriterCluster | None = None  # once the table of nodes is there
        self._ties = ties
        self._node = "" if members.together is None else members.together.node
        self._member = Member(self._node, members.session, copies=1 if self._alone else 2)
        self._disk = disk
        self._sink = sink
        self.stage = Stage(members.stage, members.private)
        self._hurry = threading.Event()  # ranks are about to end, or have ended
        hold = Throttle(members.disk_bandwidth, wait=self._hurry.wait).hold
        self._tier = DirectoryTier(members.tier, lease=lease, linked=not members.training, hold=hold)
        self._pruner = Pruner(self._tier, members.run_id, members.keep_last_n, self._record)
        self._wanted: dict[str, dict[str, Any]] = {}  # copies owed to the disk, with a rank's record
        self._told: dict[str, dict[str, Any]] = {}  # written by this node; no end reported by the leader yet
        self._to_commit: list[Complete] = []
        self._committing: Complete | None = None  # the latest that was begun
        self._barred = ""  # why nothing can be committed any more
        self._unverified: list[str] = []  # on disk, of an earlier generation
        self._over = False
        self._over_at = self._next_try = 0.0  # when it was over; before which no write begins
        self._done_since = 0.0  # the last time at which this node still had work
        self._failing_since = time.monotonic() - status.failing
        self._flushed: set[str] = set()
        self._untidy = False
        self._unswept = False  # what earlier attempts began on disk
        self._swept = False  # what earlier sessions began on disk, once no node works at that any more
        self._silent = ""  # why replicas do not go out, as it was reported last
        self._processors = processors()
        self._niceness = -1  # of the session; as the committer of an earlier generation left it
        self._uploads: Uploads | None = None
        if members.global_url and members.leads:
            report = partial(self._record, Note)
            self._uploads = Uploads(members, self._tier, lambda text: report(reason=text), disk.done)
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
        self._survey()

    @property
    def _alone(self) -> bool:
        """Whether all ranks are on this node."""
        return self.members.together is None

    def _is_of_this_generation(self, name: str) -> bool:
        return place_of(name)[1] == self.members.generation

    def _manifest(self, tier: DirectoryTier, name: str) -> Manifest | None:
        """Return the manifest of a copy in memory; None: it cannot be read."""
        with contextlib.suppress(OutlastError, OSError), tier.open(name) as folder:
            return read_manifest(folder, name)[0]
        return None

    def _survey(self) -> None:
        """Find the copies in memory and on disk, and those that are due there."""
        on_disk, names = self._tier.names(), sorted(self.stage.tier.names())
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
                self._wanted.pop(name, None)
            elif record is not None and record["durable"] and name not in on_disk:
                self._wanted.setdefault(name, record)
        self._unverified = sorted(on_disk, key=place_of)[-1:]
        self.status = replace(
            self.status,
            session=self.members.session,
            memory_step=max(map(_step, names), default=-1),
            durable_step=max(map(_step, filter(self._is_of_this_generation, on_disk)), default=-1),
        )

    @property
    def idle(self) -> bool:
        """Whether disk, global tier and other nodes have all that is due, or the wait for these is over."""
        if not self._is_done:
            return False
        if self.team is None or not (self._told or self._to_commit or self.team.waits()):
            return True
        heard = 0.0 if self.succeeded else min(self.team.last_word, self._over_at + self.members.patience)
        since = max(self._done_since, self._over_at, heard)
        return self._over and time.monotonic() - since > _LAST_WORD_SECONDS

    @property
    def _is_done(self) -> bool:
        """Whether this node itself has nothing to do for disk and global tier."""
        if not self._alone and self.team is None:
            return True
        owed = self._uploads is not None and self._uploads.owed
        return not (self._wanted or self._disk.writes or owed)

    @property
    def incomplete(self) -> bool:
        """Whether some ranks of this session have staged a state that others have not completed yet."""
        current = (one for one in self.stage.stagings() if one[1] == self.members.session)
        return any(self._any_record(self.stage.staging(*one)) is not None for one in current)

    def look(self) -> None:
        """Commit what is complete, write, send and remove what is due.

        Of several nodes nothing is committed before the table of nodes is there.
        """
        if not self._alone and not self._hear_others():
            return
        self._beside_training()
        self._take_complete()
        self._grant()
        self._settle()
        if self._uploads is not None:
            self._uploads.look(self.members.avoid)
            if self._uploads.newest > self.status.global_step:
                self.status = replace(self.status, global_step=self._uploads.newest)
        names = sorted(self.stage.tier.names(), key=age)
        kept = self._kept(names)
        for name in names:
            if name not in kept and name not in self._wanted and name != self._disk.writes:
                self._give_up(self.stage.tier.folder / name)
        self._drop_replicas()
        if self.team is not None:
            self._replicate(self.team)
            self.team.tell(self._member.report)
        if not self._is_done:
            self._done_since = time.monotonic()

    def _hear_others(self) -> bool:
        """Process what the other nodes' writers have reported; return whether these are known."""
        together = self.members.together
        if together is None or not together.nodes:
            return False
        if self.team is None:
            self.team = WriterCluster(self.members, self.status.durable_step, self._ties)
        for answer in self.team.answers():
            self._hear(answer)
        self._to_commit += self.team.completed()
        self._release_inherited()
        return True

    def _release_inherited(self) -> None:
        """Release what earlier sessions owe to the disk, except what this one began with, if still needed.

        A part of it may have been on a node that has left: it would never be complete, and keep its buffers.
        """
        owed = self._inherited & (self._wanted.keys() | self._told.keys())
        released = sorted(name for name in owed if not self._is_owed(name))
        for name in released:
            self._wanted.pop(name, None)
            self._told.pop(name, None)
        if released and self.members.leads:
            self._note(
                f"{some(released)}, saved before this generation, did not come to disk in time: it began with"
                f" {self.members.loaded or 'nothing'}, and what it saves takes their place"
            )

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
        kept = {name for name, step in ours.items() if step in steps} | self._told.keys()
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
            record = self._wanted.get(name) or self._any_record(self.stage.tier.folder / name)
            if name in self._on_disk():
                if wish["urgent"] and self._uploads is not None and self._uploads.newest < wish["step"]:
                    self._uploads.offer(name, last=True)
            elif record is None and session == self.members.session:
                self._lost(name, "it was aborted before it was in memory", {0: wish})
            elif record is None or name in self._torn:
                continue
            elif name in self._wanted or not record["durable"]:
                self._take_urgency(wish)
                self.stage.amend(self.stage.tier.folder / name, wish)
                self._wanted[name] = {**record, **wish}

    def keep_for_later(self) -> bool:
        """Say whether memory must stay: neither its newest copy nor a later generation's is on disk."""
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
            record = self._any_record(self.stage.tier.folder / name)
            if record is None or name in self._flushed:
                continue
            if name in self._tier.names():
                self._put_away(verify(self._tier, name, self.members.ranks))
            there = name in self._tier.names()
            self._flushed.add(name)
            lost = self.status.durable_step < _step(name) <= self.status.lost_step
            if not there or (lost and not self._alone and self._is_of_this_generation(name)):
                why = "the newest in memory when the job ended"
                self._wanted.setdefault(name, {**record, "why": why, "blocked": 0.0, "waits_since": None})
            elif self._uploads is not None:
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
            record = self._any_record(self.stage.tier.folder / name)
            if record is not None and name not in self._on_disk():
                self._wanted.setdefault(name, {**record, "why": why, "blocked": 0.0, "waits_since": None})

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
        ours, durable = self.members.generation, self.status.durable_step
        return [name for name in names[-self._member.copies :] if not _is_older(name, ours, durable)]

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
                    **seal_ranks(self.stage, folder, staged, shared, self._threads(first)),
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
            self._wanted[name] = {**first, "blocked": blocked}
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
        together = self.members.together
        in_parts = together is not None and together.shared
        if not first["durable"] or self._disk.task is not None or self._wanted or in_parts:
            return None
        if not self.stage.private:  # what is on disk is linked, once it is complete
            return None
        files = names_of(sorted(staged), first["world_size"], shared)
        ahead = Ahead(name, folder, files, self._tier)
        self._disk.begin(Task("write", name, partial(ahead.write, self.stage.tier)))
        return ahead

    def _settle(self) -> None:
        """Record what was done on disk, and begin the next task."""
        done = self._disk.result()
        if done is not None:
            self._done(done)
        if self._barred:
            self._drop_all()
        if self._disk.task is None and self._unswept:
            self._sweep_disk()
        may = time.monotonic() >= self._next_try
        if self._disk.task is None and self._to_commit and may:
            self._commit_next(self._to_commit.pop(0))
        if self._disk.task is not None:
            return
        if self._wanted and may:
            self._disk.begin(self._write(min(self._wanted, key=age)))
        elif not self._wanted and self._unverified and self.members.loaded is not None:
            name = self._unverified.pop()
            self._disk.begin(Task("verify", name, partial(verify, self._tier, name, self.members.ranks)))

    def _write(self, name: str) -> Task:
        """Return what brings a copy, or this node's part of it, to disk."""
        together, found = self.members.together, name in self._found
        if together is None or not together.shared:
            return Task("write", name, partial(write_copy, name, self.stage.tier, self._tier, found))
        names = [peer.name for peer in together.nodes]
        place = (names.index(self._node), len(names))
        return Task("part", name, partial(write_part, name, self.stage.tier, self._tier, place, found))

    def _commit_next(self, complete: Complete) -> None:
        """Commit a copy after all nodes have reported their parts."""
        together = self.members.together
        if complete.errors:
            self._give_up_copy(complete, "; ".join(complete.errors))
        elif together is not None and together.shared:
            job = partial(commit_parts, complete.name, self.stage.tier, self._tier, complete)
            self._committing = complete
            self._disk.begin(Task("commit", complete.name, lambda: (complete, job()), self.members.session))
        else:
            self._have(complete)

    def _have(self, complete: Complete) -> None:
        """Record that a copy of several nodes is on disk."""
        assert self.team is not None
        record = {**self._told.pop(complete.name, {}), "blocked": complete.blocked}
        self._saved(complete.name, complete.nbytes, record)
        self.team.settled(complete, self._is_of_this_generation(complete.name))
        if not self._swept:
            self._swept = True
            self._sweep()

    def _give_up_copy(self, complete: Complete, why: str) -> None:
        """Record that a copy of several nodes is not on disk."""
        assert self.team is not None
        self._told.pop(complete.name, None)
        with contextlib.suppress(OSError):
            self._tier.discard(self._tier.begin(complete.name, complete.session))
        self._record_loss(complete.name, why, complete.blocked)
        counts = self._is_of_this_generation(complete.name)
        self.team.settled(complete, counts, why, self.status.failing)

    def _drop_all(self) -> None:
        """Record the loss of all that is due: each copy would be refused as the latest was, after a wait."""
        for complete in self._to_commit:
            self._give_up_copy(complete, self._barred)
        for name, record in self._wanted.items():
            self._lost(name, self._barred, {0: record})
        self._to_commit, self._wanted = [], {}

    def _done(self, done: Done) -> None:
        name = done.task.name
        if done.stale and self._over:
            self._barred = done.error
        ours = done.task.session == self.members.session or (
            self.members.leads and self._is_of_this_generation(name)
        )
        if done.task.kind == "verify":
            if done.value is not None:
                self._put_away(done.value)
        elif done.task.kind != "commit":
            self._written(done)
        elif self.team is None or not ours:
            self._committed_before(done)
        elif done.outage and self._committing is not None and self._tries_again(name, done.error):
            self._to_commit.insert(0, self._committing)
        elif done.error:
            lost = self._committing or Complete(name, _step(name), {}, (), 0.0, (), "")
            self._give_up_copy(lost, done.error)
        else:
            self._have(done.value[0])

    def _committed_before(self, done: Done) -> None:
        """Record a commit over several nodes that began in an earlier session; another node may lead now."""
        name = done.task.name
        if done.error:
            reason = f"{name}, whose commit began in an earlier session, is not on disk: {done.error}"
            self._record(Note, reason=reason)
        elif self.members.leads:
            complete: Complete = done.value[0]
            self._saved(name, complete.nbytes, {"blocked": complete.blocked})

    def _written(self, done: Done) -> None:
        """Record what was written; of several nodes, report it to the writer that leads."""
        name, kind = done.task.name, done.task.kind
        if kind == "write" and done.value is None and not done.error:
            return  # begun ahead of a copy that did not come to be, or is there
        record = self._wanted.pop(name, {})
        if self._alone and (kind == "part" or name in self._torn):
            return  # a part of a copy of several nodes, from a session before
        if done.outage and self._tries_again(name, done.error):
            self._wanted[name] = record
        elif not self._alone:
            self._report_part(name, record, done.error)
        elif done.error:
            self._record_loss(name, done.error, record.get("blocked", 0.0))
        else:
            self._saved(name, done.value, record)

    def _report_part(self, name: str, record: dict[str, Any], error: str) -> None:
        if _is_older(name, self.members.generation, self.status.durable_step) or not self._is_owed(name):
            return  # all nodes have brought a later one to disk meanwhile
        self._told[name] = record
        step, manifest = _step(name), self._manifest(self.stage.tier, name)
        told = Written(
            name,
            step,
            blocked=record.get("blocked", 0.0),
            error=error,
            session=self.members.session if manifest is None else manifest.session,
            by_name=not self._is_of_this_generation(name) or step <= self.status.lost_step,
        )
        if manifest is None:
            told = replace(told, error=error or "it cannot be read in memory any more")
        elif not error:
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

    def _saved(self, name: str, nbytes: int, record: dict[str, Any]) -> None:
        self.status = replace(self.status, failures=0, failing=0.0, error="")
        step, ours = _step(name), self._is_of_this_generation(name)
        if ours:  # steps of two generations are not comparable
            self.status = replace(self.status, durable_step=max(step, self.status.durable_step))
        seconds, why = record.get("blocked", 0.0), record.get("why", "of the generation before")
        since = record.get("waits_since")
        if since is not None and ours:
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
            owed = frozenset[str]() if self._uploads is None else self._uploads.owed
            self._pruner.prune({self.members.loaded or "", *owed}, self.members.avoid)

    def _lost(self, name: str, why: str, staged: Staged) -> None:
        """Record a save that is lost; of several nodes, report that this one has no part of it."""
        due = any(record.get("durable") for record in staged.values())
        if not self._alone and due and self._is_of_this_generation(name):
            self._member.wrote(Written(name, _step(name), error=why, session=self.members.session))
        elif not self.members.leads:
            self._note(f"step {_step(name)} is not in memory: {why}")
        else:
            self._record_loss(name, why, max(record.get("blocked", 0.0) for record in staged.values()))

    def _record_loss(self, name: str, why: str, blocked: float) -> None:
        step, newest = _step(name), self.status.lost_step
        if self._is_of_this_generation(name):
            newest = max(step, newest)
        now, failures = time.monotonic(), self.status.failures + 1
        if failures == 1:
            self._failing_since = now
        failing = now - self._failing_since
        self.status = replace(self.status, lost_step=newest, failures=failures, failing=failing, error=why)
        self._record(SaveLost, step=step, seconds=blocked, reason=f"{why}; the older checkpoints stay")

    def _give_up(self, folder: Path) -> None:
        ranks = self.members.ranks
        pools = [*map(str, ranks), *map(alike_pool, range(len(ranks)))]
        self.stage.give_up(folder, dict.fromkeys(pools, _POOLED))

    def _hear(self, answer: Answer) -> None:
        self._member.hear(answer)
        if not self.members.leads:
            pending, together = self._member.pending, self.members.together
            self._told = {name: record for name, record in self._told.items() if name in pending}
            if answer.durable_step > self.status.durable_step:
                self._pruner.committed(copy_name(answer.durable_step, self.members.generation))
                self._untidy = together is not None and not together.shared
            self.status = replace(
                self.status,
                durable_step=answer.durable_step,
                lost_step=answer.lost_step,
                failures=answer.failures,
                failing=answer.failing,
                error=answer.error,
            )
        self.status = replace(self.status, replicated_step=self._member.answer.replicated)

    def _replicate(self, team: WriterCluster) -> None:
        """Send the replicas that are due, and record the result."""
        done = team.sender.result()
        if done is not None:
            self._member.sent(_step(done.task.name), not done.error)
            if done.error and done.error != self._silent:
                self._silent = done.error
                self._note(f"{done.task.name} was not replicated: {done.error}")
        if team.sender.task is not None or not team.together.holders:
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


def _is_older(name: str, generation: int, step: int) -> bool:
    return place_of(name)[1] == generation and place_of(name)[0] < step
