"""The actions on bad numbers: the same on every rank, and never for ever."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import NumericsOptions
from outlast.numerics.policy.numerics import CLEAN_STEPS, Monitor
from outlast.numerics.policy.options import Action, Check
from outlast.numerics.policy.tally import Observation
from tests.numerics.policy.builders import (
    NAN,
    NUMBERS,
    actions,
    calm,
    judged,
    rolled_back,
    seen,
    take,
    tallied,
)

SPIKY = NumericsOptions(check_for_spiky_loss=True, check_for_spiky_grad_norm=True, spike_warmup=3)
APART = NumericsOptions(check_for_rank_outlier=True, spike_warmup=3)
ROLLBACK = NumericsOptions(nan_in_loss_action="rollback")
ALL_ON = {f"check_for_{check.value}": True for check in Check}
ACTIONS = st.sampled_from([action.value for action in Action])
OPTIONS = st.builds(
    NumericsOptions,
    **{name: st.just(True) for name in ALL_ON},
    **{f"{check.value}_action": ACTIONS for check in Check},
    max_consecutive=st.integers(1, 4),
    max_rollbacks=st.integers(0, 3),
    spike_window=st.integers(4, 8),
    spike_warmup=st.integers(3, 4),
)
STEPS = st.lists(st.tuples(*[NUMBERS] * 4), max_size=60)


@given(OPTIONS, STEPS, st.integers(0, 60))
def test_a_monitor_that_was_put_back_decides_the_same(
    options: NumericsOptions, steps: list[tuple], cut: int
) -> None:
    """So ranks that load one checkpoint agree with each other, and with those that never stopped."""
    one, other = Monitor(options), Monitor(options)
    for index, numbers in enumerate(steps):
        observation = Observation(index, numbers[:2], numbers[2:])
        if index == cut:
            other = Monitor(options)
            other.restore(json.loads(json.dumps(one.state())))
        assert repr(take(one, observation)) == repr(take(other, observation))


@given(OPTIONS, st.data())
def test_a_check_that_fires_at_every_step_ends(options: NumericsOptions, data: st.DataObject) -> None:
    """Whatever fires, wherever a rollback leads to."""
    monitor, step, turns = Monitor(options), 0, 0
    while True:
        turns += 1
        assert turns <= 4 * options.max_consecutive * (options.max_rollbacks + 1) + 4
        finding = take(monitor, seen(step, NAN, 1.0))
        assert finding is not None
        if finding.action is Action.RAISE:
            return
        if finding.action is Action.ROLLBACK:
            monitor.restore(Monitor(options).state())
            step = data.draw(st.integers(0, step))
        else:
            step += 1


@given(OPTIONS, STEPS)
def test_a_run_of_so_many_steps_ends_whatever_its_numbers_are(
    options: NumericsOptions, steps: list[tuple]
) -> None:
    """Numbers hang on the step alone, and each rollback goes back to the first step of all."""
    monitor, step, turns = Monitor(options), 0, 0
    while step < len(steps):
        turns += 1
        refills = len(steps) // CLEAN_STEPS + 1
        assert turns <= len(steps) * (1 + options.max_rollbacks * refills) + 1
        finding = take(monitor, Observation(step, steps[step][:2], steps[step][2:]))
        if finding is not None and finding.action is Action.RAISE:
            return
        if finding is not None and finding.action is Action.ROLLBACK:
            monitor.restore(Monitor(options).state())
            step = 0
        else:
            step += 1


@given(OPTIONS, STEPS)
def test_a_step_that_is_calm_by_its_tally_is_good_by_each_number(
    options: NumericsOptions, steps: list[tuple]
) -> None:
    """But for the outliers, of which the tally is off by what many ranks' sums leave open."""
    options = replace(options, check_for_rank_outlier=False)
    options = replace(options, rank_outlier_action=NumericsOptions.rank_outlier_action)
    monitor = Monitor(options)
    for index, numbers in enumerate(steps):
        losses, norms = numbers[:2], tuple(None if one is None else abs(one) for one in numbers[2:])
        whole = Observation(index, losses, norms)
        if monitor.calm(tallied(monitor, index, losses, norms)):
            assert monitor.judge(whole) is None
        take(monitor, whole)


