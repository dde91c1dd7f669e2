"""Whether a silent rank is hung: a timeout that nobody fixed convicts on evidence only.

Silence beyond a default or learned timeout makes the agent look. A rank that is stopped is hung. So is
one that others wait for in a collective while it does nothing or sleeps, at the second look, and one that
nobody waits for that does nothing in several looks in a row. A rank that computes, or waits for storage,
the network, its data loader or a process of its own, gets more time: as much as nobody misses it, else
up to a bound, since an endless loop computes, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.core.diagnosis import RankEvidence, Verdict
from outlast.core.doing import Doing

LOOKS_BEHIND = 2  # looks in a row without a sign of work, of a rank that others wait for
LOOKS_ALONE = 4  # the same, of ranks that nobody waits for
SHORTEST = 0.5  # seconds to the second look
LONGEST = 30.0  # seconds between two looks
TIMES_LONG = 6.0  # times the patience for ranks that are busy and keep others waiting: 1800 s by default
_QUIET = frozenset({Doing.NOTHING, Doing.SLEEPS, Doing.COLLECTIVE})


@dataclass(frozen=True)
class Ruling:
    """What is to be done about a silence.

    Args:
        convicted: it is a hang.
        reason: why it is not taken for one yet, "" when it is.
        look_in: seconds until the next look.
    """

    convicted: bool
    reason: str = ""
    look_in: float = 0.0


@dataclass(frozen=True)
class Case:
    """What there is to judge.

    Args:
        verdict: who holds up the others.
        evidence: what was seen of every rank of the node in this look.
        waited: seconds of silence so far.
        patience: seconds beyond the timeout that a rank may compute while others wait for it.
        spread: ranks of the job are on other nodes, too.
        joint: the verdict rests on what was seen on other nodes, too.
        limit: the timeout that was exceeded, in seconds.
    """

    verdict: Verdict
    evidence: Sequence[RankEvidence]
    waited: float
    patience: float
    spread: bool = False
    joint: bool = False
    limit: float = 0.0

    @property
    def missed(self) -> bool:
        """Whether some rank waits for those that are suspected, here or, as far as is known, elsewhere."""
        waiting = self.verdict.waiting
        if self.joint and set(waiting) - {one.rank for one in self.evidence}:
            return True
        return any(
            one.rank in waiting and (one.gpu or one.doing is Doing.COLLECTIVE) for one in self.evidence
        )

    def beyond(self, allowed: float) -> float:
        """Return the silence at which a rank is hung that is allowed so many seconds beyond the timeout."""
        return self.limit + allowed if allowed else 0.0

    def waits_elsewhere(self, one: RankEvidence) -> bool:
        """Say whether a rank waits in a collective for ranks that are not on this node."""
        here = {other.rank for other in self.evidence}
        pending = [group for group in one.collectives or () if group.pending]
        if self.joint or one.doing is not Doing.COLLECTIVE:
            return False
        return any(set(group.ranks) - here for group in pending) if pending else self.spread


def rule(case: Case) -> Ruling:
    """Judge ranks that were silent beyond a timeout that is not fixed."""
    rank, waited = case.verdict.rank, case.waited
    suspects = [one for one in case.evidence if rank in {one.rank, -1}]
    if not suspects:
        return _rule_elsewhere(case)
    allowed = {one.rank: _allowed(one, case) for one in suspects}
    longest = case.beyond(max(allowed.values()))
    if waited >= longest:
        return Ruling(True)
    spared = [one for one in suspects if case.beyond(allowed[one.rank]) == longest]
    look_in = min(max(SHORTEST, waited / 2), LONGEST, max(longest - waited, SHORTEST))
    if all(one.steady for one in spared):
        look_in = min(look_in, 2 * SHORTEST)
    return Ruling(False, _words(spared, longest), look_in)


def _rule_elsewhere(case: Case) -> Ruling:
    """Judge ranks that wait for one of another node: the agent of that node decides about it first."""
    longest = case.beyond(TIMES_LONG * case.patience) if case.joint else 0.0
    if case.waited >= longest:
        return Ruling(True)
    words = f"its own node's agent decides about it; the ranks here wait up to {longest:.0f} s"
    return Ruling(False, words, min(max(SHORTEST, case.waited / 2), LONGEST))


def _allowed(one: RankEvidence, case: Case) -> float:
    """Return the seconds beyond the timeout that a rank is allowed; 0: it is hung."""
    patience = case.patience
    if one.doing is Doing.STOPPED:
        suspended = case.verdict.rank < 0 or any(other.continued for other in case.evidence)
        return patience if suspended else 0.0  # all ranks are stopped, or were and go on one by one
    if one.doing is Doing.COMPUTES or _computes_on_gpu(one):
        return math.inf if not case.missed else TIMES_LONG * patience if one.moved else patience
    if one.doing not in _QUIET:
        return TIMES_LONG * patience
    if case.waits_elsewhere(one):
        return patience  # the node of the rank that they wait for can tell what that one does
    if case.missed or one.doing is Doing.COLLECTIVE:
        return 0.0 if one.steady >= LOOKS_BEHIND else patience
    if one.doing is Doing.NOTHING and one.steady >= LOOKS_ALONE and not one.moved:
        return 0.0
    return TIMES_LONG * patience


def _computes_on_gpu(one: RankEvidence) -> bool:
    """Say whether a rank of a GPU, whose processor spins in either case, works: no collective is pending."""
    known = one.collectives is not None and not any(group.pending for group in one.collectives)
    return one.gpu and one.doing is Doing.NOTHING and one.cpu_busy and known


def _words(spared: Sequence[RankEvidence], allowed: float) -> str:
    """Say what ranks do that are given time, and how much they have."""
    some = spared[:4]
    does = "; ".join(f"rank {one.rank} {one.doing.value}" for one in some)
    more = f" (and {len(spared) - len(some)} more)" if len(spared) > len(some) else ""
    limit = "as long as it does" if math.isinf(allowed) else f"up to {allowed:.0f} s of silence"
    return f"{does}{more}: not taken for hung, {limit}"
