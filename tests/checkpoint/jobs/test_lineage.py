"""A copy of a path that the run has left does not come back, and takes no later save with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import outlast
from outlast.checkpoint.policy.manifest import copy_name, place_of
from tests.support.jobs import Job
from tests.support.launching import until
from tests.support.memory_nodes import Node, train_and_save


def test_what_an_earlier_generation_left_in_memory_does_not_beat_what_a_later_one_committed(
    tmp_path: Path,
) -> None:
    """Two nodes with memory of their own and a common disk; the job is on one of them at a time."""
    here, there = Node(tmp_path / "here"), Node(tmp_path / "there")
    there.durable = here.durable
    job = Job(0)
    saver = here.join(job, generation=1)
    train_and_save(saver, job, range(1, 7), lambda step: step == 2)
    here.in_memory(6)
    until((here.durable / copy_name(2, 1)).exists, "step 2 on disk")
    here.saver.kill()  # as all processes of a job are when its time is over
    saver.close()
    job = Job(0)
    saver = there.join(job, generation=2)
    assert there.loaded().step == 2
    torch.manual_seed(7)
    saved = train_and_save(saver, job, range(3, 5), lambda step: step == 4)
    assert saver.durable(4)
    there.cut_off(saver)
    job = Job(1)
    saver = here.join(job, generation=3)
    assert (here.loaded().checkpoint, job.content()) == (copy_name(4, 2), saved[4])
    assert copy_name(6, 1) in here.loaded().reason
    here.cut_off(saver)


@pytest.mark.parametrize("async_save", [True, False])
def test_without_a_launcher_a_copy_that_was_passed_over_takes_no_later_save_with_it(
    tmp_path: Path, async_save: bool
) -> None:
    copies, hidden = tmp_path / "run" / "checkpoints", tmp_path / "hidden"
    hidden.mkdir()
    weight = torch.zeros(
        4
    )  # one object: a session of this process with another one would be another training

    def train(begin: int, add: float, end: int) -> float:
        """Train in a session and save its last step; return the weight that it began with."""
        weight.zero_()
        memory = tmp_path / f"memory-{end}-{add}" / ("a-folder-of-a-long-name-" * 4)
        memory.mkdir(parents=True)
        options = outlast.CheckpointOptions(
            async_save=async_save, keep_last_n=4, non_persistent_local_ckpt_dir=os.fspath(memory)
        )
        run = os.fspath(tmp_path / "run")
        with outlast.start(run, save_interval=10**6, checkpoints=options) as session:
            assert session.restore(w={"w": weight}) == begin
            found = float(weight[0])
            for path in hidden.iterdir():
                path.rename(copies / path.name)  # it can be read again
            for _ in session.steps(end):
                weight.add_(add)
            assert session.save(wait=True)
            assert end in {place_of(path.name)[0] for path in copies.iterdir()}
        until(lambda: not list(memory.iterdir()), "the end of the writer")
        return found

    assert train(0, 1.0, 2) == 0.0
    assert train(2, 1.0, 4) == 2.0
    (newest,) = copies.glob("step-000000004.*")
    newest.rename(hidden / newest.name)
    assert train(2, 100.0, 3) == 2.0
    assert newest.exists()
    assert train(3, 100.0, 4) == 102.0, "what was saved last, not the copy of a later step beside it"
    assert len(list(copies.glob("step-000000004.*"))) == 2, "that copy, and another one of its step"
    assert train(4, 100.0, 5) == 202.0
