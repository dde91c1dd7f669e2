"""Small training jobs whose checkpoints are real: real files, and real stores between the ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.content.digest import ends_of
from outlast.checkpoint.content.format import make_image
from outlast.checkpoint.content.state import LiveState, capture
from outlast.checkpoint.content.typed_json import Encoder
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.load.groups import AddedGroups
from outlast.checkpoint.load.restorer import Restored, Restorer
from outlast.checkpoint.policy.manifest import Identity, Manifest, Row, Run, copy_name, expanded, runs_of
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.tools.convert import write_rank_files
from outlast.checkpoint.writer_process import SaverProcess
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import SoloExchange, StoreExchange, SystemClock
from outlast.parallelism.policy.degrees import Layout
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


def said_of(contents: dict[str, Any]) -> dict[str, str]:
    """Return the digests of the contents of one document from their JSON."""
    return expanded({name: tuple(Run(*run) for run in runs) for name, runs in contents.items()})[0]


class OnDisk:
    """Writes copies without a writer, for tests of loads; loads from disk alone, as a new node does."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        exchange: Exchange,
        settings: CheckpointOptions,
        record: Callable[[Record], None],
    ) -> None:
        self._exchange = exchange
        rounds = Rounds(exchange, settings.timeout)
        self._around = SaveContext(DirectoryTier(folder), identity, rounds, settings, SystemClock(), record)
        self._groups, self._began = AddedGroups(), ""

    def save(self, step: int, state: Mapping[str, object], why: str, cursor: object = None) -> bool:
        tier, identity = self._around.tier, self._around.identity
        name = copy_name(step, identity.generation)
        temporary = tier.begin(name, "test")
        image = make_image(capture(state), step, identity)
        mine = write_rank_files(tier, temporary, image, identity)
        said = self._exchange.gather("files", json.dumps(mine), DEADLINE)
        if identity.rank == 0:
            found = [json.loads(each) for each in said]
            own = tuple(Row(*each["own"][0]) for each in found)
            contents = runs_of([said_of(each["contents"]) for each in found])
            manifest = Manifest(
                *(identity.run_id, identity.generation, step, identity.world_size, identity.parallelism),
                *(Encoder().encode(cursor, ("cursor",)), time.time(), own, contents),
                began=self._began,
            )
            tier.write(temporary, ends_of(manifest))
            tier.commit(temporary, name)
        self._exchange.gather("committed", "", DEADLINE)
        return True

    def names(self) -> list[str]:
        return self._around.tier.names()

    def put_away(self, names: Collection[str], why: str) -> None:
        for name in names:
            self._around.tier.quarantine(name, {"name": name, "reason": why})

    def restore(self, state: Mapping[str, object], avoid: Collection[str] = ()) -> Restored | None:
        found = Restorer(self._around, LiveState(state), avoid, self._groups).restore()
        self._began = "" if found is None else found.name
        return found


def checkpointer(
    folder: Path,
    *,
    generation: int = 1,
    run_id: str = "run-a",
    exchange: Exchange | None = None,
    records: list[Record] | None = None,
    settings: CheckpointOptions | None = None,
    layout: Layout | None = None,
) -> OnDisk:
    exchange = exchange or SoloExchange()
    identity = Identity(run_id, generation, exchange.rank, exchange.world_size, layout)
    kept: list[Record] = [] if records is None else records
    settings = settings or CheckpointOptions(timeout=DEADLINE, max_failed_seconds=0.0)
    return OnDisk(folder, identity, exchange, settings, kept.append)


def saving(
    folder: Path,
    memory: MemoryFolder,
    call_saver: Callable[[], object],
    *,
    generation: int = 1,
    exchange: Exchange | None = None,
    records: list[Record] | None = None,
    settings: CheckpointOptions | None = None,
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Checkpointer:
    """Return what saves through a memory folder, and the writer that is called."""
    exchange = exchange or SoloExchange()
    identity = Identity("run-a", generation, exchange.rank, exchange.world_size)
    kept: list[Record] = [] if records is None else records
    settings = settings or CheckpointOptions(timeout=DEADLINE, max_failed_seconds=0.0)
    found = Checkpointer(
        *(folder, identity, exchange, settings, SystemClock(), kept.append, memory),
        call_saver,
        waiting=waiting,
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
