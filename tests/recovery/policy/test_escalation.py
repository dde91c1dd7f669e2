from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import FaultToleranceOptions
from outlast.fields import whole
from outlast.recovery.policy.escalation import Answer, Capabilities, Escalation
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction, StateSource
from outlast.recovery.policy.fault_history import DAY

NEWEST, OLDER = StateSource.NEWEST, StateSource.OLDER
RICH = FaultToleranceOptions(max_restarts=1000, max_restarts_per_day=1000)
OLD, BARE = Capabilities(older_exists=True), Capabilities()


def fault(kind: FaultKind = FaultKind.ERROR, signature: str = "RuntimeError: boom", step: int = 7) -> Fault:
    return Fault(kind, "n0", 1, 1, step, "rank 1 failed", signature)


def after_load(step: int, means: Capabilities = OLD) -> Capabilities:
    """Return what can be done in a generation that had loaded the checkpoint of a step."""
    return replace(means, loaded=(f"local/step-{step:09d}.g1",))


def summary(answer: Answer) -> tuple[RecoveryAction, StateSource | int]:
    return answer.kind, answer.exit_code if answer.kind is RecoveryAction.STOP else answer.state


def answers(kind: FaultKind, times: int, older: bool) -> list[tuple[RecoveryAction, StateSource | int]]:
    escalation = Escalation(RICH)
    return [summary(escalation.answer(fault(kind), Capabilities(older), 0.0)) for _ in range(times)]


RESTART, STOP = (RecoveryAction.RESTART_IN_JOB, NEWEST), (RecoveryAction.STOP, 93)
RESTART_OLDER = (RecoveryAction.RESTART_IN_JOB, OLDER)
ONCE = {FaultKind.ERROR, FaultKind.CORRUPT, FaultKind.NON_FINITE}
TWICE = {FaultKind.CRASH, FaultKind.HANG}


@pytest.mark.parametrize("kind", sorted(ONCE))
def test_the_same_error_moves_to_an_older_state_and_then_ends_the_job(kind: FaultKind) -> None:
    assert answers(kind, 4, older=True) == [RESTART, RESTART_OLDER, STOP, STOP]
    assert answers(kind, 3, older=False) == [RESTART, STOP, STOP]


def test_a_job_that_cannot_save_ends_with_the_code_that_says_so() -> None:
    cannot = replace(fault(signature="SaveFailed: no room", step=-1), exit_code=74)
    escalation = Escalation(RICH)
    first, second = (escalation.answer(cannot, Capabilities(), at) for at in (0.0, 1.0))
    assert (first.kind, summary(second)) == (RecoveryAction.RESTART_IN_JOB, (RecoveryAction.STOP, 74))
    assert "program" not in second.reason


@pytest.mark.parametrize("kind", sorted(TWICE))
def test_what_may_come_from_outside_is_met_with_one_more_plain_restart(kind: FaultKind) -> None:
    assert answers(kind, 5, older=True) == [RESTART, RESTART, RESTART_OLDER, STOP, STOP]
    assert answers(kind, 4, older=False) == [RESTART, RESTART, STOP, STOP]


@pytest.mark.parametrize(
    ("step", "when"),
    [(-1, "before the first step"), (0, "at step 0"), (1, "at step 1")],
)
def test_a_repeated_fault_is_named_with_its_step(step: int, when: str) -> None:
    escalation = Escalation(FaultToleranceOptions())
    answers = [escalation.answer(fault(FaultKind.CRASH, step=step), OLD, 0.0) for _ in range(2)]
    assert answers[1].reason.endswith(f"; repeated fault {when}")


def test_the_reasons_say_what_was_tried() -> None:
    escalation = Escalation(FaultToleranceOptions())
    found = [escalation.answer(fault(), after_load(step), 0.0) for step in (6, 6, 4)]
    assert [(one.reason, one.repeats) for one in found] == [
        ("restart 1 of 3 without progress, 1 of 20 today", 0),
        (
            "restart 2 of 3 without progress, 2 of 20 today; repeated fault at step 7; "
            "loading an older checkpoint",
            1,
        ),
        (
            "the same fault occurred 3 times at step 7, from every checkpoint that was tried: the cause is"
            " the data of this step, the program or the machine, not the checkpoint",
            2,
        ),
    ]
    early = Escalation(FaultToleranceOptions())
    reasons = [early.answer(fault(step=-1), BARE, 0.0).reason for _ in range(2)]
    assert reasons[1].startswith("the same fault occurred twice before the first step: the start-up")


