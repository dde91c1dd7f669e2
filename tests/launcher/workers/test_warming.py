"""When a zygote that imports ahead is taken for stuck, and which import is named."""

from __future__ import annotations

import selectors
from pathlib import Path
from types import SimpleNamespace

from outlast.launcher.workers.warming import Warming, _Attempt


def attempt(folder: Path) -> _Attempt:
    return _Attempt(folder / "importing", folder / "imported.json", 0.0, 0.0, 0.0)


def test_an_import_without_progress_is_stuck_and_named(tmp_path: Path) -> None:
    one = attempt(tmp_path)
    one.progress.write_text("transformers\ntransformers.trainer\ndeadlocks")
    assert not one.stuck(2.0, patience=60.0), "it has made progress since the last look"
    assert not one.stuck(61.0, patience=60.0)
    assert one.stuck(63.0, patience=60.0)
    assert one.under_way() == ["transformers", "transformers.trainer", "deadlocks"]


def test_an_import_that_begins_another_one_is_not_stuck(tmp_path: Path) -> None:
    one = attempt(tmp_path)
    for now, name in enumerate(["a", "bc", "def", "ghij"]):
        one.progress.write_text(name)
        assert not one.stuck(100.0 * (now + 1), patience=60.0)


def learned_once(folder: Path) -> Warming:
    """Return one that has learned a module, and whose zygotes cannot be started."""
    nothing = SimpleNamespace(ask=lambda _, default: default)
    script = SimpleNamespace(target="train.py")
    around = SimpleNamespace(
        options=SimpleNamespace(script=script, warm_imports=False),
        folder=SimpleNamespace(own=folder),
        runtime=folder / "gone",
        files=nothing,
    )
    warming = Warming(around, lambda *_: None, selectors.DefaultSelector(), None)  # type: ignore[arg-type, return-value]
    warming._learned.add([{"names": [("some", 0)], "changes": [{}], "places": {}}])
    return warming


def test_a_runtime_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    warming = learned_once(tmp_path)
    assert warming.first_plan() == ""
    warming.again()
    warming.tick(0.0)
    assert len(warming.problems) == 2
