"""A run that has saved and finds none of its copies does not start anew by itself: real launchers."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.launching import Run, running
from tests.support.saved_steps import made, name_of, records, restored


def counting(tmp_path: Path, *faults: str) -> Run:
    config = tmp_path / "outlast.toml"
    config.write_text("[checkpoints]\nasync_save = false\n" if faults else "")
    return Run(
        tmp_path / "run",
        "counting.py",
        *(str(tmp_path / "trace"), "60", "20", *faults),
        options=("--nproc-per-node", "2", "--config", str(config)),
    )


def launched(run: Run) -> int:
    run.output.unlink(missing_ok=True)
    with running(run):
        return run.finish()


def test_a_run_whose_copies_are_all_gone_is_refused_until_they_are_back(tmp_path: Path) -> None:
    run = counting(tmp_path)
    assert launched(run) == 0, run.console()
    copies, aside = run.folder / "checkpoints", tmp_path / "aside"
    kept = sorted(path.name for path in copies.iterdir())
    shutil.copytree(copies, aside)
    shutil.rmtree(copies)
    assert launched(run) == 65, run.console()
    for word in (*kept, str(copies), "--run-dir"):
        assert word in run.console()
    shutil.rmtree(copies, ignore_errors=True)
    shutil.copytree(aside, copies)
    assert launched(run) == 0, run.console()
    assert run.records("loaded")[-1]["step"] == 60
    shutil.rmtree(copies / kept[-1])
    (copies / "quarantine").touch()  # which is no folder
    assert launched(run) == 0, run.console()
    assert run.records("loaded")[-1]["step"] == 40
    assert kept[-1] in run.records("loaded")[-1]["reason"], "the run has saved it"
    assert kept[-1] in run.console()
    shutil.rmtree(copies)
    (run.folder / "job_state.json").unlink()
    assert launched(run) == 0, run.console()
    assert run.records("loaded")[-1]["generation"] < run.records("saved")[-1]["generation"], "a new start"


def test_a_run_that_was_ended_before_its_first_copy_starts_anew(tmp_path: Path) -> None:
    run = counting(tmp_path, "raise@1@10@1")
    assert launched(run) == 0, run.console()
    assert run.records("loaded") == []


def test_copies_that_come_back_do_not_crowd_out_those_of_the_path_that_the_run_took(tmp_path: Path) -> None:
    run, aside = tmp_path / "run", tmp_path / "aside"
    aside.mkdir()
    copies, late = run / "checkpoints", [name_of(5), name_of(6)]
    made(run, 1, 5, 6)
    for name in late:
        (copies / name).rename(aside / name)
    made(run, 2, 3)
    for name in late:
        (aside / name).rename(copies / name)
    content = made(run, 4, keep_last_n=2)
    assert [one["checkpoint"] for one in records(run, "loaded")] == [name_of(1), name_of(3, 1)]
    assert {path.name for path in copies.iterdir()} == {name_of(3, 1), name_of(4, 2)}
    assert restored(run)[run]["content"] == content[4]
