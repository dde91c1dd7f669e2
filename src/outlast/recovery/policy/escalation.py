"""Which rung answers a fault, and why every recovery ends.

The moves that may cure a fault, and their order, are in :mod:`outlast.recovery.policy.actions`; which faults
there were and what was tried, in :mod:`outlast.recovery.policy.fault_history`. Here are the budgets and the
choice. Two budgets bound each rung: ``max_restarts`` without progress in between (a commit of a newer step
than ever refills them) and ``max_restarts_per_day``, which progress does not refill. Beside them stands the
evidence
rule: the same fault (kind and cause) at the same step is answered with a later move of its course, until that
is used up.

A script may have no session and announce no step. Then nothing is known of its progress, and no two faults
are known to be at the same step: only the budgets bound its restarts, as under torchrun. A generation that
trained for ``LONG_TRAINING`` refills ``max_restarts``.

Why every recovery ends: an answer is the end or a move; each move takes one from the daily budget of its
rung, and nothing but time gives it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outlast.errors import ExitCode
from outlast.fields import moment, whole
from outlast.recovery.policy.actions import (
    Move,
    course_of,
    evidence_of,
    in_program,
    speaks_against_state,
    where,
)
from outlast.recovery.policy.events import FaultKind, RecoveryAction, StateSource
from outlast.recovery.policy.fault_history import (
    DAY,
    FaultHistory,
    Met,
    against,
    at_one_step,
    came_back,
    clear_suspicion,
    common_cause,
    is_own,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.config import FaultTolerance
    from outlast.recovery.policy.events import Fault

BUDGETED = (
    RecoveryAction.RESTART_IN_PROCESS,
    RecoveryAction.RESTART_IN_JOB,
    RecoveryAction.REPLACE_NODE,
    RecoveryAction.SHRINK,
)
_NAMES = {  # one move, and several
    RecoveryAction.RESTART_IN_PROCESS: ("restart in process", "restarts in process"),
    RecoveryAction.RESTART_IN_JOB: ("restart", "restarts"),
    RecoveryAction.REPLACE_NODE: ("replacement", "replacements"),
    RecoveryAction.SHRINK: ("shrinking", "shrinkings"),
}
LONG_TRAINING = 600.0  # seconds
_LONG = f"{LONG_TRAINING / 60:.0f} min"


@dataclass(frozen=True)
class Capabilities:
    """What could be done at the time of a fault.

    Args:
        older_exists: a checkpoint was loaded, and there is one older than it that is no suspect.
        ranks_can_reenter: as a fault's ``reenters``.
        spare: a node that waits could take the place of the fault's; None: the job has one node.
        fewer: the job could go on without the fault's node.
        loaded: the copies that the fault's generation had loaded.
    """

    older_exists: bool = False
    ranks_can_reenter: bool | None = None
    spare: bool | None = None
    fewer: bool = False
    loaded: tuple[str, ...] = ()

    def in_question(self, rung: RecoveryAction) -> bool:
        """Say whether a rung is worth a word when it is passed over."""
        if rung is RecoveryAction.RESTART_IN_PROCESS:
            return self.ranks_can_reenter is not None
        return rung not in (RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK) or self.spare is not None


@dataclass(frozen=True)
class Answer:
    """A rung with its reason.

    Args:
        reason: why this rung.
        passed: moves before it in the course of the fault, each with the reason why it was not made.
        repeats: how often this very fault was met before.
        acquits: it came from every state that was tried, so it clears them of suspicion.
        exclude: the node that is used no more from now on; empty: none.
        speaks: the fault speaks against the state that was loaded.
        hung_again: a hang came back, so the timeout that found it may be too short.
        place: of the move in the course of the fault; -1: it is none of the course.
    """

    rung: RecoveryAction
    reason: str
    state: StateSource = StateSource.NEWEST
    exit_code: int = 0
    repeats: int = 0
    passed: tuple[str, ...] = ()
    clear_suspicion: bool = False
    exclude: str = ""
    speaks: bool = False
    hung_again: bool = False
    place: int = -1


@dataclass(frozen=True)
class _Case:
    """A fault that is to be answered.

    Args:
        before: the times that it came before.
        first: the place in its course from which on moves are tried.
        again: it was answered once, and is answered anew since that came to nothing.
    """

    fault: Fault
    means: Capabilities
    now: float
    before: tuple[Met, ...]
    first: int
    again: bool = False
    refilled: bool = False

    @property
    def repeats(self) -> int:
        return len(self.before)


@dataclass
class _Spent:
    """What was spent of a rung: moves since the last progress, and the times of those of a day."""

    fast: int = 0
    times: list[float] = field(default_factory=list)


class Escalation:
    """Keeps the budgets of one job, and chooses the answer to each fault.

    Args:
        config: ``max_restarts`` and ``max_restarts_per_day``.
    """

    def __init__(self, config: FaultTolerance) -> None:
        self._config = config
        self._spent = {rung: _Spent() for rung in BUDGETED}
        self._history = FaultHistory()
        self._newest = -1

    def committed(self, step: int) -> bool:
        """Refill the fast budgets if no newer step was ever committed; say whether it was."""
        if step <= self._newest:
            return False
        self._newest = step
        self._refill()
        return True

    def _refill(self) -> None:
        for spent in self._spent.values():
            spent.fast = 0
        self._history.progressed()

    def answer(self, fault: Fault, means: Capabilities, now: float) -> Answer:
        """Return the rung for a fault.

        Args:
            fault: with the step at which it happened.
            means: what could be done.
            now: seconds on a clock that goes on between launchers of one run.
        """
        refilled = fault.counted and fault.trained >= LONG_TRAINING and bool(self._history.recent)
        if refilled:
            self._refill()
        self._history.settle(now)
        before = self._history.before(fault)
        first = max((one.place for one in before), default=-1) + 1
        hung_again = fault.kind is FaultKind.HANG and (bool(before) or self._is_recent(fault))
        answer = self._chosen(_Case(fault, means, now, before, first, refilled=refilled))
        speaks = speaks_against_state(fault, first, len(before))
        return replace(answer, speaks=speaks, hung_again=hung_again)

    def answer_again(self, fault: Fault, answer: Answer, means: Capabilities, now: float) -> Answer:
        """Return another rung for the latest fault, whose answer came to nothing; it counts once.

        Args:
            fault: the same as before.
            answer: what was answered.
            means: what could be done now.
            now: as in :meth:`answer`.
        """
        if answer.rung is not RecoveryAction.RESTART_IN_PROCESS:
            return answer  # what was ordered is done all the same, with new processes
        before = self._history.before(fault)[:-1]
        found = self._escalated(_Case(fault, means, now, before, answer.place + 1, again=True))
        return replace(found, hung_again=answer.hung_again)

    def _is_recent(self, fault: Fault) -> bool:
        evidence = evidence_of(fault)
        return fault.counted and any(one.evidence == evidence for one in self._history.recent)

    def _chosen(self, case: _Case) -> Answer:
        fault = case.fault
        if fault.kind is FaultKind.REFUSED:
            without = self._without_unfit_node(case)
            if without is not None:
                return without
            code = fault.exit_code if fault.exit_code is not None and fault.exit_code > 0 else ExitCode.FAILED
            later = "nothing was lost; the same command goes on once what is silent answers again"
            why = later if code == ExitCode.PREEMPTED else "no restart changes what was refused"
            return Answer(RecoveryAction.STOP, why, exit_code=int(code), repeats=case.repeats)
        if in_program(fault):
            why = "no restart cures an error in the program itself"
            return _end(why, case.repeats, ExitCode.DO_NOT_REQUEUE)
        return self._without_bad_node(case) or self._escalated(case)

    def _escalated(self, case: _Case) -> Answer:
        """Return the first move of a fault's course that can be made, or the end."""
        fault, means = case.fault, case.means
        passed: dict[Move, str] = {}
        spent: list[str] = []
        for place, move in enumerate(course_of(fault)[case.first :], case.first):
            obstacle = _impossible(move, fault, means, case.repeats)
            if not obstacle:
                obstacle = self._spent_up(move.rung, fault, case.now)
                spent += [obstacle] if obstacle and obstacle not in spent else []
            if not obstacle:
                return self._take(move, place, case, passed)
            if means.in_question(move.rung):
                passed[move] = obstacle
        if spent:
            latest = () if case.again else (Met.of(fault, case.now),)
            recent = (*self._history.recent, *latest)
            code = ExitCode.DO_NOT_REQUEUE if at_one_step(recent) else ExitCode.FAILED
            return _end("; ".join([*spent, common_cause(recent, self._newest)]), case.repeats, code)
        if case.again:
            return _end("no other restart is possible", case.repeats, passed=_others(passed))
        reason = came_back(fault, case.before, means.loaded)
        end = _end(reason, case.repeats, ExitCode.DO_NOT_REQUEUE, _others(passed))
        return replace(end, clear_suspicion=clear_suspicion(fault, case.before, means.loaded))

    def _without_bad_node(self, case: _Case) -> Answer | None:
        """Return the answer to a fault of a node that keeps failing; None: it is none, or has to stay."""
        fault, now = case.fault, case.now
        if case.means.spare is None:
            return None
        why = against(fault.node, (*self._history.all, Met.of(fault, now, is_own(fault))), now)
        move = self._without(case) if why else None
        if move is None:
            return None
        answer = self._take(move, -1, replace(case, before=()), {})
        return replace(answer, reason=f"{answer.reason}; {why}", exclude=fault.node)

    def _without_unfit_node(self, case: _Case) -> Answer | None:
        """Return the answer to a node that a rank found unfit, or suspects; None: it has to stay."""
        move = self._without(case) if case.fault.exit_code == ExitCode.NODE_UNFIT else None
        if move is None:
            return None
        answer = self._take(move, -1, case, {})
        return replace(
            answer, reason=f"{answer.reason}; rank {case.fault.rank} reported its node as unhealthy"
        )

    def _without(self, case: _Case) -> Move | None:
        """Return the move that leaves a node out; None: the job cannot do without it."""
        move = Move(RecoveryAction.REPLACE_NODE if case.means.spare else RecoveryAction.SHRINK)
        possible = case.means.spare or case.means.fewer
        return move if possible and not self._spent_up(move.rung, case.fault, case.now) else None

    def _spent_up(self, rung: RecoveryAction, fault: Fault, now: float) -> str:
        """Return which budget of a rung is spent; empty: none."""
        fast, slow, spent = self._config.max_restarts, self._config.restarts_per_day, self._spent[rung]
        spent.times = [min(at, now) for at in spent.times if now - at < DAY]
        if spent.fast >= fast:
            if fault.counted:
                return f"{fast} {_NAMES[rung][1]} are spent (--max-restarts), none after {_LONG} of training"
            return f"{fast} {_NAMES[rung][1]} without progress are spent (--max-restarts)"
        if len(spent.times) >= slow:
            return f"{slow} {_NAMES[rung][1]} in 24 h are spent (--ft-max-restarts-per-day)"
        return ""

    def _take(self, move: Move, place: int, case: _Case, passed: Mapping[Move, str]) -> Answer:
        fault = case.fault
        if case.again:
            self._history.amend(place)
        else:
            own = case.means.spare is not None and is_own(fault)
            self._history.add(replace(Met.of(fault, case.now, own, case.means.loaded), place=place))
        spent = self._spent[move.rung]
        spent.fast += 1
        spent.times.append(case.now)
        reason = self._account(move.rung, case)
        if case.repeats:
            reason += f"; the same fault came {'before' if fault.step >= 0 else 'earlier,'} {where(fault)}"
        if move.state is StateSource.OLDER:
            reason += ", so an older checkpoint is loaded"
        gone = fault.kind is not FaultKind.LOST and move.rung in (
            RecoveryAction.REPLACE_NODE,
            RecoveryAction.SHRINK,
        )
        exclude = fault.node if gone else ""
        others = _others(passed)
        return Answer(move.rung, reason, move.state, 0, case.repeats, others, exclude=exclude, place=place)

    def _account(self, rung: RecoveryAction, case: _Case) -> str:
        """Say which of how many moves this one is."""
        fast, slow, spent = self._config.max_restarts, self._config.restarts_per_day, self._spent[rung]
        name, today = _NAMES[rung][0], f"{len(spent.times)} of {slow} today"
        if not case.fault.counted:
            return f"{name} {spent.fast} of {fast} without progress, {today}"
        if case.refilled:
            why = f"counted anew, because training went on for {case.fault.trained / 60:.0f} min"
        else:
            why = f"progress is not announced, so {_LONG} of training begin this count anew"
        return f"{name} {spent.fast} of {fast}, {today} ({why})"

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher."""
        return {
            "spent": {
                rung.value: {"fast": one.fast, "times": list(one.times)} for rung, one in self._spent.items()
            },
            "history": self._history.state(),
            "newest": self._newest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier launcher of this run left; nothing is taken over when it raises.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours.
        """
        newest, history = whole(state["newest"], at_least=-1), FaultHistory.of(state["history"])
        spent = {rung: _Spent() for rung in BUDGETED}
        for name, one in dict(state["spent"]).items():
            if RecoveryAction(name) not in spent:
                raise ValueError(f"{name!r} has no budget")
            spent[RecoveryAction(name)] = _Spent(
                whole(one["fast"], at_least=0), [moment(at) for at in one["times"]]
            )
        self._spent, self._history, self._newest = spent, history, newest


