"""What plans and messages mean for each node, also where something was left out, and how they are read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outlast.cluster.policy.codec import Codec, MessageError
from outlast.cluster.policy.members import MembershipState
from outlast.cluster.policy.messages import (
    MESSAGES,
    AppendEntries,
    AppendReply,
    Assignment,
    Beacon,
    Ending,
    Message,
    NodeStatus,
    Quiesce,
    Record,
    StatusReport,
    StepOrder,
    StepProposal,
)
from outlast.cluster.policy.plan import PLANS, JobPlan, LatestPlan
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.recovery.policy.events import StateSource

SEATS = (RankAssignment("n1", "h1:29400", 0, 2), RankAssignment("n0", "h0:29400", 2, 3))
PLAN = JobPlan(
    membership=MembershipState(3, ("n1", "n0"), (), None),
    job={},
    seats=SEATS,
    reason="2 of 2 node(s)",
    why="rank 1 was killed",
    hung_again=True,
    state=StateSource.OLDER,
    avoid=("local/step-40",),
    port=5001,
    reenter=True,
    layout="dp=5",
    end=None,
)


def _record(plan: JobPlan) -> Record:
    return Record(1, 1, 3, frozenset(), frozenset(), PLANS.write(plan), (frozenset(),))


def test_each_node_with_ranks_learns_its_place_and_where_ranks_meet() -> None:
    first = Assignment(
        generation=3,
        seated=True,
        first_rank=0,
        node_rank=0,
        nodes=2,
        world_size=5,
        host="h1",
        port=5001,
        master=True,
        avoid=("local/step-40",),
        state="older",
        reason="rank 1 was killed",
        reenter=True,
        hung_again=True,
        layout="dp=5",
    )
    assert PLAN.assignment(3, "n1") == first
    assert PLAN.assignment(3, "n0") == replace(first, first_rank=2, node_rank=1, master=False)
    assert PLAN.assignment(3, "n0", PLAN.places()) == PLAN.assignment(3, "n0")


def test_a_node_without_ranks_learns_of_the_generation_and_why_it_began() -> None:
    assert PLAN.assignment(3, "n2") == Assignment(3, seated=False, reason="rank 1 was killed")
    assert PLAN.assignment(3, "n2", {"n2": 1}) == PLAN.assignment(3, "n0"), "the caller knows the places"


def test_where_nothing_ended_the_generation_before_the_reason_of_the_plan_is_told() -> None:
    for name in ("n0", "n2"):
        told = replace(PLAN, why="").assignment(3, name)
        assert isinstance(told, Assignment)
        assert told.reason == "2 of 2 node(s)"


def test_before_the_first_generation_a_plan_means_nothing_for_any_node() -> None:
    assert replace(PLAN, seats=()).assignment(0, "n0") is None


@pytest.mark.parametrize("seats", [SEATS, ()])
def test_the_end_of_the_job_is_told_to_every_node(seats: tuple[RankAssignment, ...]) -> None:
    end = Ending(3, "too few nodes")
    assert [replace(PLAN, seats=seats, end=end).assignment(3, name) for name in ("n0", "n2")] == [end, end]


def test_a_plan_is_read_again_only_when_it_is_another_one() -> None:
    latest, other = LatestPlan(), replace(PLAN, port=5002, seats=SEATS[1:])
    first = latest.of(_record(PLAN))
    assert first == PLAN
    assert latest.places == {"n1": 0, "n0": 1}
    assert latest.of(_record(PLAN)) is first
    assert latest.of(_record(other)) == other
    assert latest.places == {"n0": 0}
    latest.keep(PLANS.write(PLAN), first)
    assert latest.of(_record(PLAN)) is first


def test_a_plan_that_cannot_be_read_leaves_the_one_before() -> None:
    latest = LatestPlan()
    first = latest.of(_record(PLAN))
    with pytest.raises(MessageError, match="plan"):
        latest.of(replace(_record(PLAN), plan="["))
    assert latest.of(_record(PLAN)) is first


PING = {"type": "AppendEntries", "term": 1, "sent": 2.0, "key": [1, 1], "committed": True}


@pytest.mark.parametrize(
    ("left_out", "meant"),
    [
        (PING, AppendEntries(1, 2.0, (1, 1), committed=True, granted=0.0, echo=0.0, taken=0, saved=-1)),
        (
            {**PING, "assignment": {"type": "Assignment", "generation": 1}},
            AppendEntries(
                1, 2.0, (1, 1), committed=True, assignment=Assignment(1, False, 0, 0, 1, 0, port=0)
            ),
        ),
        (
            {"type": "AppendReply", "term": 1, "key": [1, 1], "generation": 2, "incarnation": "1"},
            AppendReply(1, (1, 1), 2, "1", NodeStatus(0, None, 0.0, 0, "", ""), "", 0.0, 0.0),
        ),
        (
            {"type": "StatusReport", "generation": 0, "status": {}},
            StatusReport(0, NodeStatus(0, None, 0.0, 0)),
        ),
        ({"type": "Quiesce", "generation": 2, "reason": "x"}, Quiesce(2, "x", reenter=False)),
        (
            {"type": "Beacon", "run_id": "r", "generation": 1, "session": "s", "address": "a:1"},
            Beacon("r", 1, "s", "a:1", beat=0),
        ),
    ],
)
def test_what_an_agent_of_another_version_leaves_out_grants_and_promises_nothing(
    left_out: dict[str, Any], meant: Message
) -> None:
    assert MESSAGES.from_json(left_out) == meant


def test_a_record_is_told_to_all_nodes_and_to_those_that_voted_before() -> None:
    record = replace(
        _record(PLAN), agents=frozenset({"n2#1", "n0#1"}), quorums=(frozenset({"n1#1", "n0#1"}),)
    )
    assert record.told == ("n0#1", "n1#1", "n2#1")


def test_a_plan_of_a_large_job_fits_into_a_record() -> None:
    codec: Codec[Record] = Codec(Record)
    record = replace(_record(PLAN), plan="x" * (1 << 20))
    assert codec.read(codec.write(record)) == record


def test_a_place_below_none_is_refused() -> None:
    codec: Codec[Assignment] = Codec(Assignment)
    assert codec.from_json({"generation": 1, "node_rank": -1}).node_rank == -1
    with pytest.raises(MessageError, match=r"node_rank.*-2"):
        codec.from_json({"generation": 1, "node_rank": -2})


def test_a_proposal_that_says_only_who_is_slow_wants_nothing_else_at_no_time() -> None:
    said = {"ticket": 1, "round": 1, "step": 1, "slow": [[0, 1]]}
    meant = StepProposal(1, 1, 1, 0, math.inf, math.inf, (-1.0, -1.0, -1.0), slow=((0, 1),), before=())
    for written in (said, {**said, "wants": 0}):
        assert MESSAGES.from_json(
            {"type": "StepOrder", "term": 1, "generation": 1, "said": written}
        ) == StepOrder(1, 1, "", meant)