@pytest.mark.parametrize(
    "other",
    [
        fault(step=8),
        fault(signature="RuntimeError: bang"),
        fault(kind=FaultKind.CRASH),
    ],
)
def test_another_fault_is_no_repetition(other: Fault) -> None:
    escalation = Escalation(RICH)
    for _ in range(2):
        escalation.answer(fault(), OLD, 0.0)
    assert summary(escalation.answer(other, OLD, 0.0)) == RESTART
    assert summary(escalation.answer(fault(), OLD, 0.0)) == STOP


def test_addresses_ports_and_process_ids_do_not_make_another_error() -> None:
    escalation = Escalation(RICH)
    texts = [
        "RuntimeError: Connection closed by peer [127.0.0.1]:25500 at 0x7F82bad1db8d",
        "RuntimeError: Connection closed by peer [127.0.0.1]:8083 at 0x7f82aaf47a52",
    ]
    found = [summary(escalation.answer(fault(signature=text), BARE, 0.0)) for text in texts]
    assert found == [RESTART, STOP]


def test_small_numbers_do_and_signals_are_never_alike() -> None:
    escalation = Escalation(RICH)
    for text in ("IndexError: index 125", "IndexError: index 126", "exit 7", "exit 8"):
        assert summary(escalation.answer(fault(signature=text), BARE, 0.0)) == RESTART
    for text in ("signal 1009", "signal 1011"):
        for _ in range(2):
            assert summary(escalation.answer(fault(FaultKind.CRASH, text), BARE, 0.0)) == RESTART


def test_the_end_of_a_long_text_does_not_make_another_error() -> None:
    escalation = Escalation(RICH)
    found = [summary(escalation.answer(fault(signature="x" * 200 + end), BARE, 0.0)) for end in "ab"]
    assert found == [RESTART, STOP]


@pytest.mark.parametrize(("given_code", "expected"), [(65, 65), (None, 1), (0, 1), (-9, 1)])
def test_a_refusal_ends_the_job_with_the_workers_own_code(given_code: int | None, expected: int) -> None:
    refusal = replace(fault(FaultKind.REFUSED), exit_code=given_code)
    for means in (OLD, Capabilities(spare=True, fewer=True)):
        answer = Escalation(RICH).answer(refusal, means, 0.0)
        assert (answer.kind, answer.exit_code, answer.reason) == (
            RecoveryAction.STOP,
            expected,
            "a restart will not help",
        )


@pytest.mark.parametrize(
    ("means", "kind", "exclude"),
    [
        (Capabilities(spare=True, fewer=True), RecoveryAction.REPLACE_NODE, "n1"),
        (Capabilities(spare=False, fewer=True), RecoveryAction.SHRINK, "n1"),
        (Capabilities(spare=False), RecoveryAction.STOP, ""),
        (Capabilities(), RecoveryAction.STOP, ""),
    ],
)
def test_a_node_that_a_rank_found_unfit_is_used_no_more_where_the_job_can_do_without(
    means: Capabilities, kind: RecoveryAction, exclude: str
) -> None:
    unfit = replace(fault(FaultKind.REFUSED), exit_code=69, node="n1", rank=3)
    answer = Escalation(RICH).answer(unfit, means, 0.0)
    assert (answer.kind, answer.exclude) == (kind, exclude)
    assert (answer.exit_code == 69) == (kind is RecoveryAction.STOP)
    assert ("rank 3 reported its node as unhealthy" in answer.reason) == (kind is not RecoveryAction.STOP)
    poor = FaultToleranceOptions(max_restarts=0)
    assert Escalation(poor).answer(unfit, means, 0.0).kind is RecoveryAction.STOP


