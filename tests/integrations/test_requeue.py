"""When a job asks for another allocation: texts and numbers in, a decision with its reason out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ExitCode
from outlast.integrations.requeue import PERMANENT, Ending, Ledger, Limits, NodeEnd, Outcome, begin, decide

LIMITS = Limits(no_progress=2, requeues=5)


def ending(code: int | None, *signals: int, step: int = 10, srun: int = 0, state: str = "RUNNING") -> Ending:
    return Ending(srun or (code or 0), (NodeEnd("node1", code, signals),), 1, step, state)


def nodes(*codes: int | None, srun: int = 1) -> Ending:
    return Ending(srun, tuple(NodeEnd(f"node{at}", code, ()) for at, code in enumerate(codes)), 3, 10)


@pytest.mark.parametrize(
    ("found", "outcome", "code"),
    [
        (ending(0), Outcome.FINISH, 0),
        (ending(0, 15), Outcome.REQUEUE, 0),
        (ending(143, 15), Outcome.REQUEUE, 0),
        (ending(1), Outcome.REQUEUE, 0),
        (ending(75), Outcome.REQUEUE, 0),
        (ending(None, srun=137), Outcome.REQUEUE, 0),
        (ending(93), Outcome.GIVE_UP, 93),
        (ending(93, 15), Outcome.GIVE_UP, 93),
        (ending(2), Outcome.GIVE_UP, 2),
        (ending(65), Outcome.GIVE_UP, 65),
        (ending(143, 15, state="COMPLETING"), Outcome.LEAVE, 143),
        (replace(ending(143, 15, state="COMPLETING"), overrun=True), Outcome.REQUEUE, 0),  # by the save
        (ending(143, 15, state="CANCELLED by 0"), Outcome.GIVE_UP, 143),
        (ending(0, state="COMPLETING"), Outcome.FINISH, 0),
        (ending(143, 15, state=""), Outcome.REQUEUE, 0),
        (nodes(1, 93, None), Outcome.GIVE_UP, 93),
        *((nodes(0, other), Outcome.FINISH, 0) for other in (None, 1, 93, 137)),
        *((nodes(srun=code), Outcome.REQUEUE, 0) for code in (0, 1)),  # agents that noted nothing
    ],
)
def test_each_ending_has_one_answer(found: Ending, outcome: Outcome, code: int) -> None:
    _, decision = decide(Ledger("7"), found, LIMITS)
    assert (decision.outcome, decision.exit_code) == (outcome, code)
    assert decision.reason


def test_requeues_without_progress_end_with_93() -> None:
    ledger, first = decide(Ledger("7", best_step=10), ending(143, 15, step=10), LIMITS)
    _, second = decide(ledger, ending(143, 15, step=10), LIMITS)
    assert (first.outcome, second.outcome) == (Outcome.REQUEUE, Outcome.GIVE_UP)
    assert second.exit_code == ExitCode.DO_NOT_REQUEUE


def test_progress_refills_the_budget() -> None:
    ledger = Ledger("7", best_step=10, no_progress=1)
    after, decision = decide(ledger, ending(143, 15, step=11), LIMITS)
    assert (decision.outcome, after.no_progress, after.best_step) == (Outcome.REQUEUE, 0, 11)


def test_requeues_with_progress_end_too() -> None:
    ledger = Ledger("7")
    for step in range(LIMITS.requeues):
        ledger, decision = decide(ledger, ending(143, 15, step=step), LIMITS)
        assert decision.outcome is Outcome.REQUEUE
    _, decision = decide(ledger, ending(143, 15, step=99), LIMITS)
    assert (decision.outcome, decision.exit_code) == (Outcome.GIVE_UP, 93)


def test_allocations_that_were_cut_off_are_counted_at_the_next_start() -> None:
    ledger, refused = begin(Ledger("7"), 3, LIMITS)
    assert refused is None
    ledger, refused = begin(ledger, 3, LIMITS)
    assert (refused, ledger.no_progress) == (None, 1)
    ledger, refused = begin(ledger, 3, LIMITS)
    assert refused is not None
    assert (refused.outcome, refused.exit_code) == (Outcome.GIVE_UP, 93)
    assert not ledger.open


def test_the_ledger_survives_its_file_and_another_job_starts_anew() -> None:
    ledger, _ = decide(Ledger("7", best_step=4), ending(143, 15), LIMITS)
    found = json.loads(json.dumps(ledger.to_json()))
    assert Ledger.from_json(found, "7") == ledger
    assert Ledger.from_json(found, "8") == Ledger("8")
    assert Ledger.from_json(None, "7") == Ledger("7")


@pytest.mark.parametrize("damage", [{"format": 9}, {"best_step": "x"}, {"history": 3}])
def test_a_damaged_ledger_is_no_full_budget(damage: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Ledger.from_json({**Ledger("7").to_json(), **damage}, "7")


ENDINGS = st.builds(
    ending,
    st.one_of(st.none(), st.integers(0, 255)),
    st.sampled_from([10, 12, 15]),
    step=st.integers(-1, 6),
    state=st.sampled_from(["RUNNING", "", "COMPLETING", "CANCELLED"]),
)


@given(st.lists(st.tuples(ENDINGS, st.booleans()), min_size=1, max_size=60))
def test_every_sequence_of_endings_is_bounded(sequence: list[tuple[Ending, bool]]) -> None:
    ledger = Ledger("7")
    allocations = 0
    for found, cut_off in sequence:
        ledger, refused = begin(ledger, ledger.best_step, LIMITS)
        if refused is not None:
            return
        allocations += 1
        if cut_off:
            continue
        ledger, decision = decide(ledger, found, LIMITS)
        assert not (found.nodes[0].exit_code in PERMANENT and decision.outcome is Outcome.REQUEUE)
        if decision.outcome in (Outcome.FINISH, Outcome.GIVE_UP, Outcome.LEAVE):
            return
        assert ledger.requeues <= LIMITS.requeues
    assert allocations <= LIMITS.requeues + 1
