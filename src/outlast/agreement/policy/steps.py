"""How an agent and its ranks agree on a step after which all ranks act: a two-phase commit.

The coordinator proposes a step ahead of every rank's step. A rank that has not passed it promises to stop
there unless the decision has come by then; a rank that has passed it says so, and gets a later step. When
all ranks have promised, the coordinator commits, and every rank acts after that step. A proposal that is not
committed is withdrawn or replaced, and whoever waits for it goes on.

Only what is committed is acted upon, a commit needs the promise of every rank, and nothing follows a commit
until every rank has left the round, so no rank acts alone. Messages may be late, lost, repeated or
reordered: both sides send what holds now, and the receiver ignores what is older than what it knows. A rank
that dies ends its generation, and the agreement with it.

A round begins on every rank after the same step: before a loop of steps, after an action, after a rollback.
Rounds have odd numbers; an even number means that the rank is in no loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, IntFlag

from outlast.agreement.policy.votes import Flag, Vote

AHEAD = 2  # steps: ranks that promise at their next step then find the decision when they reach the step
AHEAD_OF_THE_END = 1  # where time is short: the step under way is the last one, and ranks may wait after it


class Want(IntFlag):
    """What a rank asks all of them to do."""

    SAVE = 1
    DUE = 2  # a save, because the time between two saves is over
    STOP = 4
    PREEMPTED = 8


NOTHING = Want(0)
WANT_OF = {Flag.SAVE: Want.SAVE, Flag.STOP: Want.STOP, Flag.PREEMPTED: Want.PREEMPTED}


class Stage(IntEnum):
    """What has become of a proposal."""

    PROPOSED = 0
    WITHDRAWN = 1
    COMMITTED = 2


@dataclass(frozen=True)
class Proposal:
    """What the coordinator says to every rank; a later one replaces it.

    Args:
        number: of the proposal, from 1 on.
        stage: what has become of it.
        round: in which it holds.
        step: completed steps after which ranks act.
        wants: what they do, once it is committed.
        ends: when the job is expected to end, on the clock of the rank that has least time.
        limit: when a rank must have exited.
        seconds: by tier, the longest that a save took on any rank.
    """

    number: int
    stage: Stage
    round: int
    step: int
    wants: Want = NOTHING
    ends: float = math.inf
    limit: float = math.inf
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def ticket(self) -> int:
        """A number that grows with everything that the coordinator says."""
        return 4 * self.number + self.stage

    def vote(self, now: float) -> Vote:
        """Return what was committed as the vote of all ranks."""
        flags = frozenset(flag for flag, want in WANT_OF.items() if want & self.wants)
        return Vote(flags, self.ends - now, self.seconds, self.limit - now)


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself.

    Args:
        rank: which.
        serial: grows with each status of the rank.
        round: in which it is.
        step: completed steps after which it has gone on; those that it has completed are at most one more.
        answered: the newest proposal that it has answered; 0: none.
        passed: the answer was that it had gone on after that step already, not a promise.
        wants: what it asks for.
        ends: when it expects the job to end.
        limit: when it must have exited.
        seconds: by tier, the longest that a save took.
    """

    rank: int
    serial: int
    round: int
    step: int
    answered: int = 0
    passed: bool = False
    wants: Want = NOTHING
    ends: float = math.inf
    limit: float = math.inf
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankEnded:
    """The process of a rank has ended."""

    rank: int