@pytest.mark.parametrize(
    "name",
    [
        "SyntaxError",
        "IndentationError",
        "ImportError",
        "ModuleNotFoundError",
        "UsageError",
        "ConfigError",
        "outlast.errors.UsageError",
    ],
)
def test_an_error_in_the_program_itself_ends_the_job_at_once(name: str) -> None:
    answer = Escalation(RICH).answer(fault(signature=f"{name}: x"), OLD, 0.0)
    assert (summary(answer), answer.reason) == (STOP, "the error is in the program; a restart will not help")
    crash = Escalation(RICH).answer(fault(FaultKind.CRASH, f"{name}: x"), OLD, 0.0)
    assert summary(crash) == RESTART


def _raised(code: str) -> str:
    """Return the signature of what a wrong call raises in the interpreter that runs the tests."""
    try:
        exec(code, {"f": lambda a, *, b=0: a, "g": lambda: 0, "C": type("C", (), {}), "math": math})
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"
    raise AssertionError(code)


@pytest.mark.parametrize(
    ("code", "final"),
    [
        ("f(1, c=2)", True),
        ("f()", True),
        ("f(1, 2)", True),
        ("f(1, a=2)", True),
        ("g(1)", True),
        ("C(1)", True),
        ("C(x=1)", True),
        ("open('x', mood='r')", True),
        ("math.sqrt(1, 2)", True),
        ("math.sqrt(x=1)", True),
        ("undefined_name", True),
        ("math.sqroot", True),
        ("1 + None", False),  # of what was read, perhaps: a file that is not there yet
        ("len(None)", False),
        ("{}['step']", False),
        ("None.step", False),
        ("int('x')", False),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_call_that_no_outage_can_have_broken_is_an_error_of_the_program(
    code: str, final: bool, trained: bool
) -> None:
    means = replace(OLD, trained=trained)
    answer = Escalation(RICH).answer(fault(signature=_raised(code)), means, 0.0)
    assert (answer.kind is RecoveryAction.STOP) == (final and not trained), answer


# Budgets


def crash(step: int) -> Fault:
    return fault(FaultKind.CRASH, "signal 9", step)


def test_the_fast_budget_is_refilled_by_a_newer_step_than_ever_only() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts=2))
    assert escalation.committed(10)
    for step in (11, 12):
        assert escalation.answer(crash(step), OLD, 0.0).kind is RecoveryAction.RESTART_IN_JOB
    assert escalation.committed(10) is False
    assert escalation.committed(9) is False
    spent = escalation.answer(crash(13), OLD, 0.0)
    assert (spent.kind, spent.exit_code) == (RecoveryAction.STOP, 1)
    assert spent.reason == (
        "2 of 2 restarts without progress used (--max-restarts); last faults: "
        "crash (signal 9) at step 11, crash (signal 9) at step 12, crash (signal 9) at step 13"
    )
    assert escalation.committed(11)
    assert "restart 1 of 2 without progress, 3 of 20 today" in escalation.answer(crash(13), OLD, 0.0).reason


def test_nothing_is_newer_before_the_first_step() -> None:
    escalation = Escalation(FaultToleranceOptions())
    assert not escalation.committed(-1)
    assert escalation.committed(0)


@pytest.mark.parametrize(
    ("before", "trained", "why"),
    [
        (0, 9999.0, "the script reports no progress: 10 min of training reset this counter"),
        (1, 599.0, "the script reports no progress: 10 min of training reset this counter"),
        (1, 600.0, "counter reset after 10 min of training"),
        (1, 7200.0, "counter reset after 120 min of training"),
    ],
)
def test_the_reason_says_whether_long_training_has_refilled_the_budget(
    before: int, trained: float, why: str
) -> None:
    escalation = Escalation(FaultToleranceOptions())
    unknown = replace(fault(), counted=True)
    for _ in range(before):
        escalation.answer(unknown, BARE, 0.0)
    reason = escalation.answer(replace(unknown, trained=trained), BARE, 0.0).reason
    assert reason.endswith(f" ({why})")


def test_the_reason_of_a_second_answer_speaks_of_the_budget_as_it_is() -> None:
    escalation, means = Escalation(FaultToleranceOptions()), Capabilities(ranks_can_reenter=True)
    unknown = replace(fault(), counted=True)
    first = escalation.answer(unknown, means, 0.0)
    assert first.kind is RecoveryAction.RESTART_IN_PROCESS
    again = escalation.answer_again(unknown, first, means, 0.0)
    assert again.reason.endswith(" (the script reports no progress: 10 min of training reset this counter)")


