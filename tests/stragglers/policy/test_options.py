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
        (
            StragglerOptions(tensor_parallel=2),
            "tensor_parallel: has no effect without context_parallel or expert_parallel",
        ),
    ],
)
def test_an_option_that_cannot_take_effect_is_named(options: StragglerOptions, words: str) -> None:
    (problem,) = options.problems()
    assert problem.startswith(words)


def test_the_defaults_have_no_problem() -> None:
    assert StragglerOptions().problems() == ()
    assert StragglerOptions() == StragglerOptions(True, "log", 4, 1, 1, 1, 1)


@pytest.mark.parametrize(("context", "expert"), [(2, 1), (1, 2), (2, 2), (2, 3)])
def test_tensor_parallel_has_an_effect_beside_another_axis(context: int, expert: int) -> None:
    both = StragglerOptions(tensor_parallel=2, context_parallel=context, expert_parallel=expert)
    assert both.problems() == ()
    assert StragglerOptions(context_parallel=context, expert_parallel=expert).problems() == ()
