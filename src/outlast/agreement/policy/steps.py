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

On one node its agent coordinates. On several nodes the leader does, and each agent speaks for its ranks
(:mod:`outlast.agreement.policy.nodes`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, IntFlag

from outlast.agreement.policy.votes import Flag, Vote
from outlast.parallelism.policy.shares import Slow

AHEAD = 2  # steps: ranks that promise at their next step then find the decision when they reach the step
AHEAD_OF_THE_END = 1  # where time is short: the step under way is the last one, and ranks may wait after it


class Want(IntFlag):
    """What a rank asks all of them to do."""

    SAVE = 1
    DUE = 2  # a save, because the time between two saves is over
    STOP = 4
    PREEMPTED = 8
    HOLD = 16  # wait at the step, once it is saved, for the generation that follows
    REBALANCE = 32  # the coordinator asks for it: micro-batches are divided anew
    BENCHMARK = 64  # likewise: each rank computes the same product before it goes on


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
        slow: by whose speeds micro-batches are divided from then on, with REBALANCE.
        before: by whose speeds they are divided until then.
    """

    number: int
    stage: Stage
    round: int
    step: int
    wants: Want = NOTHING
    ends: float = math.inf
    limit: float = math.inf
    seconds: Mapping[str, float] = field(default_factory=dict)
    slow: Slow = ()
    before: Slow = ()

    @property
    def shares(self) -> Slow:
        """The slow ranks by whose speeds micro-batches are divided, now that this was said."""
        divided = self.stage is Stage.COMMITTED and Want.REBALANCE in self.wants
        return self.slow if divided else self.before

    @property
    def ticket(self) -> int:
        """A number that grows with everything that the coordinator says."""
        return 4 * self.number + self.stage

    def vote(self, now: float) -> Vote:
        """Return what was committed as the vote of all ranks."""
        flags = frozenset(flag for flag, want in WANT_OF.items() if want & self.wants)
        return Vote(flags, self.ends - now, self.seconds, self.limit - now)


@dataclass(frozen=True)
class Status:
    """What a rank says of itself, or an agent of all ranks of its node.

    Args:
        who: number of the rank, or name of the node.
        serial: grows with each status of the same one.
        round: in which it is.
        step: completed steps after which it has gone on; those that it has completed are at most one more.
        answered: the newest proposal that it has answered; 0: none.
        passed: the answer was that it had gone on after that step already, not a promise.
        wants: what it asks for.
        ends: when it expects the job to end.
        limit: when it must have exited.
        seconds: by tier, the longest that a save took.
        apart: of a node: its ranks are not all in the same round, or one has ended. ``round`` is the lowest.
    """

    who: int | str
    serial: int
    round: int
    step: int
    answered: int = 0
    passed: bool = False
    wants: Want = NOTHING
    ends: float = math.inf
    limit: float = math.inf
    seconds: Mapping[str, float] = field(default_factory=dict)
    apart: bool = False


@dataclass(frozen=True)
class RankEnded:
    """The process of a rank has ended."""

    rank: int


@dataclass(frozen=True)
class RanksSeen:
    """What an agent has read of the ranks of its node, which are of one generation."""

    generation: int
    statuses: tuple[Status, ...]
    ended: tuple[int, ...] = ()


@dataclass(frozen=True)
class TellRanks:
    """The ranks of a node are to be told a proposal."""

    generation: int
    said: Proposal


def longest_saves(statuses: Iterable[Status]) -> dict[str, float]:
    """Return by tier the longest that a save took."""
    found: dict[str, float] = {}
    for one in statuses:
        for tier, taken in one.seconds.items():
            found[tier] = max(taken, found.get(tier, taken))
    return found


def all_wants(statuses: Iterable[Status]) -> Want:
    """Return what anybody asks for."""
    found = NOTHING
    for one in statuses:
        found |= one.wants
    return found


class StepCoordinator:
    """Decides for the ranks of one generation after which step all of them act.

    Args:
        members: its ranks, or the nodes that have them; nothing is decided before each has said something.
    """

    def __init__(self, members: Collection[int | str]) -> None:
        self._members = frozenset(members)
        self._known: dict[int | str, Status] = {}
        self._ended = False
        self._ahead = AHEAD
        self._asks = NOTHING  # of all ranks, besides what they ask for
        self._releases = False
        self._slow: Slow = ()  # by whose speeds micro-batches are divided
        self._slow_now: Slow | None = None  # by whose speeds they should be; None: as they are
        self.current: Proposal | None = None

    @property
    def silent(self) -> frozenset[int | str]:
        """The members that have not said anything yet."""
        return self._members - self._known.keys()

    @property
    def shares(self) -> Slow | None:
        """The slow ranks by whose speeds micro-batches are divided; None: not every member has told it."""
        return None if self.silent else self._slow

    @property
    def wanted(self) -> bool:
        """Whether anybody asks for anything."""
        return bool(self._wants)

    @property
    def _wants(self) -> Want:
        divided = self._slow_now in (None, self._slow) or self._holds
        return self._asks | all_wants(self._known.values()) | (NOTHING if divided else Want.REBALANCE)

    @property
    def _holds(self) -> bool:
        """Whether ranks hold, or are about to: a proposal would let them go on."""
        current = self.current
        told = current is not None and current.stage is not Stage.WITHDRAWN and Want.HOLD in current.wants
        return told or Want.HOLD in self._asks

    @property
    def outside(self) -> bool:
        """Whether a member has ranks that are in no loop, so that nothing is decided for now."""
        return not self.silent and any(known.round % 2 == 0 for known in self._known.values())

    @property
    def open(self) -> bool:
        """Whether answers to a proposal are awaited."""
        return self.current is not None and self.current.stage is Stage.PROPOSED

    @property
    def held(self) -> int | None:
        """The completed steps after which all ranks wait; None: nothing of the kind is committed."""
        current = self.current
        if current is None or current.stage is not Stage.COMMITTED or Want.HOLD in self._asks:
            return None
        return current.step if Want.HOLD in current.wants else None

    def recall(self, said: Proposal) -> None:
        """Take note of what another coordinator has told a member before; the newest counts."""
        if self.current is None or said.ticket > self.current.ticket:
            self.current, self._slow = said, said.shares

    def rebalance(self, slow: Slow) -> None:
        """Ask for micro-batches that are divided by the speeds of the slow ranks; empty: even shares."""
        self._slow_now = slow

    def handle(self, event: Status | RankEnded) -> list[Proposal]:
        """Take an event; return what every rank is told, at most one proposal.

        It is :attr:`current` from then on, and may be told again at any time.
        """
        if isinstance(event, RankEnded):
            self._ended = True
        else:
            known = self._known.get(event.who)
            if event.who not in self._members or (known is not None and event.serial <= known.serial):
                return []
            self._known[event.who] = event
        return self._advance()

    def ask(self, wants: Want) -> list[Proposal]:
        """Ask all ranks for something, until it is committed; return as :meth:`handle` does."""
        self._asks |= wants
        self._releases = self._releases and Want.HOLD not in wants
        return self._advance()

    def release(self) -> list[Proposal]:
        """Ask for nothing more, and let ranks that hold go on, once all do; return as :meth:`handle` does."""
        self._asks = NOTHING
        self._releases = self.current is not None and Want.HOLD in self.current.wants
        return self._advance()

    def _advance(self) -> list[Proposal]:
        found = self._next()
        if found is None:
            return []
        self.current, self._slow = found, found.shares
        return [found]

    def _next(self) -> Proposal | None:
        if len(self._known) < len(self._members):
            return None  # a silent one may know of a commit
        current, round_ = self.current, self._common_round()
        if current is not None and current.stage is Stage.COMMITTED and self._in_round(current.round):
            return None
        if current is not None and self._releases and current.stage is Stage.COMMITTED:
            self._releases = False
            return replace(current, number=current.number + 1, stage=Stage.WITHDRAWN, before=self._slow)
        if current is not None and current.stage is Stage.PROPOSED:
            if round_ != current.round:
                return replace(current, stage=Stage.WITHDRAWN)
            return self._weighed(current)
        if round_ is None or not self.wanted:
            return None
        self._ahead = AHEAD_OF_THE_END if Want.PREEMPTED & self._wants else AHEAD
        return self._proposal(round_)

    def _in_round(self, round_: int) -> bool:
        return any(known.round == round_ for known in self._known.values())

    def _common_round(self) -> int | None:
        """Return the round in which all ranks train; None: there is none."""
        rounds = {(known.round, known.apart) for known in self._known.values()}
        if self._ended or len(rounds) != 1:
            return None
        ((found, apart),) = rounds
        return found if found % 2 and not apart else None

    def _proposal(self, round_: int) -> Proposal:
        step = max(known.step for known in self._known.values()) + self._ahead
        number = 1 if self.current is None else self.current.number + 1
        slow = self._slow if self._slow_now is None else self._slow_now
        return Proposal(number, Stage.PROPOSED, round_, step, self._wants, slow=slow, before=self._slow)

    def _weighed(self, current: Proposal) -> Proposal | None:
        """Return what follows from the answers to a proposal."""
        statuses = self._known.values()
        answers = [one for one in statuses if one.answered == current.number]
        unasked = (one for one in statuses if one.answered != current.number)
        if any(one.passed for one in answers) or any(one.step >= current.step for one in unasked):
            self._ahead *= 2  # ranks are quicker than messages
            return self._proposal(current.round)
        if len(answers) < len(self._members):
            return None
        wants = current.wants | self._asks | all_wants(self._known.values())
        self._asks = NOTHING
        return replace(
            current,
            stage=Stage.COMMITTED,
            wants=wants,
            ends=min(one.ends for one in statuses),
            limit=min(one.limit for one in statuses),
            seconds=longest_saves(statuses),
        )


class NodeCoordinator:
    """Coordinates the ranks of a node that has all of them, in one generation after another."""

    def __init__(self) -> None:
        self._generation = -1
        self._coordinator = StepCoordinator(())

    def rebalance(self, slow: Slow) -> None:
        """Ask for shares, which ranks are told when they are looked at."""
        self._coordinator.rebalance(slow)

    def look(self, seen: RanksSeen) -> list[TellRanks]:
        """Take what the ranks say; return what they are told."""
        if seen.generation != self._generation:
            self._generation = seen.generation
            self._coordinator = StepCoordinator([one.who for one in seen.statuses])
        events: list[Status | RankEnded] = [*map(RankEnded, seen.ended), *seen.statuses]
        return [TellRanks(seen.generation, said) for one in events for said in self._coordinator.handle(one)]


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
