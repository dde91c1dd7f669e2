"""What a launcher leaves in ft_state.json, and what the next one makes of it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import LEARNED_FLOOR, FaultToleranceOptions
from outlast.hang.policy.timeouts import OUT_OF_SECTION, Timeouts
from tests.hang.policy.builders import many

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def experienced() -> Timeouts:
    timeouts = Timeouts(FaultToleranceOptions())
    timeouts.learn({"step": many(2.0, 2.0), "forward": many(3.0, 3.0, 50), OUT_OF_SECTION: many(4.0, 4.0)})
    timeouts.learn_initial(20.0, "step-1.g1")
    timeouts.double("forward")
    return timeouts


def test_the_state_has_the_shape_that_nvrx_gives_it() -> None:
    current = experienced().state()["current_timeouts"]
    assert current == {
        "heartbeat": {"initial": 100.0, "subsequent": 20.0, "were_calculated": True},
        "section": {
            "section": {"step": 10.0, "forward": 30.0},
            "out_of_section": 20.0,
            "calculated_sections": ["forward", "step"],
            "is_out_of_section_calculated": True,
        },
    }
    empty = Timeouts(FaultToleranceOptions()).state()["current_timeouts"]
    assert empty["heartbeat"] == {"initial": None, "subsequent": None, "were_calculated": False}
    assert empty["section"]["is_out_of_section_calculated"] is False


def test_what_was_learned_comes_back_through_a_file() -> None:
    first, second = experienced(), Timeouts(FaultToleranceOptions())
    assert second.restore(json.loads(json.dumps(first.state()))) == []
    assert second.state() == first.state()
    assert second.origin("forward") == first.origin("forward") != second.origin("step")
    assert second.double("step") == 20.0
    assert second.learn({OUT_OF_SECTION: many(5.0, 5.0, count=199)}) == {}
    assert Timeouts(FaultToleranceOptions()).restore(Timeouts(FaultToleranceOptions()).state()) == []


def test_a_default_that_was_doubled_is_learned_as_soon_after_a_restart_as_before_it() -> None:
    first, second = Timeouts(FaultToleranceOptions()), Timeouts(FaultToleranceOptions())
    first.double("step")
    second.restore(json.loads(json.dumps(first.state())))
    for timeouts in (first, second):
        assert timeouts.limit("step") == 600.0
        assert timeouts.learn({"step": many(2.0, 2.0, count=3)}) == {"step": 305.0}


@pytest.mark.parametrize("learned", ["initial", "subsequent"])
def test_nvrx_reads_that_a_limit_was_calculated_if_either_was(learned: str) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    if learned == "initial":
        timeouts.learn_initial(20.0, "step-1.g1")
    else:
        timeouts.learn({OUT_OF_SECTION: many(4.0, 4.0)})
    beats = timeouts.state()["current_timeouts"]["heartbeat"]
    assert beats["were_calculated"]
    assert [name for name in ("initial", "subsequent") if beats[name] is not None] == [learned]


@pytest.mark.parametrize(
    ("initial", "subsequent", "expected"),
    [(250.22, 2.0047, (250.22, 2.0047)), (0.5, 0.5, (30.0, LEARNED_FLOOR))],
    ids=["as it is", "lifted to the floor"],
)
def test_a_file_that_nvrx_wrote_is_understood(
    initial: float, subsequent: float, expected: tuple[float, float]
) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    beats = {"initial": initial, "subsequent": subsequent, "were_calculated": True}
    assert timeouts.restore({"current_timeouts": {"heartbeat": beats}}) == []
    assert (timeouts.initial(), timeouts.limit(None)) == expected
    assert "16" in timeouts.origin(None)


def test_nothing_is_taken_over_when_learning_is_off() -> None:
    timeouts = Timeouts(FaultToleranceOptions(calc_ft_timeouts=False))
    assert "calc_ft_timeouts" in "".join(timeouts.restore(experienced().state()))
    assert timeouts.limit("step") == 300.0


def state(**section: Any) -> dict[str, Any]:
    known = {"section": {}, "out_of_section": None, "calculated_sections": []}
    return {"current_timeouts": {"section": {**known, **section}}}


def step_of(seconds: object) -> dict[str, Any]:
    return state(section={"step": seconds}, calculated_sections=["step"])


def beats(calculated: bool, **limits: object) -> dict[str, Any]:
    return {"current_timeouts": {"heartbeat": {**limits, "were_calculated": calculated}}}


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ([], r"\[\]"),
        ({}, "current_timeouts"),
        ({**state(), "extra": 1}, "extra"),
        (state(extra=1, b=2), "section.*b, extra"),
        (step_of(-1.0), "step.*-1.0"),
        (step_of(0), "step.*0"),
        (step_of(1e9), "step.*1000000000.0"),
        (step_of(True), "step.*True"),
        (step_of(math.inf), "step.*inf"),
        (step_of(10**400), "step.*1000"),
        (state(section={"step": 5.0}), "step.*5 s"),  # set, and not learned
        (state(calculated_sections="step"), "calculated_sections.*'step'"),
        (state(out_of_section=5.0), "outlast.out_of_section.*5 s"),
        (beats(False, initial=60.0), "initial.*60 s"),
        (beats(True, subsequent="x"), "subsequent.*'x'"),
        ({**state(), "doubled": 1}, "doubled.*1"),
    ],
)
def test_what_makes_no_sense_is_named_and_learned_anew(found: object, named: str) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    (problem,) = timeouts.restore(found)
    assert re.search(f"ft_state.json.*{named}", problem)
    assert (timeouts.initial(), timeouts.limit("step"), timeouts.limit(None)) == (1800.0, 300.0, 300.0)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        *(({"samples": {"step": count}}, f"samples.step.*{count}") for count in (-1, True, "x", 1.5)),
        ({"doubled": 1}, "doubled.*1"),
    ],
)
def test_a_limit_is_kept_where_only_what_is_known_of_it_makes_no_sense(
    more: dict[str, object], named: str
) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    (problem,) = timeouts.restore({**step_of(5.0), **more})
    assert re.search(named, problem)
    assert timeouts.limit("step") == 5.0
    assert "16" in timeouts.origin("step")


def test_any_file_is_read_without_an_exception_and_what_is_odd_is_told() -> None:
    seen: Counter[str] = Counter()
    keys = ("initial", "subsequent", "were_calculated", "section", "out_of_section", "calculated_sections")
    table = st.dictionaries(st.sampled_from(keys), JSON)
    whole = st.fixed_dictionaries(
        {
            "current_timeouts": st.fixed_dictionaries(
                {}, optional={"heartbeat": table | JSON, "section": table}
            )
        },
        optional={"samples": JSON, "doubled": JSON},
    )

    @settings(max_examples=100)
    @given(whole | JSON)
    def check(found: object) -> None:
        timeouts = Timeouts(FaultToleranceOptions())
        problems = timeouts.restore(found)
        limits = (timeouts.initial(), timeouts.limit(None), timeouts.limit("step"))
        assert all(LEARNED_FLOOR <= limit < math.inf for limit in limits)
        assert all("ft_state.json" in problem for problem in problems)
        assert json.dumps(timeouts.state())
        seen["odd"] += bool(problems)
        seen["fine"] += not problems

    check()
    assert min(seen["odd"], seen["fine"]) > 0, seen
