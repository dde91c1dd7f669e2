"""When the state goes to the memory tier alone: after which steps, equal on every rank.

Rank 0 measures what a step and a save in memory take and makes the schedule; the ranks take it over
after the first, second, fourth, ... save in memory of a generation, so the agreement costs next to nothing.
"""

from __future__ import annotations

from outlast.core.cadence import Cadence, Copied, Recovered, Rule, Schedule, StepTimed, Tier
from outlast.core.ports import Exchange


class MemorySaves:
    """Knows whether a step is to be saved in memory.

    Args:
        interval: steps between two such saves; None: chosen by cost and fault rate.
        faults: how often this job was restarted so far.
        timeout: seconds that ranks wait for each other.
    """

    def __init__(self, interval: int | None, faults: int, timeout: float) -> None:
        self._fixed = interval is not None
        self._timeout = timeout
        self._cadence = Cadence([Rule(Tier.MEMORY, steps=interval)])
        for _ in range(faults):
            self._cadence.handle(Recovered(Tier.MEMORY, Tier.MEMORY, 1.0), 0.0)
        self._schedule: Schedule = self._cadence.schedule
        self._saves = 0
        self._training = 0.0
        self._steps = 0

    @property
    def reason(self) -> str:
        """Why a save is made, for the event log."""
        return self._schedule.reason

    def due(self, step: int) -> bool:
        """Say whether the state after a step is saved in memory."""
        return Tier.MEMORY in self._schedule.due(step)

    def trained(self, seconds: float) -> None:
        """Take note of how long a step took."""
        self._training += seconds
        self._steps += 1

    def saved(self, seconds: float, exchange: Exchange, now: float) -> None:
        """Take note of how long a save in memory took, and agree on the schedule now and then."""
        self._saves += 1
        if self._fixed or self._saves & (self._saves - 1):
            return
        text = ""
        if exchange.rank == 0:
            self._cadence.handle(StepTimed(self._training / max(self._steps, 1)), now)
            self._cadence.handle(Copied(Tier.MEMORY, seconds, seconds), now)
            text = self._cadence.schedule.to_json()
        self._schedule = Schedule.from_json(exchange.gather("schedule", text, self._timeout)[0])
        self._training, self._steps = 0.0, 0
