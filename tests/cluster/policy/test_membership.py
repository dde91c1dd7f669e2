"""Which nodes a generation runs on: what is decided event by event, and what holds over all histories."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.policy.codec import Codec
from outlast.cluster.policy.members import (
    Decision,
    Event,
    GrowthWanted,
    Heard,
    JobSpec,
    Joined,
    Left,
    Lost,
    MembershipState,
    Plan,
    Refused,
    RestartOrdered,
    Role,
    SafeStep,
    TakenIn,
    TooFew,
    Unfit,
)
from outlast.cluster.policy.membership import Membership, Phase
from outlast.cluster.policy.messages import MESSAGES, Join
from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout
from tests.cluster.builders import happens, hear, member, membership, of_kind, only, played, spec, written

SPEC = spec(2, 3, 2, grace=30.0)
PATIENT = replace(SPEC, ping_timeout=1000.0)
THREE = "0 join n0 n1 n2\n"

SCRIPTS: dict[str, tuple[JobSpec, str]] = {
    "a full one begins at once": (
        SPEC,
        "0 join n0 n1; 0.1 tick ->; 0.2 join n2 -> taken n2, plan 1: n0 n1 n2",
    ),
    "a partial one after the grace": (
        replace(SPEC, grace=3.0),
        "0 join n0 n1; 2.9 tick ->; 3 tick -> plan 1: n0 n1",
    ),
    "the grace begins when enough are there": (
        replace(SPEC, grace=3.0),
        "0 join n0; 10 tick; 10 join n1 -> taken n1; 11 join n2 -> taken n2, plan 1: n0 n1 n2",
    ),
    "and again when one has left": (
        replace(SPEC, grace=3.0),
        "0 join n0 n1; 2 left n1 -> lost n1; 4 join n2; 6.9 tick ->; 7 tick -> plan 1: n0 n2",
    ),
    "all that are needed": (
        replace(SPEC, least=3),
        "0 join n0 n1; 0.1 tick ->; 0.2 join n2 -> taken n2, plan 1: n0 n1 n2",
    ),
    "a part waits while another job may run": (
        SPEC,
        """0 join n0 n1; 0 wait 20; 0 wait 50; 0 wait 45; 44 hear n0 n1; 44.9 tick ->
        45 tick -> plan 1: n0 n1
        45 wait 1000; 46 order n0 n1 -> asks n0 n1, plan 2: n0 n1""",
    ),
    "the first generation has the number chosen last": (
        SPEC,
        """0 join n0 n1; 0 number 4; 0 number 7; 1 join n2 -> taken n2, plan 7: n0 n1 n2
        2 order; 2 number 20; 2 hear n0 n1 n2 -> plan 8: n0 n1 n2""",
    ),
    "a node that leaves before restarts nothing": (SPEC, "0 join n0 n1; 1 left n1 -> lost n1"),
    "too few are waited for, which is said once, and end the job": (
        replace(PATIENT, join_timeout=60.0),
        """0 join n0; 4.9 tick ->; 5 tick -> waits; 59.9 tick ->; 60 tick -> ends; 61 join n1 -> no
        62 tick ->""",
    ),
    "too few again": (
        PATIENT,
        """0 join n0; 5 tick -> waits; 6 join n1 n2; 7 left n1 n2; 7 order n0 -> asks n0; 11.9 tick ->
        12 tick -> waits
        306.9 tick ->; 307 tick -> ends""",
    ),
    "enough meanwhile": (PATIENT, "0 join n0; 4 join n1; 20 left n1; 24.9 tick ->; 25 tick -> waits"),
    "enough wait for more, which is said once": (
        replace(SPEC, least=1, most=4),
        "0 join n0; 0.9 tick ->; 1 tick -> waits; 1.5 join n1; 4 tick ->",
    ),
    "a short wait is not worth a word": (
        replace(SPEC, least=1, most=4, grace=1.9),
        "0 join n0 n1; 1 tick ->; 1.8 tick ->",
    ),
    "no layout for them": (
        replace(PATIENT, layouts=(Layout(dp=3),)),
        "0 join n0 n1; 30 tick ->; 34.9 tick ->; 35 tick -> waits",
    ),
    "as many as are wanted": (
        replace(SPEC, spares=1),
        """0 join n0 n1 n2; 1 join n3 -> taken n3; 1 join n4 -> refused n4; 2 left n3; 2 join n4 -> taken n4
        3 join n3 -> taken n3""",
    ),
    "nodes beside the spares": (spec(2, 2), "0 join n0 n1; 1 join n2 -> refused n2"),
    "an agent asks again": (SPEC, THREE + "4 join n1 -> no; 4 hear n0 n2; 8 hear n0 n2; 8.75 tick ->"),
    "another agent of the name, heard before": (
        SPEC,
        THREE
        + """1 join n1 address=e:1 incarnation=2 -> no; 1.49 hear n1
        2 join n1 address=e:1 incarnation=2 -> no""",
    ),
    "another agent of the name, heard since": (
        SPEC,
        THREE
        + """1 join n1 address=e:1 incarnation=2 -> no; 1.5 hear n1
        2 join n1 address=e:1 incarnation=2 -> refused n1; 2 join n1 address=e:1 incarnation=3 -> no""",
    ),
    "an agent that is back elsewhere": (
        SPEC,
        THREE
        + """1 join n1 address=e:1 incarnation=2 -> no; 1.3 left n1 -> lost n1 ends 1
        2 join n1 address=e:1 incarnation=2 -> taken n1""",
    ),
    "an agent that begins anew": (
        SPEC,
        THREE + "1 join n1 incarnation=2 -> lost n1 ends 1, taken n1; 1 hear n1 -> no",
    ),
    "a second node of one rank": (
        SPEC,
        """0 join a node_rank=0; 1 join b node_rank=0 -> no; 2 hear a; 2.1 join b node_rank=0 -> refused b
        3 left a; 3.1 join b node_rank=0 -> taken b; 4 join c node_rank=1 -> taken c
        4 join b node_rank=0 -> no""",
    ),
    "a ping of the agent before": (
        SPEC,
        THREE
        + "4 hear n1 incarnation=0 -> no; 4.75 look n0 n2 ->; 5 tick -> lost n1 ends 1; 5.1 hear n1 -> no",
    ),
    "silence": (
        SPEC,
        THREE + "0.25 hear n1; 5 look n0 n2 ->; 5.24 tick ->; 5.25 tick -> lost n1 ends 1; 5.3 hear n1 -> no",
    ),
    "a busy agent whose channel answers": (
        SPEC,
        THREE
        + """4.9 pong n1 ->; 5 look n0 n2 -> waits; 9.75 look n0 n2 ->; 10 look n0 n2 -> lost n1 ends 1
        10 pong n9 -> no""",
    ),
    "one that is busy for too long": (
        replace(SPEC, ping_timeout=40.0),
        THREE + "39 pong n1; 40 look n0 n2 -> waits; 59.75 look n0 n2 ->; 60 look n0 n2 -> lost n1 ends 1",
    ),
    "one gap of the leader": (SPEC, THREE + "0.5 tick ->; 90 tick ->; 90.5 hear n0 n1 n2; 90.5 tick ->"),
    "silent before the gap, too": (
        SPEC,
        THREE + "4 look n0 n2 ->; 60 tick ->; 60 hear n0 n2; 60.24 tick ->; 60.25 tick -> lost n1 ends 1",
    ),
    "a spare that is lost": (
        SPEC,
        THREE + "0 join n3; 3 left n3 -> lost n3; 4 left n3 -> no; 4 left n9 -> no",
    ),
    "a spare that is excluded": (
        SPEC,
        THREE + "0 join n3; 3 unfit n3 -> excluded n3; 4 join n3 incarnation=2 -> refused n3",
    ),
    "lost, and excluded afterwards": (SPEC, THREE + "0 join n3; 1 left n3; 2 unfit n3 -> excluded n3"),
    "an excluded node": (
        SPEC,
        THREE + "1 unfit n1 -> excluded n1 ends 1; 2 join n1 incarnation=2 -> refused n1",
    ),
    "a generation is formed of those that answer": (
        SPEC,
        THREE
        + """1 order -> asks n0 n1 n2; 1.1 hear n0 busy=1 ->; 1.2 hear n0 n1 ->
        1.3 left n2 -> lost n2, plan 2: n0 n1""",
    ),
    "without one that is silent": (
        SPEC,
        THREE
        + """0 join n3; 4.25 look n0 n2 n3 ->; 4.5 order -> asks n0 n1 n2 n3; 4.75 look n0 n2 n3 ->
        5 tick -> lost n1, plan 2: n0 n3 n2""",
    ),
    "one order for a generation": (
        SPEC,
        "0 order -> no\n"
        + THREE
        + "1 order -> asks n0 n1 n2; 1 order -> no; 1 hear n0 n1 n2 -> plan 2: n0 n1 n2",
    ),
    "a node that is back comes behind those that waited": (
        SPEC,
        THREE
        + "0 join n3 n4; 1 left n3 n1; 2 join n3; 2 order n0 n2 n3 n4 -> asks n0 n2 n3 n4, plan 2: n0 n4 n2",
    ),
    "a node that was lost has no claim to its seat": (
        SPEC,
        """0 join n1 n2 n3; 0 join n0; 1 left n1; 1.1 join n1
        1.2 order n0 n1 n2 n3 -> asks n0 n1 n2 n3, plan 2: n0 n2 n3""",
    ),
    "it shrinks, and grows back at a safe step": (
        spec(2, 4),
        """0 join n0 n1 n2 n3; 1 left n1; 1.1 order n0 n2 n3 -> asks n0 n2 n3, plan 2: n0 n3 n2
        2 join n1 incarnation=2 -> taken n1, grows 1; 2.1 tick ->; 2.5 safe 1 -> no
        3 safe 2 -> asks n0 n1 n2 n3
        3 safe 2 -> no; 3.1 hear n0 n2 n3; 3.1 hear n1 incarnation=2 -> plan 3: n0 n3 n2 n1; 4 safe 3 ->""",
    ),
    "growth is wished for once for each number of nodes": (
        replace(SPEC, least=1, most=4, grace=1.0),
        """0 join n0 n1; 1 tick -> plan 1: n0 n1; 1.1 join n2 -> taken n2, grows 1
        1.2 join n3 -> taken n3, grows 2
        1.3 join n4 -> taken n4; 1.4 left n1 -> lost n1 ends 1; 1.4 join n5 -> taken n5
        1.5 order n0 n2 n3 n4 n5 -> asks n0 n2 n3 n4 n5, plan 2: n0 n2 n3 n4""",
    ),
    "and again after it has grown": (
        replace(SPEC, most=4, grace=0.0),
        """0 join n0 n1; 1 join n2 -> taken n2, grows 1; 2 safe 1; 2 hear n0 n1 n2 -> plan 2: n0 n1 n2
        3 join n3 -> taken n3, grows 1""",
    ),
    "too few for too long end a job that ran": (
        spec(3, 3, ping_timeout=1000.0),
        THREE
        + """1 left n1; 1 order n0 n2 -> asks n0 n2; 6 tick -> waits; 300.9 tick ->; 301 tick -> ends
        302 hear n0 -> no""",
    ),
    "groups are taken and left as a whole": (
        spec(2, 4, 2, group_size=2),
        """0 join a0 group=a; 0 join b0 b1 group=b; 0 join c0 group=c
        0 join c1 group=c -> taken c1, plan 1: b0 b1 c0 c1
        0 join a1 group=a; 1 left c0; 1 order a0 a1 b0 b1 c1 -> asks a0 a1 b0 b1 c1, plan 2: b0 b1 a0 a1""",
    ),
    "nodes that make no whole group are too few": (
        spec(4, 4, group_size=2),
        "0 join n0 n1 group=a; 0 join n2 group=b; 4.9 tick ->; 5 tick -> waits",
    ),
}


@pytest.mark.parametrize(("wanted", "script"), SCRIPTS.values(), ids=SCRIPTS)
def test_what_is_decided_about_nodes(wanted: JobSpec, script: str) -> None:
    assert played(Membership(wanted, 0.0), script) == written(script)


@pytest.mark.parametrize(
    ("wanted", "other", "tokens"),
    [
        ({}, {"run_id": "else"}, "else run"),
        ({}, {"version": "0.9"}, "0.9 1"),
        ({"options": "spares=1"}, {"options": "spares=1,x=2"}, "x=2"),
        ({"options": "a=1,b=2"}, {"options": "a=1,b=3,c=4"}, "b=3 c=4 b=2"),
        ({"options": "a=1,b=2"}, {"options": "a=1"}, "b=2"),
        ({}, {"slots": 0}, "0 1"),
        ({}, {"unfit": "/dev/shm has 64 MiB"}, "/dev/shm"),
        ({"group_size": 2, "least": 2, "most": 2}, {}, "2"),
        ({}, {"slots": 4}, ""),
        ({"group_size": 2, "least": 2, "most": 2}, {"group": "a"}, ""),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_what_differs(
    wanted: dict[str, Any], other: dict[str, Any], tokens: str
) -> None:
    said = Membership(replace(SPEC, **wanted), 0.0).handle(Joined(member("n7", **other)), 0.0)
    if not tokens:
        assert only(TakenIn, said).name == "n7"
        return
    refused = only(Refused, said)
    assert [one for one in ("n7", *tokens.split()) if one not in refused.reason] == []


@pytest.mark.parametrize(
    ("numbers", "tokens"),
    [
        ({"least": 1, "most": 1}, ""),
        ({"least": 4}, ""),
        ({"slots": 1, "spares": 0}, ""),
        ({"group_size": 2, "least": 4}, ""),
        ({"least": 0}, "--nnodes.*0:4"),
        ({"least": 5}, "--nnodes.*5:4"),
        ({"spares": -1}, "--spares"),
        ({"slots": 0}, "slots"),
        ({"group_size": 0}, "group"),
        ({"group_size": 2, "least": 3}, "--nnodes.*3:4.*2"),
        ({"group_size": 2, "most": 5}, "--nnodes.*2:5.*2"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_an_error_of_use(numbers: dict[str, int], tokens: str) -> None:
    if not tokens:
        replace(spec(2, 4), **numbers)  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError, match=tokens):
        replace(spec(2, 4), **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [-1, 0, 1, 100_000])
def test_the_place_of_a_node_can_be_sent(place: int) -> None:
    join = Join(member("n0", order=place, node_rank=place), 0, 0)
    assert MESSAGES.read(MESSAGES.write(join)) == join


@pytest.mark.parametrize("every", [0.25, 0.76, 1.0, 4.0])
def test_a_leader_with_slow_looks_finds_a_silent_node(every: float) -> None:
    found, lost = membership(SPEC, "n0", "n1", "n2"), []
    for turn in range(1, 60):
        hear(found, turn * every, "n0", "n2")
        lost += [one.name for one in of_kind(Lost, found.tick(turn * every))]
    assert lost == ["n1"]


def test_a_loss_says_when_the_node_was_last_heard() -> None:
    found = membership(SPEC, "n0", "n1", "n2")
    hear(found, 2.0, "n1")
    assert only(Lost, found.handle(Left("n1", "gone"), 3.0)).since == 2.0
    assert found.with_ranks == ("n0", "n2")
    assert found.here().keys() == {"n0", "n2"}


def test_a_plan_says_who_has_which_ranks_who_waits_and_whose_ranks_have_other_numbers() -> None:
    found = membership(replace(SPEC, slots=4, layouts=(Layout(dp=6), Layout(dp=8))))
    said: list[Decision] = []
    for name, slots, place in (("a", 1, 2), ("b", 5, 0), ("c", 2, 1), ("d", 1, 3)):
        said += happens(found, 0.0, "join", name, f"slots={slots}", f"node_rank={place}")
    plan = only(Plan, said)
    assert [(seat.name, seat.first_rank, seat.slots) for seat in plan.seats] == [
        ("b", 0, 5),
        ("c", 5, 2),
        ("a", 7, 1),
    ]
    assert (plan.world_size, plan.master, plan.spares, plan.moved) == (8, "b", (), ())
    assert Layout(dp=8).text == plan.layout
    assert Layout(dp=8).text in plan.reason
    found.handle(Left("c", "gone"), 1.0)
    smaller = only(Plan, happens(found, 1.0, "order", "a", "b", "d"))
    assert (smaller.nodes, smaller.moved, smaller.layout) == (("b", "a"), ("a",), Layout(dp=6).text)
    assert smaller.spares == ("d",), "there is no layout for 7 ranks"
    assert "[parallelism]" in smaller.reason


def test_a_job_goes_on_with_as_many_nodes_as_there_is_a_layout_for_and_grows_back() -> None:
    wanted = replace(spec(1, 4, 1, slots=4), layouts=tuple(Layout(tp=4, dp=one) for one in (1, 2, 4)))
    found, said = Membership(wanted, 0.0), []
    for name in ("n0", "n1", "n2", "n3"):
        said += happens(found, 0.0, "join", name, "slots=4")
    assert only(Plan, said).layout == Layout(tp=4, dp=4).text
    found.handle(Left("n0", "gone"), 1.0)
    plan = only(Plan, happens(found, 1.0, "order", "n1", "n2", "n3"))
    assert (plan.nodes, plan.spares, plan.layout) == (("n3", "n1"), ("n2",), Layout(tp=4, dp=2).text)
    in_force = found.plan_in_force("")
    assert in_force is not None
    assert in_force.layout == plan.layout
    assert found.seated_without("n1") == 2
    assert of_kind(GrowthWanted, found.tick(1.2)) == []
    assert only(GrowthWanted, happens(found, 2.0, "join", "n0", "slots=4")).nodes == 2
    happens(found, 2.0, "safe", "2")
    plan = only(Plan, hear(found, 2.1, "n0", "n1", "n2", "n3"))
    assert (plan.nodes[:2], plan.layout) == (("n3", "n1"), Layout(tp=4, dp=4).text)


def test_the_reason_of_a_generation_may_be_put_right_while_it_is_formed() -> None:
    found = membership(SPEC, "n0", "n1", "n2")
    found.because("nothing is formed")
    happens(found, 1.0, "order")
    found.because("a better reason")
    assert only(Plan, hear(found, 1.0, "n0", "n1", "n2")).reason.startswith("a better reason")


def test_too_few_nodes_end_the_job_with_a_code_and_the_numbers() -> None:
    found = membership(replace(PATIENT, join_timeout=60.0), "n0")
    end = only(TooFew, found.tick(60.0))
    assert end.exit_code == 1
    assert [one for one in ("1", "60", "2", "--nnodes") if one not in end.reason] == []
    assert found.phase is Phase.ENDED


def test_the_health_of_a_node_is_news_where_it_is_a_spare() -> None:
    found = membership(SPEC, "n0", "n1", "n2", "n3")
    news = [
        found.at_risk(*one)
        for one in (("n0", "XID 79"), ("n3", "XID 79"), ("n3", "XID 79"), ("n3", "XID 48"))
    ]
    assert news == [False, True, False, True]
    assert found.at_risk("n9", "XID 79") is False, "nobody knows it"


# A node in quarantine, burn-in or at risk gets ranks only where no other one is left.

BAD = "quarantine: 3 faults in 30 days (lost)"


def test_a_spare_at_risk_is_passed_over_while_enough_others_are_there() -> None:
    found = membership(replace(SPEC, least=1, most=2), "n0", "n1", "n2")
    assert found.seated_without("n1", healthy=True) == 2
    found.at_risk("n2", "XID 79")
    assert "n2" in found.passed_over()
    assert "XID 79" in found.passed_over()
    assert (found.seated_without("n1"), found.seated_without("n1", healthy=True)) == (1, 1)
    found.handle(Left("n1", "gone"), 2.0)
    plan = only(Plan, happens(found, 2.0, "order", "n0", "n2"))
    assert plan.nodes == ("n0",)
    assert "XID 79" in plan.reason
    assert found.at_risk("n2", "")
    assert found.passed_over() == ""


def test_a_spare_at_risk_is_better_than_no_job() -> None:
    found = membership(spec(2, 2, 2), "n0", "n1", "n2")
    found.at_risk("n2", "XID 79")
    assert (found.seated_without("n1"), found.seated_without("n1", healthy=True)) == (2, 1)
    found.handle(Left("n1", "gone"), 2.0)
    plan = only(Plan, happens(found, 2.0, "order", "n0", "n2"))
    assert plan.nodes == ("n0", "n2")
    assert "XID 79" in plan.reason


def test_a_spare_in_quarantine_is_not_healthy_and_one_in_burn_in_is() -> None:
    found = membership(spec(2, 2, 2), "n0", "n1")
    found.handle(Joined(member("n2", last_choice=BAD)), 1.0)
    assert (found.seated_without("n1"), found.seated_without("n1", healthy=True)) == (2, 1)
    assert BAD in found.passed_over()
    found.handle(Joined(member("n3", last_choice="burn-in: it came back 1 h ago")), 1.0)
    assert found.seated_without("n1", healthy=True) == 2
    found.handle(Left("n1", "gone"), 2.0)
    plan = only(Plan, happens(found, 2.0, "order", "n0", "n2", "n3"))
    assert (plan.nodes, BAD in plan.reason) == (("n0", "n2"), True)


# Another leader.


def test_a_successor_goes_on_with_the_plan_in_force() -> None:
    old = membership(SPEC, "n0", "n1", "n2", "n3")
    new = Membership(SPEC, 40.0)
    assert (new.plan_in_force("it begins"), new.here()) == (None, {})
    assert new.restore(old.state(), 50.0) == ()
    plan = new.plan_in_force("the reason")
    assert plan is not None
    assert (plan.generation, plan.nodes, plan.spares, plan.master) == (1, ("n0", "n1", "n2"), ("n3",), "n0")
    assert (plan.reason, plan.moved, plan.layout) == ("the reason", (), "")
    assert new.deadline == 50.25
    assert new.tick(54.9) == (), "all count as heard when it took over"
    happens(new, 55.0, "order")
    assert new.plan_in_force("") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0 join n0 n1 n2; 1 order; 1 hear n0 n1", "50.1 hear n0 n1 n2 -> plan 2: n0 n1 n2"),
        ("0 join n0; 5 tick", "50 tick; 54 hear n0; 54.9 tick ->; 55 tick -> waits"),
        ("0 join n0 n1", "79 hear n0 n1; 79.9 tick ->; 80 tick -> plan 1: n0 n1"),
        ("0 join n0 n1; 29 hear n0 n1; 30 tick; 31 join n2", "50.1 tick -> grows 1"),
    ],
    ids=["asks anew", "says anew that there are too few", "gives the same time", "wishes anew"],
)
def test_a_successor_goes_on_where_the_leader_before_was(before: str, after: str) -> None:
    old, new = Membership(SPEC, 0.0), Membership(SPEC, 50.0)
    played(old, before)
    new.restore(old.state(), 50.0)
    assert (new.generation, new.phase, new.roles()) == (old.generation, old.phase, old.roles())
    assert played(new, after) == written(after)


def test_a_successor_knows_when_the_leader_before_heard_a_node_last() -> None:
    new = Membership(SPEC, 50.0)
    new.restore(membership(SPEC, "n0", "n1", "n2").state(), 50.0)
    new.heard_last({"n0": 46.0, "n1": 60.0, "n9": 1.0})
    new.tick(50.5)
    lost = only(Lost, new.tick(51.0))
    assert (lost.name, lost.since) == ("n0", 46.0)


class History:
    """A random history, with an oracle about what may follow."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        size = self.draw.choice((1, 1, 2))
        least = size * self.draw.randint(1, 2)
        most = least + size * self.draw.randint(0, 2)
        spares = self.draw.randint(0, 2)
        self.wanted = spec(least, most, spares, group_size=size, slots=4, join_timeout=20.0, grace=2.0)
        self.membership = Membership(self.wanted, 0.0)
        self.now = 0.0
        self.plans: dict[int, Plan] = {}
        self.orders = 0
        self.gone: set[str] = set()
        self.left: set[str] = set()  # since the last plan
        self.said: list[Decision] = []

    def event(self) -> Event:
        name = f"n{self.draw.randrange(7)}"
        group = f"g{int(name[1:]) // self.wanted.group_size}"
        generation = self.membership.generation
        match self.draw.randrange(12):
            case 0 | 1 | 2:
                return Joined(member(name, self.draw.choice(("", "", "2")), group=group, slots=4))
            case 3:
                return Left(name, "it left")
            case 4 if self.draw.random() < 0.3:
                return Unfit(name, "it is bad")
            case 5:
                return SafeStep(generation, 10, generation + 1)
            case 6:
                ended = max(0, generation - self.draw.randrange(2))
                return RestartOrdered(ended, generation + 1, "an error")
            case _:
                return Heard(name, self.draw.choice(("", "", "2")))

    def turn(self) -> None:
        self.now += self.draw.choice((0.05, 0.25, 0.5))
        before = self.membership.generation
        event = self.event()
        self.orders += isinstance(event, (RestartOrdered, SafeStep))
        for decision in (*self.membership.handle(event, self.now), *self.membership.tick(self.now)):
            self.said.append(decision)
            if isinstance(decision, Lost):
                self.left.add(decision.name)
            if isinstance(decision, Plan):
                self.check(decision, before)
                self.left.clear()
        if isinstance(event, Unfit) and self.membership.roles().get(event.name) is Role.EXCLUDED:
            self.gone.add(event.name)

    def check(self, plan: Plan, before: int) -> None:
        wanted, old = self.wanted, self.plans.get(before)
        assert plan.generation > before
        assert plan.generation not in self.plans
        assert self.gone.isdisjoint({*plan.nodes, *plan.spares})
        assert len(set(plan.nodes)) == len(plan.nodes)
        assert not set(plan.nodes) & set(plan.spares)
        assert wanted.least <= len(plan.nodes) <= wanted.most
        assert len(plan.nodes) % wanted.group_size == 0
        assert [rank for seat in plan.seats for rank in seat.ranks] == list(range(plan.world_size))
        assert plan.reason
        if old is not None:
            at = {name: number for number, name in enumerate(plan.nodes)}
            for number, name in enumerate(old.nodes):
                if name in at and at[name] != number and name not in self.left:
                    assert len(plan.nodes) < len(old.nodes)  # only a smaller job moves anybody
                    assert number >= len(plan.nodes)  # and nobody whose seat is still there
        self.plans[plan.generation] = plan


@given(seed=st.integers(0, 1 << 40))
def test_what_holds_over_all_histories(seed: int) -> None:
    history, again = History(seed), History(seed)
    for _ in range(300):
        history.turn()
        again.turn()
    assert len(history.plans) <= history.orders + 1  # it ends if the caller's budgets do
    assert all(getattr(one, "reason", "x") for one in history.said)
    assert again.said == history.said


@given(seed=st.integers(0, 1 << 40), turns=st.integers(1, 200))
def test_another_leader_goes_on_with_the_same_plan(seed: int, turns: int) -> None:
    history = History(seed)
    for _ in range(turns):
        history.turn()
    old = history.membership
    if old.phase is Phase.ENDED:
        return
    new = Membership(history.wanted, history.now)
    codec = Codec[MembershipState](MembershipState)
    new.restore(codec.read(codec.write(old.state())), history.now)
    assert new.roles() == old.roles()
    assert (new.generation, new.phase) == (old.generation, old.phase)
    history.membership = new
    history.now += 1.0
    for _ in range(50):
        history.turn()
