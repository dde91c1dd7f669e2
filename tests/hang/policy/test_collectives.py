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
    assert found.reason == (
        "rank 1 is in another collective: collective 7 of group 0 is not the same on all ranks: "
        "broadcast on rank 1; all_reduce on ranks 0, 2"
    )
    pair = blame_by_order({0: (one,), 1: (other,)})
    assert pair is not None
    assert pair.rank == -1
    assert pair.reason.endswith("all_reduce on rank 0; broadcast on rank 1; which side is wrong is not known")
    three = blame_by_order({0: (one,), 1: (other,), 2: (group(7, 7, _7="barrier"),)})
    assert three is not None
    assert three.rank == -1
    same = blame_by_order(dict.fromkeys(WORLD, (one,)))
    assert same is not None
    assert same.reason.startswith("every rank has entered number 7 (all_reduce) of group 0, ")
    unknown = blame_by_order({0: (one,), 1: (group(7, 7),), 2: (one,)})
    assert unknown is not None
    assert "every rank has entered number 7 (all_reduce)" in unknown.reason, "rank 1 may be in the same"


def test_of_several_ranks_that_are_behind_the_one_that_is_furthest_behind_is_named() -> None:
    states = {0: (group(9, 9),), 1: (group(8),), 2: (group(3, _3="barrier"),)}
    found = blame_by_order(states)
    assert found is not None
    assert (found.rank, found.waiting) == (2, (0,))
    assert found.reason == (
        "rank 2 is behind in the order of collectives: it has entered number 3 (barrier) of group 0, "
        "rank 0 waits in number 9; so is rank 1"
    )
    more = blame_by_order({0: (group(9, 9, (0, 1, 2, 3)),), 1: (group(8),), 2: (group(3),), 3: (group(7),)})
    assert more is not None
    assert more.reason.endswith("; so are ranks 1, 3")


@pytest.mark.parametrize("far", [1, 3])
def test_how_far_a_rank_is_behind_counts_in_the_group_in_which_it_is_waited_for(far: int) -> None:
    near = 4 - far
    states = {
        far - 1: (group(9, 9, (far - 1, far), "a"),),
        far: (group(4, 0, (far - 1, far), "a"),),
        near - 1: (group(90, 90, (near - 1, near), "b"),),
        near: (group(89, 0, (near - 1, near), "b"),),
    }
    found = blame_by_order(states)
    assert found is not None
    assert (found.rank, found.waiting) == (far, (0, 2))
    assert f"of group a, rank {far - 1} waits in number 9" in found.reason


def test_a_rank_that_has_never_been_in_a_group_is_behind_in_it() -> None:
    pair = (0, 1)
    found = blame_by_order({0: (group(1, 1, pair, "1"),), 1: (group(7),)})
    assert found is not None
    assert (found.rank, found.waiting) == (1, (0,))
    assert found.reason == (
        "rank 1 is behind in the order of collectives: it has entered none of group 1, "
        "rank 0 waits in number 1"
    )
    far = blame_by_order({0: (group(5, 5, WORLD, "1"),), 1: (group(1, 0, WORLD, "1"),), 2: ()})
    assert far is not None
    assert far.rank == 2


def test_ranks_that_wait_for_nobody_are_not_said_to_wait() -> None:
    """Rank 2 works in between, and rank 3 waits for rank 1 through rank 0."""
    wide = (0, 1, 2, 3)
    found = blame_by_order(
        {
            0: (group(7, 7, wide), group(1, 0, (0, 3), "1")),
            1: (group(6, 0, wide),),
            2: (group(7, 0, wide),),
            3: (group(7, 0, wide), group(2, 2, (0, 3), "1")),
        }
    )
    assert found is not None
    assert (found.rank, found.waiting) == (1, (0, 3))


def test_two_ranks_that_wait_for_each_other_in_two_groups_are_both_to_blame() -> None:
    pair = (0, 1)
    found = blame_by_order(
        {0: (group(1, 1, pair, "1"),), 1: (group(1, 1, pair, "2"), group(0, 0, pair, "1"))}
        | {0: (group(1, 1, pair, "1"), group(0, 0, pair, "2"))}
    )
    assert found is not None
    assert found.rank == -1
    assert found.reason == "ranks 0, 1 wait for each other in collectives of different groups"


