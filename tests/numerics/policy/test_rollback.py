"""What training goes back to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name, parse_copy_name
from outlast.numerics.policy.numerics import Plan, plan

Places = Sequence[tuple[int, int]]  # step and generation


def names(*places: tuple[int, int]) -> list[str]:
    return [copy_name(step, generation) for step, generation in places]


FIVE_TEN_FIFTEEN = ((5, 1), (10, 1), (12, 1), (15, 1))


@pytest.mark.parametrize(
    ("copies", "generation", "tried", "put_away", "avoid"),
    [
        pytest.param(FIVE_TEN_FIFTEEN, 1, (), [(15, 1)], [], id="before the first bad step"),
        pytest.param(FIVE_TEN_FIFTEEN, 1, [(12, 1)], [(12, 1), (15, 1)], [], id="the next one further back"),
        pytest.param(((10, 1), (15, 1)), 1, [(10, 1)], [(15, 1)], [], id="the only one again"),
        pytest.param(((5, 1), (10, 1), (12, 2)), 2, [(10, 1)], [(12, 2)], [(10, 1)], id="another generation"),
    ],
)
def test_a_rollback_from_step_13(
    copies: Places, generation: int, tried: Places, put_away: Places, avoid: Places
) -> None:
    found = plan(names(*copies), generation, 13, names(*tried))
    assert found == Plan(tuple(names(*put_away)), tuple(names(*avoid)))


def test_with_nothing_from_before_there_is_no_way_back() -> None:
    assert plan(names((15, 1)), 1, 13, ()) is None
    assert plan([], 1, 13, ()) is None


PLACES = st.tuples(st.integers(0, 30), st.integers(0, 3))


@given(st.sets(PLACES, max_size=8), st.integers(0, 3), st.integers(0, 30), st.sets(PLACES, max_size=4))
def test_what_is_left_to_load_is_from_before_and_its_later_names_are_free(
    places: set[tuple[int, int]], generation: int, below: int, tried: set[tuple[int, int]]
) -> None:
    found = plan(names(*places), generation, below, names(*tried))
    if found is None:
        assert all(step > below for step, _ in places)
        return
    left = [place for place in places if copy_name(*place) not in (*found.put_away, *found.avoid)]
    target = max(left)
    assert target[0] <= below
    assert not any(step > target[0] and of == generation for step, of in left)
    assert all((parse_copy_name(name) or (0, 0))[1] == generation for name in found.put_away)
    lower = [place for place in places if place[0] <= below and all(place < one for one in tried & places)]
    assert target == max(lower or [place for place in places if place[0] <= below])
