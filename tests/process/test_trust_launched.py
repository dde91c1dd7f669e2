"""Checkpoints that make training go wrong are found out: real launchers, one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.launching import Run, running

ASYNCHRONOUS, SYNCHRONOUS = "true", "false"


def poisoned(tmp_path: Path, *bad: str, saving: str = ASYNCHRONOUS) -> Run:
    config = tmp_path / "outlast.toml"
    every = "memory_interval = 1000\n" if saving == ASYNCHRONOUS else ""
    config.write_text(f"[checkpoints]\nasync_save = {saving}\n{every}")
    options = ("--nproc-per-node", "1", "--config", str(config))
    return Run(tmp_path / "run", "poisoned.py", "40", "10", *bad, options=options)


def trust(run: Run) -> list[tuple[str, str]]:
    return [(one["checkpoint"], one["trust"]) for one in run.records("trust_changed")]


def ckpt(run: Run, *arguments: str) -> str:
    command = [sys.executable, "-m", "outlast", "ckpt", arguments[0], str(run.folder), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("saving", [ASYNCHRONOUS, SYNCHRONOUS])
def test_a_checkpoint_after_which_the_loss_is_no_number_is_found_out(tmp_path: Path, saving: str) -> None:
    with running(poisoned(tmp_path, "20@1", saving=saving)) as run:
        assert run.finish() == 0, run.console()
    assert [one["step"] for one in run.records("loaded")] == [20, 10]
    assert [one["fault"] for one in run.records("fault_seen")] == ["error", "non-finite"]
    place = f"{'memory' if saving == ASYNCHRONOUS else 'local'}/step-000000020.g1"
    assert run.records("loaded")[0]["places"] == [place]
    assert (place, "suspect") in trust(run)
    assert ("local/step-000000010.g1", "proven") in trust(run)
    assert f"{place} is suspect" in run.records("action_taken")[1]["reason"]
