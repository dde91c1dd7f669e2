"""The ladder: which rung answers a fault, and why every recovery ends.

Two budgets bound the rung "restart in the job": ``max_restarts`` without progress in between
(a commit of a newer step than ever refills it) and ``max_restarts_per_day``, which progress
does not refill. Beside them stands the evidence rule: the same fault (kind and signature) at
the same step is new evidence against the state or the program, so the answer to it moves along
its row of ``LADDER``: from the newest checkpoint to an older one, and from there to the end.

Why every recovery ends: an answer is a restart or the end, each restart takes one from the daily
budget, and nothing but time gives it back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.core.errors import ExitCode
from outlast.core.events import FaultKind, Rung, StateSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.core.config import FaultTolerance
    from outlast.core.events import Fault

DAY = 86_400.0
_NEWEST, _OLDER = StateSource.NEWEST, StateSource.OLDER
# What is loaded when the same fault comes at the same step: the first time, the second, ...
# An empty row, a row that is used up, and an older state where there is none, end the job.
LADDER: Mapping[FaultKind, tuple[StateSource, ...]] = {
    FaultKind.ERROR: (_NEWEST, _OLDER),  # a program that raises will raise again
    FaultKind.CRASH: (_NEWEST, _NEWEST, _OLDER),  # a signal may come from outside twice
    FaultKind.HANG: (_NEWEST, _NEWEST, _OLDER),  # the second time with twice the timeout
    FaultKind.LOST: (_NEWEST, _NEWEST, _OLDER),
    FaultKind.CORRUPT: (_NEWEST, _OLDER),
    FaultKind.NON_FINITE: (_NEWEST, _OLDER),  # soon after a load the copy is a suspect the first time
    FaultKind.REFUSED: (),
}
_NO_CURE = (
    "SyntaxError",
    "IndentationError",
    "ImportError",
    "ModuleNotFoundError",
    "UsageError",
    "ConfigError",
)
# Addresses, ports and process ids differ between two failures of the same cause; so does where it is noticed.
_ACCIDENTS = {
    FaultKind.ERROR: re.compile(r"0x[0-9a-f]+|\d{4,}", re.IGNORECASE),
    FaultKind.NON_FINITE: re.compile(r"\d+"),
}
_FAR = 1e15  # seconds; no clock shows that
_KEY_LENGTH = 200
_KEYS_KEPT = 256


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
            older_exists: a checkpoint was loaded, and there is one older than it that is no suspect.
            now: seconds on a clock that goes on between launchers of one run.
        """
        key = _key(fault)
        repeats = self._met.get(key, 0)
        row = LADDER[fault.kind]
        if not row:
            code = fault.exit_code if fault.exit_code is not None and fault.exit_code > 0 else ExitCode.FAILED
            return Answer(
                Rung.STOP, "no restart changes what was refused", exit_code=int(code), repeats=repeats
            )
        if fault.kind is FaultKind.ERROR and fault.signature.startswith(_NO_CURE):
            return _end("no restart cures an error in the program itself", repeats, ExitCode.DO_NOT_REQUEUE)
        where = f"at step {fault.step}" if fault.step >= 0 else "before the first step"
        if repeats >= len(row) or (row[repeats] is _OLDER and not older_exists):
            times = "twice" if repeats == 1 else f"{repeats + 1} times"
            tried = ", the last time from an older checkpoint" if repeats >= len(row) else ""
            return _end(
                f"the same fault came {times} {where}{tried}: it is in the program, "
                "the data or the machine, and would come again",
                repeats,
                ExitCode.DO_NOT_REQUEUE,
            )
        why = ""
        if repeats:
            why = f"; the same fault came before {where}"
        if row[repeats] is _OLDER:
            why += ", so an older checkpoint is loaded"
        return self._restart(key, repeats, row[repeats], why, now)

    def _restart(self, key: str, repeats: int, state: StateSource, why: str, now: float) -> Answer:
        fast, slow = self._config.max_restarts, self._config.max_restarts_per_day
        self._restarts = [min(at, now) for at in self._restarts if now - at < DAY]
        if self._without_progress >= fast:
            return _end(f"{fast} restarts without progress are spent (--max-restarts)", repeats)
        if len(self._restarts) >= slow:
            return _end(f"{slow} restarts in 24 h are spent (--ft-max-restarts-per-day)", repeats)
        self._met.pop(key, None)
        self._met[key] = repeats + 1
        for old in list(self._met)[:-_KEYS_KEPT]:
            del self._met[old]
        self._without_progress += 1
        self._restarts.append(now)
        reason = (
            f"restart {self._without_progress} of {fast} without progress, "
            f"{len(self._restarts)} of {slow} today{why}"
        )
        return Answer(Rung.RESTART_IN_JOB, reason, state, repeats=repeats)

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher."""
        return {
            "without_progress": self._without_progress,
            "restarts": list(self._restarts),
            "met": dict(self._met),
            "newest": self._newest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier launcher of this run left; nothing is taken over when it raises.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours.
        """
        without_progress = whole(state["without_progress"], at_least=0)
        newest = whole(state["newest"], at_least=-1)
        restarts = [_moment(at) for at in state["restarts"]]
        met = {str(key): whole(count, at_least=0) for key, count in dict(state["met"]).items()}
        self._without_progress, self._newest = without_progress, newest
        self._restarts, self._met = restarts, met


def whole(value: object, at_least: int) -> int:
    """Return a number out of a file.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is too small.
    """
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    if value < at_least:
        raise ValueError(f"{value} is less than {at_least}")
    return value


def _moment(value: object) -> float:
    if isinstance(value, (int, float)) and abs(value) < _FAR:
        return float(value)
    raise ValueError(f"{value!r} is no time")


def cause(fault: Fault) -> str:
    """Return a fault's signature without what differs between two faults of one cause."""
    pattern = _ACCIDENTS.get(fault.kind)
    return fault.signature if pattern is None else pattern.sub("#", fault.signature)


def _key(fault: Fault) -> str:
    """Return what two faults share that are the same evidence."""
    return f"{fault.kind.value}|{cause(fault)[:_KEY_LENGTH]}|{fault.step}"


def _end(reason: str, repeats: int, code: ExitCode = ExitCode.FAILED) -> Answer:
    return Answer(Rung.STOP, reason, exit_code=int(code), repeats=repeats)
