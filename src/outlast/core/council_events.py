"""What an agent is told to do by its part in the council, and how it begins; see
:mod:`outlast.core.council`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outlast.core.ballots import Timing
from outlast.core.lead_events import LeadOutcome
from outlast.core.letters import Assignment, Ending, Letter


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
