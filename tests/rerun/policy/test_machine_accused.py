"""Who is accused after a rerun, a swap or a restart: a device, a copy, the data, or nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.config import RerunOptions
from outlast.rerun.policy.events import Found, Loaded, Means, Order, Passed, Remedy, Reran, Swapped, Verdict
from tests.rerun.policy.test_machine import DEVICES, Case

NEAR, OTHER = Loaded(0, "local", "p"), Loaded(0, "local", "q")
SPARED = ("GPU-a", "GPU-s", "GPU-c")  # rank 1 has another device
ELSEWHERE = ("GPU-s", "GPU-t", "GPU-u")
COPY, SPARE = Means(another_copy=True), Means(spare=True)
PERSISTENT, INCONCLUSIVE, DATA = Verdict.PERSISTENT, Verdict.INCONCLUSIVE, Verdict.DATA_OR_MODEL


def rejected_twice(means: Means, *ranks: int, options: RerunOptions | None = None) -> Case:
    """Return a case near its load, where a rerun was rejected as well."""
    case = Case(options, NEAR)
    case.found(*ranks, means=means)
    case.reran(*(ranks or (0, 1, 2)))
    return case


def passed(case: Case, step: int = 5) -> Order:
    return case.machine.handle(Passed(step), 4.0)


def convicted(means: Means | None = None, options: RerunOptions | None = None) -> tuple[Case, Order]:
    """Return a case in which a swap has convicted GPU-b, and the order that came of it."""
    case = Case(options)
    case.found(1, means=replace(means or Means(), peers={1: 2}))
    case.reran(1)
    return case, case.machine.handle(Swapped((1,)), 3.0)


@pytest.mark.parametrize(
    ("means", "devices", "loaded", "verdict", "culprit", "why"),
    [
        (COPY, DEVICES, OTHER, Verdict.BAD_CHECKPOINT, "local/p", "the step passed with another copy"),
        (
            COPY,
            ("GPU-s", "GPU-b", "GPU-c"),
            OTHER,
            Verdict.BAD_CHECKPOINT,
            "local/p",
            "passed with another copy",
        ),
        (COPY, DEVICES, NEAR, INCONCLUSIVE, "", "the same devices and the same copy"),
        (COPY, SPARED, OTHER, INCONCLUSIVE, "", "both device and copy may have changed"),
        (COPY, SPARED, NEAR, PERSISTENT, "GPU-b", "the step passed with another device"),
        (COPY, ("GPU-a",), NEAR, INCONCLUSIVE, "", "both device and copy may have changed"),
        (SPARE, SPARED, NEAR, PERSISTENT, "GPU-b", "the step passed with another device"),
        (SPARE, SPARED, OTHER, INCONCLUSIVE, "", "both device and copy may have changed"),
        (SPARE, ELSEWHERE, NEAR, PERSISTENT, "GPU-b", "the step passed with another device"),
    ],
)
def test_a_step_that_passes_accuses_the_one_thing_that_was_changed(
    means: Means, devices: tuple[str, ...], loaded: Loaded, verdict: Verdict, culprit: str, why: str
) -> None:
    case = rejected_twice(means, 1)
    assert case.restarted(*devices, loaded=loaded).reason == ""
    assert passed(case, 4) == Order(), "the step is yet to come"
    order = passed(case)
    assert (order.remedy, order.verdict) == (Remedy.CONTINUE, verdict)
    assert (order.device, order.place) == (("", culprit) if "/" in culprit else (culprit, ""))
    assert why in order.reason
    assert case.machine.records()[-1]["culprit"] == culprit
    assert case.results[-1].endswith(": step 5 passed")
    assert passed(case, 6) == Order(), "it is over"


@pytest.mark.parametrize(
    ("ranks", "devices", "loaded", "verdict"),
    [
        ((), DEVICES, OTHER, Verdict.BAD_CHECKPOINT),
        ((), ELSEWHERE, OTHER, INCONCLUSIVE),
        ((), ELSEWHERE, NEAR, INCONCLUSIVE),
        ((0, 1), ELSEWHERE, NEAR, INCONCLUSIVE),
    ],
)
def test_no_device_is_accused_where_several_could_be(
    ranks: tuple[int, ...], devices: tuple[str, ...], loaded: Loaded, verdict: Verdict
) -> None:
    case = rejected_twice(COPY, *ranks)
    case.restarted(*devices, loaded=loaded)
    order = passed(case)
    assert (order.verdict, order.device) == (verdict, "")


def test_a_finding_in_a_later_step_says_that_the_earlier_one_passed() -> None:
    case = rejected_twice(COPY, 1)
    case.restarted(loaded=OTHER)
    assert case.found(2, step=9).remedy is Remedy.RERUN
    assert [record["verdict"] for record in case.machine.records()] == ["bad checkpoint", None]


def test_a_finding_in_an_earlier_step_leaves_the_later_one_open() -> None:
    case = rejected_twice(COPY, 1)
    case.restarted(loaded=OTHER)
    assert case.found(2, step=3).remedy is Remedy.RERUN
    later, earlier = case.machine.records()
    assert later["attempts"][-1]["result"] == "loss is nan in the earlier step 3"
    assert (later["verdict"], later["pending"], earlier["pending"]) == (None, None, "rerun the step")
    case.clean()
    assert passed(case) == Order(), "nothing was tried for step 5 since"


def test_a_process_that_ends_within_a_rerun_has_shown_nothing() -> None:
    case = Case()
    case.found(1)
    assert case.restarted() == Order()
    assert case.results == ["rerun the step: the process ended before the result"]
    assert case.machine.open is None
    assert passed(case) == Order()


@pytest.mark.parametrize("devices", [DEVICES, ("GPU-s", "GPU-b", "GPU-c")])
def test_a_move_that_left_the_device_in_its_place_ends_the_job(devices: tuple[str, ...]) -> None:
    case = rejected_twice(SPARE, 1)
    order = case.restarted(*devices)
    assert (order.remedy, order.verdict) == (Remedy.STOP, INCONCLUSIVE)
    assert order.reason == "restarted on the same devices"
    assert case.results[-2:] == [f"{Remedy.SPARE.value}: the devices are the same", "stop: "]


@pytest.mark.parametrize("action", ["stop", "skip_batch", "roll_back"])
def test_a_convicted_device_that_comes_back_stays_convicted_and_ends_the_job(action: str) -> None:
    case, order = convicted(SPARE, RerunOptions(rejected_action=action))
    assert (order.remedy, order.verdict, order.device) == (Remedy.SPARE, PERSISTENT, "GPU-b")
    order = case.restarted()
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, PERSISTENT, "GPU-b")
    assert order.exit_code == 69


@pytest.mark.parametrize("ranks", [(1,), ()])
@pytest.mark.parametrize("action", ["stop", "skip_batch"])
def test_a_convicted_device_that_is_still_in_use_ends_the_job(ranks: tuple[int, ...], action: str) -> None:
    case, order = convicted(options=RerunOptions(rejected_action=action))
    assert (order.remedy, order.exit_code) == (Remedy.STOP, 69)
    case.restarted()
    order = case.found(*ranks)
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, PERSISTENT, "GPU-b")
    assert order.reason == "GPU-b is still in use"


@pytest.mark.parametrize("ranks", [(1,), ()])
def test_without_the_convicted_device_the_step_is_looked_into_anew(ranks: tuple[int, ...]) -> None:
    case, _ = convicted()
    case.restarted(*SPARED)
    assert case.found(*ranks).remedy is Remedy.RERUN
    order = case.reran(*ranks)
    if ranks:
        assert (order.verdict, order.device) == (DATA, "")
        assert order.reason == "rejected on several devices: GPU-b, GPU-s"


def test_a_first_run_alone_is_no_evidence_against_another_device() -> None:
    case, _ = convicted()
    case.restarted(*SPARED)
    case.found(1)
    order = case.clean()
    assert (order.verdict, order.device) == (Verdict.TRANSIENT, "GPU-s")
    assert case.machine.records()[-1]["rejected_on"] == ["GPU-b"]


def test_another_rank_on_another_device_is_no_conviction_of_the_first() -> None:
    case, _ = convicted()
    case.restarted()
    order = case.found(2)
    assert (order.remedy, order.device) == (Remedy.STOP, "")
    assert order.verdict is not PERSISTENT


def test_what_was_transient_and_comes_back_in_a_replay_is_not_rerun_again() -> None:
    case = Case()
    case.found(1)
    assert case.clean().verdict is Verdict.TRANSIENT
    case.restarted()
    order = case.found(1, means=Means({1: 2}))
    assert (order.remedy, order.pairs, order.verdict) == (Remedy.SWAP, ((1, 2),), None)
    order = case.machine.handle(Swapped((2,)), 4.0)
    assert (order.verdict, order.reason) == (DATA, "rejected on several devices: GPU-b, GPU-c")


@pytest.mark.parametrize(("since", "verdict", "culprit"), [(20, PERSISTENT, "GPU-b"), (2, INCONCLUSIVE, "")])
def test_a_step_that_passes_on_a_spare_convicts_the_device_unless_the_copy_was_in_question(
    since: int, verdict: Verdict, culprit: str
) -> None:
    case = Case(
        loaded=Loaded(5 - since if since < 5 else 0, "local", "old"), options=RerunOptions(suspect_steps=4)
    )
    case.found(1, means=SPARE)
    order = case.reran(1)
    assert (order.remedy, order.device, order.exit_code) == (Remedy.SPARE, "GPU-b", 69)
    case.restarted(*SPARED)
    case.machine.handle(Loaded(4, "memory", "new"), 3.0)
    order = passed(case)
    assert (order.verdict, order.device) == (verdict, culprit)


def test_a_swap_that_is_rejected_on_a_third_rank_convicts_nobody() -> None:
    case = Case()
    case.found(1, means=Means({1: 2}))
    case.reran(1)
    order = case.machine.handle(Swapped((0,)), 3.0)
    assert (order.verdict, order.device) == (INCONCLUSIVE, "")
    assert "not deterministic" in order.reason
    assert case.results[-2].endswith("rejected on rank 0")


def test_only_ranks_that_are_rejected_each_time_are_accused() -> None:
    case = Case()
    case.found(1, 2, means=Means({1: 0, 2: 0}))
    order = case.reran(1)
    assert (order.remedy, order.pairs) == (Remedy.SWAP, ((1, 0),)), "rank 2 was well the second time"
    case = Case()
    case.found(1, means=Means({1: 2, 2: 1}))
    order = case.reran(1, 2)
    assert (order.remedy, order.pairs) == (Remedy.SWAP, ((1, 2),)), "rank 2 was well the first time"
    assert case.machine.records()[-1]["rejected_on"] == ["GPU-b"]


def test_nothing_is_spent_on_a_fault_of_which_nobody_knows_the_rank() -> None:
    case = Case()
    case.found(means=SPARE)
    order = case.reran(0, 1, 2)
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, INCONCLUSIVE, "")
    case = rejected_twice(SPARE, 1)
    case.restarted(*SPARED)
    assert case.found(means=SPARE).remedy is Remedy.RERUN
    order = case.reran(0, 1, 2)
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, INCONCLUSIVE, "")


def test_nothing_is_spent_where_two_devices_compute_the_same() -> None:
    case = Case()
    case.found(0, 1, means=Means({0: 2, 1: 0}, spare=True))
    order = case.reran(0, 1)
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, DATA, "")
    assert order.reason == "rejected on several devices: GPU-a, GPU-b"


def test_a_move_names_the_device_and_a_load_names_the_copy() -> None:
    assert Case(loaded=NEAR).found(1).device == ""
    case = Case(loaded=NEAR)
    case.found(1, means=COPY)
    order = case.reran(1)
    assert (order.remedy, order.place, order.device) == (Remedy.LOAD_OLDER, "local/p", "")
    case = Case(loaded=NEAR)
    case.found(1, means=SPARE)
    order = case.reran(1)
    assert (order.remedy, order.place, order.device) == (Remedy.SPARE, "", "GPU-b")
    assert "again on GPU-b" in order.reason


def test_another_copy_that_changes_nothing_leaves_the_device_in_question() -> None:
    case = rejected_twice(COPY, 1)
    case.restarted(loaded=OTHER)
    assert case.found(1, means=Means({1: 2})).remedy is Remedy.SWAP
    assert case.results[-2] == "load another copy: loss is nan in step 5 again"
    case = rejected_twice(COPY, 1)
    case.restarted(loaded=NEAR)
    order = case.found(1, means=Means({1: 2}))
    assert order.remedy is Remedy.SWAP, "the copy is as suspect as before, but a swap is still cheap"
    assert case.results[-2].endswith("; local/p was loaded again instead of another copy")


def test_two_clean_reruns_of_a_lone_rank_agree_or_tell_nothing() -> None:
    for ranks, others, verdict, why in (
        ((), (), Verdict.TRANSIENT, "two clean reruns with equal results"),
        ((), (0,), INCONCLUSIVE, "the result of rank 0 changed"),
        ((0,), (), INCONCLUSIVE, "the same step was accepted and rejected"),
    ):
        case = Case(devices=("GPU-a",))
        case.found(0)
        assert case.reran().remedy is Remedy.CONFIRM
        order = case.reran(*ranks, others=others)
        assert (order.verdict, why in order.reason) == (verdict, True)
        assert case.results[0] == "rerun the step: nothing was rejected"
        assert case.results[1].endswith("rejected on rank 0" if ranks else "nothing was rejected")


def test_an_order_says_what_was_found_where() -> None:
    for ranks, where in (((), "some rank"), ((1,), "rank 1"), ((0, 2), "ranks 0, 2")):
        assert Case().found(*ranks).reason == f"loss is nan in step 5 on {where}"


def test_no_batch_is_left_out_unless_it_was_given_up() -> None:
    case = Case(RerunOptions(rejected_action="skip_batch"))
    case.found(1)
    case.clean()
    assert not case.machine.skips(5)


def test_what_a_rerun_shows_is_written_down() -> None:
    for others, words in (
        ((), "with the same bits"),
        ((0,), "with the same bits"),
        ((1,), "with other bits"),
    ):
        case = Case()
        case.machine.handle(Found(5, "loss", "nan", (1,), ("0", "1", "2")), 1.0)
        digests = tuple(f"{rank} other" if rank in others else f"{rank}" for rank in range(3))
        case.machine.handle(Reran((1,), digests), 2.0)
        assert case.results[0] == f"rerun the step: rejected again on rank 1 {words}"
    case = Case()
    case.found(1)
    order = case.reran(2)
    assert order.reason == "rejected on different ranks each time; it is not deterministic"
    assert case.results[0] == "rerun the step: rejected on rank 2"


@pytest.mark.parametrize(("rejected", "result"), [((), "nothing was rejected"), ((2,), "rejected on rank 2")])
def test_what_a_swap_shows_is_written_down(rejected: tuple[int, ...], result: str) -> None:
    case = Case()
    case.found(1, means=Means({1: 2}))
    case.reran(1)
    case.machine.handle(Swapped(rejected), 3.0)
    assert case.results[1] == f"{Remedy.SWAP.value}: {result}"


@pytest.mark.parametrize(
    ("others", "verdict", "device"),
    [
        ((), Verdict.TRANSIENT, ""),
        ((3,), Verdict.TRANSIENT, "GPU-d"),
        ((1, 3), Verdict.TRANSIENT, "GPU-b"),
        ((0, 1, 3), INCONCLUSIVE, ""),
    ],
)
def test_ranks_that_compute_something_else_are_the_faulty_ones_if_they_are_at_most_half(
    others: tuple[int, ...], verdict: Verdict, device: str
) -> None:
    case = Case(devices=(*DEVICES, "GPU-d"))
    case.found()
    order = case.clean(others)
    assert (order.remedy, order.verdict, order.device) == (Remedy.CONTINUE, verdict, device)


def test_a_known_rank_is_not_cleared_by_a_witness_that_differs() -> None:
    case = Case(devices=(*DEVICES, "GPU-d", "GPU-e"))
    case.found(1)
    order = case.reran(others=(0,))
    assert (order.verdict, order.device) == (INCONCLUSIVE, "")
    assert order.reason.startswith("the result of rank 0 changed")


def test_a_device_that_nobody_knows_is_not_convicted() -> None:
    case = Case(RerunOptions(max_transients_per_day=1))
    case.found()
    order = case.clean()
    assert (order.remedy, order.verdict, order.device) == (Remedy.CONTINUE, Verdict.TRANSIENT, "")
