"""Train each kind of script to a number of steps; STEPS=N unsaved.py RUN_DIR."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

import outlast

Kind = tuple[dict[str, Any], Callable[[int], object]]  # what is registered, and what is done in a step


class Rotary(torch.nn.Module):
    """A constant, and a cache that the first batch fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.arange(4.0), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not self.cache.numel():
            self.cache = self.inverse.cos()
        return batch * self.cache


def model(*more: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2), *more)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain() -> Kind:
    one = model()
    return {"model": one, "optimizer": adam(one.parameters())}, lambda _: None


def many() -> Kind:
    state, act = plain()
    optimizer = state["optimizer"]
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return {
        **state,
        "schedule": schedule,
        "scaler": scaler,
        "notes": {"seen": 0},
        "mean": torch.zeros(2),
    }, act


def rotary() -> Kind:
    one = torch.nn.Sequential(Rotary(), *model())
    return {"model": one, "optimizer": adam(one.parameters())}, lambda _: None


def frozen(when: Callable[[int], bool]) -> Kind:
    one = model()
    one[0].requires_grad_(False)

    def act(step: int) -> None:
        if when(step):
            one[0].requires_grad_(True)

    return {"model": one, "optimizer": adam(one.parameters())}, act


def batch_norm_switched_off() -> Kind:
    one = model()
    return {
        "model": one,
        "optimizer": adam(one.parameters()),
    }, lambda step: one[1].eval() if step == 2 else None


def validating() -> Kind:
    """The model is in evaluation mode while it is saved, and when the script starts."""
    one = model().eval()

    def act(step: int) -> None:
        one.eval() if step % 4 == 3 else one.train()

    return {"model": one, "optimizer": adam(one.parameters())}, act


def model_left_out() -> Kind:
    one = model()
    return {"optimizer": adam(one.parameters())}, lambda _: one


def head_left_out() -> Kind:
    one = model()
    return {"body": one[0], "optimizer": adam(one.parameters())}, lambda _: one


def tensors() -> Kind:
    one = torch.nn.Parameter(torch.ones(4))
    other = torch.nn.Parameter(torch.ones(4))
    return {"one": one, "box": {"other": [other]}, "optimizer": adam([one, other])}, lambda _: None


def queue() -> Kind:
    one = model()
    one.register_buffer("queue", torch.zeros(8), persistent=False)
    one.register_buffer("rebound", torch.zeros(2), persistent=False)

    def act(step: int) -> None:
        one.queue[step % 8] = step + 1
        one.rebound = one.rebound + 1

    return {"model": one, "optimizer": adam(one.parameters())}, act


KINDS: dict[str, Callable[[], Kind]] = {
    "plain": plain,
    "many": many,
    "rotary": rotary,
    "unfrozen-by-step": lambda: frozen(lambda step: step >= 2),
    "unfrozen-after": lambda: frozen(lambda step: step == 4),
    "validating": validating,
    "tensors": tensors,
    "unfrozen-once": lambda: frozen(lambda step: step == 2),
    "batch-norm-switched-off": batch_norm_switched_off,
    "model-left-out": model_left_out,
    "head-left-out": head_left_out,
    "queue": queue,
}


def train(name: str) -> None:
    state, act = KINDS[name]()
    modules = [one for one in (state.get("model"), act(0)) if isinstance(one, torch.nn.Module)][:1]
    with outlast.start(sys.argv[1], name=name, save_interval=4) as session:
        begun = session.restore(**state)
        for step in session.steps(int(os.environ["STEPS"])):
            act(step)
            for one in modules:
                one(torch.ones(3, 4) * step).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
    print(name, begun, flush=True)


for kind in KINDS:
    print(f"== {kind}", file=sys.stderr, flush=True)
    train(kind)
