"""What agents write to each other; :data:`MESSAGES` turns any of it into JSON and back.

Who wrote a message is known from its connection, so no message says it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from outlast.cluster.policy.codec import (
    MOST_NODES,
    MOST_RANKS,
    Address,
    AtMost,
    Codec,
    Count,
    ExitCode,
    Generation,
    Identities,
    Identity,
    Name,
    Port,
    Rank,
    Ranks,
    Signum,
    Within,
)
from outlast.cluster.policy.members import Member
from outlast.hang.policy.attribution import EvidenceReport
from outlast.hang.policy.diagnosis import Verdict
from outlast.parallelism.policy.shares import FULL_SPEED, MOST_SLOW
from outlast.recovery.policy.events import Fault
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    CopySetAside,
    LoadSeen,
    NoSaveComes,
    OwnCheckpoint,
    StepsDone,
    StopRequested,
    WorkerFinished,
)
from outlast.stragglers.policy.gathering import TimingReport

Key = tuple[Count, Count]  # term and version of a record
Quorums = tuple[frozenset[str], ...]
Incarnation = Annotated[str, AtMost(64)]
NodeRank = Annotated[int, Within(-1, MOST_NODES)]
Wait = Annotated[float, Within(0, 600)]
_MOST_PLAN = 4 << 20
MOST_EVENTS = 64
_MOST_VOTERS = 64
_LATEST = 1e15  # seconds


def agent_id(name: str, incarnation: str) -> str:
    """Return the identity of an agent: one that starts again is another agent, which never voted before."""
    return f"{name}#{incarnation}"


def node_of(agent: str) -> str:
    """Return the name of an agent's node."""
    return agent.rpartition("#")[0]


def incarnation_of(agent: str) -> str:
    """Return an agent's incarnation."""
    return agent.rpartition("#")[2]


@dataclass(frozen=True)
class NodeStatus:
    """What a node has for the next generation.

    Args:
        store: port of the store that it has ready; 0: none.
        able: its living ranks can re-enter their function in their processes; None: no rank lives.
        patience: seconds within which they are at the re-entry barrier, or are ended.
        serial: number of the store, which tells it from earlier ones of its node at the same port.
        device: model of its devices; empty: it has none, or it is not known yet.
        at_risk: why the node's health says that it is about to fail; empty: it does not.
    """

    store: Port = 0
    able: bool | None = None
    patience: Annotated[float, Within(-1e15, math.inf)] = 0.0
    serial: Count = 0
    at_risk: Annotated[str, AtMost(512)] = ""
    device: Annotated[str, AtMost(128)] = ""


NO_STATUS = NodeStatus()


@dataclass(frozen=True)
class Assignment:
    """What a generation means for one node.

    Args:
        generation: its number.
        seated: the node has ranks in it; else it is a spare, and the numbers of its ranks mean nothing.
        first_rank: of its ranks.
        node_rank: place among the nodes that have ranks.
        nodes: how many have.
        world_size: ranks of all of them.
        host, port: of the store where ranks meet.
        master: the node's own agent has that store ready.
        avoid: what ranks are told of single copies.
        state: which state they load.
        reason: of the generation.
        reenter: workers that can re-enter their function are kept.
        hung_again: a hang that came back ended the generation before: the timeout that found it is doubled.
        layout: of the ranks, as text; empty: none was given for any number of ranks.
        wait: seconds before new workers are started.
    """

    generation: Generation
    seated: bool = False
    first_rank: Rank = 0
    node_rank: NodeRank = 0
    nodes: Annotated[int, Within(0, MOST_NODES)] = 1
    world_size: Ranks = 0
    host: Address = ""
    port: Port = 0
    master: bool = False
    avoid: tuple[str, ...] = ()
    state: Annotated[str, AtMost(64)] = "newest"
    reason: str = ""
    reenter: bool = False
    hung_again: bool = False
    layout: Annotated[str, AtMost(128)] = ""
    wait: Wait = 0.0


@dataclass(frozen=True)
class Ending:
    """The job is over."""

    exit_code: ExitCode
    reason: str


@dataclass(frozen=True)
class Record:
    """What the job runs as; the newest one replaces all others.

    Args:
        term: of the leader that wrote it.
        version: of the record within its term.
        generation: that is to run.
        active: agents whose ranks may commit.
        agents: all that are told.
        plan: of the generation, and what a successor has to know besides, as text.
        quorums: sets of voters; a majority of each is needed. Two while the voters change.
    """

    term: Count
    version: Count
    generation: Generation
    active: Identities
    agents: Identities
    plan: Annotated[str, AtMost(_MOST_PLAN)]
    quorums: Annotated[tuple[Annotated[frozenset[Identity], AtMost(_MOST_VOTERS)], ...], AtMost(2)]

    @cached_property
    def key(self) -> tuple[int, int]:
        """Return what orders records."""
        return self.term, self.version

    @cached_property
    def voters(self) -> frozenset[str]:
        """Return everybody who has a vote."""
        return frozenset().union(*self.quorums)

    @cached_property
    def told(self) -> tuple[str, ...]:
        """Return everybody who gets heartbeats, in the order of their names."""
        return tuple(sorted(self.agents | self.voters))


