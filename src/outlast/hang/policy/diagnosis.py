"""Attribution of a hang: the culprit is the rank that the others wait for, not one of the waiting ranks.

The first alarm is usually from a victim: when one rank hangs, all become silent together, and when one dies,
its peers fail with a broken connection. So the verdict is based on evidence about every rank, in a fixed
order, and is "undetermined" rather than a guess. Which rank became silent first decides only between ranks
with the same sign: in a healthy job the order of the last heartbeats is chance.

Sequence numbers of collectives come first, then stacks, then process states; the verdict names its basis. A
rank that was seen outside of the collective counts for more than one that did not answer: ranks that were
started cold have no stack to show, and a busy host answers late.

Silence beyond a default or learned timeout makes the agent look, and only evidence makes it a hang
(:func:`rule`). A stopped rank is hung. So is one that others wait for in a collective while it is idle or
sleeps, at the second look, and one that nobody waits for that is idle in several looks in a row. A rank that
computes, or waits for storage, the network, its data loader or a child process, gets more time: without bound
while no rank waits for it, else up to a bound, since an endless loop computes, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.hang.policy.rank_state import Doing, blame_by_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.hang.policy.rank_state import GroupState


_WAITING_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/nn/parallel/distributed.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/algorithms/join.py",
    "outlast/ipc/exchange.py",
    "outlast/agreement/worker/vote.py",
    "outlast/agreement/worker/store_agreement.py",
    "outlast/agreement/worker/agent_agreement.py",
    "outlast/inprocess/worker/interrupt.py",  # of a rank that has returned from its resilient function
)
_WAITING_CALLS = (
    "_engine_run_backward",
    "synchronize",
    "wait",
    "barrier",
    "all_reduce",
    "all_gather",
    "broadcast",
)
_FOR_A_BUFFER = "outlast/checkpoint/save/buffers.py:claim"
_INNERMOST = 3
WAITS = ("state", "waits for other ranks")  # evidence of a hang in which the named rank only waits
GUESSED = (
    "timeout set by",
    "outlast, not the user",
)  # evidence of a hang that no timeout of the user's found
BY_ORDER = "collective sequence numbers"
BY_STACKS = "stacks"
BY_STATE = "process state"
BY_STEPS = "completed steps"
# What ranks say when a peer or the store has gone: gloo, TCPStore (of torch 2.13), NCCL, our own exchange.
_VICTIM_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "failed to recv",
    "failed to send",
    "timed out waiting",
    "wait timeout after",
    "failed to pass monitoredbarrier",
    "reached monitoredbarrier, but received errors",
    "client socket has timed out",
    "failed to connect/validate",
    "store might be unavailable",
    "remote process exited",
    "remote error",
    "ncclsystemerror",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "dist_backend_error",
    "did not answer",
    "this rank ends because",
)


@dataclass(frozen=True)
class RankEvidence:
    """The evidence about one rank.

    Args:
        process_state: letter of /proc/PID/stat: R, S, D, T, Z; "" when there is no process.
        cpu_busy: it used the processor while it was watched.
        stack: Python frames, innermost last, as "file:function"; empty: it did not answer.
        sections: open ones, from outer to inner.
        last_beat: monotonic seconds of its last heartbeat.
        doing: the conclusion from it.
        gpu: it uses a GPU, so that it may wait for others below any frame, and spins while it does.
        collectives: how far it is in each group; None: it did not answer, or does not know.
        steady: looks in a row in which it did nothing; 0: it did something since the last one.
        moved: its stack was another one in one of the latest looks.
        continued: it was stopped until this look, or the one before.
    """

    rank: int
    alive: bool
    process_state: str
    cpu_busy: bool
    stack: tuple[str, ...]
    step: int
    sections: tuple[str, ...]
    last_beat: float
    doing: Doing = Doing.NOTHING
    gpu: bool = False
    collectives: tuple[GroupState, ...] | None = None
    steady: int = 0
    moved: bool = False
    continued: bool = False


@dataclass(frozen=True)
class Verdict:
    """The culprit (-1: undetermined), the reason, the ranks that wait for it, and the basis."""

    rank: int
    reason: str
    waiting: tuple[int, ...] = ()
    basis: str = field(default="", compare=False)


@dataclass(frozen=True)
class Death:
    """How and when one rank ended; ``message`` is its exception, if it left one."""

    rank: int
    at: float
    exit_code: int
    message: str | None = None


@dataclass(frozen=True)
class _Sign:
    """One kind of evidence: a predicate, and a format string for the reason."""

    shown: Callable[[RankEvidence, Sequence[RankEvidence]], bool]
    words: str
    basis: str = BY_STATE

    def of(self, one: RankEvidence) -> str:
        return self.words.format(one=one)


def is_waiting(stack: Sequence[str]) -> bool:
    """Say whether the innermost frames are those of a rank that waits for others."""
    return any(
        file.endswith(_WAITING_FILES) or (function in _WAITING_CALLS and "torch/" in file)
        for file, _, function in (frame.rpartition(":") for frame in stack[-_INNERMOST:])
    )


def _waits_for_a_buffer(one: RankEvidence) -> bool:
    """Say whether a rank waits for the saver, which may wait for another rank's data."""
    return any(frame.endswith(_FOR_A_BUFFER) for frame in one.stack[-_INNERMOST:])


