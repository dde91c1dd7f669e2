"""What a launcher leaves in ft_state.json, and what the next one makes of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import LEARNED_FLOOR, FaultToleranceOptions
from outlast.hang.policy.timeouts import OUT_OF_SECTION, Durations, Timeouts

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def many(p99: float, longest: float, count: int = 100) -> Durations:
    return Durations(count, p99, longest)


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
    assert second.origin("forward") == "doubled after a repeated hang"
    assert second.double("step") == 20.0
    assert second.learn({OUT_OF_SECTION: many(5.0, 5.0, count=199)}) == {}


def test_a_default_that_was_doubled_is_learned_as_soon_after_a_restart_as_before_it() -> None:
    first, second = Timeouts(FaultToleranceOptions()), Timeouts(FaultToleranceOptions())
    first.double("step")
    second.restore(json.loads(json.dumps(first.state())))
    for timeouts in (first, second):
        assert timeouts.limit("step") == 600.0
        assert timeouts.learn({"step": many(2.0, 2.0, count=3)}) == {"step": 305.0}


@pytest.mark.parametrize("learned", ["initial", "subsequent"])
def test_nvrx_is_told_that_a_limit_was_calculated_if_either_was(learned: str) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    if learned == "initial":
        timeouts.learn_initial(20.0, "step-1.g1")
    else:
        timeouts.learn({OUT_OF_SECTION: many(4.0, 4.0)})
    beats = timeouts.state()["current_timeouts"]["heartbeat"]
    assert beats["were_calculated"]
    assert [name for name in ("initial", "subsequent") if beats[name] is not None] == [learned]


def test_an_empty_state_comes_back_without_a_word() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    assert timeouts.restore(Timeouts(FaultToleranceOptions()).state()) == []
    assert timeouts.limit("step") == 300.0


def test_a_file_that_nvrx_wrote_is_understood() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    beats = {"initial": 250.22, "subsequent": 2.0047, "were_calculated": True}
    assert timeouts.restore({"current_timeouts": {"heartbeat": beats}}) == []
    assert (timeouts.initial(), timeouts.limit(None)) == (250.22, 2.0047)
    assert timeouts.origin(None) == "learned from 16 samples"


def test_values_below_the_floor_are_lifted() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    beats = {"initial": 0.5, "subsequent": 0.5, "were_calculated": True}
    timeouts.restore({"current_timeouts": {"heartbeat": beats}})
    assert (timeouts.initial(), timeouts.limit(None)) == (30.0, LEARNED_FLOOR)


def test_nothing_is_taken_over_when_learning_is_off() -> None:
    timeouts = Timeouts(FaultToleranceOptions(calc_ft_timeouts=False))
    assert timeouts.restore(experienced().state()) == [
        "ft_state.json: ignored, because calc_ft_timeouts is off"
    ]
    assert timeouts.limit("step") == 300.0


def state(**section: Any) -> dict[str, Any]:
    known = {"section": {}, "out_of_section": None, "calculated_sections": []}
    return {"current_timeouts": {"section": {**known, **section}}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "the file is [], expected a table"),
        ({}, "current_timeouts is None, expected a table"),
        ({**state(), "extra": 1}, "the file has unknown extra; ignored"),
        (state(extra=1, b=2), "section has unknown b, extra; ignored"),
        (state(section={"step": -1.0}, calculated_sections=["step"]), "step is -1.0, expected a positive"),
        (state(section={"step": 0}, calculated_sections=["step"]), "step is 0, expected a positive"),
        (state(section={"step": 1e9}, calculated_sections=["step"]), "step is 1000000000.0, expected a pos"),
        (state(section={"step": True}, calculated_sections=["step"]), "step is True, expected a positive"),
        (state(section={"step": math.inf}, calculated_sections=["step"]), "step is inf, expected a positive"),
        (state(section={"step": 10**400}, calculated_sections=["step"]), "step is 1000"),
        (state(section={"step": 5.0}), "step was 5 s, set and not learned; not taken over"),
        (state(calculated_sections="step"), "calculated_sections is 'step', expected a list of sections"),
        (state(out_of_section=5.0), "outlast.out_of_section was 5 s, set and not learned; not taken over"),
        (
            {"current_timeouts": {"heartbeat": {"initial": 60.0, "were_calculated": False}}},
            "initial was 60 s, set and not learned; not taken over",
        ),
        (
            {"current_timeouts": {"heartbeat": {"subsequent": "x", "were_calculated": True}}},
            "subsequent is 'x', expected a positive number of seconds; learning again",
        ),
        ({**state(), "doubled": 1}, "doubled is 1, expected a list of sections"),
    ],
)
def test_what_makes_no_sense_is_named_and_learned_anew(found: object, expected: str) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    (problem,) = timeouts.restore(found)
    assert problem.startswith(f"ft_state.json: {expected}")
    assert (timeouts.initial(), timeouts.limit("step"), timeouts.limit(None)) == (1800.0, 300.0, 300.0)


@pytest.mark.parametrize("count", [-1, True, "x", 1.5])
def test_a_senseless_number_of_samples_is_named_and_the_limit_kept(count: object) -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    found = {**state(section={"step": 5.0}, calculated_sections=["step"]), "samples": {"step": count}}
    assert timeouts.restore(found) == [
        f"ft_state.json: samples.step is {count!r}, expected a number of samples; learning again"
    ]
    assert timeouts.origin("step") == "learned from 16 samples"


def test_a_limit_is_kept_where_it_is_not_known_whether_it_was_doubled() -> None:
    timeouts = Timeouts(FaultToleranceOptions())
    found = {**state(section={"step": 5.0}, calculated_sections=["step"]), "doubled": 1}
    assert timeouts.restore(found) == [
        "ft_state.json: doubled is 1, expected a list of sections; learning again"
    ]
    assert timeouts.limit("step") == 5.0


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

    @settings(max_examples=150)
    @given(whole | JSON)
    def check(found: object) -> None:
        timeouts = Timeouts(FaultToleranceOptions())
        problems = timeouts.restore(found)
        limits = (timeouts.initial(), timeouts.limit(None), timeouts.limit("step"))
        assert all(LEARNED_FLOOR <= limit < math.inf for limit in limits)
        assert all(problem.startswith("ft_state.json: ") for problem in problems)
        assert json.dumps(timeouts.state())
        seen["odd"] += bool(problems)
        seen["fine"] += not problems

    check()
    assert min(seen["odd"], seen["fine"]) > 0, seen
