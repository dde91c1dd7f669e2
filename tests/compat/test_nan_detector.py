"""A detector by KempnerForge's names: its semantics."""

from __future__ import annotations

import math
import re

import pytest
import torch

import outlast
from outlast.compat import NaNDetector

NAN = math.nan


def test_it_counts_warns_and_asks_for_a_rollback(caplog: pytest.LogCaptureFixture) -> None:
    detector = NaNDetector(max_consecutive=2, max_history=3)
    assert detector.check_loss(2.5, 0)
    assert [detector.check_loss(one, step) for step, one in enumerate([NAN, math.inf], 1)] == [False, False]
    assert detector.should_rollback
    assert detector.check_loss(torch.tensor(2.0), 3)
    assert not detector.should_rollback
    for step in range(4, 9):
        detector.check_loss(NAN, step)
    state = detector.state
    assert (state.consecutive_nans, state.total_nans, state.nan_steps) == (5, 7, [6, 7, 8])
    assert (state.last_good_loss, state.last_good_step) == (2.0, 3)
    assert re.search(r"\b8\b", caplog.messages[-1])
    other = NaNDetector(max_history=3)
    other.load_state_dict(detector.state_dict())
    assert other.state == state
    detector.reset()
    assert detector.state.total_nans == 0


def test_it_raises_what_scripts_expect_and_what_the_launcher_knows() -> None:
    detector = NaNDetector(action="raise")
    with pytest.raises(RuntimeError, match=r"step 4\b.*rank 0"):
        detector.check_loss(NAN, 4)
    with pytest.raises(outlast.NonFinite, match=r"step 5\b"):
        detector.check_loss(NAN, 5)
    with pytest.raises(ValueError, match="'stop'"):
        NaNDetector(action="stop")
    for wrong in ({"max_consecutive": 0}, {"max_history": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*0"):
            NaNDetector(**wrong)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_it_names_the_gradient(caplog: pytest.LogCaptureFixture, kind: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(kind)
    detector = NaNDetector()
    assert detector.check_gradients(model, 0)
    for one in model.parameters():
        one.grad = torch.full_like(one, 6e4)  # whose norm float16 cannot hold
    assert detector.check_gradients(model, 1)
    model[1].bias.grad = torch.tensor([1.0, math.inf], dtype=kind)
    assert not detector.check_gradients(model, 2)
    assert re.search(r"1\.bias.*\b2\b", caplog.text)
