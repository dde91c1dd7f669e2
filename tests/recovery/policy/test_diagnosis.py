"""What the end of a job names as the cause, when it is told from bad luck, and what clears checkpoints."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from outlast.recovery.policy.actions import OOM_KILL
from outlast.recovery.policy.escalation import Answer, Escalation
from outlast.recovery.policy.events import Fault
from outlast.recovery.policy.fault_history import Met, clear_suspicion
from tests.recovery.policy.builders import (
    ALL,
    BARE,
    OLD,
    SPARE,
    after_load,
    budgets,
    fault,
    killed,
    numbers,
    short,
    skipped,
    until_the_end,
)

COMPLETE = replace(OLD, complete=True)

CASES = (
    # fault that comes back, means, its diagnosis, numbers in it, whether checkpoints are cleared
    (fault(), OLD, "data, program or machine", [3, 7], True),
    (fault(step=0), OLD, "data, program or machine", [3, 0], True),
    (fault(), ALL, "data or program", [5, 7], True),
    (fault("non-finite"), OLD, "data, program, machine or checkpoints", [3, 7], False),
    (fault("corrupt"), OLD, "data, program, machine or checkpoints", [3, 7], False),
    (killed(0), BARE, "anything but the checkpoint", [3, 0], False),
    (fault(), SPARE, "anything, on other nodes as well", [3, 7], False),
    (fault(step=-1), OLD, "the start-up", [3], False),
    (killed(-1), BARE, "the start-up", [3], False),
    (fault(text="SaveFailed: no room", step=-1, exit_code=74), BARE, "the storage", [], False),
    (fault("lost"), BARE, "no other node", [3, 7], False),
    (fault(text="MemoryError: "), BARE, "memory of the host", [], False),
    (killed(7, evidence=(OOM_KILL,)), ALL, "memory of the host", [], False),
    (fault(text="RuntimeError: CUDA out of memory"), BARE, "memory of the device", [], False),
    (fault(step=100), COMPLETE, "a complete run", [], False),
)


def test_each_cause_of_an_end_has_a_diagnosis_of_its_own() -> None:
    words: dict[str, set[str]] = {}
    for one, means, diagnosis, named, clears in CASES:
        end = until_the_end(means, one)[-1]
        code = one.exit_code or 93
        assert (end.exit_code, numbers(end.reason), end.clear_suspicion) == (code, named, clears), diagnosis
        words.setdefault(diagnosis, set()).add(re.sub(r"\d+", "#", end.reason))
    assert {diagnosis for diagnosis, found in words.items() if len(found) > 1} == set()
    assert len(set.union(*words.values())) == len(words)


def test_a_fault_after_the_end_of_a_complete_run_says_nothing_about_its_checkpoints() -> None:
    done, escalation = after_load(100, COMPLETE), Escalation(budgets())
    found = [escalation.answer(fault(step=100), done, 0.0) for _ in range(2)]
    assert [short(one) for one in found] == ["in-job", "stop 93"]
    assert skipped(found[1]) == ["older"]
    assert not found[1].speaks
    bad = [escalation.answer(fault("non-finite", step=100), done, 0.0) for _ in range(2)]
    assert [(short(one), one.speaks) for one in bad] == [("in-job", True), ("older", True)]


def places(*copies: str) -> tuple[str, ...]:
    """Return the places of copies such as "local 20": tier and step."""
    return tuple(f"{tier}/step-{int(step):09d}.g1" for tier, step in map(str.split, copies))


@pytest.mark.parametrize(
    ("loaded", "older"),
    [
        ([places("local 20")], False),
        ([places("local 20"), places("local 10")], True),
        ([places("local 20"), places("local 20")], False),
        ([places("local 20"), places("local 24")], False),
        ([places("local 10"), places("local 20"), places("local 10")], True),
        ([places("memory 20"), places("local 20")], False),  # the same bytes
        ([places("local 20"), places("memory 20")], False),
        ([places("local 20"), places("durable 20")], True),
        ([places("durable 20"), places("memory 20", "local 20")], True),
        ([places("local 20", "durable 20"), places("durable 20")], False),
        ([places("durable 20"), places("local 24")], False),
        ([places("local 20"), places("local 24", "local 10")], True),
        ([(), places("local 20"), ()], False),
        ([places("local 20"), (), places("local 10")], True),
        ([places("local 20"), places("local 10"), ()], True),
        ([places("local 0"), ("local/a folder of another name",)], True),
        ([("local/a folder of another name",), places("local 0")], False),
    ],
)
def test_a_fault_that_came_from_an_older_state_or_other_bytes_clears_them(
    loaded: list[tuple[str, ...]], older: bool
) -> None:
    *earlier, last = loaded
    met = [Met.of(fault(), 0.0, loaded=one) for one in earlier]
    assert clear_suspicion(fault(), met, last) is older


# A budget that is spent


def spent(*faults: Fault, newest: int = -1) -> Answer:
    escalation = Escalation(budgets(len(faults) - 1))
    escalation.committed(newest)
    answers = [escalation.answer(one, BARE, 0.0) for one in faults]
    assert [one.kind.value for one in answers] == ["restart-in-job"] * (len(faults) - 1) + ["stop"]
    return answers[-1]


def at(*steps: int) -> list[Fault]:
    """Return faults of several causes at some steps."""
    return [fault(text=f"{letter}Error: x", step=step) for letter, step in zip("ABCD", steps, strict=False)]


@pytest.mark.parametrize(
    ("faults", "newest", "code", "named", "counts"),
    [
        (at(0, 0, 0), -1, 93, "", [3, 0]),
        (at(50, 50, 50), -1, 93, "", [3, 50]),
        (at(50, 50), 40, 1, "AB", [50, 50]),
        (at(50, 51, 50), 40, 1, "ABC", [50, 51, 50]),
        (at(-1, -1, -1), 40, 1, "ABC", []),
        (at(-1, -1), -1, 1, "B", []),  # it never started
        (at(-1, -1), 0, 1, "AB", []),
        (at(0, 0), -1, 1, "AB", [0, 0]),
        (at(1, 2, 3, 4), -1, 1, "BCD", [2, 3, 4]),
    ],
)
def test_an_end_without_budget_names_the_step_or_the_last_faults(
    faults: list[Fault], newest: int, code: int, named: str, counts: list[int]
) -> None:
    end = spent(*faults, newest=newest)
    assert (end.exit_code, "".join(re.findall("([ABCD])Error: x", end.reason))) == (code, named)
    assert numbers(end.reason)[2:] == counts


def test_lost_nodes_at_one_step_are_chance_and_equal_faults_are_named_once() -> None:
    assert spent(*(fault("lost", f"{letter} is lost", step=50) for letter in "ABC")).exit_code == 1
    assert spent(killed(3), killed(3)).reason.count("signal 9") == 1


def test_progress_makes_new_luck_and_a_launcher_remembers() -> None:
    first, heir = Escalation(budgets(1)), Escalation(budgets(1))
    one, two, three = at(7, 7, 7)
    first.answer(one, BARE, 0.0)
    first.committed(3)
    first.answer(two, BARE, 0.0)
    heir.restore(first.state())
    assert re.findall("([ABC])Error: x", heir.answer(three, BARE, 0.0).reason) == ["B", "C"]