# Leader election and heartbeats. ``session`` is the agent that founded the job.


@dataclass(frozen=True)
class VoteRequest:
    """An agent wants to lead; ``pre_vote``: it only asks whether it would be voted for."""

    term: Count
    key: Key
    pre_vote: bool
    session: Identity = ""


@dataclass(frozen=True)
class Vote:
    """An answer to a request; ``asked`` is the term that it asked for, ``term`` the voter's own."""

    term: Count
    asked: Count
    pre_vote: bool
    granted: bool
    session: Identity = ""


@dataclass(frozen=True)
class AppendEntries:
    """The leader says what is to run: a heartbeat.

    Args:
        term: of the leader.
        sent: on the leader's clock.
        key: of the newest record.
        committed: a majority has it.
        granted: seconds for which the receiver's ranks may commit, counted from ``echo``; 0: they may not.
        incarnation: of the receiver, as its last reply said.
        echo: when it sent that reply, on its own clock.
        record: the newest one; None: the receiver has it. A receiver that does not vote gets it without plan.
        assignment: what the record means for a receiver that does not vote.
        taken: number of the receiver's last event that the leader has.
        saved: the step that the job would go on from; -1: there is none.
        member: the receiver is a node of the job; else it is lost for the leader, and has to join again.
    """

    term: Count
    sent: float
    key: Key
    committed: bool
    granted: float = 0.0
    incarnation: Incarnation = ""
    echo: float = 0.0
    record: Record | None = None
    assignment: Assignment | Ending | None = None
    taken: Count = 0
    session: Identity = ""
    saved: Annotated[int, Within(-1, 1 << 53)] = -1
    member: bool = True


@dataclass(frozen=True)
class AppendReply:
    """An agent's answer to a heartbeat.

    Args:
        term: that it knows.
        key: of the newest record that it has.
        generation: of that record.
        incarnation: differs between two starts of the agent.
        status: of its node.
        sent: on its own clock.
        echo: ``sent`` of the heartbeat.
    """

    term: Count
    key: tuple[Annotated[int, Within(-1, 1 << 53)], Annotated[int, Within(-1, 1 << 53)]]
    generation: Generation
    incarnation: Incarnation
    status: NodeStatus = NO_STATUS
    session: Identity = ""
    sent: float = 0.0  # these two are the last ones: see MessageReader
    echo: float = 0.0


@dataclass(frozen=True)
class RecordMissing:
    """A heartbeat left out a record that its receiver does not have."""


# Joining, and jobs of one name that learn of each other.


@dataclass(frozen=True)
class Join:
    """An agent asks to join.

    Args:
        member: what it says of its node.
        generation: that it runs; 0: none.
        after: a generation that it knows to have been.
        session: the job that it is in.
        asked: the signal that asked it to stop; 0: none. The leader is told so at once: the first heartbeat
            may have to wait until another node has imported torch.
        status: of its node.
    """

    member: Member
    generation: Generation
    after: Generation
    session: Identity = ""
    asked: Signum = 0
    status: NodeStatus = NO_STATUS


@dataclass(frozen=True)
class JoinAccepted:
    """The node is part of the job; heartbeats follow once there is a plan."""


@dataclass(frozen=True)
class JoinRefused:
    """The node is not taken in; ``excluded``: it was, and is used no more."""

    reason: str
    excluded: bool = False


@dataclass(frozen=True)
class Redirect:
    """The leader is at another address."""

    address: Address


@dataclass(frozen=True)
class Beacon:
    """A job that runs, or its end; also what its leader writes into the run folder every second.

    Args:
        run_id: what it is called.
        generation, session: which one it is; the higher generation counts for more.
        address: of its leader.
        beat: rises with each one that is written into the folder.
        end: how the job ended; None: it runs.
    """

    run_id: Annotated[str, AtMost(512)]
    generation: Generation
    session: Identity
    address: Address
    beat: Count = 0
    end: Ending | None = None

    @property
    def rank(self) -> tuple[int, str]:
        """Return what two jobs of one name are compared by."""
        return self.generation, self.session


@dataclass(frozen=True)
class AgentsRestarted:
    """These agents have started again, so the agents before them on their nodes are dead."""

    fresh: Annotated[tuple[Identity, ...], AtMost(MOST_NODES)]


# A running generation.


@dataclass(frozen=True)
class Quiesce:
    """End every generation before this one; with ``reenter`` only leave it, where workers can."""

    generation: Generation
    reason: str
    reenter: bool = False


@dataclass(frozen=True)
class StatusReport:
    """A node's status has changed, or it has quiesced.

    Args:
        generation: before which it runs nothing any more; 0: it was not asked.
        status: of the node.
    """

    generation: Generation
    status: NodeStatus


EventKind = (
    AllStarted
    | CommitSeen
    | CopyGone
    | CopySetAside
    | Fault
    | LoadSeen
    | NoSaveComes
    | OwnCheckpoint
    | StepsDone
    | StopRequested
    | WorkerFinished
)


