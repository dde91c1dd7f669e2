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
from outlast.hang.policy.diagnosis import BY_ORDER, BY_STACKS, BY_STEPS, RankEvidence, Verdict
from outlast.hang.policy.rank_state import GroupState
from tests.hang.policy.builders import READS, group, rank

WAITS = rank(0, collectives=(group(8, 8, (0, 1), _8="all_reduce"),), sections=("step",), last_beat=1.0)
BEHIND = rank(1, stack=READS, collectives=(group(7, 0, (0, 1)),), sections=("step",), last_beat=1.0)


def pool(*counts: int) -> Pool:
    """Return the reports of nodes n0, n1, ... of generation 3 with so many ranks each."""
    firsts = [sum(counts[:at]) for at in range(len(counts))]
    places = zip(firsts, counts, strict=True)
    return Pool(3, [RankAssignment(f"n{at}", f"h{at}:1", *place) for at, place in enumerate(places)])


def seen(*ranks: RankEvidence, generation: int = 3, look_in: float = 1.0) -> Seen:
    return Seen(generation, ranks, look_in)


@pytest.mark.parametrize(
    ("counts", "reports", "expected"),
    [
        pytest.param((1, 1), [[WAITS], [BEHIND]], (1, "n1", BY_ORDER), id="by the order"),
        pytest.param((1, 1), [[rank(0)], [rank(1, stack=READS)]], (1, "n1", BY_STACKS), id="by stacks"),
        pytest.param((1, 1), [[rank(0)], [rank(1, step=6)]], (1, "n1", BY_STEPS), id="by steps"),
        pytest.param((1, 1, 1), [[rank(0)], [rank(1, step=6)]], (-1, "", ""), id="a guess, one is missing"),
        pytest.param((1, 1), [[WAITS]], None, id="one node alone"),
        pytest.param(
            (2, 1), [[WAITS], [rank(2, stack=READS, collectives=())]], (2, "n1", BY_STACKS), id="some ranks"
        ),
        pytest.param((2, 1), [[WAITS], [rank(1, stack=READS), rank(2, stack=READS)]], None, id="ranks of n0"),
        pytest.param(
            (MOST_RANKS, 1), [[rank(one) for one in range(MOST_RANKS)], [BEHIND]], None, id="too many"
        ),
    ],
)
def test_the_rank_that_ranks_of_another_node_wait_for_is_named(
    counts: tuple[int, ...], reports: list[list[RankEvidence]], expected: Any
) -> None:
    pooled = pool(*counts)
    for at, one in enumerate(reports):
        pooled.take(f"n{at}", seen(*one), 10.0)
    found = pooled.judge(10.0)
    assert (found and (found.verdict.rank, found.node, found.verdict.basis)) == expected
    assert found is None or (found.names, found.generation) == (("n0", "n1"), 3)


def test_as_many_ranks_as_are_weighed_together_are_judged_and_some_that_wait_are_named() -> None:
    half, last, world = MOST_RANKS // 2, MOST_RANKS - 1, tuple(range(MOST_RANKS))
    pooled = pool(half, half)
    ranks = [rank(one, collectives=(group(8, 8, world),)) for one in range(last)]
    pooled.take("n0", seen(*ranks[:half]), 0.0)
    pooled.take("n1", seen(*ranks[half:], rank(last, stack=READS, collectives=(group(7, 0, world),))), 0.0)
    found = pooled.judge(0.0)
    assert found is not None
    assert (found.verdict.rank, found.verdict.waiting) == (last, world[:MOST_WAITING])


def test_a_verdict_comes_at_once_and_the_next_one_a_second_later_at_the_earliest() -> None:
    pooled = pool(1, 1)
    pooled.take("n0", seen(WAITS), 10.0)
    assert pooled.due == 10.0
    assert pooled.judge(10.0) is None
    pooled.take("n1", seen(BEHIND), 10.5)
    assert pooled.due == 10.0 + EVERY
    pooled.take("n1", seen(BEHIND), 15.0)
    assert pooled.due == 15.0
    assert pooled.judge(15.0) is None, "what n0 told is old"
    assert pooled.due == math.inf


