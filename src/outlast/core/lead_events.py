"""What a coordinator hears, and what it decides; see :mod:`outlast.core.lead`."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.core.attribution import Blamed, Seen
from outlast.core.copies import TrustChange
from outlast.core.events import Action, Fault
from outlast.core.job import Event
from outlast.core.members import Joined, Left, Unfit


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
