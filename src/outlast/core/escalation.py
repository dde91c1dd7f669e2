"""The ladder: which rung answers a fault, and why every recovery ends.

Two budgets bound the rung "restart in the job": ``max_restarts`` without progress in between
(a commit of a newer step than ever refills it) and ``max_restarts_per_day``, which progress
does not refill. Beside them stands the evidence rule: the same fault (kind and signature) at
the same step is new evidence against the state or the program, so it moves: from the newest
checkpoint to an older one, and from there to the end of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.core.config import FaultTolerance
from outlast.core.errors import ExitCode
from outlast.core.events import Fault, FaultKind, Rung, StateSource

DAY = 86_400.0
_NO_CURE = (
    "SyntaxError",
    "IndentationError",
    "ImportError",
    "ModuleNotFoundError",
    "UsageError",
    "ConfigError",
)
# How often the same fault at the same step is met with a plain restart before an older state is tried.
_PLAIN_RESTARTS: Mapping[FaultKind, int] = {
    FaultKind.ERROR: 1,  # a program that raises will raise again
    FaultKind.CRASH: 2,  # a signal may come from outside twice
    FaultKind.HANG: 2,  # the second time with a doubled timeout
    FaultKind.LOST: 2,
    FaultKind.CORRUPT: 1,
    FaultKind.REFUSED: 0,
}


@dataclass(frozen=True)
class Answer:
    """A rung with its reason; ``repeats`` is how often this very fault was met before."""

    rung: Rung
    reason: str
    state: StateSource = StateSource.NEWEST
    exit_code: int = 0
    repeats: int = 0


class Escalation:
    """Keeps the budgets and the evidence of one job.

    Args:
        config: ``max_restarts`` and ``max_restarts_per_day``.
    """

    def __init__(self, config: FaultTolerance) -> None:
        self._config = config
        self._without_progress = 0
        self._restarts: list[float] = []
        self._met: dict[str, int] = {}
        self._newest = -1

    def committed(self, step: int) -> bool:
        """Refill the fast budget if no newer step was ever committed; say whether it was."""
        if step <= self._newest:
            return False
        self._newest = step
        self._without_progress = 0
        return True

    def answer(self, fault: Fault, older_exists: bool, now: float) -> Answer:
        """Return the rung for a fault.

        Args:
            fault: with the step at which it happened.
            older_exists: a checkpoint was loaded, and there is one older than it.
            now: seconds on a clock that goes on between launchers of one run.
        """
        key = f"{fault.kind.value}|{fault.signature}|{fault.step}"
        repeats = self._met.get(key, 0)
        if fault.kind is FaultKind.REFUSED:
            code = fault.exit_code or int(ExitCode.FAILED)
            return Answer(Rung.STOP, "no restart changes what was refused", exit_code=code, repeats=repeats)
        if fault.kind is FaultKind.ERROR and fault.signature.startswith(_NO_CURE):
            return self._end(
                "no restart cures an error in the program itself", repeats, ExitCode.DO_NOT_REQUEUE
            )
        state = StateSource.NEWEST
        why = ""
        if repeats >= _PLAIN_RESTARTS[fault.kind]:
            if not older_exists or repeats > _PLAIN_RESTARTS[fault.kind]:
                return self._end(_verdict(fault, repeats), repeats, ExitCode.DO_NOT_REQUEUE)
            state = StateSource.OLDER
            why = f"; the same fault came before at step {fault.step}, so an older checkpoint is loaded"
        return self._restart(key, repeats, state, why, now)

    def _restart(self, key: str, repeats: int, state: StateSource, why: str, now: float) -> Answer:
        fast, slow = self._config.max_restarts, self._config.max_restarts_per_day
        self._restarts = [at for at in self._restarts if now - at < DAY]
        if self._without_progress >= fast:
            return self._end(f"{fast} restarts without progress are spent (--max-restarts)", repeats)
        if len(self._restarts) >= slow:
            return self._end(f"{slow} restarts in 24 h are spent (--ft-max-restarts-per-day)", repeats)
        self._met[key] = repeats + 1
        self._without_progress += 1
        self._restarts.append(now)
        spent = f"{self._without_progress} of {fast} without progress, {len(self._restarts)} of {slow} today"
        reason = f"restart {spent}{why}"
        return Answer(Rung.RESTART_IN_JOB, reason, state, repeats=repeats)

    def _end(self, reason: str, repeats: int, code: ExitCode = ExitCode.FAILED) -> Answer:
        return Answer(Rung.STOP, reason, exit_code=int(code), repeats=repeats)

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher."""
        return {
            "without_progress": self._without_progress,
            "restarts": list(self._restarts),
            "met": dict(self._met),
            "newest": self._newest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier launcher of this run left.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours.
        """
        self._without_progress = int(state["without_progress"])
        self._restarts = [float(at) for at in state["restarts"]]
        self._met = {str(key): int(count) for key, count in state["met"].items()}
        self._newest = int(state["newest"])


def _verdict(fault: Fault, repeats: int) -> str:
    times = "twice" if repeats == 1 else f"{repeats + 1} times"
    older = ", the last time from an older checkpoint" if repeats > _PLAIN_RESTARTS[fault.kind] else ""
    return (
        f"the same fault came {times} at step {fault.step}{older}: it is in the program, the data or the "
        "machine, and would come again"
    )
