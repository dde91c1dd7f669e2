"""Who is the culprit: the rank that the others wait for, not the ranks that wait.

The first alarm is usually a victim's: when one rank hangs, all fall silent together, and when
one dies, its peers fail with a broken connection. So the verdict rests on evidence about every
rank, weighed in a fixed order, and says "cannot tell" rather than guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WAITING_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/nn/parallel/distributed.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/algorithms/join.py",
    "outlast/transport/exchange.py",
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
_INNERMOST = 3
_VICTIM_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "remote process exited",
    "remote error",
    "ncclsystemerror",
    "ncclremoteerror",
    "timed out waiting",
    "store might be unavailable",
    "failed to recv",
    "dist_backend_error",
    "did not answer",
)


@dataclass(frozen=True)
class RankEvidence:
    """What was seen of one rank when it was looked at.

    Args:
        process_state: letter of /proc/PID/stat: R, S, D, T, Z; "" when there is no process.
        cpu_busy: it used the processor while it was watched.
        stack: Python frames, innermost last, as "file:function"; empty: it did not answer.
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


def is_waiting(stack: Sequence[str]) -> bool:
    """Say whether the innermost frames are those of a rank that waits for others."""
    for frame in stack[-_INNERMOST:]:
        file, _, function = frame.rpartition(":")
        if any(file.endswith(one) for one in _WAITING_FILES):
            return True
        if function in _WAITING_CALLS and "torch/" in file:
            return True
    return False


def blame_for_hang(evidence: Sequence[RankEvidence]) -> Verdict:
    """Return who hangs, from what was seen of every rank of the node."""
    for is_guilty, words in _SIGNS:
        guilty = [one for one in evidence if is_guilty(one, evidence)]
        if guilty and len(guilty) < max(len(evidence), 2):
            first = min(guilty, key=lambda one: (one.last_beat, one.rank))
            others = tuple(one.rank for one in evidence if one not in guilty)
            return Verdict(first.rank, f"rank {first.rank} {words(first)}", others)
    if len(evidence) == 1:
        return Verdict(evidence[0].rank, f"rank {evidence[0].rank} is the only rank{_where(evidence[0])}")
    if not evidence:
        return Verdict(-1, "no rank could be looked at")
    if all(is_waiting(one.stack) for one in evidence):
        return Verdict(
            -1, "every rank waits in a collective: they do not wait in the same one, or a link is down"
        )
    return Verdict(-1, "nothing distinguishes the ranks; see the stacks")


def _where(one: RankEvidence) -> str:
    inside = f" in section {one.sections[-1]!r}" if one.sections else ""
    return f"{inside}, at {one.stack[-1]}" if one.stack else inside


def _lags(one: RankEvidence, all_of_them: Sequence[RankEvidence]) -> bool:
    return one.step < max(other.step for other in all_of_them)


_SIGNS: tuple[
    tuple[Callable[[RankEvidence, Sequence[RankEvidence]], bool], Callable[[RankEvidence], str]], ...
] = (
    (
        lambda one, _: one.process_state == "T",
        lambda one: f"is stopped (process state T){_where(one)}",
    ),
    (
        lambda one, _: one.process_state == "D" and not is_waiting(one.stack),
        lambda one: f"is stuck in the kernel (process state D){_where(one)}",
    ),
    (
        lambda one, all_of_them: (
            bool(one.stack)
            and not is_waiting(one.stack)
            and any(is_waiting(other.stack) for other in all_of_them)
        ),
        lambda one: f"is not in the collective that the others wait in{_where(one)}",
    ),
    (
        lambda one, all_of_them: not one.stack and any(other.stack for other in all_of_them),
        lambda one: f"does not answer (process state {one.process_state or 'gone'}){_where(one)}",
    ),
    (
        _lags,
        lambda one: f"is behind, at step {one.step}{_where(one)}",
    ),
)


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
    victims = tuple(death.rank for death in deaths if death is not first and looks_like_victim(death.message))
    if not causes:
        return Verdict(first.rank, "every error looks like another's consequence; the earliest is named")
    if victims:
        return Verdict(first.rank, f"ranks {', '.join(map(str, victims))} failed because of it", victims)
    return Verdict(first.rank, "it ended first")
