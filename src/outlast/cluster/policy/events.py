"""What a leader hears, and what it decides; see :mod:`outlast.cluster.policy.job_controller`.

What an agent is told to do by its part in the cluster, and how it begins; see
:mod:`outlast.cluster.policy.node`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outlast.checkpoint.policy.copies import TrustChange
from outlast.cluster.policy.ballots import Timing
from outlast.cluster.policy.members import Joined, Left, Unfit
from outlast.cluster.policy.messages import Assignment, Ending, WireMessage
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.recovery.policy.events import Action, Fault
from outlast.recovery.policy.job import Event


@dataclass(frozen=True)
class NodeStatus:
    """What a node has for the next generation.

    Args:
        store: port of the store that it has ready; 0: none.
        able: its living ranks can be entered again in their processes; None: it has none that live.
        patience: seconds within which they are at the gate, or are ended.
        serial: number of the store, which tells it from earlier ones of its node at the same port.
    """

    store: int = 0
    able: bool | None = None
    patience: float = 0.0
    serial: int = 0


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life.

    Args:
        node: its name.
        life: of its agent.
        offer: what it has for the next generation.
        ended: the generation that it has ended and answers for; 0: it answers for none.
    """

    node: str
    incarnation: str
    offer: NodeStatus = NodeStatus()
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


LeadEvent = Joined | Left | Unfit | Heartbeat | NodeEvent | Looked


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
    plan: str


@dataclass(frozen=True)
class QuiesceNodes:
    """These nodes end what they run, and answer; with ``reenter`` they bring living ranks to the gate."""

    names: tuple[str, ...]
    generation: int
    reason: str
    reenter: bool = False


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
class Log:
    """Worth writing down."""

    reason: str


LeadOutcome = Proposal | QuiesceNodes | Rejected | Judged | Blamed | TrustChange | Log


@dataclass(frozen=True)
class SendMessage:
    """Send a message to an agent; ``address`` helps where there is no connection with it yet."""

    to: str
    message: WireMessage
    address: str = ""


@dataclass(frozen=True)
class JoinRequest:
    """Send a message to whoever listens at an address."""

    address: str
    message: WireMessage


@dataclass(frozen=True)
class Quiesce:
    """End every generation before this one; with ``reenter`` only leave it, where workers can."""

    generation: int
    reason: str
    reenter: bool = False


@dataclass(frozen=True)
class JoinRejected:
    """The job does not take this node."""

    reason: str


@dataclass(frozen=True)
class Reset:
    """The job that this agent was in is over for good: it has to begin anew, with another life.

    Args:
        after: the first generation of the job that follows must be younger than this one.
        reason: in one sentence.
    """

    after: int
    reason: str


Order = Reset | SendMessage | JoinRequest | Quiesce | JoinRejected | Assignment | Ending | LeadOutcome


def timing_for(nodes: int, ping_timeout: float) -> Timing:
    """Return the times for a job of so many nodes: the more there are, the less often each is heard.

    Whoever is lost after a silence of ``ping_timeout`` seconds is asked twice in that time at least.
    """
    times = Timing()
    if nodes > 100:
        times = Timing(interval=1.0, lease=5.0, stagger=1.0) if nodes <= 500 else Timing(2.0, 10.0, 0.01, 1.0)
    return replace(times, interval=min(times.interval, ping_timeout / 2))


@dataclass(frozen=True)
class Start:
    """How an agent begins.

    Args:
        bootstrap node: it has the rendezvous endpoint.
        seeds: addresses where others may be found.
        job_state: what an earlier launch of the job left, for a bootstrap node.
        after: a generation that is known to have been.
    """

    bootstrap_node: bool
    seeds: tuple[str, ...] = ()
    job_state: Mapping[str, Any] | None = None
    after: int = 0