# Bad steps in a row, and rollbacks


@pytest.mark.parametrize(
    ("first", "steps", "expected"),
    [
        ("warn", range(0, 60, 10), "warn warn skip skip rollback warn"),
        ("skip", range(0, 60, 10), "skip skip rollback skip skip raise"),
        ("rerun", range(0, 60, 10), "rerun rerun rollback rerun rerun raise"),
        ("rollback", (0, 10), "rollback raise"),
        ("raise", (0, 10), "raise raise"),
        ("rollback", (7, 7, 8, 9), "rollback skip skip raise"),
    ],
)
def test_after_so_many_bad_steps_in_a_row_the_next_action_is_taken(
    first: str, steps: range, expected: str
) -> None:
    monitor = Monitor(NumericsOptions(nan_in_loss_action=first, max_consecutive=2, max_rollbacks=1))
    assert actions(monitor, *steps) == expected.split()


@pytest.mark.parametrize("glance", [True, False])
def test_a_good_step_ends_the_bad_ones_in_a_row(glance: bool) -> None:
    monitor = Monitor(NumericsOptions(max_consecutive=2))
    assert [judged(monitor, seen(5, NAN, 1.0)).since, *actions(monitor, 5, 6)] == [5, "skip", "skip"]
    assert judged(monitor, seen(7, NAN, 1.0)).since == 5
    if glance:
        tally = tallied(monitor, 7, [1.0, 1.0]).tally
        assert tally is not None
        assert monitor.passes(7, tally) is True
    else:
        assert take(monitor, seen(7, 1.0, 1.0)) is None
    found = judged(monitor, seen(8, 1.0, NAN))
    assert (found.action, found.ranks, found.since) == (Action.SKIP, (1,), 8)


def test_a_step_counts_as_it_ended_though_it_was_judged_before() -> None:
    monitor = Monitor(NumericsOptions(nan_in_loss_action="rerun", max_consecutive=2))
    for step in range(9):
        assert judged(monitor, seen(step, NAN, 1.0)).action is Action.RERUN
        monitor.settle(seen(step, 1.0, 1.0), None)


def test_a_step_that_is_bad_again_after_a_rollback_is_skipped_and_those_right_after_it() -> None:
    monitor = rolled_back(ROLLBACK)
    assert judged(monitor, seen(8, NAN, 1.0)).action is Action.ROLLBACK
    assert actions(monitor, 7) == ["skip"]
    following = [judged(monitor, seen(step, NAN, 1.0)).action.value for step in (6, 8, 9)]
    assert following == ["rollback", "skip", "rollback"]
    other = Monitor(NumericsOptions(nan_in_grad_action="rollback"))
    assert actions(other, 3) == ["skip"]
    assert judged(other, seen(4, 1.0, 1.0, norms=(NAN, 1.0))).action is Action.ROLLBACK


@pytest.mark.parametrize(("clean", "left"), [(CLEAN_STEPS, 1), (CLEAN_STEPS + 1, 0)])
@pytest.mark.parametrize("glance", [True, False])
def test_rollbacks_are_forgiven_so_many_steps_past_the_furthest_bad_one(
    clean: int, left: int, glance: bool
) -> None:
    monitor = rolled_back(ROLLBACK)
    tally = tallied(monitor, 7 + clean, [1.0, 1.0]).tally
    assert tally is not None
    if glance:
        assert monitor.passes(7 + clean, tally)
    else:
        assert take(monitor, seen(7 + clean, 1.0, 1.0)) is None
    assert monitor.rollbacks == left
    again = judged(monitor, seen(7, NAN, 1.0)).action
    assert again is (Action.SKIP if left else Action.ROLLBACK), "the same data is as bad as before"


def test_a_rollback_keeps_its_budgets_once_and_a_restart_takes_those_of_the_copy() -> None:
    fresh = Monitor(NumericsOptions()).state()
    monitor = rolled_back(ROLLBACK)
    kept = monitor.state()
    assert (kept["rollbacks"], kept["met"], kept["furthest"]) == (1, [7], 7)
    monitor.restore(fresh)
    assert monitor.state() == fresh
    other = Monitor(NumericsOptions())
    other.restore(json.loads(json.dumps(kept)))
    assert other.state() == kept


