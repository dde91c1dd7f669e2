"""Small training jobs whose checkpoints are real: real files, and real stores between the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.writer_process import SaverProcess
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import SoloExchange, StoreExchange, SystemClock
from outlast.ports import Exchange
from outlast.recovery.policy.events import Record
from tests.support.mounts import mounted, needs_root  # noqa: F401 - tests of jobs find them here, too
from tests.support.opened import close_at_end

T = TypeVar("T")
DEADLINE = 120.0


class Job:
    """A model, its optimizer and its scheduler; two that took the same steps are equal in every bit."""

    def __init__(self, seed: int, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, width)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, steps: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, self.width)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def content(self) -> bytes:
        """Return every bit of the model and of the optimizer's moments."""
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += state.values()
        return b"".join(bytes(each.reshape(-1).view(torch.uint8).tolist()) for each in tensors)


def checkpointer(
    folder: Path,
    *,
    generation: int = 1,
    run_id: str = "run-a",
    exchange: Exchange | None = None,
    records: list[Record] | None = None,
    settings: CheckpointOptions | None = None,
) -> Checkpointer:
    exchange = exchange or SoloExchange()
    identity = Identity(run_id, generation, exchange.rank, exchange.world_size)
    kept: list[Record] = [] if records is None else records
    found = Checkpointer(
        folder,
        identity,
        exchange,
        settings or CheckpointOptions(timeout=DEADLINE, max_failed_seconds=0.0),
        SystemClock(),
        kept.append,
    )
    close_at_end(found.close)
    return found


def saver_process(root: Path, events: Path, **options: Any) -> SaverProcess:
    """Return a hold on the saver of a memory folder; the test's end ends it."""
    found = SaverProcess(root, "", events, **options)

    def end() -> None:
        found.hang_up()
        found.kill()

    close_at_end(end)
    return found


def save_steps(folder: Path, *steps: int, seed: int = 0, **options: Any) -> dict[int, bytes]:
    """Train and save at each step with one rank; return the state's content at each."""
    job, content = Job(seed), {}
    saver = checkpointer(folder, **options)
    for step in steps:
        job.train()
        assert saver.save(step, job.state, "a test")
        content[step] = job.content()
    return content


def together(
    world_size: int, part: Callable[[StoreExchange], T], *, generation: int = 1, store: Any = None
) -> list[T | BaseException]:
    """Run a part as every rank, each in a thread, and return what each returned or raised."""
    store = store or dist.HashStore()
    answers: list[T | BaseException] = [AssertionError("this rank never came back")] * world_size

    def run(rank: int) -> None:
        try:
            answers[rank] = part(StoreExchange(store, rank, world_size, generation))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE)
    return answers


def staged(savers: Sequence[Any], jobs: Sequence[Job], order: Order) -> list[bool]:
    """Save with every rank, each in a thread: at their first save ranks wait for each other."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda saver, job: saver.stage(order, job.state), savers, jobs))


def kinds(records: list[Record]) -> list[str]:
    return [type(record).__name__ for record in records]
