"""Who is behind in the order of collectives, from what each rank has entered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.hang.policy.rank_state import GroupState, blame_by_order

WORLD = (0, 1, 2)


def group(
    entered: int, pending: int = 0, ranks: tuple[int, ...] = WORLD, name: str = "0", **names: str
) -> GroupState:
    operations = tuple((int(number[1:]), what) for number, what in names.items())
    return GroupState(name, ranks, entered, pending, operations)


def test_the_rank_that_has_not_entered_what_the_others_wait_in_is_behind() -> None:
    found = blame_by_order(
        {0: (group(7, 7, _7="all_reduce"),), 1: (group(6, _6="barrier"),), 2: (group(7, 7, _7="all_reduce"),)}
    )
    assert found is not None
    assert (found.rank, found.waiting) == (1, (0, 2))
    assert found.reason == (
        "rank 1 is behind in the order of collectives: it has entered number 6 (barrier) of group 0, "
        "rank 0 waits in number 7 (all_reduce)"
    )


def test_a_rank_that_waits_itself_is_a_victim_of_the_one_that_does_not() -> None:
    pair = (1, 2)
    found = blame_by_order(
        {
            0: (group(7, 7),),
            1: (group(6), group(3, 3, pair, "1")),
            2: (group(6), group(2, 0, pair, "1")),
        }
    )
    assert found is not None
    assert found.rank == 2
    assert found.waiting == (0, 1)


def test_ranks_that_run_ahead_on_a_device_are_judged_by_the_first_that_is_not_over() -> None:
    """The rank that has enqueued least is not behind when it has entered what the others are stuck in."""
    states = {0: (group(40, 5),), 1: (group(38, 5),), 2: (group(40, 5),)}
    found = blame_by_order(states)
    assert found is not None
    assert found.rank == -1
    assert "every rank has entered number 5 of group 0, and none has left it" in found.reason
    found = blame_by_order({**states, 1: (group(4),)})
    assert found is not None
    assert found.rank == 1


def test_the_side_with_fewer_ranks_is_in_another_collective() -> None:
    one, other = group(7, 7, _7="all_reduce"), group(7, 7, _7="broadcast")
    found = blame_by_order({0: (one,), 1: (other,), 2: (one,)})
    assert found is not None
    assert (found.rank, found.waiting) == (1, (0, 2))
    assert "all_reduce on ranks 0, 2" in found.reason
    pair = blame_by_order({0: (one,), 1: (other,)})
    assert pair is not None
    assert pair.rank == -1


def test_two_ranks_that_wait_for_each_other_in_two_groups_are_both_to_blame() -> None:
    pair = (0, 1)
    found = blame_by_order(
        {0: (group(1, 1, pair, "1"),), 1: (group(1, 1, pair, "2"), group(0, 0, pair, "1"))}
        | {0: (group(1, 1, pair, "1"), group(0, 0, pair, "2"))}
    )
    assert found is not None
    assert found.rank == -1
    assert "wait for each other" in found.reason


def test_what_is_pending_does_not_hold_up_a_rank_that_was_seen_elsewhere() -> None:
    """A vote that was handed in and not read yet."""
    states = {0: (group(7, 7), group(4, 4, WORLD, "1")), 1: (group(6), group(4, 4, WORLD, "1"))}
    ahead = {**states, 2: (group(7, 7), group(3, 0, WORLD, "1"))}
    found = blame_by_order(ahead, outside={1})
    assert found is not None
    assert found.rank == 1
    assert blame_by_order({0: (group(7, 7),), 1: (group(6),)}, outside={0, 1}) is None, "nobody waits"


def test_one_that_does_not_answer_is_left_to_other_evidence() -> None:
    assert blame_by_order({0: (group(7, 7),), 1: None, 2: (group(7, 7),)}) is None
    assert blame_by_order({0: None, 1: None}) is None
    assert blame_by_order({0: (), 1: ()}) is None


@pytest.mark.parametrize("behind", [False, True])
def test_a_node_whose_ranks_wait_for_another_node_says_so(behind: bool) -> None:
    wide = (0, 1, 2, 3)
    mine = group(6, 6, wide) if behind else group(7, 7, wide)
    found = blame_by_order({0: (group(7, 7, wide),), 1: (mine,)})
    assert found is not None
    assert found.rank == -1
    assert "for ranks of other nodes (2, 3)" in found.reason


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1),
    st.sets(st.integers(0, 5)),
)
def test_no_rank_that_waits_for_others_is_named(found: dict[int, tuple[int, int]], outside: set[int]) -> None:
    ranks = tuple(found)
    states = {rank: (group(max(one), min(one), ranks),) for rank, one in found.items()}
    verdict = blame_by_order(states, outside)
    if verdict is None or verdict.rank < 0:
        return
    assert verdict.rank not in verdict.waiting
    pending = [min(one) for rank, one in found.items() if min(one) and rank not in outside]
    assert max(found[verdict.rank]) < max(pending)
