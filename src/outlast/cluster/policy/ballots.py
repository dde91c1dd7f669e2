"""The values of leader election: times, what an agent must remember, what it decides, and majorities."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from outlast.cluster.policy.messages import ElectionMessage, Quorums, Record


@dataclass(frozen=True)
class Timing:
    """The times that the agents of a job share, in seconds.

    Args:
        interval: between two heartbeats.
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
class Store:
    """Put this on disk; what follows in the same answer may happen only afterwards."""

    stored: HardState


@dataclass(frozen=True)
class Send:
    """Send a message; it may be lost."""

    to: str
    message: ElectionMessage


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
