"""What lies between the end of one owner of the memory folder and the beginning of the next."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.memory_folder import MemoryFolder, Stage, staged_file
from outlast.checkpoint.staging import Order
from outlast.core.config import Checkpoints
from outlast.core.errors import NoUsableCheckpoint
from outlast.core.manifest import copy_name
from outlast.transport.saver_process import SaverProcess
from tests.process.jobs import DEADLINE, Job, checkpointer, together
from tests.process.launching import until


class Pair:
    """Two ranks of one node, their memory folder and its saver."""

    def __init__(self, tmp_path: Path) -> None:
        self.durable = tmp_path / "checkpoints"
        self.memory = MemoryFolder(tmp_path / "memory")
        self.stage = Stage(self.memory.root)
        self.saver = SaverProcess(self.memory.root, "", tmp_path / "events.jsonl")

    def join(self, jobs: list[Job], generation: int = 1) -> list[Any]:
        """Restore as every rank; return what each got, a checkpointer or an error."""

        def part(exchange: Any) -> Checkpointer:
            settings = Checkpoints(timeout=DEADLINE)
            found = checkpointer(self.durable, generation=generation, exchange=exchange, settings=settings)
            found.through_memory(self.memory, self.saver.ensure)
            found.restore(jobs[exchange.rank].state)
            return found

        return together(2, part, generation=generation)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path)
    yield found
    found.saver.hang_up()
    found.saver.kill()


def save(savers: list[Any], jobs: list[Job], step: int, durable: bool = False) -> None:
    for saver, job in zip(savers, jobs, strict=True):
        assert isinstance(saver, Checkpointer), saver
        job.train()
        assert saver.stage(Order(step, durable, "a test"), job.state)
        saver.settle()


def test_a_rank_that_completes_a_state_after_the_owner_has_gone_still_has_it_saved(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1)
    until((pair.stage.tier.folder / copy_name(1, 1)).exists, "step 1 in memory")
    os.kill(pair.saver.pid, signal.SIGSTOP)
    save(savers, jobs, 2)
    (folder,) = pair.stage.staged.iterdir()
    late = folder / staged_file(1, 2)
    os.rename(late, aside := pair.memory.root / "late")
    pair.saver.hang_up()
    os.kill(pair.saver.pid, signal.SIGCONT)
    until((pair.durable / copy_name(1, 1)).exists, "step 1 on disk")
    os.rename(aside, late)
    until(pair.saver.ended, "the end of the saver")
    assert copy_name(2, 1) in os.listdir(pair.durable)
    assert not pair.memory.root.exists()


def test_a_state_that_no_rank_completes_does_not_hold_the_saver(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1)
    save(savers[:1], jobs[:1], 2)
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")
    assert os.listdir(pair.durable) == [copy_name(1, 1)]
    assert not pair.memory.root.exists()


def test_memory_stays_until_the_copy_on_disk_is_whole(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1, durable=True)
    assert savers[0].durable(1)
    place = pair.durable / copy_name(1, 1) / "rank-00001-of-00002.safetensors"
    os.truncate(place, 100)
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")
    contents = [job.content() for job in jobs]
    others = [Job(7), Job(8)]
    pair.join(others, 2)
    assert [job.content() for job in others] == contents


def test_ranks_that_come_while_the_memory_folder_is_removed_are_served_all_the_same(pair: Pair) -> None:
    over = threading.Event()

    def remove() -> None:
        for _ in range(200):
            shutil.rmtree(pair.memory.root, ignore_errors=True)
            if over.wait(0.0005):
                return

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        jobs = [Job(0), Job(1)]
        savers = pair.join(jobs)
    finally:
        over.set()
        remover.join()
    assert all(isinstance(one, Checkpointer) for one in savers), savers


def test_two_ranks_whose_only_copy_was_damaged_in_memory_never_start_anew(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    save(pair.join(jobs), jobs, 1)
    copy = pair.stage.tier.folder / copy_name(1, 1)
    until(copy.exists, "step 1 in memory")
    with open(copy / "COMMIT", "r+b") as file:
        file.write(bytes(16))
    for generation in range(2, 5):
        answers = pair.join([Job(7), Job(8)], generation)
        assert [type(one) for one in answers] == [NoUsableCheckpoint] * 2, answers


def test_a_memory_folder_that_is_removed_does_not_end_lazy_training(pair: Pair) -> None:
    job = Job(0, width=600)
    found = checkpointer(pair.durable, settings=Checkpoints(timeout=DEADLINE, staging="lazy"))
    found.through_memory(pair.memory, pair.saver.ensure)
    found.restore(job.state)
    for step in range(1, 20):
        job.train()
        found.stage(Order(step, False, "a test"), job.state)
        shutil.rmtree(pair.memory.root, ignore_errors=True)
