"""Which node a fault is laid to, which one keeps failing or is about to, and what is done without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.hang.policy.diagnosis import GUESSED, WAITS
from outlast.recovery.policy.actions import OOM_KILL
from outlast.recovery.policy.escalation import Capabilities, Escalation
from outlast.recovery.policy.events import Fault
from outlast.recovery.policy.fault_history import DAY, Met, against, is_own
from outlast.recovery.policy.job import JobState, SpareCapacity, is_nobodys, laid_to_its_node, waits
from tests.recovery.policy.builders import (
    BARE,
    FEWER,
    NO_SPARE,
    ROOM,
    SPARE,
    budgets,
    fault,
    heir,
    hit,
    job,
    killed,
    numbers,
    short,
)

ONE, TWO, THREE, FOUR = map(killed, (1, 2, 3, 4))
LOST_NODE = fault("lost", "n1 is lost", -1, node="n1", rank=-1)
UNFIT = fault("refused", node="n1", rank=3, exit_code=69)
NEITHER, BOTH = Capabilities(spare=False), Capabilities(spare=True, fewer=True)
VICTIM = "RuntimeError: Connection closed by peer"
OTHERS = [killed(step, f"n{step + 5}") for step in range(4)]


@pytest.mark.parametrize(
    ("faults", "blamed"),
    [
        ([ONE, TWO], False),
        ([ONE, TWO, THREE], True),
        ([ONE, ONE, ONE, TWO], False),  # the same one
        ([LOST_NODE] * 3, True),
        ([replace(ONE, counted=True)] * 3, True),  # nobody knows whether it is the same
        ([killed(1, "n2"), ONE, TWO, THREE], True),
        ([ONE, TWO, THREE, *OTHERS[:3]], False),  # others fail as often
        ([ONE, TWO, THREE, FOUR, *OTHERS[:3]], True),
        ([ONE, TWO, THREE, FOUR, *OTHERS], False),
        ([ONE, TWO, killed(9, rank=-1)], False),
        ([ONE, TWO, killed(9, evidence=(OOM_KILL,))], False),
        ([ONE, TWO, fault(text=VICTIM, node="n1")], False),
        ([ONE, TWO, fault(node="n1", rank=0)], True),
    ],
)
def test_three_faults_of_its_own_and_more_than_all_others_make_a_node_bad(
    faults: list[Fault], blamed: bool
) -> None:
    met = [Met.of(one, 0.0, is_own(one)) for one in faults]
    assert bool(against("n1", met, 0.0)) is blamed
    assert not against("n2", met, 0.0)


def test_a_day_wipes_faults_out_also_where_the_clock_was_set_back() -> None:
    three = [Met.of(one, at, True) for one, at in ((ONE, 0.0), (TWO, DAY - 1.0), (THREE, DAY))]
    assert [bool(against("n1", three, now)) for now in (DAY - 1.0, DAY)] == [True, False]
    escalation = Escalation(budgets())
    for one, now in ((ONE, 365 * DAY), (TWO, 365 * DAY), (killed(3, "n2"), 0.0)):
        escalation.answer(one, SPARE, now)
    assert escalation.answer(FOUR, SPARE, DAY).exclude == ""


@pytest.mark.parametrize(
    ("means", "fast", "faults", "answers"),
    [
        (SPARE, 9, [ONE, TWO, THREE], "in-job, in-job, replace-node n1"),
        (FEWER, 9, [ONE, TWO, THREE], "in-job, in-job, shrink n1"),
        (NEITHER, 9, [ONE, TWO, THREE, FOUR], "in-job, in-job, in-job, in-job"),
        (BARE, 9, [ONE, TWO, THREE, FOUR], "in-job, in-job, in-job, in-job"),
        (
            FEWER,
            9,
            [replace(LOST_NODE, step=step) for step in (7, 7, 9)],
            "shrink, shrink, shrink n1",
        ),
        (SPARE, 9, [fault(node="n1"), fault(node="n1")], "in-job, replace-node n1"),
        (SPARE, 1, [LOST_NODE, ONE, TWO], "replace-node, in-job, stop 1"),  # bad, and its budget is spent
        (BOTH, 9, [UNFIT], "replace-node n1"),
        (FEWER, 9, [UNFIT], "shrink n1"),
        *((means, 9, [UNFIT], "stop 69") for means in (NEITHER, BARE)),
        (BOTH, 0, [UNFIT], "stop 69"),
    ],
)
def test_the_job_does_without_a_bad_or_unfit_node_where_it_can(
    means: Capabilities, fast: int, faults: list[Fault], answers: str
) -> None:
    escalation = Escalation(budgets(fast))
    found = [escalation.answer(one, means, 0.0) for one in faults]
    assert ", ".join(f"{short(one)} {one.exclude}".strip() for one in found) == answers


def test_the_replacement_of_a_bad_node_is_no_move_against_the_fault_that_came_back() -> None:
    decider = job()
    replaced = [hit(decider, one, room=ROOM) for one in (ONE, TWO, THREE)][-1]
    assert (short(replaced), replaced.exclude) == ("replace-node", "n1")
    assert numbers(replaced.reason) == [1, 1000, 1, 1000, 3, 24]
    back = replace(THREE, node="n2", reenters=True, generation=decider.generation)
    assert short(hit(decider, back, room=ROOM)) == "in-process"
    anew = decider.escalate(back, "n3 was late", 5.0, ROOM)
    assert (short(anew), numbers(anew.reason)[-1]) == ("in-job", 3)


# Whose fault it is


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        (fault(text=VICTIM), 0.3),
        (fault(), 0.0),
        (fault("crash", VICTIM), 0.0),
        (fault("hang"), 0.0),
        (fault("hang", rank=0), 0.0),
        (fault("hang", rank=-1), 1.0),
        (fault("hang", evidence=(WAITS,)), 1.0),
        (fault("hang", evidence=(GUESSED,)), 0.0),
        (fault("hang", evidence=(WAITS, GUESSED)), 6.0),
        (fault("hang", rank=-1, evidence=(GUESSED,)), 6.0),
        (fault(rank=-1, evidence=(WAITS, GUESSED)), 0.0),
    ],
)
def test_what_may_be_the_consequence_of_another_fault_waits_for_that(one: Fault, seconds: float) -> None:
    assert waits(one, ping_timeout=5.0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "rank", "evidence", "node"),
    [
        ("corrupt", 2, (), "n1"),
        ("corrupt", 1, (), "n0"),
        ("refused", 3, (), "n1"),
        ("hang", 3, (WAITS,), "n1"),
        ("hang", 3, (), "n7"),
        ("error", 3, (WAITS,), "n7"),
        ("corrupt", -1, (), "n7"),
        ("corrupt", 4, (), "n7"),
    ],
)
def test_what_any_rank_may_report_is_laid_to_the_node_of_the_rank_that_it_names(
    kind: str, rank: int, evidence: tuple[tuple[str, str], ...], node: str
) -> None:
    seats = (RankAssignment("n0", "h0:1", 0, 2), RankAssignment("n1", "h1:1", 2, 2))
    told = fault(kind, node="n7", rank=rank, evidence=evidence)
    assert laid_to_its_node(told, seats) == replace(told, node=node)


def test_replicas_that_differ_are_nobodys_fault_where_no_rank_is_named() -> None:
    nobodys = [
        is_nobodys(fault(kind, rank=rank)) for kind, rank in (("corrupt", -1), ("corrupt", 0), ("hang", -1))
    ]
    assert nobodys == [True, False, False]


# A node that works, and whose health says that it will not for long

FAILING = fault("failing", "n1: XID 79", node="n1", rank=-1)


def test_a_failing_node_is_replaced_where_a_spare_is_there() -> None:
    decider = job(fast=1)
    assert decider.keeps(FAILING, 0.0, ROOM) == ""
    action = hit(decider, FAILING, room=ROOM)
    assert (short(action), action.generation, action.exclude) == ("replace-node", 2, "n1")
    kept = hit(decider, FAILING, room=ROOM, node="n2")
    assert (short(kept), kept.generation) == ("none", 2), "the budget of replacements is used"
    assert "--max-restarts" in kept.reason
    assert "n2" in kept.reason


@pytest.mark.parametrize("room", [NO_SPARE, None])
def test_without_a_spare_the_job_goes_on_with_a_failing_node(room: SpareCapacity | None) -> None:
    decider = job()
    before = decider.state()
    action = hit(decider, FAILING, room=room)
    assert (short(action), action.generation, action.exclude) == ("none", 1, "")
    assert "79" in action.reason
    assert (decider.state(), decider.state_now) == (before, JobState.STARTING)


def test_the_faults_of_a_node_are_listed_for_a_day_where_there_are_several_nodes() -> None:
    decider, alone = job(), job()
    for step, node in ((5, "n1"), (6, "n2"), (7, "n1")):
        hit(decider, fault(step=step, node=node), room=NO_SPARE, at=float(step))
        hit(alone, step)
    hit(decider, fault(step=9, node="n3", rank=-1), room=NO_SPARE, at=8.0)
    told = [("n1", 8.0), ("n1", 4.9 + DAY), ("n1", 5.0 + DAY), ("n3", 8.0)]
    found = [[numbers(one) for one in decider.signs(node, at)] for node, at in told]
    assert found == [[[5], [7]], [[5], [7]], [[7]], []]
    assert alone.signs("n0", 8.0) == ()


# The next launch


def test_the_next_launcher_knows_what_speaks_against_a_node() -> None:
    first = job()
    for one in (ONE, TWO):
        hit(first, one, room=ROOM)
    action = hit(heir(first), THREE, room=NO_SPARE)
    assert (short(action), action.exclude) == ("shrink", "n1")


@pytest.mark.parametrize(
    "faults", [[FAILING], [UNFIT], [ONE, TWO, THREE], [fault(counted=True)], [LOST_NODE]]
)
def test_the_next_launcher_takes_over_after_any_move_and_starts_with_the_first_one(
    faults: list[Fault],
) -> None:
    first = job()
    for one in faults:
        assert not short(hit(first, one, room=ROOM)).startswith("stop")
    second = heir(first)
    assert second.state()["escalation"] == first.state()["escalation"]
    assert short(hit(second, fault(step=40, node="n2", reenters=True), room=ROOM)) == "in-process"
