"""Whatever happens to the files: it is found, named, set aside, and an older whole copy is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.errors import CheckpointMismatch, NoUsableCheckpoint
from outlast.fields import FORMAT_VERSION
from outlast.ipc.exchange import SoloExchange
from outlast.recovery.policy.events import Loaded, Note, Quarantined, Record
from tests.support.jobs import Job, checkpointer, kinds, mounted, needs_root, save_steps

OLD, NEW = copy_name(1, 1), copy_name(2, 1)
TENSORS, DOCUMENT = "rank-00000-of-00001.safetensors", "rank-00000-of-00001.json"
FILES = (TENSORS, DOCUMENT, MANIFEST, COMMIT)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def load_older(folder: Path, content: dict[int, bytes]) -> list[Record]:
    """Restore, check that step 1 came back in every bit, and return the records."""
    records: list[Record] = []
    job = Job(77)
    restored = checkpointer(folder, generation=2, records=records).restore(job.state)
    assert restored is not None
    assert (restored.step, restored.name) == (1, OLD)
    assert job.content() == content[1]
    return records


def assert_set_aside(folder: Path, records: list[Record], file: str) -> dict[str, Any]:
    """Check that the newer copy lies in quarantine with its reason; return the reason."""
    assert kinds(records) == ["Quarantined", "Loaded"]
    quarantined, loaded = records
    assert isinstance(quarantined, Quarantined)
    assert isinstance(loaded, Loaded)
    assert (quarantined.checkpoint, quarantined.step) == (NEW, 2)
    assert f"passed over: {NEW} (rank 0: " in loaded.reason
    assert not (folder / NEW).exists()
    assert os.path.lexists(folder / "quarantine" / NEW)
    reason = json.loads((folder / "quarantine" / f"{NEW}.reason.json").read_text())
    assert reason["name"] == NEW
    assert reason["rank"] == 0
    assert reason["file"] == file
    assert reason["expected"] != reason["found"]
    assert reason["reason"] == quarantined.reason
    return reason  # type: ignore[no-any-return]


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


@pytest.mark.parametrize("file", [TENSORS, DOCUMENT])
def test_a_flip_anywhere_in_a_ranks_files_is_found(file: str, tmp_path: Path, seed: int) -> None:
    content = save_steps(tmp_path / "whole", 1, 2)
    size = (tmp_path / "whole" / NEW / file).stat().st_size
    dice = random.Random(seed)
    for bit in [0, 7 * 8, 8 * 8, size * 8 - 1, *(dice.randrange(size * 8) for _ in range(20))]:
        shutil.copytree(tmp_path / "whole", tmp_path / str(bit), dirs_exist_ok=True)
        flip(tmp_path / str(bit) / NEW / file, bit)
        reason = assert_set_aside(tmp_path / str(bit), load_older(tmp_path / str(bit), content), file)
        assert "digest" in reason["expected"]
        shutil.rmtree(tmp_path / str(bit))


def test_the_place_of_the_damage_is_named(tmp_path: Path) -> None:
    box = {"weights": torch.zeros(700_000)}
    for step in (1, 2):
        checkpointer(tmp_path).save(step, {"box": box}, "a test")
    flip(tmp_path / NEW / TENSORS, 8 * 2_500_000)
    records: list[Record] = []
    checkpointer(tmp_path, records=records).restore({"box": box})
    assert "bytes 2097152 to" in assert_set_aside(tmp_path, records, TENSORS)["expected"]


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def link(path: Path) -> None:
    """Replace by a symbolic link to a file with the very same bytes."""
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_of_the_name(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [remove, truncate, empty, lengthen, link, pipe, folder_of_the_name])
def test_a_file_that_is_not_the_one_that_was_written_is_found(
    harm: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    content = save_steps(tmp_path, 1, 2)
    harm(tmp_path / NEW / file)
    assert_set_aside(tmp_path, load_older(tmp_path, content), file)


def test_a_linked_folder_is_no_copy(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    shutil.move(tmp_path / NEW, tmp_path / "elsewhere")
    (tmp_path / NEW).symlink_to(tmp_path / "elsewhere")
    assert_set_aside(tmp_path, load_older(tmp_path, content), NEW)


def test_an_interrupted_commit_leaves_no_copy(tmp_path: Path) -> None:
    """All files are written but the folder still has its temporary name."""
    content = save_steps(tmp_path, 1, 2)
    (tmp_path / NEW).rename(tmp_path / f".tmp-{NEW}-0123abcd")
    assert kinds(load_older(tmp_path, content)) == ["Loaded"]
    assert [path.name for path in tmp_path.iterdir()] == [OLD]


def test_what_dead_attempts_left_is_swept(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1)
    for name in (f".tmp-{NEW}-0123abcd", f".trash-{NEW}-0123abcd"):
        shutil.copytree(tmp_path / OLD, tmp_path / name)
    (tmp_path / ".tmp-link").symlink_to(tmp_path / OLD)
    (tmp_path / "notes").mkdir()
    records = load_older(tmp_path, content)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-link", "notes", OLD]
    assert isinstance(records[-1], Note)
    assert ".tmp-link" in records[-1].reason


def test_files_that_the_manifest_does_not_list_are_ignored(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / OLD / "notes.txt").write_text("x")
    (tmp_path / OLD / "rank-00001-of-00001.safetensors").write_text("x")
    job = Job(1)
    assert checkpointer(tmp_path).restore(job.state) is not None


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and commit it anew, as someone would who knows how."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    content = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(content)
    (folder / COMMIT).write_bytes(commit_line(FORMAT_VERSION, file_digest(content)))


@pytest.mark.parametrize("name", [f"../{OLD}/{TENSORS}", "/etc/passwd", ".."])
def test_a_manifest_cannot_name_a_file_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    rewrite(tmp_path / NEW, lambda manifest: manifest["files"][0].update(name=name))
    assert_set_aside(tmp_path, load_older(tmp_path, content), MANIFEST)


def test_a_copy_under_another_copys_name_is_found(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1)
    shutil.copytree(tmp_path / OLD, tmp_path / NEW)
    assert_set_aside(tmp_path, load_older(tmp_path, content), MANIFEST)


def test_files_of_two_sound_copies_do_not_mix(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    for file in (TENSORS, DOCUMENT):
        shutil.copy(tmp_path / OLD / file, tmp_path / NEW / file)
    load_older(tmp_path, content)


def newer_commit(folder: Path) -> None:
    digest = (folder / COMMIT).read_text().split()[3]
    (folder / COMMIT).write_bytes(commit_line(FORMAT_VERSION + 2, digest))


def newer_manifest(folder: Path) -> None:
    rewrite(folder, lambda manifest: manifest.update(format=FORMAT_VERSION + 2))


@pytest.mark.parametrize("age", [newer_commit, newer_manifest])
def test_a_newer_format_is_refused_and_stays_where_it_is(age: Callable[[Path], None], tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    age(tmp_path / NEW)
    with pytest.raises(
        CheckpointMismatch, match=rf"{NEW}.*format {FORMAT_VERSION + 2}.*reads format {FORMAT_VERSION}"
    ):
        checkpointer(tmp_path).restore(Job(0).state)
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLD, NEW]


def test_when_no_copy_is_left_each_is_listed_and_nothing_starts_anew(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / OLD / TENSORS, 10_000)
    (tmp_path / NEW / COMMIT).unlink()
    job = Job(5)
    before = job.content()
    expected = rf"none of 2 checkpoint\(s\)(?s:.*){NEW}: rank 0: COMMIT(?s:.*){OLD}: rank 0: {TENSORS}"
    with pytest.raises(NoUsableCheckpoint, match=expected):
        checkpointer(tmp_path).restore(job.state)
    assert job.content() == before
    with pytest.raises(NoUsableCheckpoint, match=rf"quarantine/{OLD}: rank 0: {TENSORS}"):
        checkpointer(tmp_path).restore(job.state)


def test_a_copy_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, run_id="run-b")
    with pytest.raises(CheckpointMismatch, match=f"{OLD}: written by run 'run-b', this is run 'run-a'"):
        checkpointer(tmp_path).restore(Job(0).state)


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
    with tempfile.TemporaryDirectory() as name:
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
    assert f"{NEW} is passed over: rank 0: FileNotFoundError" in records[0].reason  # type: ignore[attr-defined]


def test_a_copy_that_changes_after_the_ranks_compared_it_is_not_believed(tmp_path: Path) -> None:
    """Its files agree among themselves, but they are not those that all ranks saw."""
    content = save_steps(tmp_path, 1, 2)
    job, records = Job(9), list[Record]()
    meddler = Meddler(lambda: rewrite(tmp_path / NEW, lambda manifest: manifest.update(created=1.0)))
    assert checkpointer(tmp_path, exchange=meddler, records=records).restore(job.state) is not None
    assert job.content() == content[1]
    assert "as all ranks saw it" in assert_set_aside(tmp_path, records, MANIFEST)["expected"]


def test_a_second_copy_of_a_name_goes_to_quarantine_beside_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        content = save_steps(tmp_path, 1, 2)
        (tmp_path / NEW / DOCUMENT).unlink()
        load_older(tmp_path, content)
    names = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert len(names) == 4
    assert names[0] == NEW
    assert names[2].startswith(f"{NEW}~")


@needs_root
def test_a_read_only_folder_is_loaded_from_and_loses_saves(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1, 2)
    flip(tmp_path / NEW / TENSORS, 4000)
    (tmp_path / f".tmp-{NEW}-0123abcd").mkdir()
    with mounted(tmp_path, "--bind", str(tmp_path)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path)], check=True)
        records = load_older(tmp_path, content)
        assert kinds(records) == ["Note", "Loaded", "Note"]
        assert "could not be moved away" in records[0].reason  # type: ignore[attr-defined]
        assert ".tmp-" in records[2].reason  # type: ignore[attr-defined]
        assert not checkpointer(tmp_path).save(3, Job(0).state, "a test")
    assert (tmp_path / NEW).is_dir()
