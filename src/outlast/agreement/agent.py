"""The agent's part in agreeing on a step: reads what ranks say, and writes what they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from outlast.agreement.policy.steps import NOTHING, RanksSeen, Stage, TellRanks, Want
from outlast.ipc.heartbeat_page import HeartbeatReader
from outlast.launcher.workers.processes import Worker

_LOOK_EVERY = 0.1  # seconds, while answers are awaited: ranks wake the agent, unless its queue was full


class Ranks(Protocol):
    """What is used of a generation."""

    @property
    def number(self) -> int:
        """Its number."""
        ...

    @property
    def pages(self) -> Mapping[int, HeartbeatReader]:
        """The page of each rank."""
        ...

    @property
    def workers(self) -> Sequence[Worker]:
        """The processes of the ranks that have one."""
        ...


class StepAgreements:
    """The pages of the ranks of this node, in one generation after another."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._open = False  # answers to a proposal are awaited
        self._asks = NOTHING  # what the agent itself asks all ranks of the job to do

    def begin(self, ranks: Ranks) -> None:
        """Read and write the pages of a generation."""
        self._ranks, self._open, self._asks = ranks, False, NOTHING

    def over(self) -> None:
        """Let go of a generation: its pages are about to be closed."""
        self._ranks, self._open, self._asks = None, False, NOTHING

    def ask_save(self) -> None:
        """Ask all ranks of the job to save after one of the next steps.

        Ranks that vote, since they have a guard, read the request on their page.
        """
        if self._ranks is None:
            return
        self._asks |= Want.SAVE
        for page in self._ranks.pages.values():
            page.agreement.ask_save()

    def look(self) -> RanksSeen | None:
        """Return what the ranks say; None: no generation runs."""
        if self._ranks is None:
            return None
        ended = tuple(one.rank for one in self._ranks.workers if one.exit_code is not None)
        first, *others = (page.agreement.read() for page in self._ranks.pages.values())
        if first.round % 2:  # it agrees through the agent
            first = replace(first, wants=first.wants | self._asks)
        statuses = (first, *others)
        return RanksSeen(self._ranks.number, statuses, ended)

    def tell(self, order: TellRanks) -> None:
        """Write what the ranks of a generation are told."""
        if self._ranks is None or self._ranks.number != order.generation:
            return
        self._open = order.said.stage is Stage.PROPOSED
        if order.said.stage is Stage.COMMITTED:
            self._asks &= ~order.said.wants
        for page in self._ranks.pages.values():
            page.agreement.say(order.said)

    def deadline(self, now: float) -> float | None:
        """Return when to look again; None: whenever something happens."""
        return now + _LOOK_EVERY if self._open else None
