"""What is done about bad numbers, at each bound: steps in a row, rollbacks, good steps at a glance."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from outlast.config import NumericsOptions
from outlast.numerics.policy.numerics import CLEAN_STEPS, Monitor
from outlast.numerics.policy.options import Action, Check
from outlast.numerics.policy.tally import Observation
from tests.numerics.policy.test_numerics import NAN, seen, take, tallied

SPIKY = NumericsOptions(check_for_spiky_loss=True, check_for_spiky_grad_norm=True, spike_warmup=3)
APART = NumericsOptions(check_for_rank_outlier=True, spike_warmup=3)


def test_the_defaults_are_those_of_the_reference() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "options.md").read_text()
    (table,) = re.findall(r"^## Bad numbers: `\[numerics\]`$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    assert {name: json.loads(value) for name, value in rows} == vars(NumericsOptions())


def rolled_back(options: NumericsOptions, step: int = 7) -> Monitor:
    """Return a monitor that has ordered a rollback from a step, and has loaded a copy since."""
    monitor = Monitor(options)
    saved = monitor.state()
    finding = monitor.judge(seen(step, NAN, 1.0))
    assert finding is not None
    assert finding.action is Action.ROLLBACK
    monitor.settle(seen(step, NAN, 1.0), finding)
    monitor.restore(saved)
    return monitor


@pytest.mark.parametrize("checks", [{}, vars(SPIKY), vars(APART)])
def test_a_step_that_passes_at_a_glance_counts_as_any_good_one(checks: dict[str, object]) -> None:
    options = NumericsOptions(**{**checks, "nan_in_loss_action": "rollback"})  # type: ignore[arg-type]
    one, other = rolled_back(options), rolled_back(options)
    for step in (8, *range(8, 8 + 2 * CLEAN_STEPS)):
        losses, norms = [2 + 0.01 * (step % 3), 2.02], [1.0, 1.0 + 0.01 * (step % 2)]
        glance = tallied(one, step, list(losses), list(norms))
        assert glance.tally is not None
        before = one.state()
        if one.passes(step, glance.tally):
            assert other.calm(glance) is True
            other.settle(glance, None)
        else:
            assert other.calm(glance) is False
            assert one.state() == before, "nothing is settled yet"
            for monitor in (one, other):
                assert take(monitor, Observation(step, tuple(losses), tuple(norms))) is None
        assert one.state() == other.state()
    assert (one.rollbacks, one.state()["met"]) == (0, [])


@pytest.mark.parametrize("options", [NumericsOptions(), SPIKY, APART])
def test_a_number_that_is_not_finite_never_passes_at_a_glance(options: NumericsOptions) -> None:
    monitor = Monitor(options)
    for losses, norms in (([NAN, 1.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, math.inf])):
        tally = tallied(monitor, 3, list(losses), list(norms)).tally
        assert tally is not None
        assert monitor.passes(3, tally) is False
        assert monitor.calm(Observation(3, tally=tally)) is False
    assert monitor.calm(seen(3, 1.0, 1.0)) is False, "each rank's own numbers are to be checked"


def test_a_spike_never_passes_at_a_glance() -> None:
    monitor = Monitor(SPIKY)
    for step in range(4):
        assert take(monitor, seen(step, 2.0, 2.0)) is None
    before = monitor.state()
    for loss, norm in ((9.0, 1.0), (2.0, 9.0)):
        spike = tallied(monitor, 4, [loss] * 2, [norm] * 2)
        assert spike.tally is not None
        assert monitor.passes(4, spike.tally) is False
        assert monitor.calm(spike) is False
    assert monitor.state() == before


def test_a_step_that_passes_ends_the_bad_steps_in_a_row() -> None:
    monitor = Monitor(NumericsOptions(max_consecutive=2))
    for step in (1, 2):
        take(monitor, seen(step, NAN, 1.0))
    tally = tallied(monitor, 3, [1.0, 1.0], [1.0, 1.0]).tally
    assert tally is not None
    assert monitor.passes(3, tally) is True
    finding = take(monitor, seen(4, NAN, 1.0))
    assert finding is not None
    assert (finding.action, finding.since) == (Action.SKIP, 4)


@pytest.mark.parametrize(("clean", "left"), [(CLEAN_STEPS, 1), (CLEAN_STEPS + 1, 0)])
@pytest.mark.parametrize("glance", [True, False])
def test_rollbacks_are_forgiven_so_many_steps_past_the_furthest_bad_one(
    clean: int, left: int, glance: bool
) -> None:
    monitor = rolled_back(NumericsOptions(nan_in_loss_action="rollback"))
    tally = tallied(monitor, 7 + clean, [1.0, 1.0], [1.0, 1.0]).tally
    assert tally is not None
    if glance:
        assert monitor.passes(7 + clean, tally)
    else:
        assert take(monitor, seen(7 + clean, 1.0, 1.0)) is None
    assert monitor.rollbacks == left
    finding = monitor.judge(seen(7, NAN, 1.0))
    assert finding is not None
    assert finding.action is (Action.SKIP if left else Action.ROLLBACK), "the same data is as bad as before"


@pytest.mark.parametrize(
    ("first", "actions"),
    [
        ("warn", ["warn", "warn", "skip", "skip", "rollback", "warn"]),
        ("skip", ["skip", "skip", "rollback", "skip", "skip", "raise"]),
        ("rerun", ["rerun", "rerun", "rollback", "rerun", "rerun", "raise"]),
        ("rollback", ["rollback", "raise"]),
        ("raise", ["raise", "raise"]),
    ],
)
def test_after_so_many_bad_steps_in_a_row_the_next_action_is_taken(first: str, actions: list[str]) -> None:
    monitor = Monitor(NumericsOptions(nan_in_loss_action=first, max_consecutive=2, max_rollbacks=1))
    found = [take(monitor, seen(10 * step, NAN, 1.0)) for step in range(len(actions))]
    assert [one.action.value for one in found if one] == actions


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"nan_in_loss_action": "warn"}, "update kept, consecutive bad steps: 1, escalating after 5"),
        ({"nan_in_loss_action": "skip"}, "update skipped, consecutive bad steps: 1, escalating after 5"),
        ({"nan_in_loss_action": "rerun"}, "rerunning the step"),
        (
            {"nan_in_loss_action": "rollback"},
            "loading an older checkpoint, rollback 1 of 2 without progress",
        ),
        (
            {"nan_in_loss_action": "rollback", "max_rollbacks": 0},
            "0 of 0 rollbacks without progress used (max_rollbacks)",
        ),
        ({"nan_in_loss_action": "raise"}, "the configured action"),
    ],
)
def test_a_finding_says_what_is_done_and_why(options: dict[str, object], why: str) -> None:
    monitor = Monitor(NumericsOptions(**options))  # type: ignore[arg-type]
    finding = monitor.judge(seen(3, 1.0, NAN))
    assert finding is not None
    assert finding.reason == f"the loss of rank 1 is nan in step 3; {why}"


def test_the_second_rollback_and_a_step_that_is_bad_again_are_told_of() -> None:
    monitor = rolled_back(NumericsOptions(nan_in_loss_action="rollback"))
    again, other = monitor.judge(seen(7, NAN, 1.0)), monitor.judge(seen(8, NAN, 1.0))
    assert again is not None
    assert other is not None
    assert again.reason.endswith("; update skipped: the step was bad again after a rollback")
    assert other.reason.endswith("; loading an older checkpoint, rollback 2 of 2 without progress")
    monitor.settle(seen(7, NAN, 1.0), again)
    following = [monitor.judge(seen(step, NAN, 1.0)) for step in (6, 8, 9)]
    assert [one.action for one in following if one] == [Action.ROLLBACK, Action.SKIP, Action.ROLLBACK]


def test_a_rollback_keeps_its_budgets_once_and_a_restart_takes_those_of_the_copy() -> None:
    fresh = Monitor(NumericsOptions()).state()
    monitor = rolled_back(NumericsOptions(nan_in_loss_action="rollback"))
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
    monitor = Monitor(APART)
    for step in range(5):
        take(monitor, seen(step, 2.0, 2.1))
    monitor.restore(state)
    assert monitor.state()["windows"] == {"rank_outlier": []}


@pytest.mark.parametrize(("action", "values"), [("warn", 5), ("skip", 4)])
def test_a_spike_that_is_only_warned_of_is_a_value_like_any_other(action: str, values: int) -> None:
    monitor = Monitor(NumericsOptions(check_for_spiky_loss=True, spiky_loss_action=action, spike_warmup=3))
    for loss in (2.0, 2.1, 2.0, 2.1, 9.0):
        take(monitor, seen(0, loss, loss))
    assert len(monitor.state()["windows"]["spiky_loss"]) == values


@pytest.mark.parametrize("number", [None, NAN, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_no_spike_and_no_usual_value(number: float | None) -> None:
    monitor = Monitor(NumericsOptions(**{**vars(SPIKY), "check_for_nan_in_loss": False}))
    for step in range(4):
        take(monitor, seen(step, 2.0, 2.0))
    before = monitor.state()["windows"]["spiky_loss"]
    assert take(monitor, seen(4, number, number)) is None
    assert monitor.state()["windows"]["spiky_loss"] == before


def test_bad_steps_in_a_row_are_told_with_the_first_one() -> None:
    monitor = Monitor(NumericsOptions())
    found = [take(monitor, seen(step, NAN, 1.0)) for step in (5, 6, 7)]
    assert [one.since for one in found if one] == [5, 5, 5]


def test_a_step_that_is_skipped_excuses_the_next_one_only_after_a_rollback() -> None:
    monitor = Monitor(NumericsOptions(nan_in_grad_action="rollback"))
    take(monitor, seen(3, NAN, 1.0))
    finding = monitor.judge(seen(4, 1.0, 1.0, norms=(NAN, 1.0)))
    assert finding is not None
    assert finding.action is Action.ROLLBACK


def test_a_spike_is_reported_with_the_measure_that_it_exceeds() -> None:
    monitor = Monitor(SPIKY)
    for step in range(4):
        assert take(monitor, seen(step, 2.0, 2.0, norms=(3.0, 4.0))) is None
    for observation, words, value in (
        (seen(4, 9.0, 9.0), "the loss is 9 in step 4 (median 2, spread 0.04)", 9.0),
        (
            seen(4, 2.0, 2.0, norms=(30.0, 40.0)),
            "the norm of the gradients is 50 in step 4 (median 5, spread 0.1)",
            50.0,
        ),
    ):
        finding = monitor.judge(observation)
        assert finding is not None
        assert finding.reason == f"{words}; update kept, consecutive bad steps: 1, escalating after 5"
        assert (finding.ranks, finding.value) == ((0, 1), value)


def test_the_rank_that_is_furthest_from_the_others_is_reported() -> None:
    monitor = Monitor(APART)
    for step in range(4):
        assert take(monitor, seen(step, 2.0, None, 2.1, 2.1)) is None
    for losses, rank in (
        ((2.0, None, 2.1, 1.0), 3),
        ((5.0, None, 2.0, 2.1), 0),
        ((-3.0, 2.0, None, 2.1), 0),
        ((-4.0, 5.0, 2.0, 1.0), 0),
    ):
        finding = monitor.judge(seen(4, *losses))
        assert finding is not None
        assert (finding.check, finding.ranks, finding.value) == (Check.RANK_OUTLIER, (rank,), losses[rank])
    finding = monitor.judge(seen(4, 2.0, None, 2.1, 4.0))
    assert finding is not None
    assert finding.reason == (
        "the loss of rank 3 is 4 in step 4; ranks are 2 apart (median 0.1, spread 0.002);"
        " update kept, consecutive bad steps: 1, escalating after 5"
    )
    before = monitor.state()["windows"]
    assert take(monitor, seen(4, None, 9.0)) is None, "there is nobody to compare with"
    assert monitor.state()["windows"] == before


def test_the_gravest_action_is_taken_and_of_equal_ones_the_first_check_is_reported() -> None:
    equal = Monitor(NumericsOptions()).judge(seen(3, NAN, 1.0, norms=(NAN, 1.0)))
    graver = Monitor(NumericsOptions(nan_in_grad_action="rollback")).judge(
        seen(3, NAN, 1.0, norms=(NAN, 1.0))
    )
    assert equal is not None
    assert graver is not None
    assert (equal.check, equal.action) == (Check.NAN_IN_LOSS, Action.SKIP)
    assert (graver.check, graver.action) == (Check.NAN_IN_GRAD, Action.ROLLBACK)


@pytest.mark.parametrize(("off", "losses", "norms"), [("loss", NAN, 1.0), ("grad", 1.0, NAN)])
def test_what_is_not_looked_for_is_not_found(off: str, losses: float, norms: float) -> None:
    options = NumericsOptions(**{f"check_for_nan_in_{off}": False})  # type: ignore[arg-type]
    assert Monitor(options).judge(seen(3, losses, 1.0, norms=(norms, 1.0))) is None
    assert Monitor(NumericsOptions()).judge(seen(3, losses, 1.0, norms=(norms, 1.0))) is not None


def test_a_rank_adds_nothing_to_the_comparison_until_there_is_one_and_without_a_loss() -> None:
    monitor = Monitor(APART)
    assert monitor.terms(2.0) == (0.0, 0.0)
    first = tallied(monitor, 0, [2.0, 2.1], [1.0, 1.0])
    assert monitor.calm(first) is False, "nothing is known of two ranks"
    assert monitor.calm(tallied(monitor, 0, [2.0, None], [1.0, 1.0])) is True
    take(monitor, seen(0, 2.0, 2.1))
    assert monitor.terms(2.05) == pytest.approx((1.0, 1.0))
    for loss in (None, NAN, math.inf):
        assert monitor.terms(loss) == (0.0, 0.0)


BAD_OPTIONS = (
    ("max_consecutive", 0, 1, "0 is too few; at least 1"),
    ("max_rollbacks", -1, 0, "-1 is too few; at least 0"),
    ("spike_warmup", 2, 3, "2 is too few; at least 3"),
    ("spike_window", 31, 32, "31 steps are never the 32 of spike_warmup"),
    ("spike_factor", 0.0, 0.5, "0.0 is not a positive number"),
    ("spike_factor", math.inf, 1e9, "inf is not a positive number"),
    ("spike_floor", -1.0, 0.5, "-1.0 is not a positive number"),
    (
        "rank_outlier_action",
        "stop",
        "rerun",
        "found 'stop', expected one of warn, skip, rerun, rollback, raise",
    ),
)


@pytest.mark.parametrize(("name", "bad", "good", "problem"), BAD_OPTIONS)
def test_an_option_beyond_its_bound_is_refused_and_one_at_it_is_not(
    name: str, bad: object, good: object, problem: str
) -> None:
    on = {"check_for_rank_outlier": True}
    assert NumericsOptions(**{**on, name: bad}).problems() == (f"{name}: {problem}",)  # type: ignore[arg-type]
    assert NumericsOptions(**{**on, name: good}).problems() == ()  # type: ignore[arg-type]


OFF = {"check_for_nan_in_loss": False, "check_for_nan_in_grad": False}
RAISE = {"nan_in_loss_action": "raise", "nan_in_grad_action": "raise"}


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        (
            {"spike_factor": 3.0, "spike_floor": 0.1, "max_rollbacks": 1},
            (
                "spike_factor: has no effect with every check for spikes and outliers off",
                "spike_floor: has no effect with every check for spikes and outliers off",
            ),
        ),
        (
            {**OFF, "spike_factor": 3.0},
            ("check_for_...: all are off, so a guard has no effect; leave it out",),
        ),
        (
            {**RAISE, "max_consecutive": 3, "max_rollbacks": 1},
            (
                "max_consecutive: has no effect where every check raises at once",
                "max_rollbacks: has no effect where every check raises at once",
            ),
        ),
        (
            {**RAISE, "max_rollbacks": 1, "check_for_spiky_loss": True},
            (),
        ),
        (
            {"spiky_loss_action": "skip", "rank_outlier_action": "skip"},
            (
                "spiky_loss_action: has no effect with check_for_spiky_loss off",
                "rank_outlier_action: has no effect with check_for_rank_outlier off",
            ),
        ),
    ],
)
def test_each_option_without_an_effect_is_named(
    options: dict[str, object], problems: tuple[str, ...]
) -> None:
    assert NumericsOptions(**options).problems() == problems  # type: ignore[arg-type]
