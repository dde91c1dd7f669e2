"""The checkpoint writers of a session, seen from one of them: they finish copies together.

Each reports to the one that leads, and sends and takes replicas. A node alone leads itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outlast import codec
from outlast.checkpoint.content.digest import file_digest
from outlast.checkpoint.policy.joint import Answer, Complete, Leader, Report
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST
from outlast.checkpoint.policy.placement import MEMORY, REPLICA
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import PeerError, PeerRefused, Refusal, Throttle
from outlast.checkpoint.replica.handshake import Credentials
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.memory_folder import LANDING, Members, Stage, Together
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer.durable import Tasks
from outlast.codec import Malformed
from outlast.errors import CheckpointError

_PACE = 0.02  # seconds between two reports while an answer is waited for
_NODES_A_SECOND = 1000  # reports that a leader is to hear
_IDLE = 2.0  # seconds between two reports otherwise
_TIMEOUT = 10.0
MOST_REPLICAS = 8  # of a node: what the session before left, the newest that all have, two rounds under way


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
        members: of this node; with the table of nodes, if there are others.
        answer: what a leader begins with: what is on disk already, and how saves went before.
        ring: wakes the committer.
        credentials: what this node proves to the others.
    """

    def __init__(
        self, members: Members, answer: Answer, ring: Callable[[], None], credentials: Credentials
    ) -> None:
        together = members.together
        self._node = "" if together is None else together.node
        self._peers = {} if together is None else {peer.name: peer for peer in together.nodes}
        self.holders = () if together is None else together.holders
        self._session = members.session
        self._ring = ring
        self._lock = threading.Lock()
        self._answer: Answer | None = None  # of the leading writer
        self._report = Report(self._node, members.session)
        self._completed: list[Complete] = []
        self._news = threading.Event()
        self._closed = False
        self._heard: dict[str, float] = {}  # when another node has reported, or the leader answered, last
        self.sender = Tasks("replicas", ring)
        self.leader: Leader | None = None
        if together is not None:
            assert together.nodes, "the table of nodes is there"
            self._party = members.party(credentials)
            self._throttle = Throttle(together.bandwidth)
        if members.leads or together is None:
            self.leader = Leader(self._peers or [""], bool(self.holders), answer, time.monotonic())
        else:
            self._chief = next(peer for peer in self._peers.values() if 0 in peer.ranks)
            threading.Thread(target=self._serve, name="reports", daemon=True).start()

    def close(self) -> None:
        """End; what is under way is not waited for."""
        self._closed = True
        self._news.set()
        self.sender.close()

    def tell(self, report: Report) -> tuple[Answer | None, list[Complete]]:
        """Report this node's progress to the leading writer.

        Returns:
            The latest answer, None if none has come; where this node leads, also the copies whose parts
            all nodes have done since the last call.
        """
        if self.leader is None:
            if report != self._report:
                self._report = report
                self._news.set()
            return self._answer, []
        answer = self._take(report)
        with self._lock:
            found, self._completed = self._completed, []
        return answer, found

    def settled(self, complete: Complete, error: str, counts: bool) -> Answer:
        """Report the result of a commit to all nodes, as their leader; see :meth:`Leader.settled`."""
        assert self.leader is not None
        with self._lock:
            self.leader.settled(complete, error, time.monotonic(), counts)
            return self.leader.answer_to(self._node)

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
                f"node {self._node}: a report of session {self._session} for the leading node"
                f" expected, session {message.get('session')!r} found; it is not counted"
            )
        try:
            report = Report.from_values(message)
        except Malformed as error:
            raise PeerRefused(Refusal.MALFORMED, f"a report expected: {error}") from error
        if report.node != node:
            raise PeerRefused(Refusal.NODE, f"a report of node {node} expected, one of {report.node} found")
        self._heard[node] = time.monotonic()
        before = self.leader.answer
        answer = self._take(report)
        if self._completed or self.leader.answer != before:
            self._ring()
        return vars(answer)

    def waits(self) -> bool:
        """Return whether a node waits for an answer; only where this node leads."""
        return self.leader is not None and self.leader.waits

    @property
    def last_word(self) -> float:
        """Time of the last message of the leader, or of a node that has yet to report a part; 0: none."""
        if self.leader is None:
            return self._heard.get(self._chief.name, 0.0)
        with self._lock:
            lacking = self.leader.lacking
        return max((self._heard.get(node, 0.0) for node in lacking), default=0.0)

    def _take(self, report: Report) -> Answer:
        assert self.leader is not None
        with self._lock:
            self._completed += self.leader.hear(report)
            return self.leader.answer_to(report.node)

    def _serve(self) -> None:
        pace = max(_PACE, len(self._peers) / _NODES_A_SECOND)
        while not self._closed:
            report = self._report
            answer = self._ask(report)
            if answer is not None and answer != self._answer:
                self._answer = answer
                self._ring()
            pending = answer is None or bool(report.written or answer.heard)
            waits = pending or report.missed or report.replicated >= 0
            self._news.wait(pace if waits else _IDLE)
            self._news.clear()

    def _ask(self, report: Report) -> Answer | None:
        chief = self._chief
        client = PeerClient((chief.host, chief.port), self._party, _TIMEOUT, expected=chief.name)
        with contextlib.suppress(PeerError, Malformed):  # it is asked again
            answer = codec.convert(client.ask(report.to_values()), Answer)
            self._heard[chief.name] = time.monotonic()
            return answer
        return None

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
        for holder in self.holders:
            peer = self._peers[holder]
            client = PeerClient((peer.host, peer.port), self._party, throttle=self._throttle, expected=holder)
            nbytes += client.send(self._node, name, files)
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
