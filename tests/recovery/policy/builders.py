"""Faults, means, deciders and short names for their answers, for all tests of the recovery policy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.escalation import Answer, Capabilities, Escalation
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction, StateSource
from outlast.recovery.policy.job import CommitSeen, JobDecider, LoadSeen, SpareCapacity, WorkerFinished

NONE, STOP = RecoveryAction.NONE, RecoveryAction.STOP
IN_PROCESS, IN_JOB = RecoveryAction.RESTART_IN_PROCESS, RecoveryAction.RESTART_IN_JOB
REPLACE, SHRINK = RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK
NEWEST, OLDER = StateSource.NEWEST, StateSource.OLDER

BARE, OLD = Capabilities(), Capabilities(older_exists=True)
SPARE, FEWER = Capabilities(spare=True), Capabilities(spare=False, fewer=True)
ALL = Capabilities(older_exists=True, ranks_can_reenter=True, spare=True, fewer=True)
ROOM, NO_SPARE = SpareCapacity(spare=True, fewer=True), SpareCapacity(spare=False, fewer=True)


def budgets(fast: int = 1000, slow: int = 1000) -> FaultToleranceOptions:
    return FaultToleranceOptions(max_restarts=fast, max_restarts_per_day=slow)


def fault(kind: str = "error", text: str = "E: x", step: int = 7, **more: Any) -> Fault:
    return replace(Fault(FaultKind(kind), "n0", 1, 1, step, f"rank 1: {text}", text), **more)


def killed(step: int, node: str = "n1", **more: Any) -> Fault:
    return fault("crash", "signal 9", step, node=node, **more)


def after_load(step: int, means: Capabilities = OLD) -> Capabilities:
    """Return what can be done in a generation that had loaded the checkpoint of a step."""
    return replace(means, loaded=(f"local/{name(step)}",))


def short(one: Answer | Action) -> str:
    """Return an answer in a word or two: "shrink", "older" for a restart from an older state, "stop 93"."""
    if one.kind is STOP:
        return f"stop {one.exit_code}"
    return "older" if (one.kind, one.state) == (IN_JOB, OLDER) else one.kind.value.removeprefix("restart-")


def course(
    means: Capabilities, *faults: Fault, fast: int = 1000, slow: int = 1000, at: float = 0.0
) -> list[str]:
    """Return the answers to faults that follow each other."""
    escalation = Escalation(budgets(fast, slow))
    return [short(escalation.answer(one, means, at)) for one in faults]


def until_the_end(means: Capabilities, one: Fault, escalation: Escalation | None = None) -> list[Answer]:
    """Return the answers to a fault that comes again and again, from an older load where one was ordered."""
    escalation, loaded, found = escalation or Escalation(budgets()), 6, list[Answer]()
    while not found or found[-1].kind is not STOP:
        found.append(escalation.answer(one, after_load(loaded, means), 0.0))
        loaded -= found[-1].state is OLDER
    return found


def skipped(one: Answer) -> list[str]:
    """Return the kinds of the moves that an answer skipped; "older": that with an older checkpoint."""
    kinds = [kind.value for kind in RecoveryAction]
    return [next(filter(text.startswith, kinds), "older") for text in one.passed]


# The job


def job(fast: int = 1000, slow: int = 1000, ranks: int = 2) -> JobDecider:
    return JobDecider(budgets(fast, slow), ranks)


def only(actions: Iterable[Action]) -> Action:
    (action,) = actions
    return action


def hit(
    decider: JobDecider,
    one: Fault | int = 25,
    kind: str = "error",
    room: SpareCapacity | None = None,
    at: float = 0.0,
    **more: Any,
) -> Action:
    """Return the answer to a fault, or to one at a step, in the current generation."""
    happened = fault(kind, step=one) if isinstance(one, int) else one
    return only(decider.handle(replace(happened, generation=decider.generation, **more), at, room))


def name(step: int, generation: int = 1) -> str:
    return f"step-{step:09d}.g{generation}"


def committed(decider: JobDecider, *steps: int, generation: int = 1) -> JobDecider:
    for step in steps:
        assert decider.handle(CommitSeen(step, name(step, generation)), 0.0) == ()
    return decider


def loads(decider: JobDecider, step: int) -> JobDecider:
    assert decider.handle(LoadSeen(step, name(step)), 0.0) == ()
    return decider


def resumed(*steps: int) -> JobDecider:
    """Return the decider of a launch that found copies of an earlier one, and loaded the newest."""
    decider = committed(job(), *steps)
    decider.begin_after(1)
    return loads(decider, steps[-1])


def finished(decider: JobDecider) -> JobDecider:
    for rank in range(decider.world_size):
        decider.handle(WorkerFinished(rank, decider.generation), 0.0)
    return decider


def heir(decider: JobDecider, fast: int = 1000, **changes: object) -> JobDecider:
    """Return the decider of the next launch, which has read what this one left."""
    found = job(fast)
    found.restore({**json.loads(json.dumps(decider.state())), **changes})
    return found


def suspicious() -> JobDecider:
    """Return a decider to which the copies of steps 20 and 24 are suspects."""
    decider = committed(job(), 10, 20)
    hit(decider)
    committed(loads(decider, 20), 24, generation=2)
    hit(decider)
    return decider


def numbers(text: str) -> list[int]:
    """Return the numbers that a reason names, in their order."""
    return [int(one) for one in re.findall(r"-?\b\d+\b", text)]