class StepCoordinator:
    """Decides for the ranks of one generation after which step all of them act.

    Args:
        ranks: of the generation.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._known: dict[int, RankStatus] = {}
        self._ended = False
        self._ahead = 0
        self.current: Proposal | None = None

    @property
    def open(self) -> bool:
        """Whether answers to a proposal are awaited."""
        return self.current is not None and self.current.stage is Stage.PROPOSED

    def handle(self, event: RankStatus | RankEnded) -> list[Proposal]:
        """Take an event; return what every rank is told, at most one proposal.

        It is :attr:`current` from then on, and may be told again at any time.
        """
        if isinstance(event, RankEnded):
            self._ended = True
        else:
            known = self._known.get(event.rank)
            if event.rank not in self._ranks or (known is not None and event.serial <= known.serial):
                return []
            self._known[event.rank] = event
        found = self._next()
        if found is None:
            return []
        self.current = found
        return [found]

    def _next(self) -> Proposal | None:
        current, round_ = self.current, self._common_round()
        if current is not None and current.stage is Stage.COMMITTED and self._in_round(current.round):
            return None
        if current is not None and current.stage is Stage.PROPOSED:
            if round_ != current.round:
                return replace(current, stage=Stage.WITHDRAWN)
            return self._weighed(current)
        if round_ is None or not self._wants():
            return None
        self._ahead = AHEAD_OF_THE_END if Want.PREEMPTED & self._wants() else AHEAD
        return self._proposal(round_)

    def _in_round(self, round_: int) -> bool:
        return any(known.round == round_ for known in self._known.values())

    def _common_round(self) -> int | None:
        """Return the round in which all ranks train; None: there is none."""
        rounds = {known.round for known in self._known.values()}
        if self._ended or self._known.keys() != self._ranks or len(rounds) != 1:
            return None
        (found,) = rounds
        return found if found % 2 else None

    def _wants(self) -> Want:
        found = NOTHING
        for known in self._known.values():
            found |= known.wants
        return found

    def _proposal(self, round_: int) -> Proposal:
        step = max(known.step for known in self._known.values()) + self._ahead
        number = 1 if self.current is None else self.current.number + 1
        return Proposal(number, Stage.PROPOSED, round_, step, self._wants())

    def _weighed(self, current: Proposal) -> Proposal | None:
        """Return what follows from the answers to a proposal."""
        statuses = self._known.values()
        answers = [one for one in statuses if one.answered == current.number]
        unasked = (one for one in statuses if one.answered != current.number)
        if any(one.passed for one in answers) or any(one.step >= current.step for one in unasked):
            self._ahead *= 2  # ranks are quicker than messages
            return self._proposal(current.round)
        if len(answers) < len(self._ranks):
            return None
        longest: dict[str, float] = {}
        for one in statuses:
            for tier, taken in one.seconds.items():
                longest[tier] = max(taken, longest.get(tier, taken))
        return replace(
            current,
            stage=Stage.COMMITTED,
            wants=current.wants | self._wants(),
            ends=min(one.ends for one in statuses),
            limit=min(one.limit for one in statuses),
            seconds=longest,
        )


class Move(Enum):
    """What a rank does next."""

    GO_ON = "go on"
    WAIT = "wait for the decision"
    ACT = "act with all ranks"


@dataclass(frozen=True)
class Answer:
    """What a rank says to a proposal."""

    number: int
    passed: bool


class StepParticipant:
    """Decides for one rank what follows a step."""

    def __init__(self) -> None:
        self._round = 0
        self._seen = -1
        self._promised: Proposal | None = None

    def begin(self, round_: int) -> None:
        """Begin a round, or leave the loop."""
        self._round = round_
        self._promised = None

    def hear(self, said: Proposal, step: int) -> list[Answer]:
        """Take what the coordinator says, after so many completed steps; return the answer.

        Args:
            said: it may be known already, or be older than what is.
            step: completed steps.
        """
        if said.ticket <= self._seen:
            return []
        self._seen = said.ticket
        if said.round != self._round:
            return []
        if said.stage is not Stage.PROPOSED:
            mine = self._promised is not None and self._promised.number == said.number
            self._promised = said if mine and said.stage is Stage.COMMITTED else None
            return []
        passed = step > said.step
        self._promised = None if passed else said
        return [Answer(said.number, passed)]

    def move(self, step: int) -> Move:
        """Return what to do after so many completed steps."""
        promised = self._promised
        if promised is None or step < promised.step:
            return Move.GO_ON
        return Move.ACT if promised.stage is Stage.COMMITTED else Move.WAIT

    @property
    def committed(self) -> Proposal | None:
        """What was committed and not acted upon yet."""
        found = self._promised
        return found if found is not None and found.stage is Stage.COMMITTED else None