@dataclass(frozen=True)
class NumberedEvent:
    """Something that happened on a node, its number there, and the generation."""

    number: Count
    generation: Generation
    event: EventKind


@dataclass(frozen=True)
class EventBatch:
    """What happened on a node; ``after`` is the number of the event before the first one."""

    after: Count
    events: Annotated[tuple[NumberedEvent, ...], AtMost(MOST_EVENTS)]


@dataclass(frozen=True)
class BlameNotice:
    """Whom the leader names for a hang, from what several agents saw."""

    generation: Generation
    node: Name
    verdict: Verdict
    session: Identity = ""


@dataclass(frozen=True)
class MayLeave:
    """The job is over and every agent knows it: agents that could succeed the leader may end."""

    session: Identity = ""


Times = Annotated[float, Within(-1e15, math.inf)]
Wants = Annotated[int, Within(0, 127)]
SlowRanks = Annotated[
    tuple[tuple[Annotated[int, Within(0, MOST_RANKS)], Annotated[int, Within(1, FULL_SPEED)]], ...],
    AtMost(MOST_SLOW),
]


@dataclass(frozen=True)
class StepProposal:
    """A :class:`~outlast.agreement.policy.steps.Proposal`; its times are counted from when it is sent.

    Args:
        ticket: four times its number, and its stage.
        round: in which it holds.
        step: completed steps after which ranks act.
        wants: what they do, as flags.
        left: seconds until the job is expected to end.
        limit: seconds until a rank must have exited.
        seconds: the longest that a save took, by tier (``agreement.policy.votes.TIERS``); below 0: unknown.
        slow: ranks that get fewer micro-batches, each with its speed in thousandths.
        before: the same, until then.
    """

    ticket: Count
    round: Count
    step: Count
    wants: Wants = 0
    left: Times = math.inf
    limit: Times = math.inf
    seconds: tuple[float, float, float] = (-1.0, -1.0, -1.0)
    slow: SlowRanks = ()
    before: SlowRanks = ()


@dataclass(frozen=True)
class StepOrder:
    """The leader asks a node how its ranks stand, and says what it proposes to them; None: nothing yet."""

    term: Count
    generation: Generation
    session: Identity = ""
    said: StepProposal | None = None


@dataclass(frozen=True)
class StepReport:
    """How the ranks of a node stand: a :class:`~outlast.agreement.policy.steps.Status`.

    Args:
        term: of the leader that it is for.
        generation: of the ranks.
        serial, round, step, answered, passed, wants, apart: as there.
        left, limit, seconds: as in a proposal.
        said: the newest proposal that the node has taken; None: none.
    """

    term: Count
    generation: Generation
    serial: Count
    round: Count
    step: Count
    answered: Count = 0
    passed: bool = False
    wants: Wants = 0
    left: Times = math.inf
    limit: Times = math.inf
    seconds: tuple[float, float, float] = (-1.0, -1.0, -1.0)
    apart: bool = False
    said: StepProposal | None = None
    session: Identity = ""


ElectionMessage = VoteRequest | Vote | AppendEntries | AppendReply
LeaderMessage = (
    RecordMissing | StatusReport | EventBatch | EvidenceReport | TimingReport | StepReport
)  # that only a leader takes
Message = (
    ElectionMessage
    | LeaderMessage
    | Join
    | JoinAccepted
    | JoinRefused
    | Redirect
    | Beacon
    | AgentsRestarted
    | Quiesce
    | BlameNotice
    | MayLeave
    | StepOrder
)
MESSAGES: Codec[Message] = Codec(Message)
BEACONS: Codec[Beacon] = Codec(Beacon)


class MessageReader:
    """Reads messages; what a reply repeats of its sender's last one is not parsed again.

    A leader of a thousand agents reads hundreds of replies a second that differ in nothing but two times.

    Args:
        most: senders whose last reply is kept.
    """

    def __init__(self, most: int = MOST_NODES) -> None:
        self._most = most
        self._last: dict[str, tuple[bytes, AppendReply]] = {}  # a reply up to its times

    def read(self, sender: str, text: bytes) -> Message:
        """Return the message that a text from an agent stands for.

        Raises:
            MessageError: it stands for none.
        """
        head, mark, times = text.rpartition(b',"sent":')
        known = self._last.get(sender)
        if known is not None and head == known[0] and times.endswith(b"}"):
            one = known[1]
            first, _, second = times[:-1].partition(b',"echo":')
            try:
                sent, echo = float(first), float(second)
            except ValueError:
                sent = echo = math.inf
            if abs(sent) + abs(echo) <= _LATEST:  # else the whole message is looked at
                return AppendReply(
                    one.term,
                    one.key,
                    one.generation,
                    one.incarnation,
                    one.status,
                    one.session,
                    sent,
                    echo,
                )
        message = MESSAGES.read(text)
        if mark and isinstance(message, AppendReply):
            if len(self._last) > self._most:
                self._last.clear()
            self._last[sender] = (head, message)
        return message