def test_what_is_pending_does_not_hold_up_a_rank_that_was_seen_elsewhere() -> None:
    """A vote that was handed in and not read yet."""
    states = {0: (group(7, 7), group(4, 4, WORLD, "1")), 1: (group(6), group(4, 4, WORLD, "1"))}
    ahead = {**states, 2: (group(7, 7), group(3, 0, WORLD, "1"))}
    found = blame_by_order(ahead, outside={1})
    assert found is not None
    assert found.rank == 1
    assert blame_by_order({0: (group(7, 7),), 1: (group(6),)}, outside={0, 1}) is None, "nobody waits"
    pair = (0, 1)
    assert blame_by_order({0: (group(7, 7, pair),), 1: (group(7, 7, pair),)}, outside={1}) is None
    with_other_nodes = {0: (group(7, 7),), 1: (group(6), group(4, 4, (1, 8), "1"))}
    found = blame_by_order(with_other_nodes, outside={1})
    assert found is not None
    assert found.rank == 1


def test_a_rank_that_is_behind_and_waits_for_nobody_in_its_own_collective_is_named() -> None:
    inner = group(3, 3, (1, 2), "1")
    found = blame_by_order({0: (group(7, 7),), 1: (group(6), inner), 2: (group(7, 7), inner)})
    assert found is not None
    assert (found.rank, found.waiting) == (1, (0, 2))


def test_groups_in_which_nothing_is_pending_do_not_matter() -> None:
    states = {rank: (group(5, 0, WORLD, "1"), group(7, 7)) for rank in WORLD}
    found = blame_by_order(states)
    assert found is not None
    assert found.reason.startswith("every rank has entered number 7 of group 0, ")


def test_one_that_does_not_answer_is_left_to_other_evidence() -> None:
    assert blame_by_order({0: (group(7, 7),), 1: None, 2: (group(7, 7),)}) is None
    assert blame_by_order({0: None, 1: None}) is None
    assert blame_by_order({0: (), 1: ()}) is None
    pair = (1, 2)
    states = {0: (group(7, 7),), 1: (group(6), group(3, 3, pair, "1")), 2: None}
    assert blame_by_order(states) is None, "rank 1 is behind, and waits for rank 2"


def test_a_link_is_not_down_where_a_rank_of_the_group_does_not_wait_or_answer() -> None:
    """Ranks of another group that wait, too, are not counted for it."""
    left, right = (0, 1), (2, 3)
    others = {rank: (group(7, 7, right, "b"),) for rank in right}
    waits = group(7, 7, left, "a")
    assert blame_by_order({0: (waits,), 1: (group(7, 0, left, "a"),), **others}) is None
    assert blame_by_order({0: (waits,), 1: None, **others}) is None
    found = blame_by_order({0: (waits,), 1: (waits,), 2: (), 3: ()})
    assert found is not None
    assert found.reason.startswith("every rank has entered number 7 of group a, ")


def test_a_node_of_which_some_rank_neither_waits_nor_is_behind_does_not_wait_as_a_whole() -> None:
    wide = (0, 1, 2, 3)
    assert blame_by_order({0: (group(7, 7, wide),), 1: (group(7, 0, wide),)}) is None
    assert blame_by_order({0: (group(7, 7),), 1: (group(7, 0),), 2: (group(7, 0),)}) is None


@pytest.mark.parametrize(
    ("world", "told"), [(10, "2, 3, 4, 5, 6, 7, 8, 9"), (11, "2, 3, 4, 5, 6, 7, 8, 9, ...")]
)
def test_of_many_ranks_of_other_nodes_some_are_named(world: int, told: str) -> None:
    wide = tuple(range(world))
    found = blame_by_order({rank: (group(7, 7, wide),) for rank in (0, 1)})
    assert found is not None
    assert (
        found.reason
        == f"every rank of this node waits in number 7 of group 0, for ranks of other nodes ({told})"
    )


@pytest.mark.parametrize("behind", [False, True])
def test_a_node_whose_ranks_wait_for_another_node_says_so(behind: bool) -> None:
    wide = (0, 1, 2, 3)
    mine = group(6, 6, wide) if behind else group(7, 7, wide)
    found = blame_by_order({0: (group(7, 7, wide),), 1: (mine,)})
    assert found is not None
    assert found.rank == -1
    who = (
        "rank 1 is behind, but waits itself in number 6"
        if behind
        else "every rank of this node waits in number 7"
    )
    assert found.reason == f"{who} of group 0, for ranks of other nodes (2, 3)"


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
