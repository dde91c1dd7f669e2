"""What agents tell each other about who leads, and what each of them keeps on disk."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

Quorums = tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Timing:
    """The times that the agents of a job share, in seconds.

    Args:
        interval: between two pings.
        lease: how long a right to commit lasts after it was last confirmed; five intervals at least.
        drift: how much faster or slower than real time a clock may run, as a fraction.
        stagger: between the attempts of two successors; more than a message takes.
    """

    interval: float = 0.5
    lease: float = 3.0
    drift: float = 0.01
    stagger: float = 0.5

    @property
    def promise(self) -> float:
        """Return for how long nobody else is voted for: a lease on the slowest clock, seen by the fastest."""
        return self.lease * (1 + self.drift) / (1 - self.drift)


@dataclass(frozen=True)
class Record:
    """What the job runs as; the newest one replaces all others.

    Args:
        term: of the leader that wrote it.
        version: of the record within its term.
        generation: that is to run.
        active: agents whose ranks may commit.
        agents: all that are told.
        plan: of the generation, and what a successor has to know besides; not looked at here.
        quorums: sets of voters; a majority of each is needed. Two while the voters change.
    """

    term: int
    version: int
    generation: int
    active: frozenset[str]
    agents: frozenset[str]
    plan: str
    quorums: Quorums

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
        """Return everybody who is pinged, in the order of their names."""
        return tuple(sorted(self.agents | self.voters))


@dataclass(frozen=True)
class HardState:
    """What an agent must have on disk before a message of the same decision leaves it.

    Args:
        term: the newest that it knows.
        voted: for whom, in that term; empty: nobody.
        record: the newest that it has; None: none yet.
    """

    term: int = 0
    voted: str = ""
    record: Record | None = None


@dataclass(frozen=True)
class VoteRequest:
    """An agent wants to lead; ``pre_vote``: it only asks whether it would be voted for."""

    sender: str
    term: int
    key: tuple[int, int]
    pre_vote: bool


@dataclass(frozen=True)
class Vote:
    """An answer to a request; ``asked`` is the term that it asked for, ``term`` the voter's own."""

    sender: str
    term: int
    asked: int
    pre_vote: bool
    granted: bool


@dataclass(frozen=True)
class AppendEntries:
    """The leader says what is to run.

    Args:
        sent: on the leader's clock.
        record: the newest.
        committed: a majority has it.
        granted: seconds for which the receiver's ranks may commit, counted from ``echo``; 0: they may not.
        life: of the receiver, as its last report said.
        echo: when it sent that report, on its own clock.
    """

    sender: str
    term: int
    sent: float
    record: Record
    committed: bool
    granted: float = 0.0
    incarnation: str = ""
    echo: float = 0.0


@dataclass(frozen=True)
class AppendReply:
    """An agent's answer to a ping.

    Args:
        key: of the newest record that it has.
        generation: of that record.
        life: differs between two starts of the agent.
        sent: on its own clock.
        echo: ``sent`` of the ping.
    """

    sender: str
    term: int
    key: tuple[int, int]
    generation: int
    incarnation: str
    sent: float
    echo: float


Message = VoteRequest | Vote | AppendEntries | AppendReply


@dataclass(frozen=True)
class Store:
    """Put this on disk; what follows in the same answer may happen only afterwards."""

    stored: HardState


@dataclass(frozen=True)
class Send:
    """Send a message; it may be lost."""

    to: str
    message: Message


@dataclass(frozen=True)
class Leads:
    """This agent is the leader from now on, with this record to begin with."""

    term: int
    record: Record
    reason: str


@dataclass(frozen=True)
class StepsDown:
    """This agent is no longer the leader; its workers go on."""

    term: int
    reason: str


@dataclass(frozen=True)
class InForce:
    """A majority has this record: what it says is to be done."""

    record: Record
    reason: str


Outcome = Store | Send | Leads | StepsDown | InForce


def founding(name: str) -> HardState:
    """Return what the first agent of a job begins with: it alone has a vote."""
    record = Record(0, 0, 0, frozenset(), frozenset({name}), "", (frozenset({name}),))
    return HardState(0, "", record)


def majority(quorums: Quorums, agreed: Collection[str]) -> bool:
    """Say whether more than half of each set of voters agreed."""
    return all(2 * len(voters.intersection(agreed)) > len(voters) for voters in quorums)


def confirmed(quorums: Quorums, times: Mapping[str, float]) -> float:
    """Return since when, at the latest, a majority of each set of voters has followed."""
    never = float("-inf")
    return min(
        sorted((times.get(name, never) for name in voters), reverse=True)[len(voters) // 2]
        for voters in quorums
    )
