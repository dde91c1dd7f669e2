"""The fit: it finds the rates that made-up logs were drawn from, and shrinks what has few faults."""

from __future__ import annotations

import gzip
import math
import random
from pathlib import Path

import pytest

from outlast.health.policy.fault_logs import Logs
from outlast.health.policy.fitting import (
    Observed,
    Outage,
    SignSeen,
    fit,
    history_at,
    kinds_of,
    merged,
)
from outlast.health.policy.hazard import DAY, DEFAULT, HOUR, SIGNS, NodeHistory, Sign, probability

YEAR = 365 * DAY
TRACE = Path(__file__).parents[1] / "data" / "fault_trace.json.gz"


def drawn(seed: int, nodes: int, daily: float, again: float) -> list[Outage]:
    """Return a year of faults: at a daily rate, and at another within a day after a repair of six hours."""
    draw = random.Random(seed)
    found = []
    for node in range(nodes):
        time, back = 0.0, -math.inf
        while time < YEAR:
            rate = (again if time - back < DAY else daily) / DAY
            ahead = draw.expovariate(rate)
            edge = back + DAY
            if time < edge and time + ahead > edge:
                time = edge
                continue
            time += ahead
            if time < YEAR:
                found.append(Outage(f"n{node}", time, time + 6 * HOUR, "GPU"))
                time = back = time + 6 * HOUR
    return found


def test_the_rates_are_found_again(seed: int) -> None:
    model = fit(Observed(drawn(seed, 300, 0.005, 0.25), 0.0, YEAR, 300))
    never = probability(model.history_within(NodeHistory(), DAY))
    back = probability(model.history_within(NodeHistory(HOUR * 2, "GPU", 1), 22 * HOUR))
    assert never == pytest.approx(0.005, rel=0.3)
    assert back == pytest.approx(1 - math.exp(-0.25 * 22 / 24), rel=0.3)


def test_the_built_in_rates_are_those_of_the_whole_trace() -> None:
    logs = Logs()
    logs.add(gzip.decompress(TRACE.read_bytes()))
    found = fit(Observed(logs.outages, logs.begin, logs.end, 400))
    assert found.base == pytest.approx(DEFAULT.base, rel=0.003)
    for name, factors in DEFAULT.factors.items():
        assert {kind: found.factors[name][kind] for kind in factors} == pytest.approx(factors, rel=0.003)


def test_the_sum_of_what_is_expected_is_what_happened(seed: int) -> None:
    outages = drawn(seed, 100, 0.01, 0.2)
    model = fit(Observed(outages, 0.0, YEAR, 100), prior=0.01)
    expected = 0.0
    for mine in merged(outages).values():
        for day in range(365):
            history = history_at(mine, day * DAY)
            expected += 0.0 if history is None else model.history_within(history, DAY)
    assert expected == pytest.approx(len(outages), rel=0.15)


def test_a_class_with_one_fault_stays_close_to_the_others(seed: int) -> None:
    outages = drawn(seed, 100, 0.01, 0.02)
    rare = Outage("n0", YEAR - 2 * DAY, YEAR - 2 * DAY + HOUR, "Comet")
    weak = fit(Observed([*outages, rare], 0.0, YEAR, 100), prior=50.0).factors["last_fault"]["Comet"]
    strong = fit(Observed([*outages, rare], 0.0, YEAR, 100), prior=0.01).factors["last_fault"]["Comet"]
    assert abs(math.log(weak)) < 0.1 < abs(math.log(strong))


def test_without_a_fault_the_rate_is_small_and_not_zero() -> None:
    model = fit(Observed([], 0.0, YEAR, 100))
    assert 0 < probability(model.history_within(NodeHistory(), DAY)) < 1e-3


def test_the_history_at_a_time() -> None:
    outages = [Outage("a", DAY, 2 * DAY, "x"), Outage("a", 40 * DAY, 41 * DAY, "y")]
    assert history_at(outages, 0.5 * DAY) == NodeHistory()
    assert history_at(outages, 1.5 * DAY) is None
    assert history_at(outages, 2.5 * DAY) == NodeHistory(0.5 * DAY, "x", 1)
    assert history_at(outages, 50 * DAY) == NodeHistory(9 * DAY, "y", 1)
    assert kinds_of(NodeHistory(9 * DAY, "y", 8)) == ("30d", "y", "3")


def test_signs_that_are_followed_by_failures_get_a_larger_chance() -> None:
    nodes = [f"n{number}" for number in range(60)]
    seen = [SignSeen(node, 10 * DAY, sign) for node in nodes for sign in ("xid_failing", "hot")]
    outages = [Outage(node, 10 * DAY + HOUR, 11 * DAY, "GPU") for node in nodes[:40]]
    late = [Outage(node, 30 * DAY, 31 * DAY, "GPU") for node in nodes[40:]]
    found = fit(Observed([*outages, *late], 0.0, YEAR, 60, seen)).signs
    assert found["xid_failing"].chance > 2 * SIGNS["xid_failing"].chance
    assert found["slowdown"] == SIGNS["slowdown"]
    calm = fit(Observed(late, 0.0, YEAR, 60, seen)).signs
    assert calm["xid_failing"].chance < SIGNS["xid_failing"].chance / 2


