"""What nodes must agree on, and which numbers of nodes make a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.cluster.policy.members import JobSpec, Joined, Member, Refused
from outlast.cluster.policy.membership import Membership
from outlast.cluster.policy.messages import MESSAGES, Join
from outlast.errors import UsageError

SPEC = JobSpec("run", "1.0", "a=1,b=2", 4, least=2, most=4)
MEMBER = Member("n0", "n0:1", 4, "run", "1.0", "a=1,b=2")


@pytest.mark.parametrize(
    "numbers",
    [
        {"least": 1, "most": 1},
        {"least": 4},
        {"slots": 1, "spares": 0},
        {"group_size": 2},
        {"group_size": 2, "least": 4},
    ],
)
def test_numbers_that_fit_each_other_make_a_job(numbers: dict[str, int]) -> None:
    assert replace(SPEC, **numbers).least >= 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"least": 0}, "--nnodes 0:4: MIN is at least 1 and at most MAX"),
        ({"least": 5}, "--nnodes 5:4: MIN is at least 1 and at most MAX"),
        ({"spares": -1}, "--spares is at least 0"),
        ({"slots": 0}, "slots and nodes of a group are at least 1"),
        ({"group_size": 0}, "slots and nodes of a group are at least 1"),
        ({"group_size": 2, "least": 3}, "--nnodes 3:4: groups of 2 nodes are kept together"),
        ({"group_size": 2, "most": 5}, "--nnodes 2:5: groups of 2 nodes are kept together"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_an_error_of_use(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replace(SPEC, **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "member", "words"),
    [
        (SPEC, MEMBER, ""),
        (SPEC, replace(MEMBER, slots=1), ""),
        (SPEC, replace(MEMBER, slots=0), "n0: it offers 0 ranks, at least 1 is needed; it is not taken in"),
        (
            SPEC,
            replace(MEMBER, options="a=1,b=3,c=4"),
            "n0: its options say b=3 c=4, the job's say b=2; it is not taken in",
        ),
        (
            SPEC,
            replace(MEMBER, options="a=1"),
            "n0: its options say the default, the job's say b=2; it is not taken in",
        ),
        (
            SPEC,
            replace(MEMBER, version="0.9"),
            "n0: its version of outlast is 0.9, the job's is 1.0; it is not taken in",
        ),
        (replace(SPEC, group_size=2), replace(MEMBER, group="g0"), ""),
        (replace(SPEC, group_size=2), MEMBER, "n0: it names no group, and groups of 2 are kept together"),
        (SPEC, replace(MEMBER, unfit="/dev/shm is full"), "n0: preflight: /dev/shm is full"),
    ],
)
def test_a_node_is_told_in_one_sentence_why_it_is_refused(spec: JobSpec, member: Member, words: str) -> None:
    assert spec.refuse(member) == words


def test_a_job_takes_in_no_more_nodes_than_it_has_ranks_for_unless_spares_are_wanted() -> None:
    membership = Membership(replace(SPEC, most=2), 0.0)
    for name in ("n0", "n1"):
        membership.handle(Joined(replace(MEMBER, name=name)), 0.0)
    (refused,) = membership.handle(Joined(replace(MEMBER, name="n2")), 0.0)
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("place", [-1, 0, 1, 100_000])
def test_the_place_of_a_node_can_be_sent(place: int) -> None:
    join = Join(replace(MEMBER, order=place, node_rank=place), 0, 0)
    assert MESSAGES.read(MESSAGES.write(join)) == join


def test_a_node_has_no_place_unless_one_is_given() -> None:
    assert (MEMBER.order, MEMBER.node_rank) == (-1, -1)
