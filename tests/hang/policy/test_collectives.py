"""Who is behind in the order of collectives, from what each rank has entered."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.hang.policy.rank_state import blame_by_order
from tests.hang.policy.builders import group

WIDE = (0, 1, 2, 3)
WAITS, BEHIND = group(7, 7), group(6)
REDUCES, BROADCASTS = group(7, 7, _7="all_reduce"), group(7, 7, _7="broadcast")
AHEAD = [group(40, 5)]


def pair(entered: int, pending: int = 0, ranks: tuple[int, ...] = (0, 1), name: str = "1") -> Any:
    return group(entered, pending, ranks, name)


def far_and_near(far: int) -> dict[int, list[Any]]:
    """Return two pairs: rank ``far`` is 5 behind in its group, the other one 1."""
    near, a, b = 4 - far, (far - 1, far), (3 - far, 4 - far)
    return {
        far - 1: [pair(9, 9, a, "a")],
        far: [pair(4, 0, a, "a")],
        near - 1: [pair(90, 90, b, "b")],
        near: [pair(89, 0, b, "b")],
    }


@pytest.mark.parametrize(
    ("states", "rank", "waiting", "told"),
    [
        pytest.param(
            {0: [REDUCES], 1: [group(6, _6="barrier")], 2: [REDUCES]},
            *(1, (0, 2), ["1", "6", "barrier", "0", "7", "all_reduce"]),
            id="has not entered it",
        ),
        pytest.param(
            {0: [WAITS], 1: [BEHIND, pair(3, 3, (1, 2))], 2: [BEHIND, pair(2, 0, (1, 2))]},
            *(2, (0, 1), []),
            id="one that waits itself is a victim",
        ),
        pytest.param({0: AHEAD, 1: [group(38, 5)], 2: AHEAD}, -1, (), ["5", "0"], id="enqueued least"),
        pytest.param({0: AHEAD, 1: [group(4)], 2: AHEAD}, 1, (0, 2), ["4", "5"], id="the first not over"),
        pytest.param(
            {0: [REDUCES], 1: [BROADCASTS], 2: [REDUCES]},
            *(1, (0, 2), ["7", "broadcast", "1", "all_reduce", "0, 2"]),
            id="the smaller side is in another one",
        ),
        pytest.param(
            {0: [REDUCES], 1: [BROADCASTS]}, -1, (), ["all_reduce", "0", "broadcast", "1"], id="equal sides"
        ),
        pytest.param(
            {0: [REDUCES], 1: [BROADCASTS], 2: [group(7, 7, _7="barrier")]}, -1, (), [], id="three sides"
        ),
        pytest.param({0: [REDUCES], 1: [REDUCES], 2: [REDUCES]}, -1, (), ["7", "all_reduce"], id="a link"),
        pytest.param(
            {0: [REDUCES], 1: [WAITS], 2: [REDUCES]}, -1, (), ["7", "all_reduce"], id="may be in the same"
        ),
        pytest.param(
            {0: [group(9, 9)], 1: [group(8)], 2: [group(3, _3="barrier")]},
            *(2, (0,), ["2", "3", "barrier", "0", "9", "1"]),
            id="furthest behind",
        ),
        pytest.param(
            {0: [group(9, 9, WIDE)], 1: [group(8)], 2: [group(3)], 3: [group(7)]},
            *(2, (0,), ["9", "1, 3"]),
            id="several are behind",
        ),
        pytest.param(far_and_near(1), 1, (0, 2), ["a", "0", "9"], id="how far, in its own group"),
        pytest.param(far_and_near(3), 3, (0, 2), ["a", "2", "9"], id="how far, in its own group, the last"),
        pytest.param({0: [pair(1, 1)], 1: [BEHIND]}, 1, (0,), ["1", "1", "0", "1"], id="never in the group"),
        pytest.param(
            {0: [group(5, 5)], 1: [group(1)], 2: []}, 2, (0,), [], id="never in it is further behind"
        ),
        pytest.param(
            {
                0: [group(7, 7, WIDE), pair(1, 1, (0, 3))],
                1: [group(6, 0, WIDE)],
                2: [group(7, 0, WIDE)],
                3: [group(7, 0, WIDE), pair(2, 2, (0, 3))],
            },
            *(1, (0, 3), []),
            id="rank 2 works, rank 3 waits through rank 0",
        ),
        pytest.param(
            {0: [pair(1, 1), pair(0, name="2")], 1: [pair(0), pair(1, 1, name="2")]},
            *(-1, (), ["0, 1"]),
            id="two wait for each other",
        ),
        pytest.param(
            {0: [WAITS], 1: [BEHIND, pair(3, 3, (1, 2))], 2: [WAITS, pair(3, 3, (1, 2))]},
            *(1, (0, 2), []),
            id="waits for nobody in its own collective",
        ),
        pytest.param(
            {rank: [group(5, name="1"), WAITS] for rank in (0, 1, 2)}, -1, (), ["7", "0"], id="not pending"
        ),
        pytest.param(
            {0: [pair(7, 7, name="a")], 1: [pair(7, 7, name="a")], 2: [], 3: []},
            *(-1, (), ["7", "a"]),
            id="link of a group",
        ),
        pytest.param({r: [group(7, 7, WIDE)] for r in (0, 1)}, -1, (), ["7", "0", "2, 3"], id="other nodes"),
        pytest.param(
            {0: [group(7, 7, WIDE)], 1: [group(6, 6, WIDE)]},
            *(-1, (), ["1", "6", "0", "2, 3"]),
            id="behind, and waits for other nodes itself",
        ),
        pytest.param(
            {r: [group(7, 7, tuple(range(10)))] for r in (0, 1)}, -1, (), ["8, 9[^.]*$"], id="eight elsewhere"
        ),
        pytest.param(
            {r: [group(7, 7, tuple(range(11)))] for r in (0, 1)}, -1, (), ["9, [.]{3}"], id="nine elsewhere"
        ),
    ],
)
def test_the_rank_that_is_behind_is_named(
    states: dict[int, Any], rank: int, waiting: tuple[int, ...], told: list[str]
) -> None:
    found = blame_by_order(states)
    assert found is not None
    assert (found.rank, found.waiting) == (rank, waiting)
    assert re.search(r"\b.*\b".join(told), found.reason), found.reason


@pytest.mark.parametrize(
    "states",
    [
        pytest.param({0: [WAITS], 1: None, 2: [WAITS]}, id="one does not answer"),
        pytest.param({0: None, 1: None}, id="none answers"),
        pytest.param({0: [], 1: []}, id="no groups"),
        pytest.param({0: [WAITS], 1: [BEHIND, pair(3, 3, (1, 2))], 2: None}, id="behind, waits for silent"),
        pytest.param(
            {0: [pair(7, 7)], 1: [pair(7)], 2: [pair(7, 7, (2, 3), "b")], 3: [pair(7, 7, (2, 3), "b")]},
            id="does not wait, others of another group do",
        ),
        pytest.param(
            {0: [pair(7, 7)], 1: None, 2: [pair(7, 7, (2, 3), "b")], 3: [pair(7, 7, (2, 3), "b")]},
            id="does not answer, others of another group wait",
        ),
        pytest.param({0: [group(7, 7, WIDE)], 1: [group(7, 0, WIDE)]}, id="works, other nodes"),
        pytest.param({0: [WAITS], 1: [group(7)], 2: [group(7)]}, id="two work"),
    ],
)
def test_what_the_order_does_not_show_is_left_to_other_evidence(states: dict[int, Any]) -> None:
    assert blame_by_order(states) is None


VOTE = group(4, 4, name="1")


@pytest.mark.parametrize(
    ("states", "outside", "rank"),
    [
        ({0: [WAITS, VOTE], 1: [BEHIND, VOTE], 2: [WAITS, group(3, name="1")]}, {1}, 1),
        ({0: [WAITS], 1: [BEHIND, pair(4, 4, (1, 8))]}, {1}, 1),
        ({0: [WAITS], 1: [BEHIND]}, {0, 1}, None),
        ({0: [pair(7, 7)], 1: [pair(7, 7)]}, {1}, None),
    ],
    ids=["a vote handed in", "one with other nodes", "nobody waits", "has left it"],
)
def test_what_is_pending_does_not_hold_up_a_rank_that_was_seen_elsewhere(
    states: dict[int, Any], outside: set[int], rank: int | None
) -> None:
    found = blame_by_order(states, outside)
    assert (found and found.rank) == rank


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1),
    st.sets(st.integers(0, 5)),
)
def test_no_rank_that_waits_for_others_is_named(found: dict[int, tuple[int, int]], outside: set[int]) -> None:
    states = {rank: (group(max(one), min(one), tuple(found)),) for rank, one in found.items()}
    verdict = blame_by_order(states, outside)
    if verdict is None or verdict.rank < 0:
        return
    assert verdict.rank not in verdict.waiting
    pending = [min(one) for rank, one in found.items() if min(one) and rank not in outside]
    assert max(found[verdict.rank]) < max(pending)
