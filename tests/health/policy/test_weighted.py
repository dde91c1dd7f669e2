"""The weighted score: the published numbers, term by term."""

from __future__ import annotations

import math

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


def test_without_errors_the_threshold_cannot_be_reached() -> None:
    worst = Terms(1, 1, 0, 1, 1, 1)
    assert worst.score == 0.75 < weighted.THRESHOLD


def test_the_terms_count_samples_so_others_are_left_out() -> None:
    judge = Weighted()
    assert len(judge.observe([sample(0)])) == 1
    quick = DeviceSample(3.0, "n1", 0, "GPU-0")
    assert judge.observe([quick]) == []
    back = DeviceSample(-500.0, "n1", 0, "GPU-0")  # the clock was set back
    assert len(judge.observe([back])) == 1


def test_what_is_not_known_counts_as_nothing() -> None:
    assert last(DeviceSample(0.0, "n1", 0), DeviceSample(10.0, "n1", 0, error="lost")).terms == Terms()


def test_devices_without_a_name_are_apart() -> None:
    judge = Weighted()
    samples = [DeviceSample(0.0, "n1", index, temperature=60.0) for index in (0, 1)]
    assert len(judge.observe(samples)) == 2


def test_an_alert_names_the_terms() -> None:
    judge = Weighted(threshold=0.25)
    found = judge.observe([sample(0, temperature=90.0)])[0]
    assert found.alert
    assert found.reason == "weighted score 0.25 (temperature 1.00)"


def test_the_lines_have_the_columns() -> None:
    found = last(sample(0))
    row = weighted.metrics_row(found, "2026-01-01T00:00:00")
    assert dict(zip(METRICS, row, strict=True)) == {
        **{"timestamp": "2026-01-01T00:00:00", "gpu_id": "0", "gpu_name": "H100", "driver_version": ""},
        **{"temperature": "60", "power_draw": "400", "gpu_utilization": "95", "memory_utilization": "50"},
        **{"memory_used": "40960", "memory_total": "81920", "errors": "0", "failure_risk": "0.0000"},
    }
    assert len(weighted.detailed_row(found.sample, "now")) == len(DETAILED)
    assert math.isclose(found.terms.score, 0.0)
