"""Every recovery ends: bounds that hold for any sequence of faults, means and commits."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.recovery.policy.actions import OOM_KILL, out_of_memory
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.fault_history import DAY
from outlast.recovery.policy.job import JobState, SpareCapacity
from tests.recovery.policy.builders import (
    IN_JOB,
    IN_PROCESS,
    NONE,
    REPLACE,
    SHRINK,
    STOP,
    committed,
    hit,
    job,
    loads,
)

MOVES = (IN_PROCESS, IN_JOB, REPLACE, SHRINK)
FAULTS = st.builds(
    Fault,
    st.sampled_from(sorted(set(FaultKind) - {"refused"})),
    st.sampled_from(["n1", "n1", "n1", "n2", "n3"]),
    st.integers(0, 3),
    st.just(0),
    st.sampled_from([-1, 5, 5, 5, 5, 6, 7]),
    st.just("it failed"),
    st.sampled_from(["E: x", "E: x", "signal 9", "signal 11", "torch.OutOfMemoryError: x"]),
    evidence=st.sampled_from([(), (), (), (OOM_KILL,)]),
    reenters=st.sampled_from([None, False, True, True]),
)
ROOMS = st.none() | st.builds(SpareCapacity, st.booleans(), st.booleans())
TURNS = st.tuples(FAULTS, ROOMS, st.sampled_from([0, 0, 0, 1]), st.integers(0, 3), st.floats(0.0, DAY / 8))
Turn = tuple[Fault, SpareCapacity | None, int, int, float]


def test_each_action_has_its_budgets_and_each_course_is_climbed_to_its_end() -> None:
    """Counted by hand from the answers alone."""
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(st.lists(TURNS, min_size=20, max_size=36), st.integers(1, 3), st.integers(2, 6))
    def check(turns: list[Turn], fast: int, slow: int) -> None:
        decider, now, saved = committed(job(fast, slow, ranks=4), 0, 1, 2), 0.0, 3
        taken: list[tuple[float, RecoveryAction]] = []
        without: Counter[RecoveryAction] = Counter()
        climbed: dict[tuple[str, str, int], list[Action]] = {}
        for fault, room, progress, back, pause in turns:
            now += pause
            if progress:
                committed(decider, saved)
                saved, without = saved + 1, Counter()
            loads(decider, max(0, saved - 1 - back))
            ended = decider.state_now is JobState.ENDED
            action = hit(decider, fault, room=room, at=now)
            assert action.reason
            assert not ended or action.kind is NONE
            assert (action.exit_code > 0) == (action.kind is STOP)
            seen[action.kind.value] += 1
            if action.kind in (STOP, NONE):
                continue
            check_possible(action, fault, room)
            taken.append((now, action.kind))
            without[action.kind] += 1
            for kind in MOVES:
                assert sum(at > now - DAY for at, one in taken if one is kind) <= slow
                assert without[kind] <= fast
            check_climbs(climbed.setdefault((fault.kind, fault.signature, fault.step), []), action, fault)
            assert decider.generation == 1 + len(taken)
            seen["older"] += action.state == "older"
        seen["progress"] += len(taken) > fast

    check()
    assert min(seen[one] for one in (*MOVES, STOP, "older", "progress")) >= 3, seen


def check_possible(action: Action, fault: Fault, room: SpareCapacity | None) -> None:
    spare, fewer = room is not None and room.spare, room is not None and room.fewer
    assert fault.reenters or action.kind is not IN_PROCESS
    assert spare or action.kind is not REPLACE
    assert (fewer and not spare) or action.kind is not SHRINK
    assert not action.exclude or (action.exclude == fault.node and action.kind in (REPLACE, SHRINK))


def check_climbs(before: list[Action], action: Action, fault: Fault) -> None:
    """Check that an answer to the same fault at the same step is higher, but for one chance.

    Nodes that are lost or bad, and memory, whose evidence is not of one step, have rules of their own.
    """
    if fault.kind == "lost" or action.exclude or out_of_memory(fault):
        return
    before.append(action)
    kinds = [MOVES.index(one.kind) for one in before]
    assert kinds == sorted(kinds)
    assert sum(one == other for one, other in itertools.pairwise(kinds)) <= 2, "a chance, and an older state"
    assert len(before) <= 4
