"""Options of reruns that make no sense, or cannot take effect, are named."""

from __future__ import annotations

import math

import pytest

from outlast.rerun.policy.machine import Rerun


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (Rerun(rerun_mode="report_stats"), "rerun_mode"),
        (Rerun(rejected_action="warn"), "rejected_action"),
        (Rerun(tolerance=-1.0), "tolerance"),
        (Rerun(tolerance=math.nan), "tolerance"),
        (Rerun(tolerance=math.inf), "tolerance"),
        (Rerun(suspect_steps=-1), "suspect_steps"),
        (Rerun(max_attempts=-1), "max_attempts"),
        (Rerun(max_incidents_per_hour=0), "max_incidents_per_hour"),
        (Rerun(max_incident_seconds=0.0), "max_incident_seconds"),
        (Rerun(max_transients_per_day=0), "max_transients_per_day"),
        (Rerun(rerun_mode="disabled", suspect_steps=3), "suspect_steps"),
        (Rerun(rerun_mode="report_determinism_stats", tolerance=0.1), "tolerance"),
        (Rerun(rerun_mode="report_determinism_stats", rejected_action="skip_batch"), "rejected_action"),
    ],
)
def test_options_that_make_no_sense_are_named(options: Rerun, named: str) -> None:
    assert [problem.partition(":")[0] for problem in options.problems()] == [named]
    assert Rerun().problems() == ()


def test_options_at_their_bounds_make_sense() -> None:
    least = Rerun(
        tolerance=0.0,
        suspect_steps=0,
        max_attempts=0,
        max_incidents_per_hour=1,
        max_incident_seconds=0.5,
        max_transients_per_day=1,
    )
    assert least.problems() == ()
