"""Save states of all kinds in one run, or load them into objects of other seeds.

states.py RUN {save,load,die} HOW OUT

HOW is "direct", "eager" or "lazy". It leaves OUT/save or OUT/load, a JSON document: for each kind digests of
what it holds, and of what it holds after more training. With "die" it saves in the first generation of a
launcher, which names the run, and kills itself; it loads in the next.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import random
import re
import signal
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

import outlast
from outlast.checkpoint import register_codec
from tests.support.quantized import Quantized, put_together, take_apart

SAVED, LATER = 3, 2  # steps
DIRECT = {"async_save": False}
HOW: dict[str, dict[str, Any]] = {"direct": DIRECT, "eager": {}, "lazy": {"staging": "lazy"}}
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
# Not those that no tensor has yet (uint3), nor quantized ones, which are refused.
PLAIN = [one for one in DTYPES if not re.search(r"torch\.(q|bits|u?int[1-7]$)", str(one))]


def octets(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def flat(name: str, value: Any) -> dict[str, str]:
    """Return digests of all that is in a value, by place, with types and the order of memory."""
    if isinstance(value, Quantized):
        return flat(f"{name}.data8", value.data8) | flat(f"{name}.scale", value.scale)
    if isinstance(value, torch.Tensor):
        what = f"{value.dtype} {list(value.shape)} {value.stride() if value.numel() > 1 else ''}"
        return {name: f"{what} {hashlib.sha256(octets(value)).hexdigest()[:12]}"}
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        return {name: f"{type(value).__name__} {array.dtype} {array.shape} {array.tobytes().hex()[:64]}"}
    if hasattr(value, "state_dict"):
        return flat(name, value.state_dict())
    found = {name: type(value).__name__}
    if isinstance(value, dict):
        return found | dict(
            itertools.chain.from_iterable(
                flat(f"{name}.{key!r}", value[key]).items() for key in value if key != "param_names"
            )
        )
    if isinstance(value, (list, tuple)):
        return found | dict(
            itertools.chain.from_iterable(flat(f"{name}.{at}", one).items() for at, one in enumerate(value))
        )
    text = value.hex() if isinstance(value, float) else repr(value)
    return {name: f"{type(value).__name__} {text}"}


class Kind:
    """What is saved, and what is looked at: the same, unless a kind says otherwise."""

    state: dict[str, Any]

    def train(self, step: int) -> None:
        """Do a step."""

    def look(self) -> Any:
        return self.state


class Trained(Kind):
    """A model of its own optimizer and schedule; dropout draws from the random state."""

    def __init__(
        self,
        seed: int,
        made: Callable[[Any], torch.optim.Optimizer] = lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        schedule: Callable[[Any], Any] = lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 50),
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 6))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2].parameters(), "lr": 0.05}]
        self.optimizer = made(groups)
        self.schedule = schedule(self.optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(self, step: int) -> None:
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()


class Convolutions(Kind):
    """Channels last, one layer of a single channel, a fused optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Conv2d(4, 8, 3), torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.Conv2d(8, 2, 3)]
        self.model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, step: int) -> None:
        data = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))
        self.model(data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Tied(Kind):
    """Two names of one parameter, and of one tensor."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.ModuleDict(
            {"in": torch.nn.Embedding(10, 4), "out": torch.nn.Linear(4, 10, bias=False)}
        )
        self.model["out"].weight = self.model["in"].weight
        shared = torch.full((3,), float(seed))
        self.box = {"a": shared, "b": shared} if seed == 0 else {}
        self.state = {"model": self.model, "box": self.box}

    def look(self) -> Any:
        return {
            **self.state,
            "one": [self.model["out"].weight is self.model["in"].weight, self.box["a"] is self.box["b"]],
        }


class Types(Kind):
    """A tensor of every type, in several shapes."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.state = {"box": {}}
        for dtype in PLAIN if seed == 0 else ():
            for shape in [(), (0,), (3, 0), (5,), (3, 7)]:
                count = int(numpy.prod(shape, dtype=int)) * dtype.itemsize
                content = bytes(dice.randrange(2 if dtype is torch.bool else 256) for _ in range(count))
                tensor = torch.tensor(list(content), dtype=torch.uint8).view(dtype).reshape(shape)
                self.state["box"][f"{dtype} {shape}"] = tensor


class Views(Kind):
    """Tensors that see a part of other memory, or see it otherwise, are saved by their values."""

    def __init__(self, seed: int) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        pair = torch.tensor([1 + 2j])
        box = {
            "transposed": base.t(),
            "strided": base[:, ::2],
            "part": base[1],
            "conjugate": pair.conj(),
            "negative": pair.conj().imag,
            "parameter": torch.nn.Parameter(base[2]),
        }
        self.state = {"box": box if seed == 0 else {}}

    def look(self) -> Any:
        return {
            key: (one.tolist(), str(one.dtype), key == "transposed" and one.stride())
            for key, one in self.state["box"].items()
        }


class Values(Kind):
    """What has a form in JSON by its type, and names that read alike."""

    def __init__(self, seed: int) -> None:
        values = {
            "numbers": [0, -1, 2**70, 10**400, True, None, 0.1, -0.0, float("inf"), float("-inf")],
            "texts": ("", "ä\0\ud800", b"\0\xff", bytearray(b"ab")),
            "containers": [
                OrderedDict(b=1, a=2),
                Counter("aab"),
                {1},
                frozenset({"x"}),
                {(1, "a"): {True: 0}},
            ],
            "torch": [torch.float32, torch.device("cuda:1"), torch.Size([2, 3])],
            "numpy": [
                numpy.float32(1.5),
                numpy.int64(-3),
                numpy.datetime64("2026-01-01"),
                numpy.array("text"),
            ],
            "arrays": (numpy.arange(6, dtype=">i4").reshape(2, 3), numpy.zeros((0, 3)), numpy.array(2.0)),
            "tags": [{"tensor": "model.weight"}, {"tuple": [1]}, {"dict": {"tensor": "x"}}],
            "a": {"b.c": torch.ones(1)},
            "a.b": {"c": torch.zeros(1)},
            0: torch.ones(2),
            "0": torch.zeros(2),
        }
        self.state = {"box": values if seed == 0 else {}, "__metadata__": torch.full((1,), float(seed))}


class Held(Kind):
    """The script's own references see what is loaded."""

    def __init__(self, seed: int) -> None:
        one, two, three = torch.zeros(2), torch.zeros(3, 2).t(), torch.zeros(2)
        array, octets_, names = numpy.zeros((2, 2)), bytearray(4), {0}
        ordered = OrderedDict(a=[torch.zeros(1)])
        box = {
            "shadow": (one, two, ("text", (three,))),
            "again": [one, {"one": one}],
            "arrays": (array, [array]),
            "others": [octets_, names, ordered],
        }
        self.state = {"box": box}
        self.held = [one, two, three, array, octets_, names, ordered, ordered["a"][0], box["shadow"]]
        if seed == 0:
            one += 1
            two += torch.arange(6).view(2, 3)
            three += 3
            array += 4
            octets_[:] = b"abcd"
            names.add(5)
            ordered["b"] = 6

    def look(self) -> Any:
        box = self.state["box"]
        same = [box["shadow"] is self.held[8], box["again"][0] is box["shadow"][0] is self.held[0]]
        return {"held": self.held, "same": [*same, box["arrays"][1][0] is self.held[3]]}


class History(torch.nn.Module):
    """Gives its history as bytes in a tensor, and an empty one while there is none: so Transformer Engine."""

    def __init__(self, history: list[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.history = history

    def get_extra_state(self) -> torch.Tensor:
        if not self.history:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.history)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = pickle.loads(state.numpy().tobytes()) if state.numel() else []


class Extra(Kind):
    """Extra states of other sizes than those that are live."""

    SIZES = (0, 1, 9)

    def __init__(self, seed: int) -> None:
        pairs = itertools.product(self.SIZES, self.SIZES)
        modules = [History([float(seed + 1)] * (now if seed else then)) for then, now in pairs]
        self.state = {"model": torch.nn.Sequential(*modules)}


class Growing(torch.nn.Module):
    """Takes buffers of any length, as the observers of quantization do."""

    def __init__(self, content: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", content)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *more)


class Grown(Kind):
    def __init__(self, seed: int) -> None:
        layers = [torch.nn.BatchNorm1d(2), Growing(torch.arange(5.0) if seed == 0 else torch.zeros(0))]
        self.state = {"model": torch.nn.Sequential(*layers)}

    def look(self) -> Any:
        found = self.state["model"].state_dict()
        return {**self.state, "versions": getattr(found, "_metadata", None)}


class Wide(torch.optim.Optimizer):
    """Keeps float32 and whole numbers of bfloat16 parameters, in containers too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            of_it = self.state[one]
            of_it["moment"] = of_it.get("moment", torch.zeros(one.shape)) + one.grad.float() / 3
            of_it["codes"] = torch.full(one.shape, 201, dtype=torch.uint8)
            of_it["more"] = {"scale": [torch.full((2,), 1 / 3, dtype=torch.float64)]}


class Moments(Kind):
    """What an optimizer keeps has types of its own; one loads into a new optimizer, one into a used one."""

    def __init__(self, seed: int, steps: int) -> None:
        self.model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        self.optimizer = Wide(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        for _ in range(steps if seed else 0):
            self.train(0)

    def train(self, step: int) -> None:
        for one in self.model.parameters():
            one.grad = torch.ones_like(one)
        self.optimizer.step()


class Unfrozen(Kind):
    """An optimizer that got a group while it trained, which a new one does not have."""

    def __init__(self, seed: int, named: bool) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        self.named = named
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.parameters(1), lr=1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def parameters(self, layer: int) -> list[Any]:
        return list(self.model[layer].named_parameters() if self.named else self.model[layer].parameters())

    def train(self, step: int) -> None:
        if step == 1:
            self.model[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": self.parameters(0), "lr": 1e-3})
        self.model(torch.ones(4, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def look(self) -> Any:
        groups = [[id(one) for one in group["params"]] for group in self.optimizer.param_groups]
        known = [[id(one) for one in self.model[layer].parameters()] for layer in (1, 0)]
        trained = [one.requires_grad for one in self.model.parameters()]
        return {**self.state, "groups": groups == known, "trained": trained}


class Rates(Kind):
    """Rates that are tensors, which a captured graph reads where they are; two groups that shared one."""

    def __init__(self, seed: int) -> None:
        lr = 0.5 if seed == 0 else 0.1
        self.rates = [torch.tensor(lr), torch.tensor(2 * lr)]
        weights = [torch.nn.Parameter(torch.full((2,), float(seed))) for _ in range(2)]
        groups = [{"params": [one], "lr": rate} for one, rate in zip(weights, self.rates, strict=True)]
        betas = (torch.tensor(lr), torch.tensor(0.75))
        shared = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)], lr=0.1)
        one = torch.tensor(0.1)
        for group in shared.param_groups:
            group["lr"] = one
        if seed == 0:
            shared.param_groups[1]["lr"] = torch.tensor(0.5)
        self.state = {"adam": torch.optim.Adam(groups, betas=betas, foreach=False), "shared": shared}

    def look(self) -> Any:
        groups = self.state["adam"].param_groups
        return {**self.state, "same": [group["lr"] is self.rates[at] for at, group in enumerate(groups)]}


class Flat(Quantized):
    """Knows torch's own protocol."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _context: Any, _size: Any, _stride: Any) -> Any:
        return Flat(inner["data8"], inner["scale"])


class Coded(Kind):
    """Tensors that are more than their bytes, through a codec."""

    def __init__(self, seed: int, kind: type[Quantized]) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(kind.of(torch.randn(8, 4)), requires_grad=False)
        self.model.plain = torch.nn.Parameter(torch.randn(3))
        self.state = {"model": self.model}

    def look(self) -> Any:
        weight = self.model.weight
        return [weight.data8, weight.scale, self.model.plain, type(weight.data).__name__]


class Own:
    """An object of the user's, which may save what is expanded, and does not take more than it gave."""

    def __init__(self, seed: int) -> None:
        self.got: Any = {"t": torch.full((1,), float(seed)).expand(4), "place": (seed, b"x")}

    def state_dict(self) -> Any:
        return self.got

    def load_state_dict(self, state: Any) -> None:
        self.got = state


class Owned(Kind):
    def __init__(self, seed: int) -> None:
        self.state = {"own": Own(seed)}

    def look(self) -> Any:
        return [self.state["own"].got["t"].tolist(), self.state["own"].got["place"]]


class Drawn(Kind):
    """Numbers that are drawn after the load."""

    def __init__(self, seed: int) -> None:
        self.state = {"box": {"n": [seed]}}
        self.drawn: list[Any] = []

    def train(self, step: int) -> None:
        if step > SAVED:
            self.drawn += [random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(3).tolist()]

    def look(self) -> Any:
        return self.drawn


def optimizers() -> dict[str, Callable[[int], Kind]]:
    """Return optimizers of torch, each with schedules."""
    schedulers = torch.optim.lr_scheduler
    schedules: dict[str, Callable[[Any], Any]] = {
        "steps": lambda one: schedulers.MultiStepLR(one, [2, 2, 4]),
        "cycle": lambda one: schedulers.OneCycleLR(one, 0.1, total_steps=20, cycle_momentum=False),
        "lambda": lambda one: schedulers.LambdaLR(one, lambda step: 0.9**step),
        "warm": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 3),
        "sequence": lambda one: schedulers.SequentialLR(
            one, [schedulers.LinearLR(one), schedulers.ExponentialLR(one, 0.9)], milestones=[3]
        ),
    }
    kinds = {
        "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
        "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
        "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1),
        "fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    }
    return {
        f"{kind}_{name}": lambda seed, kind=kind, name=name: Trained(seed, kinds[kind], schedules[name])
        for kind, name in [*zip(kinds, schedules, strict=True), ("sgd", "sequence"), ("fused", "cycle")]
    }


KINDS: dict[str, Callable[[int], Kind]] = {
    "trained": Trained,
    "convolutions": Convolutions,
    "tied": Tied,
    "types": Types,
    "views": Views,
    "values": Values,
    "held": Held,
    "extra": Extra,
    "grown": Grown,
    "moments_new": lambda seed: Moments(seed, 0),
    "moments_used": lambda seed: Moments(seed, 2),
    "unfrozen": lambda seed: Unfrozen(seed, named=False),
    "unfrozen_named": lambda seed: Unfrozen(seed, named=True),
    "rates": Rates,
    "coded": lambda seed: Coded(seed, Quantized),
    "coded_by_torch": lambda seed: Coded(seed, Flat),
    "owned": Owned,
    "drawn": Drawn,
    **optimizers(),
}


def main() -> None:
    run, deed, how, out = sys.argv[1:]
    warnings.simplefilter("ignore")  # torch has words on some of its own types and schedules
    torch.set_num_threads(1)
    register_codec(Quantized, take_apart, put_together)
    register_codec(Flat)
    first = deed == "save" or os.environ.get("OUTLAST_GENERATION") == "1"
    for each in (random.seed, numpy.random.seed):
        each(0 if first else 1)
    kinds = {name: make(0 if first else 1) for name, make in KINDS.items()}
    state = {f"{name}__{key}": one for name, kind in kinds.items() for key, one in kind.state.items()}
    options = outlast.CheckpointOptions(**HOW[how])
    folder = None if deed == "die" else run
    with outlast.start(folder, save_interval=10**6, checkpoints=options) as session:
        restored = session.restore(**state)
        for step in range(restored, SAVED):
            for kind in kinds.values():
                kind.train(step + 1)
            session.step_done(step + 1)
        assert not first or session.save(wait=True)
        held = {name: flat(name, kind.look()) for name, kind in kinds.items()}
        for step in range(SAVED, SAVED + LATER):
            for kind in kinds.values():
                kind.train(step + 1)
        later = {name: flat(name, kind.look()) for name, kind in kinds.items()}
        found = {"restored": restored, "held": held, "later": later}
        (Path(out) / ("save" if first else "load")).write_text(json.dumps(found))
        if deed == "die" and first:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
