from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core.intervals import (
    Level,
    RateEstimator,
    daly,
    ettr,
    exact,
    multi_level,
    waste,
    young,
)

# J. T. Daly (2006), figures 3 to 5, in minutes; the last four rows in seconds, worked out from his formulae.
SINGLE = [
    (5, 1440, 10, 120.000, 116.690, 116.690, 0.91261),
    (5, 360, 10, 60.000, 56.713, 56.714, 0.81938),
    (5, 15, 10, 12.247, 9.141, 9.167, 0.19967),
    (30, 10_000, 300, 774.597, 754.726, 754.727, 0.89720),
    (1, 10_000, 300, 141.421, 140.755, 140.755, 0.95679),
    (10, 811, 60, 127.358, 120.778, 120.780, 0.79038),
    (0.2, 811, 20, 18.011, 17.878, 17.878, 0.95413),
    (0.05, 60, 3, 2.449, 2.416, 2.416, 0.91292),
]
# Faults of which one, two or three levels are needed.
TIERS = (
    Level("memory", 0.2, 1 / 3600, 5),
    Level("local", 1, 1 / 14_400, 15),
    Level("far", 30, 1 / 86_400, 300),
)


@pytest.mark.parametrize("row", SINGLE, ids=str)
def test_published_intervals(row: tuple[float, ...]) -> None:
    cost, mtbf, restart, *intervals, share = row
    assert [young(cost, mtbf), daly(cost, mtbf), exact(cost, mtbf)] == pytest.approx(intervals, abs=6e-4)
    assert ettr(exact(cost, mtbf), cost, mtbf, restart) == pytest.approx(share, abs=6e-6)


@pytest.mark.parametrize(
    ("cost", "behind", "mtbf", "best", "lost"),
    [(1, 60 + 5 + 60, 10_000, 141.42, 0.02664), (0.05, 2 + 0.5 + 3, 60, 2.45, 0.13249)],
)
def test_waste_of_saving_beside_training(
    cost: float, behind: float, mtbf: float, best: float, lost: float
) -> None:
    assert young(cost, mtbf) == pytest.approx(best, abs=6e-3)
    assert waste(young(cost, mtbf), cost, mtbf, behind) == pytest.approx(lost, abs=6e-6)


def test_daly_saves_no_more_often_than_faults_come() -> None:
    assert daly(30, 15) == daly(100, 15) == 15


@given(st.floats(1e-12, 1e3), st.floats(0.1, 1e7))
def test_the_exact_interval_solves_its_equation(ratio: float, mtbf: float) -> None:
    """W exp(W) = -exp(-C/M - 1), looked at through its logarithm."""
    share = exact(ratio * mtbf, mtbf) / mtbf
    assert 0 < share <= 1
    if share < 1 - 1e-9:
        assert -(share + math.log1p(-share)) == pytest.approx(ratio, rel=1e-6, abs=1e-15)


@given(st.floats(1e-6, 3), st.floats(0.1, 1e6), st.floats(0.5, 2).filter(lambda off: abs(off - 1) > 0.01))
def test_no_other_interval_is_better(ratio: float, mtbf: float, off: float) -> None:
    cost = ratio * mtbf
    best = exact(cost, mtbf)
    assert ettr(best * off, cost, mtbf, 0) <= ettr(best, cost, mtbf, 0)


def test_extremes() -> None:
    assert exact(0, 100) == 0
    assert exact(1, math.inf) == math.inf
    assert exact(1e9, 1) == 1
    assert ettr(1, 1e9, 1, 0) == 0


