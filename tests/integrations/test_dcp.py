"""Checkpoints of torch.distributed.checkpoint are verified where they are loaded, and never half written."""

from __future__ import annotations

import logging
import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from outlast.errors import NoUsableCheckpoint, UsageError
from outlast.integrations.dcp import (
    OutlastStorageInPlace,
    OutlastStorageReader,
    OutlastStorageWriter,
    newest_whole,
    settle,
)
from tests.support import warm
from tests.support.bounds import bounded_wait

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*assuming the intent:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def state(number: float) -> dict[str, Any]:
    return {"weight": torch.full((64, 64), number), "bias": torch.full((7,), number), "step": int(number)}


def save(folder: Path, number: float) -> Path:
    dcp.save(state(number), storage_writer=OutlastStorageWriter(folder))
    return folder


def load(folder: Path, reader: Any = OutlastStorageReader) -> dict[str, Any]:
    found = state(0)
    dcp.load(found, storage_reader=reader(folder))
    return found


def flip(path: Path, at: int = -40) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def data_of(folder: Path) -> Path:
    (found,) = folder.glob("*.distcp")
    return found


@pytest.mark.parametrize("reader", [OutlastStorageReader, dcp.FileSystemReader])
def test_what_was_saved_is_loaded_by_our_reader_and_by_torchs(tmp_path: Path, reader: Any) -> None:
    found = load(save(tmp_path / "step-1", 3), reader)
    assert found["step"] == 3
    assert all(torch.equal(found[name], state(3)[name]) for name in ("weight", "bias"))


def test_a_second_save_replaces_the_first_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    assert load(save(tmp_path / "last", 2))["step"] == 2
    assert os.listdir(tmp_path) == ["last"]