def test_a_copy_of_a_job_without_these_checks_gives_them_no_values() -> None:
    state = Monitor(NumericsOptions()).state()
    del state["centre"]
    monitor = calm(APART, 2.0, 2.1)
    monitor.restore(state)
    assert monitor.state()["windows"] == {"rank_outlier": []}


# Good steps, at a glance


@pytest.mark.parametrize("checks", [{}, vars(SPIKY), vars(APART)], ids=["nan", "spikes", "outliers"])
def test_a_step_that_passes_at_a_glance_counts_as_any_good_one(checks: dict[str, Any]) -> None:
    options = NumericsOptions(**{**checks, "nan_in_loss_action": "rollback"})
    one, other = rolled_back(options), rolled_back(options)
    for step in (8, *range(8, 8 + 2 * CLEAN_STEPS)):
        losses, norms = (2 + 0.01 * (step % 3), 2.02), (1.0, 1.0 + 0.01 * (step % 2))
        glance = tallied(one, step, losses, norms)
        assert glance.tally is not None
        before = one.state()
        if one.passes(step, glance.tally):
            assert other.calm(glance) is True
            other.settle(glance, None)
        else:
            assert other.calm(glance) is False
            assert one.state() == before, "nothing is settled yet"
            for monitor in (one, other):
                assert take(monitor, Observation(step, losses, norms)) is None
        assert one.state() == other.state()
    assert (one.rollbacks, one.state()["met"]) == (0, [])


@pytest.mark.parametrize(
    ("options", "losses", "norms"),
    [
        *((one, (NAN, 2.0), (3.0, 4.0)) for one in (NumericsOptions(), SPIKY, APART)),
        *((one, (2.0, 2.0), (3.0, math.inf)) for one in (NumericsOptions(), SPIKY, APART)),
        (SPIKY, (9.0, 9.0), (3.0, 4.0)),
        (SPIKY, (2.0, 2.0), (30.0, 4.0)),
    ],
)
def test_a_bad_step_never_passes_at_a_glance(
    options: NumericsOptions, losses: tuple[float, ...], norms: tuple[float, ...]
) -> None:
    monitor = calm(options, 2.0, 2.0)
    before = monitor.state()
    glance = tallied(monitor, 4, losses, norms)
    assert glance.tally is not None
    assert (monitor.passes(4, glance.tally), monitor.calm(glance)) == (False, False)
    assert monitor.state() == before
    assert monitor.calm(seen(4, 1.0, 1.0)) is False, "each rank's own numbers are to be checked"


def test_ranks_are_compared_at_a_glance_once_something_is_known_of_them() -> None:
    monitor = Monitor(APART)
    assert monitor.terms(2.0) == (0.0, 0.0)
    assert monitor.calm(tallied(monitor, 0, [2.0, 2.1])) is False
    assert monitor.calm(tallied(monitor, 0, [2.0, None])) is True, "there is nobody to compare with"
    take(monitor, seen(0, 2.0, 2.1))
    assert monitor.terms(2.05) == pytest.approx((1.0, 1.0))
    for loss in (None, NAN, math.inf):
        assert monitor.terms(loss) == (0.0, 0.0)


def test_an_outlier_among_ranks_is_not_calm_and_its_rank_is_named_by_the_numbers() -> None:
    monitor = Monitor(NumericsOptions(check_for_rank_outlier=True))
    asked, norms = 0, [1.0] * 4
    for step in range(50):
        losses = [3 - 0.02 * step + 0.01 * ((step * 7 + rank * 3) % 5) for rank in range(4)]
        glance = tallied(monitor, step, losses, norms)
        if not monitor.calm(glance):
            asked += 1
            glance = seen(step, *losses)
            assert monitor.judge(glance) is None
        monitor.settle(glance, None)
    assert asked == 1, "in the first step"
    far = [2.0, 2.01, 2.9, 2.02]
    assert not monitor.calm(tallied(monitor, 50, far, norms))
    found = judged(monitor, seen(50, *far))
    assert (found.check, found.ranks) == (Check.RANK_OUTLIER, (2,))
    other = Monitor(NumericsOptions(check_for_rank_outlier=True))
    other.restore(json.loads(json.dumps(monitor.state())))
    assert other.terms(2.0) == monitor.terms(2.0)


