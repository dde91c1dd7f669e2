"""What ranks import: put together over ranks, kept for the next launch, and refused where it does not fit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.launcher.workers.learned import Learned, keep, kept, listing


def listed(*names: tuple[str, int], changes: tuple[dict[str, str | None], ...] = ({},)) -> dict[str, Any]:
    return {"names": list(names), "changes": list(changes), "places": {}}


def test_only_modules_that_all_ranks_import_after_the_same_changes_count() -> None:
    learned = Learned()
    first = listed(("a", 0), ("b", 1), ("c", 1), changes=({}, {"X": "1"}))
    second = listed(("c", 1), ("b", 0), ("a", 0), ("d", 0), changes=({}, {"X": "1"}))
    assert learned.add([first, second])
    assert [(name, learned.changes[change]) for name, change in learned.wanted()] == [
        ("a", {}),
        ("c", {"X": "1"}),
    ]
    assert not learned.add([first, second]), "nothing is new"
    learned.leave_out_package("a", "why")
    assert [name for name, _ in learned.wanted()] == ["c"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"names": [["a", 1]], "changes": [{}], "places": {}}', '{"names": 1, "changes": 2}'],
)
def test_a_listing_that_is_none_counts_as_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "imports-1-0.json"
    path.write_text(text)
    assert listing(path) is None
    assert not path.exists()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file that a launch has kept."""
    module = tmp_path / "a.py"
    module.write_text("")
    status = module.stat()
    learned = Learned(
        {"a": 0, "a.b": 0, "c": 1, "d": 0},
        [{}, {"TOKEN": "secret"}],
        {"a": (str(module), status.st_size, status.st_mtime_ns)},
    )
    path = tmp_path / "imports.json"
    keep(path, learned, "train.py", ["RANK"])
    return path


def test_what_was_learned_is_kept_without_values_of_variables(file: Path) -> None:
    learned, own, why = kept(file, "train.py")
    assert ([name for name, _ in learned.wanted()], own, why) == (["a", "a.b"], ["RANK"], "")
    assert "secret" not in file.read_text()


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **fields})) and None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.chmod(0o620), "620"),
        (lambda path: os.link(path, path.with_name("other")), " 2 "),
        (lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"), ""),
        (lambda path: path.with_name("a.py").write_text("more"), " a "),
        (lambda path: path.with_name("a.py").unlink(), " a "),
        (lambda path: path.write_text("{"), ""),
        (lambda path: os.truncate(path, 1 << 30), str(1 << 30)),
        (changed(format=2), " 2"),
        (changed(python=["/other/python", sys.version]), "/other/python"),
        (changed(script="other.py"), "other.py"),
        (changed(names=7), ""),
    ],
)
def test_a_file_that_does_not_fit_is_ignored_with_a_line(
    file: Path, damage: Callable[[Path], None], named: str
) -> None:
    damage(file)
    learned, own, line = kept(file, "train.py")
    assert (learned.wanted(), list(own)) == ([], [])
    assert line.startswith(str(file))
    assert named in line
