"""Whatever is trained with torch goes on from a checkpoint as if nothing had been, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.support.jobs import checkpointer
from tests.support.scripts.states import flat

SAVED, LATER = 3, 3  # steps
State = dict[str, Any]
Kind = Callable[[], tuple[State, Callable[[int], object]]]  # what is saved, and a step


def plain(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, width))


def loss_of(
    model: nn.Module, shape: tuple[int, ...] = (5, 8), dtype: torch.dtype | None = None
) -> torch.Tensor:
    found = model(torch.randn(shape, dtype=dtype))
    return (found[0] if isinstance(found, tuple) else found).square().mean()


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    more: State | None = None,
    then: Callable[[torch.Tensor], object] = lambda _: None,
    **how: Any,
) -> tuple[State, Callable[[int], object]]:
    """Return a model, its optimizer and more, with a step that ends with ``then``, given the loss."""

    def step(_: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, **how)
        loss.backward()
        optimizer.step()
        then(loss.detach())

    return {"model": model, "optimizer": optimizer, **(more or {})}, step


def with_optimizer(name: str, options: dict[str, Any]) -> tuple[State, Callable[[int], object]]:
    model = nn.Linear(8, 4, bias=False) if name == "Muon" else plain()
    rate = {"lr": options["lr"].clone()} if isinstance(options.get("lr"), torch.Tensor) else {}
    return trained(model, getattr(torch.optim, name)(model.parameters(), **options | rate))


def with_schedule(make: Callable[[Any], Any]) -> tuple[State, Callable[[int], object]]:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = make(optimizer)
    takes_loss = isinstance(schedule, schedulers.ReduceLROnPlateau)
    then = schedule.step if takes_loss else lambda _: schedule.step()
    return trained(model, optimizer, {"schedule": schedule}, then)


def with_model(make: Callable[[], nn.Module], **how: Any) -> tuple[State, Callable[[int], object]]:
    model = make()
    loss_of(model, **how)  # lazy ones get their shapes
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **how)


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {}),
    "adamw foreach": ("AdamW", {"foreach": True}),
    "adamw fused": ("AdamW", {"fused": True}),
    "adamw amsgrad": ("AdamW", {"amsgrad": True}),
    "adamw maximize": ("AdamW", {"maximize": True}),
    "adamw, a tensor is the rate": ("AdamW", {"lr": torch.tensor(1e-2)}),
    "sgd": ("SGD", {"lr": 1e-2}),
    "sgd nesterov": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "rmsprop": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "rprop": ("Rprop", {}),
    "asgd": ("ASGD", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "adafactor": ("Adafactor", {}),
    "muon": ("Muon", {}),
}


class Warm:
    """A rate by an object that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / 5)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda one: schedulers.LambdaLR(one, lambda step: 0.9**step),
    "object": lambda one: schedulers.LambdaLR(one, Warm()),
    "partial": lambda one: schedulers.LambdaLR(one, partial(pow, 0.9)),
    "multiplicative": lambda one: schedulers.MultiplicativeLR(one, lambda _: 0.95),
    "step": lambda one: schedulers.StepLR(one, 2),
    "steps": lambda one: schedulers.MultiStepLR(one, [1, 4]),
    "constant": lambda one: schedulers.ConstantLR(one, total_iters=4),
    "linear": schedulers.LinearLR,
    "exponential": lambda one: schedulers.ExponentialLR(one, 0.9),
    "polynomial": schedulers.PolynomialLR,
    "cosine": lambda one: schedulers.CosineAnnealingLR(one, 5),
    "warm restarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 2),
    "one cycle": lambda one: schedulers.OneCycleLR(one, 0.1, total_steps=20),
    "cyclic": lambda one: schedulers.CyclicLR(one, 0.01, 0.1),
    "cyclic by a function": lambda one: schedulers.CyclicLR(one, 0.01, 0.1, scale_fn=lambda at: 0.9**at),
    "plateau": lambda one: schedulers.ReduceLROnPlateau(one, patience=0),
    "sequence": lambda one: schedulers.SequentialLR(
        one, [schedulers.LinearLR(one), schedulers.ExponentialLR(one, 0.9)], [2]
    ),
    "chain": lambda one: schedulers.ChainedScheduler(
        [schedulers.LinearLR(one), schedulers.ExponentialLR(one, 0.9)]
    ),
    "swa": lambda one: SWALR(one, 0.01),
}


