"""Which rung answers a fault, and why every recovery ends.

The moves that may cure a fault, and their order, are in :mod:`outlast.core.ladder`. Here is what was spent
and what was tried. Two budgets bound each rung: ``max_restarts`` without progress in between (a commit of a
newer step than ever refills them) and ``max_restarts_per_day``, which progress does not refill. Beside them
stands the evidence rule: the same fault (kind and cause) at the same step is answered with a later move of
its course, until that is used up.

Why every recovery ends: an answer is the end or a move; each move takes one from the daily budget of its
rung, and nothing but time gives it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outlast.core.errors import ExitCode
from outlast.core.events import FaultKind, Rung, StateSource
from outlast.core.ladder import MEMORY, Move, course_of, evidence_of, in_program, where
from outlast.core.loops import Struck, acquits, at_one_step, came_back, without_progress
from outlast.core.strikes import DAY, Strikes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.core.config import FaultTolerance
    from outlast.core.events import Fault

BUDGETED = (Rung.RESTART_IN_PROCESS, Rung.RESTART_IN_JOB, Rung.REPLACE_NODE, Rung.SHRINK)
_NAMES = {  # one move, and several
    Rung.RESTART_IN_PROCESS: ("restart in process", "restarts in process"),
    Rung.RESTART_IN_JOB: ("restart", "restarts"),
    Rung.REPLACE_NODE: ("replacement", "replacements"),
    Rung.SHRINK: ("shrinking", "shrinkings"),
}
_FAR = 1e15  # seconds; no clock shows that
_KEYS_KEPT = 256
_STRUCK_KEPT = 16
_MOST_MOVES = 3  # of one fault, before there was a restart in the process


@dataclass(frozen=True)
class Means:
    """What could be done at the time of a fault.

    Args:
        older_exists: a checkpoint was loaded, and there is one older than it that is no suspect.
        ranks_can_reenter: as a fault's ``reenters``.
        spare: a node that waits could take the place of the fault's; None: the job has one node.
        fewer: the job could go on without the fault's node.
    """

    older_exists: bool = False
    ranks_can_reenter: bool | None = None
    spare: bool | None = None
    fewer: bool = False

    def in_question(self, rung: Rung) -> bool:
        """Say whether a rung is worth a word when it is passed over."""
        if rung is Rung.RESTART_IN_PROCESS:
            return self.ranks_can_reenter is not None
        return rung not in (Rung.REPLACE_NODE, Rung.SHRINK) or self.spare is not None


@dataclass(frozen=True)
class Answer:
    """A rung with its reason.

    Args:
        reason: why this rung.
        passed: moves before it in the course of the fault, each with the reason why it was not made.
        repeats: how often this very fault was met before.
        acquits: it came from every state that was tried, so it clears them of suspicion.
        exclude: the node that is used no more from now on; empty: none.
    """

    rung: Rung
    reason: str
    state: StateSource = StateSource.NEWEST
    exit_code: int = 0
    repeats: int = 0
    passed: tuple[str, ...] = ()
    acquits: bool = False
    exclude: str = ""


@dataclass
class _Spent:
    """What was spent of a rung: moves since the last progress, and the times of those of a day."""

    fast: int = 0
    times: list[float] = field(default_factory=list)


class Escalation:
    """Keeps the budgets and the evidence of one job.

    Args:
        config: ``max_restarts`` and ``max_restarts_per_day``.
    """

    def __init__(self, config: FaultTolerance) -> None:
        self._config = config
        self._spent = {rung: _Spent() for rung in BUDGETED}
        self._met: dict[str, tuple[int, ...]] = {}  # places in its course of the moves that were made
        self._struck: list[Struck] = []  # since the last progress
        self._strikes = Strikes()
        self._newest = -1

    def committed(self, step: int) -> bool:
        """Refill the fast budgets if no newer step was ever committed; say whether it was."""
        if step <= self._newest:
            return False
        self._newest = step
        for spent in self._spent.values():
            spent.fast = 0
        self._struck.clear()
        self._met = {key: made for key, made in self._met.items() if not key.startswith(MEMORY)}
        return True

    def answer(self, fault: Fault, means: Means, now: float) -> Answer:
        """Return the rung for a fault.

        Args:
            fault: with the step at which it happened.
            means: what could be done.
            now: seconds on a clock that goes on between launchers of one run.
        """
        made = self._met.get(evidence_of(fault), ())
        repeats = len(made)
        if fault.kind is FaultKind.REFUSED:
            without = self._without_unfit_node(fault, means, repeats, now)
            if without is not None:
                return without
            code = fault.exit_code if fault.exit_code is not None and fault.exit_code > 0 else ExitCode.FAILED
            later = "nothing was lost; the same command goes on once what is silent answers again"
            why = later if code == ExitCode.PREEMPTED else "no restart changes what was refused"
            return Answer(Rung.STOP, why, exit_code=int(code), repeats=repeats)
        if in_program(fault):
            return _end("no restart cures an error in the program itself", repeats, ExitCode.DO_NOT_REQUEUE)
        bad = self._without_bad_node(fault, means, now)
        if bad is not None:
            return bad
        course, first = course_of(fault), max(made, default=-1) + 1
        passed: dict[Move, str] = {}
        spent: list[str] = []
        for place, move in enumerate(course[first:], first):
            obstacle = _impossible(move, fault, means, repeats)
            if not obstacle:
                obstacle = self._spent_up(move.rung, now)
                spent += [obstacle] if obstacle and obstacle not in spent else []
            if not obstacle:
                self._note(evidence_of(fault), (*made, place))
                return self._take(move, fault, repeats, passed, now)
            if means.in_question(move.rung):
                passed[move] = obstacle
        if spent:
            struck = [*self._struck, Struck.by(fault)]
            code = ExitCode.DO_NOT_REQUEUE if at_one_step(struck) else ExitCode.FAILED
            return _end("; ".join([*spent, without_progress(struck, self._newest)]), repeats, code)
        moves = [course[place] for place in made if place < len(course)]
        end = _end(came_back(fault, moves, repeats), repeats, ExitCode.DO_NOT_REQUEUE, _others(passed))
        return replace(end, acquits=acquits(fault, moves))

    def _without_bad_node(self, fault: Fault, means: Means, now: float) -> Answer | None:
        """Return the answer to a fault of a node that keeps failing; None: it is none, or has to stay."""
        if means.spare is None:
            return None
        self._strikes.count(fault, now)
        why = self._strikes.against(fault.node)
        move = self._without(means, now) if why else None
        if move is None:
            return None
        answer = self._take(move, fault, 0, {}, now)
        return replace(answer, reason=f"{answer.reason}; {why}", exclude=fault.node)

    def _without_unfit_node(self, fault: Fault, means: Means, repeats: int, now: float) -> Answer | None:
        """Return the answer to a node that a rank found unfit, or suspects; None: it has to stay."""
        move = self._without(means, now) if fault.exit_code == ExitCode.NODE_UNFIT else None
        if move is None:
            return None
        answer = self._take(move, fault, repeats, {}, now)
        return replace(answer, reason=f"{answer.reason}; rank {fault.rank} gave its node up")

    def _without(self, means: Means, now: float) -> Move | None:
        """Return the move that leaves a node out; None: the job cannot do without it."""
        move = Move(Rung.REPLACE_NODE if means.spare else Rung.SHRINK)
        possible = (means.spare or means.fewer) and not self._spent_up(move.rung, now)
        return move if possible else None

    def _spent_up(self, rung: Rung, now: float) -> str:
        """Return which budget of a rung is spent; empty: none."""
        fast, slow, spent = self._config.max_restarts, self._config.max_restarts_per_day, self._spent[rung]
        spent.times = [min(at, now) for at in spent.times if now - at < DAY]
        if spent.fast >= fast:
            return f"{fast} {_NAMES[rung][1]} without progress are spent (--max-restarts)"
        if len(spent.times) >= slow:
            return f"{slow} {_NAMES[rung][1]} in 24 h are spent (--ft-max-restarts-per-day)"
        return ""

    def _note(self, key: str, made: tuple[int, ...]) -> None:
        self._met.pop(key, None)
        self._met[key] = made
        for old in list(self._met)[:-_KEYS_KEPT]:
            del self._met[old]

    def _take(self, move: Move, fault: Fault, repeats: int, passed: Mapping[Move, str], now: float) -> Answer:
        self._struck = [*self._struck, Struck.by(fault)][-_STRUCK_KEPT:]
        spent = self._spent[move.rung]
        spent.fast += 1
        spent.times.append(now)
        fast, slow = self._config.max_restarts, self._config.max_restarts_per_day
        budgets = f"{spent.fast} of {fast} without progress, {len(spent.times)} of {slow} today"
        reason = f"{_NAMES[move.rung][0]} {budgets}"
        if repeats:
            reason += f"; the same fault came {'before' if fault.step >= 0 else 'earlier,'} {where(fault)}"
        if move.state is StateSource.OLDER:
            reason += ", so an older checkpoint is loaded"
        gone = fault.kind is not FaultKind.LOST and move.rung in (Rung.REPLACE_NODE, Rung.SHRINK)
        exclude = fault.node if gone else ""
        return Answer(move.rung, reason, move.state, 0, repeats, _others(passed), exclude=exclude)

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher."""
        return {
            "spent": {
                rung.value: {"fast": one.fast, "times": list(one.times)} for rung, one in self._spent.items()
            },
            "met": {key: list(places) for key, places in self._met.items()},
            "struck": [[one.step, one.what, one.speaks] for one in self._struck],
            "strikes": self._strikes.state(),
            "newest": self._newest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier launcher of this run left; nothing is taken over when it raises.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours.
        """
        newest = whole(state["newest"], at_least=-1)
        met = {str(key): _places(found) for key, found in dict(state["met"]).items()}
        if "spent" in state:
            kept = dict(state["spent"])
        else:  # before there was more than one rung
            alone = {"fast": state["without_progress"], "times": state["restarts"]}
            kept = {Rung.RESTART_IN_JOB.value: alone}
        spent = {rung: _Spent() for rung in BUDGETED}
        for name, one in kept.items():
            if Rung(name) not in spent:
                raise ValueError(f"{name!r} has no budget")
            spent[Rung(name)] = _Spent(whole(one["fast"], at_least=0), [_moment(at) for at in one["times"]])
        struck = [
            Struck(whole(step, at_least=-1), str(what), bool(speaks))
            for step, what, speaks in state.get("struck", [])
        ]
        self._strikes = Strikes.of(state.get("strikes", []))
        self._spent, self._met, self._newest, self._struck = spent, met, newest, struck


def _impossible(move: Move, fault: Fault, means: Means, repeats: int) -> str:
    """Return why a move cannot be made, whatever its budget; empty: it can."""
    lost = fault.kind is FaultKind.LOST
    node = move.rung in (Rung.REPLACE_NODE, Rung.SHRINK)
    obstacles = (
        (move.chance and repeats >= 2, "it was met with that before"),
        (move.state is StateSource.OLDER and not means.older_exists, "none is left"),
        (
            move.rung is Rung.RESTART_IN_PROCESS and not means.ranks_can_reenter,
            "living ranks cannot be entered again",
        ),
        (node and not lost and not repeats, "nothing speaks against the node"),
        (move.rung is Rung.REPLACE_NODE and not means.spare, "no node waits to take its place"),
        (move.rung is Rung.SHRINK and means.spare, "a node waits to take its place"),
        (move.rung is Rung.SHRINK and not means.fewer, "the job needs all of its nodes"),
        (move.rung is Rung.RESTART_IN_JOB and lost and (means.spare or means.fewer), "the node is lost"),
    )
    return next((why for holds, why in obstacles if holds), "")


def _places(found: object) -> tuple[int, ...]:
    """Return which moves were made against a fault."""
    if isinstance(found, (list, tuple)):
        return tuple(whole(place, at_least=0) for place in found)
    times = whole(
        found, at_least=0
    )  # from before there was a restart in the process: so many moves were made
    return tuple(range(1, min(times, _MOST_MOVES) + 1))


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


def _others(passed: Mapping[Move, str]) -> tuple[str, ...]:
    """Return the moves that were passed over, each with the reason; a chance that was not given is none."""
    return tuple(
        f"{'an older checkpoint' if move.state is StateSource.OLDER else move.rung.value}: {why}"
        for move, why in passed.items()
        if not move.chance
    )


def _end(reason: str, repeats: int, code: ExitCode = ExitCode.FAILED, passed: tuple[str, ...] = ()) -> Answer:
    return Answer(Rung.STOP, reason, exit_code=int(code), repeats=repeats, passed=passed)
