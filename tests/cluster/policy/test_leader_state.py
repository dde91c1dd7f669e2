"""What a leader keeps of each agent: joins, heartbeats, events, lost connections, votes and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from outlast.agreement.policy.steps import Want
from outlast.cluster.policy.ballots import founding
from outlast.cluster.policy.events import (
    Heartbeat,
    HoldRanks,
    Judged,
    LeadOutcome,
    Log,
    NodeEvent,
    Proposal,
    QuiesceNodes,
    SendMessage,
    TellNodes,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.leader_state import LeaderState
from outlast.cluster.policy.members import Joined
from outlast.cluster.policy.messages import (
    AgentsRestarted,
    AppendEntries,
    Ending,
    EventBatch,
    Join,
    JoinAccepted,
    NodeStatus,
    NumberedEvent,
    Quiesce,
    Record,
    RecordMissing,
    StatusReport,
    StepOrder,
    StepProposal,
    StepReport,
)
from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import CommitSeen
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import LAST_MICRO_STEP, MICRO_STEP, Kind
from tests.cluster.builders import READY, member, of_kind, only, spec


def leader(nodes: int = 2, spares: int = 0, stragglers: StragglerOptions | None = None) -> LeaderState:
    """Return what n0 keeps, which leads a job that has not begun."""
    lead = JobController(spec(nodes, nodes, spares), FaultToleranceOptions(), 0.0, 0.0, stragglers)
    lead.handle(Joined(member("n0")), 0.0)
    return LeaderState(member("n0"), lead, 0.0, "n0#1", 1)


def joins(
    state: LeaderState, name: str, now: float = 0.0, **other: object
) -> list[SendMessage | LeadOutcome]:
    join = replace(Join(member(name), 0, 0, status=READY), **other)  # type: ignore[arg-type]
    return state.join(f"{name}#{join.member.incarnation}", join, now)


def proposed(outcomes: Iterable[object]) -> Proposal:
    return of_kind(Proposal, outcomes)[-1]


def begun(
    nodes: int = 2, spares: int = 0, stragglers: StragglerOptions | None = None
) -> tuple[LeaderState, Record]:
    """Return what n0 keeps of a job that runs, and the record of its generation."""
    state = leader(nodes, spares, stragglers)
    said: list[object] = []
    for number in range(1, nodes + spares):
        said += joins(state, f"n{number}")
    said += state.heard("n0#1", READY, 0, 0.0)
    before = founding("n0#1").record
    assert before is not None
    record = replace(state.record(proposed(said), before), term=1, version=2)
    assert record.generation == 1
    return state, record


def heartbeat(record: Record) -> AppendEntries:
    return AppendEntries(1, 8.0, record.key, True, 2.5, "1", 7.0, record)


def answers(outcomes: Iterable[object]) -> dict[str, object]:
    return {one.to: one.message for one in outcomes if isinstance(one, SendMessage)}


def test_a_node_that_was_asked_to_stop_before_it_joined_ends_the_job() -> None:
    state = leader(3)
    joins(state, "n1", asked=0)
    assert state.lead.ending is None
    joins(state, "n2", asked=15)
    assert state.lead.ending is not None


def test_the_first_generation_is_younger_than_any_that_a_node_knows() -> None:
    state = leader(3)
    joins(state, "n1", after=6)
    assert state.lead.generation == 7


def test_an_agent_of_the_job_before_learns_who_has_started_again_and_is_waited_for() -> None:
    state = leader(3)
    said = joins(state, "n1", 1.0, generation=4)
    assert said == [SendMessage("n1#1", AgentsRestarted(("n0#1",)))]
    assert joins(state, "n2", 10.9) == [], "the job before may still be there"
    assert state.lead.members().keys() == {"n0"}
    assert answers(joins(state, "n2", 11.0)) == {"n2#1": JoinAccepted()}
    again = joins(state, "n1", 12.0, generation=4)
    assert again == [SendMessage("n1#1", AgentsRestarted(("n0#1", "n2#1")))]
    assert joins(state, "n3", 21.9) == [], "each sign of it counts"


def test_once_the_agent_of_the_job_before_has_started_again_nothing_is_waited_for() -> None:
    state = leader(4)
    joins(state, "n1", 1.0, generation=4)
    joins(state, "n2", 1.0, generation=4)
    assert joins(state, "n1", 2.0, member=member("n1", "2")) == [], "n2 is still there"
    assert answers(joins(state, "n2", 3.0, member=member("n2", "2"))) == {"n2#2": JoinAccepted()}


def test_an_agent_that_missed_that_its_job_is_over_learns_which_agents_are_here() -> None:
    state, _ = begun()
    said = joins(state, "n5", generation=1, session="n5#1")
    assert said == [SendMessage("n5#1", AgentsRestarted(("n0#1", "n1#1")))]
    assert answers(joins(state, "n1", generation=1, session="n0#1")) == {"n1#1": JoinAccepted()}


def test_a_voter_gets_the_whole_record_until_it_has_said_that_it_has_it() -> None:
    state, record = begun()
    assert "n1#1" not in record.voters
    record = replace(record, quorums=(frozenset({"n0#1", "n1#1"}),))
    ping = heartbeat(record)
    whole = replace(ping, session="n0#1")
    assert state.heartbeat("n1#1", ping) == whole
    state.reported("n1#1", (1, 1))
    assert state.heartbeat("n1#1", ping) == whole
    state.reported("n1#1", record.key)
    assert state.heartbeat("n1#1", ping) == replace(whole, record=None)
    assert state.take("n1#1", RecordMissing(), 1.0) == []
    assert state.heartbeat("n1#1", ping) == whole


def test_an_agent_without_a_vote_gets_what_the_record_means_for_its_node() -> None:
    state, record = begun(2, spares=1)
    record = replace(record, quorums=(frozenset({"n0#1"}),))
    for name, seated in (("n1", True), ("n2", False)):
        ping = state.heartbeat(f"{name}#1", heartbeat(record))
        only = frozenset({f"{name}#1"})
        assert ping.record == replace(record, plan="", active=only if seated else frozenset(), agents=only)
        assert not isinstance(ping.assignment, Ending)
        assert ping.assignment is not None
        assert (ping.assignment.generation, ping.assignment.seated) == (1, seated)
        assert ping.assignment.node_rank == (1 if seated else 0)
        state.reported(f"{name}#1", record.key)
        assert state.heartbeat(f"{name}#1", heartbeat(record)).assignment is None


def crash(number: int, generation: int = 1) -> NumberedEvent:
    return NumberedEvent(number, generation, Fault(FaultKind.CRASH, "n1", 1, generation, 5, "signal 9", "x"))


def test_each_event_of_an_agent_is_taken_once_and_in_order() -> None:
    state, record = begun()
    assert state.take("n1#1", EventBatch(1, (crash(2),)), 1.0) == [], "the first one is missing"
    assert state.lead.generation == 1
    said = state.take("n1#1", EventBatch(0, (crash(1),)), 1.0)
    assert any(isinstance(one, QuiesceNodes) for one in said)
    assert state.heartbeat("n1#1", heartbeat(record)).taken == 1
    assert state.take("n1#1", EventBatch(0, (crash(1),)), 1.1) == []
    assert state.take("n1#1", EventBatch(0, (crash(1), crash(2))), 1.2) != [], "the second is new"
    assert state.heartbeat("n1#1", heartbeat(record)).taken == 2
    assert state.take("n1#1", EventBatch(3, (crash(4),)), 1.3) == []
    assert state.heartbeat("n0#1", heartbeat(record)).taken == 0


def test_a_node_that_runs_nothing_before_the_next_generation_answers_for_the_one_that_ended() -> None:
    state, _ = begun()
    state.take("n1#1", EventBatch(0, (crash(1),)), 1.0)
    state.heard("n0#1", replace(READY, store=5002), 1, 1.1)
    early = state.take("n1#1", StatusReport(1, READY), 1.2)
    assert not any(isinstance(one, Proposal) for one in early)
    assert proposed(state.take("n1#1", StatusReport(2, READY), 1.3)).generation == 2


def test_an_agent_whose_connection_is_not_made_anew_is_lost() -> None:
    state, _ = begun()
    gone = {"n1#1": (0.0, "it reset the connection")}
    assert state.broken(gone, 0.29) == []
    assert gone.keys() == {"n1#1"}
    lost = only(Judged, state.broken(gone, 0.3)).fault
    assert lost is not None
    assert (lost.kind, lost.node) == (FaultKind.LOST, "n1")
    assert gone == {}
    assert state.lead.members().keys() == {"n0"}


@pytest.mark.parametrize("agent", ["n1#0", "n9#1"])
def test_the_end_of_an_agent_that_is_no_member_loses_nothing(agent: str) -> None:
    state, _ = begun()
    gone = {agent: (0.0, "gone"), "n0#0": (0.0, "gone")}
    assert state.broken(gone, 5.0) == []
    assert gone == {}
    assert state.lead.members().keys() == {"n0", "n1"}


def test_agents_that_end_with_their_job_are_not_lost() -> None:
    state, _ = begun()
    joins(state, "n1", session="n0#1", generation=1, asked=15)
    gone = {"n1#1": (0.0, "gone")}
    assert state.broken(gone, 5.0) == []
    assert gone.keys() == {"n1#1"}


@pytest.mark.parametrize(
    ("nodes", "spares", "voters"),
    [
        (1, 0, "n0"),
        (2, 0, "n0"),
        (3, 0, "n0 n1 n2"),
        (2, 1, "n0 n1 n2"),
        (4, 0, "n0 n1 n2"),
        (7, 2, "n0 n1 n2 n3 n4"),
    ],
)
def test_an_odd_number_of_nodes_votes_five_at_most_and_those_with_ranks_first(
    nodes: int, spares: int, voters: str
) -> None:
    _, record = begun(nodes, spares)
    assert record.quorums == (frozenset(f"{name}#1" for name in voters.split()),)
    assert record.active == {f"n{number}#1" for number in range(nodes)}
    assert record.agents == {f"n{number}#1" for number in range(nodes + spares)}


def test_those_that_vote_go_on_voting_while_they_are_there() -> None:
    state = leader(7)
    said: list[object] = []
    for number in range(1, 7):
        said += joins(state, f"n{number}")
    said += state.heard("n0#1", READY, 0, 0.0)
    voters = frozenset({"n5#1", "n6#1", "n9#1"})
    before = Record(1, 1, 1, frozenset(), frozenset(), "", (frozenset({"n0#1"}), voters))
    record = state.record(proposed(said), before)
    assert record.quorums == (frozenset({"n0#1", "n5#1", "n6#1", "n1#1", "n2#1"}),)
    waiting = replace(proposed(said), generation=0)
    assert state.record(waiting, before).quorums == (voters,), "nothing has begun, so no vote is handed on"


def test_a_plan_names_nodes_of_which_one_may_have_left_since() -> None:
    state, record = begun(3)
    proposal = Proposal(2, ("n0", "n8"), ("n0", "n1"), state.plan.of(record))
    assert state.record(proposal, record).active == {"n0#1"}


REPORT = StepReport(1, 1, serial=1, round=1, step=5, session="n0#1")


def told(outcomes: Iterable[object]) -> list[TellNodes]:
    return of_kind(TellNodes, outcomes)


def test_ranks_are_held_after_a_step_that_none_of_them_has_passed() -> None:
    state, _ = begun()
    asks = TellNodes(("n0", "n1"), StepOrder(1, 1, "n0#1", None))
    assert state.hold(False, 1.0) == [asks]
    assert state.take("n0#1", REPORT, 1.1) == [asks], "n1 has not said how its ranks stand"
    (tells,) = told(state.take("n1#1", REPORT, 1.2))
    assert tells.names == ("n0", "n1")
    assert tells.order.said is not None
    assert tells.order.said.step > 5
    assert state.take("n1#1", replace(REPORT, serial=2), 1.3) == [], "nothing is new"


def failing(said: list[LeadOutcome]) -> list[str]:
    """Return the nodes that are replaced."""
    return [one.action.exclude for one in of_kind(Judged, said)]


def saved(state: LeaderState, step: int) -> list[LeadOutcome]:
    return state.lead.handle(NodeEvent("n0", 1, CommitSeen(step, "local")), 6.0)


def about_to_fail() -> LeaderState:
    """Return what is kept of two nodes and a spare, one of which fails at step 5; ranks are to be held."""
    state, _ = begun(2, spares=1)
    fault = Fault(FaultKind.FAILING, "n1", 1, 1, 5, "its disk fails", "x")
    assert HoldRanks() in state.take("n1#1", EventBatch(0, (NumberedEvent(1, 1, fault),)), 1.0)
    state.hold(False, 1.0)
    return state


def test_a_failing_node_is_replaced_after_the_save_on_which_all_ranks_have_agreed() -> None:
    state = about_to_fail()
    state.take("n0#1", REPORT, 1.1)
    (proposes,) = told(state.take("n1#1", REPORT, 1.2))
    answer = replace(REPORT, serial=2, answered=1, said=proposes.order.said)
    assert state.take("n0#1", answer, 1.3) == []
    (commits,) = told(state.take("n1#1", answer, 1.4))
    assert commits.order.said is not None
    assert failing(saved(state, commits.order.said.step - 1)) == []
    assert failing(saved(state, commits.order.said.step)) == ["n1"]


def test_a_new_leader_tells_all_nodes_what_one_of_them_was_told_before() -> None:
    state, _ = begun()
    committed = StepProposal(ticket=6, round=1, step=9, wants=int(Want.SAVE))
    (tells,) = told(state.take("n1#1", replace(REPORT, said=committed), 1.0))
    assert tells == TellNodes(("n0", "n1"), StepOrder(1, 1, "n0#1", committed))


def test_nodes_are_asked_again_while_something_is_awaited_of_them() -> None:
    state, _ = begun()
    assert state.steps_due(1.0, 0.5) == []
    first = state.hold(False, 1.0)
    assert state.steps_due(1.49, 0.5) == []
    assert state.steps_due(1.5, 0.5) == first
    assert state.steps_due(1.9, 0.5) == []
    assert state.steps_due(2.0, 0.5) == first


def test_an_agreement_ends_with_its_generation() -> None:
    state, _ = begun()
    state.hold(False, 1.0)
    state.take("n1#1", EventBatch(0, (crash(1),)), 1.1)
    assert state.steps_due(9.0, 0.5) == []
    assert state.hold(False, 9.0) == []
    assert state.take("n1#1", REPORT, 9.0) == []
    for name in ("n0", "n1"):
        state.heard(f"{name}#1", replace(READY, store=5002), 1, 9.1)
    assert state.steps_due(10.0, 0.5) == [], "nothing is asked of it yet"
    assert state.take("n1#1", REPORT, 10.0) == [], "that was the one before"
    (asks,) = told(state.hold(False, 10.0))
    assert asks.order.generation == 2


@pytest.mark.parametrize(
    ("sender", "other"),
    [
        ("n1#1", {"term": 2}),
        ("n1#1", {"session": "n5#1"}),
        ("n1#1", {"generation": 2}),
        ("n1#0", {}),
        ("n9#1", {}),
    ],
)
def test_a_report_for_another_leader_generation_or_job_counts_for_nothing(
    sender: str, other: dict[str, object]
) -> None:
    state, _ = begun()
    state.hold(False, 1.0)
    state.take("n0#1", REPORT, 1.1)
    assert state.take(sender, replace(REPORT, **other), 1.2) == []  # type: ignore[arg-type]
    assert told(state.take("n1#1", REPORT, 1.3)) != [], "n1 was still awaited"


def test_nothing_is_asked_of_ranks_when_nobody_wants_anything() -> None:
    state, _ = begun()
    assert state.hold(True, 1.0) == []
    assert state.steps_due(9.0, 0.5) == []
    assert state.take("n0#1", replace(REPORT, wants=int(Want.SAVE)), 9.1) != []


def timed(state: LeaderState, name: str, window: int, seconds: float, **sections: int) -> list[LeadOutcome]:
    """Take what the rank of a node measured; each section took it so many seconds, so many times."""
    times = tuple(
        SectionTimes(section, Kind.COMPUTE, count, seconds, seconds, seconds, count * seconds, 0.0)
        for section, count in sections.items()
    )
    report = TimingReport(1, (RankWindow(int(name[1:]), window, times),))
    return state.take(f"{name}#1", report, 4.0 * window)


def micro_steps(state: LeaderState, windows: range, slow: float) -> list[LeadOutcome]:
    return [
        one
        for window in windows
        for name, seconds in (("n0", 0.01), ("n1", 0.01), ("n2", slow))
        for one in timed(state, name, window, seconds, **{MICRO_STEP: 24, LAST_MICRO_STEP: 4})
    ]


def test_nodes_are_asked_for_the_shares_in_force_before_others_are_wanted() -> None:
    state, _ = begun(3, stragglers=StragglerOptions(action="rebalance", window=4))
    asks = TellNodes(("n0", "n1", "n2"), StepOrder(1, 1, "n0#1", None))
    assert told(micro_steps(state, range(1, 40), 0.02)) == [asks], (
        "asked once, and nothing while n2 is silent"
    )
    assert state.steps_due(200.0, 0.5) == [asks]


def test_a_new_leader_leaves_the_shares_of_a_rank_that_is_as_slow_as_before() -> None:
    state, _ = begun(3, stragglers=StragglerOptions(action="rebalance", window=4))
    micro_steps(state, range(1, 2), 0.02)
    divided = StepProposal(ticket=6, round=1, step=4, wants=int(Want.REBALANCE), slow=((2, 500),))
    for name in ("n0", "n1", "n2"):
        state.take(f"{name}#1", replace(REPORT, said=divided), 5.0)
    assert told(micro_steps(state, range(2, 30), 0.02)) == []


def test_all_ranks_compute_a_product_where_that_may_be_a_second_sign() -> None:
    state, _ = begun(2, spares=1, stragglers=StragglerOptions(action="replace", window=4))
    said = [
        one
        for window in range(1, 25)
        for name, seconds in (("n0", 1.0), ("n1", 2.0))
        for one in timed(state, name, window, seconds, step=4)
    ]
    assert "n1" in only(Log, said).reason
    assert told(said) == [TellNodes(("n0", "n1"), StepOrder(1, 1, "n0#1", None))]
    state.take("n0#1", REPORT, 100.0)
    (asks,) = told(state.take("n1#1", REPORT, 100.1))
    assert asks.order.said is not None
    assert Want(asks.order.said.wants) is Want.BENCHMARK


DEVICE = NodeStatus(5001, device="H100")


def generations(outcomes: Iterable[object]) -> list[int]:
    return [one.generation for one in of_kind(Proposal, outcomes)]


def slow_windows(state: LeaderState, windows: range, beat: NodeStatus = READY) -> list[object]:
    """Take times of two ranks, of which one takes twice as long, and a heartbeat after each."""
    said: list[object] = []
    for window in windows:
        for name, seconds in (("n0", 1.0), ("n1", 2.0)):
            said += timed(state, name, window, seconds, step=4)
            said += state.heard(f"{name}#1", beat, 0, 4.0 * window)
    return said


def test_a_node_that_joins_ready_is_taken_in_at_the_next_save() -> None:
    lead = JobController(spec(2, 3), FaultToleranceOptions(), 0.0, 0.0)
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


@pytest.mark.parametrize("status", [READY, DEVICE])
def test_heartbeats_do_not_begin_the_comparison_of_ranks_anew(status: NodeStatus) -> None:
    state, _ = begun(2, spares=1, stragglers=StragglerOptions(action="replace", window=4))
    said = slow_windows(state, range(1, 25), status)
    assert "n1" in only(Log, said).reason


def test_nodes_are_called_again_and_again_until_something_is_proposed() -> None:
    state, _ = begun(3)
    assert state.calls(5.0, 0.5) == []
    order = Quiesce(2, "an error")
    state.begin_call(QuiesceNodes(("n0", "n1"), order))
    first = state.calls(5.0, 0.5)
    assert first == [order, SendMessage("n1#1", order, "n1:1")]
    assert state.calls(5.49, 0.5) == []
    assert state.calls(5.5, 0.5) == first
    state.begin_call(QuiesceNodes(("n2",), order))
    joined = [*first, SendMessage("n2#1", order, "n2:1")]
    assert state.calls(5.6, 0.5) == joined, "a new one goes at once, and the others are asked as before"
    state.begin_call(QuiesceNodes(("n2",), replace(order, generation=3)))
    assert state.calls(5.7, 0.5) == [SendMessage("n2#1", replace(order, generation=3), "n2:1")]
    state.call = None
    assert state.calls(9.0, 0.5) == []


def test_a_failing_node_is_replaced_after_any_save_where_ranks_cannot_be_held() -> None:
    state = about_to_fail()
    state.take("n0#1", replace(REPORT, round=2), 1.1)
    state.take("n1#1", replace(REPORT, round=2), 1.2)
    assert state.steps_due(5.0, 0.5) == [], "they are not asked any more"
    assert failing(saved(state, 4)) == []
    assert failing(saved(state, 5)) == ["n1"]
