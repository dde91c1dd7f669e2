"""A torch that was built without torch.distributed trains one rank, with a launcher and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, SCRIPTS, Run, running


@pytest.fixture(autouse=True)
def a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(SCRIPTS / "without_distributed"), before)))
    )


@pytest.mark.long
def test_one_rank_trains_and_is_started_again(tmp_path: Path) -> None:
    alone, launched = tmp_path / "alone", tmp_path / "launched"
    script = [sys.executable, str(SCRIPTS / "alone.py"), str(tmp_path / "plain"), str(alone)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    options = ("--nproc-per-node", "1")
    with running(Run(tmp_path / "run", "alone.py", "-", str(launched), options=options, cold=True)) as run:
        assert run.finish() == 0, run.console()
    assert all(one["start"].startswith("cold:") for one in run.records("generation_started")[1:])
    assert [one["step"] for one in run.records("loaded")] == [4]
    assert launched.read_text() == alone.read_text()


def test_several_ranks_are_refused_in_one_line(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2")
    with running(
        Run(tmp_path / "run", "alone.py", "-", str(tmp_path / "out"), options=options, cold=True)
    ) as run:
        assert run.finish() == 93, run.console()
    (fault,) = run.records("fault_seen")
    assert "torch.distributed" in fault["signature"]
