"""Options of health that make no sense, or cannot take effect, are errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from outlast.health.policy.options import HealthOptions

SECONDS = ("telemetry_interval", "call_timeout", "record_interval", "horizon", "save_cost")
ACT = {"mode": "act"}
WEIGHTED = {"model": "weighted"}


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
        {},
        *({"telemetry": one} for one in ("off", "auto", "nvml", "simulate:lost")),
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
    (problem,) = options.problems()
    assert name in problem
    assert str(value) in problem


@pytest.mark.parametrize(
    ("values", "named"),
    [
        *(({"telemetry": one}, f"telemetry.*{one}") for one in ("replay:", "on", "simulate:fire")),
        ({"telemetry_interval": 1e300}, "telemetry_interval.*86400"),
        ({"call_timeout": 86401.0}, "call_timeout.*86400"),
        ({"kernel_log": "kmsg"}, "kernel_log.*'kmsg'"),
        ({"ledger": "nodes"}, "ledger.*'nodes'"),
        ({"mode": "watch"}, "mode.*'watch'.*observe, act"),
        ({"model": "neural"}, "model.*'neural'.*hazard, weighted"),
        *(({**ACT, "drain_at": one}, f"drain_at.*{one}") for one in (0.0, 1.01)),
        ({**ACT, "threshold_frac": 0.0}, "threshold_frac.*0.0"),
        ({**WEIGHTED, "risk_threshold": 1.5}, "risk_threshold.*1.5"),
        ({"quarantine_after": -1}, "quarantine_after.*-1"),
        # Without effect.
        ({**WEIGHTED, "model_file": "x"}, "model_file.*model.*weighted"),
        ({**WEIGHTED, "horizon": 60.0}, "horizon.*model.*weighted"),
        ({**ACT, **WEIGHTED, "drain_at": 0.4}, "drain_at.*model.*weighted"),
        ({"risk_threshold": 0.4}, "risk_threshold.*model.*hazard"),
        *(({one: 0.4}, f"{one}.*mode.*observe") for one in ("save_cost", "drain_at", "threshold_frac")),
        ({**ACT, "telemetry": "off"}, "mode.*telemetry.*off"),
    ],
)
def test_an_option_that_makes_no_sense_or_has_no_effect_is_named(values: dict[str, Any], named: str) -> None:
    (found,) = HealthOptions(**values).problems()
    assert re.match(named, found)
