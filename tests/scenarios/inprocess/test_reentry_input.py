"""Objects created outside of a resilient function are refused; threads that it leaves behind are logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import Run, running
from tests.support.reentering import actions


def reusing(folder: Path, times: int, *words: str) -> Run:
    folder.mkdir()
    options = ("--nproc-per-node", "2")
    return Run(folder / "run", "reusing.py", str(folder), str(times), *words, options=options)


def logs(run: Run, generation: int) -> str:
    folder = run.folder / "logs" / f"gen-{generation:04d}"
    return "".join(path.read_text() for path in folder.glob("rank-*/stderr.log"))


def weights(folder: Path) -> set[str]:
    return {(folder / f"rank-{rank}").read_text() for rank in (0, 1)}


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("reused") / "faultless"
    with running(reusing(folder, 0)) as run:
        assert run.finish() == 0, run.console()
    return weights(folder)


@pytest.mark.long
def test_a_model_that_was_trained_outside_is_not_begun_with_once_more(
    tmp_path: Path, faultless: set[str]
) -> None:
    """New processes build it anew."""
    folder = tmp_path / "job"
    with running(reusing(folder, 1, "model")) as run:
        assert run.finish() == 0, run.console()
    first, *others = [one["signature"] for one in run.records("fault_seen")]
    assert first == "RuntimeError: boom 1"
    assert len(set(others)) == 1
    assert others[0].startswith("ObjectReused:")
    assert "model.module.weight" in others[0]
    assert actions(run)[-2:] == ["restart-in-job", "stop"]
    assert weights(folder) == faultless


def test_a_process_group_outside_is_refused_at_the_entry(tmp_path: Path) -> None:
    with running(reusing(tmp_path / "job", 0, "group")) as run:
        assert run.finish() == 93, run.console()
    (fault,) = run.records("fault_seen")
    assert fault["signature"].startswith("UsageError:")


@pytest.mark.long
def test_a_model_that_is_built_inside_begins_anew_and_what_restarts_leave_behind_is_named(
    tmp_path: Path, faultless: set[str]
) -> None:
    folder = tmp_path / "job"
    with running(reusing(folder, 2, "threads")) as run:
        assert run.finish() == 0, run.console()
    assert actions(run) == ["restart-in-process", "restart-in-process", "stop"]
    assert weights(folder) == faultless
    first, second = (logs(run, generation) for generation in (1, 2))
    assert "left behind" not in first  # the name of a thread
    for log in (second, run.console()):
        assert "process child, thread left behind" in log
