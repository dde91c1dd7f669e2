"""What a leader counts of what agents say: a join, a heartbeat, and times that come when nothing runs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from outlast.cluster.policy.ballots import founding
from outlast.cluster.policy.events import Heartbeat, HoldRanks, Log, Proposal, TellNodes, timing_for
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.leader_state import LeaderState
from outlast.cluster.policy.members import JobSpec, Joined
from outlast.cluster.policy.messages import EventBatch, NodeStatus, NumberedEvent, StatusReport
from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.stragglers.policy.options import StragglerOptions
from tests.cluster.policy.test_leader_state import (
    READY,
    begun,
    crash,
    joins,
    leader,
    member,
    proposed,
    saved,
    timed,
)

DEVICE = NodeStatus(5001, device="H100")


def generations(outcomes: Iterable[object]) -> list[int]:
    return [one.generation for one in outcomes if isinstance(one, Proposal)]


def slow_windows(state: LeaderState, windows: range, beat: NodeStatus = READY) -> list[object]:
    """Take times of two ranks, of which one takes twice as long, and a heartbeat after each."""
    said: list[object] = []
    for window in windows:
        for name, seconds in (("n0", 1.0), ("n1", 2.0)):
            said += timed(state, name, window, seconds, step=4)
            said += state.heard(f"{name}#1", beat, 0, 4.0 * window)
    return said


def test_a_node_that_joins_ready_is_taken_in_at_the_next_save() -> None:
    lead = JobController(JobSpec("run", "1", "-", 1, 2, 3), FaultToleranceOptions(), 0.0, 0.0)
    lead.handle(Joined(member("n0")), 0.0)
    state = LeaderState(member("n0"), lead, 0.0, "n0#1", 1)
    said: list[object] = [*joins(state, "n1")]
    for second in range(1, 40):
        for name in ("n0", "n1"):
            said += state.heard(f"{name}#1", READY, 0, float(second))
        said += state.lead.tick(float(second))
    assert generations(said)[-1] == 1
    joins(state, "n2", 40.0)
    said = [*saved(state, 20), *state.heard("n0#1", NodeStatus(5002), 1, 41.0)]
    said += state.heard("n1#1", READY, 1, 41.0)
    said += state.heard("n2#1", READY, 1, 41.0)
    assert generations(said)[-1] == 2
    assert proposed(said).active == ("n0", "n1", "n2")


@pytest.mark.parametrize("again", ["join", "heartbeat"])
def test_a_node_that_is_only_heard_of_has_not_ended_its_ranks(again: str) -> None:
    state, _ = begun()
    state.take("n1#1", EventBatch(0, (crash(1),)), 1.0)
    said: list[object] = [*state.heard("n0#1", NodeStatus(5002), 1, 1.1)]
    if again == "join":
        said += joins(state, "n1", 1.2, generation=1, session="n0#1")
    else:
        said += state.lead.handle(Heartbeat("n1", "1", READY), 1.2)
    assert generations(said) == []
    assert generations(state.take("n1#1", StatusReport(2, READY), 1.3)) == [2]


def test_a_leader_keeps_the_plan_that_it_has_written() -> None:
    state = leader()
    proposal = proposed([*joins(state, "n1"), *state.heard("n0#1", READY, 0, 0.0)])
    before = founding("n0#1").record
    assert before is not None
    assert state.plan.of(state.record(proposal, before)) is proposal.plan


@pytest.mark.parametrize("status", [READY, DEVICE])
def test_heartbeats_do_not_begin_the_comparison_of_ranks_anew(status: NodeStatus) -> None:
    state, _ = begun(2, spares=1, stragglers=StragglerOptions(action="replace", window=4))
    said = slow_windows(state, range(1, 25), status)
    (log,) = (one for one in said if isinstance(one, Log))
    assert log.reason.startswith("rank 1 on n1 is slow, and no second sign says that its node is sick")


def test_a_product_is_not_asked_for_when_nothing_runs() -> None:
    state, _ = begun(2, spares=1, stragglers=StragglerOptions(action="replace", window=4))
    asks = next(
        window
        for window in range(1, 25)
        if any(isinstance(one, TellNodes) for one in slow_windows(state, range(window, window + 1)))
    )
    state, _ = begun(2, spares=1, stragglers=StragglerOptions(action="replace", window=4))
    slow_windows(state, range(1, asks))
    state.take("n1#1", EventBatch(0, (crash(1),)), 4.0 * asks)
    said = slow_windows(state, range(asks, asks + 1))
    assert [one for one in said if isinstance(one, Log | TellNodes)] == []


def test_ranks_are_held_before_a_failing_node_is_replaced_and_let_go_when_it_is_lost() -> None:
    state, _ = begun(2, spares=1)
    fault = Fault(FaultKind.FAILING, "n1", 1, 1, 5, "its disk fails", "x")
    said = state.take("n1#1", EventBatch(0, (NumberedEvent(1, 1, fault),)), 1.0)
    assert [one.over for one in said if isinstance(one, HoldRanks)] == [False]


def test_an_agent_of_a_job_with_a_short_patience_is_asked_twice_in_it() -> None:
    assert [timing_for(3, timeout).interval for timeout in (0.4, 1.0, 60.0)] == [0.2, 0.5, 0.5]


def test_a_stop_that_a_node_of_a_running_job_brings_along_ends_it() -> None:
    state, _ = begun()
    joins(state, "n1", 1.0, generation=1, session="n0#1", asked=15)
    assert state.lead.ending is not None
    assert state.lead.ending.exit_code == 143
    assert member("n1").name in state.lead.members()
