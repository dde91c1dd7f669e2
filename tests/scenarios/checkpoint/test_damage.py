"""Whatever happens to the files: it is found, named, set aside, and an older whole copy is loaded."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.saved_steps import FILES, TENSORS, content, flip, made, name_of, records, restored

OLD, NEW = name_of(1), name_of(2)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def link(path: Path) -> None:
    """Replace by a symbolic link to the very same bytes."""
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_of_the_name(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, Callable[[Path], object]] = {
    "removed": os.unlink,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lengthen,
    "link": link,
    "pipe": pipe,
    "folder": folder_of_the_name,
}


def older(copy: Path) -> None:
    """Put the older copy under the name of the newer one."""
    shutil.rmtree(copy)
    shutil.copytree(copy.parent / OLD, copy)


def bits(file: str, size: int) -> list[int]:
    """Return which bits of a file to flip: first and last, those around its header, and some at random."""
    dice = random.Random(file)
    found = [0, 7 * 8, 8 * 8, size * 8 - 1, *(dice.randrange(size * 8) for _ in range(8))]
    return sorted({bit for bit in found if bit < size * 8})


class Runs:
    """Copies of one run, each harmed in its own way, which one process has restored."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.whole = root / "whole"
        self.content = made(self.whole, 1, 2)
        self.files: dict[str, str] = {}  # of a harm that costs the newest copy: the file that is to be named
        self.others: list[str] = []

    def harm(self, name: str, file: str, deed: Callable[[Path], object]) -> None:
        """Copy the run, and do something to its newest copy."""
        deed(self.copied(name) / NEW)
        self.files[name] = file

    def copied(self, name: str) -> Path:
        """Copy the run; return its folder of copies, to which something is to be done."""
        self.others.append(name)
        return Path(shutil.copytree(self.whole, self.root / name)) / "checkpoints"

    def restore(self) -> None:
        self.found = restored(*(self.root / name for name in self.others))

    def loaded(self, name: str, step: int) -> bool:
        """Whether a step was loaded, in every bit."""
        found = self.found[self.root / name]
        return (found.get("restored"), found.get("content")) == (step, self.content[step])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("damaged"))
    for file in FILES:
        for name, deed in HARMS.items():
            runs.harm(f"{file}-{name}", file, lambda copy, file=file, deed=deed: deed(copy / file))
        size = (runs.whole / "checkpoints" / NEW / file).stat().st_size
        for bit in bits(file, size):
            runs.harm(f"{file}-bit-{bit}", file, lambda copy, file=file, bit=bit: flip(copy / file, bit))
    runs.harm("linked-folder", NEW, link)
    runs.harm("older-copy", "MANIFEST.json", older)
    runs.harm("older-files", TENSORS, lambda copy: shutil.copy(copy.parent / OLD / TENSORS, copy / TENSORS))

    copies = runs.copied("interrupted")
    (copies / NEW).rename(copies / f".tmp-{NEW}-0123abcd")
    shutil.copytree(copies / OLD, copies / f".trash-{OLD}-0123abcd")
    (copies / ".tmp-link").symlink_to(copies / OLD)
    (copies / "notes").mkdir()

    copies = runs.copied("unlisted")
    (copies / NEW / "notes.txt").write_text("x")
    (copies / NEW / "rank-00001-of-00001.safetensors").write_text("x")

    copies = runs.copied("none-left")
    flip(copies / OLD / TENSORS)
    (copies / NEW / "COMMIT").unlink()

    made(runs.root / "other", 3)
    shutil.copytree(runs.root / "other" / "checkpoints" / name_of(3), runs.copied("foreign") / name_of(3))
    runs.restore()
    return runs


def set_aside(run: Path) -> dict[str, Any]:
    """Check that the newer copy is in quarantine, with its reason; return that."""
    assert not (run / "checkpoints" / NEW).exists()
    assert os.path.lexists(run / "checkpoints" / "quarantine" / NEW)
    reason = json.loads((run / "checkpoints" / "quarantine" / f"{NEW}.reason.json").read_text())
    (record,) = records(run, "quarantined")
    assert (record["checkpoint"], record["step"], record["reason"]) == (NEW, 2, reason["reason"])
    (loaded,) = records(run, "loaded")
    assert (loaded["checkpoint"], loaded["step"]) == (OLD, 1)
    assert NEW in loaded["reason"]
    return reason


def test_every_harm_of_every_file_is_named_and_the_older_copy_is_loaded(runs: Runs) -> None:
    assert [name for name in runs.files if not runs.loaded(name, 1)] == []
    found = {name: set_aside(runs.root / name) for name in runs.files}
    assert {name: one["file"] for name, one in found.items()} == runs.files
    assert {(one["name"], one["rank"]) for one in found.values()} == {(NEW, 0)}
    assert all(one["expected"] != one["found"] for one in found.values())
    assert len(found) > 70


def test_an_interrupted_commit_leaves_no_copy_and_is_swept(runs: Runs) -> None:
    assert runs.loaded("interrupted", 1)
    run = runs.root / "interrupted"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [".tmp-link", "notes", OLD]
    assert records(run, "quarantined") == []


def test_files_that_the_manifest_does_not_list_are_ignored(runs: Runs) -> None:
    assert runs.loaded("unlisted", 2)


def test_when_no_copy_is_left_each_is_named_and_nothing_starts_anew(runs: Runs) -> None:
    run = runs.root / "none-left"
    for found in (runs.found[run], restored(run)[run]):  # in their places, and in quarantine
        assert (found["error"], found["code"], found["unchanged"]) == ("NoUsableCheckpoint", 65, True)
        assert all(word in found["text"] for word in (NEW, "COMMIT", OLD, TENSORS))
    assert records(run, "loaded") == []


def test_a_copy_of_another_run_is_refused_by_its_name_and_stays(runs: Runs) -> None:
    run, other = runs.root / "foreign", runs.root / "other"
    found = runs.found[run]
    assert (found["error"], found["code"], found["unchanged"]) == ("CheckpointMismatch", 65, True)
    ids = [json.loads((one / "run.json").read_text())["run_id"] for one in (run, other)]
    assert all(word in found["text"] for word in (name_of(3), *ids))
    expected = content(runs.whole / "checkpoints") | content(other / "checkpoints")
    assert content(run / "checkpoints") == expected


def test_a_second_damaged_copy_of_a_name_goes_to_quarantine_beside_the_first(runs: Runs) -> None:
    run = runs.root / f"{TENSORS}-removed"
    shutil.copytree(run / "checkpoints" / OLD, run / "checkpoints" / NEW)
    assert restored(run)[run]["content"] == runs.content[1]
    names = sorted(path.name for path in (run / "checkpoints" / "quarantine").iterdir())
    assert len(names) == 4
    assert names[0] == NEW
    assert names[2].startswith(f"{NEW}~")
