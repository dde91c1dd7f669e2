"""Shared memory without room: before the launcher starts, between two launches, and while ranks save."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint import checkpointer
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.save import staging
from outlast.checkpoint.save.staging import Order
from outlast.errors import RunFolderUnusable, SaveFailed
from outlast.ipc.heartbeat_page import HeartbeatReader
from outlast.launcher import runtime
from outlast.recovery.policy.events import SaveLost
from tests.support.jobs import Job, saving
from tests.support.launching import until
from tests.support.memory_nodes import Node, train_and_save
from tests.support.mounts import mounted, needs_root

pytestmark = needs_root


@pytest.fixture
def small(node: Node) -> Iterator[Path]:
    """Give the memory folder a file system of its own."""
    node.memory.root.mkdir()
    with mounted(node.memory.root, "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs"):
        yield node.memory.root


def fill(folder: Path) -> Path:
    """Leave no page free in a file system."""
    path = folder / "fill"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return path


def saves(saver: Checkpointer, job: Job, steps: range) -> list[bool]:
    """Train and save until that is refused; return which saves were on their way."""
    found = []
    for step in steps:
        job.train()
        found.append(saver.stage(Order(step, True, "a test"), job.state))
    return found


def test_a_page_for_which_there_is_no_room_is_refused_and_kills_nobody(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        fill(tmp_path)
        with pytest.raises(RunFolderUnusable, match=r"heartbeat-1-0.*No space left on device"):
            HeartbeatReader(tmp_path / "heartbeat-1-0", rank=0, generation=1, spawned=0.0)


def test_a_launcher_goes_elsewhere_when_shared_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(runtime, "_SHARED", shared)
    with mounted(shared, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        free = runtime.make()
        assert (free.parent, runtime.caveat(free)) == (shared, "")
        fill(shared)
        other = runtime.make()
        try:
            assert other.parent != shared
            assert str(shared) in runtime.caveat(other)
        finally:
            other.rmdir()


def test_memory_that_fills_up_loses_saves_by_name_and_the_saver_lives(
    node: Node, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checkpointer, staging):
        monkeypatch.setattr(module, "_ROOM_SECONDS", 0.0)
    job = Job(0)
    saver = node.join(job, buffers=2)
    content = train_and_save(saver, job, range(1, 2), lambda _: True)
    assert saver.durable(1)
    pid = node.saver.pid
    filling = fill(small)
    with pytest.raises(SaveFailed, match=f"No space left on device.*{small}"):
        saves(saver, job, range(2, 40))
    assert (node.saver.pid, node.saver.ended()) == (pid, False)
    assert len([one for one in node.records if isinstance(one, SaveLost)]) >= 3
    filling.unlink()
    content |= train_and_save(node.join(job, generation=2), job, range(50, 51), lambda _: True)
    until(lambda: copy_name(50, 2) in os.listdir(node.durable), "step 50 on disk")
    node.join(other := Job(9), generation=3)
    assert other.content() == content[50]


def emptied(filling: Path) -> threading.Timer:
    """Begin to make room in a moment."""
    timer = threading.Timer(2.0, filling.unlink)
    timer.start()
    return timer


def test_ranks_that_meet_while_memory_is_full_wait_for_room(node: Node, small: Path) -> None:
    filling = fill(small)
    node.saver.ensure()
    until(lambda: node.logged("note"), "a word of the saver")
    assert "No space left on device" in node.logged("note")[0]["reason"]
    pid, job = node.saver.pid, Job(0)
    timer = emptied(filling)
    saver = node.join(job)
    timer.join()
    train_and_save(saver, job, range(1, 2), lambda _: True)
    assert saver.durable(1)
    assert (node.saver.pid, node.saver.ended()) == (pid, False)


@pytest.mark.parametrize("inodes", [False, True])
def test_a_save_that_is_due_on_disk_waits_for_room_in_memory(node: Node, small: Path, inodes: bool) -> None:
    job = Job(0)
    saver = node.join(job, buffers=2)
    content = train_and_save(saver, job, range(1, 2), lambda _: True)
    assert saver.durable(1)
    saver.prepare(job.state)
    until(lambda: len(node.stage.free("0")) > 0, "a free buffer")
    if inodes:
        subprocess.run(["mount", "-o", "remount,nr_inodes=64", str(small)], check=True)
        filling = small / "many"
        filling.mkdir()
        with contextlib.suppress(OSError):
            for number in range(64):
                (filling / str(number)).touch()
        timer = threading.Timer(2.0, shutil.rmtree, (filling,))
        timer.start()
    else:
        timer = emptied(fill(small))
    content |= train_and_save(saver, job, range(2, 6), lambda _: True)
    assert saver.durable(5)
    timer.join()
    assert not [one for one in node.records if isinstance(one, SaveLost)]
    node.join(other := Job(9), generation=2)
    assert other.content() == content[5]


def test_a_rank_that_waits_for_what_waits_for_room_says_so(node: Node, small: Path) -> None:
    """Else its agent takes it for hung: no other timeout applies to a wait for storage."""
    waits: list[float] = []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        began = time.monotonic()
        yield
        waits.append(time.monotonic() - began)

    job = Job(0)
    saver = saving(node.durable, node.memory, node.saver.ensure, waiting=waiting, records=node.records)
    saver.restore(job.state)
    train_and_save(saver, job, range(1, 2), lambda _: True)
    assert saver.durable(1)
    saver.prepare(job.state)
    until(lambda: len(node.stage.free("0")) > 0, "a free buffer")
    timer = emptied(fill(small))
    began = time.monotonic()
    waits.clear()
    assert saves(saver, job, range(2, 4)) == [True, True]
    blocked = time.monotonic() - began
    timer.join()
    assert blocked > 1.0
    assert sum(waits) > blocked - 1.0