def files_of(folder: Path) -> dict[str, Path]:
    digests = folder / ".outlast_digests.json"
    return {"digests": digests, "metadata": folder / ".metadata", "slice": data_of(folder)}


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    *((part, lambda path: flip(path, path.stat().st_size // 2)) for part in ("slice", "metadata", "digests")),
    ("digests", lambda path: path.write_text("[" * 100_000)),
    ("slice", lambda path: os.truncate(path, 100)),
]


@pytest.mark.parametrize(("part", "damage"), DAMAGE)
def test_a_damaged_file_is_an_error(
    tmp_path: Path, part: str, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path / "step-1", 3)
    damage(files_of(folder)[part])
    with pytest.raises(CheckpointException) as raised:
        load(folder)
    assert (
        "outlast.integrations.dcp.newest_whole" in f"{raised.value} {caplog.text}"
    )  # torch 2.9 drops the former


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        folder = save(tmp_path / f"step-{number}", number)
        os.utime(folder / ".outlast_digests.json", (number, number))
    dcp.save(state(4), storage_writer=dcp.FileSystemWriter(tmp_path / "unverified"))
    flip(data_of(folder))
    assert newest_whole(tmp_path) == tmp_path / "step-2"
    for one in (tmp_path / "step-1").iterdir():
        os.utime(one, (4e9, 4e9))  # as after a copy, or with a clock that was set back
    assert newest_whole(tmp_path) == tmp_path / "step-2"
    assert newest_whole(tmp_path, lambda one: one.name != "step-2") == tmp_path / "step-1"
    (tmp_path / "step-2" / ".metadata").unlink()
    assert newest_whole(tmp_path) == tmp_path / "step-1"
    data_of(tmp_path / "step-1").unlink()
    assert newest_whole(tmp_path) is None
    assert newest_whole(tmp_path / "nothing") is None


@pytest.mark.parametrize("part", ["digests", "metadata", "slice"])
def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, part: str) -> None:
    save(tmp_path / "step-1", 1)
    folder = save(tmp_path / "step-2", 2)
    path = files_of(folder)[part]
    path.unlink()
    os.mkfifo(path)
    with bounded_wait():
        assert newest_whole(tmp_path) == tmp_path / "step-1"
        with pytest.raises(CheckpointException):
            load(folder)
        if part != "digests":
            files_of(folder)["digests"].unlink()
            with pytest.raises(CheckpointException):
                load(folder)


def test_a_checkpoint_whose_files_are_links_is_whole(tmp_path: Path) -> None:
    folder, blobs = save(tmp_path / "all" / "step-1", 1), tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    assert newest_whole(tmp_path / "all") == folder
    assert load(folder)["step"] == 1


def test_a_checkpoint_without_digests_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(state(4), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    with caplog.at_level(logging.WARNING, "outlast"):
        assert load(tmp_path / "theirs")["step"] == 4
    assert "theirs" in caplog.text


KILLED = """
    import os, signal, sys
    import torch
    import torch.distributed.checkpoint as dcp
    from outlast.integrations.dcp import OutlastStorageWriter

    moment, folder = sys.argv[1:]

    def dies(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    class Dies(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            return dies() if moment == "data" else super().resolve_data(item)

    renamed = []
    rename = os.rename

    def renames(source, target):
        if moment == f"rename {len(renamed)}":
            dies()
        renamed.append(rename(source, target))

    if moment.startswith("rename"):
        os.rename = renames
    state = {"weight": torch.full((64, 64), 2.0), "bias": torch.full((7,), 2.0), "step": 2}
    dcp.save(state, storage_writer=OutlastStorageWriter(folder), planner=Dies())
"""


@pytest.mark.parametrize("moment", ["data", "rename 0", "rename 1", "rename 2"])
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(tmp_path: Path, moment: str) -> None:
    folder = save(tmp_path / "last", 1)
    (tmp_path.parent / "killed.py").write_text(textwrap.dedent(KILLED))
    done = warm.run([tmp_path.parent / "killed.py", moment, folder], 100)
    if moment == "rename 2" and done.returncode == 0:
        pytest.skip(f"DCP of torch {torch.__version__} renames less often")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert load(folder)["step"] == 1
    found = newest_whole(tmp_path)
    assert found is not None
    assert load(found)["step"] == 1
    assert load(save(folder, 3))["step"] == 3
    assert os.listdir(tmp_path) == ["last"]


def test_what_killed_saves_have_left_gets_its_name_or_is_removed(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "step-2.before", "step-3.before"):
        save(tmp_path / name, int(name[5]))
    (tmp_path / "step-4.part").mkdir()
    (tmp_path / "notes").touch()
    settle(tmp_path)
    settle(tmp_path / "nothing")
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-1", "step-2", "step-3"]
    assert load(tmp_path / "step-3")["step"] == 3


def save_in_place(folder: Path, number: float) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "common.pt").write_text(f"step {number}")
    dcp.save(state(number), storage_writer=OutlastStorageInPlace(folder, ["common.pt", "no"]))
    return folder


@pytest.mark.parametrize("damage", [b"step", b"steq 1", None])
def test_a_file_beside_the_slices_is_verified(tmp_path: Path, damage: bytes | None) -> None:
    folder = save_in_place(tmp_path / "iter_1", 1)
    reader = OutlastStorageReader(folder)
    reader.read_metadata()
    reader.verify("common.pt")
    reader.verify("no")
    (folder / "common.pt").unlink() if damage is None else (folder / "common.pt").write_bytes(damage)
    with pytest.raises(NoUsableCheckpoint, match=r"common\.pt"):
        reader.verify("common.pt")
    assert newest_whole(tmp_path) is None


def test_a_save_in_place_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    folder = save_in_place(tmp_path / "iter_1", 1)
    (folder / "__7_0.distcp").write_text("left")
    (folder / "run_config.yaml").write_text("kept")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert load(save_in_place(folder, 2))["step"] == 2
    left = {"__0_0.distcp", ".metadata", ".outlast_digests.json", "common.pt", "run_config.yaml"}
    assert set(os.listdir(folder)) == left
    assert newest_whole(tmp_path) == folder


@pytest.mark.parametrize("name", [".metadata.tmp", ".metadata", "__0_0.distcp", "__0_.outlast_digests.json"])
def test_a_save_in_place_writes_through_no_link(tmp_path: Path, name: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "iter_1"
    victim.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    assert load(save_in_place(folder, 2))["step"] == 2
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("folder", "options", "named"),
    [
        ("step-1", {"sync_files": False}, "sync_files"),
        ("step-1", {"overwrite": False}, "overwrite"),
        ("s3://bucket/step-1", {}, "s3://bucket/step-1"),
    ],
)
def test_what_has_no_effect_is_refused(folder: str, options: dict[str, bool], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        OutlastStorageWriter(folder, **options)
