"""This agent among those of other nodes: messages and time go in, orders come out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from outlast import settings
from outlast.agreement.policy.steps import RanksSeen, TellRanks
from outlast.checkpoint.policy.copies import TrustChange
from outlast.checkpoint.replica.handshake import BadToken, Credentials, derive, make_token, read_token
from outlast.cluster.agent import network
from outlast.cluster.agent.controller import Order
from outlast.cluster.lease_file import LeaseFile, boot_time
from outlast.cluster.policy.codec import MessageError
from outlast.cluster.policy.contacts import BEACON_EVERY
from outlast.cluster.policy.events import (
    CommitRight,
    HoldRanks,
    JoinRejected,
    Judged,
    Log,
    Ping,
    Proposal,
    QuiesceNodes,
    Rejected,
    Reset,
    SendMessage,
    SendToAddress,
    Start,
    TellNodes,
)
from outlast.cluster.policy.events import Order as ClusterOrder
from outlast.cluster.policy.members import Member
from outlast.cluster.policy.messages import (
    BEACONS,
    MESSAGES,
    Beacon,
    Ending,
    MessageReader,
    NodeStatus,
    Quiesce,
)
from outlast.cluster.policy.node import ClusterNode
from outlast.cluster.rpc.arrivals import CUT
from outlast.cluster.rpc.channel import (
    CannotListen,
    Gone,
    MessageTooLong,
    Outgoing,
    Pong,
    Post,
    Received,
    Security,
    check_descriptors,
    checked,
)
from outlast.config import Config
from outlast.errors import ExitCode, RunFolderUnusable, UsageError
from outlast.hang.policy.attribution import Seen
from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.journal import Journal
from outlast.launcher.output.file_thread import FileThread, Latest
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import Fault, RecoveryAction
from outlast.recovery.policy.job import Event, StepsDone, StopRequested
from outlast.stragglers.policy.gathering import TimingReport

ALONE_SAID = 5.0  # seconds without a leader after which that is said
SETTLE_PATIENCE = 5.0  # of the leader, for agents that do not hear how the job ended
ASKED_PATIENCE = 5.0  # of an agent that is to stop, for the leader: a knock, and two pings at most
SUCCESSION_PATIENCE = 10.0  # of those that could succeed it: an election, and as much again
_STEPS_EVERY = 1.0
_ENDPOINT_EVERY = 1.0
_KEEP_EVERY = 5.0
_MOST_EVIDENCE = 64
_MOST_REFUSALS = 1000  # different ones are written down
_MOST_TEXT = 16 << 10  # characters of a fault that other nodes are told; the node's own log has all


def shared_options(options: LaunchOptions) -> str:
    """Return what has to be equal on all nodes, as ``name=value,...``; what is long is a digest.

    What is read of devices, and what a node does about it, is its own.
    """
    nodes = options.nodes
    config, defaults = asdict(options.config), asdict(Config())
    del config["health"]
    said = {
        "nnodes": f"{nodes.least}:{nodes.most}",
        "spares": nodes.spares,
        "node-group-size": nodes.group_size,
        "join_timeout": nodes.join_timeout,
        "last_call_timeout": nodes.grace,
        "ping-timeout": nodes.ping_timeout,
        "script": _digest([options.script.kind.value, os.path.basename(options.script.target)]),
        **_changed(config, defaults),
    }
    return ",".join(f"{name}={value}" for name, value in said.items())


def _changed(config: dict[str, dict[str, Any]], defaults: dict[str, dict[str, Any]]) -> dict[str, object]:
    """Return the settings that are not the defaults."""
    return {
        f"{table}.{key}": value if isinstance(value, (bool, int, float)) else _digest(value)
        for table, entries in config.items()
        for key, value in entries.items()
        if value != defaults[table][key]
    }


def _digest(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]


def token_of(options: LaunchOptions, folder: RunFolder) -> str:
    """Return what proves that an agent belongs to the job.

    From ``--token-file``, else ``OUTLAST_TOKEN_FILE``, else ``OUTLAST_TOKEN``, else a file in the run folder
    that the first agent makes.

    Raises:
        UsageError: the file cannot be read, or is empty.
        RunFolderUnusable: it cannot be made.
    """
    around = settings.inherited()
    given = options.nodes.token_file or around.get(settings.TOKEN_FILE_VARIABLE, "")
    if not given and around.get(settings.TOKEN_VARIABLE):
        return around[settings.TOKEN_VARIABLE]
    path = Path(given) if given else folder.token
    if not given:
        try:
            make_token(path)
        except OSError as error:
            raise RunFolderUnusable(f"{path}: {error.strerror}; nothing was started") from error
    try:
        return read_token(path)
    except BadToken as error:
        raise UsageError(f"--token-file={error}; nothing was started") from error


def _shortened(fault: Fault) -> Fault:
    """Return a fault whose texts fit into a message: an exception may be of any length."""
    evidence = tuple((name, text[:_MOST_TEXT]) for name, text in fault.evidence[:_MOST_EVIDENCE])
    return replace(
        fault, reason=fault.reason[:_MOST_TEXT], signature=fault.signature[:_MOST_TEXT], evidence=evidence
    )


class ClusterController:
    """What decides for this agent in a job of several nodes: the cluster.

    Args:
        options: the command line.
        folder: the run folder.
        journal: keeps what outlives this launcher.
        run_id: of the run.
        hands: the lease file, which tells this node's processes whether they may commit; and the thread that
            reads and writes in the run folder.
    """

    decides = False

    def __init__(
        self,
        options: LaunchOptions,
        folder: RunFolder,
        journal: Journal,
        run_id: str,
        hands: tuple[LeaseFile, FileThread],
        last_choice: str = "",
    ) -> None:
        self._options, self._folder, self._journal = options, folder, journal
        self._lease_file, self._files = hands
        self._last_choice = last_choice[:1000]
        self._reader = MessageReader()
        self._found = Latest(self._files, self._read_board)
        nodes = options.nodes
        self._seeds = tuple(nodes.endpoint.split(","))
        host, _, port = self._seeds[0].rpartition(":")
        self._endpoint = (host, int(port))
        self._local = network.is_loopback(host)
        self.address = nodes.local_addr or network.outward(host)
        self._token = token_of(options, folder)
        self.credentials = Credentials(derive(self._token, run_id), self.address, nodes.tls)
        self._security = Security(*map(Path, nodes.tls)) if nodes.tls else None
        self._terms = nodes.terms(
            run_id,
            metadata.version("outlast"),
            shared_options(options),
            options.world.nproc_per_node,
            options.config.parallelism.chosen,
        )
        check_descriptors(self._terms.most + self._terms.spares)
        self._told_at = self._kept_at = self._board_at = 0.0
        self._kept_generation = 0
        self._done_at: float | None = None
        self._over = False
        self._asked, self._hopes_until = 0, 0.0
        self._endpoint_at = 0.0
        self._refusals: set[tuple[str, str]] = set()
        self._alone_said = False
        self._post, self._cluster_node = self._join_cluster_node(0)
        journal.run_started(0, self._terms.most * self._terms.slots, self._words())

    def _words(self) -> str:
        nodes = self._options.nodes
        return f"node {nodes.name} at {self.address}:{self._post.port}; agents meet at {nodes.endpoint}"

    def _join_cluster_node(self, after: int) -> tuple[Post, ClusterNode]:
        nodes = self._options.nodes
        incarnation = secrets.token_hex(4)
        name = f"{nodes.name}#{incarnation}"
        host, port = self._endpoint
        listen = network.listening(host, self.address)
        post = None
        if network.is_ours(host):
            try:
                post = Post(name, listen, port, self._token, security=self._security)
            except CannotListen:
                post = None  # another agent of this host has it
        bootstrap_node = post is not None
        post = post or self._listen(name, listen)
        place = self._options.world.node_rank
        me = Member(
            name=nodes.name,
            address=f"{self.address}:{post.port}",
            slots=self._terms.slots,
            run_id=self._terms.run_id,
            version=self._terms.version,
            options=self._terms.options,
            incarnation=incarnation,
            group=nodes.group,
            domains=nodes.domains,
            endpoint=self._seeds[0] if bootstrap_node else "",
            node_rank=place if nodes.static else -1,
            last_choice=self._last_choice,
            order=place if place >= 0 else int(settings.inherited().get("SLURM_NODEID", "-1")),
        )
        known = self._journal.recall() if bootstrap_node else None
        if bootstrap_node and known is None:
            after = max(after, self._journal.lost_after())
        start = Start(bootstrap_node, self._seeds, known, after)
        now = boot_time()
        config = self._options.config
        clock = (now, time.time() - now)
        return post, ClusterNode(
            me, self._terms, config.fault_tolerance, start, clock, stragglers=config.stragglers
        )

    def _listen(self, name: str, listen: tuple[str, ...]) -> Post:
        """Listen at the endpoint's port, if it is free on this host: agents are found there."""
        if not self._local:
            with contextlib.suppress(CannotListen):
                return Post(name, listen, self._endpoint[1], self._token, security=self._security)
        return Post(name, listen, 0, self._token, security=self._security)

    def begin(self) -> Sequence[Order]:
        """Start."""
        return (Log(self._words()), *self.tick())

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message waits."""
        return self._post.fileno()

    def deadline(self) -> float | None:
        """Return the monotonic time at which :meth:`tick` has to be called."""
        now = boot_time()
        return time.monotonic() + max(0.0, self._cluster_node.deadline(now) - now)

    def tick(self) -> Sequence[Order]:
        """Take the messages that have arrived, and do what is due."""
        orders: list[Order] = []
        for one in self._post.arrived():
            now = boot_time()
            if isinstance(one, Received):
                try:
                    message = self._reader.read(one.sender, one.text)
                    orders += self._carry(self._cluster_node.handle(one.sender, message, now))
                except MessageError as error:
                    self._note_once(one.sender, f"malformed message from {one.sender}: {error}; ignored")
            elif isinstance(one, Gone):
                if one.reason == CUT:
                    continue  # the network's silence, which says nothing of the agent
                orders += self._carry(self._cluster_node.gone(one.peer, one.reason))
            elif isinstance(one, Pong):
                orders += self._carry(self._cluster_node.answered(one.peer, one.idle, now))
            else:
                if one.vacant:
                    self._cluster_node.unreachable(one.address, now)
                orders += self._refused(one.address, one.reason)
        now = boot_time()
        orders += self._carry(self._cluster_node.tick(now))
        alone = self._cluster_node.alone_since(now)
        orders += self._given_up(alone, now)
        orders += self._take_endpoint(alone, now)
        if now >= self._board_at:
            self._board_at = now + BEACON_EVERY
            if (
                self._cluster_node.leader_state is not None or alone is not None
            ):  # others need not ask the file server
                self._found.ask()
        for notice in self._found.take():
            orders += self._carry(self._cluster_node.read(notice, now))
            self._write_board(self._cluster_node.beacon(now))
        self._keep(now)
        return orders

    def _note_once(self, sender: str, words: str) -> None:
        """Write that a message was refused; the sender repeats it."""
        if (sender, words) not in self._refusals and len(self._refusals) < _MOST_REFUSALS:
            self._refusals.add((sender, words))
            self._journal.note(words)

    def _given_up(self, alone: float | None, now: float) -> list[Order]:
        """Return the end of an agent that hears nobody, once that has lasted or a signal asks for it."""
        limit = self._terms.join_timeout
        if alone is None:
            self._alone_said = False
            return []
        said: list[Order] = []
        if not self._alone_said and now - alone >= min(ALONE_SAID, limit / 2):
            self._alone_said = True
            words = f"no leader was heard for {now - alone:.0f} s; this node looks for one until"
            words += (
                f" {limit:.0f} s are over (--rdzv-conf join_timeout), then ends with {int(ExitCode.FAILED)}"
            )
            said.append(Log(words))
        if self._asked and now >= self._hopes_until:
            code = int(ExitCode.SIGNAL_BASE) + self._asked
            words = f"signal {self._asked} asked for it, and no leader is there to be told"
            said.append(Ending(code, words))
        elif not self._asked and now - alone > limit:
            words = f"no leader was heard for {limit:.0f} seconds (--rdzv-conf join_timeout)"
            said.append(Ending(int(ExitCode.FAILED), words))
        return said

    def _take_endpoint(self, alone: float | None, now: float) -> list[Order]:
        """Listen at the endpoint of this host, if what had its port before this agent has gone."""
        host, port = self._endpoint
        lost = alone is not None and not self._cluster_node.generation and self._post.port != port
        if self._over or not lost or now < self._endpoint_at:
            return []
        self._endpoint_at = now + _ENDPOINT_EVERY
        if not network.may_listen(host, self.address, port):
            return []
        orders = self._start_again(0)
        if self._post.port == port:  # no other agent of this host was faster
            orders.insert(0, Log(f"{host}:{port}, where agents meet, is free now: this node listens there"))
        return orders

    def _refused(self, address: str, reason: str) -> list[Order]:
        if (address, reason) in self._refusals:
            return []
        self._refusals.add((address, reason))
        if address in self._seeds and "token" in reason and not self._cluster_node.generation:
            words = (
                f"{address} does not take this node: {reason} (--token-file); give all nodes one --run-dir"
                f" that they share, or the same --token-file or {settings.TOKEN_VARIABLE}"
            )
            return [Ending(int(ExitCode.DO_NOT_REQUEUE), words)]
        if address in self._seeds and reason.startswith("protocol ") and not self._cluster_node.generation:
            words = (
                f"{address} and this node speak different protocols: {reason}; install one version of outlast"
                " on all nodes"
            )
            return [Ending(int(ExitCode.DO_NOT_REQUEUE), words)]
        return [Log(f"no connection with {address}: {reason}")]

    def _carry(self, orders: Iterable[ClusterOrder]) -> list[Order]:
        """Carry out what concerns the network; return what is left for the agent."""
        left: list[Order] = []
        texts: list[Outgoing] = []
        for one in orders:
            match one:
                case SendMessage(to, message, address):
                    try:
                        texts.append(Outgoing(to, checked(MESSAGES.write(message).encode()), address))
                    except MessageTooLong as error:
                        self._journal.note(f"nothing was sent to {to}: {error}")
                case Ping(to, address):
                    self._post.ping(to, address)
                case CommitRight(generation, until):  # before what is sent after it
                    if not self._over:
                        self._lease_file.allow(generation, until)
                case SendToAddress(address, message):
                    self._post.knock(address, MESSAGES.write(message).encode())
                case Reset(after, reason):
                    self._post.send_all(texts)
                    return [*left, Log(reason), *self._start_again(after)]
                case JoinRejected(reason):
                    words = f"the job does not take this node: {reason}"
                    left.append(Ending(int(ExitCode.DO_NOT_REQUEUE), words))
                case Proposal() | QuiesceNodes() | TellNodes() | HoldRanks() | Rejected():
                    pass  # carried out in the cluster
                case Ending():
                    self._over = True  # every generation is over, so nobody has to be kept from committing
                    self._lease_file.allow(self._cluster_node.generation, math.inf)
                    left.append(one)
                case _:
                    left.append(self._for_the_node(one))
        self._post.send_all(texts)
        return left

    def _for_the_node(self, order: Order) -> Order:
        """Return what is left for the agent; times are on the clock of its ranks from here on."""
        match order:
            case TellRanks(_, said):
                since_boot = boot_time() - time.monotonic()
                said = replace(said, ends=said.ends - since_boot, limit=said.limit - since_boot)
                return replace(order, said=said)
            case Judged(action, _) if action.kind is RecoveryAction.NONE:
                pass
            case TrustChange() | Judged():
                self._kept_at = 0.0
        return order

    def _start_again(self, after: int) -> list[Order]:
        """Become another agent, which looks for the job or founds it again."""
        left: list[Order] = [Quiesce(after + 1, "this agent restarts")]
        if not self._over:
            self._lease_file.allow(0, 0.0)
        status = self._cluster_node.status
        self._post.close()
        self._post, self._cluster_node = self._join_cluster_node(after)
        if self._asked:
            left += self._carry(self._cluster_node.tell(StopRequested(self._asked), 0, boot_time()))
        return left + self._carry(self._cluster_node.offers(status, boot_time()))

    def _read_board(self) -> Beacon | None:
        found = self._folder.peek(self._folder.board)
        try:
            return None if found is None else BEACONS.from_json(found)
        except MessageError:
            return None  # torn, or of another version

    def _write_board(self, notice: Beacon | None) -> None:
        """Say in the run folder which job runs; what cannot be written there is no reason to stop."""
        if notice is not None:
            board, said = self._folder.board, asdict(notice)
            self._files.hand(lambda: self._folder.write(board, said, durable=False), board, 0.0)

    def _keep(self, now: float, every: float = _KEEP_EVERY) -> None:
        """Write, where this node is the leader, what the next launch of the job has to know.

        A new generation is written at once: the next launch must not give its number to another one.
        """
        leader_state = self._cluster_node.leader_state
        if leader_state is None or not leader_state.lead.began:
            return
        lead = leader_state.lead
        if now - self._kept_at < every and lead.generation == self._kept_generation:
            return
        self._kept_at, self._kept_generation = now, lead.generation
        self._journal.keep(lead.job_state())

    def tell(self, event: Event, generation: int) -> Sequence[Order]:
        """Take something that happened on this node in a generation."""
        now = boot_time()
        if isinstance(event, Fault):
            event = _shortened(event)
        if isinstance(event, StepsDone):
            if now - self._told_at < _STEPS_EVERY:
                return ()
            self._told_at = now
        told = self._asked_to_stop(event.signum, now) if isinstance(event, StopRequested) else ()
        return (*told, *self._carry(self._cluster_node.tell(event, generation, now)))

    def _asked_to_stop(self, signum: int, now: float) -> tuple[Order, ...]:
        """Take note of a signal; an agent that hears nobody has knocked, perhaps, and is not answered yet.

        Those that schedulers repeat insist on nothing.
        """
        first, self._asked = not self._asked, signum
        insists = not first and signal.Signals(signum).name not in self._options.config.preemption.notices
        if first or insists:
            self._hopes_until = now + (ASKED_PATIENCE if first else 0.0)
        if insists or self._cluster_node.alone_since(now) is None:
            return ()
        left = max(0.0, self._hopes_until - now)
        return (Log(f"signal {signum}: a leader has {left:.0f} s to answer"),)

    def halted(self, generation: int) -> Sequence[Order]:
        """Take note that this node runs nothing that is older than a generation."""
        return self._carry(self._cluster_node.halted(generation, boot_time()))

    def offers(self, status: NodeStatus) -> Sequence[Order]:
        """Take note of what this node has for the next generation."""
        return self._carry(self._cluster_node.offers(status, boot_time()))

    def seen(self, seen: Seen) -> Sequence[Order]:
        """Tell the leader what was seen of silent ranks of this node."""
        return self._carry(self._cluster_node.seen(seen, time.monotonic(), boot_time()))

    def timed(self, report: TimingReport) -> Sequence[Order]:
        """Tell the leader what the ranks of this node measured."""
        return self._carry(self._cluster_node.timed(report, boot_time()))

    def steps(self, seen: RanksSeen) -> Sequence[Order]:
        """Tell the leader how the ranks of this node stand, where that concerns an agreement on a step."""
        now = boot_time()
        since_boot = now - time.monotonic()
        statuses = tuple(
            replace(one, ends=one.ends + since_boot, limit=one.limit + since_boot) for one in seen.statuses
        )
        return self._carry(self._cluster_node.steps(replace(seen, statuses=statuses), now))

    def settled(self) -> bool:
        """Say whether every agent knows that the job is over, or was given long enough to."""
        now = boot_time()
        self._done_at = self._done_at or now
        patience = SETTLE_PATIENCE if self._cluster_node.leader_state is not None else SUCCESSION_PATIENCE
        if self._over and not self._cluster_node.settled() and now - self._done_at < patience:
            return False
        self._carry(self._cluster_node.farewell())
        return True

    def close(self) -> None:
        """Say goodbye to the others; those that do not hear it find the end of the job in the run folder."""
        if self._over:
            self._keep(boot_time(), every=0.0)
            self._write_board(self._cluster_node.beacon(boot_time()))
        self._lease_file.close()
        self._post.close()


def with_network(options: LaunchOptions, address: str, common: dict[str, str]) -> dict[str, str]:
    """Return the variables that all ranks share, with the interface by which nodes reach each other.

    gloo asks for the address of the host's name otherwise, which on many hosts is the loopback's.
    """
    interface = network.interface_of(address)
    if options.nodes.several and interface:
        common.setdefault("GLOO_SOCKET_IFNAME", interface)
        common.setdefault("TP_SOCKET_IFNAME", interface)
    return common
