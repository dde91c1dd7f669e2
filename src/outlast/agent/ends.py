"""From ended processes to one fault: who failed first, and of what."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from outlast.agent.generation import Generation
from outlast.agent.logs import Failure
from outlast.agent.processes import Reaper
from outlast.core.diagnosis import Death, first_failed, looks_like_victim
from outlast.core.errors import ExitCode
from outlast.core.events import Fault, FaultKind

SETTLE = 0.2  # a victim's error may arrive before the end of the rank that caused it


@dataclass(frozen=True)
class End:
    """How one worker ended and what it left to read."""

    rank: int
    exit_code: int
    at: float
    failure: Failure | None


class Ends:
    """Collects the ends of a generation's workers."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._ends: list[End] = []
        self._settled_at = 0.0

    def begin(self) -> None:
        """Forget the generation before."""
        self._ends.clear()
        self._settled_at = 0.0

    def collect(self, generation: Generation, reaper: Reaper, now: float) -> list[End]:
        """Return the workers that have ended since the last call."""
        found: list[End] = []
        for worker in generation.living():
            code = reaper.exit_code(worker.pid)
            if code is None:
                continue
            worker.exit_code = code
            failure = generation.failure(worker.rank) if code > 0 else None
            found.append(End(worker.rank, code, now, failure))
        failed = [end for end in found if end.exit_code != 0]
        if failed and not any(end.exit_code for end in self._ends):
            all_victims = all(end.failure and looks_like_victim(end.failure.message) for end in failed)
            self._settled_at = now + SETTLE if all_victims else now
        self._ends += found
        return found

    def deadline(self) -> float | None:
        """Return when to decide who failed first, None while nobody has."""
        return self._settled_at if any(end.exit_code for end in self._ends) else None

    def fault(self, generation: Generation, step: int, now: float) -> Fault | None:
        """Return the fault of the first failed rank once the ends have settled."""
        limit = self.deadline()
        if limit is None or now < limit:
            return None
        deaths = tuple(self._death(end) for end in self._ends if end.exit_code)
        verdict = first_failed(deaths)
        end = next(one for one in self._ends if one.rank == verdict.rank)
        return Fault(
            kind=_kind(end),
            node=self._node,
            rank=end.rank,
            generation=generation.number,
            step=step,
            reason=_reason(end) if not verdict.waiting else f"{_reason(end)} ({verdict.reason})",
            signature=_signature(end),
            exit_code=_status(end),
            since=end.at,
        )

    def _death(self, end: End) -> Death:
        failure = end.failure
        at = failure.clock if failure is not None and failure.clock else end.at
        return Death(end.rank, at, end.exit_code, failure.message if failure else None)


def _status(end: End) -> int:
    """Return the exit code that the exception asked for; on a full disk the interpreter ends with another."""
    return end.failure.exit_code if end.failure is not None and end.failure.exit_code else end.exit_code


def _kind(end: End) -> FaultKind:
    if end.exit_code < 0:
        return FaultKind.CRASH
    refused = (ExitCode.CHECKPOINT_REFUSED, ExitCode.SAVE_FAILED, ExitCode.RUN_FOLDER_UNUSABLE)
    if end.failure is not None and end.failure.exit_code in refused:
        return FaultKind.REFUSED
    if end.failure is not None and end.failure.not_finite:
        return FaultKind.NON_FINITE
    return FaultKind.ERROR


def _signature(end: End) -> str:
    if end.exit_code < 0:
        return f"signal {-end.exit_code}"
    return end.failure.message if end.failure is not None else f"exit {end.exit_code}"


def _reason(end: End) -> str:
    if end.exit_code < 0:
        try:
            name = signal.Signals(-end.exit_code).name
        except ValueError:
            name = "unknown"
        return f"rank {end.rank} was ended by signal {-end.exit_code} ({name})"
    text = end.failure.message.splitlines()[0] if end.failure and end.failure.message else ""
    return f"rank {end.rank} exited with status {end.exit_code}{': ' + text if text else ''}"
