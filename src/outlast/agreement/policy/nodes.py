"""How the ranks of several nodes agree on a step: each agent speaks for its ranks, the leader coordinates.

An agent tells the leader when its ranks ask for something or answer, and repeats it while something is
awaited. The leader asks every agent how its ranks stand, then proposes and commits as for ranks of one node:
:class:`outlast.agreement.policy.steps.StepCoordinator` with nodes in the place of ranks. While nobody asks
for anything, nothing is sent.

A new leader. Every report holds the newest proposal that the node has taken, so a successor goes on from
there: it says a commit again, and weighs or replaces a proposal. It decides nothing before every node of the
generation has reported in its term. A node that has done so takes no order of an earlier term, so what an
earlier leader has committed either is in a report, or is taken by nobody any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from outlast.agreement.policy.steps import (
    NOTHING,
    Proposal,
    RanksSeen,
    Stage,
    Status,
    StepCoordinator,
    Want,
    all_wants,
    longest_saves,
)
from outlast.agreement.policy.votes import TIERS
from outlast.cluster.policy.messages import StepProposal, StepReport
from outlast.parallelism.policy.shares import Slow

_UNKNOWN = -1.0  # less than any measured time


def status_of_node(name: str, serial: int, said: Proposal | None, seen: RanksSeen) -> Status:
    """Return what the ranks of a node say together.

    They have promised when all have, and have passed the step when one has. A rank that is in a later step
    than the proposed one has passed it without hearing of it: it may wait there for a rank that promised.

    Args:
        name: of the node.
        serial: of this status.
        said: what the ranks were told last.
        seen: what each says.
    """
    ranks = seen.statuses
    rounds = {one.round for one in ranks}
    number = 0 if said is None else said.number
    unasked = [one for one in ranks if one.answered != number]
    passed = any(one.passed for one in ranks if one.answered == number)
    if said is not None and said.stage is Stage.PROPOSED:
        passed = passed or any(one.round == said.round and one.step >= said.step for one in unasked)
    return Status(
        who=name,
        serial=serial,
        round=min(rounds),
        step=max(one.step for one in ranks),
        answered=number if passed or not unasked else 0,
        passed=passed,
        wants=all_wants(ranks),
        ends=min(one.ends for one in ranks),
        limit=min(one.limit for one in ranks),
        seconds=longest_saves(ranks),
        apart=len(rounds) > 1 or bool(seen.ended),
    )


def proposal_sent(said: Proposal | None, now: float) -> StepProposal | None:
    """Return a proposal as it is sent: clocks of two nodes have nothing in common."""
    if said is None:
        return None
    times = (said.ends - now, said.limit - now, _by_tier(said.seconds))
    return StepProposal(said.ticket, said.round, said.step, int(said.wants), *times, said.slow, said.before)


def proposal_received(sent: StepProposal, now: float) -> Proposal:
    """Return a proposal whose times are on this node's clock.

    Raises:
        ValueError: it has a stage that there is not.
    """
    number, stage = divmod(sent.ticket, len(Stage) + 1)
    times = (sent.left + now, sent.limit + now, _named(sent.seconds))
    shares = sent.slow, sent.before
    return Proposal(number, Stage(stage), sent.round, sent.step, Want(sent.wants), *times, *shares)


def report_sent(
    status: Status, said: Proposal | None, address: tuple[int, int, str], now: float
) -> StepReport:
    """Return a report as it is sent.

    Args:
        status: of the node.
        said: what its ranks were told last.
        address: term of the leader, generation, and session of the job.
        now: on this node's clock.
    """
    term, generation, session = address
    return StepReport(
        *(term, generation, status.serial, status.round, status.step, status.answered, status.passed),
        *(int(status.wants), status.ends - now, status.limit - now, _by_tier(status.seconds)),
        apart=status.apart,
        said=proposal_sent(said, now),
        session=session,
    )


def status_received(name: str, sent: StepReport, now: float) -> Status:
    """Return what a node reports, with times on this node's clock."""
    return Status(
        *(name, sent.serial, sent.round, sent.step, sent.answered, sent.passed, Want(sent.wants)),
        *(sent.left + now, sent.limit + now, _named(sent.seconds), sent.apart),
    )


def _by_tier(seconds: Mapping[str, float]) -> tuple[float, float, float]:
    first, second, third = (seconds.get(tier, _UNKNOWN) for tier in TIERS)
    return first, second, third


def _named(seconds: tuple[float, float, float]) -> dict[str, float]:
    return {tier: taken for tier, taken in zip(TIERS, seconds, strict=True) if taken >= 0}