def test_the_slow_budget_is_refilled_by_time_only() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts_per_day=2))
    for place, now in enumerate((100.0, 200.0)):
        escalation.committed(place)
        assert escalation.answer(crash(place), OLD, now).kind is RecoveryAction.RESTART_IN_JOB
    escalation.committed(9)
    spent = escalation.answer(crash(9), OLD, 100.0 + DAY - 1.0)
    assert (spent.kind, spent.exit_code) == (RecoveryAction.STOP, 1)
    assert spent.reason == (
        "2 of 2 restarts in 24 h used (--ft-max-restarts-per-day); last faults: crash (signal 9) at step 9"
    )
    assert "2 of 2 today" in escalation.answer(crash(9), OLD, 100.0 + DAY).reason
    assert escalation.answer(crash(10), OLD, 100.0 + DAY).kind is RecoveryAction.STOP


def test_as_many_restarts_a_day_as_in_a_row_unless_a_number_is_given() -> None:
    assert FaultToleranceOptions().restarts_per_day == 20
    assert FaultToleranceOptions(max_restarts=50).restarts_per_day == 50
    assert FaultToleranceOptions(max_restarts=50, max_restarts_per_day=5).restarts_per_day == 5


def test_without_any_budget_the_first_fault_is_the_last() -> None:
    assert (
        Escalation(FaultToleranceOptions(max_restarts=0)).answer(crash(1), OLD, 0.0).kind
        is RecoveryAction.STOP
    )
    assert (
        Escalation(FaultToleranceOptions(max_restarts_per_day=0)).answer(crash(1), OLD, 0.0).kind
        is RecoveryAction.STOP
    )


def test_a_spent_budget_leaves_no_evidence_behind() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts=0))
    before = escalation.state()
    assert escalation.answer(fault(), OLD, 0.0).repeats == 0
    assert escalation.state() == before


def test_a_clock_that_was_set_back_does_not_keep_the_budget_spent_for_ever() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts_per_day=1))
    year = 365 * DAY
    assert escalation.answer(crash(1), OLD, year).kind is RecoveryAction.RESTART_IN_JOB
    assert escalation.answer(crash(2), OLD, 100.0).kind is RecoveryAction.STOP
    assert escalation.answer(crash(2), OLD, 100.0 + DAY).kind is RecoveryAction.RESTART_IN_JOB


def test_a_job_that_is_done_leaves_the_next_launch_full_budgets_and_the_day_goes_on() -> None:
    first, second = (Escalation(FaultToleranceOptions(max_restarts=1)) for _ in range(2))
    first.answer(crash(1), OLD, 0.0)
    assert first.answer(crash(2), OLD, 1.0).kind is RecoveryAction.STOP
    second.restore(first.state())
    assert second.answer(crash(3), OLD, 2.0).kind is RecoveryAction.STOP, (
        "a rerun after a fault is no success"
    )
    second.done()
    first.restore(second.state())
    assert first.shortage(3.0) == ""
    assert first.answer(crash(4), OLD, 3.0).reason == "restart 1 of 1 without progress, 2 of 20 today"


def test_a_launch_that_begins_without_a_restart_says_so() -> None:
    unknown = replace(fault(step=-1), counted=True)
    escalation = Escalation(FaultToleranceOptions(max_restarts=2, max_restarts_per_day=3))
    assert escalation.shortage(0.0) == ""
    for _ in range(2):
        assert escalation.shortage(0.0) == ""
        escalation.answer(unknown, BARE, 0.0)
    assert escalation.shortage(0.0) == (
        "earlier launches of this run have used 2 of 2 restarts (--max-restarts) for error (RuntimeError:"
        " boom) before an optimizer step was seen, so a fault before the script reports its first step or"
        " checkpoint (where it reports neither, within 10 min of training) gets no restart; to begin anew,"
        " give another --run-dir"
    )
    escalation.committed(1)
    escalation.answer(crash(7), BARE, 1.0)
    assert escalation.shortage(2.0) == (
        "earlier launches of this run have used 3 of 3 restarts in 24 h (--ft-max-restarts-per-day) for crash"
        " (signal 9) at step 7, so a fault now gets no restart; to begin anew, give another --run-dir"
    )
    assert escalation.shortage(DAY - 1.0), "all three are of the last day"
    assert escalation.shortage(DAY) == escalation.shortage(DAY + 2.0) == ""
    for step in (8, 9):
        escalation.answer(crash(step), BARE, 2 * DAY)
    assert escalation.shortage(2 * DAY).endswith(
        " for crash (signal 9) at step 7, crash (signal 9) at step 8, so a fault before there is a"
        " checkpoint after step 1 (where it reports neither, within 10 min of training) gets no restart;"
        " to begin anew, give another --run-dir"
    )


