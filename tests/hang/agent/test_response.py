"""A hang is declared on what the pages say now, not on what they said when the silence was noticed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from outlast.config import FaultToleranceOptions
from outlast.hang.agent.monitor import Watch
from outlast.hang.agent.response import Finding, Hangs
from outlast.ipc.heartbeat_page import HeartbeatPage, HeartbeatReader
from outlast.launcher.output.file_thread import FileThread
from outlast.launcher.workers.generation import Generation
from outlast.launcher.workers.processes import Worker
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import FaultKind


@dataclass
class OneRank:
    """A generation whose only rank is a process that sleeps."""

    worker: Worker
    folder: Path
    number: int = 1
    world_size: int = 1
    ranks: range = range(1)
    spawned: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        page = HeartbeatReader(self.folder / "page", rank=0, generation=1, spawned=self.spawned)
        self.workers, self.pages = [self.worker], {0: page}

    def living(self) -> list[Worker]:
        return self.workers

    def stacks(self, rank: int) -> Path:
        return self.folder / f"stacks-{rank}"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneRank]:
    with subprocess.Popen(["sleep", "120"]) as process:
        worker = Worker(0, process.pid)
        try:
            yield OneRank(worker, tmp_path)
        finally:
            worker.close()
            process.kill()


@pytest.mark.parametrize(("limit", "goes_on"), [(3600.0, True), (0.05, False)])
def test_a_rank_that_goes_on_before_it_is_examined_is_not_hung(
    one: OneRank, limit: float, goes_on: bool
) -> None:
    options = FaultToleranceOptions(rank_heartbeat_timeout=limit, capture_stacks=0.0)
    run = RunFolder(one.folder / "run")
    files = FileThread(run.root)
    watch = Watch(options, run, files)
    hangs = Hangs("n0", run.incidents, options, files)
    generation = cast(Generation, one)
    watch.begin(generation, one.spawned)
    page = HeartbeatPage.open(one.pages[0].path)
    page.heartbeat(1)
    time.sleep(0.1)
    silents = watch.look(time.monotonic() + limit)
    assert [silent.rank for silent in silents] == [0]
    if goes_on:
        page.heartbeat(2)
        assert hangs.examine(silents, generation, watch) == Finding()
    else:
        found = hangs.examine(silents, generation, watch)
        assert found.fault is not None
        assert found.fault.kind is FaultKind.HANG
