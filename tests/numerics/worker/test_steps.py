"""What a step comes to on one rank, of parameters of every kind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import outlast
from outlast.agreement.policy.votes import Reading
from outlast.config import NumericsOptions, RerunOptions
from outlast.errors import UsageError
from outlast.numerics.worker.numerics import Gauge, bad_gradients
from outlast.rerun import RerunStateMachine


def gauge(model: torch.nn.Module, world: int = 1, **options: bool) -> Gauge:
    found = Gauge(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    found.equip(world)
    return found


def test_the_loss_is_the_mean_of_the_micro_batches_and_begins_anew() -> None:
    one = gauge(torch.nn.Linear(2, 2))
    for value in (1.0, torch.tensor([2.0]), torch.tensor(3.0, dtype=torch.float64)):
        one.add(torch.as_tensor(value))
    assert one.read() == Reading(2.0, None)
    one.add(torch.tensor(5.0, dtype=torch.bfloat16, requires_grad=True))
    assert one.read() == Reading(5.0, None)
    assert one.read() == Reading(None, None)


def test_a_loss_is_copied_for_its_memory_may_be_used_again() -> None:
    one, loss = gauge(torch.nn.Linear(2, 2)), torch.tensor(1.0)
    for value in (1.0, 3.0):
        loss.fill_(value)
        one.add(loss)
    loss.fill_(100.0)
    assert one.read().loss == 2.0


@pytest.mark.parametrize("wrong", [torch.zeros(3), 1.0, None])
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="loss"):
        gauge(torch.nn.Linear(2, 2)).add(wrong)  # type: ignore[arg-type]


def test_the_norm_is_that_of_all_gradients_that_there_are() -> None:
    model = torch.nn.ModuleDict(
        {
            "plain": torch.nn.Linear(3, 4),
            "short": torch.nn.Linear(3, 4, dtype=torch.float16),
            "long": torch.nn.Linear(2, 2, dtype=torch.float64),
            "unused": torch.nn.Linear(3, 4),
            "empty": torch.nn.ParameterList([torch.zeros(0, 4)]),
            "sparse": torch.nn.Embedding(5, 3, sparse=True),
        }
    )
    square = 0.0
    for name, each in model.items():
        for one in each.parameters() if name not in ("unused", "sparse") else ():
            one.grad = torch.full_like(one, 3e4)
            square += one.numel() * 3e4**2
    model["sparse"](torch.tensor([1, 1, 4])).sum().backward()
    square += 3 * 2**2 + 3 * 1**2
    for world in (1, 4):
        norm = gauge(model, world).read().norm
        assert norm == pytest.approx(math.sqrt(square / world), rel=1e-6)
    assert gauge(model, gradients=False).read().norm is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_gradients_are_named(bad: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    one, before = gauge(model), bad_gradients(model)
    assert math.isfinite(one.read().norm or math.nan)
    assert (before, one.bad) == ([], [])
    assert model[1].weight.grad is not None
    model[1].weight.grad[1, 0] = bad
    assert not math.isfinite(one.read().norm or 0.0)
    assert one.bad == bad_gradients(model) == ["1.weight"]


def test_a_guard_that_no_session_has_or_a_loss_from_elsewhere_is_an_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = outlast.Guard(model, optimizer)
    with pytest.raises(UsageError, match="session"):
        guard.should_run_forward_backward()
    with pytest.raises(UsageError, match="validate"):
        guard.validate(torch.tensor(1.0))
    with pytest.raises(UsageError, match="rerun"):
        outlast.Guard(model, optimizer, NumericsOptions(nan_in_loss_action="rerun"))
    with pytest.raises(UsageError, match="ignore"):
        outlast.Guard(model, optimizer, NumericsOptions(nan_in_loss_action="ignore"))
    with pytest.raises(UsageError, match="reruns"):
        outlast.Guard(model, optimizer, reruns=RerunStateMachine(model, optimizer))
    measuring = RerunOptions(rerun_mode="report_determinism_stats")
    outlast.Guard(model, optimizer, reruns=RerunStateMachine(model, optimizer, measuring))
    options = NumericsOptions(check_for_rank_outlier=True)
    with outlast.start(str(tmp_path)) as session, pytest.raises(UsageError, match="check_for_rank_outlier"):
        session.restore(model=model, guard=outlast.Guard(model, optimizer, options))
