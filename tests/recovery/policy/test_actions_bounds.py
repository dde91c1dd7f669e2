"""Every recovery ends: bounds that hold for any sequence of faults, means and commits."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.actions import OOM_KILL, out_of_memory
from outlast.recovery.policy.escalation import Capabilities
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction, StateSource
from outlast.recovery.policy.fault_history import DAY
from outlast.recovery.policy.job import CommitSeen, JobDecider, JobState, LoadSeen, SpareCapacity

MOVES = (
    RecoveryAction.RESTART_IN_PROCESS,
    RecoveryAction.RESTART_IN_JOB,
    RecoveryAction.REPLACE_NODE,
    RecoveryAction.SHRINK,
)
STATES = (StateSource.NEWEST, StateSource.OLDER)

FAULTS = st.builds(
    Fault,
    st.sampled_from(sorted(set(FaultKind) - {FaultKind.REFUSED})),
    st.sampled_from(["n1", "n1", "n1", "n2", "n3"]),
    st.integers(0, 3),
    st.just(0),
    st.sampled_from([-1, 5, 5, 5, 5, 6, 7]),
    st.just("it failed"),
    st.sampled_from(["E: x", "E: x", "signal 9", "signal 11", "torch.OutOfMemoryError: x"]),
    evidence=st.sampled_from([(), (), (), (OOM_KILL,)]),
    reenters=st.sampled_from([None, False, True, True]),
)
ROOMS = st.sampled_from(
    [
        None,
        SpareCapacity(True, True),
        SpareCapacity(True, False),
        SpareCapacity(False, True),
        SpareCapacity(False, False),
    ]
)
TURNS = st.tuples(FAULTS, ROOMS, st.sampled_from([0, 0, 0, 1]), st.floats(0.0, DAY / 8))


def name(step: int) -> str:
    return f"step-{step:09d}.g1"


def test_each_action_is_spent_and_each_course_is_escalated() -> None:
    """Counted by hand from the answers alone."""
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(st.lists(TURNS, min_size=24, max_size=48), st.integers(1, 3), st.integers(2, 6))
    def check(turns: list[tuple[Fault, SpareCapacity | None, int, float]], fast: int, slow: int) -> None:
        job = JobDecider(FaultToleranceOptions(max_restarts=fast, max_restarts_per_day=slow), 4)
        now, saved = 0.0, 3
        for step in range(saved):
            job.handle(CommitSeen(step, name(step)), now)
        taken: list[tuple[float, RecoveryAction]] = []
        without: Counter[RecoveryAction] = Counter()
        escalated: dict[tuple[str, str, int], list[Action]] = {}
        for fault, room, progress, pause in turns:
            now += pause
            if progress:
                job.handle(CommitSeen(saved, name(saved)), now)
                saved, without = saved + 1, Counter()
            job.handle(LoadSeen(saved - 1, name(saved - 1)), now)
            (action,) = job.handle(replace(fault, generation=job.generation), now, room)
            assert action.reason
            if action.kind in (RecoveryAction.STOP, RecoveryAction.NONE):
                seen[action.kind.value] += 1
                continue
            possible(action, fault, room)
            taken.append((now, action.kind))
            without[action.kind] += 1
            for kind in MOVES:
                assert sum(at > now - DAY for at, one in taken if one is kind) <= slow
                assert without[kind] <= fast
            key = (fault.kind, fault.signature, fault.step)
            climbs(escalated.setdefault(key, []), action, fault)
            seen[action.kind.value] += 1
        seen["ended"] += job.state_now is JobState.ENDED

    check()
    assert min(seen[one.value] for one in (*MOVES, RecoveryAction.STOP)) >= 3, seen


def possible(action: Action, fault: Fault, room: SpareCapacity | None) -> None:
    """Check that a move could be made when it was."""
    means = Capabilities(spare=room.spare if room else None, fewer=bool(room and room.fewer))
    if action.kind is RecoveryAction.RESTART_IN_PROCESS:
        assert fault.reenters
    if action.kind is RecoveryAction.REPLACE_NODE:
        assert means.spare
    if action.kind is RecoveryAction.SHRINK:
        assert means.fewer
        assert not means.spare
    if action.exclude:
        assert action.exclude == fault.node
        assert action.kind in (RecoveryAction.REPLACE_NODE, RecoveryAction.SHRINK)


def climbs(before: list[Action], action: Action, fault: Fault) -> None:
    """Check that an answer to the same fault at the same step is higher, but for one chance.

    Nodes that are lost or bad, and memory, whose evidence is not of one step, have rules of their own.
    """
    if fault.kind is FaultKind.LOST or action.exclude or out_of_memory(fault):
        return
    before.append(action)
    kinds = [MOVES.index(one.kind) for one in before]
    assert kinds == sorted(kinds)
    same = sum(one == other for one, other in itertools.pairwise(kinds))
    assert same <= 2, "a chance, and an older state"
    assert len(before) <= 4
