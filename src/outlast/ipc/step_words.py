"""The part of a heartbeat page through which a rank and its agent agree on a step.

The agent writes proposals, the rank its status; each side writes its own words only. The agent's carry the
same ticket before and after the fields, so a rank that reads the last one alone knows whether there is
anything new, and one that finds two different tickets looks again. Of the rank's status each word means the
same whichever others were read before it: a round is written before the step in it, the wants and times
before the answer that they belong to.

Layout, in 8-byte words from byte 2048 of the page on::

    word 0      1: the agent takes part
    word 1..9   proposal: ticket, round, step, wants, ends (float), limit (float), seconds of 3 tiers (float)
    word 10     ticket again
    word 11     how often the agent has asked for a save
    word 12..15 of the proposal: slow ranks, each 1024 times its number, plus its speed in thousandths
    word 16..18 status: round, step, answer (twice its number, plus 1 where the step was passed)
    word 19..24 status: wants, ends (float), limit (float), seconds of 3 tiers (float)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from outlast.agreement.policy.steps import Proposal, Stage, Status, Want
from outlast.agreement.policy.votes import TIERS
from outlast.ipc.page_file import PageDamaged, PageFile, count, limit, moment
from outlast.parallelism.policy.shares import MOST_SLOW

_BEGIN = 2048 // 8
_SERVED = _BEGIN
_TICKET = _BEGIN + 1
_PROPOSAL = _BEGIN + 2  # round, step, wants
_TERMS = _BEGIN + 5  # ends, limit, seconds
_TICKET_AGAIN = _BEGIN + 10
_SAVES_ASKED = _BEGIN + 11
_SLOW = _BEGIN + 12
_ROUND = _BEGIN + 16
_STEP = _BEGIN + 17
_ANSWER = _BEGIN + 18
_WANTS = _BEGIN + 19
_RANK_TERMS = _BEGIN + 20
_A_RANK = 1024  # more than a speed in thousandths
_UNKNOWN = -1.0  # less than any measured time
_READ_ATTEMPTS = 64
_STATUS_WORDS = _RANK_TERMS + 2 + len(TIERS) - _ROUND


def _terms(ends: float, until: float, seconds: Mapping[str, float]) -> list[float]:
    return [float(one) for one in (ends, until, *(seconds.get(tier, _UNKNOWN) for tier in TIERS))]


def _read_terms(doubles: memoryview[float], at: int) -> tuple[float, float, dict[str, float]]:
    taken = {tier: doubles[place] for place, tier in enumerate(TIERS, at + 2)}
    return doubles[at], doubles[at + 1], {tier: one for tier, one in taken.items() if one >= 0}


class RankWords:
    """The rank's side.

    Args:
        words: of the page.
        doubles: the same memory.
    """

    def __init__(self, words: memoryview[int], doubles: memoryview[float]) -> None:
        self._words = words
        self._doubles = doubles

    @property
    def served(self) -> bool:
        """Whether the agent takes part."""
        return bool(self._words[_SERVED])

    @property
    def saves_asked(self) -> int:
        """How often the agent has asked all ranks for a save, in this generation."""
        return self._words[_SAVES_ASKED]

    @property
    def ticket(self) -> int:
        """Changes with everything that the agent says; 0: it has said nothing."""
        return self._words[_TICKET_AGAIN]

    def read(self) -> Proposal | None:
        """Return what the agent says now; None: nothing, or it is writing."""
        words = self._words
        for _ in range(_READ_ATTEMPTS):
            ticket = words[_TICKET_AGAIN]
            round_, step, wants = words[_PROPOSAL : _PROPOSAL + 3]
            ends, limit, seconds = _read_terms(self._doubles, _TERMS)
            slow = tuple(divmod(one, _A_RANK) for one in words[_SLOW : _SLOW + MOST_SLOW] if one)
            if ticket == words[_TICKET]:
                number, stage = divmod(ticket, len(Stage) + 1)
                terms = (ends, limit, seconds, slow)
                said = Proposal(number, Stage(stage), round_, step, Want(wants), *terms)
                return said if number else None
        return None

    @property
    def round(self) -> int:
        """The round that was begun last, by this session or one before it."""
        return self._words[_ROUND]

    def begin(self, round_: int, step: int) -> None:
        """Say that a round begins after so many completed steps."""
        self._words[_STEP] = step
        self._words[_ROUND] = round_

    def go_on(self, step: int) -> None:
        """Say that this rank has gone on after so many completed steps, and heeds no proposal of them."""
        self._words[_STEP] = step

    def answer(self, number: int, passed: bool) -> None:
        """Answer a proposal; the terms are written before."""
        self._words[_ANSWER] = 2 * number + passed

    def terms(self, ends: float, limit: float, seconds: Mapping[str, float]) -> None:
        """Say how much time this rank has, and how long its saves took."""
        for place, one in enumerate(_terms(ends, limit, seconds), _RANK_TERMS):
            self._doubles[place] = one

    def want(self, wants: Want) -> None:
        """Say what this rank asks for; it replaces what it has asked for before."""
        self._words[_WANTS] = int(wants)


class AgentWords:
    """The agent's side, of a page that was just made.

    Args:
        file: of the page.
        rank: whose page it is.
    """

    def __init__(self, file: PageFile, rank: int) -> None:
        self._file = file
        self._saves_asked = 0
        self._last = Status(rank, 0, 0, 0)
        for at in (_TERMS, _RANK_TERMS):
            file.write(at, *_terms(math.inf, math.inf, {}))

    def serve(self) -> None:
        """Say that the agent takes part; before the rank is started."""
        self._file.write(_SERVED, 1)

    def ask_save(self) -> None:
        """Ask for a save of all ranks, where they agree without the agent."""
        self._saves_asked += 1
        self._file.write(_SAVES_ASKED, self._saves_asked)

    def say(self, said: Proposal) -> None:
        """Write what the rank is told."""
        slow = [rank * _A_RANK + speed for rank, speed in said.slow]
        terms = _terms(said.ends, said.limit, said.seconds)
        self._file.write(_TICKET, said.ticket)
        self._file.write(_PROPOSAL, said.round, said.step, int(said.wants), *terms)
        self._file.write(_SLOW, *slow, *[0] * (MOST_SLOW - len(slow)))
        self._file.write(_TICKET_AGAIN, said.ticket)

    def read(self) -> Status:
        """Return what the rank says of itself now; where no rank says such things, what it said before."""
        try:
            self._last = self._decoded(self._steady())
        except PageDamaged:
            self._last = replace(self._last, serial=self._last.serial + 1)
        return self._last

    def _steady(self) -> bytes:
        """Return the rank's words as they are in two reads."""
        before = self._file.bytes(_ROUND, _STATUS_WORDS)
        for _ in range(_READ_ATTEMPTS):
            found = self._file.bytes(_ROUND, _STATUS_WORDS)
            if found == before:
                break
            before = found
        return before

    def _decoded(self, found: bytes) -> Status:
        words, doubles = memoryview(found).cast("q"), memoryview(found).cast("d")
        at = _RANK_TERMS - _ROUND
        ends, until, seconds = _read_terms(doubles, at)
        number, passed = divmod(count(words[_ANSWER - _ROUND]), 2)
        return Status(
            self._last.who,
            self._last.serial + 1,
            count(words[0]),
            count(words[_STEP - _ROUND], least=-1),
            number,
            bool(passed),
            Want(count(words[_WANTS - _ROUND], int(~Want(0)))),
            limit(ends),
            limit(until),
            {tier: moment(one) for tier, one in seconds.items()},
        )
