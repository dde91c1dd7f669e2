"""``outlast replay``: real runs, a bit that flips once, and what is said of it afterwards."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import SCRIPTS, Run

SCRIPT = str(SCRIPTS / "replayed.py")
LIMIT = 360.0
pytestmark = pytest.mark.timeout(600)


def train(folder: Path, *words: str, flips: tuple[int, ...] = (), config: str = "") -> tuple[str, ...]:
    """Run 20 steps on two ranks, saving every fourth; on some a bit flips. Return the words."""
    for rank in flips:
        (folder / f"flip-{rank}").touch()
    (folder / "config.toml").write_text(config)
    options = ("--nproc-per-node", "2", "--config", str(folder / "config.toml"))
    script = ("20", "4", f"{folder / 'flip'}@9", *words)
    run = Run(folder / "run", "replayed.py", *script, options=options)
    assert run.start().finish() == 0, run.console()
    assert not list(folder.glob("flip-*")), "the bit flips once"
    return script


def replay(folder: Path, script: tuple[str, ...], *options: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "outlast",
        "replay",
        str(folder / "run"),
        *options,
        "--",
        SCRIPT,
        *script,
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    return found.returncode, found.stdout + found.stderr


def fingerprint(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_first_wrong_step_is_bracketed_by_copies(tmp_path: Path) -> None:
    script = train(tmp_path, flips=(1,))
    before = fingerprint(tmp_path / "run")
    code, said = replay(tmp_path, script)
    assert code == 1, said
    assert re.search(r"\b8\D+12\b", said), said
    assert re.search(r"rank 1\b.*model\.weight", said), said
    assert fingerprint(tmp_path / "run") == before, "the run is only read"


@pytest.mark.long
def test_recorded_digests_bracket_it_closer(tmp_path: Path) -> None:
    script = train(tmp_path, flips=(0, 1), config="[tripwire]\ntripwire_interval = 2\n")
    code, said = replay(tmp_path, script, "--from", "4", "--to", "16")
    assert code == 1, said
    assert re.search(r"\b8\D+10\b", said), "all ranks hold the same wrong bit"


@pytest.mark.long
def test_a_sound_run_is_equal(tmp_path: Path) -> None:
    script = train(tmp_path, config="[tripwire]\ntripwire_interval = 3\ntripwire_optimizer = true\n")
    code, said = replay(tmp_path, script, "--from", "8", "--scratch", str(tmp_path / "scratch"))
    assert code == 0, said
    assert "20" in said
    assert (tmp_path / "scratch").is_dir()


@pytest.mark.long
@pytest.mark.leaves("outlast-replay-")
def test_of_a_script_that_does_not_compute_the_same_twice_nothing_is_said(tmp_path: Path) -> None:
    script = train(tmp_path, "random")
    code, said = replay(tmp_path, script, "--to", "8")
    assert code == 2, said
    assert "8" in said


@pytest.mark.long
@pytest.mark.leaves("outlast-replay-")
def test_a_replay_that_compares_nothing_names_the_arguments_that_the_run_had(tmp_path: Path) -> None:
    script = train(tmp_path)
    code, said = replay(tmp_path, ())
    assert code == 2, said
    assert shlex.join(script) in said


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "run")
    code, said = replay(tmp_path, ())
    assert code == 2
    assert "run.json" in said
