"""Agents of a Ray job are started, started again and ended as they should be, whatever happens to them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import ExitCode
from outlast.integrations.kubernetes.manifest import FINAL
from outlast.integrations.ray.decision import (
    FIRST_DELAY,
    HEALTHY,
    Ended,
    Finish,
    Notice,
    Order,
    Place,
    Placed,
    RayJob,
    Start,
    Stop,
    Terms,
)

TERMS = Terms(bundles=3, fewest=2, restarts=2, lead=60.0)
TICK = "tick"
Turn = tuple[float, Placed | Ended | Notice | str, list[Order]]  # when, what happens, what is ordered
ALL_FAILED: list[Turn] = [(0.0, Ended(bundle, 1), []) for bundle in range(3)]


def ends(code: int) -> Finish:
    return Finish(code, "any reason")


TURNS: dict[str, list[Turn]] = {
    "a lost node is replaced": [
        (5.0, Ended(0, None), [Place(0)]),
        (90.0, Placed(0), [Start(0, 3, 1)]),  # it joins at one that runs
    ],
    "a failure is tried again later": [
        (5.0, Ended(1, 1), []),
        (5.0, TICK, []),
        (5.0 + FIRST_DELAY, TICK, [Place(1)]),
        (16.0, Placed(1), [Start(1, 3, 0)]),
        (17.0, Ended(1, 1), []),
        (16.9 + 2 * FIRST_DELAY, TICK, []),
        (17.0 + 2 * FIRST_DELAY, TICK, [Place(1)]),
    ],
    "when none runs, the job begins anew": [
        *ALL_FAILED,
        (FIRST_DELAY, TICK, [Place(0), Place(1), Place(2)]),
        (11.0, Placed(1), [Start(1, 0, 1)]),
        (11.0, Placed(0), [Start(0, 1, 1)]),
    ],
    "agents do not hold it up beyond the lead": [
        (5.0, Ended(1, 93), [Stop(0), Stop(2)]),
        (64.9, TICK, []),
        (65.0, TICK, [ends(93)]),
    ],
    "the rest may finish": [(5.0, Ended(2, 0), []), (5.0, Ended(0, 0), []), (6.0, Ended(1, 1), [ends(0)])],
    "a notice reaches every agent": [
        (5.0, Notice(15), [Stop(0), Stop(1), Stop(2)]),
        (6.0, Notice(15), []),
        (7.0, Ended(0, 0), []),
        (7.0, Ended(1, 0), []),
        (7.0, Ended(2, 0), [ends(143)]),
    ],
    **{
        f"{code} is final": [
            (5.0, Ended(1, code), [Stop(0), Stop(2)]),
            (6.0, Ended(0, 143), []),
            (7.0, Ended(2, 0), [ends(code)]),
        ]
        for code in FINAL
    },
}


def running() -> RayJob:
    job = RayJob(TERMS)
    assert job.begin(0.0) == [Place(bundle) for bundle in range(TERMS.bundles)]
    for bundle in range(TERMS.bundles):
        assert job.handle(Placed(bundle), 0.0) == [Start(bundle, bundle, 0)]
    return job


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_agents_are_started_and_ended(turns: list[Turn]) -> None:
    job = running()
    for now, event, expected in turns:
        orders = job.tick(now) if isinstance(event, str) else job.handle(event, now)
        assert [ends(one.code) if isinstance(one, Finish) else one for one in orders] == expected, event


def test_the_first_bundle_with_a_node_founds_the_job() -> None:
    job = RayJob(TERMS)
    job.begin(0.0)
    assert job.handle(Placed(2), 1.0) == [Start(2, 0, 2)]
    assert job.handle(Placed(0), 2.0) == [Start(0, 1, 2)]


def test_a_bundle_that_keeps_failing_is_one_node_less() -> None:
    job = running()
    for _ in range(TERMS.restarts):
        job.handle(Ended(1, 1), 0.0)
        job.tick(job.deadline())
        job.handle(Placed(1), 100.0)
    assert job.handle(Ended(1, 1), 100.0) == []
    assert job.deadline() == math.inf
    assert job.handle(Ended(2, ExitCode.RUN_FOLDER_UNUSABLE), 100.0) == [Stop(0)]
    (order,) = job.handle(Ended(0, 143), 110.0)
    assert isinstance(order, Finish)
    assert order.code == ExitCode.RUN_FOLDER_UNUSABLE


def test_a_long_run_is_no_failure_in_a_row() -> None:
    job, now = running(), 0.0
    for _ in range(20):
        now += HEALTHY
        job.handle(Ended(1, 1), now)
        assert job.deadline() == now + FIRST_DELAY
        now = job.deadline()
        assert job.tick(now) == [Place(1)]
        job.handle(Placed(1), now)


EVENTS = st.lists(
    st.one_of(
        st.builds(Placed, st.integers(0, 2)),
        st.builds(Ended, st.integers(0, 2), st.sampled_from([None, 0, 1, 2, 64, 73, 93, 137])),
        st.just("tick"),
    ),
    max_size=80,
)


class Played:
    """A cluster that does what the machine orders, and looks whether that can be done."""

    def __init__(self) -> None:
        self.job, self.now = RayJob(TERMS), 0.0
        self.placing: set[int] = set()
        self.up: set[int] = set()
        self.finished = False
        self.follow(self.job.begin(self.now))

    def follow(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Place):
                assert order.bundle not in self.placing | self.up
                self.placing.add(order.bundle)
            elif isinstance(order, Start):
                self.placing.discard(order.bundle)
                founds = order.at == order.bundle and order.rank == 0 and not self.up
                assert founds or order.at in self.up
                self.up.add(order.bundle)
            elif isinstance(order, Stop):
                assert order.bundle in self.up
            self.finished = self.finished or isinstance(order, Finish)

    def happens(self, event: Placed | Ended) -> None:
        if event.bundle not in (self.placing if isinstance(event, Placed) else self.placing | self.up):
            return
        if isinstance(event, Ended):
            self.placing.discard(event.bundle)
            self.up.discard(event.bundle)
        self.follow(self.job.handle(event, self.now))

    def waits(self) -> None:
        deadline = self.job.deadline()
        self.now = deadline if self.now < deadline < math.inf else self.now + 1.0
        self.follow(self.job.tick(self.now))


@given(EVENTS)
@settings(max_examples=300)
def test_every_job_ends_and_none_knocks_where_nobody_is(events: list[Placed | Ended | str]) -> None:
    played = Played()
    for event in events:
        if not played.finished:
            _ = played.waits() if isinstance(event, str) else played.happens(event)
    for turn in range(60):
        if not played.finished:
            played.happens(Ended(turn % 3, 1)) if turn % 4 else played.waits()
    assert played.finished
