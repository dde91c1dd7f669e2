"""Every incident ends: reruns, restarts, incidents and time are counted, each at its bound."""

from __future__ import annotations

import pytest

from outlast.config import RerunOptions
from outlast.rerun.policy.events import Found, Loaded, Means, Order, Remedy, Reran, Started, Swapped, Verdict
from outlast.rerun.policy.machine import RerunMachine
from tests.rerun.policy.test_machine import DEVICES, Case

HOUR, DAY = 3600.0, 86_400.0
WALL = 1.7e9  # what a clock of the day shows, in seconds
NEAR = Loaded(0, "local", "p")


def rejected_everywhere(options: RerunOptions) -> tuple[Case, Order]:
    case = Case(options)
    case.found(0, 1, 2)
    return case, case.reran(0, 1, 2)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_restarts_for_an_incident_are_counted(most: int) -> None:
    case = Case(RerunOptions(max_attempts=most), NEAR)
    restarts = 0
    for turn in range(4):
        case.found(1, means=Means(another_copy=True))
        order = case.reran(1)
        if order.remedy is not Remedy.LOAD_OLDER:
            break
        restarts += 1
        case.restarted("GPU-a", "GPU-b", f"GPU-{turn}", loaded=NEAR)
    assert (order.remedy, order.verdict, restarts) == (Remedy.STOP, Verdict.INCONCLUSIVE, most)
    assert order.reason == f"{most} of {most} restarts used (max_attempts)"


@pytest.mark.parametrize(("most", "remedy"), [(0, Remedy.STOP), (1, Remedy.SPARE)])
def test_a_conviction_is_no_leave_for_more_restarts(most: int, remedy: Remedy) -> None:
    case = Case(RerunOptions(max_attempts=most))
    case.found(1, means=Means({1: 2}, spare=True))
    case.reran(1)
    order = case.machine.handle(Swapped((1,)), 3.0)
    assert (order.remedy, order.verdict, order.device) == (remedy, Verdict.PERSISTENT, "GPU-b")


def test_the_same_remedy_is_not_ordered_again_for_a_convict() -> None:
    """A spare was asked for and came to another rank; the device is convicted where it is now."""
    case = Case()
    case.found(1, means=Means(spare=True))
    assert case.reran(1).remedy is Remedy.SPARE
    case.restarted("GPU-b", "GPU-a", "GPU-c")
    assert case.found(0, means=Means({0: 2}, spare=True)).remedy is Remedy.SWAP
    order = case.machine.handle(Swapped((0,)), 4.0)
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, Verdict.PERSISTENT, "GPU-b")


@pytest.mark.parametrize(
    ("action", "most", "remedy"),
    [
        ("roll_back", 0, Remedy.STOP),
        ("roll_back", 1, Remedy.ROLL_BACK),
        ("skip_batch", 0, Remedy.SKIP_BATCH),
        ("stop", 3, Remedy.STOP),
    ],
)
def test_the_policy_is_followed_once_and_then_the_job_ends(action: str, most: int, remedy: Remedy) -> None:
    case, order = rejected_everywhere(RerunOptions(rejected_action=action, max_attempts=most))
    assert (order.remedy, order.verdict) == (remedy, Verdict.DATA_OR_MODEL)
    case.restarted()
    again = case.found(0, 1, 2)
    assert (again.remedy, again.verdict) == (Remedy.STOP, Verdict.DATA_OR_MODEL)
    assert again.reason == f"the fault occurred again; {order.reason}"


def test_a_roll_back_counts_as_a_restart() -> None:
    case = Case(RerunOptions(max_attempts=1, rejected_action="roll_back"), NEAR)
    case.found(1, means=Means(another_copy=True))
    assert case.reran(1).remedy is Remedy.LOAD_OLDER
    case.restarted(loaded=Loaded(0, "local", "q"))
    order = case.found(1)
    assert (order.remedy, order.exit_code) == (Remedy.STOP, 93)


