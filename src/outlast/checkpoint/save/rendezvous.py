"""Where the ranks of a generation meet before they save: who is on which node, where each node stages, and
how the writers of the nodes reach each other."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from outlast import files
from outlast.checkpoint.context import OUTAGE_SECONDS, SaveContext
from outlast.checkpoint.policy.manifest import is_label, some
from outlast.checkpoint.policy.placement import Node, Placement, place, replication_groups
from outlast.checkpoint.replica.handshake import NOBODY, Credentials
from outlast.checkpoint.save.host_memory import Demand, rooms_of, shortage
from outlast.checkpoint.tiers.memory_folder import Members, MemoryFolder, Peer, Stage, Together
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointError, SaveFailed, UsageError
from outlast.recovery.policy.events import Note

POLL = 0.002
_AGAIN = 0.25  # seconds after which ranks that hear nothing introduce themselves again
_LOOKS = 20
_SLOW = 1.0  # seconds without room after which that is reported
_LOOPBACK = "127.0.0.1"
_PROBE, _STAGING = ".meeting-", ".staging"
_GROWTH, _SLACK = 4, 64 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Args:
        node: name of the node.
        domains: kind and name of what fails as a whole and the node is in: ``{"rack": "r7"}``.
        toward: a host that all nodes reach; the address by which it is reached is told to the others.
        credentials: what this node proves to others.
    """

    node: str
    domains: Mapping[str, str] = field(default_factory=dict)
    toward: str = _LOOPBACK
    credentials: Credentials = NOBODY

    @classmethod
    def of(
        cls, node: str, domains: Mapping[str, str], toward: str, credentials: Credentials = NOBODY
    ) -> Place:
        """Return a place from the environment; what is empty there is looked up.

        Raises:
            UsageError: the name cannot be a node's.
        """
        name = node or re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename).lstrip("._-") or "node"
        if not is_label(name):
            raise UsageError(f"OUTLAST_NODE={node!r}: letters, digits, points and dashes expected")
        return cls(name, domains, toward or _LOOPBACK, credentials)

    @property
    def host(self) -> str:
        """The address of this node by which others reach it."""
        if self.credentials.host:
            return self.credentials.host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.toward, 9))
                return str(probe.getsockname()[0])
            except OSError:
                return _LOOPBACK


