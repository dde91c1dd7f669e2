"""``outlast request`` to real jobs: all ranks save, the job ends, a spare takes the place of a node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agents import agents
from tests.support.launching import Run, running


def request(*words: str | Path) -> None:
    command = [sys.executable, "-m", "outlast", "request", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_job_saves_and_later_ends_when_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    words = (str(tmp_path / "trace"), "100000", "100000")
    run = Run(tmp_path / "run", "agreeing.py", *words, options=("--standalone", "--nproc-per-node", "2"))
    with running(run):
        run.until(lambda: run.records("first_step"))
        assert run.records("saved") == []
        request(tmp_path / "run", "save")
        run.until(lambda: run.records("saved"))
        request(tmp_path / "run", "stop")
        assert run.finish() == 143
    assert run.records("fault_seen") == []
    (*_, last), (ended,) = run.records("saved"), run.records("run_ended")
    assert str(last["step"]) in ended["reason"]
    assert run.console().rstrip().endswith(ended["reason"])


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_node_that_is_to_be_drained(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2", 1, ("agreeing.py", "100000", "100000")) as job:
        job.start("n1", "n2")
        job.until_runs(2)
        job.start("n3")
        job.until_said("n3", "spare")
        request(job.run, "drain", "--node", "n2")
        assert job.until_runs(2, after=1) == 2
        (saved,) = (one["step"] for one in job.records("n1", "saved"))
        (loaded,) = job.until(lambda: job.records("n1", "loaded"), "a checkpoint that is loaded")
        assert loaded["step"] == saved
        actions = [one for name in ("n1", "n2") for one in job.records(name, "action_taken")]
        assert [one["action"] for one in actions] == ["replace-node"]
        ledger = job.run / "ledger"
        entries = "".join(path.read_text() for path in ledger.glob("*")) if ledger.exists() else ""
        assert "failing" not in entries, "a node that is drained has no fault"