def _some_wait(evidence: Sequence[RankEvidence]) -> bool:
    return any(is_waiting(one.stack) for one in evidence)


def _is_odd(one: RankEvidence, ranks: Sequence[RankEvidence]) -> bool:
    """Say whether a rank is the only one whose innermost frame differs from all others."""
    places = [other.stack[-1] for other in ranks if other is not one and other.stack]
    return bool(one.stack) and len(places) > 1 and len({*places}) == 1 and one.stack[-1] not in places


def _others_spin(one: RankEvidence, ranks: Sequence[RankEvidence]) -> bool:
    """Say whether this rank rests and all others spin for their GPUs, as ranks that wait for a peer do."""
    others = [other for other in ranks if other is not one]
    return (
        one.gpu
        and not one.cpu_busy
        and bool(others)
        and all(other.gpu and other.cpu_busy for other in others)
    )


_SIGNS = (
    _Sign(
        lambda one, _: one.process_state == "T",
        "is stopped (process state T)",
    ),
    _Sign(
        lambda one, _: one.process_state == "D" and not is_waiting(one.stack),
        "is stuck in the kernel (process state D)",
    ),
    _Sign(
        lambda one, ranks: bool(one.stack) and not is_waiting(one.stack) and _some_wait(ranks),
        "is not in the collective that the others wait in",
        BY_STACKS,
    ),
    _Sign(
        lambda one, ranks: one.gpu and _is_odd(one, ranks),
        "is not in the collective of the other ranks",
        BY_STACKS,
    ),
    _Sign(
        _others_spin,
        "does not wait for its GPU, as the other ranks do",
    ),
    _Sign(
        lambda one, ranks: not one.stack and any(other.stack for other in ranks),
        "does not answer (process state {one.process_state!r})",
    ),
    _Sign(
        lambda one, ranks: one.step == min(other.step for other in ranks),
        "is behind, at step {one.step}",
        BY_STEPS,
    ),
)
_EVERYBODY = {
    "T": "every rank is stopped (process state T)",
    "D": "every rank is stuck in the kernel (state D)",
}


