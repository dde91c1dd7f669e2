"""What is saved comes back in every bit and trains on as if nothing had been; what does not fit, does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT
from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS, Run, running

SCRIPT = SCRIPTS / "states.py"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}


def assert_equal(folder: Path) -> None:
    """Compare what was held where it was saved and where it was loaded, there and later."""
    saved, loaded = (json.loads((folder / name).read_text()) for name in ("save", "load"))
    assert (saved.pop("restored"), loaded.pop("restored")) == (0, 3)
    for when, kinds in saved.items():
        assert len(kinds) > 20
        for kind, held in kinds.items():
            assert loaded[when][kind] == held, (when, kind)


@pytest.mark.parametrize("how", ["direct", "eager", "lazy"])
def test_every_kind_of_state_comes_back_from_disk_and_trains_on(tmp_path: Path, how: str) -> None:
    for deed in ("save", "load"):
        done = warm.run([SCRIPT, tmp_path / "run", deed, how, tmp_path], DEADLINE, ENVIRONMENT)
        assert done.returncode == 0, done.stderr
    assert_equal(tmp_path)


@pytest.mark.parametrize("how", ["eager", pytest.param("lazy", marks=pytest.mark.long)])
def test_every_kind_of_state_comes_back_from_memory(tmp_path: Path, how: str) -> None:
    with running(Run(tmp_path / "run", str(SCRIPT), "-", "die", how, str(tmp_path)), **ENVIRONMENT) as run:
        assert run.finish() == 0, run.console()
    (loaded,) = run.records("loaded")
    assert [place.split("/")[0] for place in loaded["places"]] == ["memory"]
    assert_equal(tmp_path)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    words = [SCRIPTS / "refused_states.py", tmp_path_factory.mktemp("refused")]
    done = warm.run(words, DEADLINE, ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_cannot_be_kept_is_refused_by_its_place_before_anything_is_written(
    refused: list[dict[str, Any]],
) -> None:
    cases = [one for one in refused if "left" in one]
    assert len(cases) > 20
    for one in cases:
        assert (one["error"], one["left"]) == ("UsageError", []), one
        assert [word for word in one["words"] if word not in one["text"]] == [], one


def test_what_does_not_fit_is_refused_by_what_differs_and_nothing_is_touched(
    refused: list[dict[str, Any]],
) -> None:
    cases = [one for one in refused if "kept" in one]
    assert len(cases) > 20
    for one in cases:
        assert (one["error"], one["code"], one["kept"]) == ("CheckpointMismatch", 65, True), one
        assert [word for word in one["words"] if word not in one["text"]] == [], one
