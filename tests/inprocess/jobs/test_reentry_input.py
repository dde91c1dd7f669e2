"""Objects created outside of a resilient function are refused; threads that it leaves behind are logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import Run, running

WARNING = "left after the function was interrupted"


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


def test_a_model_that_was_trained_outside_is_not_begun_with_once_more(
    tmp_path: Path, faultless: set[str]
) -> None:
    """New processes build it anew."""
    folder = tmp_path / "job"
    with running(reusing(folder, 1, "model")) as run:
        assert run.finish() == 0, run.console()
    faults = [one["signature"] for one in run.records("fault_seen")]
    assert faults[0] == "RuntimeError: boom 1"
    assert set(faults[1:]) == {faults[1]}
    assert faults[1].startswith("ObjectReused: session.restore: model.module.weight was created outside")
    assert [one["action"] for one in run.records("action_taken")][-2:] == ["restart-in-job", "stop"]
    assert weights(folder) == faultless


def test_a_model_that_is_built_inside_begins_anew_without_a_word(tmp_path: Path, faultless: set[str]) -> None:
    folder = tmp_path / "job"
    with running(reusing(folder, 1)) as run:
        assert run.finish() == 0, run.console()
    assert [one["action"] for one in run.records("action_taken")] == ["restart-in-process", "stop"]
    assert weights(folder) == faultless
    assert WARNING not in logs(run, 1)


def test_a_process_group_outside_is_refused_at_the_entry(tmp_path: Path) -> None:
    with running(reusing(tmp_path / "job", 0, "group")) as run:
        assert run.finish() == 93, run.console()
    (fault,) = run.records("fault_seen")
    assert fault["signature"].startswith("UsageError: outlast.resilient: found a process group")


def test_what_each_restart_leaves_behind_is_named(tmp_path: Path) -> None:
    with running(reusing(tmp_path / "job", 2, "threads")) as run:
        assert run.finish() == 0, run.console()
    first, second = (logs(run, generation) for generation in (1, 2))
    assert WARNING not in first
    assert f"process child, thread left behind {WARNING}" in second
    assert f"process child, thread left behind {WARNING}" in run.console()
