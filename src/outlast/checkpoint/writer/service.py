"""The checkpoint writer's loop: wait for a bell, a new generation or the owner's end, then look."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outlast import files
from outlast.checkpoint.policy.manifest import some
from outlast.checkpoint.replica.frames import PeerRefused, Refusal
from outlast.checkpoint.replica.handshake import Credentials, Party
from outlast.checkpoint.replica.server import PeerServer, Terms
from outlast.checkpoint.tiers.memory_folder import Members, MemoryFolder, Status, Together
from outlast.checkpoint.writer.cluster import ReplicaShelf, served, shelf
from outlast.checkpoint.writer.committer import CopyCommitter
from outlast.checkpoint.writer.durable import Tasks
from outlast.checkpoint.writer_process import REMOVED, Owner, remove_renamed, without_others
from outlast.cluster.rpc.handshake import BadSecurity
from outlast.errors import CheckpointError
from outlast.recovery.policy.events import Note, Record

_NOT_MET = "this node's checkpoint writer does not know the other nodes yet; try again"
LOOK_EVERY = 0.5  # seconds between two looks when nobody rings
LAST_LOOK = 0.05
LEAVE_PATIENCE, LEAVE_LOOK = 60.0, 0.01  # seconds; for the disk, between two trainings of one script
_REPORTS_EVERY, _MOST_REPORTS = 60.0, 5
LAST_PATIENCE = 1.0  # seconds after the owner's end in which ranks may complete what others have staged


class Service:
    """Serves one memory folder until its owner has gone.

    Args:
        folder: the memory folder; this process holds its lock.
        owner: of that folder, as long as this process serves it.
        sink: takes records.
        is_ours: whether the lock is still that of the folder.
        credentials: what this node proves to others.
        lease: file that says whether this node may commit; "" where it is the only one.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        owner: Owner,
        sink: Callable[[Record], None],
        is_ours: Callable[[], bool],
        credentials: Credentials,
        lease: str = "",
    ) -> None:
        self._lease = lease
        self._credentials = credentials
        self._folder = folder
        self._is_ours = is_ours
        self._owner = owner
        self._sink = sink
        self._bell = folder.listen()
        self._disk = Tasks("disk", folder.ring)
        self._disk.start()
        self._committer: CopyCommitter | None = None
        before = folder.status()
        self._port = 0 if before is None else before.port
        self._server: PeerServer | None = None
        self._said: Status | None = None
        self._over = False
        self._until = 0.0
        self._refusal = ""  # of a file system, at the last look
        self._reports_since, self._reports = -_REPORTS_EVERY, 0
        with contextlib.suppress(OSError):  # the first look tries again
            self._publish(Status(os.getpid()))

    def run(self) -> None:
        """Serve; return when the owner has gone and the newest of what was staged is on disk.

        It also returns when somebody else removed the folder: a folder of that name then belongs to another
        writer. A folder that has another owner by now stays.
        """
        self._look()  # what a predecessor left is taken on even if the owner has gone already
        while not (self._over and self._finished()):
            self._wait()
            if not self._is_ours():
                return
            self._look()
        self._bell.close()
        if self._server is not None:
            self._server.close()
        with without_others(self._folder.root, self._owner.byte) as alone:
            if alone and not self._is_needed():
                self._remove()

    def _is_needed(self) -> bool:
        """Return whether memory holds what is not on disk, or that cannot be found out."""
        try:
            return self._committer is not None and self._committer.keep_for_later()
        except OSError as error:
            self._note(f"{self._folder.root} stays: {error}")
            return True

    def _remove(self) -> None:
        """Rename the memory folder, and then remove it.

        Ranks that are being killed with their agent may still make files under the old name.
        """
        root = self._folder.root
        if self._committer is not None and self._committer.stage.root != root:
            shutil.rmtree(self._committer.stage.root, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else has removed it
            root.rename(root.with_name(f"{REMOVED}{os.urandom(4).hex()}-{root.name}"))
        remove_renamed(root)

    def _wait(self) -> None:
        sources: list[int] = [self._bell.fileno()]
        if not self._over:
            sources.append(self._owner.link)
        ready = files.readable(sources, LAST_LOOK if self._over else LOOK_EVERY)
        with contextlib.suppress(BlockingIOError):
            while self._bell.fileno() in ready:
                self._bell.recv(64)
        if self._owner.link in ready:
            self._over = True
            self._until = time.monotonic() + LAST_PATIENCE

    def _finished(self) -> bool:
        """Bring what is left to disk; return whether it is there."""
        committer = self._committer
        if committer is None:
            return True
        try:
            said = (
                self._folder.members()
            )  # the next owner's ranks write theirs; its writer waits for this one
            committer.succeeded = said is not None and said.session != committer.members.session
            committer.finish()
            waits = time.monotonic() < self._until and committer.incomplete
            return committer.idle and not waits
        except OSError as error:
            self._refused_by_files(error)
            waits = files.is_outage(error) and not committer.succeeded
            return time.monotonic() > self._until + (committer.members.patience if waits else 0.0)

    def _committer_of(self, members: Members) -> CopyCommitter:
        status = Status(os.getpid()) if self._committer is None else self._committer.status
        if self._committer is not None:
            if self._committer.members.stage != members.stage:
                self._leave(self._committer)
            self._committer.close()
        if members.together is not None:
            status = replace(status, port=self._listen(members))
        return CopyCommitter(members, self._disk, status, self._sink, self._credentials, self._lease)

    def _leave(self, committer: CopyCommitter) -> None:
        """Bring the newest state of a training to disk, and free its memory: another one begins."""
        if committer.members.together is not None:
            shutil.rmtree(
                committer.stage.pool, ignore_errors=True
            )  # the nodes may need the rest of each other
            return
        committer.finish()
        end = time.monotonic() + LEAVE_PATIENCE
        while not committer.idle and time.monotonic() < end:
            committer.look()
            time.sleep(LEAVE_LOOK)
        committer.tidy()
        if committer.idle and not committer.keep_for_later():
            committer.stage.remove()

    def _listen(self, members: Members) -> int:
        """Listen for the writers of other nodes; return the port; 0: that is impossible."""
        try:
            party = members.party(self._credentials)
        except BadSecurity as error:
            self._note(str(error))
            return 0
        for port in (self._port, 0):  # that of the writer before this one may be taken
            if self._server is None:
                with contextlib.suppress(OSError):
                    self._server = self._open(party, port)
        if self._server is None:
            return 0
        self._server.party = party
        return self._server.address[1]

    def _open(self, party: Party, port: int) -> PeerServer:
        return PeerServer(
            (party.host, port),
            party,
            lambda name: None if self._committer is None else served(self._committer.stage, name),
            self._shelf,
            self._answer,
            Terms(admit=self._admit, report=self._refused),
        )

    def _table(self) -> Together | None:
        """Return the table of nodes; the ranks may have written it a moment ago."""
        committer = self._committer
        if committer is None:
            return None
        known = committer.members
        if known.together is not None and not known.together.nodes:
            said = self._folder.members()
            known = said if said is not None and said.session == known.session else known
        return known.together

    def _admit(self, node: str, host: str) -> None:
        """Check that a peer is a node of the job, at the address that the job knows.

        Raises:
            PeerRefused: it is not, or this is not known yet.
        """
        together = self._table()
        if together is None or not together.nodes:
            raise PeerRefused(Refusal.NODE, _NOT_MET)
        peer = next((one for one in together.nodes if one.name == node), None)
        if peer is None:
            names = some([one.name for one in together.nodes])
            raise PeerRefused(Refusal.NODE, f"one of the nodes {names} expected, {node[:60]} found")
        if peer.host != host:
            raise PeerRefused(Refusal.NODE, f"node {node} is at {peer.host}, this connection is from {host}")

    def _shelf(self, node: str, nbytes: int) -> ReplicaShelf | None:
        together, committer = self._table(), self._committer
        return (
            None if together is None or committer is None else shelf(committer.stage, together, node, nbytes)
        )

    def _answer(self, node: str, message: dict[str, Any]) -> dict[str, Any]:
        committer = self._committer
        if committer is None or committer.team is None:
            raise CheckpointError(_NOT_MET)
        return committer.team.hear(node, message)

    def _refused(self, text: str) -> None:
        """Record refused peers and errors between writers, a few times a minute at most."""
        now = time.monotonic()
        if now - self._reports_since > _REPORTS_EVERY:
            self._reports_since, self._reports = now, 0
        self._reports += 1
        if self._reports <= _MOST_REPORTS:
            self._note(f"checkpoint writer: {text}")

    def _note(self, text: str) -> None:
        generation = 0 if self._committer is None else self._committer.members.generation
        self._sink(Note(time.time(), time.monotonic(), generation, text))

    def _look(self) -> None:
        """Do what is due; what a file system refuses is tried again at the next look."""
        try:
            self._work()
            self._refusal = ""
        except OSError as error:
            self._refused_by_files(error)

    def _refused_by_files(self, error: OSError) -> None:
        if self._refusal != str(error):
            self._note(f"checkpoint writer: {error}; it tries again")
        self._refusal = str(error)

    def _work(self) -> None:
        said = None if self._over else self._folder.members()
        if said is not None:
            committer = self._committer
            known = committer is not None and said.session == committer.members.session
            if committer is not None and not known and self._owner.gone():
                return  # the ranks are of another owner, whose writer waits for this one's end
            if committer is None or not known:
                committer = self._committer = self._committer_of(said)
            committer.members = said
        committer = self._committer
        if committer is None:
            self._publish(Status(os.getpid()))
            return
        if self._folder.asked_to_flush():
            committer.flush("the job is about to end")
        with contextlib.ExitStack() as stack:  # each is done although one before it fails
            stack.callback(committer.tidy)
            stack.callback(lambda: self._publish(committer.status))
            committer.look()

    def _publish(self, status: Status) -> None:
        if status != self._said:
            self._folder.publish(status)
            self._said = status
