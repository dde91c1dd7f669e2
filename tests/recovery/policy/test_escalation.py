"""The course of each fault: what is tried in which order, within which budgets, and what is kept."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.actions import (
    COURSES,
    OOM_KILL,
    Move,
    course_of,
    out_of_memory,
    speaks_against_state,
)
from outlast.recovery.policy.escalation import Capabilities, Escalation
from outlast.recovery.policy.events import Fault, FaultKind, StateSource
from outlast.recovery.policy.fault_history import DAY
from tests.recovery.policy.builders import (
    ALL,
    BARE,
    IN_JOB,
    IN_PROCESS,
    OLD,
    OLDER,
    REPLACE,
    SHRINK,
    SPARE,
    budgets,
    course,
    fault,
    killed,
    numbers,
    short,
    skipped,
)

KILLED, OWN = fault("crash", "signal 9"), fault("crash", "signal 11")
NO_MEMORY = fault(text="torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB")
NO_MEANS = Capabilities(ranks_can_reenter=False, spare=False)
MINUS_ONE = replace(ALL, spare=False, ranks_can_reenter=False)  # the job may go on with a node less


@pytest.mark.parametrize(
    ("means", "one", "answers"),
    [
        (ALL, fault("error"), "in-process in-job older replace-node stop-93"),
        (ALL, KILLED, "in-process in-job older replace-node stop-93"),
        (ALL, fault("hang"), "in-process in-job older replace-node stop-93"),
        (ALL, fault("corrupt"), "in-job older replace-node stop-93"),
        (ALL, fault("non-finite"), "in-process in-job older replace-node stop-93"),
        (ALL, NO_MEMORY, "in-job stop-93"),  # a restart in process frees none
        (MINUS_ONE, fault("non-finite"), "in-job older shrink stop-93"),
        (MINUS_ONE, KILLED, "in-job in-job older shrink stop-93"),
        (MINUS_ONE, fault("error"), "in-job older stop-93"),
        (OLD, fault("error"), "in-job older stop-93 stop-93"),
        (OLD, fault("corrupt"), "in-job older stop-93 stop-93"),
        (OLD, fault("non-finite"), "in-job older stop-93 stop-93"),
        (OLD, KILLED, "in-job in-job older stop-93 stop-93"),
        (OLD, fault("hang"), "in-job in-job older stop-93 stop-93"),
        *((OLD, fault("crash", f"signal {one}"), "in-job older stop-93") for one in (4, 5, 6, 7, 8, 11, 31)),
        (BARE, fault("error"), "in-job stop-93 stop-93"),
        (BARE, KILLED, "in-job in-job stop-93 stop-93"),
        (BARE, fault("lost"), "in-job in-job stop-93"),
        (BARE, fault(text="SaveFailed: no room", step=-1, exit_code=74), "in-job stop-74"),
        *((means, fault("refused", exit_code=65), "stop-65") for means in (OLD, SPARE, ALL)),
        *((ALL, fault("refused", exit_code=code), "stop-1") for code in (None, 0, -9)),
    ],
)
def test_the_same_fault_at_the_same_step_climbs_its_course(
    means: Capabilities, one: Fault, answers: str
) -> None:
    expected = answers.split()
    assert [found.replace(" ", "-") for found in course(means, *[one] * len(expected))] == expected


def test_every_kind_of_fault_has_a_course_and_a_restart_in_process_is_followed_by_new_workers() -> None:
    assert set(COURSES) == set(FaultKind)
    for moves in COURSES.values():
        pairs = itertools.pairwise((*moves, None))
        assert all(then == Move(IN_JOB) for move, then in pairs if move and move.kind is IN_PROCESS)


def test_the_answers_count_repeats_and_list_what_they_skipped() -> None:
    escalation = Escalation(budgets())
    found = [escalation.answer(fault(), NO_MEANS, 0.0) for _ in range(2)]
    assert [(one.repeats, one.exit_code) for one in found] == [(0, 0), (1, 93)]
    assert [skipped(one) for one in found] == [["restart-in-process"], ["older", "replace-node"]]
    assert skipped(escalation.answer(fault("lost"), NO_MEANS, 0.0)) == ["replace-node", "shrink"]
    elsewhere = fault("lost", "n2", node="n2")
    assert skipped(escalation.answer(elsewhere, replace(NO_MEANS, fewer=True), 0.0)) == ["replace-node"]
    for one, means, lists in ((fault(), BARE, [[], ["older"]]), (KILLED, ALL, [[], [], []])):
        escalation = Escalation(budgets())
        assert [skipped(escalation.answer(one, means, 0.0)) for _ in lists] == lists, "no chance is listed"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (fault(), fault(step=8), False),
        (fault(), fault(text="E: y"), False),
        (fault(), fault("crash"), False),
        (fault(text="E: [::1]:25500 at 0x7F82bad1"), fault(text="E: [::1]:8083 at 0x7f82aaf4"), True),
        (fault(text="E: index 125"), fault(text="E: index 126"), False),
        (fault(text="x" * 200 + "a"), fault(text="x" * 200 + "b"), True),
        (fault("crash", "signal 1009"), fault("crash", "signal 1011"), False),
        (fault("hang", "hang in step 1000"), fault("hang", "hang in step 2000"), False),
        (fault("non-finite", "loss of rank 1 is nan"), fault("non-finite", "loss of rank 12 is nan"), True),
        (fault("non-finite", "loss is nan"), fault("non-finite", "loss is inf"), False),
        (fault("corrupt", "digest 0a1b2c3d"), fault("corrupt", "digest 12345678"), True),
        (fault("corrupt", "differ on rank 1"), fault("corrupt", "differ on rank 2"), False),
        (NO_MEMORY, replace(NO_MEMORY, signature="MemoryError: "), False),
        (NO_MEMORY, replace(NO_MEMORY, step=9, signature="torch.OutOfMemoryError: Tried 3 GiB"), True),
        (fault(counted=True), fault(counted=True), False),
        (fault(counted=True), fault(step=-1), False),
    ],
)
def test_which_faults_are_the_same(first: Fault, second: Fault, same: bool) -> None:
    escalation = Escalation(budgets())
    escalation.answer(first, OLD, 0.0)
    assert escalation.answer(second, OLD, 0.0).repeats == same


@pytest.mark.parametrize(
    ("one", "tried", "repeats", "speaks"),
    [
        (fault("non-finite"), 0, 0, True),
        (fault("corrupt"), 0, 0, True),
        (fault(), 1, 1, False),  # a plain restart is left
        (fault(), 2, 1, True),
        (KILLED, 2, 1, False),
        (KILLED, 2, 2, True),  # another chance would not be given
        (KILLED, 3, 1, True),
        (fault(counted=True), 9, 9, False),
        (fault("lost"), 9, 9, False),
        (fault(evidence=(OOM_KILL,)), 9, 9, False),
    ],
)
def test_a_fault_speaks_against_the_checkpoint_when_every_plain_restart_was_made(
    one: Fault, tried: int, repeats: int, speaks: bool
) -> None:
    assert speaks_against_state(one, tried, repeats) is speaks


@pytest.mark.parametrize(
    ("one", "memory"),
    [
        (fault(text="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"), "device"),
        (fault(text="torch.cuda.OutOfMemoryError: x"), "device"),
        (fault(text="RuntimeError: CUDA out of memory"), "device"),
        (fault(text="RuntimeError: HIP out of memory"), "device"),
        (fault(text="MemoryError: "), "host"),
        (fault(text="OSError: [Errno 12] Cannot allocate memory"), "host"),
        (fault(text="RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"), "host"),
        (fault(text="RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. "), "host"),
        (fault(text="RuntimeError: boom"), ""),
        (fault("hang", "MemoryError: "), ""),
        (KILLED, ""),
        (replace(KILLED, evidence=(("stacks", "x"), OOM_KILL)), "host"),
        (fault(text="exit 137", exit_code=137), "host"),
        (fault(text="exit 136", exit_code=136), ""),
    ],
)
def test_which_memory_ran_out(one: Fault, memory: str) -> None:
    assert out_of_memory(one) == memory


def test_memory_that_runs_out_twice_ends_the_job_unless_there_was_progress_or_the_step_is_unknown() -> None:
    again = replace(NO_MEMORY, step=9)
    assert course(ALL, NO_MEMORY, again) == ["in-job", "stop 93"]
    unknown = replace(NO_MEMORY, counted=True)
    assert course(ALL, NO_MEMORY, unknown, unknown, NO_MEMORY) == ["in-job", "in-job", "in-job", "stop 93"]
    escalation = Escalation(budgets(slow=5))
    for step in range(5):
        assert short(escalation.answer(replace(NO_MEMORY, step=step), ALL, 0.0)) == "in-job"
        escalation.committed(step)
    assert short(escalation.answer(again, ALL, 0.0)) == "stop 1"
    other = Escalation(budgets())
    other.answer(fault(), OLD, 0.0)
    other.committed(3)
    assert other.answer(fault(), OLD, 0.0).repeats == 1, "progress clears nothing else"


# Errors of the program


def raised(code: str) -> str:
    """Return the signature of what a wrong call raises in the interpreter that runs the tests."""
    try:
        exec(code, {"f": lambda a, *, b=0: a, "g": lambda: 0, "C": type("C", (), {}), "math": math})
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"
    raise AssertionError(code)


CALLS = ("f(1, c=2)", "f()", "f(1, 2)", "f(1, a=2)", "g(1)", "C(1)", "C(x=1)", "open('x', mood='r')")
CALLS += ("math.sqrt(1, 2)", "math.sqrt(x=1)", "undefined_name", "math.sqroot")
PERHAPS = ("1 + None", "len(None)", "{}['step']", "None.step", "int('x')")  # of what was read
IMPORTS = ("SyntaxError: x", "IndentationError: x", "ImportError: x", "ModuleNotFoundError: x")
MISUSE = ("UsageError: x", "ConfigError: x", "outlast.errors.UsageError: x")


@pytest.mark.parametrize(
    ("texts", "untrained", "trained"),
    [
        (MISUSE, "stop 93", "stop 93"),
        (IMPORTS, "stop 93", "in-job"),
        ([raised(code) for code in CALLS], "stop 93", "in-job"),
        ([raised(code) for code in PERHAPS], "in-job", "in-job"),
    ],
    ids=["misuse", "import", "call", "perhaps"],
)
def test_an_error_that_no_outage_can_have_caused_ends_a_job_that_never_trained(
    texts: list[str], untrained: str, trained: str
) -> None:
    for text in texts:
        for means, answer in ((OLD, untrained), (replace(OLD, trained=True), trained)):
            assert course(means, fault(text=text)) == [answer], text
            assert course(means, fault("crash", text)) == ["in-job"], text


# Budgets


def test_max_restarts_is_refilled_by_a_newer_step_than_ever_only() -> None:
    escalation = Escalation(budgets(2, 20))
    assert not escalation.committed(-1)
    assert escalation.committed(10)
    assert [short(escalation.answer(killed(step), OLD, 0.0)) for step in (11, 12)] == ["in-job"] * 2
    assert [escalation.committed(step) for step in (10, 9)] == [False, False]
    spent = escalation.answer(killed(13), OLD, 0.0)
    assert (short(spent), numbers(spent.reason)) == ("stop 1", [2, 2, 9, 11, 9, 12, 9, 13])
    assert "--max-restarts" in spent.reason
    assert escalation.committed(11)
    assert numbers(escalation.answer(killed(13), OLD, 0.0).reason) == [1, 2, 3, 20]


def test_the_budget_of_a_day_is_refilled_by_time_only() -> None:
    escalation = Escalation(budgets(3, 2))
    for step, now in enumerate((100.0, 200.0)):
        escalation.committed(step)
        assert short(escalation.answer(killed(step), OLD, now)) == "in-job"
    escalation.committed(9)
    spent = escalation.answer(killed(9), OLD, 100.0 + DAY - 1.0)
    assert (short(spent), numbers(spent.reason)[:2]) == ("stop 1", [2, 2])
    assert "--ft-max-restarts-per-day" in spent.reason
    assert numbers(escalation.answer(killed(9), OLD, 100.0 + DAY).reason) == [1, 3, 2, 2]
    assert short(escalation.answer(killed(10), OLD, 100.0 + DAY)) == "stop 1"


def test_as_many_restarts_a_day_as_in_a_row_unless_a_number_is_given() -> None:
    assert FaultToleranceOptions().restarts_per_day == 20
    assert FaultToleranceOptions(max_restarts=50).restarts_per_day == 50
    assert FaultToleranceOptions(max_restarts=50, max_restarts_per_day=5).restarts_per_day == 5


def test_each_action_has_a_budget_of_its_own_and_one_that_is_spent_is_skipped() -> None:
    escalation, means = Escalation(budgets(1, 20)), replace(ALL, spare=False, fewer=False)
    first, second, third = (escalation.answer(fault(step=step), means, 0.0) for step in (1, 2, 3))
    assert [short(one) for one in (first, second, third)] == ["in-process", "in-job", "stop 1"]
    assert [skipped(one) for one in (first, second)] == [[], ["restart-in-process"]]
    assert numbers(first.reason) == [1, 1, 1, 20]
    assert third.reason.count("--max-restarts") == 2
    escalation.committed(4)
    assert short(escalation.answer(fault(step=5), means, 0.0)) == "in-process"
    assert course(SPARE, fault("lost", "n1"), fault("lost", "n2"), fast=1) == ["replace-node", "stop 1"]


def test_without_any_budget_the_first_fault_is_the_last_and_leaves_no_evidence() -> None:
    for limits in ((0, 9), (9, 0)):
        escalation = Escalation(budgets(*limits))
        before = escalation.state()
        assert short(escalation.answer(fault(), OLD, 0.0)) == "stop 1"
        assert escalation.state() == before


def test_a_clock_that_was_set_back_does_not_keep_the_budget_spent_for_ever() -> None:
    escalation = Escalation(budgets(slow=1))
    found = [escalation.answer(killed(1), OLD, now) for now in (365 * DAY, 100.0, 100.0 + DAY)]
    assert [short(one) for one in found] == ["in-job", "stop 1", "in-job"]


@pytest.mark.parametrize(
    ("before", "trained", "answer", "counts"),
    [
        (1, 599.0, "stop 1", []),
        (0, 9999.0, "in-job", [1, 1, 1, 20, 10]),
        (1, 600.0, "in-job", [1, 1, 2, 20, 10]),
        (1, 7200.0, "in-job", [1, 1, 2, 20, 120]),
    ],
)
def test_ten_minutes_of_training_refill_the_budget_of_a_script_that_reports_no_steps(
    before: int, trained: float, answer: str, counts: list[int]
) -> None:
    escalation, unknown = Escalation(budgets(1, 20)), fault(counted=True)
    for _ in range(before):
        escalation.answer(unknown, BARE, 0.0)
    found = escalation.answer(replace(unknown, trained=trained), BARE, 0.0)
    assert short(found) == answer
    assert not counts or numbers(found.reason) == counts


def test_a_second_answer_names_the_budget_as_it_is() -> None:
    escalation, unknown = Escalation(FaultToleranceOptions()), fault(counted=True)
    first = escalation.answer(unknown, replace(BARE, ranks_can_reenter=True), 0.0)
    again = escalation.answer_again(unknown, first, BARE, 0.0)
    assert (short(first), short(again)) == ("in-process", "in-job")
    assert numbers(again.reason) == [1, 3, 1, 20, 10]


# The next launch


def handed_over(first: Escalation, fast: int = 1, slow: int = 20, **changes: object) -> Escalation:
    second = Escalation(budgets(fast, slow))
    second.restore({**json.loads(json.dumps(first.state())), **changes})
    return second


def test_budgets_signatures_and_steps_outlive_the_launcher() -> None:
    first = Escalation(budgets(2, 20))
    first.committed(5)
    first.answer(fault(), OLD, 50.0)
    second = handed_over(first, 2)
    assert second.state() == first.state()
    assert not second.committed(5)
    answer = second.answer(fault(), OLD, 60.0)
    assert (answer.state, answer.repeats, numbers(answer.reason)[:4]) == (OLDER, 1, [2, 2, 2, 20])


def test_a_job_that_is_done_refills_the_budget_of_the_next_launch_and_the_day_goes_on() -> None:
    first = Escalation(budgets(1, 20))
    assert [short(first.answer(killed(step), OLD, 0.0)) for step in (1, 2)] == ["in-job", "stop 1"]
    second = handed_over(first)
    assert short(second.answer(killed(3), OLD, 2.0)) == "stop 1", "a rerun after a fault is no success"
    second.done()
    third = handed_over(second)
    assert third.shortage(3.0) == ""
    assert numbers(third.answer(killed(4), OLD, 3.0).reason) == [1, 1, 2, 20]


def test_a_launch_that_begins_without_a_restart_says_which_budget_is_used_and_why() -> None:
    unknown = fault(step=-1, counted=True)
    escalation = Escalation(budgets(2, 3))
    for _ in range(2):
        assert escalation.shortage(0.0) == ""
        escalation.answer(unknown, BARE, 0.0)
    told = escalation.shortage(0.0)
    assert numbers(told) == [2, 2, 10]
    assert all(one in told for one in ("--max-restarts", "--run-dir", "E: x"))
    escalation.committed(1)
    escalation.answer(killed(7), BARE, 1.0)
    escalation.committed(8)
    told = escalation.shortage(2.0)
    assert numbers(told) == [3, 3, 24, 9, 7]
    assert "--ft-max-restarts-per-day" in told
    assert escalation.shortage(DAY - 1.0), "all three are of the last day"
    assert escalation.shortage(DAY) == escalation.shortage(DAY + 2.0) == ""
    for step in (8, 9):
        escalation.answer(killed(step), BARE, 2 * DAY)
    assert numbers(escalation.shortage(2 * DAY)) == [2, 2, 9, 8, 9, 9, 8, 10]
    forgetful = handed_over(escalation, 5, 1, history={"faults": [], "recent": 0})
    assert numbers(forgetful.shortage(2 * DAY)) == [1, 1, 24], "the faults are not remembered"


@pytest.mark.parametrize("limits", [(0, 20), (3, 0)])
def test_a_run_that_has_no_restarts_at_all_has_not_used_them(limits: tuple[int, int]) -> None:
    rich = Escalation(budgets())
    rich.answer(killed(1), OLD, 0.0)
    escalation = handed_over(rich, *limits)
    assert short(escalation.answer(killed(1), OLD, 0.0)) == "stop 1"
    assert escalation.shortage(0.0) == ""


@pytest.mark.parametrize("place", [4, 9])
def test_a_move_that_a_course_does_not_have_any_more_ends_it(place: int) -> None:
    first = Escalation(budgets())
    first.answer(fault(), BARE, 0.0)
    state = json.loads(json.dumps(first.state()))
    state["history"]["faults"][0]["place"] = place
    assert short(handed_over(first, **state).answer(fault(), OLD, 0.0)) == "stop 93"


def test_only_so_many_faults_are_kept_and_the_latest_of_them() -> None:
    escalation = Escalation(budgets())
    for step in [*range(256), 0, 256]:
        escalation.answer(killed(step), OLD, float(step))
    kept = escalation.state()["history"]
    assert kept["recent"] == 256
    assert [one["step"] for one in kept["faults"]] == [*range(2, 256), 0, 256]


MET: dict[str, Any] = {"evidence": "a", "what": "x", "node": "n0", "step": -1, "at": 5.0, "counted": False}
MET |= {"own": True, "place": 0, "loaded": ["local/step-000000001.g1"]}
GOOD: dict[str, Any] = {"newest": 3, "spent": {"restart-in-job": {"fast": 1, "times": [1.0]}}}
GOOD |= {"history": {"faults": [MET], "recent": 1}}
BAD_FAULTS = [{"step": -2}, {"place": None}, {"place": -2}, {"at": "now"}, {"what": 3}, {"loaded": "ab"}]
BAD_FAULTS += [{"loaded": [1]}, {"own": 1}, {"counted": 1}]
BAD_SHRINKS = [{"fast": 0}, {"fast": -1, "times": []}, {"fast": 0.0, "times": []}, {"fast": 0, "times": 5}]
BAD_SHRINKS += [{"fast": 0, "times": [one]} for one in ("x", math.inf, 1e15)]


@pytest.mark.parametrize(
    "change",
    [
        *({"newest": one} for one in ("x", -2, 1.0, None)),
        *({"spent": {kind: {"fast": 0, "times": []}}} for kind in ("stop", "nonsense")),
        *({"spent": {"shrink": one}} for one in BAD_SHRINKS),
        {"spent": 3},
        *({"history": one} for one in (7, {}, {"faults": [3], "recent": 0}, {"faults": [], "recent": -1})),
        *({"history": {"faults": [{**MET, **one}], "recent": 1}} for one in BAD_FAULTS),
    ],
)
def test_a_state_that_is_not_ours_is_refused_and_changes_nothing(change: dict[str, object]) -> None:
    escalation, fresh = Escalation(budgets()), Escalation(budgets()).state()
    for state in ({**GOOD, **change}, {}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            escalation.restore(state)
        assert escalation.state() == fresh
    escalation.restore(GOOD)


# What is written about it

ROWS = (
    ("an exception, an exit status", fault("error")),
    ("a signal that somebody may send", KILLED),
    ("a signal of its own (SIGSEGV, SIGABRT, SIGBUS and the like)", OWN),
    ("a hang", fault("hang")),
    ("a number that is not finite", fault("non-finite")),
    ("replicas that differ: ranks that should hold the same bytes do not", fault("corrupt")),
    ("a lost node", fault("lost")),
    ("a failing node, if a spare waits", fault("failing")),
    ("memory that ran out", replace(KILLED, evidence=(OOM_KILL,))),
    ("a refusal, an error in the program itself", fault("refused")),
)
COLUMNS = (Move(IN_PROCESS), Move(IN_JOB), Move(IN_JOB, StateSource.OLDER), Move(REPLACE), Move(SHRINK))


def test_the_table_in_the_documents_is_the_source() -> None:
    lines = []
    for words, one in ROWS:
        places: dict[Move, list[str]] = {move: [] for move in COLUMNS}
        for place, move in enumerate(course_of(one), 1):
            places[replace(move, chance=False)].append(f"({place})" if move.chance else str(place))
        lines.append(f"| {words} | {' | '.join(', '.join(places[move]) for move in COLUMNS)} |")
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "fault-model.md").read_text()
    _, _, after = text.partition("compares this table with the source -->\n\n")
    assert after.partition("\n\n")[0].splitlines()[2:] == lines
