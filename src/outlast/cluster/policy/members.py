"""What is said about nodes: what a node says of itself, what happens to it, and what is decided about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from outlast.cluster.policy.codec import MOST_NODES, Address, AtMost, Generation, Name, Ranks, Within
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout

_Order = Annotated[int, Within(-1, 1 << 31)]


@dataclass(frozen=True)
class Member:
    """What an agent says of its node when it joins.

    Args:
        name: of the node.
        address: under which other nodes reach it.
        slots: ranks that it takes, as a rule its GPUs; each node may have another number.
        run_id: of the job that it wants to join.
        version: of outlast.
        options: those that all nodes must share, as ``name=value,...``.
        incarnation: differs between two starts of an agent.
        group: nodes that are taken or left together; empty: the node is alone.
        domains: what fails as a whole, from wide to narrow: ``(("row", "2"), ("rack", "r7"))``.
        order: place in the topology, where the scheduler knows one; -1: none.
        node_rank: place among the nodes that the user gave it; -1: none. It goes before the topology.
        endpoint: where agents meet, if that is this agent's address too, by another name; else empty.
        unfit: what the preflight found; empty: nothing.
        last_choice: why it gets ranks only where no other node is left (node ledger); empty: it does not.
    """

    name: Name
    address: Address
    slots: Ranks
    run_id: Annotated[str, AtMost(512)]
    version: Annotated[str, AtMost(128)]
    options: Annotated[str, AtMost(8192)]
    incarnation: Annotated[str, AtMost(64)] = ""
    group: Name = ""
    domains: Annotated[tuple[tuple[Name, Name], ...], AtMost(32)] = ()
    order: _Order = -1
    node_rank: _Order = -1
    endpoint: Address = ""
    unfit: str = ""
    last_choice: Annotated[str, AtMost(1024)] = ""


class Role(Enum):
    """What a node is."""

    ACTIVE = "active"
    SPARE = "spare"
    EXCLUDED = "excluded"
    LOST = "lost"


@dataclass(frozen=True)
class KnownNode:
    """A node, and why it is what it is."""

    member: Member
    role: Role
    why: str


@dataclass(frozen=True)
class Forming:
    """The generation that is being put together, and why."""

    generation: Generation
    reason: str


@dataclass(frozen=True)
class MembershipState:
    """What the next leader has to know of the nodes.

    Args:
        generation: the last one that has begun.
        order: its nodes by rank.
        nodes: all that are known.
        forming: the next generation; None: it is not being put together.
    """

    generation: Generation
    order: Annotated[tuple[Name, ...], AtMost(MOST_NODES)]
    nodes: Annotated[tuple[KnownNode, ...], AtMost(MOST_NODES)]
    forming: Forming | None


@dataclass(frozen=True)
class JobSpec:
    """What every node has to agree with, and how many of them there are.

    Args:
        run_id: of the job.
        version: of outlast.
        options: those that all nodes must share, as ``name=value,...``.
        slots: ranks of this node; another one may have more or fewer.
        least: active nodes below which the job does not run (MIN of ``--nnodes MIN:MAX``).
        most: active nodes at most (MAX).
        spares: nodes beside them that may wait (``--spares``).
        group_size: nodes of a group; 1: each node is alone.
        grace: seconds that a partial membership waits for more nodes, once it is large enough.
        join_timeout: seconds with fewer nodes than the least after which the job ends.
        ping_timeout: seconds of silence after which a node is lost.
        interval: seconds between two looks.
        layouts: of the ranks, one for each number of them at which the job may run; empty: any number will
            do.

    Raises:
        UsageError: the numbers do not fit each other.
    """

    run_id: str
    version: str
    options: str
    slots: int
    least: int
    most: int
    spares: int = 0
    group_size: int = 1
    grace: float = 30.0
    join_timeout: float = 300.0
    ping_timeout: float = 5.0
    interval: float = 0.25
    layouts: tuple[Layout, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(f"--nnodes {self.least}:{self.most}: MIN is at least 1 and at most MAX")
        if self.spares < 0 or self.slots < 1 or self.group_size < 1:
            raise UsageError("--spares is at least 0; slots and nodes of a group are at least 1")
        if self.least % self.group_size or self.most % self.group_size:
            raise UsageError(
                f"--nnodes {self.least}:{self.most}: groups of {self.group_size} nodes are kept together,"
                " so MIN and MAX are multiples of it"
            )

    def refuse(self, member: Member) -> str:
        """Return why a node cannot join, in one sentence; empty: it can."""
        for what, found, expected, hint in (
            ("run id", member.run_id, self.run_id, " (--rdzv-id, or a --run-dir that all nodes share)"),
            ("version of outlast", member.version, self.version, ""),
        ):
            if found != expected:
                words = f"its {what} is {found}, the job's is {expected}{hint}"
                return f"{member.name}: {words}; it is not taken in"
        if member.slots < 1:
            return f"{member.name}: it offers {member.slots} ranks, at least 1 is needed; it is not taken in"
        if member.options != self.options:
            found, expected = _differences(member.options, self.options)
            return f"{member.name}: its options say {found}, the job's say {expected}; it is not taken in"
        if self.group_size > 1 and not member.group:
            return f"{member.name}: it names no group, and groups of {self.group_size} are kept together"
        return f"{member.name}: preflight: {member.unfit}" if member.unfit else ""


def _differences(one: str, other: str) -> tuple[str, str]:
    """Return what each of two lists says and the other does not."""
    here, there = one.split(","), other.split(",")
    return (
        " ".join(each for each in here if each not in there) or "the default",
        " ".join(each for each in there if each not in here) or "the default",
    )


@dataclass(frozen=True)
class Joined:
    """An agent asks to be taken in."""

    member: Member


@dataclass(frozen=True)
class Heard:
    """A ping of a node.

    Args:
        name: of the node.
        incarnation: of the agent that gave it.
        answers: to what nodes are asked while a generation is put together; else it is still busy with that.
    """

    name: str
    incarnation: str = ""
    answers: bool = True


@dataclass(frozen=True)
class Answered:
    """The channel of a node's agent has answered a ping: its process runs, and may be busy.

    Args:
        name: of the node.
        incarnation: of the agent.
        idle: seconds since its loop turned last.
    """

    name: str
    incarnation: str
    idle: float


@dataclass(frozen=True)
class Left:
    """A node is gone for certain: its agent ended, or said goodbye."""

    name: str
    reason: str


@dataclass(frozen=True)
class Unfit:
    """A node must not be used again."""

    name: str
    reason: str


@dataclass(frozen=True)
class RestartOrdered:
    """The caller ends a generation; its budgets allow the next one.

    Args:
        ended: the generation that is over.
        generation: the next one.
    """

    ended: int
    generation: int
    reason: str


@dataclass(frozen=True)
class SafeStep:
    """All ranks of a generation have just saved: this is a good moment to grow.

    Args:
        generation: in force.
        following: number of the next one.
    """

    generation: int
    step: int
    following: int


Event = Joined | Heard | Answered | Left | Unfit | RestartOrdered | SafeStep


@dataclass(frozen=True)
class Refused:
    """A node was not taken in."""

    name: str
    reason: str


@dataclass(frozen=True)
class TakenIn:
    """A node is a spare now; ``lived``: it was lost, and has the same agent as before."""

    name: str
    reason: str
    lived: bool = False


@dataclass(frozen=True)
class Probe:
    """These nodes are to send a ping at once."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Lost:
    """A node is no longer there, or is used no more.

    Args:
        ends: the generation that ends with it; 0: none, it had no rank.
        excluded: it is not taken in again.
        since: when it was last heard of.
    """

    name: str
    reason: str
    ends: int
    excluded: bool
    since: float


@dataclass(frozen=True)
class GrowthWanted:
    """The job could run on more nodes, from the next safe step on."""

    nodes: int
    reason: str


@dataclass(frozen=True)
class Unchanged:
    """An event that changes nothing."""

    reason: str


@dataclass(frozen=True)
class Waits:
    """The job waits for nodes."""

    reason: str


@dataclass(frozen=True)
class TooFew:
    """The job cannot go on."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """The nodes of a generation.

    Args:
        seats: active nodes in the order of their ranks.
        spares: names of those that wait.
        master: the node that serves the store to begin with: that of rank 0.
        moved: active before and now, but with other ranks.
        layout: of the ranks, as text; empty: none was given.
    """

    generation: int
    seats: tuple[RankAssignment, ...]
    spares: tuple[str, ...]
    master: str
    moved: tuple[str, ...]
    reason: str
    layout: str = ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the active nodes in the order of their ranks."""
        return tuple(seat.name for seat in self.seats)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(seat.slots for seat in self.seats)


Decision = Refused | TakenIn | Probe | Lost | GrowthWanted | Unchanged | Waits | TooFew | Plan
