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
Event = tuple[Listing | None, float, str]  # a listing, or None for a tick; when; what follows


def waiting(*pids: int, now: float = 100.0) -> MemoryWait:
    """Return a wait whose first question has been asked."""
    one = MemoryWait(ANSWER)
    assert one.begin(pids, now) == [Ask(1)]
    return one


def follows(one: MemoryWait, orders: list[Order]) -> str:
    """Return "ask" and "note" for orders, and "start" where the next workers may."""
    words = ["ask" if isinstance(order, Ask) else "note" for order in orders]
    return " ".join([*words, *(["start"] if one.over else [])])


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([(Listing(1, (1, 2, 3)), 104.0, "start")], id="a first answer without them"),
        pytest.param([(Listing(1, (1_234_567,)), 100.0, "start")], id="pids of another namespace"),
        pytest.param(
            [
                (Listing(1, (7, 8, 9)), 100.01, ""),
                (None, 100.09, ""),
                (None, 100.11, "ask"),
                (Listing(2, (8,)), 100.22, "ask"),
                (Listing(3, (9,)), 103.01, "note start"),
            ],
            id="it is asked at an interval until none is listed",
        ),
        pytest.param(
            [(Listing(1, (7,)), 109.0, "ask"), (Listing(2), 109.01, "start")],
            id="a question from before the end of a process is followed by another at once",
        ),
        pytest.param([(Listing(1, (7,)), 101.0, "ask"), (Listing(2), 101.49, "start")], id="a short wait"),
        pytest.param([(Listing(1, (7,)), 101.0, "ask"), (Listing(2), 101.5, "note start")], id="a long wait"),
        pytest.param([(Listing(1, (7,)), 100.2, "ask"), (Listing(1), 100.3, "")], id="an older answer"),
        pytest.param([(None, 104.99, ""), (None, 105.0, "note start")], id="no answer"),
        pytest.param(
            [(Listing(1, (7,)), 103.0, "ask"), (None, 107.99, ""), (None, 108.0, "note start")],
            id="no further answer",
        ),
        pytest.param([(Listing(1, (), "lost"), 100.0, "note start")], id="a device cannot be read"),
        pytest.param(
            [(Listing(1, (7,), "lost"), 100.0, "")], id="a device cannot be read, another lists them"
        ),
        pytest.param([(None, 100.0 + PATIENCE, "note start")], id="the agent was stopped for the whole time"),
    ],
)
def test_a_wait(events: list[Event]) -> None:
    one = waiting(7, 8)
    for listing, now, expected in events:
        assert follows(one, one.tick(now) if listing is None else one.handle(listing, now)) == expected, now
    assert (one.deadline() == math.inf) is one.over


def test_without_a_process_nothing_is_asked() -> None:
    one = MemoryWait(ANSWER)
    assert (one.over, one.deadline(), one.tick(1e9), one.handle(Listing(0, (1,)), 1.0)) == (
        True,
        math.inf,
        [],
        [],
    )
    assert (one.begin([], 100.0), one.over) == ([], True)


def test_more_processes_that_end_meanwhile_are_waited_for_within_the_same_bound() -> None:
    one = waiting(7)
    one.handle(Listing(1, (7,)), 100.01)
    assert one.begin([8], 120.0) == []
    assert one.tick(120.0) == [Ask(2)]
    assert follows(one, one.handle(Listing(2, (8,)), 120.01)) == ""
    assert follows(one, one.tick(100.0 + PATIENCE)) == "note start"


def test_the_next_wait_has_a_bound_of_its_own() -> None:
    one = waiting(7)
    one.handle(Listing(1), 100.01)
    assert one.begin([8], 1000.0) == [Ask(2)]
    assert follows(one, one.handle(Listing(2, (7,)), 1000.01)) == "start", "7 belongs to the wait before"


def test_workers_start_anyway_when_no_collector_runs() -> None:
    one = waiting(7)
    assert follows(one, one.no_collector()) == "note start"
    assert one.no_collector() == []


@pytest.mark.parametrize("count", [1, 8, 9])
def test_workers_start_anyway_when_the_memory_is_never_freed_and_some_pids_are_named(count: int) -> None:
    pids = tuple(range(71, 71 + count))
    one = waiting(*pids)
    one.handle(Listing(1, pids), 100.0)
    while not isinstance(order := one.tick(now := one.deadline())[0], Say):
        assert one.handle(Listing(order.number, pids), now) == []
    assert sum(str(pid) in order.text for pid in pids) == min(count, 8)
    assert one.over


@pytest.mark.parametrize(("start_timeout", "most"), [(30.0, 15.0), (99.0, 49.5), (1800.0, 50.0)])
def test_the_wait_ends_before_ranks_of_other_nodes_count_as_hung(start_timeout: float, most: float) -> None:
    one = MemoryWait(ANSWER)
    assert one.begin([7], 100.0, start_timeout) == [Ask(1)]
    assert one.handle(Listing(1, (7,)), 100.0 + most - 1) == [Ask(2)]
    assert one.deadline() == 100.0 + most
    assert one.tick(100.0 + most - 0.001) == []
    assert follows(one, one.tick(100.0 + most)) == "note start"


ANSWERS = st.tuples(
    st.floats(0.0, 20.0), st.booleans(), st.sets(st.integers(1, 4)), st.sampled_from(["", "lost"])
)


@given(st.lists(ANSWERS, max_size=60))
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
    with pytest.raises(ValueError, match=r"found$"):
        listing_of(line)
