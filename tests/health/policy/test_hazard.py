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


def test_an_event_adds_and_a_condition_does_not() -> None:
    marks = Marks({"a": Sign(0.3, HOUR)})
    for _ in range(3):
        marks.hold("a", 0.0)
    held = marks.within(0.0, HOUR)
    for _ in range(100):
        marks.add("a", 0.0)
    assert marks.within(0.0, HOUR) == pytest.approx(10 * held)


def test_a_clock_that_goes_back_changes_nothing() -> None:
    marks = Marks({"a": Sign(0.3, HOUR)})
    marks.add("a", HOUR)
    assert marks.within(0.0, HOUR) == marks.within(HOUR, HOUR) == marks.within(HOUR - 1, HOUR)


def test_a_file_gives_the_same_model() -> None:
    again = model_of(json.loads(json.dumps(DEFAULT.to_json())))
    assert again == HazardModel(DEFAULT.base, DEFAULT.factors, dict(SIGNS), DEFAULT.source)


MODEL = HazardModel(
    0.01,
    {
        "since_repair": {
            **{"never": 2.0, "1h": 3.0, "1d": 5.0, "3d": 7.0, "7d": 11.0, "30d": 13.0, "later": 17.0}
        },
        "last_fault": {"never": 1.0, "GPU": 1.9, "other": 2.3},
        "faults_30d": {"0": 1.0, "1": 2.9, "2": 3.1, "3": 3.7},
    },
)


@pytest.mark.parametrize(
    ("history", "hours", "factor_hours"),
    [
        (NodeHistory(), 2, 2 * 2.0),
        (NodeHistory(0.0, "GPU", 0), 3, (1 * 3.0 + 2 * 5.0) * 1.9),
        (NodeHistory(-HOUR, "GPU", 0), 3, (1 * 3.0 + 1 * 5.0) * 1.9),  # the clock was set back
        (NodeHistory(HOUR, "GPU", 1), 1, 5.0 * 1.9 * 2.9),
        (NodeHistory(23 * HOUR, "GPU", 2), 72, (1 * 5.0 + 48 * 7.0 + 23 * 11.0) * 1.9 * 3.1),
        (NodeHistory(6 * DAY, "Fan", 3), 48, (24 * 11.0 + 24 * 13.0) * 2.3 * 3.7),
        (NodeHistory(29 * DAY, "Fan", 4), 48, (24 * 13.0 + 24 * 17.0) * 2.3 * 3.7),
        (NodeHistory(90 * DAY), 10, 10 * 17.0),
    ],
)
def test_each_hour_has_the_factors_of_its_classes(
    history: NodeHistory, hours: float, factor_hours: float
) -> None:
    assert MODEL.history_within(history, hours * HOUR) == pytest.approx(0.01 * factor_hours)


def test_a_condition_that_lasts_keeps_its_largest_weight() -> None:
    marks = Marks({"a": Sign(0.3, HOUR)})
    marks.hold("a", 0.0, 0.5)
    alone = marks.within(0.0, HOUR)
    marks.hold("a", 0.0, 0.25)
    assert marks.within(0.0, HOUR) == alone
    marks.hold("a", HOUR, 0.75)
    assert marks.within(HOUR, HOUR) == pytest.approx(1.5 * alone)
    marks.hold("a", HOUR, 1000.0)
    assert marks.within(HOUR, HOUR) == pytest.approx(20 * alone)


def test_the_largest_sign_comes_first_and_equal_ones_by_name() -> None:
    marks = Marks({name: Sign(0.5 if name == "b" else 0.1, HOUR) for name in "cab"})
    for name in "cab":
        marks.add(name, 0.0)
    assert list(marks.shares(0.0, HOUR)) == ["b", "a", "c"]


def test_a_file_changes_only_the_signs_that_it_names() -> None:
    signs = {"hot": {"chance": 0, "half_life": 1}}
    kinds = {"last_fault": {f"kind {number}": 1e6 for number in range(256)}}
    document = {"base_per_hour": 1e3, "factors": kinds, "signs": signs, "source": "x" * 1001}
    model = model_of({"format": 1, **document})
    assert model.factors == kinds
    assert model.signs == {**SIGNS, "hot": Sign(0.0, 1.0)}
    assert model.source == "x" * 1000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 2}, "format"),
        *(({"base_per_hour": value}, f"base_per_hour.*{value}") for value in (0, 1001, True, float("nan"))),
        ({"factors": []}, "factors"),
        ({"factors": {"faults_30d": {str(number): 1 for number in range(257)}}}, "faults_30d"),
        ({"factors": {"faults_30d": []}}, "factors.faults_30d"),
        ({"factors": {"faults_30d": {"1": 1e6 + 1}}}, "factors.faults_30d.1"),
        ({"factors": {"faults_30d": {"1": -1}}}, "factors.faults_30d.1"),
        ({"factors": {"weather": {}}}, "factors.*weather"),
        ({"signs": []}, "signs"),
        ({"signs": {"hot": 1}}, "signs.hot"),
        ({"signs": {"moon": {}}}, "signs.*moon"),
        ({"signs": {"hot": {"chance": -0.1, "half_life": 60}}}, "signs.hot.chance"),
        ({"signs": {"hot": {"chance": 1.0, "half_life": 60}}}, "signs.hot.chance"),
        ({"signs": {"hot": {"chance": 0.1}}}, "signs.hot.half_life"),
        *(
            ({"signs": {"hot": {"chance": 0.1, "half_life": one}}}, "signs.hot.half_life")
            for one in (0.9, 1e10 + 1)
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(change: dict[str, object], named: str) -> None:
    with pytest.raises(BadModel, match=named):
        model_of({**DEFAULT.to_json(), **change})
