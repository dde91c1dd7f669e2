"""Save what cannot be kept, and load what does not fit: refused_states.py FOLDER.

For each case, in a run of its own, a line of JSON: what was raised, what has to be named, and whether
anything was written or loaded.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from saves_steps import Job
from states import Growing, History, flat

import outlast
from outlast.checkpoint import register_codec
from tests.support.quantized import Quantized, put_together, take_apart

State = dict[str, Any]
Make = Callable[[], State]


class Custom:
    pass


class Text(str):
    pass


class Scaled(torch.Tensor):
    pass


class Older(History):
    def get_extra_state(self) -> Any:
        return io.BytesIO(b"1.0")


class Module(torch.nn.Module):
    def __init__(self, **content: torch.Tensor) -> None:
        super().__init__()
        for name, one in content.items():
            self.register_buffer(name, one)


class Limited(Growing):
    """Takes no buffer of more than three numbers."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        torch.nn.Module._load_from_state_dict(self, state, prefix, *more)


def subclassed() -> State:
    job = Job(0)
    job.model[0].weight = torch.nn.Parameter(torch.zeros(8, 8).as_subclass(Scaled))
    return job.state


def quantized(values: torch.Tensor | None = None) -> State:
    model = torch.nn.Module()
    weight = torch.zeros(8, 4) if values is None else Quantized.of(values)
    model.weight = torch.nn.Parameter(weight, requires_grad=False)
    return {"model": model}


def leaf(value: object) -> Make:
    return lambda: {"box": {"deep": [value]}}


def endless() -> State:
    found: list[object] = []
    found.append(found)
    return {"box": {"deep": found}}


EXPANDED = torch.zeros(1).expand(4)
DEEP = "box.deep.0"
# What is to be saved, and what the error has to name.
UNSAVEABLE: dict[str, tuple[Make, tuple[str, ...]]] = {
    "itself": (endless, (DEEP,)),
    "object": (leaf(Custom()), (DEEP, "Custom")),
    "subclass of str": (leaf(Text("x")), (DEEP, "Text")),
    "function": (leaf(lambda: 1), (DEEP, "function")),
    "array of objects": (leaf(numpy.array([Custom()])), (DEEP, "numpy", "object")),
    "type": (leaf(numpy.float64), (DEEP, "type")),
    "sparse": (leaf(torch.zeros(2).to_sparse()), (DEEP, "sparse_coo")),
    "meta": (leaf(torch.zeros(2, device="meta")), (DEEP, "meta")),
    "uninitialized": (leaf(torch.nn.parameter.UninitializedParameter()), (DEEP,)),
    "complex": (leaf(1j), (DEEP, "complex")),
    "quantized": (lambda: {"t": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)}, ("t",)),
    "subclass of Tensor": (subclassed, ("model.0.weight", "Scaled")),
    "without a codec": (lambda: quantized(torch.ones(8, 4)), ("model.weight", "Quantized", "register_codec")),
    "no place": (lambda: {"epoch": 3}, ("epoch", "int")),
    "optimizer in a list": (lambda: {"box": [Job(0).optimizer]}, ("box.0", "AdamW")),
    "lazy module": (lambda: {"m": torch.nn.Sequential(torch.nn.LazyLinear(2))}, ("m.0.weight",)),
    "file in memory": (
        lambda: {"model": torch.nn.Sequential(Older([]))},
        ("model.0._extra_state", "BytesIO"),
    ),
    # A load could not write to these.
    "expanded": (lambda: {"box": {"t": EXPANDED}}, ("box.t",)),
    "expanded, deep": (lambda: {"box": {"list": [1, (torch.zeros(3, 1).expand(3, 2),)]}}, ("box.list.1.0",)),
    "expanded buffer": (lambda: {"box": Module(b=EXPANDED)}, ("box.b",)),
    "expanded, alone": (lambda: {"box": EXPANDED}, ("box",)),
    "uint4": (lambda: {"box": {"u": torch.empty(4, dtype=torch.uint4)}}, ("box.u",)),
    "int4": (lambda: {"box": {"i": torch.empty(4, dtype=torch.int4)}}, ("box.i",)),
}


def job(**other: Any) -> Make:
    return lambda: {**Job(5).state, **{name: make() for name, make in other.items()}}


def without(name: str) -> State:
    return {key: one for key, one in Job(5).state.items() if key != name}


def two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def wrapped() -> torch.nn.Module:
    """Put a word into the names, as DistributedDataParallel does."""
    model = torch.nn.Module()
    model.module = two_layers()
    return model


def compiled_layer() -> torch.nn.Module:
    model: Any = two_layers()
    model[0] = torch.compile(model[0], backend="eager")
    return model


def with_buffer() -> torch.nn.Module:
    model = two_layers()
    model.register_buffer("extra", torch.zeros(3))
    return model


def named(make: Callable[[], torch.nn.Module]) -> Make:
    return lambda: {"m": make()}


