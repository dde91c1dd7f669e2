"""Saving while training goes on: real savers, killed, stopped, starved and cut off, and what they leave."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.checkpoint import checkpointer
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.content.transfers import CopyPlan
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.errors import NoUsableCheckpoint
from outlast.fields import FORMAT_VERSION
from outlast.recovery.policy.events import Note, SaveLost
from tests.support.jobs import DEADLINE, Job, saving, together
from tests.support.launching import until
from tests.support.memory_nodes import Node, flip, train_and_save
from tests.support.mounts import mounted, needs_root

TENSORS = "rank-00000-of-00001.safetensors"


def test_an_owner_with_more_than_1024_files_open_is_served(node: Node) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, most[0]), most[1]))
    held = [os.dup(2) for _ in range(1100)]
    try:
        job = Job(0)
        train_and_save(node.join(job), job, range(1, 2), lambda _: False)
        node.in_memory(1)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what the thread that copies lazily waits for; else it may be done before a change."""
    found, copy = threading.Event(), CopyPlan.copy

    def later(*given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert found.wait(DEADLINE)
        copy(*given)

    monkeypatch.setattr(CopyPlan, "copy", later)
    return found


def halve(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": halve,
    "data": lambda weight: weight.data.mul_(0.5),
    "clipping": lambda weight: weight.data.clamp_(-0.01, 0.01),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 0.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(0.5),
    "one element": lambda weight: weight.data[7, 7].add_(1),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_parameter_that_changes_under_a_lazy_copy_makes_no_checkpoint(
    how: str, node: Node, changed: threading.Event
) -> None:
    """Also where no version counter tells: weights are clipped, or exchanged for averages, through .data."""
    job = Job(0, width=300)
    saver = node.join(job, staging="lazy")
    job.train()
    assert saver.stage(Order(1, True, "a test"), job.state)
    CHANGES[how](job.model[0].weight)
    changed.set()
    assert not saver.durable(1)
    lost = node.logged("save_lost")
    assert len(lost) == 1
    assert "model.0.weight" in lost[0]["reason"]
    assert not node.durable.exists() or copy_name(1, 1) not in os.listdir(node.durable)


def test_other_memory_for_a_parameter_does_not_change_what_is_saved(
    node: Node, changed: threading.Event
) -> None:
    job = Job(0, width=300)
    saver = node.join(job, staging="lazy")
    job.train()
    content = job.content()
    assert saver.stage(Order(1, True, "a test"), job.state)
    job.model[0].weight.data = torch.zeros(300, 300)
    with torch.no_grad():
        job.model[2].weight.set_(torch.zeros(300, 300))
    changed.set()
    assert saver.durable(1)
    other = Job(99, width=300)
    node.join(other, generation=2)
    assert other.content() == content


def test_lazy_staging_waits_before_a_compiled_step_of_an_optimizer(node: Node) -> None:
    """The hook is no part of the graph. (A graph of the whole step is refused by torch, hook or not.)"""
    job = Job(0, width=300)
    saver = node.join(job, staging="lazy")
    job.train()
    content = job.content()
    for one in job.model.parameters():
        one.grad = torch.ones_like(one)
    step = torch.compile(job.optimizer.step, backend="eager")
    assert saver.stage(Order(1, True, "a test"), job.state)
    step()
    assert saver.durable(1)
    assert job.content() != content
    other = Job(99, width=300)
    node.join(other, generation=2)
    assert (node.loaded().step, other.content()) == (1, content)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that never called the constructor of its class, as PostLocalSGDOptimizer."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.optim = wrapped
        self.step, self.zero_grad = wrapped.step, wrapped.zero_grad  # type: ignore[method-assign]
        self.param_groups, self.state = wrapped.param_groups, wrapped.state
        self.load = wrapped.load_state_dict
        self.state_dict = wrapped.state_dict  # type: ignore[method-assign]

    def load_state_dict(self, state_dict: Any) -> None:
        self.load(state_dict)


class Deep(Wrapper):
    """One whose optimizer cannot be found."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        super().__init__(wrapped)
        del self.optim


@pytest.mark.parametrize("kind", [Wrapper, Deep])
def test_lazy_staging_waits_for_the_steps_of_a_wrapped_optimizer(kind: type[Wrapper], node: Node) -> None:
    job = Job(0, width=300)
    job.optimizer = kind(job.optimizer)  # type: ignore[assignment]
    saver = node.join(job, staging="lazy")
    job.train()
    content = job.content()
    assert saver.stage(Order(1, True, "a test"), job.state)
    job.train()
    assert saver.durable(1)
    assert job.content() != content
    eager = [one for one in node.records if isinstance(one, Note) and "eager" in one.reason]
    assert len(eager) == (kind is Deep)
    other = Job(99, width=300)
    other.optimizer = kind(other.optimizer)  # type: ignore[assignment]
    node.join(other, generation=2)
    assert (node.loaded().step, other.content()) == (1, content)


def test_with_a_cuda_graph_that_is_older_than_the_session_lazy_staging_copies_at_once(
    node: Node, changed: threading.Event
) -> None:
    graph = object.__new__(torch.cuda.CUDAGraph)
    job = Job(0, width=300)
    saver = node.join(job, staging="lazy")
    job.train()
    content = job.content()
    assert saver.stage(Order(1, True, "a test"), job.state)
    job.model[0].weight.data.mul_(2)  # as a replay: without a hook, and no version counts it
    changed.set()
    assert saver.durable(1)
    del graph
    other = Job(99, width=300)
    node.join(other, generation=2)
    assert (node.loaded().step, other.content()) == (1, content)
    notes = [record.reason for record in node.records if isinstance(record, Note)]
    assert any("CUDA graph" in reason for reason in notes)


def test_a_saver_that_stands_still_holds_saves_back_and_not_memory(node: Node) -> None:
    job = Job(0)
    saver = node.join(job, buffers=2)
    os.kill(node.saver.pid, signal.SIGSTOP)
    train_and_save(saver, job, range(1, 3), lambda _: True)
    threading.Timer(3.0, os.kill, (node.saver.pid, signal.SIGCONT)).start()
    train_and_save(saver, job, range(3, 4), lambda _: True)
    assert saver.durable(3)
    notes = [record.reason for record in node.records if isinstance(record, Note)]
    assert any("step 3" in reason for reason in notes), notes


def test_a_save_for_which_no_buffer_comes_free_is_lost_and_training_goes_on(node: Node) -> None:
    job = Job(0)
    saver = node.join(job, buffers=2)
    os.kill(node.saver.pid, signal.SIGSTOP)
    train_and_save(saver, job, range(1, 3), lambda _: True)
    object.__setattr__(saver._around.settings, "timeout", 0.2)
    assert not saver.stage(Order(3, True, "a test"), job.state)
    os.kill(node.saver.pid, signal.SIGCONT)
    lost = [record.reason for record in node.records if isinstance(record, SaveLost)]
    assert len(lost) == 1
    assert "0.2" in lost[0]


@pytest.mark.parametrize(("seconds", "notes"), [(1.9, 0), (2.1, 1)])
def test_a_long_wait_for_a_buffer_is_reported_without_the_wait_for_the_copy_before(
    seconds: float, notes: int, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, job = [100.0], Job(0)
    saver = node.join(job)

    def passes(seconds: float) -> None:
        now[0] += seconds

    def stage(*_: object) -> float:
        for step in (0.0, seconds, 0.0):
            passes(step)
            saver._nudge()
        return seconds

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
        patch.setattr(saver._stager, "fence", lambda: passes(30.0))
        patch.setattr(saver._stager, "stage", stage)
        assert saver.stage(Order(1, False, "a test"), job.state)
    found = [one for one in node.records if isinstance(one, Note) and "waits for a free" in one.reason]
    assert len(found) == notes


def cut(folder: Path) -> None:
    staged = next(folder.glob("*.staged"))
    staged.write_bytes(staged.read_bytes()[:-10])


def older(folder: Path) -> None:
    """Make it what an outlast with another format has staged."""
    document = folder / "rank-00000-of-00001.json"
    ours, others = (b'{"format":%d,' % version for version in (FORMAT_VERSION, FORMAT_VERSION - 1))
    content = document.read_bytes()
    assert content.startswith(ours)
    document.write_bytes(content.replace(ours, others, 1))


@pytest.mark.parametrize("deed", [cut, older])
def test_a_copy_that_is_not_made_leaves_nothing_of_what_was_written_ahead_of_it(
    deed: Callable[[Path], None], node: Node
) -> None:
    job = Job(0, width=300)
    saver = node.join(job)
    os.kill(node.saver.pid, signal.SIGSTOP)
    train_and_save(saver, job, range(1, 2), lambda _: True)
    saver.settle()
    deed(next(node.stage.staged.iterdir()))
    os.kill(node.saver.pid, signal.SIGCONT)
    assert not saver.durable(1)
    content = train_and_save(saver, job, range(2, 3), lambda _: True)
    assert saver.durable(2)
    lost = node.logged("save_lost")
    assert [one["step"] for one in lost] == [1]
    assert os.listdir(node.durable) == [copy_name(2, 1)]
    other = Job(99, width=300)
    node.join(other, generation=2)
    assert (node.loaded().step, other.content()) == (2, content[2])


@needs_root
def test_a_shared_memory_that_is_too_small_is_not_used(node: Node) -> None:
    node.memory.root.mkdir()
    job = Job(0, width=300)
    with mounted(node.memory.root, "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs"):
        saver = node.join(job)
        content = train_and_save(saver, job, range(1, 5), lambda step: step == 2)
        notes = [record.reason for record in node.records if isinstance(record, Note)]
        assert any(".staging" in reason for reason in notes), notes
        until(lambda: (node.memory.status() or 0) and node.memory.status().memory_step == 4, "step 4")  # type: ignore[union-attr]
        other = Job(99, width=300)
        node.join(other, generation=2)
        assert (node.loaded().step, other.content()) == (4, content[4])
        node.cut_off()
    assert sorted(os.listdir(node.durable)) == [".staging", copy_name(2, 1), copy_name(4, 1)]


def test_a_step_that_only_one_rank_staged_never_becomes_a_checkpoint(node: Node) -> None:
    jobs = [Job(0), Job(1)]
    contents: list[dict[int, bytes]] = [{}, {}]

    def part(exchange: Any) -> Checkpointer:
        settings = CheckpointOptions(ckpt_fully_parallel_save=False)  # they save one by one
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
    for rank, saver in enumerate(savers):
        assert isinstance(saver, Checkpointer), saver
        contents[rank] = train_and_save(saver, jobs[rank], range(1, 3 - rank), lambda _: True)
    node.in_memory(1)
    others = [Job(77), Job(78)]

    def again(exchange: Any) -> Any:
        found = saving(
            node.durable,
            node.memory,
            node.saver.ensure,
            generation=2,
            exchange=exchange,
            records=node.records,
        )
        return found.restore(others[exchange.rank].state)

    restored = together(2, again, generation=2)
    assert [one.step for one in restored] == [1, 1]  # type: ignore[union-attr]
    assert [other.content() for other in others] == [one[1] for one in contents]
    assert node.stage.stagings() == []


def test_a_damaged_copy_on_disk_is_found_while_memory_still_has_the_state(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    content = train_and_save(saver, job, range(1, 3), lambda _: True)
    assert saver.durable(2)
    flip(node.durable / copy_name(2, 1) / TENSORS, 2000)
    other = Job(99)
    again = node.join(other, generation=2)
    assert (node.loaded().step, other.content()) == (2, content[2])
    train_and_save(again, other, range(3, 4), lambda _: False)
    until(lambda: node.logged("quarantined"), "the damaged copy in quarantine")
    assert os.listdir(node.durable / "quarantine")[0].startswith(copy_name(2, 1))
    assert copy_name(2, 1) not in os.listdir(node.durable)


def test_after_going_back_to_an_older_step_the_new_path_counts_and_not_the_higher_number(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    train_and_save(saver, job, range(1, 6), lambda step: step == 2)
    assert saver.durable(2)
    node.in_memory(5)
    other = Job(99)
    again = node.join(other, generation=2, avoid=(copy_name(5, 1),))
    assert node.loaded().step == 2
    content = train_and_save(again, other, range(3, 5), lambda _: False)
    node.in_memory(4, generation=2)
    third = Job(98)
    node.join(third, generation=3, avoid=(copy_name(5, 1),))
    assert (node.loaded().step, third.content()) == (4, content[4])
    assert "from memory" in node.loaded().reason


def test_ranks_of_an_older_session_can_commit_nothing_any_more(node: Node) -> None:
    job, other = Job(0), Job(99)
    old = node.join(job)
    train_and_save(old, job, range(1, 2), lambda _: True)
    assert old.durable(1)
    new = node.join(other, generation=2)
    train_and_save(old, job, range(2, 3), lambda _: True)
    old.settle()
    train_and_save(new, other, range(2, 4), lambda _: True)
    assert new.durable(3)
    names = os.listdir(node.durable)
    assert sorted(names) == [copy_name(1, 1), copy_name(2, 2), copy_name(3, 2)]
    assert not (node.stage.tier.folder / copy_name(2, 1)).exists()


def test_a_saver_that_comes_when_the_owner_has_gone_still_brings_the_state_to_disk(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    content = train_and_save(saver, job, range(1, 4), lambda _: False)
    node.in_memory(3)
    os.kill(node.saver.pid, signal.SIGKILL)
    until(node.saver.ended, "the end of the first saver")
    node.saver.ensure()
    node.cut_off()
    assert os.listdir(node.durable) == [copy_name(3, 1)]
    other = Job(99)
    node.join(other, generation=2)
    assert other.content() == content[3]


@pytest.mark.parametrize("ends", [True, False], ids=["end", "next start"])
def test_what_was_damaged_in_memory_takes_the_place_of_no_copy_on_disk(node: Node, ends: bool) -> None:
    """The writer that brings it to disk is another one than that which took its digests."""
    job = Job(0)
    saver = node.join(job, keep_last_n=1)
    content = train_and_save(saver, job, range(1, 3), lambda step: step == 1)
    assert saver.durable(1)
    folder = node.in_memory(2)
    os.kill(node.saver.pid, signal.SIGSTOP)
    assert saver.stage(Order(2, True, "again"), job.state)
    os.kill(node.saver.pid, signal.SIGKILL)
    until(node.saver.ended, "the end of the first saver")
    flip(folder / TENSORS, 2000)
    if ends:
        node.saver.ensure()
        node.cut_off()
    else:
        other = Job(99)
        node.join(other, generation=2)
        assert other.content() == content[1]
    until(lambda: node.logged("save_lost"), "the copy given up")
    assert {one["step"] for one in node.logged("save_lost")} == {2}
    assert DirectoryTier(node.durable).names() == [copy_name(1, 1)]


def test_a_run_whose_only_copy_was_damaged_in_memory_never_starts_anew_by_itself(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    train_and_save(saver, job, range(1, 2), lambda _: False)
    flip(node.in_memory(1) / TENSORS, 2000)
    for generation in (2, 3):
        with pytest.raises(NoUsableCheckpoint, match=copy_name(1, 1)):
            node.join(Job(99), generation=generation)


@pytest.mark.parametrize("first", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_a_step_that_is_saved_twice_is_staged_once(node: Node, first: bool, staging: str) -> None:
    job = Job(0)
    saver = node.join(job, staging=staging, keep_last_n=20)
    content: dict[int, bytes] = {}
    for step in range(1, 13):
        content |= train_and_save(saver, job, range(step, step + 1), lambda _: first)
        if step % 3 == 0:
            node.in_memory(step)
        assert all(saver.stage(Order(step, durable, "again"), job.state) for durable in (True, False))
    assert saver.durable(12)
    tier = DirectoryTier(node.durable)
    until(lambda: set(tier.names()) == {copy_name(step, 1) for step in range(1, 13)}, "all on disk")
    node.cut_off(saver)
    assert not node.logged("save_lost") + [one for one in node.records if isinstance(one, SaveLost)]
    other = Job(99)
    node.join(other, generation=2)
    assert other.content() == content[12]


def test_a_second_order_outlives_the_saver(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    train_and_save(saver, job, range(1, 2), lambda _: False)
    node.in_memory(1)
    os.kill(node.saver.pid, signal.SIGSTOP)
    assert saver.stage(Order(1, True, "again"), job.state)
    os.kill(node.saver.pid, signal.SIGKILL)
    assert saver.durable(1)
    assert os.listdir(node.durable) == [copy_name(1, 1)]


def test_a_second_order_for_what_was_given_up_is_a_lost_save(node: Node) -> None:
    job = Job(0)
    saver = node.join(job)
    os.kill(node.saver.pid, signal.SIGSTOP)
    train_and_save(saver, job, range(1, 2), lambda _: False)
    saver.settle()
    staged = next(node.stage.staged.glob("*/*.staged"))
    staged.write_bytes(staged.read_bytes()[:-10])
    assert saver.stage(Order(1, True, "again"), job.state)
    os.kill(node.saver.pid, signal.SIGCONT)
    assert not saver.durable(1)
    assert node.logged("save_lost")[-1]["step"] == 1