class SaveRendezvous:
    """One rank's part in a meeting; every rank holds it at the same time.

    Args:
        around: this rank's ties to the world.
        memory: the memory folder of this node.
        where: this rank is.
        call_saver: sees to it that a writer runs, where this process is the one to start it.
    """

    def __init__(
        self, around: SaveContext, memory: MemoryFolder, where: Place, call_saver: Callable[[], object]
    ) -> None:
        self._around = around
        self._memory = memory
        self._place = where
        self._call_saver = call_saver
        self.buffers = around.settings.buffers  # of each rank of this node
        self.has_parts = True  # some node may have parts of a copy that several nodes made
        self._before: Members | None = None  # of the session before, until this node's ranks are introduced

    def hold(self, nbytes: Callable[[], int], avoid: Collection[str]) -> Members:
        """Meet, and wait until the writers serve the ranks.

        Args:
            nbytes: returns how large this rank's file will be.
            avoid: copies that must not be loaded.

        Raises:
            UsageError: something in the state cannot be saved exactly, or the nodes cannot save together.
            CheckpointError: the writer does not answer, or a rank cannot stage.
        """
        around = self._around
        agreed = around.rounds.hold("place", lambda: self._say(nbytes()))
        agreed.raise_common(CheckpointError)
        places = [report.data for report in agreed.reports]
        self.has_parts = any(one["parts"] for one in places)
        nodes: dict[str, tuple[int, ...]] = {}
        for rank, one in enumerate(places):
            nodes[one["node"]] = (*nodes.get(one["node"], ()), rank)
        ranks = nodes[self._place.node]
        placement = self._replicas(nodes, places)
        stage, self.buffers = self._fit(nodes, places, placement)
        members = Members(
            generation=around.identity.generation,
            session=places[0]["session"],
            run_id=around.identity.run_id,
            world_size=around.identity.world_size,
            ranks=ranks,
            tier=str(around.tier.folder),
            stage=str(stage),
            keep_last_n=around.settings.keep_last_n,
            avoid=tuple(avoid),
            global_url=around.settings.global_url,
            global_options=around.settings.global_options,
            global_every=around.settings.global_every,
            keep_ancestors=around.settings.keep_ancestors,
            nodes=tuple(nodes),
            left={} if self._before is None else self._before.left_by(nodes),
            training=around.training,
            patience=around.settings.max_failed_seconds,
            disk_bandwidth=around.settings.disk_bandwidth,
        )
        if len(nodes) > 1:
            node, bandwidth = self._place.node, around.settings.replication_bandwidth
            holders = placement.holders.get(node, ())
            holds = {
                one: _most_bytes(places[rank]["nbytes"] for rank in nodes[one])
                for one in placement.held_by(node)
            }
            together = Together(node, self._place.host, True, holders, holds, bandwidth)
            members = replace(members, together=together)
        self.introduce(members)
        if members.together is not None:
            members = self._join(members, members.together, nodes)
        if around.leads:
            with contextlib.suppress(OSError):
                self._probe(members.session).unlink()
        if around.settings.global_url and members.together is not None and not members.together.shared:
            raise UsageError(
                f"global_url {around.settings.global_url}: checkpoints go there from a durable folder that"
                f" all nodes share, {around.tier.folder} is another one on each; nothing was started"
            )
        return members

    def _probe(self, session: str) -> Path:
        return self._around.tier.folder / f"{_PROBE}{session}"

    def _leave(self, session: str) -> None:
        self._around.tier.make()
        self._probe(session).touch()

    def _say(self, nbytes: int) -> dict[str, Any]:
        around = self._around
        before = self._before = self._memory.members()
        session = os.urandom(6).hex()
        if around.leads and around.identity.world_size > 1:
            files.when_there_is_room(lambda: self._leave(session), OUTAGE_SECONDS, passing=files.OUTAGE)
        return {
            "node": self._place.node,
            "domains": dict(self._place.domains),
            "nbytes": nbytes,
            "rooms": _rooms(self._memory),
            "session": session,
            "parts": Stage(self._memory.stage_of(around.training)).replicas.is_dir()
            or (before is not None and (len(before.nodes) > 1 or bool(before.left))),
        }

    def _replicas(
        self, nodes: Mapping[str, tuple[int, ...]], places: Sequence[Mapping[str, Any]]
    ) -> Placement:
        """Return which nodes hold replicas of which."""
        settings = self._around.settings
        if len(nodes) == 1 or not settings.replication:
            return Placement({}, ())
        if settings.replication_jump is not None:
            return _by_ranks(nodes, settings, len(places))
        named = [Node(name, places[ranks[0]]["domains"]) for name, ranks in nodes.items()]
        placement = place(named, settings.replication_factor - 1)
        for gap in placement.gaps:
            lost = f"the loss of {gap.kind} {gap.name} would take the shards of {some(gap.nodes)} with it"
            self._around.record(Note, reason=f"replicas: {lost}: {gap.reason}")
        return placement

    def _fit(
        self,
        nodes: Mapping[str, tuple[int, ...]],
        places: Sequence[Mapping[str, Any]],
        placement: Placement,
    ) -> tuple[Path, int]:
        """Return where this node stages, and how many buffers a rank has: in memory, if at least two fit."""
        around, most = self._around, self._around.settings.buffers
        more = _more(around.settings) if len(nodes) > 1 else 0
        states = {node: sum(places[rank]["nbytes"] for rank in ranks) for node, ranks in nodes.items()}
        held = dict.fromkeys(nodes, 0)
        for owner, holders in placement.holders.items():
            for node in holders:
                held[node] += states[owner]
        demands = {node: Demand(len(nodes[node]), states[node], more, held[node]) for node in nodes}
        rooms = {node: places[nodes[node][0]]["rooms"] for node in nodes}
        fit = {node: one.buffers_in(rooms[node], most) for node, one in demands.items()}
        short = sorted((node for node in nodes if fit[node] < most), key=lambda node: fit[node])
        if short:
            worst = short[0]
            then = f"a rank there has {fit[worst]}, and a save may wait until a copy is on disk"
            if not fit[worst]:
                size = states[worst] / 2**30
                then = (
                    f"states are staged on disk, in {around.tier.folder / _STAGING}: each save stops"
                    f" training there until {size:.2f} GiB are written; with buffers, until they are copied"
                )
            why = shortage(demands[worst], rooms[worst], most)
            around.record(Note, reason=f"{self._memory.root} on node {some(short)}: {why}; {then}")
        own = self._place.node
        if fit[own]:
            return self._memory.stage_of(around.training), fit[own] + more
        return around.tier.folder / _STAGING / own, most + more

    def introduce(self, members: Members) -> None:
        """Introduce the ranks, and wait until the writer is done with what older generations left.

        Raises:
            CheckpointError: it does not answer.
            SaveFailed: the memory folder refused.
        """
        timeout = self._around.settings.timeout
        deadline = time.monotonic() + timeout
        speaks = self._around.identity.rank == members.ranks[0]
        introduced = 0.0 if speaks else time.monotonic()
        while (status := self._memory.status()) is None or status.session != members.session:
            now = time.monotonic()
            if now > deadline:
                raise CheckpointError(
                    f"the checkpoint writer of this node does not answer within {timeout:g} s"
                    f" (memory folder {self._memory.root})"
                )
            if now - introduced > _AGAIN:  # who spoke may have been heard by a writer that was about to end
                introduced = now
                if speaks:
                    self._call_saver()
                introduce(self._around, self._memory, members, deadline - now)
            time.sleep(POLL)

    def _join(self, members: Members, together: Together, nodes: Mapping[str, tuple[int, ...]]) -> Members:
        """Give each writer the table of writers.

        Raises:
            UsageError: some nodes have one durable folder in common, and others do not.
        """
        around = self._around

        def say() -> dict[str, Any]:
            status = self._memory.status()
            port = 0 if status is None else status.port
            if not port:
                raise CheckpointError(
                    f"node {together.node}: its checkpoint writer cannot listen on {together.host} for those"
                    " of other nodes"
                )
            return {"host": together.host, "port": port, "sees": self._probe(members.session).exists()}

        agreed = around.rounds.hold("peers", say)
        agreed.raise_common(CheckpointError)
        said = {node: agreed.reports[ranks[0]].data for node, ranks in nodes.items()}
        seeing = [node for node in said if said[node]["sees"]]
        if 1 < len(seeing) < len(nodes):
            raise UsageError(
                f"{around.tier.folder} is one folder on the nodes {some(seeing)} and another one on"
                f" {some(nodes.keys() - set(seeing))}; nothing was started; all nodes must share it, or none"
            )
        peers = tuple(
            Peer(node, ranks, said[node]["host"], said[node]["port"]) for node, ranks in nodes.items()
        )
        together = replace(together, shared=len(seeing) > 1, nodes=peers)
        members = replace(members, together=together)
        if around.identity.rank == members.ranks[0]:
            introduce(around, self._memory, members, around.settings.timeout)
        return members


