"""What is said of a node and when: how long it is waited for, why it is lost, what a successor knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import pytest

from outlast.cluster.policy.members import (
    Decision,
    GrowthWanted,
    Heard,
    JobSpec,
    Joined,
    Left,
    Lost,
    Member,
    Plan,
    Probe,
    Refused,
    RestartOrdered,
    Role,
    SafeStep,
    TakenIn,
    TooFew,
    Unchanged,
    Unfit,
    Waits,
)
from outlast.cluster.policy.membership import Membership, Phase
from outlast.parallelism.policy.degrees import Layout

SPEC = JobSpec("run", "1", "", 1, 2, 3, spares=2, grace=30.0, join_timeout=300.0, ping_timeout=5.0)
One = TypeVar("One")


def member(name: str, **other: object) -> Member:
    return replace(Member(name, f"{name}:1", 1, "run", "1", "", "1"), **other)  # type: ignore[arg-type]


def joined(spec: JobSpec, *names: str) -> Membership:
    """Return a membership that nodes have joined at 0 s."""
    found = Membership(spec, 0.0)
    for name in names:
        found.handle(Joined(member(name)), 0.0)
    return found


def only(kind: type[One], decisions: Iterable[Decision]) -> One:
    (found,) = (one for one in decisions if isinstance(one, kind))
    return found


def said(decisions: Iterable[Decision]) -> list[str]:
    return [getattr(one, "reason", "") for one in decisions]


def hear(membership: Membership, now: float, *names: str) -> list[Decision]:
    return [one for name in names for one in membership.handle(Heard(name, "1"), now)]


def look(membership: Membership, until: float, *names: str) -> None:
    """Look four times a second until a time, and hear of some nodes each time; nobody is lost."""
    now = membership.deadline
    while now <= until:
        hear(membership, now, *names)
        assert membership.tick(now) == ()
        now = membership.deadline


def order(membership: Membership, now: float) -> tuple[Decision, ...]:
    """End the generation that runs."""
    ended = membership.generation
    return membership.handle(RestartOrdered(ended, ended + 1, "an error"), now)


# Before the first generation.


def test_a_part_of_the_nodes_waits_longer_where_another_job_may_run() -> None:
    membership = joined(SPEC, "n0", "n1")
    membership.wait_until(20.0)  # that is before the grace is over
    membership.wait_until(50.0)
    membership.wait_until(45.0)  # the last one counts
    hear(membership, 44.0, "n0", "n1")
    assert membership.tick(44.9) == ()
    assert only(Plan, membership.tick(45.0)).nodes == ("n0", "n1")
    membership.wait_until(1000.0)
    order(membership, 46.0)
    membership.wait_until(1000.0)
    assert only(Plan, hear(membership, 46.0, "n0", "n1")).generation == 2, "it waits for the first one only"


def test_the_first_generation_has_the_number_that_was_chosen_last() -> None:
    membership = joined(SPEC, "n0", "n1")
    membership.number(4)
    membership.number(7)
    assert membership.generation == 0
    assert only(Plan, membership.handle(Joined(member("n2")), 1.0)).generation == 7
    order(membership, 2.0)
    membership.number(20)
    assert only(Plan, hear(membership, 2.0, "n0", "n1", "n2")).generation == 8


def test_a_generation_begins_with_the_first_number_unless_another_is_given() -> None:
    assert only(Plan, joined(SPEC, "n0", "n1").handle(Joined(member("n2")), 0.0)).generation == 1


def test_a_job_that_needs_all_its_nodes_waits_for_the_last_one_and_no_longer() -> None:
    membership = joined(replace(SPEC, least=3), "n0", "n1")
    assert membership.tick(0.1) == ()
    assert only(Plan, membership.handle(Joined(member("n2")), 0.2)).nodes == ("n0", "n1", "n2")


def test_a_node_that_leaves_before_the_job_begins_restarts_nothing() -> None:
    lost = joined(SPEC, "n0", "n1").handle(Left("n1", "gone"), 1.0)
    assert said(lost) == ["n1 is lost: gone; it had no rank, so nothing restarts"]


def test_when_the_next_look_is_due() -> None:
    membership = joined(SPEC, "n0")
    assert membership.deadline == 0.25
    membership.tick(3.0)
    assert membership.deadline == 3.25


def test_too_few_nodes_are_told_of_after_some_seconds_and_again_when_it_happens_again() -> None:
    membership = joined(replace(SPEC, ping_timeout=1000.0), "n0")
    assert membership.tick(4.9) == ()
    assert isinstance(only(Waits, membership.tick(5.0)), Waits)
    membership.handle(Joined(member("n1")), 6.0)
    membership.handle(Joined(member("n2")), 6.0)
    for name in ("n1", "n2"):
        membership.handle(Left(name, "gone"), 7.0)
    order(membership, 7.0)
    hear(membership, 7.0, "n0")
    assert membership.tick(11.9) == ()
    waits = only(Waits, membership.tick(12.0))
    assert waits.reason.startswith("1 node(s) for 5 s, at least 2 needed (--nnodes)")
    assert membership.tick(20.0) == ()
    assert membership.tick(306.9) == ()
    end = only(TooFew, membership.tick(307.0))
    assert (end.exit_code, end.reason) == (
        1,
        "1 node(s) for 300 s, at least 2 needed (--nnodes); the job ends",
    )


def test_the_time_in_which_there_were_enough_nodes_does_not_count_as_too_few() -> None:
    membership = joined(replace(SPEC, ping_timeout=1000.0), "n0")
    membership.handle(Joined(member("n1")), 4.0)
    membership.handle(Left("n1", "gone"), 20.0)
    assert membership.tick(24.9) == ()
    assert only(Waits, membership.tick(25.0)).reason.startswith("1 node(s) for 5 s")


def test_nodes_that_make_no_whole_group_are_counted_when_there_are_too_few() -> None:
    membership = Membership(replace(SPEC, least=4, most=4, group_size=2), 0.0)
    for name, group in (("n0", "a"), ("n1", "a"), ("n2", "b")):
        membership.handle(Joined(member(name, group=group)), 0.0)
    assert only(Waits, membership.tick(5.0)).reason.startswith("3 node(s) for 5 s")


def test_enough_nodes_say_once_that_they_wait_for_more_and_until_when() -> None:
    membership = joined(replace(SPEC, least=1, most=4), "n0")
    assert membership.tick(0.9) == ()
    assert only(Waits, membership.tick(1.0)).reason == (
        "1 of up to 4 nodes is here; the job waits 29 s for more (--rdzv-conf last_call_timeout), then begins"
        " without them"
    )
    membership.handle(Joined(member("n1")), 1.5)
    assert membership.tick(4.0) == ()


def test_the_nodes_that_came_meanwhile_count_and_a_short_wait_is_not_worth_a_word() -> None:
    membership = joined(replace(SPEC, least=1, most=4, grace=2.0), "n0", "n1")
    assert only(Waits, membership.tick(1.0)).reason.startswith(
        "2 of up to 4 nodes are here; the job waits 1 s"
    )
    membership = joined(replace(SPEC, least=1, most=4, grace=1.9), "n0", "n1")
    assert membership.tick(1.0) == membership.tick(1.8) == ()


@pytest.mark.parametrize("grace", [0.0, 30.0])
def test_as_many_nodes_as_are_needed_wait_where_there_is_no_layout_for_them(grace: float) -> None:
    spec = replace(SPEC, grace=grace, layouts=(Layout(dp=3),), ping_timeout=1000.0)
    membership = joined(spec, "n0", "n1")
    assert membership.tick(grace) == ()
    assert membership.tick(grace + 4.9) == ()
    words = "2 node(s) for 5 s, [parallelism] has no layout for the ranks of 2 to 2 nodes"
    assert only(Waits, membership.tick(grace + 5.0)).reason.startswith(words)


@pytest.mark.parametrize(("ranks", "nodes"), [(5, ("n0", "n1", "n2")), (3, ("n0", "n1"))])
def test_a_layout_counts_the_ranks_of_nodes_that_differ(ranks: int, nodes: tuple[str, ...]) -> None:
    membership = Membership(replace(SPEC, layouts=(Layout(dp=ranks),)), 0.0)
    found: list[Decision] = []
    for name, slots in (("n0", 1), ("n1", 2), ("n2", 2)):
        found += membership.handle(Joined(member(name, slots=slots)), 0.0)
    found += membership.tick(30.0)
    plan = only(Plan, found)
    assert (plan.nodes, plan.world_size) == (nodes, ranks)
    assert f"dp={ranks}," in plan.layout
    assert plan.reason.startswith(f"the job begins; {len(nodes)} of 3 node(s); layout {plan.layout}")
    assert ("1 node(s) wait, because [parallelism]" in plan.reason) == (ranks == 3)
    assert plan.reason.count("wait") == (ranks == 3)


def test_a_node_without_a_group_waits_for_another_reason_than_a_layout() -> None:
    membership = Membership(replace(SPEC, least=2, most=4, group_size=2, grace=1.0), 0.0)
    for name, group in (("n0", "a"), ("n1", "a"), ("n2", "b")):
        membership.handle(Joined(member(name, group=group)), 0.0)
    plan = only(Plan, membership.tick(1.0))
    assert (plan.spares, plan.reason) == (("n2",), "the job begins; 2 of 4 node(s)")


def test_it_is_said_whose_ranks_have_other_numbers() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    membership.handle(Left("n1", "gone"), 1.0)
    order(membership, 1.0)
    plan = only(Plan, hear(membership, 1.0, "n0", "n2"))
    assert plan.moved == ("n2",)
    assert plan.reason == "an error; 2 of 3 node(s); other ranks for n2, so that ranks have no gap"


def test_a_short_timeout_is_told_of_when_half_of_it_is_over() -> None:
    membership = joined(replace(SPEC, join_timeout=6.0), "n0")
    assert membership.tick(2.9) == ()
    assert isinstance(only(Waits, membership.tick(3.0)), Waits)


def test_a_job_that_has_ended_answers_nothing_more() -> None:
    membership = joined(replace(SPEC, join_timeout=4.0), "n0")
    assert isinstance(only(TooFew, membership.tick(4.0)), TooFew)
    assert membership.phase is Phase.ENDED
    assert membership.handle(Joined(member("n1")), 4.1) == (Unchanged("the job has ended"),)
    assert membership.tick(50.0) == ()


# Who joins.


def test_as_many_nodes_are_taken_in_as_are_wanted_and_a_lost_one_may_come_back() -> None:
    membership = joined(replace(SPEC, spares=1), "n0", "n1", "n2")
    assert said(membership.handle(Joined(member("n3")), 1.0)) == [
        "n3 has joined; it is a spare until a plan names it"
    ]
    words = "n4: 3 active and 1 spare nodes are all that is wanted (--nnodes, --spares)"
    assert membership.handle(Joined(member("n4")), 1.0) == (Refused("n4", words),)
    membership.handle(Left("n3", "gone"), 2.0)
    membership.handle(Joined(member("n4")), 2.0)
    back = membership.handle(Joined(member("n3")), 3.0)
    assert said(back) == ["n3 is back; it is a spare until a plan names it"]


def test_a_node_that_is_back_gets_ranks_after_those_that_have_waited() -> None:
    membership = joined(SPEC, "n0", "n1", "n2", "n3", "n4")
    membership.handle(Left("n3", "gone"), 1.0)
    membership.handle(Joined(member("n3")), 2.0)
    assert list(membership.roles()) == ["n0", "n1", "n2", "n4", "n3"]


def test_a_node_that_was_lost_has_no_claim_to_its_seat() -> None:
    membership = joined(SPEC, "n1", "n2", "n3", "n0")
    membership.handle(Left("n1", "gone"), 1.0)
    membership.handle(Joined(member("n1")), 1.1)
    order(membership, 1.2)
    assert only(Plan, hear(membership, 1.2, "n0", "n1", "n2", "n3")).nodes == ("n0", "n2", "n3")


def test_a_node_that_was_lost_is_a_new_one_when_it_has_ranks_again() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    membership.handle(Left("n1", "gone"), 1.0)
    membership.handle(Joined(member("n1")), 1.1)
    order(membership, 1.2)
    plan = only(Plan, hear(membership, 1.2, "n0", "n1", "n2"))
    assert plan.reason == "an error; 3 of 3 node(s); new nodes: n1"
    assert (plan.nodes, plan.moved) == (("n0", "n1", "n2"), ())


def test_an_agent_that_asks_again_to_join_is_alive() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    again = membership.handle(Joined(member("n1")), 4.0)
    assert said(again) == ["n1 has joined already"]
    look(membership, 8.75, "n0", "n2")
    assert membership.roles()["n1"] is Role.ACTIVE


@pytest.mark.parametrize(("heard", "kind"), [(1.49, Unchanged), (1.5, Refused)])
def test_a_name_is_taken_when_its_agent_was_heard_for_half_a_second_after_another_one_came(
    heard: float, kind: type[Decision]
) -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    rival = Joined(member("n1", address="else:1", incarnation="2"))
    membership.handle(rival, 1.0)
    hear(membership, heard, "n1")
    assert isinstance(membership.handle(rival, 2.0)[0], kind)


def test_each_agent_that_claims_a_name_is_one_of_its_own() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    membership.handle(Joined(member("n1", address="else:1", incarnation="2")), 1.0)
    hear(membership, 2.0, "n1")
    third = Joined(member("n1", address="else:1", incarnation="3"))
    assert isinstance(membership.handle(third, 2.0)[0], Unchanged)


def test_nodes_without_a_node_rank_have_no_twin() -> None:
    membership = joined(SPEC, "n0", "n1")
    membership.handle(Joined(member("n2", node_rank=0)), 0.0)
    twin = membership.handle(Joined(member("n3", node_rank=0)), 0.0)
    assert said(twin) == ["n3: n2 has joined with --node-rank=0; probing it"]
    again = membership.handle(Joined(member("n2", node_rank=0)), 0.0)
    assert said(again) == ["n2 has joined already"]
    other = membership.handle(Joined(member("n3", node_rank=1)), 0.0)
    assert isinstance(other[0], TakenIn)


def test_a_ping_of_an_agent_before_does_not_keep_a_node() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    ping = membership.handle(Heard("n1", "0"), 4.0)
    assert said(ping) == ["n1 is no node of the job; it has to join first"]
    look(membership, 4.75, "n0", "n2")
    assert only(Lost, membership.tick(5.0)).name == "n1"
    assert said(membership.handle(Heard("n1", "1"), 5.1)) == said(ping)
    assert membership.roles()["n1"] is Role.LOST


# Who is lost.


def test_a_silent_node_is_lost_at_the_timeout() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    hear(membership, 0.25, "n1")
    look(membership, 5.0, "n0", "n2")
    assert membership.tick(5.24) == ()
    words = "n1 is lost: silent for 5.00 seconds (timeout 5.00); generation 1 is over"
    assert membership.tick(5.25) == (Lost("n1", words, ends=1, excluded=False, since=0.25),)
    assert membership.with_ranks == ("n0", "n2")


@pytest.mark.parametrize("woke", [5.5, 60.0])
def test_of_the_sleep_of_a_leader_counts_what_three_looks_may_take(woke: float) -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    look(membership, 4.0, "n0", "n2")
    assert membership.tick(woke) == ()
    hear(membership, woke, "n0", "n2")
    assert membership.tick(woke + 0.24) == ()
    assert only(Lost, membership.tick(woke + 0.25)).name == "n1", "it was silent before, too"


@pytest.mark.parametrize(
    ("event", "words", "excluded"),
    [
        (Left("n3", "gone"), "n3 is lost: gone; it had no rank, so nothing restarts", False),
        (Unfit("n3", "bad"), "n3 is excluded: bad; it had no rank, so nothing restarts", True),
    ],
)
def test_a_spare_that_is_lost_ends_nothing(event: Left | Unfit, words: str, excluded: bool) -> None:
    membership = joined(SPEC, "n0", "n1", "n2", "n3")
    hear(membership, 2.0, "n3")
    assert membership.handle(event, 3.0) == (Lost("n3", words, 0, excluded, 2.0),)
    assert membership.here().keys() == {"n0", "n1", "n2"}
    nothing = Unchanged("n3 was not part of the job")
    assert membership.handle(Left("n3", "gone"), 4.0) == (nothing,)
    assert membership.handle(Left("n9", "gone"), 4.0) == (Unchanged("n9 was not part of the job"),)


def test_a_node_that_is_lost_may_be_excluded_afterwards() -> None:
    membership = joined(SPEC, "n0", "n1", "n2", "n3")
    membership.handle(Left("n3", "gone"), 1.0)
    assert only(Lost, membership.handle(Unfit("n3", "bad"), 2.0)).excluded
    assert membership.roles()["n3"] is Role.EXCLUDED


def test_a_generation_that_is_formed_does_without_a_node_that_is_lost_meanwhile() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    probe = only(Probe, order(membership, 1.0))
    assert probe == Probe(("n0", "n1", "n2"), "generation 2 is made of the nodes that answer now")
    assert membership.silent == {"n0", "n1", "n2"}
    membership.handle(Heard("n0", "1", answers=False), 1.1)
    assert membership.silent == {"n0", "n1", "n2"}, "it is busy"
    hear(membership, 1.2, "n0", "n1")
    lost, plan = membership.handle(Left("n2", "gone"), 1.3)
    assert said([lost]) == ["n2 is lost: gone; generation 2 is formed without it"]
    assert isinstance(plan, Plan)
    assert (plan.generation, plan.nodes) == (2, ("n0", "n1"))
    assert membership.silent == frozenset()


# Restarts, and growth.


def test_an_order_for_a_generation_that_is_over_is_dropped_with_the_reason() -> None:
    membership = joined(SPEC, "n0", "n1")
    early = membership.handle(RestartOrdered(0, 1, "an error"), 0.0)
    assert said(early) == ["generation 0 is over already; the next one is forming (an error)"]
    membership.handle(Joined(member("n2")), 0.0)
    old = membership.handle(RestartOrdered(0, 2, "an error"), 0.0)
    assert said(old) == ["generation 0 is over already; 1 is in force (an error)"]
    same = membership.handle(RestartOrdered(1, 1, "an error"), 0.0)
    assert said(same) == ["generation 1 is not after 1, which is in force"]
    order(membership, 1.0)
    again = order(membership, 1.0)
    assert said(again) == ["generation 1 is over already; the next one is forming (an error)"]


def test_the_reason_of_a_generation_may_be_put_right_while_it_is_formed() -> None:
    membership = joined(SPEC, "n0", "n1", "n2")
    membership.because("nothing is formed")
    order(membership, 1.0)
    membership.because("a better reason")
    plan = only(Plan, hear(membership, 1.0, "n0", "n1", "n2"))
    assert plan.reason == "a better reason; 3 of 3 node(s)"


def test_growth_is_wished_for_once_for_each_number_of_nodes() -> None:
    membership = joined(replace(SPEC, least=1, most=4, grace=1.0), "n0", "n1")
    assert only(Plan, membership.tick(1.0)).nodes == ("n0", "n1")
    words = "1 node(s) more could be active; the job grows at the next safe step"
    assert only(GrowthWanted, membership.handle(Joined(member("n2")), 1.1)) == GrowthWanted(1, words)
    assert only(GrowthWanted, membership.handle(Joined(member("n3")), 1.2)).nodes == 2
    assert not any(isinstance(one, GrowthWanted) for one in membership.handle(Joined(member("n4")), 1.3))
    lost = membership.handle(Left("n1", "gone"), 1.4)
    assert [type(one) for one in lost] == [Lost], "it restarts anyway"
    order(membership, 1.5)
    plan = only(Plan, hear(membership, 1.5, "n0", "n2", "n3", "n4"))
    assert plan.nodes == ("n0", "n2", "n3", "n4")
    assert plan.reason == "an error; 4 of 4 node(s); new nodes: n2, n3, n4"
    membership.handle(Left("n4", "gone"), 2.0)
    order(membership, 2.0)
    hear(membership, 2.0, "n0", "n2", "n3")
    assert only(GrowthWanted, membership.handle(Joined(member("n5")), 2.1)).nodes == 1


def test_a_job_that_has_grown_may_wish_for_as_many_nodes_again() -> None:
    membership = joined(replace(SPEC, most=4, grace=0.0), "n0", "n1")
    assert only(GrowthWanted, membership.handle(Joined(member("n2")), 1.0)).nodes == 1
    membership.handle(SafeStep(1, 10, 2), 2.0)
    hear(membership, 2.0, "n0", "n1", "n2")
    assert only(GrowthWanted, membership.handle(Joined(member("n3")), 3.0)).nodes == 1


def test_growth_is_not_wished_for_when_no_node_is_left_for_it() -> None:
    membership = joined(replace(SPEC, most=4, grace=0.0), "n0", "n1", "n2")
    assert [type(one) for one in membership.handle(Left("n2", "gone"), 1.0)] == [Lost]


def test_growth_is_not_wished_for_when_the_job_restarts_anyway() -> None:
    membership = joined(replace(SPEC, least=3, most=5, grace=0.0), "n0", "n1", "n2", "n3")
    membership.handle(Left("n1", "gone"), 1.0)
    for name in ("n4", "n5"):
        assert [type(one) for one in membership.handle(Joined(member(name)), 1.1)] == [TakenIn]


def test_a_safe_step_counts_in_its_own_generation_and_where_the_job_can_grow() -> None:
    membership = joined(replace(SPEC, most=4, grace=1.0), "n0", "n1", "n2")
    membership.tick(1.0)
    assert membership.handle(SafeStep(1, 10, 2), 1.1) == (), "there is no other node"
    membership.handle(Joined(member("n3")), 1.2)
    old = membership.handle(SafeStep(0, 10, 2), 1.3)
    assert said(old) == ["step 10 of generation 0: that one is over"]
    probe = only(Probe, membership.handle(SafeStep(1, 20, 2), 1.4))
    assert probe.names == ("n0", "n1", "n2", "n3")
    assert said(membership.handle(SafeStep(1, 30, 2), 1.5)) == ["step 30 of generation 1: that one is over"]
    plan = only(Plan, hear(membership, 1.5, *probe.names))
    words = "step 20 is saved, so the job can grow without losing work; 4 of 4 node(s); new nodes: n3"
    assert plan.reason == words


def test_of_many_nodes_in_quarantine_a_plan_names_three() -> None:
    membership = Membership(replace(SPEC, least=1, most=1, spares=8), 0.0)
    for number in range(7):
        bad = "" if number < 2 else f"quarantine: {number} faults"
        membership.handle(Joined(member(f"n{number}", last_choice=bad)), 0.0)
    named = [f"n{number} (quarantine: {number} faults)" for number in (2, 3, 4)]
    assert membership.passed_over() == ", ".join(named)
    order(membership, 1.0)
    plan = only(Plan, hear(membership, 1.0, *(f"n{number}" for number in range(7))))
    waits = "".join(f"; n{number} waits (quarantine: {number} faults)" for number in (2, 3, 4))
    assert plan.reason == f"an error; 1 of 1 node(s){waits}; 2 more are at risk, in quarantine or burn-in"
    membership.handle(Left("n6", "gone"), 2.0)
    membership.handle(Left("n5", "gone"), 2.0)
    order(membership, 2.0)
    plan = only(Plan, hear(membership, 2.0, *(f"n{number}" for number in range(5))))
    assert plan.reason == f"an error; 1 of 1 node(s){waits}"


def test_the_health_of_a_node_is_news_where_it_is_a_spare() -> None:
    membership = joined(SPEC, "n0", "n1", "n2", "n3")
    assert membership.at_risk("n0", "XID 79") is False, "it has ranks"
    assert membership.at_risk("n3", "XID 79")
    assert membership.at_risk("n3", "XID 48")
    assert membership.at_risk("n9", "XID 79") is False, "nobody knows it"


# Another leader.


def test_a_successor_goes_on_with_the_plan_in_force() -> None:
    old = joined(SPEC, "n0", "n1", "n2", "n3")
    new = Membership(SPEC, 40.0)
    assert new.plan_in_force("it begins") is None
    assert new.here() == {}
    assert new.restore(old.state(), 50.0) == ()
    plan = new.plan_in_force("the reason")
    assert plan is not None
    assert (plan.generation, plan.nodes, plan.spares, plan.master) == (1, ("n0", "n1", "n2"), ("n3",), "n0")
    assert (plan.reason, plan.moved, plan.layout) == ("the reason", (), "")
    assert new.deadline == 50.25
    assert new.here().keys() == {"n0", "n1", "n2", "n3"}
    assert new.tick(54.9) == (), "all count as heard when it took over"
    order(new, 55.0)
    assert new.plan_in_force("") is None


def test_a_successor_wishes_for_growth_anew() -> None:
    old = joined(replace(SPEC, grace=0.0), "n0", "n1", "n2")
    new = Membership(SPEC, 50.0)
    new.restore(old.state(), 50.0)
    assert only(GrowthWanted, new.tick(50.1)).nodes == 1


def test_a_successor_knows_when_the_leader_before_was_heard_last() -> None:
    new = Membership(SPEC, 50.0)
    new.restore(joined(SPEC, "n0", "n1", "n2").state(), 50.0)
    new.heard_last({"n0": 46.0, "n1": 60.0, "n9": 1.0})
    new.tick(50.5)
    lost = only(Lost, new.tick(51.0))
    assert (lost.name, lost.since) == ("n0", 46.0)


def test_a_successor_asks_all_nodes_anew_where_a_generation_was_formed() -> None:
    old = joined(SPEC, "n0", "n1", "n2")
    order(old, 1.0)
    hear(old, 1.0, "n0", "n1")
    new = Membership(SPEC, 50.0)
    (probe,) = new.restore(old.state(), 50.0)
    assert probe == Probe(("n0", "n1", "n2"), "generation 2 is made of the nodes that answer now")
    assert new.phase is Phase.FORMING
    assert new.silent == {"n0", "n1", "n2"}
    assert only(Plan, hear(new, 50.1, "n0", "n1", "n2")).reason == "an error; 3 of 3 node(s)"


def test_a_successor_says_anew_that_there_are_too_few_nodes() -> None:
    old = joined(SPEC, "n0")
    assert isinstance(only(Waits, old.tick(5.0)), Waits)
    new = Membership(SPEC, 40.0)
    new.restore(old.state(), 50.0)
    new.tick(50.0)
    hear(new, 54.0, "n0")
    assert new.tick(54.9) == ()
    assert only(Waits, new.tick(55.0)).reason.startswith("1 node(s) for 5 s")


def test_a_successor_of_a_leader_that_had_begun_nothing_gives_nodes_the_same_time() -> None:
    new = Membership(SPEC, 50.0)
    new.restore(joined(SPEC, "n0", "n1").state(), 50.0)
    assert (new.phase, new.silent) == (Phase.GATHERING, frozenset())
    hear(new, 79.0, "n0", "n1")
    assert new.tick(79.9) == ()
    assert only(Plan, new.tick(80.0)).reason == "the job begins; 2 of 3 node(s)"