def test_the_only_restart_of_a_day_is_missed_though_its_fault_is_not_remembered() -> None:
    escalation = Escalation(FaultToleranceOptions(max_restarts_per_day=1))
    escalation.answer(crash(7), OLD, 0.0)
    state = escalation.state()
    escalation.restore(state | {"history": state["history"] | {"faults": [], "recent": 0}})
    assert escalation.shortage(0.0).startswith(
        "earlier launches of this run have used 1 of 1 restarts in 24 h (--ft-max-restarts-per-day), so"
    )


@pytest.mark.parametrize("limits", [{"max_restarts": 0}, {"max_restarts_per_day": 0}])
def test_a_run_that_has_no_restarts_at_all_has_not_used_them(limits: dict[str, int]) -> None:
    escalation = Escalation(FaultToleranceOptions(**limits))
    rich = Escalation(RICH)
    rich.answer(crash(1), OLD, 0.0)
    escalation.restore(rich.state())
    assert escalation.answer(crash(1), OLD, 0.0).kind is RecoveryAction.STOP
    assert escalation.shortage(0.0) == ""


# What is kept


def test_budgets_signatures_and_steps_outlive_the_launcher() -> None:
    first, second = (
        Escalation(FaultToleranceOptions(max_restarts=2)),
        Escalation(FaultToleranceOptions(max_restarts=2)),
    )
    first.committed(5)
    first.answer(fault(), OLD, 50.0)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert not second.committed(5)
    answer = second.answer(fault(), OLD, 60.0)
    assert (answer.state, answer.repeats) == (OLDER, 1)
    assert "restart 2 of 2 without progress, 2 of 20 today" in answer.reason


@pytest.mark.parametrize("place", [4, 9])
def test_a_move_that_a_course_does_not_have_any_more_ends_it(place: int) -> None:
    escalation = Escalation(RICH)
    escalation.answer(fault(), BARE, 0.0)
    state = json.loads(json.dumps(escalation.state()))
    state["history"]["faults"][0]["place"] = place
    escalation.restore(state)
    end = escalation.answer(fault(), OLD, 0.0)
    assert (end.kind, end.repeats) == (RecoveryAction.STOP, 1)
    assert end.reason.startswith("the same fault occurred twice at step 7: ")


def test_only_so_many_faults_are_kept_and_the_latest_of_them() -> None:
    escalation = Escalation(RICH)
    for step in [*range(256), 0, 256]:
        escalation.answer(crash(step), OLD, float(step))
    kept = escalation.state()["history"]
    assert len(kept["faults"]) == kept["recent"] == 256
    assert [one["step"] for one in kept["faults"]] == [*range(2, 256), 0, 256]


