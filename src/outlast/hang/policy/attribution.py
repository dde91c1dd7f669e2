"""Attribution of a hang when the waiting ranks and the culprit are on different nodes.

An agent that finds silent ranks and can blame none sends the leader what it saw of all its ranks. The leader
combines the evidence of all nodes and names the culprit by the rules for one node
(:mod:`outlast.hang.policy.diagnosis`). The decision is made by the agent of the culprit's node, which looks
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from outlast.cluster.policy.codec import AtMost, Count, Generation, MessageError, Rank, Within
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.hang.policy.diagnosis import BY_ORDER, BY_STACKS, RankEvidence, Verdict, blame_for_hang
from outlast.hang.policy.rank_state import GroupState

EVERY = 1.0  # seconds between two verdicts: agents look at idle ranks once a second
KEPT = 3.0  # seconds beyond its next look for which what an agent saw counts
MOST_RANKS = 2048  # of which evidence is weighed together; more would hold up the leader
MOST_WAITING = 64  # ranks that wait are named, of all that do
MOST_GROUPS = 64  # of a rank are told, those first that it waits in
FRAMES = 3  # innermost frames of a stack are told
MOST_MEMBERS = 1 << 20  # of all different groups in one report
_NAME = 256  # characters of a name that are told, and of the end of a frame


@dataclass(frozen=True)
class Seen:
    """What an agent saw of its ranks in one look.

    Args:
        generation: of the ranks.
        ranks: what was seen of each.
        look_in: seconds until it looks again.
    """

    generation: int
    ranks: tuple[RankEvidence, ...]
    look_in: float


@dataclass(frozen=True)
class Blamed:
    """The rank that the evidence of several nodes names; -1: none any more.

    Args:
        names: nodes to inform: those that reported.
        generation: of the ranks.
        node: of the rank that is named.
        verdict: the rank, why, and who waits for it.
    """

    names: tuple[str, ...]
    generation: int
    node: str
    verdict: Verdict


class Pool:
    """The latest reports of the nodes of one generation.

    Args:
        generation: its number.
        seats: the ranks of each node; reports about others are ignored.
    """

    def __init__(self, generation: int = 0, seats: Iterable[RankAssignment] = ()) -> None:
        self._generation = generation
        self._ranks = {seat.name: frozenset(seat.ranks) for seat in seats}
        self._seen: dict[str, tuple[Seen, float]] = {}
        self._last = -math.inf
        self.due = math.inf  # when there is something new to be judged

    def take(self, node: str, seen: Seen, now: float) -> None:
        """Take the report of an agent."""
        told, ours = {one.rank for one in seen.ranks}, self._ranks.get(node, frozenset())
        if seen.generation != self._generation or not told or not told <= ours:
            return
        self._seen[node] = (seen, now + seen.look_in + KEPT)
        self.due = max(now, self._last + EVERY)

    def judge(self, now: float) -> Blamed | None:
        """Return the rank that the evidence names; None: only one node has reported, or there is too much."""
        self.due, self._last = math.inf, now
        self._seen = {name: one for name, one in self._seen.items() if one[1] >= now}
        evidence = [one for seen, _ in self._seen.values() for one in seen.ranks]
        if len(self._seen) < 2 or len(evidence) > MOST_RANKS:
            return None
        verdict = blame_for_hang(sorted(evidence, key=lambda one: one.rank))
        whole = len(evidence) == sum(map(len, self._ranks.values()))
        if not whole and verdict.basis not in (BY_ORDER, BY_STACKS):
            verdict = Verdict(-1, "undetermined: not every node has reported its ranks")
        node = next((name for name, ranks in self._ranks.items() if verdict.rank in ranks), "")
        shown = replace(verdict, waiting=verdict.waiting[:MOST_WAITING])
        return Blamed(tuple(sorted(self._seen)), self._generation, node, shown)


Run = tuple[Rank, Annotated[int, Within(1, MOST_MEMBERS)], Annotated[int, Within(1, MOST_MEMBERS)]]
_Text = Annotated[str, AtMost(1024)]


@dataclass(frozen=True)
class GroupReport:
    """How far a rank has come in a group, as an agent tells it; ``ranks`` are runs, see :func:`runs`."""

    group: _Text
    ranks: Annotated[tuple[Run, ...], AtMost(4096)]
    entered: Count
    pending: Count
    operations: Annotated[tuple[tuple[Count, _Text], ...], AtMost(64)]


@dataclass(frozen=True)
class RankReport:
    """What an agent saw of a rank, as it tells it; ``silent`` is in seconds before it was told."""

    rank: Annotated[int, Within(0, MOST_MEMBERS)]
    state: Annotated[str, AtMost(8)]
    stack: Annotated[tuple[Annotated[str, AtMost(4096)], ...], AtMost(16)]
    step: int
    section: _Text
    silent: float
    gpu: bool
    groups: Annotated[tuple[GroupReport, ...], AtMost(MOST_GROUPS)] | None


@dataclass(frozen=True)
class EvidenceReport:
    """What an agent saw of its ranks, as it tells the leader."""

    generation: Generation
    look_in: Annotated[float, Within(0, 3600)]
    ranks: Annotated[tuple[RankReport, ...], AtMost(4096)]


def report_of(seen: Seen, now: float) -> EvidenceReport:
    """Return what to tell the leader; ``now`` is in seconds of the clock of the ranks' heartbeats."""
    return EvidenceReport(seen.generation, seen.look_in, tuple(_rank_report(one, now) for one in seen.ranks))