def simulate(case: tuple[float, float, float], interval: float, faults: int, draw: random.Random) -> float:
    """Return the share of kept work of a job that is played through fault by fault."""
    cost, mtbf, restart = case
    kept = wall = 0.0
    restarting = False
    for _ in range(faults):
        left = draw.expovariate(1 / mtbf)
        wall += left
        if restarting:
            if left < restart:
                continue
            left -= restart
        kept += interval * (left // (interval + cost))
        restarting = True
    return kept / wall


@pytest.mark.parametrize("row", SINGLE[:3])
def test_a_simulated_job_keeps_the_share_that_the_formula_says(row: tuple[float, ...], seed: int) -> None:
    cost, mtbf, restart, best = row[0], row[1], row[2], row[5]
    draw = random.Random(seed)
    runs = [simulate((cost, mtbf, restart), best, 2000, draw) for _ in range(20)]
    error = statistics.stdev(runs) / math.sqrt(len(runs))
    assert ettr(best, cost, mtbf, restart) == pytest.approx(statistics.mean(runs), abs=5 * error)
    assert error < 0.005


def test_three_levels() -> None:
    plan = multi_level(TIERS)
    assert [round(seconds, 2) for _, seconds in plan.best] == [37.95, 169.71, 2276.84]
    assert plan.overhead == pytest.approx(0.048678, abs=5e-7)
    assert plan.recovery == pytest.approx(0.005903, abs=5e-7)
    assert plan.ettr == pytest.approx(0.94824, abs=5e-6)
    intervals = [seconds for _, seconds in plan.intervals]
    assert [intervals[1] / intervals[0], intervals[2] / intervals[1]] == pytest.approx([4, 15])


def test_the_same_faults_with_the_dearest_level_alone() -> None:
    mtbf = 1 / sum(level.rate for level in TIERS)
    assert mtbf == pytest.approx(2787.1, abs=0.05)
    assert exact(30, mtbf) == pytest.approx(389.2, abs=0.05)
    assert ettr(exact(30, mtbf), 30, mtbf, 300) == pytest.approx(0.77256, abs=5e-6)


def test_useless_levels_are_left_out() -> None:
    dear = Level("local", 40, 1 / 14_400, 15)
    assert [name for name, _ in multi_level([TIERS[0], dear, TIERS[2]]).best] == ["memory", "far"]
    needless, cheap = Level("moon", 60, 0, 1), Level("moon", 1, 0, 1)
    assert [name for name, _ in multi_level([*TIERS, needless]).best] == ["memory", "local", "far"]
    assert [name for name, _ in multi_level([*TIERS, cheap]).best] == ["memory", "moon"]
    assert multi_level([Level("memory", 1, 0, 1)]).best == multi_level([]).best == ()


def lost(levels: tuple[Level, ...], kept: tuple[int, ...], intervals: list[float] | None = None) -> float:
    """Return the loss of a choice of levels, written down anew; infinite when faults are left over."""
    total, begin = 0.0, 0
    for place, end in enumerate(kept):
        rate = sum(level.rate for level in levels[begin : end + 1])
        one, begin = levels[end], end + 1
        interval = intervals[place] if intervals else math.sqrt(2 * one.cost / rate) if rate else math.inf
        total += one.cost / interval + (rate * interval / 2 if rate else 0) + rate * one.restart
    return total if not any(level.rate for level in levels[begin:]) else math.inf


def test_no_choice_of_levels_is_better_and_whole_ratios_cost_little() -> None:
    seen: Counter[str] = Counter()
    level = st.tuples(
        st.floats(-1, 1).map(lambda power: 10**power),
        st.one_of(st.just(0.0), st.floats(-5, -3).map(lambda power: 10**power)),
        st.floats(0, 100),
    )

    @settings(max_examples=300)
    @given(st.lists(level, min_size=1, max_size=5), st.booleans())
    def check(drawn: list[tuple[float, float, float]], sensible: bool) -> None:
        if sensible:  # what survives more costs more and is needed less
            costs, rates, restarts = zip(*drawn, strict=True)
            drawn = list(zip(sorted(costs), sorted(rates, reverse=True), sorted(restarts), strict=True))
        levels = tuple(Level(str(i), *one) for i, one in enumerate(drawn))
        plan = multi_level(levels)
        places = range(len(levels))
        subsets = itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(6))
        best = min(lost(levels, subset) for subset in subsets)
        kept = tuple(int(name) for name, _ in plan.best)
        assert plan.overhead + plan.recovery == pytest.approx(best, rel=1e-9)
        assert lost(levels, kept) == pytest.approx(best, rel=1e-9)
        intervals = [seconds for _, seconds in plan.intervals]
        for one, other in itertools.pairwise(intervals):
            assert other / one == pytest.approx(max(1, round(other / one)))
        nested = lost(levels, kept, intervals) - plan.recovery
        assert plan.overhead * (1 - 1e-9) <= nested
        if sensible:  # else a level may be wanted more often than one that survives less, and cannot be had
            assert nested <= 1.25 * plan.overhead
        seen["dropped"] += len(kept) < sum(one.rate > 0 for one in levels)
        seen["nested"] += len(kept) > 1
        seen["rounded"] += nested > 1.0001 * plan.overhead

    check()
    assert min(seen["dropped"], seen["nested"], seen["rounded"]) > 0, seen


