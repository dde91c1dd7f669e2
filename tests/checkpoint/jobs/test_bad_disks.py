"""A disk that may only be read at first, and a copy that goes while a rank looks at it."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from outlast.checkpoint.load import restorer
from outlast.checkpoint.load.restorer import Restorer
from outlast.checkpoint.policy.manifest import copy_name, rank_files
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from tests.support.jobs import Job, checkpointer, save_steps
from tests.support.launching import until
from tests.support.mounts import mounted, needs_root
from tests.support.teams import Team


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


def test_a_damaged_copy_that_no_listing_names_any_more_gives_way_to_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = save_steps(tmp_path, 1, 2)
    path = tmp_path / copy_name(2, 1) / rank_files(0, 1).tensors
    octets = path.read_bytes()
    path.write_bytes(octets[:-1] + bytes([octets[-1] ^ 1]))
    monkeypatch.setattr(Restorer, "_serving", lambda *_: [])
    job = Job(9)
    restored = checkpointer(tmp_path, generation=2).restore(job.state)
    assert restored is not None
    assert (restored.step, job.content()) == (1, content[1])
