"""The run folder is renamed while the job runs: that is reported, and nothing is made in its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launching import Run, running, until

TRAIN = """
import os, pathlib, signal, sys, time
import outlast, torch
end, hold, held = map(pathlib.Path, sys.argv[1:4])
options = outlast.CheckpointOptions(max_failed_seconds=2.0)
with outlast.start(save_interval=5, checkpoints=options) as session:
    session.restore(state=torch.zeros(1))
    for step in session.steps(int(sys.argv[4])):
        time.sleep(0.02)
        while hold.exists():
            held.touch()
            time.sleep(0.02)
        if end.exists():
            end.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("crash", "code"), [(False, 74), pytest.param(True, 73, marks=pytest.mark.long)])
def test_a_run_folder_that_is_renamed_is_reported_and_not_made_again(
    tmp_path: Path, crash: bool, code: int
) -> None:
    script, moved = tmp_path / "train.py", tmp_path / "moved"
    end, hold, held = tmp_path / "end", tmp_path / "hold", tmp_path / "held"
    script.write_text(TRAIN)
    run = Run(tmp_path / "run", str(script), str(end), str(hold), str(held), "100000")
    with running(run):
        until(lambda: len(list(run.folder.glob("checkpoints/step-*"))) > 1, "two copies on disk")
        hold.touch()
        until(held.exists, "the rank to stand still")
        run.folder.rename(moved)
        # No save is lost yet, and the job has not ended: the folder itself is missed.
        missed = re.compile(rf"{re.escape(str(run.folder))}(?![\w./-])")
        until(lambda: missed.search(run.console()), run.console, 60)
        hold.unlink()
        if crash:
            end.touch()
        assert run.finish() == code, run.console()
    assert not run.folder.exists()
    moved.rename(run.folder)
    step = max(int(one.name[5:14]) for one in run.folder.glob("checkpoints/step-*.g1"))
    run.command[-1] = str(step)
    with running(run):
        assert run.finish() == 0, run.console()
    assert [one["step"] >= step for one in run.records("loaded")] == [True]
