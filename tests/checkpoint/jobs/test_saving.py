"""Saves that are lost, repeated or pruned; the older copies stay whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from outlast.checkpoint.policy.manifest import COMMIT, copy_name
from outlast.checkpoint.save import buffers
from outlast.checkpoint.save.staging import Order
from outlast.config import CheckpointOptions
from tests.support.jobs import Job, checkpointer, save_steps, saving
from tests.support.launching import until
from tests.support.memory_nodes import Node
from tests.support.mounts import mounted, needs_root

NEW = copy_name(2, 1)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def order(step: int) -> Order:
    return Order(step, True, "a test")


def test_a_save_returns_when_the_step_is_on_disk_and_is_not_made_again(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    assert saver.save(order(2), job.state)
    before = (node.durable / NEW).stat()
    job.train()
    assert saver.save(order(2), job.state)
    assert (node.durable / NEW).stat() == before


def test_another_runs_copy_of_the_same_name_is_neither_moved_nor_replaced(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    save_steps(node.durable, 2, run_id="run-b")
    before = (node.durable / NEW).stat()
    assert not saver.save(order(2), job.state)
    assert (node.durable / NEW).stat() == before
    assert [path.name for path in node.durable.iterdir()] == [NEW]
    assert [one["step"] for one in node.logged("save_lost")] == [2]


def test_generations_do_not_overwrite_each_others_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    later = save_steps(tmp_path, 2, seed=8, generation=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NEW, copy_name(2, 2)]
    job = Job(0)
    assert checkpointer(tmp_path, generation=3).restore(job.state).name == copy_name(2, 2)  # type: ignore[union-attr]
    assert job.content() == later[2]


def test_a_generation_that_counts_anew_can_go_on_from_the_old_ones(node: Node) -> None:
    save_steps(node.durable, 1, generation=5)
    job = Job(0)
    assert node.join(job, generation=0).save(order(2), job.state)


def test_retention_neither_counts_nor_removes_what_is_not_this_runs(node: Node) -> None:
    job = Job(0)
    saver = node.join(job, keep_last_n=2)
    save_steps(node.durable, 1, run_id="run-b")
    save_steps(node.durable, 2)
    (node.durable / NEW / COMMIT).unlink()
    for step in range(3, 6):
        assert saver.save(order(step), job.state)
    node.cut_off(saver)
    kept = [copy_name(1, 1), NEW, copy_name(4, 1), copy_name(5, 1)]
    assert sorted(os.listdir(node.durable)) == kept


@needs_root
def test_a_save_that_works_again_starts_the_count_anew(node: Node) -> None:
    node.durable.mkdir()
    with mounted(node.durable, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        settings = CheckpointOptions(max_failed_saves=2, max_failed_seconds=0.0)
        saver = saving(node.durable, node.memory, node.saver.ensure, settings=settings)
        state = {"x": torch.ones(1)}
        saver.restore(state)
        for step in range(1, 6, 2):
            assert not saver.save(order(step), {"x": torch.ones(10**6)})
            assert saver.save(order(step + 1), state)
        node.cut_off(saver)


@pytest.mark.parametrize("waits", [True, False])
def test_the_seconds_of_a_save_are_those_for_which_training_stood_still(node: Node, waits: bool) -> None:
    job = Job(0)
    saver = node.join(job)
    node.saver.ensure()
    os.kill(node.saver.pid, signal.SIGSTOP)
    going_on = threading.Timer(1.0, os.kill, (node.saver.pid, signal.SIGCONT))
    going_on.start()
    began = time.monotonic()
    assert (saver.save if waits else saver.stage)(order(1), job.state)
    took = time.monotonic() - began
    going_on.join()
    node.cut_off(saver)
    (saved,) = node.logged("saved")
    assert 0.9 * waits < saved["seconds"] <= took


def test_buffers_are_made_when_the_size_of_the_state_is_known(node: Node) -> None:
    """Before the first step it is not known for certain, and that step takes most memory of all."""
    job = Job(0)
    saver = node.join(job)
    job.train()
    assert node.stage.free("0") == []
    saver.prepare(job.state)

    def made() -> list[Path]:
        return [one for one in node.stage.free("0") if not one.name.startswith(".")]

    until(lambda: len(made()) == CheckpointOptions().buffers, "buffers after the first step")
    sizes = {one.stat().st_size for one in made()}
    assert saver.stage(order(1), job.state)
    (file,) = node.in_memory(1).glob("*.safetensors")
    assert {file.stat().st_size} == sizes
    node.cut_off(saver)


def test_a_save_takes_the_buffer_that_is_being_made_and_more_are_made_after_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_REST", 1e6)  # for a window of any length; only a save ends it
    job = Job(0, width=300)
    saver = node.join(job)
    job.train()
    saver.prepare(job.state)
    assert saver.save(order(1), job.state)
    node.cut_off(saver)
