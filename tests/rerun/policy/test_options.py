"""Options of reruns that make no sense, or cannot take effect, are named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from outlast.rerun.policy.options import RerunOptions


def test_the_defaults_are_those_of_the_reference() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "options.md").read_text()
    (table,) = re.findall(r"^## Reruns: `\[rerun\]`$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    assert {name: json.loads(value) for name, value in rows} == vars(RerunOptions())


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("rerun_mode", ["report_stats"], ["disabled", "report_determinism_stats"]),
        ("rejected_action", ["warn"], ["skip_batch", "roll_back"]),
        ("tolerance", [-1.0, math.nan, math.inf], [0.0]),
        ("suspect_steps", [-1], [0]),
        ("max_attempts", [-1], [0]),
        ("max_incidents_per_hour", [0], [1]),
        ("max_incident_seconds", [0.0], [0.5]),
        ("max_transients_per_day", [0], [1]),
    ],
)
def test_options_that_make_no_sense_are_named(name: str, wrong: list[object], right: list[object]) -> None:
    for value in wrong:
        problems = RerunOptions(**{name: value}).problems()
        assert [one.partition(":")[0] for one in problems] == [name], value
    for value in right:
        assert RerunOptions(**{name: value}).problems() == (), value


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (RerunOptions(rerun_mode="disabled", suspect_steps=3), ["suspect_steps"]),
        (RerunOptions(rerun_mode="disabled", rejected_action="skip_batch"), []),
        (RerunOptions(rerun_mode="report_determinism_stats", tolerance=0.1), ["tolerance"]),
        (RerunOptions("report_determinism_stats", rejected_action="skip_batch"), ["rejected_action"]),
    ],
)
def test_options_without_effect_are_named(options: RerunOptions, named: list[str]) -> None:
    assert [problem.partition(":")[0] for problem in options.problems()] == named
