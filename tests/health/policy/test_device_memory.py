"""When the next workers may start: what NVML lists, what does not answer, what takes too long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.health.policy.device_memory import (
    LISTING,
    PATIENCE,
    Ask,
    Listing,
    MemoryWait,
    Order,
    Say,
    listing_of,
)

ANSWER = 5.0
ABOUT = "GPU memory of the workers before: "


def waiting(*pids: int, now: float = 100.0) -> MemoryWait:
    """Return a wait whose first question has been asked."""
    one = MemoryWait(ANSWER)
    assert one.begin(pids, now) == [Ask(1)]
    return one


def said(orders: list[Order]) -> str:
    (order,) = orders
    assert isinstance(order, Say)
    return order.text


def test_at_first_workers_may_start() -> None:
    one = MemoryWait(ANSWER)
    assert one.over
    assert one.deadline() == math.inf
    assert one.tick(1e9) == []
    assert one.handle(Listing(0, (1,)), 1.0) == []


def test_without_a_process_nothing_is_asked() -> None:
    one = MemoryWait(ANSWER)
    assert one.begin([], 100.0) == []
    assert one.over


def test_a_first_answer_without_the_processes_is_enough_and_not_worth_a_word() -> None:
    one = waiting(7, 8)
    assert not one.over
    assert one.handle(Listing(1, (1, 2, 3)), 104.0) == []
    assert one.over
    assert one.deadline() == math.inf


def test_pids_of_another_namespace_match_none() -> None:
    one = waiting(7, 8)
    assert one.handle(Listing(1, (1_234_567, 1_234_568)), 100.0) == []
    assert one.over


def test_the_collector_is_asked_again_at_an_interval_until_none_is_listed() -> None:
    one = waiting(7, 8)
    assert one.handle(Listing(1, (7, 8, 9)), 100.01) == []
    assert one.deadline() == pytest.approx(100.1)
    assert one.tick(100.09) == []
    assert one.tick(one.deadline()) == [Ask(2)]
    assert one.handle(Listing(2, (8,)), 100.2) == [Ask(3)]
    assert not one.over
    assert said(one.handle(Listing(3, (9,)), 103.01)) == ABOUT + (
        "NVML listed ended processes for 3.0 s; the next workers start now"
    )
    assert one.over


def test_a_question_from_before_the_end_of_a_process_is_followed_by_another_at_once() -> None:
    one = waiting(7)
    assert one.handle(Listing(1, (7,)), 109.0) == [Ask(2)], "the agent has killed for 9 s"
    assert one.handle(Listing(2), 109.01) == [], "one more answer is no wait worth a word"
    assert one.over


@pytest.mark.parametrize(("waited", "words"), [(0.49, 0), (0.5, 1)])
def test_half_a_second_of_waiting_is_worth_a_word(waited: float, words: int) -> None:
    one = waiting(7)
    one.handle(Listing(1, (7,)), 101.0)
    assert len(one.handle(Listing(2), 101.0 + waited)) == words


def test_an_answer_to_an_older_question_says_nothing() -> None:
    one = waiting(7)
    one.handle(Listing(1, (7,)), 100.2)
    assert one.handle(Listing(1), 100.3) == []
    assert not one.over


def test_more_processes_that_end_meanwhile_are_waited_for_within_the_same_bound() -> None:
    one = waiting(7)
    one.handle(Listing(1, (7,)), 100.01)
    assert one.begin([8], 120.0) == []
    assert one.tick(120.0) == [Ask(2)]
    assert one.handle(Listing(2, (8,)), 120.01) == []
    assert not one.over
    assert "still lists process 8" in said(one.tick(100.0 + PATIENCE))


def test_the_next_wait_has_a_bound_of_its_own() -> None:
    one = waiting(7)
    one.handle(Listing(1), 100.01)
    assert one.begin([8], 1000.0) == [Ask(2)]
    assert one.handle(Listing(2, (7,)), 1000.01) == [], "7 belongs to the wait before"
    assert one.over


def test_workers_start_anyway_when_the_collector_does_not_answer() -> None:
    one = waiting(7)
    assert one.deadline() == 105.0
    assert one.tick(104.99) == []
    assert said(one.tick(105.0)) == (
        f"{ABOUT}the collector has not answered for 5.0 s; the next workers start anyway, and may find"
        " too little memory"
    )
    assert one.over


def test_workers_start_anyway_when_the_collector_stops_answering() -> None:
    one = waiting(7)
    assert one.handle(Listing(1, (7,)), 103.0) == [Ask(2)]
    assert one.tick(107.99) == []
    assert "has not answered for 5.0 s" in said(one.tick(108.0))


def test_workers_start_anyway_when_no_collector_runs() -> None:
    one = waiting(7)
    assert "no collector runs that could ask the driver; the next" in said(one.no_collector())
    assert one.over
    assert one.no_collector() == []


def test_workers_start_anyway_when_a_device_cannot_be_read() -> None:
    one = waiting(7)
    words = said(one.handle(Listing(1, (), "device 3, processes: GPU is lost"), 100.0))
    assert "before: device 3, processes: GPU is lost; the next workers start anyway" in words
    assert one.over


def test_a_device_that_cannot_be_read_does_not_hide_what_is_listed() -> None:
    one = waiting(7)
    assert one.handle(Listing(1, (7,), "device 3, processes: GPU is lost"), 100.0) == []
    assert not one.over


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (1, "process 0"),
        (2, "processes 0, 1"),
        (8, "processes 0, 1, 2, 3, 4, 5, 6, 7"),
        (9, "processes 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
    ],
)
def test_workers_start_anyway_when_the_memory_is_never_freed(count: int, named: str) -> None:
    pids = tuple(range(count))
    one = waiting(*pids)
    one.handle(Listing(1, pids), 100.0)
    while not isinstance(order := one.tick(now := one.deadline())[0], Say):
        assert one.handle(Listing(order.number, pids), now) == []
    assert order.text == (
        f"{ABOUT}NVML still lists {named} 50 s after they ended; the next workers start anyway, and may find"
        " too little memory"
    )
    assert one.over


def test_workers_start_anyway_when_the_agent_was_stopped_for_the_whole_time() -> None:
    assert "NVML was not read 50 s after they ended" in said(waiting(7).tick(100.0 + PATIENCE))


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 20.0), st.booleans(), st.sets(st.integers(1, 4)), st.sampled_from(["", "lost"])
        ),
        max_size=60,
    )
)
def test_whatever_is_answered_every_wait_ends_in_time_and_is_never_silent_about_it(
    answers: list[tuple[float, bool, set[int], str]],
) -> None:
    one, now, number, listed = MemoryWait(ANSWER), 0.0, 1, set[int]()
    one.begin({1, 2}, now)
    orders: list[Order] = []
    for passed, current, pids, problem in answers:
        if one.over:
            break
        now += passed
        listed = pids
        orders = one.handle(Listing(number - (not current), tuple(pids), problem), now) or one.tick(now)
        number += sum(isinstance(order, Ask) for order in orders)
        assert one.over or now < PATIENCE
        if one.over and not orders:
            assert not {1, 2} & listed, "it has started early and said nothing"
    if not one.over:
        assert one.deadline() <= PATIENCE


def test_a_listing_survives_the_pipe() -> None:
    one = Listing(3, (1, 2), "why")
    line = one.to_line().encode()
    assert line.startswith(LISTING)
    assert listing_of(line) == one


@pytest.mark.parametrize("line", [b"", b"[1]", b"{}", b'{"listing":7}', b'{"listing":{"number":1}}', b'{"li'])
def test_a_line_without_a_listing_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="a listing of processes expected"):
        listing_of(line)


def test_the_refusal_of_a_line_quotes_its_first_80_bytes() -> None:
    with pytest.raises(ValueError, match=r"^a listing of processes expected, b'x{80}' found$"):
        listing_of(b"x" * 200)


@pytest.mark.parametrize(("start_timeout", "most"), [(30.0, 15.0), (99.0, 49.5), (1800.0, 50.0)])
def test_the_wait_ends_before_ranks_of_other_nodes_count_as_hung(start_timeout: float, most: float) -> None:
    one = MemoryWait(ANSWER)
    assert one.begin([7], 100.0, start_timeout) == [Ask(1)]
    assert one.handle(Listing(1, (7,)), 100.0 + most - 1) == [Ask(2)]
    assert one.deadline() == 100.0 + most
    assert one.tick(100.0 + most - 0.001) == []
    assert f"still lists process 7 {most:.0f} s after they ended" in said(one.tick(100.0 + most))
    assert one.over
