"""What the savers of several nodes agree on, over all orders in which their reports may come."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.joint import Answer, Leader, Member, Report, Written
from outlast.checkpoint.policy.manifest import Row, copy_name, runs_of
from outlast.codec import Malformed
from tests.support.forging import SAID

ONE = runs_of([SAID])


def row(nbytes: int, digit: str = "0") -> Row:
    return Row(nbytes, digit * 32, digit * 32, 2, digit * 32)


def written(step: int, node: str, error: str = "", session: str = "s") -> Written:
    own = () if error else ((ord(node), row(ord(node))),)
    contents = {} if error else ONE
    return Written(copy_name(step, 1), own, 0.5, error, session, contents=contents)


class Node:
    """A member with the copies that it holds; the oracle knows what it has really sent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.member = Member(name, "s")
        self.held: set[int] = set()
        self.sent: set[int] = set()

    def make(self, step: int) -> None:
        self.held.add(step)
        self.member.made(step)
        self.held &= self.member.keep(self.held)

    def send(self, fine: bool) -> None:
        step = self.member.wanted(self.held)
        if step >= 0:
            if fine:
                self.sent.add(step)
            self.member.sent(step, fine)

    def hear(self, answer: Answer) -> None:
        self.member.hear(answer)
        self.held &= self.member.keep(self.held)


def require_safe(replicated: int, team: list[Node]) -> None:
    if replicated >= 0:
        assert all(replicated in each.sent for each in team)
        assert all(replicated in each.held for each in team)
    assert all(len(each.held) <= 4 for each in team)


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), nodes=st.integers(1, 5))
def test_a_step_is_replicated_when_every_node_has_sent_it_and_still_holds_it(seed: int, nodes: int) -> None:
    draw = random.Random(seed)
    team = [Node(f"n{number}") for number in range(nodes)]
    leader = Leader([node.name for node in team], replicate=True)
    step = 0
    for _ in range(400):
        node = draw.choice(team)
        match draw.randrange(4):
            case 0:
                step += draw.randint(1, 3)
                for each in draw.sample(team, nodes):
                    each.make(step)
            case 1:
                node.send(fine=draw.random() < 0.9)
            case 2:
                leader.hear(node.member.report)
            case 3:
                node.hear(leader.answer)
        require_safe(leader.answer.replicated, team)
    for _ in range(200):  # with nothing in the way it gets on
        step += 1
        for each in team:
            each.make(step)
            for _ in range(3):
                each.send(fine=True)
                leader.hear(each.member.report)
                each.hear(leader.answer)
    assert leader.answer.replicated > step - 8


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), nodes=st.integers(1, 5), apart=st.booleans())
def test_while_no_copies_are_made_the_newest_that_all_nodes_have_is_replicated(
    seed: int, nodes: int, apart: bool
) -> None:
    """A long evaluation must not leave what was made before it on one node alone."""
    draw = random.Random(seed)
    team = [Node(f"n{number}") for number in range(nodes)]
    leader = Leader([node.name for node in team], replicate=True)
    for step in range(draw.randint(1, 12)):
        for each in team:
            each.make(step)
            if draw.random() < 0.5:
                leader.hear(each.member.report)
                each.hear(leader.answer)
                each.send(fine=draw.random() < 0.9)
    if apart:
        team[0].make(step + 1)
    for _ in range(30):
        for each in team:
            leader.hear(each.member.report)
            each.hear(leader.answer)
            each.send(fine=True)
            require_safe(leader.answer.replicated, team)
    assert leader.answer.replicated >= step
    before = leader.answer
    for _ in range(9):
        for each in team:
            leader.hear(each.member.report)
            each.hear(leader.answer)
    assert leader.answer == before, "nothing more is sent"


def test_a_leader_that_begins_anew_goes_on_from_what_the_others_say() -> None:
    team = [Node("a"), Node("b")]
    leader = Leader(["a", "b"], replicate=True)

    def turn(step: int) -> None:
        for node in team:
            node.make(step)
            node.send(fine=True)
        for node in (*team, *team):
            leader.hear(node.member.report)
            node.hear(leader.answer)

    for step in range(1, 6):
        turn(step)
    assert leader.answer.replicated == 5
    leader = Leader(["a", "b"], replicate=True)
    turn(6)
    assert [node.member.answer.replicated for node in team] == [5, 5]
    assert all(5 in node.held for node in team)
    for step in range(7, 12):
        turn(step)
    assert leader.answer.replicated >= 10


def test_a_copy_is_complete_when_the_last_node_has_written_it() -> None:
    leader = Leader(["a", "b", "c"], replicate=False)
    for node in ("a", "b"):
        assert leader.hear(Report(node, "s", written=(written(5, node),))) == ()
    assert leader.hear(Report("a", "s", written=(written(5, "a"),))) == ()
    [complete] = leader.hear(Report("c", "s", written=(written(5, "c"),)))
    assert (complete.name, complete.blocked, complete.errors) == (copy_name(5, 1), 0.5, ())
    assert complete.own == {ord(node): (row(ord(node)), SAID) for node in "abc"}
    assert complete.nbytes == sum(ord(node) + 8 + 2 for node in "abc")
    leader.settled(complete)
    assert leader.answer.durable_step == 5
    assert leader.hear(Report("c", "s", written=(written(5, "c"),))) == ()
    assert leader.waits


