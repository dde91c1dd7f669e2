"""The hazard: integrals against sums of small steps, decay, and the parameters file."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.health.policy.hazard import (
    DAY,
    DEFAULT,
    HOUR,
    MOST_WEIGHT,
    SIGNS,
    BadModel,
    HazardModel,
    Marks,
    NodeHistory,
    Sign,
    model_of,
    probability,
)


@given(
    age=st.floats(0, 40 * DAY),
    horizon=st.floats(60, 10 * DAY),
    kind=st.sampled_from(["", "GPU", "never heard of"]),
    faults=st.integers(0, 9),
)
def test_the_integral_is_the_sum_of_small_steps(age: float, horizon: float, kind: str, faults: int) -> None:
    pieces = 50
    steps = (
        DEFAULT.history_within(NodeHistory(age + horizon * piece / pieces, kind, faults), horizon / pieces)
        for piece in range(pieces)
    )
    whole = DEFAULT.history_within(NodeHistory(age, kind, faults), horizon)
    assert whole == pytest.approx(math.fsum(steps), rel=1e-9)


def test_a_node_that_came_back_is_at_risk_and_recovers() -> None:
    ages = (0.0, 2 * HOUR, 2 * DAY, 20 * DAY)
    risks = [probability(DEFAULT.history_within(NodeHistory(age, "GPU", 1), DAY)) for age in ages]
    assert risks == sorted(risks, reverse=True)
    assert risks[0] > 20 * probability(DEFAULT.history_within(NodeHistory(), DAY))


def test_titans_numbers_come_out_again() -> None:
    sign = SIGNS["uncorrected_ecc"]
    assert probability(sign.within(7 * DAY)) == pytest.approx(0.23, abs=0.01)
    assert probability(sign.within(30 * DAY)) == pytest.approx(0.46, abs=0.01)


def test_signs_add_up_and_fade_by_their_half_life() -> None:
    marks = Marks({"a": Sign(0.5, HOUR), "b": Sign(0.1, DAY)})
    marks.add("a", 0.0)
    alone = marks.within(0.0, HOUR)
    marks.add("b", 0.0)
    assert marks.within(0.0, HOUR) > alone
    assert marks.shares(0.0, HOUR)["a"] == pytest.approx(alone)
    assert marks.shares(HOUR, HOUR)["a"] == pytest.approx(alone / 2)
    assert list(marks.shares(0.0, HOUR)) == ["a", "b"]


def test_all_of_a_sign_is_its_chance() -> None:
    marks = Marks({"a": Sign(0.3, HOUR)})
    marks.add("a", 0.0)
    assert probability(marks.within(0.0, 1000 * HOUR)) == pytest.approx(0.3)


def test_an_event_adds_and_a_condition_does_not() -> None:
    marks = Marks({"a": Sign(0.3, HOUR)})
    for _ in range(3):
        marks.hold("a", 0.0)
    held = marks.within(0.0, HOUR)
    for _ in range(100):
        marks.add("a", 0.0)
    assert marks.within(0.0, HOUR) == pytest.approx(MOST_WEIGHT * held)


def test_a_clock_that_goes_back_changes_nothing() -> None:
    marks = Marks({"a": Sign(0.3, HOUR)})
    marks.add("a", HOUR)
    assert marks.within(0.0, HOUR) == marks.within(HOUR, HOUR)


def test_a_file_gives_the_same_model() -> None:
    again = model_of(json.loads(json.dumps(DEFAULT.to_json())))
    assert again == HazardModel(DEFAULT.base, DEFAULT.factors, dict(SIGNS), DEFAULT.source)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, 'an object with "format": 1 expected'),
        ({"base_per_hour": 0}, "base_per_hour: a number from 1e-12 to 1000 expected, 0 found"),
        ({"base_per_hour": True}, "True found"),
        ({"base_per_hour": float("nan")}, "nan found"),
        ({"factors": []}, "factors: an object"),
        (
            {"factors": {"weather": {}}},
            "factors: one of since_repair, last_fault, faults_30d expected, 'weather'",
        ),
        ({"factors": {"faults_30d": {"1": -1}}}, "factors.faults_30d.1: a number"),
        ({"signs": {"moon": {}}}, "signs: one of"),
        ({"signs": {"hot": {"chance": 1.0, "half_life": 60}}}, "signs.hot.chance: a number from 0 to 1"),
        (
            {"signs": {"hot": {"chance": 0.1}}},
            "signs.hot.half_life: a number from 1 to 1e+10 expected, None found",
        ),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadModel) as caught:
        model_of({**DEFAULT.to_json(), **change})
    assert words in str(caught.value)