@pytest.mark.parametrize(
    ("hours", "kind"),
    [(0, "1h"), (0.99, "1h"), (1, "1d"), (24, "3d"), (72, "7d"), (168, "30d"), (719, "30d"), (720, "later")],
)
def test_the_class_of_the_time_since_a_repair(hours: float, kind: str) -> None:
    assert kinds_of(NodeHistory(hours * HOUR, "x", 2)) == (kind, "x", "2")
    assert kinds_of(NodeHistory()) == ("never", "never", "0")


@pytest.mark.parametrize(("day", "faults"), [(30.9, 1), (31, 0)])
def test_a_fault_counts_for_30_days_from_its_begin(day: float, faults: int) -> None:
    outage = Outage("a", DAY, 2 * DAY, "x")
    assert history_at([outage], day * DAY) == NodeHistory((day - 2) * DAY, "x", faults)
    assert history_at([outage], DAY) is None
    assert history_at([outage], 2 * DAY) == NodeHistory(0.0, "x", 1)


def test_outages_that_touch_or_overlap_are_one_and_a_short_one_within_a_long_one_ends_nothing() -> None:
    touching = [Outage("a", 0.0, 5.0, "x"), Outage("a", 5.0, 6.0, "y"), Outage("a", 7.0, 8.0, "z")]
    assert merged(touching)["a"] == [Outage("a", 0.0, 6.0, "x"), Outage("a", 7.0, 8.0, "z")]
    overlapping = [Outage("a", 5.0, 9.0, "y"), Outage("a", 0.0, 6.0, "x"), Outage("a", 20.0, 21.0, "z")]
    assert merged(overlapping) == {"a": [Outage("a", 0.0, 9.0, "x"), Outage("a", 20.0, 21.0, "z")]}
    within = [Outage("a", 0.0, 9.0, "x"), Outage("a", 2.0, 3.0, "y"), Outage("b", 2.0, 3.0, "y")]
    assert merged(within) == {"a": within[:1], "b": within[2:]}


def test_a_year_with_one_fault_by_hand() -> None:
    outage = Outage("a", 100 * DAY, 101 * DAY, "GPU")
    found = fit(Observed([outage], 0.0, YEAR, 2), prior=1e-9)
    hours = 2 * 365 * 24 - 24
    assert found.base == pytest.approx(1.5 / (hours + 1800), rel=1e-9)
    assert found.factors["last_fault"].keys() == {"never", "GPU", "other"}
    assert found.factors["since_repair"].keys() == {"never", "1h", "1d", "3d", "7d", "30d", "later"}
    assert found.factors["faults_30d"].keys() == {"0", "1"}
    never = found.history_within(NodeHistory(), DAY)
    assert never == pytest.approx(24 * 1 / ((100 + 365) * 24), rel=1e-3)
    assert found.history_within(NodeHistory(HOUR, "GPU", 1), DAY) < 1e-6


def test_only_what_was_observed_counts() -> None:
    begin, end = 10 * DAY, 20 * DAY
    outages = [
        Outage("first", begin, begin + DAY, "GPU"),
        Outage("before", begin - 2 * DAY, begin - DAY, "GPU"),
        Outage("last", end, end + DAY, "GPU"),
    ]
    for nodes, hours in ((1, 29 * 24), (3, 29 * 24), (4, 39 * 24)):  # at least those that failed
        assert fit(Observed(outages, begin, end, nodes)).base == pytest.approx(1.5 / (hours + 1800))
    assert fit(Observed([], begin, end, 3)).base == pytest.approx(0.5 / (720 + 1800))


def test_a_class_of_faults_that_the_logs_did_not_have_counts_as_all_others_together(seed: int) -> None:
    found = fit(Observed(drawn(seed, 20, 0.01, 0.1), 0.0, YEAR, 20)).factors["last_fault"]
    assert found["other"] == pytest.approx(found["GPU"], rel=2e-3)


def test_the_chance_of_a_sign_by_hand() -> None:
    begin, seen, end = 10 * DAY, 11 * DAY, 20 * DAY
    outages = [
        Outage("soon", seen + 2 * HOUR, seen + DAY, "GPU"),
        Outage("just", seen + 3 * HOUR, seen + DAY, "GPU"),
        Outage("late", seen + 3 * HOUR + 1, seen + DAY, "GPU"),
        Outage("at once", seen, seen, "GPU"),
        Outage("end", end, end, "GPU"),
        Outage("out of service", seen - HOUR, seen + HOUR, "GPU"),
    ]
    hot = {**dict.fromkeys(("soon", "just", "late", "at once", "out of service"), seen), "calm": begin}
    signs = [SignSeen(node, time, "hot") for node, time in hot.items()]
    signs += [SignSeen("calm", end - HOUR, "hot")]
    signs += [SignSeen("soon", begin - 1, "hot"), SignSeen("end", end, "hot"), SignSeen("soon", seen, "?")]
    model = fit(Observed(outages, begin, end, 20, signs), prior=3.0)
    lived = [2 * HOUR, 3 * HOUR, 3 * HOUR, 3 * HOUR, HOUR]  # soon, just, late, calm twice; 0 for at once
    usual = SIGNS["hot"]
    expected = sum(usual.within(time) + model.history_within(NodeHistory(), time) for time in lived)
    weight = usual.weight * (3 + 3.0) / (expected + 3.0)
    assert model.signs == {**SIGNS, "hot": Sign(pytest.approx(1 - math.exp(-weight), rel=1e-12), HOUR)}
