"""Who is to blame for a hang, from what several nodes saw; and that it is heard where it is decided."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.policy.codec import MessageError
from outlast.cluster.policy.messages import MESSAGES, BlameNotice
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.hang.policy.attribution import (
    EVERY,
    KEPT,
    MOST_GROUPS,
    MOST_MEMBERS,
    MOST_RANKS,
    MOST_WAITING,
    EvidenceReport,
    GroupReport,
    Pool,
    RankReport,
    Seen,
    numbers,
    report_of,
    runs,
    seen_of,
)
from outlast.hang.policy.diagnosis import BY_ORDER, BY_STACKS, LOOKS_BEHIND, Case, RankEvidence, Verdict, rule
from outlast.hang.policy.rank_state import Doing, GroupState

WAITING = ("train.py:main", "/lib/torch/distributed/distributed_c10d.py:all_reduce")
ASLEEP = ("train.py:main", "train.py:sleep")


def group(entered: int, pending: int, world: int = 2) -> GroupState:
    return GroupState("0", tuple(range(world)), entered, pending, ((entered, "all_reduce"),))


def rank(number: int, stack: tuple[str, ...], collectives: Any = None, **fields: Any) -> RankEvidence:
    usual = {"alive": True, "process_state": "S", "cpu_busy": False, "step": 7, "sections": ("step",)}
    return RankEvidence(
        number, **{**usual, "stack": stack, "last_beat": 1.0, "collectives": collectives, **fields}
    )


def seats(*counts: int) -> list[RankAssignment]:
    firsts = [sum(counts[:at]) for at in range(len(counts))]
    return [
        RankAssignment(f"n{at}", f"h{at}:1", first, count)
        for at, (first, count) in enumerate(zip(firsts, counts, strict=True))
    ]


def pooled(*counts: int, generation: int = 3) -> Pool:
    return Pool(generation, seats(*counts))


def seen(*ranks: RankEvidence, generation: int = 3, look_in: float = 1.0) -> Seen:
    return Seen(generation, ranks, look_in)


WAITS = rank(0, WAITING, (group(8, 8),))
SLEEPS = rank(1, ASLEEP, (group(7, 0),))


def test_the_rank_that_ranks_of_another_node_wait_for_is_named() -> None:
    pool = pooled(1, 1)
    pool.take("n0", seen(WAITS), 10.0)
    assert pool.judge(10.0) is None  # one node alone knows no more than it knew
    pool.take("n1", seen(SLEEPS), 10.5)
    assert pool.due == 10.0 + EVERY
    blamed = pool.judge(pool.due)
    assert blamed is not None
    assert (blamed.names, blamed.generation, blamed.node) == (("n0", "n1"), 3, "n1")
    assert (blamed.verdict.rank, blamed.verdict.waiting, blamed.verdict.basis) == (1, (0,), BY_ORDER)
    assert pool.due == math.inf


def test_stacks_name_it_where_no_rank_tells_how_far_it_is() -> None:
    pool = pooled(1, 1)
    pool.take("n0", seen(rank(0, WAITING)), 10.0)
    pool.take("n1", seen(rank(1, ASLEEP)), 10.0)
    blamed = pool.judge(10.0)
    assert blamed is not None
    assert (blamed.verdict.rank, blamed.verdict.basis) == (1, BY_STACKS)


def test_while_a_node_has_not_told_anything_a_guess_names_nobody() -> None:
    pool = pooled(1, 1, 1)
    pool.take("n0", seen(rank(0, WAITING)), 10.0)
    pool.take("n1", seen(rank(1, WAITING, step=6)), 10.0)  # behind by its steps, as far as is known
    blamed = pool.judge(10.0)
    assert blamed is not None
    assert (blamed.verdict.rank, blamed.node) == (-1, "")


def test_once_every_node_has_told_the_rank_that_is_behind_by_its_steps_is_named() -> None:
    pool = pooled(1, 1)
    pool.take("n0", seen(rank(0, WAITING)), 10.0)
    pool.take("n1", seen(rank(1, WAITING, step=6)), 10.0)
    blamed = pool.judge(10.0)
    assert blamed is not None
    assert (blamed.verdict.rank, blamed.node) == (1, "n1")


def test_a_verdict_comes_at_once_and_the_next_one_a_second_later_at_the_earliest() -> None:
    pool = pooled(1, 1)
    pool.take("n0", seen(WAITS), 10.0)
    assert pool.due == 10.0
    pool.judge(10.0)
    pool.take("n1", seen(SLEEPS), 10.5)
    assert pool.due == 11.0
    pool.take("n1", seen(SLEEPS), 15.0)
    assert pool.due == 15.0


@pytest.mark.parametrize(("late", "counts"), [(0.0, True), (0.1, False)])
def test_a_report_counts_until_some_seconds_after_the_next_look(late: float, counts: bool) -> None:
    pool = pooled(1, 1)
    pool.take("n0", seen(WAITS, look_in=2.0), 10.0)
    pool.take("n1", seen(SLEEPS), 14.0)
    assert (pool.judge(12.0 + KEPT + late) is not None) is counts


def test_a_node_that_tells_of_some_of_its_ranks_is_heard_and_one_that_tells_of_others_too_is_not() -> None:
    pool = pooled(2, 1)
    pool.take("n0", seen(rank(0, WAITING, (group(8, 8, 3),))), 10.0)
    pool.take("n1", seen(rank(1, ASLEEP), rank(2, ASLEEP)), 10.0)
    assert pool.judge(10.0) is None
    pool.take("n1", seen(rank(2, ASLEEP, (group(7, 0, 3),))), 10.0)
    blamed = pool.judge(11.0)
    assert blamed is not None
    assert blamed.verdict.rank == 2


def test_of_many_ranks_that_wait_some_are_named() -> None:
    world = MOST_WAITING + 2
    pool = pooled(world - 1, 1)
    waiting = [rank(one, WAITING, (group(8, 8, world),)) for one in range(world - 1)]
    pool.take("n0", seen(*waiting), 10.0)
    pool.take("n1", seen(rank(world - 1, ASLEEP, (group(7, 0, world),))), 10.0)
    blamed = pool.judge(10.0)
    assert blamed is not None
    assert blamed.verdict.waiting == tuple(range(MOST_WAITING))


def test_more_ranks_than_are_weighed_together_name_nobody() -> None:
    pool = pooled(MOST_RANKS, 1)
    pool.take("n0", seen(*(rank(one, WAITING) for one in range(MOST_RANKS))), 10.0)
    pool.take("n1", seen(rank(MOST_RANKS, ASLEEP)), 10.0)
    assert pool.judge(10.0) is None


def test_what_is_old_or_of_another_generation_or_of_ranks_elsewhere_does_not_count() -> None:
    pool = pooled(1, 1)
    pool.take("n0", seen(WAITS, generation=2), 10.0)
    pool.take("n0", seen(rank(1, WAITING)), 10.0)
    pool.take("n7", seen(), 10.0)
    assert pool.due == math.inf
    pool.take("n0", seen(WAITS, look_in=2.0), 10.0)
    pool.take("n1", seen(SLEEPS), 12.0 + KEPT + 0.1)
    assert pool.judge(pool.due) is None


def test_as_many_ranks_as_are_weighed_together_cost_less_than_a_ping_timeout() -> None:
    import time

    half = MOST_RANKS // 2
    behind = MOST_RANKS - 1
    pool = pooled(half, half)
    ranks = [rank(one, WAITING, (group(8, 8, MOST_RANKS),)) for one in range(behind)]
    pool.take("n0", seen(*ranks[:half]), 0.0)
    pool.take("n1", seen(*ranks[half:], rank(behind, ASLEEP, (group(7, 0, MOST_RANKS),))), 0.0)
    began = time.process_time()
    blamed = pool.judge(0.0)
    assert time.process_time() - began < 2.0
    assert blamed is not None
    assert blamed.verdict.rank == behind


@given(st.lists(st.integers(0, 1 << 20), unique=True, max_size=50).map(sorted))
def test_runs_give_back_the_numbers(ranks: list[int]) -> None:
    assert numbers(runs(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    "ranks", [(), (0,), (5, 5), (4, 2, 3), (0, 1, 3), (0, 2, 4, 5), (7, 8, 9, 1, 2), (3, 6, 9, 12, 15)]
)
def test_members_of_a_group_keep_their_order(ranks: tuple[int, ...]) -> None:
    found = runs(ranks)
    assert numbers(found) == ranks
    assert all(count >= 1 and apart >= 1 for _, count, apart in found), "as a message may have them"


def test_the_ranks_of_large_groups_take_little_room() -> None:
    assert runs(range(8192)) == [(0, 8192, 1)]
    assert runs(range(3, 8192, 64)) == [(3, 128, 64)]


def test_messages_keep_what_a_verdict_rests_on_and_move_times_to_the_readers_clock() -> None:
    told = MESSAGES.read(MESSAGES.write(report_of(seen(WAITS, SLEEPS), 5.0)))
    assert isinstance(told, EvidenceReport)
    found = seen_of(told, 1000.0)
    assert [one.last_beat for one in found.ranks] == [996.0, 996.0]
    assert found.ranks[0].collectives == WAITS.collectives
    assert found.ranks[1].stack == ASLEEP
    notice = BlameNotice(3, "n1", Verdict(1, "why", (0,), BY_ORDER))
    back = MESSAGES.read(MESSAGES.write(notice))
    assert back == notice
    assert isinstance(back, BlameNotice)
    assert back.verdict.basis == BY_ORDER


def test_a_rank_of_which_nothing_is_known_is_told_as_such() -> None:
    one = rank(0, (), sections=(), last_beat=7.0)
    (told,) = report_of(seen(one), 5.0).ranks
    assert (told.silent, told.section, told.groups) == (0.0, "", None), "it beat after the look"
    (found,) = seen_of(report_of(seen(one), 7.0), 7.0).ranks
    assert found == one


def test_what_is_long_is_cut_to_what_a_verdict_needs() -> None:
    """The innermost frames with their ends, and first the groups that the rank waits in."""
    stack = tuple(f"{'deep/' * 300}file{depth}.py:main" for depth in range(20))
    idle = [GroupState(f"idle{number}", (0, 1), 3) for number in range(2 * MOST_GROUPS)]
    latest = tuple((number, "all_reduce" * 200) for number in range(1, 9))
    awaited = GroupState("g" * 3000, (0, 2, 3), 8, 6, latest)
    one = rank(0, stack, (*idle, awaited), sections=("outer", "s" * 3000))
    told = MESSAGES.read(MESSAGES.write(report_of(seen(one), 5.0)))
    assert isinstance(told, EvidenceReport)
    (found,) = seen_of(told, 5.0).ranks
    assert [frame.rpartition("/")[2] for frame in found.stack] == [f"file{at}.py:main" for at in (17, 18, 19)]
    assert found.sections[0].startswith("s")
    assert found.collectives is not None
    assert len(found.collectives) == MOST_GROUPS
    first, *others = found.collectives
    assert (first.ranks, first.entered, first.pending) == ((0, 2, 3), 8, 6)
    assert [number for number, _ in first.operations] == [6, 8]
    assert {one.ranks for one in others} == {()}, "nobody waits there"


def of_groups(*sizes: int) -> EvidenceReport:
    """Return the report of a node whose rank waits in groups that have so many members."""
    groups = tuple(GroupReport(str(at), ((0, size, 1),), 8, 8, ()) for at, size in enumerate(sizes))
    return EvidenceReport(3, 1.0, (RankReport(0, "S", WAITING, 7, "", 4.0, False, groups),))


def test_a_report_that_names_more_members_than_there_can_be_is_refused() -> None:
    assert seen_of(of_groups(1, 1, MOST_MEMBERS - 1), 5.0).ranks, "equal groups count once"
    with pytest.raises(MessageError, match=f"groups of more than {MOST_MEMBERS} ranks in all"):
        seen_of(of_groups(1, MOST_MEMBERS), 5.0)


NAMED = Verdict(1, "x", (0,))


@pytest.mark.parametrize(
    ("doing", "fields", "limit"),
    [
        (Doing.SLEEPS, {"steady": LOOKS_BEHIND}, 10.0),
        (Doing.NOTHING, {"steady": LOOKS_BEHIND}, 0.0),
        (Doing.COLLECTIVE, {"steady": LOOKS_BEHIND}, 0.0),  # it is in another one than all others
        (Doing.SLEEPS, {"steady": LOOKS_BEHIND - 1}, 300.0),
        (Doing.COMPUTES, {"moved": True}, 1800.0),
        (Doing.STORAGE, {"steady": 9}, 1800.0),
    ],
)
def test_a_rank_that_another_node_waits_for_is_judged_as_on_one_node(
    doing: Doing, fields: dict[str, Any], limit: float
) -> None:
    evidence = (rank(1, ASLEEP, doing=doing, **fields),)
    if limit:
        assert not rule(Case(NAMED, evidence, limit - 0.1, 300.0, spread=True, joint=True)).convicted
    assert rule(Case(NAMED, evidence, limit, 300.0, spread=True, joint=True)).convicted


def test_ranks_that_wait_for_a_named_rank_leave_it_to_its_node_as_long_as_that_may_take() -> None:
    evidence = (rank(0, WAITING, doing=Doing.COLLECTIVE, steady=9),)
    ruling = rule(Case(NAMED, evidence, 1799.0, 300.0, spread=True, joint=True))
    assert not ruling.convicted
    assert ruling.reason == "the agent of its node decides; the ranks here wait up to 1800 s"
    assert rule(Case(NAMED, evidence, 1800.0, 300.0, spread=True, joint=True)).convicted
