"""Train with torch's loaders, whole and killed at several steps; loaders.py FOLDER [--without ROWS].

Each run is a process forked from this one. The last line is JSON: for each row of the table the kills after
which it differs, with the exit codes of the runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import outlast

TOTAL, EPOCH = 25, 10  # steps
KILLS = (10, 16)  # at the end of an epoch, and within one
Loop = Callable[[Any, int, Any], Iterator[Any]]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        yield from data()

    def __len__(self) -> int:
        return 4 * EPOCH


def data() -> Dataset[Any]:
    return TensorDataset(torch.arange(120.0).reshape(40, 3) / 120)


def shuffled(**options: Any) -> DataLoader[Any]:
    order: Any = DistributedSampler(data(), num_replicas=1, rank=0)  # type: ignore[arg-type]
    return DataLoader(data(), batch_size=4, sampler=order, **options)


def stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data(), batch_size=4, shuffle=True, **options)


def epochs(loader: Any, first: int = 0) -> Iterator[Any]:
    for epoch in range(first, 99):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader


def seeded(loader: Any, first: int = 0) -> Iterator[Any]:
    for epoch in range(first, 99):
        torch.manual_seed(1000 + epoch)
        yield from loader


def own_iterator(loader: Any, done: int, session: Any) -> Iterator[Any]:
    """Make an iterator before the loop, skip, and make the next one where it ends."""
    iterator = iter(loader)
    for _ in range(done % EPOCH):
        next(iterator)
    for _ in session.steps(TOTAL):
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            batch = next(iterator)
        yield batch


def endless(loader: Any, done: int, session: Any, of: Any = epochs) -> Iterator[Any]:
    batches = of(loader, done // EPOCH)
    for _ in range(done % EPOCH):
        next(batches)
    for _ in session.steps(TOTAL):
        yield next(batches)


def endless_seeded(loader: Any, done: int, session: Any) -> Iterator[Any]:
    yield from endless(loader, done, session, seeded)


def from_the_start(loader: Any, done: int, session: Any) -> Iterator[Any]:
    batches = epochs(loader)
    for _ in range(done):
        next(batches)
    for _ in session.steps(TOTAL):
        yield next(batches)


def loop_of_epochs(loader: Any, done: int, session: Any) -> Iterator[Any]:
    """Loop over the loader, and take a step of the session in its body."""
    steps = session.steps(TOTAL)
    for epoch in range(done // EPOCH, 99):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch * EPOCH + number >= done:
                if next(steps, None) is None:
                    return
                yield batch


def unskipped(loader: Any, done: int, session: Any) -> Iterator[Any]:
    batches = epochs(loader)
    for _ in session.steps(TOTAL):
        yield next(batches)


def own_loop(loader: Any, done: int, session: Any) -> Iterator[Any]:
    """Count with step_done, in a loop over the loader."""
    for epoch in range(done // EPOCH, 99):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch * EPOCH + number < done:
                continue
            yield batch
            if session.step_done(epoch * EPOCH + number + 1) >= TOTAL:
                return


def after_its_place(loader: Any, done: int, session: Any) -> Iterator[Any]:
    """Count with step_done, over a loader that keeps its place."""
    for step, batch in enumerate(epochs(loader), done + 1):
        yield batch
        if session.step_done(step) >= TOTAL:
            return


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


ROWS: dict[str, tuple[Callable[[], Any], Loop]] = {
    "own iterator": (lambda: DataLoader(data(), batch_size=4), own_iterator),
    "own iterator, workers": (lambda: DataLoader(data(), batch_size=4, num_workers=1), own_iterator),
    "own iterator, stream": (lambda: DataLoader(Stream(), batch_size=4), own_iterator),
    "endless": (shuffled, endless),
    "endless, workers": (lambda: shuffled(num_workers=1), endless),
    "endless, seeded": (lambda: DataLoader(data(), batch_size=4, shuffle=True), endless_seeded),
    "from the start": (shuffled, from_the_start),
    "loop of epochs": (shuffled, loop_of_epochs),
    "loop of epochs, workers": (lambda: shuffled(num_workers=1), loop_of_epochs),
    "stateful": (stateful, unskipped),
    "stateful, workers": (lambda: stateful(num_workers=1), unskipped),
    "stateful, persistent": (lambda: stateful(num_workers=1, persistent_workers=True), unskipped),
    "stateful, own loop": (stateful, after_its_place),
    "own loop, own generator": (lambda: shuffled(generator=own_generator()), own_loop),
}


def train(name: str, run: Path, kill: int) -> None:
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    make, loop = ROWS[name]
    loader = make()
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = outlast.CheckpointOptions(async_save=False, save_interval=kill or TOTAL)
    parts = {"loader": loader} if hasattr(loader, "state_dict") else {}
    with outlast.start(str(run), checkpoints=options) as session:
        done = session.restore(model=model, optimizer=optimizer, **parts)
        for step, (batch,) in enumerate(loop(loader, done, session), done):
            if kill and step == kill and not done:
                os.kill(os.getpid(), signal.SIGKILL)
            scale = 1 + 0.1 * random.random() + 0.1 * numpy.random.random()
            (model(batch) * scale).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    (run / "weights").write_text(hashlib.sha256(weights).hexdigest())


def run_apart(name: str, run: Path, kill: int) -> int:
    child = os.fork()
    if not child:
        try:
            train(name, run, kill)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a fork must not go on here
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def differing(folder: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        found[name] = {}
        whole = folder / name / "whole"
        codes = [run_apart(name, whole, 0)]
        for kill in KILLS:
            run = folder / name / str(kill)
            codes = [*codes[:1], run_apart(name, run, kill), run_apart(name, run, kill)]
            if codes != [0, -9, 0] or (run / "weights").read_text() != (whole / "weights").read_text():
                found[name][kill] = codes
    return found


if __name__ == "__main__":
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).zero_grad()  # imports what all runs need, once
    import outlast.worker.session

    without = sys.argv[3] if sys.argv[2:3] == ["--without"] else None
    if without is None:
        import torchdata.stateful_dataloader  # noqa: F401 - the same
    names = [name for name in ROWS if without is None or not name.startswith(without)]
    print(json.dumps(differing(Path(sys.argv[1]), names)))