def _impossible(move: Move, fault: Fault, means: Capabilities, repeats: int) -> str:
    """Return why a move cannot be made, whatever its budget; empty: it can."""
    lost = fault.kind is FaultKind.LOST
    node = move.rung in (RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK)
    obstacles = (
        (move.chance and repeats >= 2, "it was met with that before"),
        (move.state is StateSource.OLDER and not means.older_exists, "none is left"),
        (
            move.rung is RecoveryAction.RESTART_IN_PROCESS and not means.ranks_can_reenter,
            "living ranks cannot be entered again",
        ),
        (node and not lost and not repeats, "no evidence of a node fault"),
        (move.rung is RecoveryAction.REPLACE_NODE and not means.spare, "no node waits to take its place"),
        (move.rung is RecoveryAction.SHRINK and means.spare, "a node waits to take its place"),
        (move.rung is RecoveryAction.SHRINK and not means.fewer, "the job needs all of its nodes"),
        (
            move.rung is RecoveryAction.RESTART_IN_JOB and lost and (means.spare or means.fewer),
            "the node is lost",
        ),
    )
    return next((why for holds, why in obstacles if holds), "")


def _others(passed: Mapping[Move, str]) -> tuple[str, ...]:
    """Return the moves that were passed over, each with the reason; a chance that was not given is none."""
    return tuple(
        f"{'an older checkpoint' if move.state is StateSource.OLDER else move.rung.value}: {why}"
        for move, why in passed.items()
        if not move.chance
    )


def _end(reason: str, repeats: int, code: ExitCode = ExitCode.FAILED, passed: tuple[str, ...] = ()) -> Answer:
    return Answer(RecoveryAction.STOP, reason, exit_code=int(code), repeats=repeats, passed=passed)
