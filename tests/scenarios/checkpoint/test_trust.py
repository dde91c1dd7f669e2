"""Checkpoints that make training go wrong are found out: real launchers, one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, Run, running

ASYNCHRONOUS, SYNCHRONOUS = "true", "false"


def poisoned(tmp_path: Path, *bad: str, saving: str = ASYNCHRONOUS) -> Run:
    config = tmp_path / "outlast.toml"
    every = "non_persistent_save_interval = 1000\n" if saving == ASYNCHRONOUS else ""
    config.write_text(f"[checkpoints]\nasync_save = {saving}\n{every}")
    options = ("--nproc-per-node", "1", "--config", str(config))
    return Run(tmp_path / "run", "poisoned.py", "40", "10", *bad, options=options)


def trust(run: Run) -> list[tuple[str, str]]:
    return [(one["checkpoint"], one["trust"]) for one in run.records("trust_changed")]


def ckpt(run: Run, *arguments: str) -> str:
    command = [sys.executable, "-m", "outlast", "ckpt", arguments[0], str(run.folder), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout


@pytest.mark.parametrize("saving", [ASYNCHRONOUS, pytest.param(SYNCHRONOUS, marks=pytest.mark.long)])
def test_a_checkpoint_after_which_the_loss_is_no_number_is_found_out(tmp_path: Path, saving: str) -> None:
    with running(poisoned(tmp_path, "20@1", saving=saving)) as run:
        assert run.finish() == 0, run.console()
    assert [one["step"] for one in run.records("loaded")] == [20, 10]
    assert [one["fault"] for one in run.records("fault_seen")] == ["error", "non-finite"]
    place = "memory/step-000000020.g1"
    assert run.records("loaded")[0]["places"] == [place]
    assert (place, "suspect") in trust(run)
    assert ("local/step-000000010.g1", "proven") in trust(run)
    assert place in run.records("action_taken")[1]["reason"]


def test_when_every_checkpoint_is_bad_the_job_ends_and_a_person_can_let_them_be_loaded_again(
    tmp_path: Path,
) -> None:
    bad, good = "step-000000020.g1", "step-000000010.g1"
    with running(poisoned(tmp_path, "10@0", "20@0", saving=SYNCHRONOUS)) as run:
        assert run.finish() == 93, run.console()
    assert [one["step"] for one in run.records("loaded")] == [20, 10, 20]
    marks = [(place.rpartition("/")[2], mark) for place, mark in trust(run)]
    assert marks == [(bad, "suspect"), (good, "suspect"), (bad, "quarantined")]
    with running(poisoned(tmp_path, saving=SYNCHRONOUS)) as again:
        assert again.finish() == 0, again.console()
    (aside,) = run.records("quarantined")
    assert aside["checkpoint"] == bad
    assert run.records("loaded")[-1]["step"] == 10
    assert (f"local/{good}", "proven") in trust(run)
    assert f"quarantine/{bad}" in ckpt(run, "ls")
    assert bad in ckpt(run, "release", bad)
    listed = {one["name"]: one["trust"] for one in map(json.loads, ckpt(run, "ls", "--json").splitlines())}
    assert listed[good] == "proven"
    assert listed[bad] in (None, "committed"), "nothing is held against it any more"
