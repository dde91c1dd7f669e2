"""Options that make no sense, or cannot take effect, are errors."""

from __future__ import annotations

import pytest

from outlast.stragglers.policy.options import StragglerOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            StragglerOptions(action="evict"),
            "action: found 'evict', expected one of log, rebalance, replace, stop",
        ),
        (StragglerOptions(window=0), "window: 0 is not a positive number"),
        (StragglerOptions(pipeline_stages=-1), "pipeline_stages: -1 is not a positive number"),
        (StragglerOptions(enabled=False, action="stop"), "action: has no effect with enabled off"),
    ],
)
def test_an_option_that_cannot_take_effect_is_named(options: StragglerOptions, words: str) -> None:
    (problem,) = options.problems()
    assert problem.startswith(words)


def test_the_defaults_have_no_problem() -> None:
    assert StragglerOptions().problems() == ()
