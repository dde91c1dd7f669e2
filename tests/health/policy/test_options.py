"""Options of health that make no sense, or cannot take effect, are errors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outlast.health.policy.options import HealthOptions, source_problem

SECONDS = ("telemetry_interval", "call_timeout", "record_interval", "horizon", "save_cost")
ACT = {"mode": "act"}
WEIGHTED = {"model": "weighted"}


def test_the_defaults_have_no_problem() -> None:
    assert HealthOptions().problems() == ()


def test_the_defaults_are_those_that_the_documents_name() -> None:
    assert vars(HealthOptions()) == {
        "telemetry": "auto",
        "telemetry_interval": 10.0,
        "call_timeout": 5.0,
        "record_interval": 60.0,
        "kernel_log": "/dev/kmsg",
        "mode": "observe",
        "model": "hazard",
        "model_file": "",
        "horizon": 1800.0,
        "save_cost": 5.0,
        "drain_at": 0.5,
        "risk_threshold": 0.95,
        "threshold_frac": None,
        "ledger": "",
        "quarantine_after": 3,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"telemetry": "simulate:xid,device=3"},
        {"telemetry": "replay:x"},
        {"telemetry": "off"},
        {"telemetry": "nvml", "kernel_log": "/var/log/kern.log", "ledger": "/shared/ledger"},
        {"quarantine_after": 0},
        {"model_file": "site.json", "horizon": 1e9},
        {**ACT, "drain_at": 1.0, "threshold_frac": 1.0, "save_cost": 1e-9},
        {**ACT, "drain_at": 1e-9, "threshold_frac": 1e-9},
        {**ACT, **WEIGHTED, "risk_threshold": 1.0, "save_cost": 2.0, "threshold_frac": 0.5},
        {**WEIGHTED, "risk_threshold": 0.1},
    ],
)
def test_options_that_belong_together_have_no_problem(values: dict[str, Any]) -> None:
    assert HealthOptions(**values).problems() == ()


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_time_is_a_positive_number_of_seconds(name: str, value: float) -> None:
    options = HealthOptions(**{**ACT, name: value})  # type: ignore[arg-type]
    assert options.problems() == (f"{name}: {value} is not a positive number of seconds",)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"telemetry": "replay:"},
            "telemetry: found 'replay:', expected one of off, auto, nvml, replay:FILE",
        ),
        ({"telemetry": "on"}, "telemetry: found 'on', expected one of off, auto, nvml, replay:FILE"),
        ({"telemetry": "simulate:fire"}, "telemetry: 'simulate:fire': scenario 'fire' is unknown"),
        ({"telemetry_interval": 1e300}, "telemetry_interval: 1e+300 is more than a day (86400 seconds)"),
        ({"call_timeout": 86401.0}, "call_timeout: 86401.0 is more than a day (86400 seconds)"),
        ({"kernel_log": "kmsg"}, "kernel_log: 'kmsg' is no absolute path"),
        ({"ledger": "nodes"}, "ledger: 'nodes' is no absolute path"),
        ({"mode": "watch"}, "mode: found 'watch', expected one of observe, act"),
        ({"model": "neural"}, "model: found 'neural', expected one of hazard, weighted"),
        ({**ACT, "drain_at": 0.0}, "drain_at: 0.0 is not above 0 and up to 1"),
        ({**ACT, "drain_at": 1.01}, "drain_at: 1.01 is not above 0 and up to 1"),
        ({**ACT, "threshold_frac": 0.0}, "threshold_frac: 0.0 is not above 0 and up to 1"),
        ({**WEIGHTED, "risk_threshold": 1.5}, "risk_threshold: 1.5 is not above 0 and up to 1"),
        ({"quarantine_after": -1}, "quarantine_after: -1 is negative"),
        ({**WEIGHTED, "model_file": "x"}, 'model_file: has no effect with model = "weighted"'),
        ({**WEIGHTED, "horizon": 60.0}, 'horizon: has no effect with model = "weighted"'),
        ({**ACT, **WEIGHTED, "drain_at": 0.4}, 'drain_at: has no effect with model = "weighted"'),
        ({"risk_threshold": 0.4}, 'risk_threshold: has no effect with model = "hazard"'),
        ({"save_cost": 1.0}, 'save_cost: has no effect with mode = "observe"'),
        ({"drain_at": 0.4}, 'drain_at: has no effect with mode = "observe"'),
        ({"threshold_frac": 0.4}, 'threshold_frac: has no effect with mode = "observe"'),
        ({**ACT, "telemetry": "off"}, 'mode: "act" has no effect with telemetry = "off"'),
    ],
)
def test_an_option_that_cannot_take_effect_is_named(values: dict[str, Any], problem: str) -> None:
    (found,) = HealthOptions(**values).problems()
    assert found.startswith(problem)


def test_all_problems_are_named_at_once() -> None:
    found = HealthOptions(telemetry="on", kernel_log="", mode="x", ledger="y", horizon=0.0).problems()
    assert [one.partition(":")[0] for one in found] == [
        "horizon",
        "telemetry",
        "kernel_log",
        "mode",
        "ledger",
    ]


def test_a_source_that_is_known_has_no_problem() -> None:
    assert [source_problem(one) for one in ("off", "auto", "nvml", "replay:x", "simulate:lost")] == [""] * 5