@pytest.mark.parametrize(("late", "counts"), [(0.0, True), (0.1, False)])
def test_a_report_counts_until_some_seconds_after_the_next_look(late: float, counts: bool) -> None:
    pooled = pool(1, 1)
    pooled.take("n0", seen(WAITS, look_in=2.0), 10.0)
    pooled.take("n1", seen(BEHIND), 14.0)
    assert (pooled.judge(12.0 + KEPT + late) is not None) is counts


@pytest.mark.parametrize(
    ("node", "report"),
    [("n0", seen(WAITS, generation=2)), ("n0", seen(rank(1))), ("n0", seen()), ("n7", seen(WAITS))],
    ids=["another generation", "a rank of n1", "no rank", "no node of the job"],
)
def test_what_is_no_report_of_the_job_does_not_count(node: str, report: Seen) -> None:
    pooled = pool(1, 1)
    pooled.take(node, report, 10.0)
    assert pooled.due == math.inf


@given(st.lists(st.integers(0, 1 << 20), max_size=50))
def test_runs_give_back_the_numbers_in_their_order(ranks: list[int]) -> None:
    found = runs(ranks)
    assert numbers(found) == tuple(ranks)
    assert all(count >= 1 and apart >= 1 for _, count, apart in found), "as a message may have them"


def test_the_ranks_of_large_groups_take_little_room() -> None:
    assert runs(range(8192)) == [(0, 8192, 1)]
    assert runs(range(3, 8192, 64)) == [(3, 128, 64)]
    assert numbers(runs((0, 2, 4, 5, 5, 4))) == (0, 2, 4, 5, 5, 4)


def told(report: EvidenceReport) -> EvidenceReport:
    """Return a report as it is read from a message."""
    found = MESSAGES.read(MESSAGES.write(report))
    assert isinstance(found, EvidenceReport)
    return found


def test_messages_keep_what_a_verdict_rests_on_and_move_times_to_the_readers_clock() -> None:
    found = seen_of(told(report_of(seen(WAITS, BEHIND), 5.0)), 1000.0)
    assert [one.last_beat for one in found.ranks] == [996.0, 996.0]
    assert found.ranks[0].collectives == WAITS.collectives
    assert found.ranks[1].stack == READS
    notice = BlameNotice(3, "n1", Verdict(1, "why", (0,), BY_ORDER))
    back = MESSAGES.read(MESSAGES.write(notice))
    assert isinstance(back, BlameNotice)
    assert (back, back.verdict.basis) == (notice, BY_ORDER)


def test_a_rank_of_which_nothing_is_known_is_told_as_such() -> None:
    one = rank(0, stack=(), last_beat=7.0)
    (found,) = report_of(seen(one), 5.0).ranks
    assert (found.silent, found.section, found.groups) == (0.0, "", None), "it beat after the look"
    assert seen_of(report_of(seen(one), 7.0), 7.0).ranks == (one,)


def test_what_is_long_is_cut_to_what_a_verdict_needs() -> None:
    """The innermost frames with their ends, and first the groups that the rank waits in."""
    stack = tuple(f"{'deep/' * 300}file{depth}.py:main" for depth in range(20))
    idle = [GroupState(f"idle{number}", (0, 1), 3) for number in range(2 * MOST_GROUPS)]
    latest = tuple((number, "all_reduce" * 200) for number in range(1, 9))
    awaited = GroupState("g" * 3000, (0, 2, 3), 8, 6, latest)
    one = rank(0, stack=stack, collectives=(*idle, awaited), sections=("outer", "s" * 3000))
    (found,) = seen_of(told(report_of(seen(one), 5.0)), 5.0).ranks
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
    return EvidenceReport(3, 1.0, (RankReport(0, "S", READS, 7, "", 4.0, False, groups),))


def test_a_report_that_names_more_members_than_there_can_be_is_refused() -> None:
    assert seen_of(of_groups(1, 1, MOST_MEMBERS - 1), 5.0).ranks, "equal groups count once"
    with pytest.raises(MessageError, match=str(MOST_MEMBERS)):
        seen_of(of_groups(1, MOST_MEMBERS), 5.0)
