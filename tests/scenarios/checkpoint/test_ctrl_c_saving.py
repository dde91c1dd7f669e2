"""Ctrl-C inside a save: the job ends with 130, and the next start goes on from a whole copy."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.launching import Run, running, until
from tests.support.ranks import copies


def counting(tmp_path: Path, steps: int, *, synchronous: bool) -> Run:
    config = tmp_path / "outlast.toml"
    config.write_text(f"[checkpoints]\nasync_save = {'false' if synchronous else 'true'}\n")
    options = ("--nproc-per-node", "2", "--config", str(config))
    return Run(tmp_path / "run", "counting.py", str(tmp_path / "trace"), str(steps), "1", options=options)


def being_written(run: Run) -> list[Path]:
    """Return the copies that are not committed yet."""
    folder = run.folder / "checkpoints"
    found = folder.iterdir() if folder.exists() else ()
    return [one for one in found if not one.name.startswith("step-") and one.is_dir()]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("synchronous", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ctrl_c_inside_a_save_loses_no_whole_copy(tmp_path: Path, synchronous: bool) -> None:
    with running(counting(tmp_path, 100_000, synchronous=synchronous)) as run:
        until(lambda: len(run.records("saved")) > 3, lambda: f"some saves:\n{run.console()}")
        until(lambda: being_written(run), "a copy that is being written")
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT, run.console()
    newest = copies(run.folder)[-1]
    trained = min(
        json.loads(path.read_text().splitlines()[-1])["step"] for path in (tmp_path / "trace").glob("rank-*")
    )
    assert trained - 2 <= newest <= trained + 2
    with running(counting(tmp_path, newest + 20, synchronous=synchronous)) as again:
        assert again.finish() == 0, again.console()
    loaded = again.records("loaded")[-1]
    assert loaded["step"] == newest
    assert not again.records("quarantined")
    assert copies(again.folder)[-1] == newest + 20
