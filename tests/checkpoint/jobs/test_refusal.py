"""What cannot be kept is refused before anything is written; what does not fit, before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyStatus, Mark
from outlast.errors import NoUsableCheckpoint, UsageError
from tests.support.jobs import Job, checkpointer, save_steps


def test_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="loop"):
        checkpointer(tmp_path).save(1, {"box": {"loop": loop}}, "a test")


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch(tmp_path: Path) -> None:
    saved = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"m\.0\.weight"):
        checkpointer(tmp_path).save(1, {"m": saved}, "a test")
    saved(torch.ones(1, 3))
    assert checkpointer(tmp_path).save(1, {"m": saved}, "a test")
    live = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"0\.weight"):
        checkpointer(tmp_path, generation=2).restore({"m": live})
    live(torch.ones(1, 3))
    assert checkpointer(tmp_path, generation=2).restore({"m": live}) is not None


def test_an_optimizer_whose_state_must_be_gathered_first_is_refused(tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    with pytest.raises(UsageError, match="consolidate_state_dict"):
        checkpointer(tmp_path).save(1, {"o": optimizer}, "a test")


def test_a_live_value_that_cannot_be_restored_in_place_is_refused(tmp_path: Path) -> None:
    assert checkpointer(tmp_path).save(1, {"epoch": {"n": 3}}, "a test")
    with pytest.raises(UsageError, match="epoch"):
        checkpointer(tmp_path).restore({"epoch": 0})


def test_where_every_copy_that_the_run_had_is_gone_nothing_starts_anew(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    marks = [Mark(f"local/{copy_name(step, 1)}", CopyStatus.DURABLE).to_text() for step in (1, 2)]
    job = Job(77)
    (tmp_path / copy_name(2, 1)).rename(tmp_path / "elsewhere")
    found = checkpointer(tmp_path, generation=2).restore(job.state, marks)
    assert found is not None
    assert (found.step, job.content()) == (1, content[1]), "one of them is there"
    (tmp_path / copy_name(1, 1)).rename(tmp_path / "elsewhere-1")
    before = job.content()
    names = f"{copy_name(1, 1)}, {copy_name(2, 1)}"
    with pytest.raises(NoUsableCheckpoint, match=rf"{names}.*--run-dir") as refused:
        checkpointer(tmp_path, generation=3).restore(job.state, marks)
    assert str(tmp_path) in str(refused.value)
    assert job.content() == before
    assert checkpointer(tmp_path, generation=3).restore(job.state) is None, "the run knows of none"