def _rank_report(one: RankEvidence, now: float) -> RankReport:
    groups = sorted(one.collectives or (), key=lambda group: not group.pending)[:MOST_GROUPS]
    return RankReport(
        rank=one.rank,
        state=one.process_state,
        stack=tuple(frame[-_NAME:] for frame in one.stack[-FRAMES:]),
        step=one.step,
        section=one.sections[-1][:_NAME] if one.sections else "",
        silent=max(0.0, now - one.last_beat),
        gpu=one.gpu,
        groups=None if one.collectives is None else tuple(map(_group_report, groups)),
    )


def _group_report(group: GroupState) -> GroupReport:
    told = {group.entered, group.pending}
    return GroupReport(
        group=group.group[:_NAME],
        ranks=tuple(runs(group.ranks)) if group.pending else (),
        entered=group.entered,
        pending=group.pending,
        operations=tuple((number, name[:_NAME]) for number, name in group.operations if number in told),
    )


def seen_of(report: EvidenceReport, now: float) -> Seen:
    """Return what an agent saw, with the times of its heartbeats on the reader's clock.

    Raises:
        MessageError: it names too many ranks.
    """
    members = _Members()
    return Seen(report.generation, tuple(_rank_of(one, now, members) for one in report.ranks), report.look_in)


class _Members:
    """The ranks of the groups in one report; those of equal groups are kept once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Run, ...], tuple[int, ...]] = {}
        self._left = MOST_MEMBERS

    def of(self, key: tuple[Run, ...]) -> tuple[int, ...]:
        """Return the ranks of a group.

        Raises:
            MessageError: the report names too many in all.
        """
        if key not in self._known:
            self._left -= sum(count for _, count, _ in key)
            if self._left < 0:
                raise MessageError(f"groups of more than {MOST_MEMBERS} ranks in all")
            self._known[key] = numbers(key)
        return self._known[key]


def _rank_of(one: RankReport, now: float, members: _Members) -> RankEvidence:
    return RankEvidence(
        rank=one.rank,
        alive=True,
        process_state=one.state,
        cpu_busy=False,
        stack=one.stack,
        step=one.step,
        sections=(one.section,) if one.section else (),
        last_beat=now - one.silent,
        gpu=one.gpu,
        collectives=None
        if one.groups is None
        else tuple(
            GroupState(group.group, members.of(group.ranks), group.entered, group.pending, group.operations)
            for group in one.groups
        ),
    )


def runs(ranks: Sequence[int]) -> list[Run]:
    """Return numbers as runs of equal distance, each as its first number, how many, and the distance."""
    found: list[Run] = []
    for rank in ranks:
        first, count, apart = found[-1] if found else (0, 0, 0)
        if count == 1 and rank > first:
            found[-1] = (first, 2, rank - first)
        elif count and rank == first + count * apart:
            found[-1] = (first, count + 1, apart)
        else:
            found.append((rank, 1, 1))
    return found


def numbers(found: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the numbers of runs."""
    return tuple(first + at * apart for first, count, apart in found for at in range(count))