def compiled() -> torch.nn.Module:
    return torch.compile(two_layers(), backend="eager")


def renamed() -> torch.nn.Module:
    return torch.nn.Sequential(OrderedDict(zip("ab", two_layers().children(), strict=True)))


def groups(*layers: int, hidden: bool = False) -> Make:
    """Return a model of two layers and an optimizer of some of them, each in a group; one may be hidden."""

    def state() -> State:
        model = two_layers()
        optimizer = torch.optim.AdamW([{"params": model[layer].parameters()} for layer in layers])
        for one in model.parameters():
            one.requires_grad_(
                any(one is each for group in optimizer.param_groups for each in group["params"])
            )
        body = dict(model[0].state_dict()) if hidden else model[0]
        return {"head": model[1], "body": body, "optimizer": optimizer}

    return state


def grown(count: int) -> Make:
    return lambda: {"model": torch.nn.Sequential(Limited(torch.zeros(count)))}


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
F32 = "float32[8, 8]"
# What is saved, what is there at the load, and what the error has to name.
MISFITS: dict[str, tuple[Make, Make, tuple[str, ...]]] = {
    "one is gone": (job(), lambda: without("scheduler"), ("scheduler",)),
    "one is new": (job(), job(ema=dict), ("ema",)),
    "other shape": (job(), job(model=lambda: Job(0, 9).model), ("0.weight", F32, "float32[9, 9]")),
    "other type": (job(), job(model=Job(0).model.half), ("0.weight", F32, "float16[8, 8]")),
    "fewer layers": (job(), job(model=lambda: Job(0).model[:2]), ("model.2.bias", "model.2.weight")),
    "other optimizer": (job(), job(optimizer=lambda: SGD(Job(0).model.parameters())), ("AdamW", "SGD")),
    "fewer parameters": (job(), job(optimizer=lambda: ADAMW(Job(0).model[0].parameters())), ("[4]", "[2]")),
    "other parameters": (
        job(),
        job(optimizer=lambda: ADAMW(Job(0).model.double().parameters())),
        ("model.0.weight", F32, "float64[8, 8]"),
    ),
    "no object": (job(), job(scheduler=dict), ("CosineAnnealingLR",)),
    "compiled since": (named(two_layers), named(compiled), ("m.0.bias", "m._orig_mod.0.bias")),
    "compiled then": (named(compiled), named(two_layers), ("m.0.bias", "m._orig_mod.0.bias")),
    "a layer compiled": (named(two_layers), named(compiled_layer), ("m.0.bias", "m.0._orig_mod.bias")),
    "wrapped then": (named(wrapped), named(two_layers), ("m.module.0.bias", "m.0.bias")),
    "wrapped since": (named(two_layers), named(wrapped), ("m.module.0.bias", "m.0.bias")),
    "a buffer more": (named(two_layers), named(with_buffer), ("m.extra",)),
    "a buffer less": (named(with_buffer), named(two_layers), ("m.extra",)),
    "renamed": (named(two_layers), named(renamed), ("m.0.bias", "m.a.bias")),
    "not coded": (lambda: quantized(torch.ones(8, 4)), quantized, ("weight", "int8", "float32[8, 4]")),
    "a group that is no model's": (groups(1, 0, hidden=True), groups(1, hidden=True), ("optimizer",)),
    "a group from the start": (groups(1), groups(1, 0), ("optimizer",)),
    "too large a buffer": (grown(5), grown(0), ("0.seen",)),
}


def opened(run: Path) -> outlast.Session:
    return outlast.start(
        str(run), save_interval=10**6, checkpoints=outlast.CheckpointOptions(async_save=False, timeout=60.0)
    )


def save(run: Path, state: State) -> None:
    with opened(run) as session:
        session.restore(**state)
        session.save()


def load(run: Path, state: State) -> None:
    with opened(run) as session:
        session.restore(**state)


def tried(deed: Callable[[Path, State], None], run: Path, state: State) -> dict[str, Any]:
    try:
        deed(run, state)
    except outlast.OutlastError as error:
        return {"error": type(error).__name__, "code": int(error.exit_code), "text": str(error)}
    return {"error": ""}


def names(run: Path) -> list[str]:
    return sorted(one.name for one in (run / "checkpoints").glob("*"))


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case, (make, words) in UNSAVEABLE.items():
        found = tried(save, folder / case, make())
        print(json.dumps({"case": case, **found, "words": words, "left": names(folder / case)}))
    register_codec(Quantized, take_apart, put_together, name="int8")
    for case, (then, now, words) in MISFITS.items():
        save(folder / case, then())
        here = Path(shutil.copytree(folder / case, folder / f"{case}-here"))  # another training
        live = now()
        before = flat("", live)
        found = tried(load, here, live)
        kept = flat("", live) == before and names(here) == names(folder / case)
        print(json.dumps({"case": case, **found, "words": words, "kept": kept}))


if __name__ == "__main__":
    main()
