"""What the checkpoint writer takes beside ranks that train: processors, and its rank for the kernel."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.content.digest import chunk_digests
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.replica.frames import BURST_BYTES
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.writer.__main__ import IO_PRIORITY, OOM_SCORE
from outlast.checkpoint.writer.committer import NICENESS
from outlast.checkpoint.writer.durable import digests_of, threads_beside
from tests.support.jobs import Job
from tests.support.launching import until
from tests.support.memory_nodes import Node, train_and_save

IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


@pytest.mark.parametrize(
    ("ranks", "processors", "threads"), [(1, 2, 1), (8, 16, 2), (8, 200, 48), (8, 8, 1), (8, 4, 1), (1, 1, 1)]
)
def test_a_quarter_of_the_processors_that_ranks_leave_digests(
    ranks: int, processors: int, threads: int
) -> None:
    assert threads_beside(ranks, processors) == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_several_threads_return_the_digests_of_one(threads: int) -> None:
    content = os.urandom(1 << 20) * 70 + b"the rest"
    assert digests_of(memoryview(content), threads) == chunk_digests(content)


def test_a_limit_of_the_disks_bandwidth_holds_until_the_ranks_are_about_to_end(node: Node) -> None:
    job = Job(0, width=600)  # 8.7 MB with the state of the optimizer
    saver = node.join(job, disk_bandwidth=2e6)
    began = time.monotonic()
    train_and_save(saver, job, range(1, 2), lambda _: True)
    assert saver.durable(1)
    assert time.monotonic() - began > (8.6e6 - BURST_BYTES) / 2e6

    saver = node.join(job, generation=2, disk_bandwidth=1e5)
    began = time.monotonic()
    train_and_save(saver, job, range(2, 3), lambda _: True)
    job.train()
    assert saver.stage(Order(3, True, "a preemption", urgent=True), job.state)
    assert saver.durable(3)
    assert time.monotonic() - began < (8.6e6 - BURST_BYTES) / 1e5
    assert [one["step"] for one in node.logged("saved")] == [1, 2, 3]


def nice_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


def test_the_kernel_prefers_ranks_to_the_writer(node: Node) -> None:
    node.saver.ensure()
    pid, own = node.saver.pid, Path("/proc/self")
    until(lambda: node.memory.status() is not None, "the writer")
    assert nice_of(pid) == min(19, os.nice(0) + NICENESS)
    most = min(1000, int((own / "oom_score_adj").read_text()) + OOM_SCORE)
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == most
    if os.uname().machine in IOPRIO_GET:
        found = ctypes.CDLL(None).syscall(IOPRIO_GET[os.uname().machine], 1, pid)
        assert (found >> 13, found & 0xFF) == (2, IO_PRIORITY)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="a kernel that groups sessions")
def test_between_sessions_the_writer_has_low_priority_only_while_ranks_train(node: Node) -> None:
    def group() -> tuple[str, str]:
        name, _, nice = Path(f"/proc/{node.saver.pid}/autogroup").read_text().split()
        return name, nice

    node.saver.ensure()
    until(lambda: node.memory.status() is not None, "the writer")
    own = Path("/proc/self/autogroup").read_text()  # empty in the session of a container's first process
    assert group()[0] not in own.split()
    assert group()[1] == "0", "nobody trains yet"
    job = Job(0, width=600)  # 8.7 MB with the state of the optimizer
    saver = node.join(job, disk_bandwidth=8e5)
    until(lambda: group()[1] == str(NICENESS), "a low priority beside training")
    job.train()
    assert saver.stage(Order(1, True, "a test", waits=True), job.state)
    until(lambda: group()[1] == "0", "a save for which training waits")
    assert saver.durable(1)
    until(lambda: group()[1] == str(NICENESS), "a low priority after that save")
    job.train()
    assert saver.stage(Order(2, True, "a preemption", urgent=True), job.state)
    until(lambda: group()[1] == "0", "a save before the end")
    assert saver.durable(2)
    assert group()[1] == "0"


@pytest.fixture
def one_processor() -> Iterator[None]:
    """Start what the test starts on one processor, of which ranks leave none."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def test_a_writer_digests_large_states_in_no_more_threads_than_ranks_leave(
    node: Node, one_processor: None
) -> None:
    job = Job(0, width=2000)  # 96 MB with the state of the optimizer
    saver = node.join(job)
    train_and_save(saver, job, range(1, 2), lambda _: False)
    node.in_memory(1)
    pid, counts = node.saver.pid, set[int]()

    def committed() -> bool:
        counts.add(len(os.listdir(f"/proc/{pid}/task")))
        return (node.stage.tier.folder / copy_name(2, 1)).exists()

    job.train()
    assert saver.stage(Order(2, False, "a test"), job.state)
    until(committed, "step 2 in memory")
    assert counts == {2}, "the loop, and the thread that writes to the disk"