class Counting(nn.Module):
    """A module with extra state, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 4), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += data.detach().sum()
        return self.layer(data)  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(data)))  # type: ignore[no-any-return]


def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


def pruned() -> nn.Module:
    import torch.nn.utils.prune

    model = plain()
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.3)  # type: ignore[no-untyped-call,index]
    return model


def before_a_layer(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(change(nn.Linear(8, 6)), nn.Linear(6, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)), {}),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.LazyLinear(4)), {}),
    "weight norm": (lambda: before_a_layer(nn.utils.parametrizations.weight_norm), {}),
    "spectral norm": (lambda: before_a_layer(nn.utils.parametrizations.spectral_norm), {}),
    "orthogonal": (lambda: before_a_layer(nn.utils.parametrizations.orthogonal), {}),
    "weight norm by hooks": (lambda: before_a_layer(nn.utils.weight_norm), {}),
    "spectral norm by hooks": (lambda: before_a_layer(nn.utils.spectral_norm), {}),
    "tied": (Tied, {}),
    "extra state": (Counting, {}),
    "compiled": (lambda: torch.compile(plain(), backend="eager"), {}),  # type: ignore[dict-item,return-value]
    "compiled in place": (compiled_in_place, {}),
    "pruned": (pruned, {}),
    "recurrent": (lambda: nn.LSTM(8, 6, 2, dropout=0.1), {}),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), {"shape": (2, 3, 8)}),
    "half": (lambda: plain().to(torch.bfloat16), {"dtype": torch.bfloat16}),
    "double": (lambda: plain().to(torch.float64), {"dtype": torch.float64}),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        ),
        {"shape": (2, 3, 6, 6)},
    ),
}


def lbfgs() -> tuple[State, Callable[[int], object]]:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(_: int) -> None:
        data = torch.randn(5, 8)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(data).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    return {"model": model, "optimizer": optimizer}, step


def sparse() -> tuple[State, Callable[[int], object]]:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(torch.randint(10, (6,))).square().sum().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def exact_moments() -> tuple[State, Callable[[int], object]]:
    """Moments of another type than the parameter's, by an optimizer that torch does not know."""
    model = plain().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for one in model.parameters():
        zeros = {name: torch.zeros(one.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[one] = {"step": torch.tensor(0.0), **zeros}

    def step(_: int) -> None:
        model.zero_grad()
        loss_of(model, dtype=torch.bfloat16).backward()
        for one in model.parameters():
            held = optimizer.state[one]
            held["step"] += 1
            held["exp_avg"].lerp_(one.grad.float(), 0.1)  # type: ignore[union-attr]
            held["exp_avg_sq"].addcmul_(held["exp_avg"], held["exp_avg"])
            with torch.no_grad():
                one.sub_((0.01 * held["exp_avg"] / (held["exp_avg_sq"].sqrt() + 1e-8)).bfloat16())

    return {"model": model, "optimizer": optimizer}, step


def several_optimizers() -> tuple[State, Callable[[int], object]]:
    model = plain()
    parts = [model[0], model[3]]  # type: ignore[index]
    several = [torch.optim.AdamW(parts[0].parameters()), torch.optim.SGD(parts[1].parameters(), momentum=0.9)]

    def step(_: int) -> None:
        model.zero_grad()
        loss_of(model).backward()
        for one in several:
            one.step()

    return {"model": model, "first": several[0], "second": several[1], "head": parts[1]}, step


def later_group() -> tuple[State, Callable[[int], object]]:
    model = plain()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)  # type: ignore[index]
    state, train = trained(model, optimizer)

    def step(number: int) -> None:
        if number == 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 1e-3})  # type: ignore[index]
        train(number)

    return state, step


def named_groups() -> tuple[State, Callable[[int], object]]:
    model = plain()
    groups = [
        {"params": model[0].parameters(), "name": "a", "tag": ("x", 1)},  # type: ignore[index]
        {"params": model[3].parameters(), "lr": 1e-3},  # type: ignore[index]
    ]
    return trained(model, torch.optim.AdamW(groups))