# What is found


@pytest.mark.parametrize(
    ("options", "action", "names"),
    [
        ({"nan_in_loss_action": "warn"}, "warn", r" 1\b.*\b5"),
        ({"nan_in_loss_action": "skip"}, "skip", r" 1\b.*\b5"),
        ({"nan_in_loss_action": "rerun"}, "rerun", ""),
        ({"nan_in_loss_action": "rollback"}, "rollback", r" 1\b.*\b2"),
        ({"nan_in_loss_action": "rollback", "max_rollbacks": 0}, "raise", r"0\b.*\b0\b.*max_rollbacks"),
        ({"nan_in_loss_action": "raise"}, "raise", ""),
    ],
)
def test_a_finding_names_rank_number_step_and_what_is_left(
    options: dict[str, Any], action: str, names: str
) -> None:
    found = judged(Monitor(NumericsOptions(**options)), seen(3, 1.0, NAN))
    assert (found.check, found.action.value, found.ranks) == (Check.NAN_IN_LOSS, action, (1,))
    assert re.search(rf"\b1 .*\bnan\b.*\b3; .*{names}", found.reason)


@pytest.mark.parametrize(
    ("losses", "norms", "ranks", "value", "names"),
    [
        ((9.0, 9.0), (3.0, 4.0), (0, 1), 9.0, r"\bloss .*\b9 .*\b4 .*\b2, .*\b0\.04\b"),
        ((2.0, 2.0), (30.0, 40.0), (0, 1), 50.0, r"\bnorm .*\b50 .*\b4 .*\b5, .*\b0\.1\b"),
    ],
    ids=["loss", "norm"],
)
def test_a_spike_is_reported_with_the_measure_that_it_exceeds(
    losses: tuple[float, ...], norms: tuple[float, ...], ranks: tuple[int, ...], value: float, names: str
) -> None:
    found = judged(calm(SPIKY, 2.0, 2.0), seen(4, *losses, norms=norms))
    assert (found.ranks, found.value, found.action) == (ranks, value, Action.WARN)
    assert found.check is (Check.SPIKY_LOSS if value == 9.0 else Check.SPIKY_GRAD_NORM)
    assert re.search(names, found.reason)


@pytest.mark.parametrize(
    ("losses", "rank"),
    [
        ((2.0, None, 2.1, 1.0), 3),
        ((5.0, None, 2.0, 2.1), 0),
        ((-3.0, 2.0, None, 2.1), 0),
        ((-4.0, 5.0, 2.0, 1.0), 0),
    ],
)
def test_the_rank_that_is_furthest_from_the_others_is_reported(
    losses: tuple[float | None, ...], rank: int
) -> None:
    monitor = calm(APART, 2.0, None, 2.1, 2.1)
    found = judged(monitor, seen(4, *losses))
    assert (found.check, found.ranks, found.value) == (Check.RANK_OUTLIER, (rank,), losses[rank])
    far = judged(monitor, seen(4, 2.0, None, 2.1, 4.0))
    assert re.search(r"\b3 .*\b4 .*\b4; .*\b2 .*\b0\.1, .*\b0\.002\b", far.reason)
    before = monitor.state()["windows"]
    assert take(monitor, seen(4, None, 9.0)) is None, "there is nobody to compare with"
    assert monitor.state()["windows"] == before


@pytest.mark.parametrize(
    ("options", "losses", "norms", "check", "action"),
    [
        ({}, (1.0, 1.0), (1.0, math.inf), "nan_in_grad", "skip"),
        ({}, (NAN, 1.0), (NAN, 1.0), "nan_in_loss", "skip"),
        ({"nan_in_grad_action": "rollback"}, (NAN, 1.0), (NAN, 1.0), "nan_in_grad", "rollback"),
        ({"check_for_nan_in_loss": False}, (NAN, 1.0), (1.0, 1.0), "", ""),
        ({"check_for_nan_in_grad": False}, (1.0, 1.0), (NAN, 1.0), "", ""),
    ],
)
def test_the_gravest_action_is_taken_and_of_equal_ones_the_first_check_is_reported(
    options: dict[str, Any], losses: tuple[float, ...], norms: tuple[float, ...], check: str, action: str
) -> None:
    found = Monitor(NumericsOptions(**options)).judge(seen(3, *losses, norms=norms))
    assert ((found.check.value, found.action.value) if found else ("", "")) == (check, action)