def test_an_end_is_written_down_once_however_often_the_job_is_started_again() -> None:
    case, first = rejected_everywhere(RerunOptions())
    for _ in range(5):
        case.restarted()
        again = case.found(0, 1, 2)
        assert (again.remedy, again.reason) == (Remedy.STOP, f"the fault occurred again; {first.reason}")
    assert case.results == ["rerun the step: rejected again on ranks 0, 1, 2 with the same bits", "stop: "]


@pytest.mark.parametrize(("step", "remedy"), [(10, Remedy.LOAD_OLDER), (11, Remedy.STOP)])
def test_a_copy_is_suspected_for_so_many_steps(step: int, remedy: Remedy) -> None:
    case = Case(RerunOptions(suspect_steps=10), NEAR)
    case.found(1, step=step, means=Means(another_copy=True))
    assert case.reran(1).remedy is remedy


def test_steps_count_from_the_start_where_nothing_was_loaded() -> None:
    machine = RerunMachine(RerunOptions())
    machine.handle(Started(DEVICES), 0.0)
    machine.handle(Found(5, "loss", "nan", (1,)), 1.0)
    assert machine.records()[0]["since_load"] == 5


@pytest.mark.parametrize(("later", "remedy"), [(60.0, Remedy.SWAP), (60.5, Remedy.STOP)])
def test_nothing_new_is_tried_after_the_time_for_an_incident(later: float, remedy: Remedy) -> None:
    case = Case(RerunOptions(max_incident_seconds=60.0))
    case.found(1, means=Means({1: 2}), at=WALL)
    order = case.reran(1, at=WALL + later)
    assert order.remedy is remedy
    assert (order.reason == "the time limit of this incident is exceeded (max_incident_seconds)") == (
        remedy is Remedy.STOP
    )


@pytest.mark.parametrize(("later", "remedy"), [(HOUR - 1, Remedy.STOP), (HOUR, Remedy.RERUN)])
def test_incidents_are_counted_by_the_hour(later: float, remedy: Remedy) -> None:
    case = Case(RerunOptions(max_incidents_per_hour=1))
    case.found(1, step=1, at=WALL)
    case.reran(at=WALL)
    assert case.found(1, step=2, at=WALL + later).remedy is remedy


@pytest.mark.parametrize(("later", "remedy"), [(DAY - 1, Remedy.STOP), (DAY, Remedy.CONTINUE)])
def test_transient_incidents_are_counted_by_the_day(later: float, remedy: Remedy) -> None:
    case = Case(RerunOptions(max_transients_per_day=2))
    case.found(1, step=1, at=WALL)
    assert case.clean(at=WALL).remedy is Remedy.CONTINUE
    case.found(1, step=2, at=WALL + later)
    order = case.clean(at=WALL + later)
    assert order.remedy is remedy
    assert order.verdict is (Verdict.PERSISTENT if remedy is Remedy.STOP else Verdict.TRANSIENT)


def test_a_machine_says_what_it_waits_for_and_on_which_devices() -> None:
    case = Case()
    assert (case.machine.devices, case.machine.open) == (DEVICES, None)
    case.found(1)
    assert case.machine.open is not None
    assert (case.machine.open.step, case.machine.open.pending) == (5, Remedy.RERUN)
    case.clean()
    assert case.machine.open is None


def test_an_outcome_that_is_heard_before_a_start_ends_the_incident_all_the_same() -> None:
    case = Case(loaded=NEAR)
    case.found(1, means=Means({1: 2}))
    machine = RerunMachine(RerunOptions())
    machine.restore(case.machine.records())
    for _ in range(2):
        order = machine.handle(Reran((1,), case.digests((1,))), 2.0)
    assert (order.remedy, order.verdict, machine.open) == (Remedy.STOP, Verdict.INCONCLUSIVE, None)


def test_only_so_many_incidents_are_kept() -> None:
    machine = RerunMachine(RerunOptions())
    for step in range(300):
        machine.handle(Found(step, "loss", "nan", (0,)), step * 4000.0)
    assert [record["step"] for record in machine.records()] == list(range(300 - 256, 300))
