"""The table of layouts: what is legal, and what a number of ranks gets."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout, ParallelismOptions, layout_for, refusals

SMALL = st.integers(1, 64)
TABLE = ParallelismOptions([{"tp": 2, "pp": 2, "dp": 2}, {"tp": 2, "pp": 2}, {"tp": 2}, {}])


@given(st.builds(Layout, tp=SMALL, pp=SMALL, dp=SMALL, cp=SMALL))
def test_a_layout_is_read_back_from_its_text(layout: Layout) -> None:
    assert Layout.parse(layout.text) == layout


def test_nothing_is_said_of_a_layout_that_can_be() -> None:
    assert Layout(tp=2, pp=2, dp=2, ep=2, virtual=2).problem() == ""


def test_a_layout_is_read_with_the_dimensions_that_are_not_1() -> None:
    assert Layout.parse("tp=2,dp=4") == Layout(tp=2, dp=4)


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=-2", "tp=2,tp=2", "xp=2", "tp=2;dp=2", "dp=4,ep=3"])
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"{text!r} is no layout; expected ranks by dimension"):
        Layout.parse(text)


def test_each_number_of_ranks_has_its_layout() -> None:
    assert TABLE.problems() == ()
    assert [one.ranks for one in TABLE.chosen] == [8, 4, 2, 1]
    assert layout_for(TABLE.chosen, 4) == Layout(tp=2, pp=2)
    assert layout_for(TABLE.chosen, 6) is None


@pytest.mark.parametrize(
    ("layouts", "problem"),
    [
        ([{"tp": 0}], "layouts.0: tp = 0 is not a positive whole number"),
        ([{}, {"dp": 4, "ep": 3}], "layouts.1: ep = 3 does not divide the 4 ranks of dp and cp"),
        ([{"tp": 2, "virtual": 2}], "layouts.0: virtual = 2 needs pp of at least 2"),
        ([{"tp": 2}, {"pp": 2}], "layouts.1: it has 2 ranks, and so has layouts.0"),
        ([{"vp": 2}], "layouts.0: found vp, expected some of tp, pp, dp, cp, ep, virtual"),
    ],
)
def test_what_is_wrong_in_the_table_is_said(layouts: list[dict[str, int]], problem: str) -> None:
    (found,) = ParallelismOptions(layouts).problems()
    assert found.startswith(problem)


def test_a_number_of_ranks_without_a_layout_is_refused_with_those_that_have_one() -> None:
    assert refusals(TABLE.chosen, {"8 ranks": 8, "6 ranks": 6}) == [
        "6 ranks: there is no layout for 6 ranks in [parallelism]; it has layouts for 1, 2, 4, 8"
    ]
    assert refusals((), {"6 ranks": 6}) == []


PLANNED = ParallelismOptions(model="gpt3-345m", global_batch=64, preferred={"tp": 2}, fixed=["tp"])


def test_what_the_planner_needs_is_in_the_table() -> None:
    assert PLANNED.problems() == ()
    assert replace(PLANNED, preferred={"tp": 2, "pp": 1}).problems() == ()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"layouts": [{}]}, "layouts, model: found both; give the layouts, or the model"),
        ({"global_batch": 0}, "global_batch: missing"),
        ({"sequence": -1}, "sequence: found -1, expected at least 0"),
        ({"micro_batch": 0}, "micro_batch: found 0, expected at least 1"),
        ({"memory": math.nan}, "memory: found nan, expected at least 0"),
        ({"memory": math.inf}, "memory: found inf, expected at least 0"),
        ({"preferred": {"tp": 2, "pp": 0}}, "preferred.pp: found 0, expected ranks of tp, pp, dp"),
        ({"preferred": {"vp": 2}}, "preferred.vp: found 2, expected ranks of tp, pp, dp, cp, ep, virtual"),
        ({"fixed": ["dp"]}, "fixed: found dp, expected some of tp, pp, cp, ep"),
        ({"preferred": {}}, "fixed: has no effect without preferred"),
    ],
)
def test_what_cannot_be_planned_is_said(changed: dict[str, Any], problem: str) -> None:
    (found,) = replace(PLANNED, **changed).problems()
    assert found.startswith(problem)


def test_every_option_of_the_planner_needs_a_model() -> None:
    given = ParallelismOptions(
        [], "", 1, 1, 2, 1.0, {"tp": 2}, ["tp"], even=True, recompute=True, replicated_optimizer=True
    )
    names = [spec.name for spec in fields(given) if spec.name not in ("layouts", "model")]
    assert [line.partition(":")[0] for line in given.problems()] == names
