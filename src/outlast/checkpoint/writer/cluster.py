"""The checkpoint writer where ranks are on several nodes: it finishes copies with the others.

It reports to the writer that leads, and sends and takes replicas.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import file_digest
from outlast.checkpoint.policy.joint import Answer, Complete, Leader, Member, Report, Sent, Written
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, place_of, some
from outlast.checkpoint.policy.placement import MEMORY, REPLICA
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import PeerError, PeerRefused, Refusal, Throttle
from outlast.checkpoint.replica.handshake import Credentials
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.memory_folder import LANDING, Members, Peer, Stage, Status, Together
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer.committer import CopyCommitter
from outlast.checkpoint.writer.durable import Done, Task, Tasks, commit_parts, write_part
from outlast.codec import Malformed
from outlast.errors import CheckpointError, OutlastError
from outlast.recovery.policy.events import Note, Record

_PACE = 0.02  # seconds between two reports while an answer is waited for
_NODES_A_SECOND = 1000  # reports that a leader is to hear
_IDLE = 2.0  # seconds between two reports otherwise
_TIMEOUT = 10.0
MOST_REPLICAS = 8  # of a node: what the session before left, the newest that all have, two rounds under way


@dataclass(frozen=True)
class Ties:
    """What a keeper on several nodes needs besides.

    Args:
        ring: wakes it.
        credentials: what this node proves to the others.
    """

    ring: Callable[[], None]
    credentials: Credentials


class ReplicaShelf(DirectoryTier):
    """Takes another node's copies; a newer one replaces an older one of the same name."""

    def commit(self, temporary: str, name: str) -> None:
        """Give a complete folder its name."""
        if name in self.names():
            self.discard(name)
        super().commit(temporary, name)


class WriterCluster:
    """The nodes of a session, seen from one of them.

    Args:
        members: of this node; with the table of nodes.
        durable_step: the newest step that is on disk already; -1: none.
        ties: of the keeper.
    """

    def __init__(self, members: Members, durable_step: int, ties: Ties) -> None:
        together = members.together
        assert together is not None
        assert together.nodes, "the table of nodes is there"
        self.together: Together = together
        self._session = members.session
        self._ring = ties.ring
        self._party = members.party(ties.credentials)
        self._peers = {peer.name: peer for peer in together.nodes}
        self._chief: Peer = next(peer for peer in together.nodes if 0 in peer.ranks)
        self._lock = threading.Lock()
        self.leader: Leader | None = None
        if members.leads:
            self.leader = Leader(self._peers, bool(together.holders), durable_step, os.urandom(8).hex())
        self._completed: queue.SimpleQueue[Complete] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._report = Report(together.node, members.session)
        self._sent = Sent()
        self._news = threading.Event()
        self._closed = False
        self._throttle = Throttle(together.bandwidth)
        self.unreachable = ""
        threading.Thread(target=self._serve, name="reports", daemon=True).start()

    def close(self) -> None:
        """End; what is under way is not waited for."""
        self._closed = True
        self._news.set()

    def tell(self, report: Report) -> None:
        """Send the leading writer this node's progress."""
        if report != self._report:
            self._report = report
            self._news.set()

    def answers(self) -> list[Answer]:
        """Return what the leader has answered since the last call."""
        return _all_of(self._answers)

    def completed(self) -> list[Complete]:
        """Return the copies whose parts all nodes have done; only where this node leads."""
        return _all_of(self._completed)

    def settled(self, complete: Complete, error: str = "", failing: float = 0.0) -> None:
        """Tell all nodes the result of a commit; only where this node leads."""
        assert self.leader is not None
        with self._lock:
            self.leader.settled(complete, error, failing)
        self._news.set()

    def hear(self, node: str, message: dict[str, Any]) -> dict[str, Any]:
        """Answer another node's report; called from the server's threads.

        Args:
            node: which has proven to be the one that reports.
            message: the report.

        Raises:
            CheckpointError: it is of another session, or for another node.
            PeerRefused: it is none, or in the name of another node.
        """
        if message.get("session") != self._session or self.leader is None:
            raise CheckpointError(
                f"node {self.together.node}: a report of session {self._session} for the leading node"
                f" expected, session {message.get('session')!r} found; it is not counted"
            )
        try:
            report = Report.from_values(message)
        except Malformed as error:
            raise PeerRefused(Refusal.MALFORMED, f"a report expected: {error}") from error
        if report.node != node:
            raise PeerRefused(Refusal.NODE, f"a report of node {node} expected, one of {report.node} found")
        return vars(self._take(report))

    def waits(self) -> bool:
        """Return whether a node waits for an answer; only where this node leads."""
        return self.leader is not None and self.leader.waits

    def _take(self, report: Report) -> Answer:
        assert self.leader is not None
        with self._lock:
            before = self.leader.answer
            found = self.leader.hear(report)
            answer = self.leader.answer
        for complete in found:
            self._completed.put(complete)
        if found:
            self._ring()
        if answer != before:
            self._news.set()
        return answer

    def _serve(self) -> None:
        known = Answer()
        pace = max(_PACE, len(self._peers) / _NODES_A_SECOND)
        while not self._closed:
            report = self._report
            answer = self._ask(report)
            if answer is not None and answer != known:
                known = answer
                self._answers.put(answer)
                self._ring()
            waits = bool(report.written) or report.missed or report.replicated >= 0 or answer is None
            self._news.wait(pace if waits else _IDLE)
            self._news.clear()

    def _ask(self, report: Report) -> Answer | None:
        if self.leader is not None:
            return self._take(report)
        chief = self._chief
        client = PeerClient((chief.host, chief.port), self._party, _TIMEOUT, expected=chief.name)
        sent = self._sent.shortened(report)
        try:
            answer = Answer(**client.ask(sent.to_values()))
        except (PeerError, TypeError) as error:
            self.unreachable = f"node {self._chief.name} does not answer: {error}"
            return None
        self.unreachable = ""
        self._sent.answered(report, sent, answer)
        return answer

    def send(self, name: str, source: DirectoryTier) -> int:
        """Send a copy to the nodes that hold replicas of this one's; return its size.

        Raises:
            PeerError: one of them did not take it.
            DamagedCopy: it is not as it was committed.
            OSError: it cannot be read.
        """
        with source.open(name) as folder:
            manifest, _ = read_manifest(folder, name)
            ends = {file: folder.read(file) for file in (MANIFEST, COMMIT)}
        path = source.folder / name
        files: dict[str, tuple[Path | bytes, str]] = {
            entry.name: (path / entry.name, entry.digest) for entry in manifest.needed()
        }
        files |= {file: (content, file_digest(content)) for file, content in ends.items()}
        nbytes = 0
        for holder in self.together.holders:
            peer = self._peers[holder]
            client = PeerClient((peer.host, peer.port), self._party, throttle=self._throttle, expected=holder)
            nbytes += client.send(self.together.node, name, files)
        return nbytes