class NodeSteps:
    """What an agent says for its ranks, in one generation after another.

    Args:
        name: of its node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: RanksSeen | None = None
        self._serial = 0
        self._told: Status | None = None
        self.said: Proposal | None = None

    @property
    def generation(self) -> int:
        """The generation of the ranks; 0: there are none yet."""
        return 0 if self._seen is None else self._seen.generation

    @property
    def pending(self) -> bool:
        """Whether something is awaited of the leader, so that the report is to be repeated."""
        proposed = self.said is not None and self.said.stage is Stage.PROPOSED
        return proposed or (self._seen is not None and all_wants(self._seen.statuses) != NOTHING)

    def look(self, seen: RanksSeen) -> bool:
        """Take what the ranks say; return whether the leader is to be told at once."""
        if seen.generation != self.generation:
            self.said = self._told = None
        self._seen = seen
        now, told = self._status(seen), self._told
        acted = told is not None and self.said is not None and told.round == self.said.round
        if told is None:
            return now.wants != NOTHING
        changed = (now.round, now.apart, now.answered, now.passed, now.wants) != (
            *(told.round, told.apart, told.answered, told.passed, told.wants),
        )
        return changed and (self.pending or acted or told.wants != NOTHING)

    def hear(self, said: Proposal) -> bool:
        """Take what the leader says; return whether it is news for the ranks."""
        if self.said is not None and said.ticket <= self.said.ticket:
            return False
        self.said = said
        return True

    def report(self) -> tuple[Status, Proposal | None]:
        """Return how the ranks stand, and what they were told last; there are ranks."""
        assert self._seen is not None, "there are ranks"
        self._serial += 1
        self._told = replace(self._status(self._seen), serial=self._serial)
        return self._told, self.said

    def _status(self, seen: RanksSeen) -> Status:
        return status_of_node(self._name, 0, self.said, seen)


class LeaderSteps:
    """Coordinates the nodes of one generation, in one term.

    Args:
        generation: its number.
        nodes: that have ranks in it.
    """

    def __init__(self, generation: int, nodes: Collection[str]) -> None:
        self.generation = generation
        self.nodes = tuple(nodes)
        self._coordinator = StepCoordinator(self.nodes)
        self._taken = dict.fromkeys(self.nodes, 0)  # ticket of the newest proposal that a node has
        self._inquires = False

    @property
    def current(self) -> Proposal | None:
        """What every node is to have been told."""
        return self._coordinator.current

    @property
    def busy(self) -> bool:
        """Whether something is awaited of the nodes, so that they are to be asked again."""
        coordinator, current = self._coordinator, self.current
        if len(coordinator.silent) == len(self.nodes):
            return coordinator.wanted or self._inquires
        behind = current is not None and any(one < current.ticket for one in self._taken.values())
        return behind or coordinator.open or coordinator.wanted or bool(coordinator.silent)

    @property
    def held(self) -> int | None:
        """The completed steps after which all ranks wait; None: nothing of the kind is committed."""
        return self._coordinator.held

    @property
    def outside(self) -> bool:
        """Whether ranks are in no loop of steps that agrees through agents, so that they cannot be held."""
        return self._coordinator.outside

    def hold(self) -> None:
        """Have all ranks save after the same step, and wait there."""
        self._coordinator.ask(Want.SAVE | Want.HOLD)

    def benchmark(self) -> None:
        """Have all ranks compute the same product after a step."""
        self._coordinator.ask(Want.BENCHMARK)

    def release(self) -> None:
        """Ask for nothing more, and let ranks that wait go on."""
        self._coordinator.release()

    @property
    def shares(self) -> Slow | None:
        """The slow ranks by whose speeds micro-batches are divided; None: a node has not reported yet."""
        return self._coordinator.shares

    def inquire(self) -> bool:
        """Have every node report which shares are in force; return whether they are to be asked at once."""
        before, self._inquires = self._inquires, True
        return not before and self.busy

    def rebalance(self, slow: Slow) -> bool:
        """Ask for shares by the speeds of slow ranks; return whether the nodes are to be asked at once."""
        before = self._coordinator.wanted
        self._coordinator.rebalance(slow)
        return self._coordinator.wanted and not before

    def take(self, status: Status, said: Proposal | None) -> bool:
        """Take the report of a node; return whether the nodes are to be told, or asked, at once."""
        if status.who not in self._taken:
            return False
        first = len(self._coordinator.silent) == len(self.nodes)
        if said is not None:
            self._coordinator.recall(said)
            self._taken[str(status.who)] = max(said.ticket, self._taken[str(status.who)])
        return bool(self._coordinator.handle(status)) or (first and self.busy)
