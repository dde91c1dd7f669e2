"""What a coordinator hears, and what it decides; see :mod:`outlast.cluster.policy.job_controller`.

What an agent is told to do by its part in the council, and how it begins; see
:mod:`outlast.cluster.policy.node`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outlast.checkpoint.policy.copies import TrustChange
from outlast.cluster.policy.ballots import Timing
from outlast.cluster.policy.members import Joined, Left, Unfit
from outlast.cluster.policy.messages import Assignment, Ending, Letter
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.recovery.policy.events import Action, Fault
from outlast.recovery.policy.job import Event


@dataclass(frozen=True)
class Offer:
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
class Reported:
    """A sign of life.

    Args:
        node: its name.
        life: of its agent.
        offer: what it has for the next generation.
        ended: the generation that it has ended and answers for; 0: it answers for none.
    """

    node: str
    life: str
    offer: Offer = Offer()
    ended: int = 0


@dataclass(frozen=True)
class Said:
    """Something happened on a node in a generation."""

    node: str
    generation: int
    event: Event


@dataclass(frozen=True)
class Looked:
    """An agent looked at ranks that were silent for too long."""

    node: str
    seen: Seen


LeadEvent = Joined | Left | Unfit | Reported | Said | Looked


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
class Call:
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
class Told:
    """Worth writing down."""

    reason: str


LeadOutcome = Proposal | Call | Rejected | Judged | Blamed | TrustChange | Told


@dataclass(frozen=True)
class Write:
    """Send a letter to an agent; ``address`` helps where there is no connection with it yet."""

    to: str
    letter: Letter
    address: str = ""


@dataclass(frozen=True)
class Knock:
    """Send a letter to whoever listens at an address."""

    address: str
    letter: Letter


@dataclass(frozen=True)
class Halt:
    """End every generation before this one; with ``reenter`` only leave it, where workers can."""

    generation: int
    reason: str
    reenter: bool = False


@dataclass(frozen=True)
class TurnedAway:
    """The job does not take this node."""

    reason: str


@dataclass(frozen=True)
class Reborn:
    """The job that this agent was in is over for good: it has to begin anew, with another life.

    Args:
        after: the first generation of the job that follows must be younger than this one.
        reason: in one sentence.
    """

    after: int
    reason: str


Order = Reborn | Write | Knock | Halt | TurnedAway | Assignment | Ending | LeadOutcome


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
        founder: it has the rendezvous endpoint.
        seeds: addresses where others may be found.
        job_state: what an earlier launch of the job left, for a founder.
        after: a generation that is known to have been.
    """

    founder: bool
    seeds: tuple[str, ...] = ()
    job_state: Mapping[str, Any] | None = None
    after: int = 0