class Noting(torch.optim.SGD):
    """An optimizer with lists and numbers of its own in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                held = self.state[one]
                held["calls"] = held.get("calls", 0) + 1
                held["means"] = [*held.get("means", []), one.detach().mean()]


def noting() -> tuple[State, Callable[[int], object]]:
    model = plain()
    return trained(model, Noting(model.parameters(), lr=1e-2, momentum=0.9))


def scaled() -> tuple[State, Callable[[int], object]]:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(_: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, step


def averaged() -> tuple[State, Callable[[int], object]]:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return trained(model, optimizer, {"mean": mean}, lambda _: mean.update_parameters(model))


def shadows() -> tuple[State, Callable[[int], object]]:
    """Averages that the script keeps itself, in a tuple of which it has references of its own."""
    model = plain()
    shadow = tuple(one.detach().clone() for one in model.parameters())
    box: State = {"shadow": shadow, "losses": [], "best": float("inf")}

    def then(loss: torch.Tensor) -> None:
        for one, live in zip(shadow, model.parameters(), strict=True):
            one.lerp_(live.detach(), 0.1)
        box["losses"].append(float(loss))
        box["best"] = min(box["best"], float(loss))

    return trained(model, torch.optim.SGD(model.parameters(), lr=1e-2), {"box": box}, then)


OTHERS: dict[str, Kind] = {
    one.__name__: one
    for one in (
        *(lbfgs, sparse, exact_moments, several_optimizers, later_group, named_groups),
        *(noting, scaled, averaged, shadows),
    )
}
KINDS: dict[str, Kind] = {
    **{
        name: partial(with_optimizer, *one)
        for name, one in OPTIMIZERS.items()
        if hasattr(torch.optim, one[0])
    },
    **{f"schedule {name}": partial(with_schedule, one) for name, one in SCHEDULES.items()},
    **{f"model {name}": partial(with_model, one, **how) for name, (one, how) in MODELS.items()},
    **OTHERS,
}


def made(kind: Kind, seed: int) -> tuple[State, Callable[[int], object]]:
    torch.manual_seed(seed)
    return kind()


def content(state: State) -> dict[str, str]:
    return {place: text for name, one in state.items() for place, text in flat(name, one).items()}


@pytest.mark.parametrize("name", KINDS)
def test_it_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about old modules and the order of steps
        state, step = made(kind, 0)
        for number in range(SAVED):
            step(number)
        saver = checkpointer(tmp_path)
        saver.restore(state)
        assert saver.save(SAVED, state, "a test")
        for number in range(SAVED, SAVED + LATER):
            step(number)
        again, step = made(kind, 1)
        restored = checkpointer(tmp_path, generation=2).restore(again)
        assert restored is not None
        assert restored.step == SAVED
        for number in range(SAVED, SAVED + LATER):
            step(number)
    assert content(again) == content(state)


class Extra(nn.Linear):
    """A module with a state besides its tensors."""

    def __init__(self, extra: object) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def one(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), float(ord(name))) for name in names}


# What a module had when it was saved, and what it has when it is loaded.
EXTRAS: dict[str, tuple[object, object]] = {
    "a shorter list": ({"h": [one("a", "b"), one("a", "b")]}, {"h": [one("a")]}),
    "a longer list": ({"h": [one("a", "b")]}, {"h": [one("a"), one("a")]}),
    "a tuple": ({"h": (one("a", "b"),)}, {"h": (one("a"),)}),
    "a tuple that has more": ({"h": (one("a"),)}, {"h": (one("a", "b"),)}),
    "a mapping of a list that has more": ({"h": [{}]}, {"h": [one("a")]}),
    "a list in a tuple": ({"h": ([one("a", "b")],)}, {"h": ([one("a")],)}),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_lists_and_tuples_hold_is_not_compared_with_the_live_objects(name: str, tmp_path: Path) -> None:
    saved, live = map(Extra, EXTRAS[name])
    checkpointer(tmp_path).save(1, {"model": saved}, "a test")
    restored = checkpointer(tmp_path, generation=2).restore({"model": live})
    assert restored is not None
    assert restored.notes == ()
    assert content({"model": live}) == content({"model": saved})