def _more(settings: CheckpointOptions) -> int:
    """Return how many buffers more a rank needs where there are several nodes.

    Ranks of two nodes may be a save apart, so one more complete copy is kept; the copy that was replicated
    last, and the one that is being replicated, stay as well.
    """
    return 3 if settings.replication else 1


def _most_bytes(nbytes: Iterable[int]) -> int:
    """Return the largest size of a node's part of a copy, with room for growth."""
    return _GROWTH * sum(nbytes) + _SLACK


def _by_ranks(nodes: Mapping[str, tuple[int, ...]], settings: CheckpointOptions, world: int) -> Placement:
    """Return the placement that NVRx's and Megatron's numbers mean.

    Raises:
        UsageError: the ranks do not divide so, or a group has two ranks on one node.
    """
    jump, factor = settings.replication_jump, settings.replication_factor
    assert jump is not None
    node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
    holders: dict[str, tuple[str, ...]] = {}
    for group in replication_groups(world, jump, factor):
        inside = [node_of[rank] for rank in group]
        if len(set(inside)) < len(inside):
            raise UsageError(
                f"replication_jump {jump}: ranks {some(group)} would hold each other's shards and are on one"
                " node; at least the ranks of a node are expected"
            )
        for node in inside:
            others = (other for other in inside if other != node)
            holders[node] = tuple(dict.fromkeys((*holders.get(node, ()), *others)))
    return Placement(holders, ())


def introduce(around: SaveContext, memory: MemoryFolder, members: Members, patience: float) -> None:
    """Write the table of ranks; a writer of the run before may remove the folder meanwhile.

    Args:
        around: this rank's ties to the world.
        memory: the memory folder.
        members: who the ranks are.
        patience: seconds to wait for room.

    Raises:
        SaveFailed: the memory folder refused.
    """

    def write() -> None:
        with contextlib.suppress(FileNotFoundError):
            memory.make()
            memory.introduce(members)

    try:
        with_room(around, write, patience)
    except OSError as error:
        raise SaveFailed(
            f"the checkpoint writer cannot be told of the ranks: {error}; nothing was lost; make room there,"
            " then start the same command again"
        ) from error


def poll(done: Callable[[], object], seconds: float) -> bool:
    """Look again and again whether something is done; return whether it is in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def with_room(around: SaveContext, do: Callable[[], T], patience: float) -> T:
    """Do something that needs room in memory; report, once and after a moment, that a rank waits for it.

    No other timeout applies to the wait.

    Args:
        around: this rank's ties to the world.
        do: what is tried until there is room.
        patience: seconds to wait for room.

    Returns:
        What ``do`` returned.

    Raises:
        OSError: there is no room, or the file system refused for another reason.
    """
    since, reported = 0.0, False
    with contextlib.ExitStack() as stack:

        def refused(error: OSError) -> None:
            nonlocal since, reported
            if not since:
                since = time.monotonic()
                stack.enter_context(around.waiting())
            if time.monotonic() - since > _SLOW and not reported:
                reported = True
                around.record(Note, reason=f"rank {around.identity.rank} waits for room in memory: {error}")

        return files.when_there_is_room(do, patience, refused)


def _rooms(memory: MemoryFolder) -> dict[str, int]:
    """Return the bytes that a memory folder may have by each limit; see :func:`rooms_of`.

    Raises:
        OSError: it cannot be read.
    """
    for _ in range(_LOOKS):
        with contextlib.suppress(FileNotFoundError):  # a writer that is done with the run before removes it
            memory.make()
            return rooms_of(memory.root)
    raise FileNotFoundError(errno.ENOENT, "the memory folder is removed again and again", str(memory.root))
