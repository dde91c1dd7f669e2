"""What is done about bad numbers: the same on every rank, and never for ever."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.agreement.policy.votes import Reading
from outlast.config import NumericsOptions
from outlast.numerics.policy.numerics import CLEAN_STEPS, Finding, Monitor
from outlast.numerics.policy.options import Action, Check
from outlast.numerics.policy.tally import Observation, addends, tally_of

NAN = math.nan
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
NUMBERS = st.one_of(st.none(), st.floats(0.5, 1.5), st.sampled_from([NAN, math.inf, -math.inf, 1e9, 0.0]))
STEPS = st.lists(st.tuples(*[NUMBERS] * 4), max_size=60)


def seen(step: int, *losses: float | None, norms: tuple[float | None, ...] = (1.0, 1.0)) -> Observation:
    return Observation(step, losses, norms)


def take(monitor: Monitor, observation: Observation) -> Finding | None:
    finding = monitor.judge(observation)
    monitor.settle(observation, finding)
    return finding


@given(OPTIONS, STEPS, st.integers(0, 60))
def test_a_monitor_that_was_put_back_says_the_same(
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
def test_a_check_that_fires_at_every_step_ends_with_a_reason(
    options: NumericsOptions, data: st.DataObject
) -> None:
    """Whatever fires, wherever a rollback leads to."""
    monitor, step, turns = Monitor(options), 0, 0
    while True:
        turns += 1
        assert turns <= 4 * options.max_consecutive * (options.max_rollbacks + 1) + 4
        observation = seen(step, NAN, 1.0)
        finding = take(monitor, observation)
        assert finding is not None
        assert finding.reason.endswith(tuple("abcdefghijklmnopqrstuvwxyz0123456789)"))
        if finding.action is Action.RAISE:
            return
        if finding.action is Action.ROLLBACK:
            saved = Monitor(options).state()
            monitor.restore(saved)
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


def test_bad_steps_in_a_row_move_up_and_a_good_one_forgives() -> None:
    monitor = Monitor(NumericsOptions(max_consecutive=2))
    actions = [take(monitor, seen(step, NAN, 1.0)) for step in range(5)]
    assert [one.action for one in actions if one] == [
        Action.SKIP,
        Action.SKIP,
        Action.ROLLBACK,
        Action.SKIP,
        Action.SKIP,
    ]
    assert take(monitor, seen(5, 1.0, 1.0)) is None
    finding = take(monitor, seen(6, 1.0, NAN))
    assert finding is not None
    assert (finding.action, finding.ranks, finding.since) == (Action.SKIP, (1,), 6)
    assert "the loss of rank 1 is nan in step 6; update skipped" in finding.reason


def test_a_row_that_comes_again_after_a_rollback_is_skipped_and_rollbacks_are_bounded() -> None:
    monitor = Monitor(NumericsOptions(nan_in_loss_action="rollback", max_consecutive=2, max_rollbacks=2))
    found = [take(monitor, seen(step, NAN, 1.0)) for step in (7, 7, 8, 9, 7, 8, 9)]
    assert [one.action for one in found if one] == [
        Action.ROLLBACK,
        *(Action.SKIP, Action.SKIP, Action.ROLLBACK),
        *(Action.SKIP, Action.SKIP, Action.RAISE),
    ]
    assert found[-1] is not None
    assert found[-1].reason.endswith("2 of 2 rollbacks without progress used (max_rollbacks)")


def test_progress_refills_the_rollbacks() -> None:
    monitor = Monitor(NumericsOptions(nan_in_loss_action="rollback", max_rollbacks=1))
    for first in (7, 100):
        finding = take(monitor, seen(first, NAN, 1.0))
        assert finding is not None
        assert finding.action is Action.ROLLBACK
        for step in range(first + 1, first + CLEAN_STEPS + 2):
            assert take(monitor, seen(step, 1.0, 1.0)) is None


def test_a_step_counts_as_it_ended_though_it_was_judged_before() -> None:
    monitor = Monitor(NumericsOptions(nan_in_loss_action="rerun", max_consecutive=2))
    for step in range(9):
        finding = monitor.judge(seen(step, NAN, 1.0))
        assert finding is not None
        assert finding.action is Action.RERUN
        monitor.settle(seen(step, 1.0, 1.0), None)


def test_an_infinite_gradient_with_a_finite_loss_is_found() -> None:
    finding = take(Monitor(NumericsOptions()), seen(3, 1.0, 1.0, norms=(1.0, math.inf)))
    assert finding is not None
    assert (finding.check, finding.action, finding.ranks) == (Check.NAN_IN_GRAD, Action.SKIP, (1,))


def test_a_spike_and_a_rank_that_is_far_from_the_others_are_found_and_named() -> None:
    options = replace(NumericsOptions(), **ALL_ON, nan_in_loss_action="raise")
    monitor = Monitor(options)
    for step in range(50):
        calm = [2 + 0.01 * ((step + rank) % 5) for rank in range(4)]
        assert take(monitor, Observation(step, tuple(calm), (1.0,) * 4)) is None
    spiky = monitor.judge(Observation(50, (20.0,) * 4, (1.0,) * 4))
    outlier = monitor.judge(Observation(50, (2.0, 2.01, 3.0, 2.02), (1.0,) * 4))
    steep = monitor.judge(Observation(50, (2.0,) * 4, (50.0,) * 4))
    assert spiky is not None
    assert outlier is not None
    assert steep is not None
    assert (spiky.check, spiky.action) == (Check.SPIKY_LOSS, Action.WARN)
    assert (outlier.check, outlier.ranks, outlier.value) == (Check.RANK_OUTLIER, (2,), 3.0)
    assert (steep.check, steep.value) == (Check.SPIKY_GRAD_NORM, 100.0)
    both = monitor.judge(Observation(50, (NAN, 20.0, 20.0, 20.0), (50.0,) * 4))
    assert both is not None
    assert both.action is Action.RAISE


def tallied(
    monitor: Monitor, step: int, losses: list[float | None], norms: list[float | None]
) -> Observation:
    """Return what a step's vote says at first."""
    rows = []
    for loss, norm in zip(losses, norms, strict=True):
        terms = monitor.terms(loss) if monitor.compares else (0.0, 0.0)
        rows.append(addends(frozenset(), Reading(loss, norm, *terms)))
    return Observation(step, tally=tally_of([sum(column) for column in zip(*rows, strict=True)]))


