"""Ranks that agree on a step: what each would do between two steps, and what must never be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outlast.agreement.policy.steps import (
    NOTHING,
    Answer,
    Move,
    Proposal,
    Status,
    StepParticipant,
    Want,
)
from outlast.parallelism.policy.shares import Slow


@dataclass
class Rank:
    """A rank that trains, hears and says what it is told to, in the order of the worker's code."""

    number: int
    part: StepParticipant
    round: int = 1
    completed: int = 0
    left: int = 0  # completed steps after which it has gone on
    answer: Answer = field(default_factory=lambda: Answer(0, False))
    wants: Want = NOTHING
    said: Proposal | None = None  # what it can read of the coordinator
    serial: int = 0
    alive: bool = True
    acts: dict[int, tuple[int, Want, Slow]] = field(default_factory=dict)  # by round
    unpromised: list[int] = field(default_factory=list)
    passed: dict[int, int] = field(default_factory=dict)  # by round, the last step without an action
    held: int = 0  # ticket after which it waits at its step; 0: it does not wait

    def look(self) -> None:
        """Be between two steps: hear, and go on, wait or act."""
        if self.said is not None:
            for answer in self.part.hear(self.said, self.completed):
                self.answer = answer
            if self.said.ticket != self.held:
                self.held = 0
        move = self.part.move(self.completed)
        if move is Move.WAIT:
            return
        if move is Move.ACT:
            found = self.part.committed
            wants = NOTHING if found is None else found.wants
            if found is None or found.number != self.answer.number or self.answer.passed:
                self.unpromised.append(self.completed)
            self.acts[self.round] = (self.completed, wants, () if found is None else found.slow)
            self.wants &= ~wants
            if found is not None and Want.HOLD in wants:
                self.held = found.ticket
            self.begin(self.round + 2)
        else:
            self.passed[self.round] = self.completed
        self.left = self.completed

    def begin(self, round_: int) -> None:
        self.round = round_
        self.part.begin(round_)

    @property
    def training(self) -> bool:
        return self.alive and self.round % 2 == 1

    def status(self) -> Status:
        self.serial += 1
        answer = self.answer
        return Status(
            *(self.number, self.serial, self.round, self.left, answer.number, answer.passed, self.wants)
        )


def acted_apart(ranks: Sequence[Rank]) -> list[str]:
    """Return what must not be: ranks that act after different steps, or without a promise."""
    found = []
    for round_ in {one for rank in ranks for one in rank.acts}:
        acts = {rank.acts[round_] for rank in ranks if round_ in rank.acts}
        if len(acts) > 1:
            found.append(f"round {round_}: ranks act apart: {acts}")
        step = min(acts)[0]
        if any(rank.passed.get(round_, -1) >= step and round_ not in rank.acts for rank in ranks):
            found.append(f"round {round_}: a rank goes on after step {step}, where others act")
    found += [f"rank {rank.number} acts without a promise" for rank in ranks if rank.unpromised]
    return found
