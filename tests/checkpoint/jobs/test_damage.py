"""Copies that change, are of another format or may not be read; see the scenarios of damage."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, rank_files
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import inspect, verify
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointMismatch
from outlast.fields import FORMAT_VERSION
from outlast.ipc.exchange import SoloExchange
from outlast.recovery.policy.events import Record
from tests.checkpoint.jobs.test_reading import restore_near
from tests.support.forging import forge, rewrite
from tests.support.jobs import DEADLINE, Job, checkpointer, kinds, save_steps, saver_process, saving
from tests.support.launching import until
from tests.support.saved_steps import content as content_of

OLD, NEW = copy_name(1, 1), copy_name(2, 1)
TENSORS, DIGESTS, DOCUMENT = rank_files(0, 1)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize(("file", "stride"), [(COMMIT, 1), (MANIFEST, 7)])
def test_a_flip_of_any_bit_of_the_small_files_is_found(file: str, stride: int, tmp_path: Path) -> None:
    """Every bit of COMMIT; of the manifest, which has one digest, every seventh: one in each byte."""
    save_steps(tmp_path, 1)
    tier = DirectoryTier(tmp_path)
    path = tmp_path / OLD / file
    whole = path.read_bytes()
    assert inspect(tier, OLD, None).state is CopyState.WHOLE
    for bit in range(0, len(whole) * 8, stride):
        flip(path, bit)
        found = inspect(tier, OLD, None)
        assert found.state is CopyState.DAMAGED, f"bit {bit}: {found}"
        path.write_bytes(whole)


def load_older(folder: Path, content: dict[int, bytes]) -> list[Record]:
    """Restore, check that step 1 came back in every bit, and return the records."""
    records: list[Record] = []
    job = Job(77)
    restored = checkpointer(folder, generation=2, records=records).restore(job.state)
    assert restored is not None
    assert (restored.name, job.content()) == (OLD, content[1])
    return records


def why(folder: Path) -> dict[str, Any]:
    """Return why the newer copy is in quarantine."""
    return json.loads((folder / "quarantine" / f"{NEW}.reason.json").read_text())  # type: ignore[no-any-return]


def test_the_place_of_the_damage_is_named(tmp_path: Path) -> None:
    box = {"weights": torch.zeros(700_000)}
    for step in (1, 2):
        checkpointer(tmp_path).save(step, {"box": box}, "a test")
    flip(tmp_path / NEW / TENSORS, 8 * 2_500_000)
    checkpointer(tmp_path).restore({"box": box})
    assert "2097152" in why(tmp_path)["expected"]


@pytest.mark.parametrize("forged", [True, False])
def test_digests_that_are_not_of_their_file_are_damage(forged: bool, tmp_path: Path) -> None:
    """Also where the manifest has the digest of the file that they are in."""
    content = save_steps(tmp_path, 1, 2)
    path = tmp_path / NEW / DIGESTS
    flip(path, 5)
    if forged:
        digest = file_digest(path.read_bytes())
        rewrite(tmp_path / NEW, lambda manifest: manifest["own"][0].__setitem__(2, digest))
    assert verify(DirectoryTier(tmp_path), NEW, None).state is CopyState.DAMAGED
    load_older(tmp_path, content)
    assert why(tmp_path)["file"] == DIGESTS


def other_commit(folder: Path, version: int) -> None:
    digest = (folder / COMMIT).read_text().split()[3]
    (folder / COMMIT).write_bytes(commit_line(version, digest))


def other_manifest(folder: Path, version: int) -> None:
    rewrite(folder, lambda manifest: manifest.update(format=version))


def other_document(folder: Path, version: int) -> None:
    forge(folder, lambda document, manifest: document.update(format=version))


def older_rows(folder: Path, version: int) -> None:
    """Write all of it in another version, with the rows of parameters as format 2 had them."""

    def change(document: Any, manifest: Any) -> None:
        document.update(format=version)
        manifest.update(format=version)
        rows = document["parameters"]["optimizer"]
        assert rows
        document["parameters"]["optimizer"] = [row[:2] for row in rows]

    forge(folder, change)
    other_commit(folder, version)


OTHERS = [other_commit, other_manifest, other_document, older_rows]


@pytest.mark.parametrize("version", [2, FORMAT_VERSION + 2])
@pytest.mark.parametrize("steps", [(2,), (1, 2)], ids=["alone", "with an older one"])
@pytest.mark.parametrize("change", OTHERS)
def test_another_format_is_refused_and_stays_where_it_is(
    change: Callable[[Path, int], None], steps: tuple[int, ...], version: int, tmp_path: Path
) -> None:
    save_steps(tmp_path, *steps)
    change(tmp_path / NEW, version)
    before = content_of(tmp_path)
    with pytest.raises(CheckpointMismatch, match=rf"{NEW}.*{version}.*{FORMAT_VERSION}"):
        checkpointer(tmp_path).restore(Job(0).state)
    with pytest.raises(CheckpointMismatch, match=rf"{NEW}.*{version}.*{FORMAT_VERSION}"):
        restore_near(tmp_path / "disk", tmp_path, Job(0).state, [])
    assert content_of(tmp_path) == before


def test_a_copy_of_another_format_in_memory_alone_outlives_the_writer(tmp_path: Path) -> None:
    """As an update of outlast finds it, where the job before could not bring its last copy to disk."""
    memory, durable = MemoryFolder(tmp_path / "memory"), tmp_path / "checkpoints"
    saver = saver_process(memory.root, tmp_path / "events.jsonl")
    stage = Stage(memory.root)
    stage.make()
    here = stage.tier.folder
    save_steps(here, 2)
    other_commit(here / NEW, FORMAT_VERSION - 1)
    before = content_of(here)
    found = saving(durable, memory, saver.ensure, generation=2, settings=CheckpointOptions(timeout=DEADLINE))
    with pytest.raises(CheckpointMismatch, match=rf"{NEW}.*{FORMAT_VERSION - 1}.*{FORMAT_VERSION}"):
        found.restore(Job(0).state)
    found.close()
    saver.hang_up()
    until(saver.ended, "the end of the writer")
    assert content_of(here) == before
    assert not durable.exists() or content_of(durable) == {}


def test_a_suspect_is_passed_over_while_there_is_another_one(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    job, records = Job(9), list[Record]()
    restored = checkpointer(tmp_path, records=records).restore(job.state, avoid=[NEW])
    assert restored is not None
    assert restored.step == 1
    assert job.content() == content[1]
    assert kinds(records) == ["Loaded"]
    restored = checkpointer(tmp_path).restore(job.state, avoid=[NEW, OLD])
    assert restored is not None
    assert (restored.step, job.content()) == (2, content[2])


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's right to read everything, and take it back."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_copy_that_may_not_be_read_is_passed_over_but_not_moved() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # which anybody may look into
        folder = Path(name)
        folder.chmod(0o755)
        content = save_steps(folder, 1, 2)
        (folder / NEW / DOCUMENT).chmod(0)
        with as_nobody():
            records = load_older(folder, content)
        assert kinds(records) == ["Note", "Loaded"]
        assert "Permission denied" in records[0].reason  # type: ignore[attr-defined]
        assert (folder / NEW).exists()


class Meddler(SoloExchange):
    """Does something once the ranks have compared what they see, before they read."""

    def __init__(self, deed: Callable[[], object]) -> None:
        self._deed = deed

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:
        if topic == "inventory":
            self._deed()
        return super().gather(topic, value, timeout)


def test_a_copy_that_goes_away_before_it_is_read_is_passed_over(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    job, records = Job(9), list[Record]()
    meddler = Meddler(lambda: (tmp_path / NEW).rename(tmp_path / "gone"))
    assert checkpointer(tmp_path, exchange=meddler, records=records).restore(job.state) is not None
    assert job.content() == content[1]
    assert kinds(records) == ["Note", "Loaded"]
    assert NEW in records[0].reason  # type: ignore[attr-defined]


def test_a_copy_that_changes_after_the_ranks_compared_it_is_not_believed(tmp_path: Path) -> None:
    """Its files agree among themselves, but they are not those that all ranks saw."""
    content = save_steps(tmp_path, 1, 2)
    job, records = Job(9), list[Record]()
    meddler = Meddler(lambda: rewrite(tmp_path / NEW, lambda manifest: manifest.update(created=1.0)))
    assert checkpointer(tmp_path, exchange=meddler, records=records).restore(job.state) is not None
    assert job.content() == content[1]
    assert why(tmp_path)["file"] == MANIFEST
