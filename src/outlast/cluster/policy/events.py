"""What a leader hears and decides, what an agent is ordered to do, and how it begins.

See :mod:`outlast.cluster.policy.job_controller` and :mod:`outlast.cluster.policy.node`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outlast.agreement.policy.steps import TellRanks
from outlast.checkpoint.policy.copies import TrustChange
from outlast.cluster.policy.ballots import Timing
from outlast.cluster.policy.members import Answered, Joined, Left, Unfit
from outlast.cluster.policy.messages import (
    NO_STATUS,
    Assignment,
    Ending,
    Message,
    NodeStatus,
    Quiesce,
    StepOrder,
)
from outlast.cluster.policy.plan import JobPlan
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.recovery.policy.events import Action, Fault
from outlast.recovery.policy.job import Event
from outlast.stragglers.policy.gathering import TimingReport
from outlast.stragglers.policy.watch import Noticed, RankTimes


@dataclass(frozen=True)
class Heartbeat:
    """A ping.

    Args:
        node: its name.
        incarnation: of its agent.
        status: what it has for the next generation.
        ended: the generation that it has ended and answers for; 0: it answers for none.
    """

    node: str
    incarnation: str
    status: NodeStatus = NO_STATUS
    ended: int = 0


@dataclass(frozen=True)
class NodeEvent:
    """Something happened on a node in a generation."""

    node: str
    generation: int
    event: Event


@dataclass(frozen=True)
class Looked:
    """An agent looked at ranks that were silent for too long."""

    node: str
    seen: Seen


@dataclass(frozen=True)
class Timed:
    """An agent reports what its ranks measured."""

    node: str
    report: TimingReport


LeadEvent = Answered | Joined | Left | Unfit | Heartbeat | NodeEvent | Looked | Timed


@dataclass(frozen=True)
class Proposal:
    """What the job is to run as; it takes effect when a majority has it.

    Args:
        generation: its number.
        active: names of the nodes whose ranks may commit.
        here: names of all nodes that are told.
        plan: all that a successor has to know.
    """

    generation: int
    active: tuple[str, ...]
    here: tuple[str, ...]
    plan: JobPlan


@dataclass(frozen=True)
class QuiesceNodes:
    """These nodes are to quiesce, and to say when they have."""

    names: tuple[str, ...]
    order: Quiesce


@dataclass(frozen=True)
class TellNodes:
    """These nodes are asked how their ranks stand, and told what is proposed to them."""

    names: tuple[str, ...]
    order: StepOrder


@dataclass(frozen=True)
class StepSaved:
    """The step that the job would go on from; every node hears of it."""

    step: int


@dataclass(frozen=True)
class HoldRanks:
    """All ranks save after the same step, and wait there; ``over``: they go on."""

    over: bool = False


@dataclass(frozen=True)
class Rejected:
    """A node is not taken in; ``excluded``: it was, and is used no more."""

    name: str
    reason: str
    excluded: bool = False


@dataclass(frozen=True)
class Judged:
    """What is done about a fault; None: about something else."""

    action: Action
    fault: Fault | None = None


@dataclass(frozen=True)
class Lived:
    """A node that was lost is back with the same agent: it was paused or cut off.

    A node orders it of itself where it has read how the job ended without it: it may have been lost.
    """

    node: str


@dataclass(frozen=True)
class Log:
    """Worth writing down."""

    reason: str


LeadOutcome = (
    Proposal
    | QuiesceNodes
    | TellNodes
    | HoldRanks
    | StepSaved
    | Rejected
    | Judged
    | Blamed
    | TrustChange
    | Lived
    | Log
    | Noticed
    | RankTimes
)


@dataclass(frozen=True)
class SendMessage:
    """Send a message to an agent; ``address`` helps where there is no connection with it yet."""

    to: str
    message: Message
    address: str = ""


@dataclass(frozen=True)
class SendToAddress:
    """Send a message to the agent that listens at an address."""

    address: str
    message: Message


@dataclass(frozen=True)
class Ping:
    """Ask whether an agent is there; its channel answers. Without a connection ``address`` is dialled."""

    to: str
    address: str = ""


@dataclass(frozen=True)
class CommitRight:
    """The generation whose ranks on this node may commit, and until when; messages that follow rely on it."""

    generation: int
    until: float


@dataclass(frozen=True)
class JoinRejected:
    """The job does not take this node."""

    reason: str


@dataclass(frozen=True)
class Reset:
    """The job that this agent was in is over for good: the agent has to start again, as another incarnation.

    Args:
        after: the first generation of the job that follows must be younger than this one.
        reason: in one sentence.
    """

    after: int
    reason: str


LocalOrder = Quiesce | Assignment | Ending | TellRanks
Order = LocalOrder | LeadOutcome | SendMessage | SendToAddress | Ping | CommitRight | Reset | JoinRejected


def timing_for(nodes: int, ping_timeout: float) -> Timing:
    """Return the times for a job of so many nodes: the more there are, the less often each is heard.

    A node that is lost after a silence of ``ping_timeout`` seconds is asked twice in that time at least.
    """
    times = Timing()
    for more_than, interval in ((100, 1.0), (500, 2.0), (1000, 2.4)):
        if nodes > more_than:
            times = Timing(interval, lease=5 * interval, stagger=1.0)
    return replace(times, interval=min(times.interval, ping_timeout / 2))


@dataclass(frozen=True)
class Start:
    """How an agent begins.

    Args:
        bootstrap_node: it has the rendezvous endpoint.
        seeds: addresses where others may be found.
        job_state: what an earlier launch of the job left, for a bootstrap node.
        after: a generation that is known to have been.
    """

    bootstrap_node: bool
    seeds: tuple[str, ...] = ()
    job_state: Mapping[str, Any] | None = None
    after: int = 0
