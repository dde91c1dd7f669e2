"""The choice of the recovery action for a fault, and its budgets.

The possible moves for each kind of fault, and their order, are in :mod:`outlast.recovery.policy.actions`;
past faults and moves in :mod:`outlast.recovery.policy.fault_history`. Two budgets bound each action:
``max_restarts`` without progress, and ``max_restarts_per_day``. The commit of a newer step than ever refills
the first; so does the end of the job with exit code 0, for the next launch. In addition the same fault (kind
and cause) at the same step is answered with a later move of its policy, until that is used up.

A script without a session that reports no steps makes no known progress, and its faults cannot be compared by
step: only the budgets bound its restarts, as under torchrun. A generation that trained for ``LONG_TRAINING``
refills ``max_restarts``.

A start that completes no step may meet an outage, so the restart after it waits
(:mod:`outlast.recovery.policy.backoff`). Where the same files have completed a step before, the restarts that
wait out one cause count once against ``max_restarts``, as long as the waits grow.

Every recovery ends: each answer is a stop, or a move that takes one from the daily budget of its action,
which only time refills.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outlast.errors import ExitCode
from outlast.fields import moment, whole
from outlast.recovery.policy.actions import (
    ALWAYS_SPEAK,
    Move,
    course_of,
    evidence_of,
    in_program,
    signature_of,
    speaks_against_state,
    waits_out,
    where,
)
from outlast.recovery.policy.backoff import DELAYS, BackOff
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
    latest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.config import FaultToleranceOptions
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
_AFTER_THE_END = (
    "the run was complete, and the same fault came back without a step: the program fails before or after its"
    " loop; if it was to train on, set the newest checkpoint aside (outlast ckpt quarantine)"
)


@dataclass(frozen=True)
class Capabilities:
    """The recovery actions that are possible at the time of a fault.

    Args:
        older_exists: a checkpoint was loaded, and there is an older one that is not a suspect.
        ranks_can_reenter: as a fault's ``reenters``.
        spare: a spare could replace the fault's node; None: the job has one node.
        fewer: the job could continue without the fault's node.
        loaded: the copies that the fault's generation had loaded.
        complete: the run had finished before, and no step was done since it was started again.
        stepless: the fault's generation has completed no step.
        trained: some generation with the same files of the program has completed a step.
    """

    older_exists: bool = False
    ranks_can_reenter: bool | None = None
    spare: bool | None = None
    fewer: bool = False
    loaded: tuple[str, ...] = ()
    complete: bool = False
    stepless: bool = False
    trained: bool = False

    def spares_state(self, fault: Fault) -> bool:
        """Say whether a fault says nothing about the loaded checkpoint: its run was trained to the end."""
        return self.complete and fault.kind not in ALWAYS_SPEAK

    def in_question(self, kind: RecoveryAction) -> bool:
        """Say whether the reason names an action that is skipped."""
        if kind is RecoveryAction.RESTART_IN_PROCESS:
            return self.ranks_can_reenter is not None
        return kind not in (RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK) or self.spare is not None


@dataclass(frozen=True)
class Answer:
    """A recovery action with its reason.

    Args:
        kind: the action.
        reason: for it.
        state: the checkpoint that is loaded.
        exit_code: for a stop.
        repeats: the number of earlier occurrences of the fault.
        passed: earlier moves of the policy that were skipped, each with the reason.
        clear_suspicion: the fault occurred from several checkpoints, which are not suspects any more.
        exclude: the node that is excluded from the job; empty: none.
        speaks: the fault is evidence against the loaded checkpoint.
        hung_again: a repeated hang, so the timeout that found it may be too short.
        place: index of the move in the policy of the fault; -1: another move.
        wait: seconds before new workers are started.
    """

    kind: RecoveryAction
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
    wait: float = 0.0


@dataclass(frozen=True)
class _Case:
    """A fault that is to be answered.

    Args:
        before: its earlier occurrences.
        first: index of the first move of its policy that is tried.
        again: its first answer failed, and it is answered again.
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

    @property
    def may_pass(self) -> bool:
        """Whether the fault came at a start and may have a cause that ends."""
        return self.means.stepless and not self.means.complete and waits_out(self.fault)


@dataclass
class _Spent:
    """The used budget of an action: moves since the last progress, and the times of those of a day."""

    fast: int = 0
    times: list[float] = field(default_factory=list)