def blame_for_hang(evidence: Sequence[RankEvidence]) -> Verdict:
    """Return the hung rank, from the evidence about every rank of the node."""
    if not evidence:
        return Verdict(-1, "no rank could be examined")
    ordered = blame_by_order(
        {one.rank: one.collectives for one in evidence}, {one.rank for one in evidence if _is_outside(one)}
    )
    if ordered is not None:
        reason = ordered.reason if ordered.rank >= 0 else f"undetermined: {ordered.reason}"
        named = next((one for one in evidence if one.rank == ordered.rank), None)
        return Verdict(
            ordered.rank, reason + ("" if named is None else _where(named)), ordered.waiting, BY_ORDER
        )
    for sign in _SIGNS:
        guilty = [one for one in evidence if sign.shown(one, evidence)]
        if guilty and len(guilty) < len(evidence):
            causes = [one for one in guilty if not _waits_for_a_buffer(one)]
            return _blame(causes or guilty, sign, evidence)
    first = evidence[0]
    if len(evidence) == 1:
        how = next(
            (sign.of(first) for sign in _SIGNS[:2] if sign.shown(first, evidence)),
            "is silent, and there is no other rank",
        )
        return Verdict(first.rank, f"rank {first.rank} {how}{_where(first)}", basis=BY_STATE)
    states = {one.process_state for one in evidence}
    if len(states) == 1 and first.process_state in _EVERYBODY:
        return Verdict(-1, f"undetermined: {_EVERYBODY[first.process_state]}", basis=BY_STATE)
    if all(is_waiting(one.stack) for one in evidence):
        return Verdict(
            -1,
            "undetermined: every rank waits in a collective; not all in the same one, or a link is down",
            basis=BY_STACKS,
        )
    return Verdict(-1, "undetermined: the evidence of all ranks is the same; see the stacks", basis=BY_STACKS)


def _is_outside(one: RankEvidence) -> bool:
    """Say whether a rank's main thread was seen, and not in a collective."""
    return bool(one.stack) and not one.gpu and not is_waiting(one.stack)


def _blame(guilty: Sequence[RankEvidence], sign: _Sign, evidence: Sequence[RankEvidence]) -> Verdict:
    first = min(guilty, key=lambda one: (one.last_beat, one.rank))
    alike = [str(one.rank) for one in guilty if one is not first]
    also = ""
    if alike:
        also = f"; so {'is rank' if len(alike) == 1 else 'are ranks'} {', '.join(alike)}, silent since later"
    waiting = tuple(one.rank for one in evidence if one not in guilty)
    return Verdict(
        first.rank, f"rank {first.rank} {sign.of(first)}{_where(first)}{also}", waiting, sign.basis
    )


def _where(one: RankEvidence) -> str:
    inside = f", in section {one.sections[-1]!r}" if one.sections else ""
    return f"{inside}, at {one.stack[-1]}" if one.stack else inside


def looks_like_victim(message: str | None) -> bool:
    """Say whether an exception is one that a rank raises when a peer is lost."""
    text = (message or "").lower()
    return any(words in text for words in _VICTIM_WORDS)


_BECAUSE_OF = re.compile(r"this rank ends because another one failed: rank (\d+):")  # errors.PeerFailed


def cause_of(message: str | None) -> int | None:
    """Return the rank that a victim's exception names as the one that failed; None: it names none."""
    found = _BECAUSE_OF.search(message or "")
    return int(found[1]) if found else None


def first_failed(deaths: Sequence[Death]) -> Verdict:
    """Return the rank that failed first: the earliest death that is not the consequence of another.

    Args:
        deaths: at least one.
    """
    causes = [death for death in deaths if not looks_like_victim(death.message)]
    first = min(causes or deaths, key=lambda death: (death.at, death.rank))
    if not causes:
        return Verdict(
            first.rank, "every error looks like the consequence of another one; the earliest is named"
        )
    victims = tuple(death.rank for death in deaths if death not in causes)
    if victims:
        ranks = f"rank{'s' if len(victims) > 1 else ''} {', '.join(map(str, victims))}"
        return Verdict(first.rank, f"{ranks} failed because of it", victims)
    return Verdict(first.rank, "it ended first")


LOOKS_BEHIND = 2  # looks in a row without a sign of work, of a rank that others wait for
LOOKS_ALONE = 4  # the same, of ranks that nobody waits for
SHORTEST = 0.5  # seconds to the second look
LONGEST = 30.0  # seconds between two looks
ASLEEP = (
    10.0  # seconds beyond the timeout that a rank may sleep while others wait, as one that tries again may
)
TIMES_LONG = 6.0  # times the patience for ranks that are busy and keep others waiting: 1800 s by default
_QUIET = frozenset({Doing.NOTHING, Doing.SLEEPS, Doing.COLLECTIVE})


@dataclass(frozen=True)
class Ruling:
    """The decision about a silence.

    Args:
        convicted: it is a hang.
        reason: why it is not a hang yet; "" if it is.
        look_in: seconds until the next look.
    """

    convicted: bool
    reason: str = ""
    look_in: float = 0.0