def test_a_state_that_is_not_ours_is_refused_and_changes_nothing() -> None:
    budgets = {"restart-in-job": {"fast": 1, "times": [1.0]}}
    met = {
        "evidence": "a",
        "what": "x",
        "node": "n0",
        "step": -1,
        "at": 5.0,
        "counted": False,
        "own": True,
        "place": 0,
        "loaded": ["local/step-000000001.g1"],
    }

    def history(recent: object = 1, **changes: object) -> dict[str, object]:
        return {"faults": [{**met, **changes}], "recent": recent}

    good = {"newest": 3, "spent": budgets, "history": history()}
    Escalation(RICH).restore(good)
    odd = [
        {},
        {**good, "newest": "x"},
        {**good, "newest": -2},
        {**good, "spent": {"stop": {"fast": 0, "times": []}}},
        {**good, "spent": {"nonsense": {"fast": 0, "times": []}}},
        {**good, "spent": {"shrink": {"fast": 0}}},
        {**good, "spent": {"shrink": {"fast": -1, "times": []}}},
        {**good, "spent": {"shrink": {"fast": 0, "times": 5}}},
        {**good, "spent": {"shrink": {"fast": 0, "times": ["x"]}}},
        {**good, "spent": {"shrink": {"fast": 0, "times": [math.inf]}}},
        {**good, "spent": {"shrink": {"fast": 0, "times": [1e15]}}},
        {**good, "spent": 3},
        {**good, "history": 7},
        {**good, "history": {}},
        {**good, "history": {"faults": [met], "recent": -1}},
        {**good, "history": {"faults": [3], "recent": 0}},
        {**good, "history": history(step=-2)},
        {**good, "history": history(place=None)},
        {**good, "history": history(place=-2)},
        {**good, "history": history(at="now")},
        {**good, "history": history(what=3)},
        {**good, "history": history(loaded="ab")},
        {**good, "history": history(loaded=[1])},
        {**good, "history": history(own=1)},
    ]
    for state in odd:
        escalation = Escalation(RICH)
        with pytest.raises((KeyError, TypeError, ValueError)):
            escalation.restore(state)
        assert escalation.state() == Escalation(RICH).state(), state


@pytest.mark.parametrize(
    ("value", "error"), [(1.0, TypeError), ("1", TypeError), (None, TypeError), (0, ValueError)]
)
def test_a_whole_number_is_one_or_an_error(value: object, error: type[Exception]) -> None:
    assert whole(1, at_least=1) == 1
    with pytest.raises(error):
        whole(value, at_least=1)


# Every recovery ends


def test_any_history_of_faults_and_commits_keeps_all_three_bounds() -> None:
    """Counted by hand from the answers alone: per day, without progress, and per evidence."""
    seen: Counter[str] = Counter()
    curable = sorted(set(FaultKind) - {FaultKind.REFUSED})
    usual = st.builds(fault, st.sampled_from(curable), st.sampled_from(["E: x", "E: y"]), st.integers(0, 1))
    hopeless = st.sampled_from([fault(FaultKind.REFUSED), fault(signature="ImportError: x")])
    happening = st.one_of(usual, usual, usual, usual, st.integers(0, 40), st.integers(0, 40), hopeless)
    happenings = st.lists(
        st.tuples(st.floats(0.0, DAY / 3), happening, st.sampled_from([True, True, True, False])),
        min_size=20,
        max_size=60,
    )

    @settings(max_examples=200)
    @given(happenings, st.integers(1, 4), st.integers(1, 8))
    def check(history: list[tuple[float, Fault | int, bool]], fast: int, slow: int) -> None:
        escalation = Escalation(FaultToleranceOptions(max_restarts=fast, max_restarts_per_day=slow))
        now, newest, since_progress = 0.0, -1, 0
        restarts: list[float] = []
        tried: dict[tuple[FaultKind, str, int], list[StateSource]] = {}
        for pause, happening, older in history:
            now += pause
            if isinstance(happening, int):
                if happening > newest:
                    newest, since_progress = happening, 0
                escalation.committed(happening)
                continue
            answer = escalation.answer(happening, Capabilities(older), now)
            assert answer.reason
            seen[answer.reason[:12]] += answer.kind is RecoveryAction.STOP
            if answer.kind is RecoveryAction.STOP:
                assert answer.exit_code > 0
                continue
            restarts.append(now)
            since_progress += 1
            evidence = tried.setdefault((happening.kind, happening.signature, happening.step), [])
            evidence.append(answer.state)
            assert len([at for at in restarts if now - at < DAY]) <= slow
            assert since_progress <= fast
            assert evidence.count(OLDER) <= 1
            assert evidence.count(NEWEST) <= (1 if happening.kind in ONCE else 2)
            assert answer.state is NEWEST or older
            seen["older"] += answer.state is OLDER

    check()
    reasons = ("a restart wi", "the same fau", "older")
    assert min(seen[one] for one in reasons) > 0, seen
    assert sum(count for reason, count in seen.items() if " of " in reason) > 0, seen
