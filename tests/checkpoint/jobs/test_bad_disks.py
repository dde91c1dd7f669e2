"""Disks that fail or are slow, and wrong clocks: system calls of real processes, changed from outside."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.load import restorer
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from tests.support import ckpt_run
from tests.support.jobs import DEADLINE, Job, checkpointer, mounted, needs_root, save_steps
from tests.support.launching import until
from tests.support.memory_nodes import Node, train_and_save
from tests.support.teams import Team

LOAD = """
import sys
from pathlib import Path
from tests.support.jobs import Job, checkpointer
records = []
folder = Path(sys.argv[1]) / "checkpoints"
found = checkpointer(folder, run_id=sys.argv[2], generation=2, records=records).restore(Job(9).state)
print(*(record.reason for record in records), sep="\\n")
print(found.step)
"""
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace: apt-get install strace")
needs_faketime = pytest.mark.skipif(
    shutil.which("faketime") is None, reason="no faketime: apt-get install faketime"
)


@contextlib.contextmanager
def injected(pid: int, rule: str, log: Path) -> Iterator[None]:
    """Change what system calls of a process return, or how long they take."""
    command = ["strace", "-f", "-o", os.devnull, "-e", f"inject={rule}", "-p", str(pid)]
    with open(log, "w") as file:
        tracer = subprocess.Popen(command, stderr=file)
    try:
        until(lambda: "attached" in log.read_text() or tracer.poll() is not None, "the tracer")
        if tracer.poll() is not None:
            pytest.skip(f"processes cannot be traced here: {log.read_text()}")
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(DEADLINE)


@needs_strace
def test_an_error_of_the_disk_loses_a_save_by_name_and_the_next_one_is_kept(
    node: Node, tmp_path: Path
) -> None:
    job = Job(0)
    saver = node.join(job)
    content = train_and_save(saver, job, range(1, 2), lambda _: True)
    assert saver.durable(1)
    with injected(node.saver.pid, "fsync,fdatasync:error=EIO", tmp_path / "strace"):
        train_and_save(saver, job, range(2, 3), lambda _: True)
        assert not saver.durable(2)
    assert os.listdir(node.durable) == [copy_name(1, 1)]
    lost = node.logged("save_lost")
    assert [(one["step"], "Input/output error" in one["reason"]) for one in lost] == [(2, True)]
    content |= train_and_save(saver, job, range(3, 4), lambda _: True)
    assert saver.durable(3)
    node.cut_off(saver)
    node.join(other := Job(9), generation=2)
    assert (node.loaded().step, other.content()) == (3, content[3])


@needs_strace
def test_training_does_not_wait_for_a_slow_disk_and_nothing_is_lost(node: Node, tmp_path: Path) -> None:
    """Each sync takes a second; training stages on, and the newest state that was due gets to disk."""
    job = Job(0)
    saver = node.join(job)
    with injected(node.saver.pid, "fsync,fdatasync:delay_enter=1s", tmp_path / "strace"):
        content = train_and_save(saver, job, range(1, 2), lambda _: True)
        for step in range(2, 8):
            job.train()
            assert saver.stage(Order(step, step == 7, "a test"), job.state)
            content[step] = job.content()
        assert not os.path.exists(node.durable / copy_name(7, 1))
        assert saver.durable(7)
    node.cut_off(saver)
    assert node.logged("save_lost") == []
    node.join(other := Job(9), generation=2)
    assert (node.loaded().step, other.content()) == (7, content[7])


@needs_root
def test_ranks_that_start_while_the_disk_may_only_be_read_wait_for_it(tmp_path: Path) -> None:
    team = Team(tmp_path, ("a", "b"))
    disk = team.nodes[0].durable
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "tmpfs"):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        again = ["mount", "-o", "remount,rw", str(disk)]
        timer = threading.Timer(2.0, lambda: subprocess.run(again, check=True))
        timer.start()
        team.start()
        timer.join()
        team.train(1, durable=lambda _: True)
        until(lambda: team.on_disk() == [copy_name(1, 1)], "the copy on disk")
        for node in team.nodes:
            node.saver.hang_up()
            until(node.saver.ended, "the end of the writer")


@needs_strace
@pytest.mark.parametrize("command", ["load", "verify"])
def test_a_copy_that_cannot_be_read_is_named_and_the_one_before_it_is_loaded(
    tmp_path: Path, command: str
) -> None:
    ckpt_run.make_run(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / ckpt_run.NAMES[0] / ckpt_run.TENSORS
    words = {
        "load": [sys.executable, "-c", LOAD, str(tmp_path / "run"), ckpt_run.RUN_ID],
        "verify": [sys.executable, "-m", "outlast", "ckpt", "verify", str(tmp_path / "run"), "--all"],
    }[command]
    rule = "read,pread64,preadv,preadv2,mmap:error=EIO"
    tracer = ["strace", "-f", "-o", os.devnull, "-P", str(newest), "-e", f"inject={rule}"]
    done = subprocess.run([*tracer, *words], capture_output=True, text=True, timeout=DEADLINE, check=False)
    said = done.stdout + done.stderr
    assert "Input/output error" in said, said
    assert newest.name in said, said
    if command == "load":
        assert done.stdout.split()[-1] == str(ckpt_run.STEPS[-2])


@needs_faketime
@pytest.mark.parametrize("skew", ["-2d", "+400d"])
def test_a_clock_that_is_wrong_changes_nothing_about_which_copy_is_loaded(tmp_path: Path, skew: str) -> None:
    contents = ckpt_run.make_run(tmp_path / "run")
    words = [sys.executable, "-c", LOAD, str(tmp_path / "run"), ckpt_run.RUN_ID]
    done = subprocess.run(
        ["faketime", "-f", skew, *words], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.stdout.split()[-1] == str(max(contents)), done.stderr


def test_a_copy_that_its_writer_removes_while_a_rank_looks_at_it_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    content = save_steps(folder, 10, 20)
    opened = DirectoryTier.open

    def removed(tier: DirectoryTier, name: str) -> contextlib.AbstractContextManager[CopyFolder]:
        if name == copy_name(10, 1):
            shutil.rmtree(tier.folder / name, ignore_errors=True)
        return opened(tier, name)

    monkeypatch.setattr(restorer, "OUTAGE_SECONDS", math.inf)
    monkeypatch.setattr(DirectoryTier, "open", removed)
    job = Job(9)
    restored = checkpointer(folder, generation=2).restore(job.state)
    assert restored is not None
    assert (restored.step, job.content()) == (20, content[20])