def fed(gaps: list[float], prior_mtbf: float = 21_600.0) -> RateEstimator:
    rate = RateEstimator(prior_mtbf)
    for gap in gaps:
        rate.ran(gap)
        rate.fault()
    return rate


def test_a_change_of_the_rate_is_followed_within_five_faults() -> None:
    before, after = fed([3600.0] * 20), fed([3600.0] * 20 + [300.0] * 5)
    assert 1 <= before.upper() * 3600 < 2.5
    assert young(1, 1 / after.upper()) == pytest.approx(young(1, 300), rel=0.25)
    assert fed([3600.0] * 20 + [300.0] * 2).upper() * 300 < 0.5


def test_quiet_time_lowers_the_rate() -> None:
    rate = fed([300.0] * 20)
    noisy = rate.upper()
    rate.ran(36_000)
    assert rate.upper() < noisy / 20


def test_the_upper_bound_is_above_the_rate_nine_times_in_ten(seed: int) -> None:
    draw = random.Random(seed)
    above = 0
    for _ in range(2000):
        above += fed([draw.expovariate(1 / 600) for _ in range(12)]).upper() > 1 / 600
    assert above / 2000 > 0.88


@pytest.mark.parametrize(
    ("faults", "percentile"), [(1, 2.302585), (2, 3.889720), (3, 5.322320), (5, 7.993590)]
)
def test_the_percentile_is_that_of_the_gamma_distribution(faults: int, percentile: float) -> None:
    rate = RateEstimator()
    rate.restore({"faults": faults, "seconds": 1, "quiet": 0})
    assert rate.upper() == pytest.approx(percentile, rel=0.012)
    # The table's numbers: the chance of fewer than `faults` events where `percentile` are expected is 10 %.
    fewer = sum(percentile**k / math.factorial(k) for k in range(faults)) * math.exp(-percentile)
    assert fewer == pytest.approx(0.1, abs=1e-6)


def test_an_estimate_outlives_its_process() -> None:
    rate, other = fed([100.0, 200.0]), RateEstimator()
    other.restore(rate.state())
    assert (other.upper(), other.state()) == (rate.upper(), rate.state())


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"quiet": None}, TypeError),
        ({"faults": "1"}, TypeError),
        ({"seconds": True}, TypeError),
        ({"seconds": 0}, ValueError),
        ({"seconds": math.inf}, ValueError),
        ({"faults": -1}, ValueError),
        ({"faults": math.nan}, ValueError),
        ({"quiet": -1}, ValueError),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(state: dict[str, object], error: type[Exception]) -> None:
    rate = fed([100.0])
    before = rate.state()
    with pytest.raises(error):
        rate.restore(before | state)
    with pytest.raises(KeyError):
        rate.restore({"faults": 1, "seconds": 1})
    assert rate.state() == before