def test_rows_go_to_a_leader_once_and_to_the_next_one_again() -> None:
    members = {node: Member(node, "s") for node in "ab"}
    for node, member in members.items():
        member.wrote(written(5, node))
        member.wrote(written(6, node, "full"))
    first, second = (Leader(["a", "b"], replicate=False) for _ in range(2))

    def told(leader: Leader, node: str) -> list[int]:
        """Return which steps a node reports in its next report."""
        sent = Report.from_values(members[node].report.to_values())
        found.extend(leader.hear(sent))
        members[node].hear(leader.answer_to(node))
        return [one.step for one in sent.written]

    found: list[Any] = []
    assert told(first, "a") == [5, 6]
    assert told(first, "a") == []
    assert first.waits
    assert told(second, "a") == []  # it lacks what it was not sent, and is told all of it next
    assert told(second, "a") == [5, 6]
    assert told(second, "a") == []
    assert not found
    assert told(second, "b") == [5, 6]
    complete, other = found
    assert complete.own == {ord(node): (row(ord(node)), SAID) for node in "ab"}
    assert len(other.errors) == 2
    members["a"].wrote(written(5, "a", "no"))
    members["a"].wrote(written(7, "a"))
    assert told(second, "a") == [5, 7], "what has failed since it was heard of is reported"


def test_parts_of_two_sessions_are_never_put_together() -> None:
    leader = Leader(["a", "b"], replicate=False)
    assert leader.hear(Report("a", "s", written=(written(5, "a", session="old"),))) == ()
    assert leader.hear(Report("b", "s", written=(written(5, "b"),))) == ()
    [complete] = leader.hear(Report("a", "s", written=(written(5, "a"),)))
    assert complete.session == "s"


def test_one_node_that_cannot_write_costs_the_copy_and_is_named() -> None:
    leader, member = Leader(["a", "b"], replicate=False), Member("a", "s")
    member.wrote(written(5, "a"))
    assert leader.hear(member.report) == ()
    [complete] = leader.hear(Report("b", "s", written=(written(5, "b", "no space left"),)))
    assert complete.errors == ("node b: no space left",)
    leader.settled(complete, "; ".join(complete.errors))
    member.hear(leader.answer)
    assert (member.report.written, member.answer.lost_step, member.answer.failures) == ((), 5, 1)


def test_a_report_survives_its_way() -> None:
    report = Report("a", "s", 7, 3, 6, written=(written(5, "a"), written(6, "a", "no")))
    assert Report.from_values(report.to_values()) == report


@pytest.mark.parametrize(
    "lie",
    [
        {"newest": "7"},
        {"newest": 1 << 80},
        {"round": None},
        {"missed": 1},
        {"node": 5},
        {"session": "s" * 5000},
        {"replicated": True},
        {"written": [{"name": "x"}]},
        {"written": 3},
        {"written": [{**asdict(written(3, "a")), "ends": float("nan")}]},
        {"written": [{**asdict(written(3, "a")), "error": "e" * 5000}]},
        {"written": [{**asdict(written(3, "a")), "blocked": float("nan")}]},
        {"written": [{**asdict(written(3, "a")), "own": [[0, ["1", "", "", 0, "", 0, []]]]}]},
        {"written": [{**asdict(written(3, "a")), "own": [[-2, row(1)]]}]},
        {"written": [{**asdict(written(3, "a")), "contents": {}}]},
        {"written": [{**asdict(written(3, "a")), "contents": {**ONE, "state.x": [[2, "0" * 16]]}}]},
        {"written": [{**asdict(written(3, "a")), "contents": {**ONE, "state.x": [[1, "0"]]}}]},
        {"written": [{**asdict(written(3, "a")), "shared": [[*row(1)[:4], "0" * 33, 0, []]]}]},
        {"written": [asdict(written(step, "a")) for step in range(65)]},
        {"unknown": 1},
    ],
)
def test_a_report_that_is_none_is_not_read(lie: dict[str, object]) -> None:
    values = Report("a", "s", 3, 1, 2, False, (written(3, "a"),)).to_values()
    assert Report.from_values(json.loads(json.dumps(values))).newest == 3
    with pytest.raises(Malformed):
        Report.from_values(json.loads(json.dumps({**values, **lie})))


def test_files_that_nodes_have_in_common_count_once_and_must_be_the_same() -> None:
    leader = Leader({"a", "b"}, replicate=False)
    shared = row(5)
    own = {"a": ((0, row(1)),), "b": ((1, row(2)),)}
    for step, other in ((1, shared), (2, row(5, "2"))):
        leader.hear(
            Report("a", "s", written=(Written(copy_name(step, 1), own["a"], contents=ONE, shared=(shared,)),))
        )
        (found,) = leader.hear(
            Report("b", "s", written=(Written(copy_name(step, 1), own["b"], contents=ONE, shared=(other,)),))
        )
        assert (found.own, found.shared) == (
            {rank: (one, SAID) for rank, one in own["a"] + own["b"]},
            (shared,),
        )
        assert bool(found.errors) == (step == 2)
        leader.settled(found, "; ".join(found.errors))
    assert "nodes a and b" in leader.answer.error
    leader.hear(
        Report("a", "s", written=(Written(copy_name(3, 1), own["a"], contents=ONE, shared=(shared,)),))
    )
    (found,) = leader.hear(Report("b", "s", written=(Written(copy_name(3, 1), own["b"], contents=ONE),)))
    assert found.errors, "node a counts on node b to write some of what they share"
    leader.settled(found)
    leader.hear(Report("a", "s", written=(Written(copy_name(4, 1), own["a"], contents=ONE),)))
    (found,) = leader.hear(Report("b", "s", written=(Written(copy_name(4, 1), own["a"], contents=ONE),)))
    assert found.errors, "a rank is on one node"
