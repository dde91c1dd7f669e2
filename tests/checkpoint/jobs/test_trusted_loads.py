"""What the ranks load when something is said against copies: real files in two tiers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.checkpointer import Identity
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.load.restorer import Restorer
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyStatus, Mark, of_later
from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.errors import NoUsableCheckpoint
from outlast.ipc.exchange import SoloExchange, SystemClock
from outlast.recovery.policy.events import Loaded, Quarantined, Record
from tests.support.jobs import DEADLINE, Job, save_steps

NAME = copy_name(20, 1)


@dataclass
class Tiers:
    """A local tier with steps 10 and 20, and a memory tier with step 20."""

    local: DirectoryTier
    memory: DirectoryTier
    content: dict[int, bytes]
    records: list[Record] = field(default_factory=list)

    def load(self, *marks: Mark) -> tuple[int, tuple[str, ...], bytes]:
        around = SaveContext(
            self.local,
            Identity("run-a", 2, 0, 1),
            Rounds(SoloExchange(), DEADLINE),
            CheckpointOptions(timeout=DEADLINE),
            SystemClock(),
            self.records.append,
            self.memory,
        )
        job = Job(seed=7)
        Restorer(around, job.state, [mark.to_text() for mark in marks]).restore()
        (loaded,) = (one for one in self.records if isinstance(one, Loaded))
        return loaded.step, loaded.places, job.content()


@pytest.fixture
def same(tmp_path: Path) -> Tiers:
    content = save_steps(tmp_path / "local", 10, 20)
    (tmp_path / "memory").mkdir()
    shutil.copytree(tmp_path / "local" / NAME, tmp_path / "memory" / NAME)
    return Tiers(DirectoryTier(tmp_path / "local"), DirectoryTier(tmp_path / "memory", "memory"), content)


@pytest.fixture
def other(same: Tiers, tmp_path: Path) -> Tiers:
    """The copy in memory has other bytes than the one of its name on disk, and both are whole."""
    save_steps(tmp_path / "elsewhere", 20, seed=5)
    shutil.rmtree(same.memory.folder)
    shutil.move(tmp_path / "elsewhere", same.memory.folder)
    return same


def test_the_record_says_which_tier_and_which_bytes_were_loaded(same: Tiers) -> None:
    assert same.load() == (20, (f"memory/{NAME}",), same.content[20])
    (loaded,) = (one for one in same.records if isinstance(one, Loaded))
    assert loaded.digest == inspect(same.memory, NAME, None).commit


def test_a_suspect_in_memory_is_not_loaded_from_disk_where_it_has_the_same_bytes(same: Tiers) -> None:
    digest = inspect(same.memory, NAME, None).commit
    assert same.load(Mark(f"memory/{NAME}", digest=digest))[:2] == (10, (f"local/{copy_name(10, 1)}",))


def test_the_same_step_is_loaded_from_another_tier_that_holds_other_bytes(other: Tiers) -> None:
    digest = inspect(other.memory, NAME, None).commit
    assert other.load(Mark(f"memory/{NAME}", digest=digest)) == (20, (f"local/{NAME}",), other.content[20])
    assert other.memory.names() == [NAME], "it is a suspect, nothing more"


def test_suspects_are_loaded_when_nothing_else_is_left(same: Tiers) -> None:
    assert same.load(of_later(1, 0, CopyStatus.SUSPECT, "a nan"))[0] == 20
    (loaded,) = (one for one in same.records if isinstance(one, Loaded))
    assert "a nan" in loaded.reason


def test_what_is_marked_as_quarantined_is_set_aside_in_each_tier_that_has_these_bytes(same: Tiers) -> None:
    digest = inspect(same.memory, NAME, None).commit
    assert same.load(Mark(f"memory/{NAME}", CopyStatus.QUARANTINED, digest, "a nan, twice"))[0] == 10
    assert (same.memory.names(), same.local.names()) == ([], [copy_name(10, 1)])
    (aside,) = (one for one in same.records if isinstance(one, Quarantined))
    assert aside.checkpoint == NAME
    assert same.local.quarantined()[NAME].startswith("a nan, twice; `outlast ckpt release`")


def test_when_all_are_quarantined_there_is_no_fresh_start(same: Tiers) -> None:
    marks = [Mark(f"local/{one}", CopyStatus.QUARANTINED, reason="a nan") for one in same.local.names()]
    shutil.rmtree(same.memory.folder)
    with pytest.raises(NoUsableCheckpoint, match=r"a nan.*outlast ckpt release"):
        same.load(*marks)
