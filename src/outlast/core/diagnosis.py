"""Who is the culprit: the rank that the others wait for, not the ranks that wait.

The first alarm is usually a victim's: when one rank hangs, all fall silent together, and when
one dies, its peers fail with a broken connection. So the verdict rests on evidence about every
rank, weighed in a fixed order, and says "cannot tell" rather than guess. Which rank fell silent
first decides only between ranks that share a sign: in a healthy job the order of the last pulses
is chance, and the earliest is as likely the fastest rank.

A rank that was seen outside of the collective counts for more than one that did not answer:
ranks that were started cold have no stack to show, and a busy host answers late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.core.config import LEARNED_SILENCE_START

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WAITING_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/nn/parallel/distributed.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/algorithms/join.py",
    "outlast/transport/exchange.py",
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
GUESSED = ("timeout", "learned")  # evidence of a hang that no timeout of the user's found
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
    """

    rank: int
    alive: bool
    process_state: str
    cpu_busy: bool
    stack: tuple[str, ...]
    step: int
    sections: tuple[str, ...]
    last_beat: float


@dataclass(frozen=True)
class Verdict:
    """The rank to blame (-1: nobody can be named), why, and who waits for it."""

    rank: int
    reason: str
    waiting: tuple[int, ...] = ()


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
    ),
    _Sign(
        lambda one, ranks: not one.stack and any(other.stack for other in ranks),
        "does not answer (process state {one.process_state!r})",
    ),
    _Sign(
        lambda one, ranks: one.step == min(other.step for other in ranks),
        "is behind, at step {one.step}",
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
    for sign in _SIGNS:
        guilty = [one for one in evidence if sign.shown(one, evidence)]
        if guilty and len(guilty) < len(evidence):
            causes = [one for one in guilty if not _waits_for_a_buffer(one)]
            return _blame(causes or guilty, sign, evidence)
    first = evidence[0]
    if len(evidence) == 1:
        how = next((sign.of(first) for sign in _SIGNS[:2] if sign.shown(first, evidence)), "is the only rank")
        return Verdict(first.rank, f"rank {first.rank} {how}{_where(first)}")
    states = {one.process_state for one in evidence}
    if len(states) == 1 and first.process_state in _EVERYBODY:
        return Verdict(-1, f"cannot tell: {_EVERYBODY[first.process_state]}")
    if all(is_waiting(one.stack) for one in evidence):
        return Verdict(
            -1, "cannot tell: every rank waits in a collective; not all in the same one, or a link is down"
        )
    return Verdict(-1, "cannot tell: nothing distinguishes the ranks; see the stacks")


def _blame(guilty: Sequence[RankEvidence], sign: _Sign, evidence: Sequence[RankEvidence]) -> Verdict:
    first = min(guilty, key=lambda one: (one.last_beat, one.rank))
    alike = [str(one.rank) for one in guilty if one is not first]
    also = ""
    if alike:
        also = f"; so {'is rank' if len(alike) == 1 else 'are ranks'} {', '.join(alike)}, silent since later"
    waiting = tuple(one.rank for one in evidence if one not in guilty)
    return Verdict(first.rank, f"rank {first.rank} {sign.of(first)}{_where(first)}{also}", waiting)


def _where(one: RankEvidence) -> str:
    inside = f", in section {one.sections[-1]!r}" if one.sections else ""
    return f"{inside}, at {one.stack[-1]}" if one.stack else inside


def deserves_time(verdict: Verdict, evidence: Sequence[RankEvidence], waited: float) -> bool:
    """Say whether a silence beyond a *learned* timeout is forgiven for now; beyond a fixed one it never is.

    A learned timeout is a guess, so it does not convict a rank that computes (without a suspect:
    any rank), until it has been silent for as long as was allowed before anything was learned.

    Args:
        verdict: of :func:`blame_for_hang`.
        evidence: what the verdict rests on.
        waited: seconds of silence so far.
    """
    if waited >= LEARNED_SILENCE_START:
        return False
    suspects = [one for one in evidence if verdict.rank in {one.rank, -1}]
    return any(one.cpu_busy and one.process_state in {"R", "S"} for one in suspects)


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
