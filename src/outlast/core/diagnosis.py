"""Who is the culprit: the rank that the others wait for, not the ranks that wait.

The first alarm is usually a victim's: when one rank hangs, all fall silent together, and when
one dies, its peers fail with a broken connection. So the verdict rests on evidence about every
rank, weighed in a fixed order, and says "cannot tell" rather than guess. Which rank fell silent
first decides only between ranks that share a sign: in a healthy job the order of the last pulses
is chance, and the earliest is as likely the fastest rank.

Sequence numbers of collectives come first, then stacks, then process states; the verdict names its basis.
A rank that was seen outside of the collective counts for more than one that did not answer:
ranks that were started cold have no stack to show, and a busy host answers late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.core.collectives import blame_by_order
from outlast.core.doing import Doing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.core.collectives import GroupState

_WAITING_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/nn/parallel/distributed.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/algorithms/join.py",
    "outlast/transport/exchange.py",
    "outlast/worker/vote.py",
    "outlast/worker/reentry_line.py",  # of a rank that has returned from its resilient function
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
_FOR_A_BUFFER = "outlast/checkpoint/saving/buffers.py:claim"
_INNERMOST = 3
WAITS = ("seen", "waits for others")  # evidence of a hang in which whoever is named only waits
GUESSED = ("timeout", "not fixed by the user")  # evidence of a hang that no timeout of the user's found
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
    """What was seen of one rank when it was looked at.

    Args:
        process_state: letter of /proc/PID/stat: R, S, D, T, Z; "" when there is no process.
        cpu_busy: it used the processor while it was watched.
        stack: Python frames, innermost last, as "file:function"; empty: it did not answer.
        sections: open ones, from outer to inner.
        last_beat: monotonic seconds of its last pulse.
        doing: what that amounts to.
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
    """The rank to blame (-1: nobody can be named), why, who waits for it, and what that rests on."""

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
    """One kind of evidence: who shows it, and how that is said of a rank (a format string)."""

    shown: Callable[[RankEvidence, Sequence[RankEvidence]], bool]
    words: str
    basis: str = BY_STATE

    def of(self, one: RankEvidence) -> str:
        return self.words.format(one=one)


def is_waiting(stack: Sequence[str]) -> bool:
    """Say whether the innermost frames are those of a rank that waits for others."""
    for frame in stack[-_INNERMOST:]:
        file, _, function = frame.rpartition(":")
        if any(file.endswith(one) for one in _WAITING_FILES):
            return True
        if function in _WAITING_CALLS and "torch/" in file:
            return True
    return False


def _waits_for_a_buffer(one: RankEvidence) -> bool:
    """Say whether a rank waits for the saver, which may wait for what another rank has not staged yet."""
    return any(frame.endswith(_FOR_A_BUFFER) for frame in one.stack[-_INNERMOST:])


def _some_wait(evidence: Sequence[RankEvidence]) -> bool:
    return any(is_waiting(one.stack) for one in evidence)


def _is_odd(one: RankEvidence, ranks: Sequence[RankEvidence]) -> bool:
    """Say whether a rank is the only one whose innermost frame is another than that of all others."""
    places = [other.stack[-1] for other in ranks if other is not one and other.stack]
    return len(places) > 1 and len(set(places)) == 1 and one.stack[-1:] not in [(places[0],), ()]


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
        "is not where the others wait for it",
        BY_STACKS,
    ),
    _Sign(
        lambda one, ranks: one.gpu and _is_odd(one, ranks),
        "is not where the other ranks are",
        BY_STACKS,
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
    """Return who hangs, from what was seen of every rank of the node."""
    if not evidence:
        return Verdict(-1, "no rank could be looked at")
    ordered = blame_by_order(
        {one.rank: one.collectives for one in evidence}, {one.rank for one in evidence if _is_outside(one)}
    )
    if ordered is not None:
        reason = ordered.reason if ordered.rank >= 0 else f"cannot tell: {ordered.reason}"
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
        how = next((sign.of(first) for sign in _SIGNS[:2] if sign.shown(first, evidence)), "is the only rank")
        return Verdict(first.rank, f"rank {first.rank} {how}{_where(first)}", basis=BY_STATE)
    states = {one.process_state for one in evidence}
    if len(states) == 1 and first.process_state in _EVERYBODY:
        return Verdict(-1, f"cannot tell: {_EVERYBODY[first.process_state]}", basis=BY_STATE)
    if all(is_waiting(one.stack) for one in evidence):
        return Verdict(
            -1,
            "cannot tell: every rank waits in a collective; not all in the same one, or a link is down",
            basis=BY_STACKS,
        )
    return Verdict(-1, "cannot tell: nothing distinguishes the ranks; see the stacks", basis=BY_STACKS)


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
    """Say whether an exception is what a rank raises when another one has gone."""
    text = (message or "").lower()
    return any(words in text for words in _VICTIM_WORDS)


def first_failed(deaths: Sequence[Death]) -> Verdict:
    """Return who failed first: the earliest death that is not another's consequence.

    Args:
        deaths: at least one.
    """
    causes = [death for death in deaths if not looks_like_victim(death.message)]
    first = min(causes or deaths, key=lambda death: (death.at, death.rank))
    if not causes:
        return Verdict(first.rank, "every error looks like another's consequence; the earliest is named")
    victims = tuple(death.rank for death in deaths if death not in causes)
    if victims:
        ranks = f"rank{'s' if len(victims) > 1 else ''} {', '.join(map(str, victims))}"
        return Verdict(first.rank, f"{ranks} failed because of it", victims)
    return Verdict(first.rank, "it ended first")
