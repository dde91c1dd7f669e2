"""Saves that are lost, repeated, fenced or pruned; the older copies stay whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointMismatch, StaleGeneration
from outlast.recovery.policy.events import Record
from tests.support.jobs import Job, checkpointer, kinds, save_steps
from tests.support.mounts import mounted, needs_root

OLD, NEW = copy_name(1, 1), copy_name(2, 1)
TENSORS, DOCUMENT = "rank-00000-of-00001.safetensors", "rank-00000-of-00001.json"
FILES = (TENSORS, DOCUMENT, MANIFEST, COMMIT)


def test_a_save_that_is_there_already_is_not_made_again(tmp_path: Path) -> None:
    records: list[Record] = []
    job, saver = Job(0), checkpointer(tmp_path, records=records)
    assert saver.save(2, job.state, "a test")
    before = (tmp_path / NEW).stat()
    job.train()
    assert saver.save(2, job.state, "a test")
    assert (tmp_path / NEW).stat() == before
    assert kinds(records) == ["Saved"]


def test_a_save_takes_the_place_of_a_damaged_one_of_its_name(tmp_path: Path) -> None:
    records: list[Record] = []
    save_steps(tmp_path, 2)
    (tmp_path / NEW / DOCUMENT).unlink()
    job = Job(3)
    assert checkpointer(tmp_path, records=records).save(2, job.state, "a test")
    assert kinds(records) == ["Quarantined", "Saved"]
    assert (tmp_path / "quarantine" / NEW).is_dir()
    other = Job(4)
    assert checkpointer(tmp_path).restore(other.state) is not None
    assert other.content() == job.content()


def test_another_runs_copy_of_the_same_name_is_neither_moved_nor_replaced(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, run_id="run-b")
    before = (tmp_path / NEW).stat()
    with pytest.raises(CheckpointMismatch, match=f"{NEW}.*run-b"):
        checkpointer(tmp_path).save(2, Job(0).state, "a test")
    assert (tmp_path / NEW).stat() == before
    assert [path.name for path in tmp_path.iterdir()] == [NEW]


def test_generations_do_not_overwrite_each_others_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    later = save_steps(tmp_path, 2, seed=8, generation=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NEW, copy_name(2, 2)]
    job = Job(0)
    assert checkpointer(tmp_path, generation=3).restore(job.state).name == copy_name(2, 2)  # type: ignore[union-attr]
    assert job.content() == later[2]


def test_a_rank_of_an_older_generation_can_no_longer_save(tmp_path: Path) -> None:
    old = checkpointer(tmp_path, generation=1)
    job = Job(0)
    assert old.restore(job.state) is None
    assert old.save(1, job.state, "a test")
    save_steps(tmp_path, 2, generation=2)
    with pytest.raises(StaleGeneration, match="2"):
        old.save(3, job.state, "a test")
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLD, copy_name(2, 2)]


def test_a_generation_that_counts_anew_can_go_on_from_the_old_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, generation=5)
    job = Job(0)
    saver = checkpointer(tmp_path, generation=0)
    assert saver.restore(job.state) is not None
    assert saver.save(2, job.state, "a test")


def test_retention_neither_counts_nor_removes_what_is_not_this_runs(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, run_id="run-b")
    save_steps(tmp_path, 2)
    (tmp_path / NEW / COMMIT).unlink()
    save_steps(tmp_path, 3, 4, settings=CheckpointOptions(keep_last_n=2))
    assert len(list(tmp_path.iterdir())) == 4


@needs_root
def test_a_save_that_works_again_starts_the_count_anew(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        saver = checkpointer(tmp_path, settings=CheckpointOptions(max_failed_saves=2, max_failed_seconds=0.0))
        small, large = {"x": torch.ones(1)}, {"x": torch.ones(10**6)}
        for step in range(1, 6, 2):
            assert not saver.save(step, large, "a test")
            assert saver.save(step + 1, small, "a test")