def served(stage: Stage, name: str) -> Path | None:
    """Return the folder of a tier in memory that peers may read under a name, None: there is none."""
    if name == MEMORY:
        return stage.tier.folder
    if name == LANDING:
        return stage.landing.folder
    folder = stage.replicas / name.removeprefix(REPLICA)
    return folder if name.startswith(REPLICA) and folder.is_dir() else None


def shelf(stage: Stage, together: Together, node: str, nbytes: int) -> ReplicaShelf | None:
    """Return what takes a replica of a node; None: the placement has this node hold none of it.

    Raises:
        PeerRefused: it is too large, or there are too many.
    """
    most = together.holds.get(node)
    if most is None:
        return None
    if nbytes > most:
        raise PeerRefused(
            Refusal.LIMIT, f"a part of node {node} of at most {most} bytes expected, one of {nbytes} found"
        )
    tier = stage.replica(node)
    count = len(tier.names())
    if count >= MOST_REPLICAS:
        raise PeerRefused(
            Refusal.LIMIT, f"{count} copies of node {node} are held already, at most {MOST_REPLICAS}"
        )
    with contextlib.suppress(FileExistsError):
        os.makedirs(tier.folder, mode=0o700)
    return ReplicaShelf(tier.folder)


def _all_of(source: queue.SimpleQueue[Any]) -> list[Any]:
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(source.get_nowait())
    return found


_ROUNDS = 2  # the present one, and the one before, of which this node may not have heard how it went
_LAST_WORD_SECONDS = 10.0  # how long the others are waited for when the owner has ended