class Escalation:
    """Keeps the budgets of one job, and chooses the answer to each fault.

    Args:
        config: ``max_restarts`` and ``max_restarts_per_day``.

    Attributes:
        back_off: the waits before starts; it holds for one launch.
    """

    def __init__(self, config: FaultToleranceOptions) -> None:
        self._config = config
        self._spent = {kind: _Spent() for kind in BUDGETED}
        self._history = FaultHistory()
        self.back_off = BackOff()
        self._newest = -1

    def committed(self, step: int) -> bool:
        """Refill the budgets without progress if the step is newer than any before; say whether it is."""
        if step <= self._newest:
            return False
        self._newest = step
        self._refill()
        return True

    def done(self) -> None:
        """Refill the budgets without progress for the next launch of the run: the job has ended well."""
        self._refill()

    def _refill(self) -> None:
        for spent in self._spent.values():
            spent.fast = 0
        self._history.progressed()

    def signs(self, node: str, now: float) -> tuple[str, ...]:
        """Return the faults of the last day that a node may be the cause of, in words, the oldest first."""
        return self._history.signs(node, now)

    def shortage(self, now: float) -> str:
        """Return, in a sentence, that earlier launches have left no restart; empty: some are left.

        Args:
            now: as in :meth:`answer`.
        """
        spent, faults = self._spent[RecoveryAction.RESTART_IN_JOB], self._history.recent or self._history.all
        fast, slow = self._config.max_restarts, self._config.restarts_per_day
        today = sum(now - at < DAY for at in spent.times)
        if 0 < fast <= spent.fast:
            used = f"{fast} of {fast} restarts (--max-restarts)"
            newer = "the script reports its first step or checkpoint"
            if self._newest >= 0:
                newer = f"there is a checkpoint after step {self._newest}"
            when = f"before {newer} (where it reports neither, within {_LONG} of training)"
        elif 0 < slow <= today:
            used, when = f"{slow} of {slow} restarts in 24 h (--ft-max-restarts-per-day)", "now"
        else:
            return ""
        why = f" for {latest(faults)}" if faults else ""  # those for lack of memory are dropped
        return (
            f"earlier launches of this run have used {used}{why}, so a fault {when} gets no"
            " restart; to begin anew, give another --run-dir"
        )

    def answer(self, fault: Fault, means: Capabilities, now: float) -> Answer:
        """Return the answer to a fault.

        Args:
            fault: with the step at which it happened.
            means: the possible actions.
            now: seconds on a clock that continues across launchers of one run.
        """
        refilled = fault.counted and fault.trained >= LONG_TRAINING and bool(self._history.recent)
        if refilled:
            self._refill()
            self.back_off.stepped()
        self._history.settle(now)
        before = self._history.before(fault)
        first = max((one.place for one in before), default=-1) + 1
        hung_again = fault.kind is FaultKind.HANG and (bool(before) or self._is_recent(fault))
        case = _Case(fault, means, now, before, first, refilled=refilled)
        answer = self._delayed(self._chosen(case), case)
        speaks = speaks_against_state(fault, first, len(before)) and not means.spares_state(fault)
        return replace(answer, speaks=speaks, hung_again=hung_again)

    def _delayed(self, answer: Answer, case: _Case) -> Answer:
        """Return an answer with the wait before its start, and count its restart."""
        if answer.kind is RecoveryAction.STOP:
            return answer
        signature = signature_of(case.fault)
        starts, wait = self.back_off.tries(signature), self.back_off.delay(signature)
        self.back_off.restarted(signature)
        if not case.may_pass or not wait or answer.kind is RecoveryAction.RESTART_IN_PROCESS:
            return answer
        row = "this start has" if starts == 1 else f"{starts} starts in a row have"
        reason = f"{answer.reason}; the next start waits {wait:.0f} s, because {row} completed no step"
        return replace(answer, wait=wait, reason=reason)

    def answer_again(self, fault: Fault, answer: Answer, means: Capabilities, now: float) -> Answer:
        """Return another answer to the latest fault, whose first answer failed; it counts once.

        Args:
            fault: the same as before.
            answer: the first answer.
            means: the actions that are possible now.
            now: as in :meth:`answer`.
        """
        if answer.kind is not RecoveryAction.RESTART_IN_PROCESS:
            return answer  # the same action, with new processes
        before = self._history.before(fault)[:-1]
        found = self._escalated(_Case(fault, means, now, before, answer.place + 1, again=True))
        return replace(found, hung_again=answer.hung_again)

    def keeps(self, fault: Fault, spare: bool, now: float) -> str:
        """Return why a failing node stays in the job; empty: it can be replaced."""
        if not spare:
            return "no spare node is there"
        return self._spent_up(RecoveryAction.REPLACE_NODE, fault, now)

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
            later = "nothing was lost; rerun the same command when the storage answers again"
            why = later if code == ExitCode.PREEMPTED else "a restart will not help"
            return Answer(RecoveryAction.STOP, why, exit_code=int(code), repeats=case.repeats)
        if fault.kind is FaultKind.FAILING and not self.keeps(fault, bool(case.means.spare), case.now):
            return self._take(Move(RecoveryAction.REPLACE_NODE), -1, case, {})
        if in_program(fault, case.means.trained):
            why = "the error is in the program; a restart will not help"
            return _end(why, case.repeats, ExitCode.DO_NOT_REQUEUE)
        return self._without_bad_node(case) or self._escalated(case)

    def _escalated(self, case: _Case) -> Answer:
        """Return the first possible move of a fault's policy, or a stop."""
        fault, means = case.fault, case.means
        passed: dict[Move, str] = {}
        spent: list[str] = []
        for place, move in enumerate(course_of(fault)[case.first :], case.first):
            obstacle = _impossible(move, fault, means, case.repeats)
            if not obstacle:
                obstacle = self._spent_up(move.kind, fault, case.now, self._is_free(move, case))
                spent += [obstacle] if obstacle and obstacle not in spent else []
            if not obstacle:
                return self._take(move, place, case, passed)
            if means.in_question(move.kind):
                passed[move] = obstacle
        if case.may_pass and case.repeats and not spent:
            again = Move(RecoveryAction.RESTART_IN_JOB)
            obstacle = self._spent_up(again.kind, fault, case.now, self._is_free(again, case))
            if not obstacle:
                return self._take(again, case.first - 1, case, passed)
            spent.append(obstacle)
        if case.may_pass and case.repeats:
            code = ExitCode.FAILED if means.trained else ExitCode.DO_NOT_REQUEUE
            reason = came_back(fault, case.before, means.loaded)
            return _end("; ".join([*spent, reason]), case.repeats, code, _others(passed))
        if spent:
            latest = () if case.again else (Met.of(fault, case.now),)
            recent = (*self._history.recent, *latest)
            code = ExitCode.DO_NOT_REQUEUE if at_one_step(recent) else ExitCode.FAILED
            return _end("; ".join([*spent, common_cause(recent, self._newest)]), case.repeats, code)
        reason = _AFTER_THE_END if means.spares_state(fault) else came_back(fault, case.before, means.loaded)
        no_saves = fault.exit_code == ExitCode.SAVE_FAILED  # a file system refuses, and will not for ever
        code = ExitCode.SAVE_FAILED if no_saves else ExitCode.DO_NOT_REQUEUE
        end = _end(reason, case.repeats, code, _others(passed))
        return replace(end, clear_suspicion=clear_suspicion(fault, case.before, means.loaded))

    def _without_bad_node(self, case: _Case) -> Answer | None:
        """Return the answer that excludes a node that keeps failing; None: it does not, or must stay."""
        fault, now = case.fault, case.now
        why = against(fault.node, (*self._history.all, Met.of(fault, now, is_own(fault))), now)
        move = self._without(case) if why else None
        if move is None:
            return None
        answer = self._take(move, -1, replace(case, before=()), {})
        return replace(answer, reason=f"{answer.reason}; {why}", exclude=fault.node)

    def _without_unfit_node(self, case: _Case) -> Answer | None:
        """Return the answer that excludes a node that a rank found unfit; None: it must stay."""
        move = self._without(case) if case.fault.exit_code == ExitCode.NODE_UNFIT else None
        if move is None:
            return None
        answer = self._take(move, -1, case, {})
        return replace(
            answer, reason=f"{answer.reason}; rank {case.fault.rank} reported its node as unhealthy"
        )

    def _without(self, case: _Case) -> Move | None:
        """Return the move that removes a node; None: the job needs it."""
        move = Move(RecoveryAction.REPLACE_NODE if case.means.spare else RecoveryAction.SHRINK)
        possible = case.means.spare or case.means.fewer
        return move if possible and not self._spent_up(move.kind, case.fault, case.now) else None

    def _is_free(self, move: Move, case: _Case) -> bool:
        """Say whether a move continues to wait out a cause that was counted already."""
        signature = signature_of(case.fault)
        waits = case.may_pass and case.means.trained and move.kind is RecoveryAction.RESTART_IN_JOB
        return waits and self.back_off.has(signature) and self.back_off.tries(signature) < len(DELAYS)

    def _spent_up(self, kind: RecoveryAction, fault: Fault, now: float, free: bool = False) -> str:
        """Return which budget of an action is used up; empty: none.

        Args:
            kind: the action.
            fault: that it would answer.
            now: wall time.
            free: it does not count against ``max_restarts``.
        """
        fast, slow, spent = self._config.max_restarts, self._config.restarts_per_day, self._spent[kind]
        spent.times = [min(at, now) for at in spent.times if now - at < DAY]
        name = _NAMES[kind][1]
        if spent.fast >= fast and not free:
            used = f"{fast} of {fast} {name}"
            if fault.counted:
                return f"{used} used (--max-restarts), each within {_LONG} of training"
            return f"{used} without progress used (--max-restarts)"
        if len(spent.times) >= slow:
            return f"{slow} of {slow} {name} in 24 h used (--ft-max-restarts-per-day)"
        return ""

    def _take(self, move: Move, place: int, case: _Case, passed: Mapping[Move, str]) -> Answer:
        fault = case.fault
        if case.again:
            self._history.amend(place)
        else:
            own = case.means.spare is not None and is_own(fault)
            self._history.add(replace(Met.of(fault, case.now, own, case.means.loaded), place=place))
        spent = self._spent[move.kind]
        free = self._is_free(move, case)
        spent.fast += not free
        spent.times.append(case.now)
        reason = self._account(move.kind, case, free)
        if case.repeats:
            reason += f"; repeated fault {where(fault)}"
        if move.state is StateSource.OLDER:
            reason += "; loading an older checkpoint"
        gone = fault.kind is not FaultKind.LOST and move.kind in (
            RecoveryAction.REPLACE_NODE,
            RecoveryAction.SHRINK,
        )
        exclude = fault.node if gone else ""
        others = _others(passed)
        return Answer(move.kind, reason, move.state, 0, case.repeats, others, exclude=exclude, place=place)

    def _account(self, kind: RecoveryAction, case: _Case, free: bool) -> str:
        """Return the number of this move within its budgets, in words; a free one has none in the first."""
        fast, slow, spent = self._config.max_restarts, self._config.restarts_per_day, self._spent[kind]
        name, today = _NAMES[kind][0], f"{len(spent.times)} of {slow} today"
        if free:
            return (
                f"{name}, not counted: it waits out a cause that was counted, and these files have completed"
                f" a step; {spent.fast} of {fast} {_NAMES[kind][1]} used (--max-restarts), {today}"
            )
        if not case.fault.counted:
            return f"{name} {spent.fast} of {fast} without progress, {today}"
        if case.refilled:
            why = f"counter reset after {case.fault.trained / 60:.0f} min of training"
        else:
            why = f"the script reports no progress: {_LONG} of training reset this counter"
        return f"{name} {spent.fast} of {fast}, {today} ({why})"

    def state(self) -> dict[str, Any]:
        """Return what must outlive the launcher."""
        return {
            "spent": {
                kind.value: {"fast": one.fast, "times": list(one.times)} for kind, one in self._spent.items()
            },
            "history": self._history.state(),
            "newest": self._newest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the state of an earlier launcher; nothing is taken over when it raises.

        Raises:
            KeyError, TypeError, ValueError: the state is invalid.
        """
        newest, history = whole(state["newest"], at_least=-1), FaultHistory.of(state["history"])
        spent = {kind: _Spent() for kind in BUDGETED}
        for name, one in dict(state["spent"]).items():
            if RecoveryAction(name) not in spent:
                raise ValueError(f"{name!r} has no budget")
            spent[RecoveryAction(name)] = _Spent(
                whole(one["fast"], at_least=0), [moment(at) for at in one["times"]]
            )
        self._spent, self._history, self._newest = spent, history, newest


def _impossible(move: Move, fault: Fault, means: Capabilities, repeats: int) -> str:
    """Return why a move is impossible, regardless of its budget; empty: it is possible."""
    lost = fault.kind is FaultKind.LOST
    node = move.kind in (RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK)
    obstacles = (
        (move.chance and repeats >= 2, "already tried"),
        (
            move.state is StateSource.OLDER and means.spares_state(fault),
            "not needed, since the run was complete",
        ),
        (move.state is StateSource.OLDER and not means.older_exists, "there is none"),
        (
            move.kind is RecoveryAction.RESTART_IN_PROCESS and not means.ranks_can_reenter,
            "the living ranks cannot restart in process",
        ),
        (node and not lost and not repeats, "no evidence of a node fault"),
        (move.kind is RecoveryAction.REPLACE_NODE and not means.spare, "no spare node"),
        (move.kind is RecoveryAction.SHRINK and means.spare, "a spare node is available"),
        (move.kind is RecoveryAction.SHRINK and not means.fewer, "the job needs all of its nodes"),
        (
            move.kind is RecoveryAction.RESTART_IN_JOB and lost and (means.spare or means.fewer),
            "the node is lost",
        ),
    )
    return next((why for holds, why in obstacles if holds), "")


def _others(passed: Mapping[Move, str]) -> tuple[str, ...]:
    """Return the skipped moves, each with the reason, without those by ``chance``."""
    return tuple(
        f"{'loading an older checkpoint' if move.state is StateSource.OLDER else move.kind.value}: {why}"
        for move, why in passed.items()
        if not move.chance
    )


def _end(reason: str, repeats: int, code: ExitCode = ExitCode.FAILED, passed: tuple[str, ...] = ()) -> Answer:
    return Answer(RecoveryAction.STOP, reason, exit_code=int(code), repeats=repeats, passed=passed)