@dataclass(frozen=True)
class Case:
    """The evidence for a decision.

    Args:
        verdict: the rank that the others wait for.
        evidence: about every rank of the node in this look.
        waited: seconds of silence so far.
        patience: seconds beyond the timeout that a rank may compute while others wait for it.
        spread: the job has ranks on other nodes.
        joint: the verdict includes evidence of other nodes.
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
        """Whether some rank is known to wait for the suspects, on this node or another."""
        waiting = set(self.verdict.waiting)
        known = {one.rank for one in self.evidence if one.gpu or one.doing is Doing.COLLECTIVE}
        return bool(waiting & known or waiting - {one.rank for one in self.evidence})

    def beyond(self, allowed: float) -> float:
        """Return the silence that is a hang for a rank with this many seconds beyond the timeout."""
        return self.limit + allowed

    def waits_elsewhere(self, one: RankEvidence) -> bool:
        """Say whether a rank waits in a collective for ranks that are not on this node."""
        here = {other.rank for other in self.evidence}
        pending = [group for group in one.collectives or () if group.pending]
        away = any(set(group.ranks) - here for group in pending) if pending else self.spread
        return away and not self.joint and one.doing is Doing.COLLECTIVE


def rule(case: Case) -> Ruling:
    """Decide about ranks that were silent beyond a timeout that the user did not set."""
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
    if all(0 < one.steady < LOOKS_ALONE for one in spared):
        look_in = min(look_in, 2 * SHORTEST)
    return Ruling(False, _words(spared, longest, case), look_in)


def _rule_elsewhere(case: Case) -> Ruling:
    """Decide about ranks that wait for one of another node, whose agent decides first."""
    longest = case.beyond(TIMES_LONG * case.patience if case.joint else 0.0)
    if case.waited >= longest:
        return Ruling(True)
    words = f"the agent of its node decides; the ranks here wait up to {longest:.0f} s"
    return Ruling(False, words, min(max(SHORTEST, case.waited / 2), LONGEST))


def _allowed(one: RankEvidence, case: Case) -> float:
    """Return the seconds beyond the timeout that a rank is allowed; 0: it is hung."""
    patience = case.patience
    if one.doing is Doing.STOPPED:
        suspended = case.verdict.rank < 0 or any(other.continued for other in case.evidence)
        return patience if suspended else 0.0  # all ranks are stopped, or were and continue one by one
    if one.doing is Doing.COMPUTES or _computes_on_gpu(one):
        return math.inf if not case.missed else TIMES_LONG * patience if one.moved else patience
    if one.doing not in _QUIET:
        return TIMES_LONG * patience
    if case.waits_elsewhere(one):
        return patience  # the node of the culprit has the evidence about it
    if case.missed or one.doing is Doing.COLLECTIVE:
        if one.steady < LOOKS_BEHIND:
            return patience
        return min(ASLEEP, patience) if one.doing is Doing.SLEEPS else 0.0
    if one.doing is Doing.NOTHING and one.steady >= LOOKS_ALONE and not one.moved:
        return 0.0
    return TIMES_LONG * patience


def _computes_on_gpu(one: RankEvidence) -> bool:
    """Say whether a rank on a GPU, whose CPU spins in any case, works: no collective is pending."""
    known = one.collectives is not None and not any(group.pending for group in one.collectives)
    return one.gpu and one.doing is Doing.NOTHING and one.cpu_busy and known


def _words(spared: Sequence[RankEvidence], allowed: float, case: Case) -> str:
    """Return what ranks with more time do, and how much they have."""
    some = spared[:4]
    does = "; ".join(f"rank {one.rank} {one.doing.value}" for one in some)
    more = f" (and {len(spared) - len(some)} more)" if len(spared) > len(some) else ""
    if all(one.doing in _QUIET and one.steady < LOOKS_BEHIND for one in spared) and case.missed:
        return f"{does}{more}: this is a hang if nothing has changed at the next looks"
    limit = "while it does" if math.isinf(allowed) else f"to {allowed:.0f} s of silence"
    return f"{does}{more}: the hang timeout is extended {limit}"
