"""Who is to blame for a hang, from what several nodes saw; and that it is heard where it is decided."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.policy.messages import MESSAGES, BlameNotice
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.hang.policy.attribution import (
    EVERY,
    KEPT,
    MOST_RANKS,
    EvidenceReport,
    Pool,
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


NAMED = Verdict(1, "x", (0,))


@pytest.mark.parametrize(
    ("doing", "fields", "limit"),
    [
        (Doing.SLEEPS, {"steady": LOOKS_BEHIND}, 0.0),
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