@given(OPTIONS, STEPS)
def test_a_step_that_is_calm_by_its_tally_is_good_by_each_number(
    options: NumericsOptions, steps: list[tuple]
) -> None:
    """But for the outliers, of which the tally is off by what many ranks' sums leave open."""
    options = replace(options, check_for_rank_outlier=False)
    options = replace(options, rank_outlier_action=NumericsOptions.rank_outlier_action)
    monitor = Monitor(options)
    for index, numbers in enumerate(steps):
        losses, norms = numbers[:2], [None if one is None else abs(one) for one in numbers[2:]]
        seen = tallied(monitor, index, list(losses), norms)
        whole = Observation(index, losses, tuple(norms))
        if monitor.calm(seen):
            assert monitor.judge(whole) is None
        take(monitor, whole)


def test_an_outlier_among_ranks_is_not_calm_and_its_rank_is_named_by_the_numbers() -> None:
    monitor = Monitor(NumericsOptions(check_for_rank_outlier=True))
    asked = 0
    for step in range(50):
        calm = [3 - 0.02 * step + 0.01 * ((step * 7 + rank * 3) % 5) for rank in range(4)]
        seen = tallied(monitor, step, calm, [1.0] * 4)
        if not monitor.calm(seen):
            asked += 1
            seen = Observation(step, tuple(calm), (1.0,) * 4)
            assert monitor.judge(seen) is None
        monitor.settle(seen, None)
    assert asked == 1, "in the first step, where nothing is known of the ranks"
    far = [2.0, 2.01, 2.9, 2.02]
    assert not monitor.calm(tallied(monitor, 50, far, [1.0] * 4))
    finding = monitor.judge(Observation(50, tuple(far), (1.0,) * 4))
    assert finding is not None
    assert (finding.check, finding.ranks) == (Check.RANK_OUTLIER, (2,))
    other = Monitor(NumericsOptions(check_for_rank_outlier=True))
    other.restore(json.loads(json.dumps(monitor.state())))
    assert other.terms(2.0) == monitor.terms(2.0)
    assert monitor.calm(tallied(monitor, 50, [2.0, None, None, None], [1.0] * 4)), "nobody to compare with"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nan_in_loss_action": "ignore"}, "nan_in_loss_action: found 'ignore', expected one of warn, skip"),
        ({"spiky_loss_action": "skip"}, "has no effect with check_for_spiky_loss off"),
        ({"spike_factor": 3.0}, "has no effect with every check for spikes"),
        ({"check_for_nan_in_loss": False, "check_for_nan_in_grad": False}, "all are off"),
        ({"max_consecutive": 0}, "at least 1"),
        (
            {"nan_in_loss_action": "raise", "nan_in_grad_action": "raise", "max_consecutive": 3},
            "max_consecutive: has no effect where every check raises at once",
        ),
        (
            {"check_for_nan_in_loss": False, "nan_in_grad_action": "raise", "max_rollbacks": 1},
            "max_rollbacks: has no effect where every check raises at once",
        ),
        ({"check_for_spiky_loss": True, "spike_window": 8}, "are never the 32 of spike_warmup"),
        ({"check_for_spiky_loss": True, "spike_factor": NAN}, "is not a positive number"),
    ],
)
def test_an_option_that_makes_no_sense_or_has_no_effect_is_a_problem(
    options: dict[str, object], problem: str
) -> None:
    assert any(problem in line for line in NumericsOptions(**options).problems())  # type: ignore[arg-type]
    assert not NumericsOptions().problems()
    assert not NumericsOptions(nan_in_loss_action="raise", max_consecutive=3).problems()
