"""Optimizers, memory formats, element types and implementations: is a resumed run the same in every bit?

    python bench/optimizer_state.py [--optimizers Adam ...] [--dtypes float32 ...]

Each case trains a few steps, saves, restores into a new optimizer with other numbers, and trains on; it is
compared with a run without a save: parameters, states, memory orders. A line of JSON for each case. Outcomes:
"equal"; "refused" by the save, with the reason; "not offered" by torch; "fails" in torch without a save, too;
"different". Exit code 1 where there is one that is different.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers.disk_loads import load

from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder
from outlast.checkpoint.writer_process import SaverProcess
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointMismatch, UsageError
from outlast.ipc.exchange import SoloExchange, SystemClock

STEPS, SAVED = 4, 2
Tensor = torch.Tensor
FORMATS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "contiguous": lambda dtype: torch.randn(4, 3, 3, 3, dtype=dtype),
    "matrix": lambda dtype: torch.randn(5, 6, dtype=dtype),
    "channels_last": lambda dtype: torch.randn(4, 3, 3, 3, dtype=dtype).to(memory_format=torch.channels_last),
    "channels_last of one channel": lambda dtype: torch.randn(4, 1, 3, 3, dtype=dtype).to(
        memory_format=torch.channels_last
    ),
    "channels_last_3d": lambda dtype: torch.randn(2, 3, 2, 2, 2, dtype=dtype).to(
        memory_format=torch.channels_last_3d
    ),
    "transposed": lambda dtype: torch.randn(5, 6, dtype=dtype).t(),
    "permuted": lambda dtype: torch.randn(2, 3, 4, dtype=dtype).permute(2, 0, 1),
    "slice": lambda dtype: torch.randn(5, 12, dtype=dtype)[:, ::2],
    "slice of a transposed one": lambda dtype: torch.randn(5, 12, dtype=dtype).t()[::2],
    "expanded": lambda dtype: torch.randn(1, dtype=dtype).expand(4, 3),
}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "tensor lr": {"lr": torch.tensor(0.01), "foreach": False},
}
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
}


def optimizers() -> list[str]:
    """Return the names of torch's optimizers."""
    found = [
        name
        for name, one in vars(torch.optim).items()
        if inspect.isclass(one)
        and issubclass(one, torch.optim.Optimizer)
        and one is not torch.optim.Optimizer
    ]
    return sorted(found)


class Run:
    """A parameter and its optimizer; its gradients follow from the number of the step.

    Args:
        case: names by dimension.
        seed: of the parameter.
    """

    def __init__(self, case: dict[str, str], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Module()
        self.param = torch.nn.Parameter(FORMATS[case["format"]](getattr(torch, case["dtype"])))
        self.model.register_parameter("p", self.param)
        kind = getattr(torch.optim, case["optimizer"])
        wanted = IMPLEMENTATIONS[case["implementation"]]
        offered = inspect.signature(kind).parameters.keys()
        options = {name: value for name, value in wanted.items() if name in offered or value is not False}
        if options.keys() - offered:
            raise LookupError(f"no option {', '.join(options.keys() - offered)}")
        options = {name: value.clone() if name == "lr" else value for name, value in options.items()}
        settings: dict[str, Any] = {"lr": 0.01, **OPTIONS.get(case["optimizer"], {}), **options}
        self.optimizer = kind([self.param], **settings)
        self.sparse = case["optimizer"] == "SparseAdam"

    def step(self, number: int) -> None:
        """Take a step."""
        generator = torch.Generator().manual_seed(number)
        real = torch.float64 if self.param.is_complex() else self.param.dtype
        weights = torch.randn(self.param.shape, generator=generator, dtype=torch.float64).to(real)

        def loss() -> Tensor:
            self.optimizer.zero_grad()
            if self.sparse:
                rows = torch.nn.functional.embedding(torch.tensor([0, 2]), self.param, sparse=True)
                found = (rows * weights[:2]).sum()
            else:
                product = self.param * weights.to(self.param.dtype)
                found = (product.abs().square() if self.param.is_complex() else product.square()).sum()
            found.backward()
            return found

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(loss)
        else:
            loss()
            self.optimizer.step()

    @property
    def state(self) -> dict[str, object]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    def content(self) -> list[Any]:
        """Return every bit, with types and memory orders."""
        return list(described({"p": self.param.detach(), "o": self.optimizer.state_dict()}))


def described(value: Any, path: str = "") -> Iterator[tuple[Any, ...]]:
    """Yield what a value consists of, exactly."""
    if isinstance(value, torch.Tensor):
        octets = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        gaps = path == ".p" or value.is_contiguous()
        yield path, str(value.dtype), tuple(value.shape), None if gaps else value.stride(), bytes(octets)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from described(each, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from described(each, f"{path}.{place}")
    else:
        yield path, repr(value)


def write_copy(folder: Path, state: dict[str, object]) -> None:
    """Save a state to disk, as generation 1."""
    saver = SaverProcess(folder / "memory", "", folder / "events.jsonl")
    about = (Identity("state", 1, 0, 1), SoloExchange(), CheckpointOptions(), SystemClock(), lambda _: None)
    one = Checkpointer(folder / "checkpoints", *about, MemoryFolder(folder / "memory"), saver.ensure)
    try:
        one.restore(state)
        one.save(Order(SAVED, True, "a step"), state)
    finally:
        one.close()
        saver.hang_up()
        while not saver.ended():
            time.sleep(0.01)


def outcome(case: dict[str, str], folder: Path) -> tuple[str, str]:
    """Return how a case ends, and why."""
    try:
        whole, first = Run(case, 0), Run(case, 0)
    except LookupError as error:
        return "not offered", str(error)
    except (RuntimeError, TypeError, ValueError) as error:
        return "not offered", str(error)[:200]
    steps, saved = STEPS, SAVED
    if case["implementation"] == "fused" and case["format"] == "expanded":
        steps = saved = 0  # torch's kernels write behind the memory of such a parameter
    try:
        for number in range(steps):
            whole.step(number)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        return "fails", str(error)[:200]
    for number in range(saved):
        first.step(number)
    try:
        write_copy(folder, first.state)
    except UsageError as error:
        return "refused", str(error)[:300]
    second = Run(case, 1)
    try:
        identity = Identity("state", 2, 0, 1)
        load(folder / "checkpoints", identity, SoloExchange(), CheckpointOptions(), second.state)
    except CheckpointMismatch as error:
        return "different", str(error)[:300]
    if first.content() != second.content():
        return "different", "at the restore"
    for number in range(saved, steps):
        second.step(number)
    return ("equal", "") if whole.content() == second.content() else ("different", "at the end")


def main() -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--optimizers", nargs="*", default=optimizers())
    parser.add_argument("--dtypes", nargs="*", default=DTYPES, choices=DTYPES)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bad = 0
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for optimizer, dtype in itertools.product(asked.optimizers, asked.dtypes):
        for form, implementation in itertools.product(FORMATS, IMPLEMENTATIONS):
            case = {
                **{"optimizer": optimizer, "dtype": dtype},
                **{"format": form, "implementation": implementation},
            }
            with tempfile.TemporaryDirectory(dir=place) as folder:
                kind, why = outcome(case, Path(folder))
            bad += kind == "different"
            print(json.dumps({**case, "outcome": kind, "why": why}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
