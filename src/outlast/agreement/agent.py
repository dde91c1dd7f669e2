"""The agent's part in agreeing on a step: reads what ranks say, asks the coordinator, writes what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from outlast.agreement.policy.steps import RankEnded, RankStatus, StepCoordinator
from outlast.ipc.pulse import PulseReader
from outlast.launcher.workers.processes import Worker

_LOOK_EVERY = 0.1  # seconds, while answers are awaited: ranks wake the agent, unless its queue was full


class Ranks(Protocol):
    """What is used of a generation."""

    @property
    def pages(self) -> Mapping[int, PulseReader]:
        """The page of each rank."""
        ...

    @property
    def workers(self) -> Sequence[Worker]:
        """The processes of the ranks that have one."""
        ...


class StepAgreements:
    """Agrees with the ranks of one generation after another; all of a generation's are on this node."""

    def __init__(self) -> None:
        self._coordinator: StepCoordinator | None = None
        self._ranks: Ranks | None = None

    def begin(self, ranks: Ranks) -> None:
        """Agree with the ranks of a generation."""
        self._ranks, self._coordinator = ranks, StepCoordinator(ranks.pages)

    def over(self) -> None:
        """Let go of a generation: its pages are about to be closed."""
        self._ranks = self._coordinator = None

    def look(self) -> None:
        """Read every page, and tell the ranks what follows."""
        if self._ranks is None or self._coordinator is None:
            return
        pages, coordinator = self._ranks.pages, self._coordinator
        events: list[RankStatus | RankEnded] = [
            RankEnded(one.rank) for one in self._ranks.workers if one.exit_code is not None
        ]
        for event in (*events, *(page.agreement.read() for page in pages.values())):
            for said in coordinator.handle(event):
                for page in pages.values():
                    page.agreement.say(said)

    def deadline(self, now: float) -> float | None:
        """Return when to look again; None: whenever something happens."""
        if self._coordinator is None or not self._coordinator.open:
            return None
        return now + _LOOK_EVERY