class TeamKeeper(CopyCommitter):
    """Keeps the copies of one node of several.

    Args:
        members: who the ranks are.
        disk: works on the durable tier.
        status: how far the writer is.
        sink: takes records.
        ties: wake this keeper, and prove to others who it is.
        lease: file that says whether this node may commit; "" where nobody watches over that.
    """

    _last = 2

    def __init__(
        self,
        members: Members,
        disk: Tasks,
        status: Status,
        sink: Callable[[Record], None],
        ties: Ties,
        lease: str = "",
    ) -> None:
        assert members.together is not None
        self._ties = ties
        self._sender = Tasks("replicas", ties.ring)
        self._node = members.together.node
        self.team: WriterCluster | None = None
        self._member = Member(self._node, members.session)
        self._told: dict[str, dict[str, Any]] = {}  # written here; what is said when all have
        self._to_commit: list[Complete] = []
        self._over_since = 0.0
        self._swept = False  # what earlier sessions began on disk, once no node works at that any more
        self._said = ""
        super().__init__(members, disk, replace(status, replicated_step=-1), sink, lease)
        names = self._stage.tier.names()
        ours = {name for name in names if self._session_of(name) == members.session}
        self._inherited = set(names) - ours
        self._inherited_replicas = {
            (tier.name, name) for tier in self._stage.replica_tiers() for name in tier.names()
        }
        for name in sorted(ours):
            self._member.made(_step(name))

    def _session_of(self, name: str) -> str:
        with contextlib.suppress(OutlastError, OSError), self._stage.tier.open(name) as folder:
            return read_manifest(folder, name)[0].session
        return ""

    def close(self) -> None:
        """End before the keeper of the next generation starts."""
        super().close()
        if self.team is not None:
            self.team.close()

    @property
    def idle(self) -> bool:
        """Whether disk and other nodes have all that they need, or the wait for them is over."""
        if self.team is None:
            return True
        if not super().idle or self._disk.task is not None:
            return False
        if not (self._told or self._to_commit or self.team.waits()):
            return True
        return bool(self._over_since) and time.monotonic() - self._over_since > _LAST_WORD_SECONDS

    def look(self) -> None:
        """Commit, send and write what is due; nothing is committed before the table of nodes is there."""
        together = self.members.together
        if together is None or not together.nodes:
            return
        if self.team is None:
            self.team = WriterCluster(self.members, self.status.durable_step, self._ties)
        for answer in self.team.answers():
            self._hear(answer)
        self._to_commit += self.team.completed()
        self._release_inherited()
        super().look()
        self._replicate(self.team)
        self.team.tell(self._member.report)

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
        """Say whether a copy in memory is still to be brought to disk."""
        if name not in self._inherited or self.members.loaded is None:
            return True
        return name == self.members.loaded and self.status.durable_step < 0 and not self._supersedes()

    def finish(self) -> None:
        """Order the newest copies in memory to disk; all nodes have one of them."""
        super().finish()
        self._over_since = self._over_since or time.monotonic()
        together = self.members.together
        assert together is not None
        if self.idle and (self.members.leads or not together.shared):
            with contextlib.suppress(OSError):  # what other nodes have not completed never will be
                if self._tier.may_commit(self.members.generation):
                    self._tier.sweep()
                else:
                    self._tier.drop_unfinished(self.members.session)

    def _newest(self) -> list[str]:
        """Drop orders for copies that are older than one that all nodes have on disk."""
        ours, durable = self.members.generation, self.status.durable_step
        return [name for name in super()._newest() if not _is_older(name, ours, durable)]

    def _sweep(self) -> list[str]:
        together = self.members.together
        assert together is not None
        return self._tier.sweep(self.members.session) if self.members.leads or not together.shared else []

    def _take(self, name: str, session: str) -> bool:
        newest = self.status.memory_step
        taken = super()._take(name, session)
        if taken and self.status.memory_step > newest:
            self._member.made(self.status.memory_step)
        return taken

    def _lost(self, step: int, why: str, staged: Any) -> None:
        """Tell the others that this node has no part of a copy that was due on disk."""
        if any(record.get("durable") for record in staged.values()):
            name, session = copy_name(step, self.members.generation), self.members.session
            self._member.wrote(Written(name, step, error=why, session=session))
        elif not self.members.leads:
            self._note(f"step {step} is not in memory: {why}")
        else:
            super()._lost(step, why, staged)

    def _kept(self, names: list[str]) -> Collection[str]:
        ours = {name: _step(name) for name in names if name not in self._inherited}
        steps = self._member.keep(ours.values())
        kept = {name for name, step in ours.items() if step in steps} | self._told.keys()
        return (
            kept if self._supersedes() else kept | {name for name in self._inherited if self._may_serve(name)}
        )

    def _may_serve(self, name: str) -> bool:
        """Say whether what an earlier session left may still be loaded: by now only what this one began with.

        All of it would take the buffers that this session needs to make something better.
        """
        return self.members.loaded in (None, name)

    def _supersedes(self) -> bool:
        together = self.members.together
        assert together is not None
        return self._member.supersedes(bool(together.holders))

    def _write(self, name: str) -> Callable[[], Any]:
        together = self.members.together
        assert together is not None
        if not together.shared:
            return super()._write(name)
        names = [peer.name for peer in together.nodes]
        place = (names.index(self._node), len(names))
        return partial(write_part, name, self._stage.tier, self._tier, place, name in self._found)

    def _settle(self) -> None:
        if self._disk.task is None and self._to_commit:
            self._commit_next()
        super()._settle()

    def _commit_next(self) -> None:
        """Commit the oldest copy of which every node has done its part."""
        complete = self._to_commit.pop(0)
        together = self.members.together
        assert together is not None
        if complete.errors:
            self._give_up_copy(complete, "; ".join(complete.errors))
        elif together.shared:
            job = partial(commit_parts, complete.name, self._stage.tier, self._tier, complete)
            self._disk.begin(Task("commit", complete.name, lambda: (complete, job()), self.members.session))
        else:
            self._have(complete)

    def _have(self, complete: Complete) -> None:
        assert self.team is not None
        record = {**self._told.pop(complete.name, {"step": complete.step}), "blocked": complete.blocked}
        self._saved(complete.name, complete.nbytes, record)
        self.team.settled(complete)
        if not self._swept:
            self._swept = True
            self._sweep()

    def _give_up_copy(self, complete: Complete, why: str) -> None:
        assert self.team is not None
        self._told.pop(complete.name, None)
        with contextlib.suppress(OSError):
            self._tier.discard(self._tier.begin(complete.name, complete.session))
        super()._lost(complete.step, why, {0: {"blocked": complete.blocked}})
        self.team.settled(complete, why, self.status.failing)

    def _done(self, done: Done) -> None:
        ours = done.task.session == self.members.session or (
            self.members.leads and place_of(done.task.name)[1] == self.members.generation
        )
        if done.task.kind != "commit" or not ours:
            super()._done(done)
        elif done.error:
            step = _step(done.task.name)
            self._give_up_copy(Complete(done.task.name, step, {}, (), 0.0, (), ""), done.error)
        else:
            self._have(done.value[0])

    def _written(self, done: Done) -> None:
        """Tell the leading writer that this node's part is done, or why not."""
        name = done.task.name
        record = self._wanted.pop(name, None) or {"step": _step(name)}
        if _is_older(name, self.members.generation, self.status.durable_step) or not self._is_owed(name):
            return  # all nodes have brought a later one to disk meanwhile
        self._told[name] = record
        told = Written(
            name,
            _step(name),
            blocked=record.get("blocked", 0.0),
            error=done.error,
            session=self._session_of(name),
        )
        if not done.error:
            with self._stage.tier.open(name) as folder:
                manifest = read_manifest(folder, name)[0]
            own = tuple(zip(manifest.ranks, manifest.own, strict=True))
            told = replace(told, own=own, shared=manifest.shared, contents=manifest.contents)
        self._member.wrote(told)

    def _hear(self, answer: Answer) -> None:
        self._member.hear(answer)
        over = max(answer.durable_step, answer.lost_step)
        for name in [name for name in self._told if _step(name) <= over and not self.members.leads]:
            del self._told[name]
        if not self.members.leads:
            if answer.durable_step > self.status.durable_step:
                self._prune_own()
            self.status = replace(
                self.status,
                durable_step=answer.durable_step,
                lost_step=answer.lost_step,
                failures=answer.failures,
                failing=answer.failing,
                error=answer.error,
            )
        self.status = replace(self.status, replicated_step=self._member.answer.replicated)

    def _prune_own(self) -> None:
        together = self.members.together
        assert together is not None
        if not together.shared:
            self._pruner.prune({self.members.loaded or ""}, self.members.avoid)

    def _replicate(self, team: WriterCluster) -> None:
        """Send the replicas that are due, and record the result."""
        done = self._sender.result()
        if done is not None:
            self._member.sent(_step(done.task.name), not done.error)
            if done.error and done.error != self._said:
                self._said = done.error
                self._note(f"{done.task.name} was not replicated: {done.error}")
        if self._sender.task is not None or not team.together.holders:
            return
        held = {_step(name): name for name in self._stage.tier.names() if name not in self._inherited}
        step = self._member.wanted(held.keys())
        if step >= 0:
            name = held[step]
            self._sender.begin(Task("send", name, partial(team.send, name, self._stage.tier)))

    def _drop_replicas(self) -> None:
        """Remove what other nodes have sent and do not need any more."""
        replicated = self._member.answer.replicated
        better = self._supersedes()
        for tier in self._stage.replica_tiers():
            names = tier.names()
            ours = sorted(_step(name) for name in names if (tier.name, name) not in self._inherited_replicas)
            kept = {*ours[-_ROUNDS:], replicated}  # the others are of rounds that came to nothing
            for name in names:
                old = (tier.name, name) in self._inherited_replicas
                step = _step(name)
                gone = (better or not self._may_serve(name)) if old else step < replicated or step not in kept
                if gone:
                    with contextlib.suppress(OSError):
                        tier.discard(name)

    def _note(self, text: str) -> None:
        now = {"time": time.time(), "clock": time.monotonic()}
        self._sink(Note(**now, generation=self.members.generation, reason=f"node {self._node}: {text}"))


def _step(name: str) -> int:
    return place_of(name)[0]


def _is_older(name: str, generation: int, step: int) -> bool:
    return place_of(name)[1] == generation and place_of(name)[0] < step
