"""A memory folder that somebody removes under its saver and its ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, Status
from outlast.checkpoint.writer_process import own
from outlast.config import CheckpointOptions
from outlast.errors import RunFolderUnusable
from tests.support.jobs import DEADLINE, Job, saver_process, saving, together
from tests.support.launching import until
from tests.support.memory_nodes import Node, remove, train_and_save


def test_a_memory_folder_that_is_removed_costs_what_was_in_it_and_no_more(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    content = train_and_save(saver, job, range(1, 3), lambda step: step == 2)
    assert saver.durable(2)
    remove(node.memory.root)

    def saved_again() -> bool:
        job.train()
        steps.append(steps[-1] + 1)
        content[steps[-1]] = job.content()
        return saver.stage(Order(steps[-1], False, "a test"), job.state)

    steps = [2]
    until(lambda: saved_again() and node.memory.status() is not None, "a save after the removal")
    until(lambda: saved_again() and (node.memory.status() or Status(0)).memory_step > 2, "a commit after it")
    other = Job(99)
    node.join(other, generation=2)
    assert node.loaded().step > 2
    assert other.content() == content[node.loaded().step]


def test_a_saver_whose_folder_was_removed_leaves_the_next_ones_alone(node: Node) -> None:
    """The first one is stopped while its folder is removed; it goes on when another one is at work there."""
    job = Job(0)
    saver = node.join(job)
    train_and_save(saver, job, range(1, 4), lambda _: False)
    node.in_memory(3)
    first = node.saver
    os.kill(first.pid, signal.SIGSTOP)
    remove(node.memory.root)
    first.hang_up()
    node.saver = saver_process(node.memory.root, node.events)
    again = node.join(job, generation=2)
    content = train_and_save(again, job, range(4, 8), lambda step: step == 6)
    assert again.durable(6)
    kept = node.in_memory(7, generation=2)
    os.kill(first.pid, signal.SIGCONT)
    until(first.ended, "the end of the first saver")
    assert kept.exists()
    other = Job(99)
    node.join(other, generation=3)
    assert other.content() == content[7]


def test_what_a_rank_lost_and_went_past_never_takes_the_buffers_of_another(node: Node) -> None:
    jobs = [Job(0), Job(1)]

    def part(exchange: Any) -> Checkpointer:
        settings = CheckpointOptions(timeout=DEADLINE, buffers=2, ckpt_fully_parallel_save=False)
        found = saving(
            node.durable,
            node.memory,
            node.saver.ensure,
            exchange=exchange,
            records=node.records,
            settings=settings,
        )
        found.restore(jobs[exchange.rank].state)
        return found

    savers = together(2, part)
    for rank, steps in ((0, (1, 2)), (1, (3,)), (0, (3,))):
        saver = savers[rank]
        assert isinstance(saver, Checkpointer), saver
        for step in steps:
            assert saver.stage(Order(step, step == 2, "a test"), jobs[rank].state), (rank, step)
    node.in_memory(3)
    until(lambda: node.logged("save_lost"), "word of the lost step")
    [lost] = node.logged("save_lost")
    assert "rank 1" in lost["reason"]


def test_a_file_in_the_place_of_a_memory_folder_does_not_hold_the_owner_up(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("somebody else's")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("memory", "link"):
        with pytest.raises(RunFolderUnusable, match=name):
            own(tmp_path / name)
    descriptor, _ = own(tmp_path / "folder")
    os.close(descriptor)


@pytest.mark.parametrize(
    "write",
    [
        lambda stage: stage.make(),
        lambda stage: stage.leave_wish("step-000000001.g1", "s", {}),
        lambda stage: stage.tier.begin("step-000000001.g1"),
        lambda stage: stage.tier.remember("step-000000001.g1", {}),
        lambda stage: stage.replica("n1").begin("step-000000001.g1"),
    ],
    ids=["make", "wish", "copy", "reason", "replica"],
)
def test_whoever_makes_a_removed_memory_folder_again_makes_it_private(
    write: Callable[[Stage], object], tmp_path: Path
) -> None:
    root = tmp_path / "memory"
    before = os.umask(0o022)
    try:
        MemoryFolder(root).make()
        stage = Stage(root)
        stage.make()
        shutil.rmtree(root)
        write(stage)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root, *root.iterdir())} == {0o700}
    MemoryFolder(root).make()


def test_a_memory_folder_removed_while_it_is_made_is_never_open_to_others(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    done = threading.Event()

    def remove() -> None:
        while not done.is_set():
            shutil.rmtree(root, ignore_errors=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(500):
            with contextlib.suppress(FileNotFoundError):  # removed once more
                Stage(root).make()
    finally:
        done.set()
        remover.join(DEADLINE)
    Stage(root).make()
