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
    ("options", "named"),
    [
        (RerunOptions(rerun_mode="report_stats"), "rerun_mode"),
        (RerunOptions(rejected_action="warn"), "rejected_action"),
        (RerunOptions(tolerance=-1.0), "tolerance"),
        (RerunOptions(tolerance=math.nan), "tolerance"),
        (RerunOptions(tolerance=math.inf), "tolerance"),
        (RerunOptions(suspect_steps=-1), "suspect_steps"),
        (RerunOptions(max_attempts=-1), "max_attempts"),
        (RerunOptions(max_incidents_per_hour=0), "max_incidents_per_hour"),
        (RerunOptions(max_incident_seconds=0.0), "max_incident_seconds"),
        (RerunOptions(max_transients_per_day=0), "max_transients_per_day"),
        (RerunOptions(rerun_mode="disabled", suspect_steps=3), "suspect_steps"),
        (RerunOptions(rerun_mode="report_determinism_stats", tolerance=0.1), "tolerance"),
        (
            RerunOptions(rerun_mode="report_determinism_stats", rejected_action="skip_batch"),
            "rejected_action",
        ),
    ],
)
def test_options_that_make_no_sense_are_named(options: RerunOptions, named: str) -> None:
    assert [problem.partition(":")[0] for problem in options.problems()] == [named]
    assert RerunOptions().problems() == ()


def test_options_at_their_bounds_make_sense() -> None:
    least = RerunOptions(
        tolerance=0.0,
        suspect_steps=0,
        max_attempts=0,
        max_incidents_per_hour=1,
        max_incident_seconds=0.5,
        max_transients_per_day=1,
    )
    assert least.problems() == ()