@pytest.mark.parametrize(("action", "values"), [("warn", 5), ("skip", 4)])
def test_a_spike_that_is_only_warned_of_is_a_value_like_any_other(action: str, values: int) -> None:
    monitor = Monitor(NumericsOptions(check_for_spiky_loss=True, spiky_loss_action=action, spike_warmup=3))
    for loss in (2.0, 2.1, 2.0, 2.1, 9.0):
        take(monitor, seen(0, loss, loss))
    assert len(monitor.state()["windows"]["spiky_loss"]) == values


@pytest.mark.parametrize("number", [None, NAN, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_no_spike_and_no_usual_value(number: float | None) -> None:
    monitor = calm(replace(SPIKY, check_for_nan_in_loss=False), 2.0, 2.0)
    before = monitor.state()["windows"]["spiky_loss"]
    assert take(monitor, seen(4, number, number)) is None
    assert monitor.state()["windows"]["spiky_loss"] == before


# Options


def test_the_defaults_are_those_of_the_reference() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "options.md").read_text()
    (table,) = re.findall(r"^## Bad numbers: `\[numerics\]`$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    assert {name: json.loads(value) for name, value in rows} == vars(NumericsOptions())
    assert NumericsOptions().problems() == ()


@pytest.mark.parametrize(
    ("name", "bad", "good", "names"),
    [
        ("max_consecutive", 0, 1, "0.* 1"),
        ("max_rollbacks", -1, 0, "-1.* 0"),
        ("spike_warmup", 2, 3, "2.* 3"),
        ("spike_window", 31, 32, "31.* 32.*spike_warmup"),
        ("spike_factor", 0.0, 0.5, "0.0"),
        ("spike_factor", math.inf, 1e9, "inf"),
        ("spike_factor", NAN, 1e9, "nan"),
        ("spike_floor", -1.0, 0.5, "-1.0"),
        ("rank_outlier_action", "stop", "rerun", ".*stop.*warn, skip, rerun, rollback, raise"),
        ("nan_in_loss_action", "ignore", "warn", ".*ignore.*warn, skip, rerun, rollback, raise"),
    ],
)
def test_an_option_beyond_its_bound_is_refused_and_one_at_it_is_not(
    name: str, bad: object, good: object, names: str
) -> None:
    on: dict[str, Any] = {"check_for_rank_outlier": True}
    (problem,) = NumericsOptions(**{**on, name: bad}).problems()
    assert re.match(f"{name}: {names}", problem)
    assert NumericsOptions(**{**on, name: good}).problems() == ()


OFF = {"check_for_nan_in_loss": False, "check_for_nan_in_grad": False}
RAISE = {"nan_in_loss_action": "raise", "nan_in_grad_action": "raise"}


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"spike_factor": 3.0, "spike_floor": 0.1, "max_rollbacks": 1}, ["spike_factor", "spike_floor"]),
        ({**OFF, "spike_factor": 3.0}, ["check_for_..."]),
        ({**RAISE, "max_consecutive": 3, "max_rollbacks": 1}, ["max_consecutive", "max_rollbacks"]),
        ({**RAISE, "max_rollbacks": 1, "check_for_spiky_loss": True}, []),
        ({"nan_in_loss_action": "raise", "max_consecutive": 3}, []),
        (
            {"check_for_nan_in_loss": False, "nan_in_grad_action": "raise", "max_rollbacks": 1},
            ["max_rollbacks"],
        ),
        (
            {"spiky_loss_action": "skip", "rank_outlier_action": "skip"},
            ["spiky_loss_action", "rank_outlier_action"],
        ),
    ],
)
def test_each_option_without_an_effect_is_named(options: dict[str, Any], idle: list[str]) -> None:
    assert [line.partition(":")[0] for line in NumericsOptions(**options).problems()] == idle
