"""The weighted score: the published numbers, term by term."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outlast.health.policy import weighted
from outlast.health.policy.telemetry import DeviceSample, XidEvent
from outlast.health.policy.weighted import DETAILED, METRICS, WEIGHTS, Scored, Terms, Weighted

GIB = 1 << 30


def sample(number: int, **values: float) -> DeviceSample:
    filled = {
        **{"temperature": 60.0, "power": 400.0, "utilization": 0.95},
        **{"memory_used": 40 * GIB, "memory_total": 80 * GIB, "ecc_uncorrected": 0},
        **values,
    }
    return DeviceSample(10.0 * number, "n1", 0, "GPU-0", "H100", **filled)  # type: ignore[arg-type]


def last(*samples: DeviceSample) -> Scored:
    return Weighted().observe(samples)[-1]


def test_the_weights_are_the_published_ones() -> None:
    assert list(WEIGHTS.values()) == [0.25, 0.15, 0.25, 0.10, 0.15, 0.10]
    assert (weighted.WINDOW, weighted.INTERVAL, weighted.THRESHOLD) == (60, 10.0, 0.95)
    assert Terms(1, 1, 1, 1, 1, 1).score == 1.0


@pytest.mark.parametrize(("temperature", "term"), [(60, 0.0), (70, 0.0), (77.5, 0.5), (85, 1.0), (99, 1.0)])
def test_temperature(temperature: float, term: float) -> None:
    assert last(sample(0, temperature=temperature)).terms == Terms(temperature=term)


@pytest.mark.parametrize(("used", "term"), [(0.85, 0.0), (0.90, 0.5), (0.95, 1.0), (1.0, 1.0)])
def test_memory(used: float, term: float) -> None:
    assert last(sample(0, memory_used=int(used * 80 * GIB))).terms.memory == pytest.approx(term, abs=1e-6)


@pytest.mark.parametrize(("power", "term"), [(400, 0.0), (430, 0.5), (370, 0.5), (460, 1.0), (200, 1.0)])
def test_power_is_the_change_since_the_last_sample(power: float, term: float) -> None:
    assert last(sample(0), sample(1, power=power)).terms.power == pytest.approx(term)


def test_a_drop_of_the_utilisation_needs_ten_samples_and_a_busy_baseline() -> None:
    busy = [sample(number) for number in range(9)]
    assert last(*busy[:8], sample(8, utilization=0.8)).terms.utilization_drop == 0.0
    assert last(*busy, sample(9, utilization=0.8)).terms.utilization_drop == pytest.approx(0.5)
    idle = [sample(number, utilization=0.4) for number in range(9)]
    assert last(*idle, sample(9, utilization=0.0)).terms.utilization_drop == 0.0


def test_the_baseline_of_the_utilisation_is_all_but_the_latest_five_samples() -> None:
    shown = [0.9, 0.9, 0.9, 0.9, 0.7, 0.1, 0.1, 0.1, 0.1, 0.8]
    found = last(*(sample(number, utilization=one) for number, one in enumerate(shown)))
    assert found.terms.utilization_drop == pytest.approx(0.2)
    half = [sample(number, utilization=0.5) for number in range(9)]
    assert last(*half, sample(9, utilization=0.0)).terms.utilization_drop == 0.0


def test_samples_without_a_value_are_left_out_of_the_terms() -> None:
    known = [sample(number) for number in range(12)]
    holes = [replace(one, utilization=None) if at % 2 else one for at, one in enumerate(known)]
    drop = replace(known[-1], utilization=0.8)
    assert last(*holes[:-1], drop).terms.utilization_drop == pytest.approx(0.5)
    assert last(*known[:-1], replace(drop, utilization=None)).terms.utilization_drop == 0.0
    hot = replace(known[-1], temperature=65.0)
    assert last(*known[:-1], hot).terms.temp_rise == 1.0
    assert last(*(replace(one, temperature=None) for one in known[:-1]), hot).terms.temp_rise == 0.0
    assert last(*known[:-1], replace(hot, temperature=None)).terms.temp_rise == 0.0
    assert last(replace(known[0], power=None), known[1]).terms.power == 0.0
    assert last(known[0], replace(known[1], power=None)).terms.power == 0.0
    assert last(DeviceSample(0.0, "n1", 0), DeviceSample(10.0, "n1", 0, error="lost")).terms == Terms()
    unnamed = [DeviceSample(0.0, "n1", index, temperature=60.0) for index in (0, 1)]
    assert len(Weighted().observe(unnamed)) == 2, "devices without a name are apart"


@pytest.mark.parametrize(
    ("used", "total", "percent"),
    [(40, 80, 50.0), (0, 80, 0.0), (None, 80, None), (40, 0, None), (40, None, None)],
)
def test_the_used_share_of_the_memory(used: int | None, total: int | None, percent: float | None) -> None:
    assert weighted.memory_percent(replace(sample(0), memory_used=used, memory_total=total)) == percent


def test_a_rise_of_the_temperature_is_per_minute() -> None:
    rising = [sample(number, temperature=50.0 + 0.5 * number) for number in range(6)]
    assert last(*rising[:5]).terms.temp_rise == 0.0
    assert last(*rising).terms.temp_rise == pytest.approx(0.5)


def test_errors_count_for_the_window() -> None:
    judge = Weighted()
    judge.observe([sample(0), XidEvent(5.0, "n1", "", 0, 79)])
    scores = [judge.observe([sample(number)])[-1] for number in range(1, 63)]
    assert [one.terms.errors for one in scores[:60]] == [1.0] * 60
    assert [one.terms.errors for one in scores[60:]] == [0.0] * 2
    ecc = last(sample(0, ecc_uncorrected=5), sample(1, ecc_uncorrected=6))
    assert (ecc.terms.errors, ecc.errors) == (1.0, 1)


def test_every_error_counts_and_none_twice() -> None:
    judge = Weighted()
    events = [XidEvent(1.0, "n1", "", index, 79) for index in (0, 0, 1)]
    assert judge.observe([*events, sample(0)])[0].errors == 2
    assert judge.observe([sample(1)])[0].errors == 2
    counts = (5, None, 7, 0, 1)
    ecc = [replace(sample(number), ecc_uncorrected=one) for number, one in enumerate(counts)]
    assert [one.errors for one in Weighted().observe(ecc)] == [0, 0, 2, 2, 3]


@pytest.mark.parametrize(
    ("after", "taken"), [(0.0, False), (9.4, False), (9.5, True), (10.0, True), (-0.1, True)]
)
def test_a_sample_is_taken_when_the_interval_is_over(after: float, taken: bool) -> None:
    judge = Weighted()
    judge.observe([sample(9)])
    assert bool(judge.observe([replace(sample(9), time=90.0 + after)])) is taken


@pytest.mark.parametrize("interval", [0.5, 2.0, 10.0, 30.0])
def test_the_interval_is_the_users(interval: float) -> None:
    judge = Weighted(interval=interval)
    rise = 2.5 * interval / 60  # degrees a sample: 2.5 a minute, which is half of the term
    rising = [
        replace(sample(0), time=interval * number, temperature=50.0 + rise * number) for number in range(70)
    ]
    found = judge.observe(rising)
    assert len(found) == 70
    assert found[-1].terms.temp_rise == pytest.approx(0.5 * 5 / 6)  # five rises in six intervals, as there


def test_an_alert_names_the_terms() -> None:
    judge = Weighted(threshold=0.25)
    found = judge.observe([sample(0, temperature=90.0)])[0]
    assert found.alert
    assert all(word in found.reason for word in ("0.25", "temperature", "1.00"))


def test_the_lines_have_the_columns() -> None:
    found = last(sample(0))
    row = weighted.metrics_row(found, "2026-01-01T00:00:00")
    assert dict(zip(METRICS, row, strict=True)) == {
        **{"timestamp": "2026-01-01T00:00:00", "gpu_id": "0", "gpu_name": "H100", "driver_version": ""},
        **{"temperature": "60", "power_draw": "400", "gpu_utilization": "95", "memory_utilization": "50"},
        **{"memory_used": "40960", "memory_total": "81920", "errors": "0", "failure_risk": "0.0000"},
    }
    assert len(weighted.detailed_row(found.sample, "now")) == len(DETAILED)
    unknown = weighted.detailed_row(DeviceSample(0.0, "n1", 0, model="H100"), "now")
    assert unknown == ["now", "H100", *[""] * (len(DETAILED) - 2)]
    assert math.isclose(found.terms.score, 0.0)
