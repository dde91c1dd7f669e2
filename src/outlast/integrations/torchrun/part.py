"""One node of a job whose workers belong to torchrun: its membership, kept by a thread.

What torchrun's agent does is told to the other nodes as events: workers failed, ended or finished. What they
decide is read when torchrun's agent asks, ten times a second.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.logging import get_logger

from outlast.cluster.agent import network
from outlast.cluster.lease_file import boot_time
from outlast.cluster.policy.codec import MessageError
from outlast.cluster.policy.events import (
    JoinRejected,
    Judged,
    Log,
    Order,
    Ping,
    Reset,
    SendMessage,
    SendToAddress,
    Start,
)
from outlast.cluster.policy.members import Member, Role
from outlast.cluster.policy.messages import MESSAGES, Assignment, Ending, NodeStatus, Quiesce
from outlast.cluster.policy.node import ClusterNode
from outlast.cluster.rpc.arrivals import CUT
from outlast.cluster.rpc.channel import CannotListen, Gone, Pong, Post, Received, Refused
from outlast.config import FaultToleranceOptions
from outlast.integrations.torchrun.rendezvous import StoreRendezvous
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import AllStarted, CommitSeen, Event, StepsDone, WorkerFinished

UNBOUNDED = sys.maxsize  # restarts: torchrun counts its own (--max-restarts), and ends the job by them
SETTLE_PATIENCE = 5.0
_ASK_TO_GROW_EVERY = 1.0
_ENDPOINT_EVERY = 1.0
_log = get_logger("torch.distributed.elastic.rendezvous.outlast")  # below torch: shown as torchrun says it


class Part:
    """One node of the job, between torchrun's thread and one that keeps in touch with the others.

    Args:
        meeting: where and how agents meet.

    Raises:
        UsageError: the numbers of nodes do not fit each other, or a token is missing.
    """

    def __init__(self, meeting: StoreRendezvous) -> None:
        self.address, self.run_id = meeting.address, meeting.run_id
        self.ending: Ending | None = None
        self._meeting, self._terms = meeting, meeting.terms()
        self._changed = threading.Condition()
        self._mine: Assignment | None = None
        self._runs: Assignment | None = None  # the generation whose workers torchrun has started
        self._workers = False  # they may run still
        self._over = 0  # generations before this one are
        self._refusal = ""
        self._refused: set[tuple[str, str]] = set()
        self._asked_at = self._endpoint_at = 0.0
        self._left = False
        self._post, self._cluster_node = self._join(0)
        self._thread = threading.Thread(target=self._serve, name="outlast", daemon=True)
        self._thread.start()

    # What torchrun's agent does.

    def ended(self) -> None:
        """Take note that torchrun's workers have ended; that is a fault, unless another node's came first."""
        with self._changed:
            self._workers = False
            if self._runs is not None and self._over <= self._runs.generation:
                words = f"workers of {self._meeting.name} failed; torchrun restarts them"
                self._fault(FaultKind.CRASH, self._runs.generation, words)
            elif self._over:
                self._carry(self._cluster_node.halted(self._over, boot_time()))

    def place(self, port: int) -> Assignment:
        """Wait for this node's ranks in a younger generation.

        Args:
            port: of the store that this node has ready.

        Raises:
            RendezvousError: there will be none; see :meth:`Handler.next_rendezvous`.
            SystemExit: nor has there to be one: the job is done, and this node was a spare.
        """
        with self._changed:
            self._carry(self._cluster_node.offers(NodeStatus(port), boot_time()))
            limit = self._limit()
            while True:
                mine = self._mine
                self._raise_if_over()
                if mine is not None and mine.generation >= self._over and mine.generation > self._number:
                    if mine.seated:
                        return mine
                    if self._cluster_node.alone_since(boot_time()) is None:
                        limit = self._limit()  # a spare waits for as long as the job runs
                if boot_time() > limit:
                    raise RendezvousTimeoutError(
                        f"node {self._meeting.name} has waited for {self._terms.join_timeout:.0f} seconds for"
                        f" {self._terms.least} node(s) at {','.join(self._meeting.seeds)}"
                        " (--rdzv-conf join_timeout)"
                    )
                self._changed.wait(1.0)

    @property
    def _number(self) -> int:
        return 0 if self._runs is None else self._runs.generation

    def _limit(self) -> float:
        # The job ends by itself after join_timeout with too few nodes; its reason is the better one.
        return boot_time() + self._terms.join_timeout + self._terms.ping_timeout

    def _raise_if_over(self) -> None:
        if self._refusal:
            raise RendezvousError(self._refusal)
        if self.ending is None:
            return
        if self.ending.exit_code == 0:
            # RendezvousGracefulExitError is meant for this, but torch 2.13's launch_agent() then asks None
            # whether it has failed, and the launcher of a job that succeeded ends with a traceback.
            _log.warning("the job is done, and this spare node with it: %s", self.ending.reason)
            raise SystemExit(0)
        raise RendezvousClosedError(
            f"the job is over: {self.ending.reason}; the log of the leader's node names the fault"
        )

    def begins(self, mine: Assignment) -> None:
        """Take note that torchrun starts the workers of a generation."""
        with self._changed:
            self._runs, self._workers = mine, True
            self._tell(AllStarted(mine.generation), mine.generation)
            # The generation's number stands for the step, which nobody knows here: the loss of a node
            # in another generation is another fault.
            self._tell(StepsDone(mine.generation), mine.generation)

    def failed(self, generation: int, reason: str) -> None:
        """Give up a generation in which torchrun has started nothing."""
        with self._changed:
            self._over = max(self._over, generation + 1)
            self._fault(FaultKind.LOST, generation, reason)

    def is_over(self, generation: int) -> bool:
        """Say whether a generation is."""
        with self._changed:
            return self._over > generation or bool(self._refusal) or self.ending is not None

    def has_to_restart(self) -> bool:
        """Say whether torchrun's workers have to end."""
        return self._workers and self.is_over(self._number)

    def finished(self) -> None:
        """Take note that torchrun's workers are done; wait for a moment until those of all nodes are."""
        with self._changed:
            runs = self._runs
            if runs is not None and self.ending is None:
                self._tell(WorkerFinished(runs.node_rank, runs.generation), runs.generation)
                self._changed.wait_for(lambda: self.ending is not None, SETTLE_PATIENCE)

    def close_job(self, reason: str) -> None:
        """End the job on every node, and wait for a moment until they know."""
        deadline = boot_time() + SETTLE_PATIENCE
        with self._changed:
            said = 0
            while self.ending is None and boot_time() < deadline and not self._refusal:
                newest = max(self._number, self._over)
                if newest > said:  # messages about an older generation are stale
                    said = newest
                    self._fault(FaultKind.REFUSED, newest, f"{self._meeting.name}: {reason}")
                self._changed.wait(0.1)
                if not said:
                    return

    def leave(self) -> None:
        """Say goodbye to the others, once they know that the job is over."""
        with self._changed:
            if self.ending is not None:
                self._changed.wait_for(self._cluster_node.settled, SETTLE_PATIENCE)
            self._left = True
        self._thread.join(SETTLE_PATIENCE)
        self._post.close()

    def _fault(self, kind: FaultKind, generation: int, reason: str) -> None:
        signature = f"{self._meeting.name} in generation {generation}"  # each is one of its own
        rank = -1 if self._runs is None else self._runs.node_rank
        fault = Fault(kind, self._meeting.name, rank, generation, generation, reason, signature, 1)
        self._tell(fault, generation)

    def _tell(self, event: Event, generation: int) -> None:
        self._carry(self._cluster_node.tell(event, generation, boot_time()))

    # The others.

    def _join(self, after: int) -> tuple[Post, ClusterNode]:
        meeting, terms = self._meeting, self._terms
        incarnation = secrets.token_hex(4)
        host, _, port = meeting.seeds[0].rpartition(":")
        listen = network.listening(host, meeting.address)
        post = None
        if network.is_ours(host):
            with contextlib.suppress(CannotListen):  # another agent of this host has it
                post = Post(f"{meeting.name}#{incarnation}", listen, int(port), meeting.token)
        bootstrap_node = post is not None
        post = post or Post(f"{meeting.name}#{incarnation}", listen, 0, meeting.token)
        me = Member(
            meeting.name,
            f"{meeting.address}:{post.port}",
            terms.slots,
            terms.run_id,
            terms.version,
            terms.options,
            incarnation,
        )
        budgets = FaultToleranceOptions(max_restarts=UNBOUNDED, max_restarts_per_day=UNBOUNDED)
        now = boot_time()
        start = Start(bootstrap_node, meeting.seeds, None, after)
        return post, ClusterNode(me, terms, budgets, start, (now, time.time() - now))

    def _serve(self) -> None:
        try:
            while not self._left:
                now = boot_time()
                waiting = select.poll()
                waiting.register(self._post.fileno(), select.POLLIN)
                waiting.poll(1000 * max(0.0, self._cluster_node.deadline(now) - now))
                with self._changed:
                    self._take()
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - the last frame of the thread: torchrun must hear of it
            _log.exception("the rendezvous of %s failed", self._meeting.name)
            with self._changed:
                self._refusal = f"the rendezvous of {self._meeting.name} failed: {error!r}"
                self._changed.notify_all()

    def _take(self) -> None:
        for one in self._post.arrived():
            now = boot_time()
            if isinstance(one, Received):
                try:
                    message = MESSAGES.read(one.text)
                    self._carry(self._cluster_node.handle(one.sender, message, now))
                except MessageError as error:
                    _log.warning("malformed message from %s: %s; ignored", one.sender, error)
            elif isinstance(one, Gone):
                if one.reason != CUT:
                    self._carry(self._cluster_node.gone(one.peer, one.reason))
            elif isinstance(one, Pong):
                self._carry(self._cluster_node.answered(one.peer, one.idle, now))
            elif one.vacant:
                self._cluster_node.unreachable(one.address, now)
            if isinstance(one, Refused) and (one.address, one.reason) not in self._refused:
                self._refused.add((one.address, one.reason))
                _log.warning("no connection with %s: %s", one.address, one.reason)
                turned_away = one.address in self._meeting.seeds and "token" in one.reason
                if turned_away and not self._cluster_node.generation:
                    self._refusal = f"{one.address} does not take this node: {one.reason} (token_file)"
        now = boot_time()
        self._carry(self._cluster_node.tick(now))
        self._ask_to_grow(now)
        self._take_endpoint(now)

    def _take_endpoint(self, now: float) -> None:
        """Listen at the endpoint of this host, if what had its port before this agent has gone."""
        host, _, port = self._meeting.seeds[0].rpartition(":")
        node = self._cluster_node
        lost = node.alone_since(now) is not None and not node.generation and self._post.port != int(port)
        if not lost or now < self._endpoint_at:
            return
        self._endpoint_at = now + _ENDPOINT_EVERY
        if network.may_listen(host, self._meeting.address, int(port)):
            self._begin_anew(0)

    def _ask_to_grow(self, now: float) -> None:
        """Let the job grow as soon as it can: torchrun has no safe step that could be waited for."""
        leader_state, number = self._cluster_node.leader_state, self._cluster_node.generation
        if leader_state is None or not number or leader_state.lead.generation != number:
            return
        roles = Counter(leader_state.lead.roles().values())
        could = roles[Role.SPARE] and roles[Role.ACTIVE] < self._terms.most
        if could and now - self._asked_at >= _ASK_TO_GROW_EVERY:
            self._asked_at = now
            self._tell(CommitSeen(number, "torchrun"), number)

    def _carry(self, orders: Iterable[Order]) -> None:
        for one in orders:
            match one:
                case SendMessage(to, message, address):
                    self._post.send(to, MESSAGES.write(message).encode(), address)
                case Ping(to, address):
                    self._post.ping(to, address)
                case SendToAddress(address, message):
                    self._post.knock(address, MESSAGES.write(message).encode())
                case Reset(after, reason):
                    _log.warning("%s", reason)
                    self._begin_anew(after)
                    return
                case _:
                    self._obey(one)

    def _obey(self, order: Order) -> None:
        match order:
            case Quiesce(generation):
                self._halt(generation)
            case Assignment():
                self._mine = order
                if order.generation > self._number:
                    self._over = max(self._over, order.generation)
            case Ending():
                self.ending = order
            case JoinRejected(reason):
                self._refusal = f"the job does not take this node: {reason}"
            case Judged(_, fault) if fault is not None:
                _log.warning("generation %d: %s", fault.generation, fault.reason)
            case Log(reason):
                _log.info("%s", reason)

    def _halt(self, generation: int) -> None:
        self._over = max(self._over, generation)
        if not self._workers:
            self._carry(self._cluster_node.halted(generation, boot_time()))

    def _begin_anew(self, after: int) -> None:
        status = self._cluster_node.status
        self._post.close()
        self._mine = None
        self._post, self._cluster_node = self._join(after)
        self._over = max(self._over, after + 1)
        self._carry(self._cluster_node.offers(status, boot_time()))
