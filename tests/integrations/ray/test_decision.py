"""Agents of a Ray job are started, started again and ended as they should be, whatever happens to them."""

from __future__ import annotations

import math

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


def running(terms: Terms = TERMS) -> RayJob:
    job = RayJob(terms)
    assert job.begin(0.0) == [Place(bundle) for bundle in range(terms.bundles)]
    for bundle in range(terms.bundles):
        assert job.handle(Placed(bundle), 0.0) == [Start(bundle, bundle, 0)]
    return job


def test_the_first_bundle_with_a_node_founds_the_job() -> None:
    job = RayJob(TERMS)
    job.begin(0.0)
    assert job.handle(Placed(2), 1.0) == [Start(2, 0, 2)]
    assert job.handle(Placed(0), 2.0) == [Start(0, 1, 2)]


def test_a_lost_node_is_replaced_at_once_and_joins_at_one_that_runs() -> None:
    job = running()
    assert job.handle(Ended(0, None), 5.0) == [Place(0)]
    assert job.handle(Placed(0), 90.0) == [Start(0, 3, 1)]


def test_a_failure_is_tried_again_later_each_time() -> None:
    job = running()
    assert job.handle(Ended(1, 1), 5.0) == []
    assert job.deadline() == 5.0 + FIRST_DELAY
    assert job.tick(5.0) == []
    assert job.tick(15.0) == [Place(1)]
    job.handle(Placed(1), 16.0)
    job.handle(Ended(1, 1), 17.0)
    assert job.deadline() == 17.0 + 2 * FIRST_DELAY


def test_a_bundle_that_keeps_failing_is_one_node_less() -> None:
    job = running()
    for _ in range(TERMS.restarts):
        job.handle(Ended(1, 1), 0.0)
        job.tick(job.deadline())
        job.handle(Placed(1), 100.0)
    assert job.handle(Ended(1, 1), 100.0) == []
    assert job.deadline() == math.inf
    orders = job.handle(Ended(2, ExitCode.RUN_FOLDER_UNUSABLE), 100.0)
    assert orders == [Stop(0)]
    assert job.handle(Ended(0, 143), 110.0) == [
        Finish(ExitCode.RUN_FOLDER_UNUSABLE, "1 of 3 bundles are left, 2 are needed")
    ]


def test_a_long_run_is_no_failure_in_a_row() -> None:
    job, now = running(), 0.0
    for _ in range(20):
        now += HEALTHY
        job.handle(Ended(1, 1), now)
        assert job.deadline() == now + FIRST_DELAY
        now = job.deadline()
        assert job.tick(now) == [Place(1)]
        job.handle(Placed(1), now)


def test_when_none_runs_the_job_begins_anew() -> None:
    job = running()
    for bundle in range(3):
        job.handle(Ended(bundle, 1), 0.0)
    assert job.tick(FIRST_DELAY) == [Place(0), Place(1), Place(2)]
    assert job.handle(Placed(1), 11.0) == [Start(1, 0, 1)]
    assert job.handle(Placed(0), 11.0) == [Start(0, 1, 1)]


def test_a_final_exit_code_ends_all() -> None:
    for code in FINAL:
        job = running()
        assert job.handle(Ended(1, code), 5.0) == [Stop(0), Stop(2)]
        assert job.deadline() == 5.0 + TERMS.lead
        assert job.handle(Ended(0, 143), 6.0) == []
        assert job.handle(Ended(2, 0), 7.0) == [Finish(code, f"bundle 1: exit code {code} is final")]


def test_agents_that_do_not_end_are_not_waited_for_beyond_the_lead() -> None:
    job = running()
    job.handle(Ended(1, 93), 5.0)
    assert job.tick(64.9) == []
    assert [type(order) for order in job.tick(65.0)] == [Finish]


def test_the_job_is_done_when_the_fewest_nodes_are_and_the_rest_may_finish() -> None:
    job = running()
    assert job.handle(Ended(2, 0), 5.0) == []
    assert job.handle(Ended(0, 0), 5.0) == []
    assert job.handle(Ended(1, 1), 6.0) == [Finish(0, "2 agents finished")]


def test_a_notice_reaches_every_agent() -> None:
    job = running()
    assert job.handle(Notice(15), 5.0) == [Stop(0), Stop(1), Stop(2)]
    assert job.handle(Notice(15), 6.0) == []
    job.handle(Ended(0, 0), 7.0)
    job.handle(Ended(1, 0), 7.0)
    assert job.handle(Ended(2, 0), 7.0) == [Finish(143, "signal 15 came")]


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
