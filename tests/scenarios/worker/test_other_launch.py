"""A launch that goes on from what another one has saved says how it differs from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import warm
from tests.support.launching import DEADLINE, Run, running

TRAIN = """
import os
import outlast, torch
with outlast.start(os.environ.get("FOLDER"), save_interval=5) as session:
    session.restore(state=torch.zeros(1))
    for step in session.steps(5):
        pass
"""


def script(folder: Path, name: str) -> str:
    (folder / name).write_text(TRAIN)
    return str(folder / name)


def test_arguments_and_scripts_that_differ_are_named_before_the_load(tmp_path: Path) -> None:
    one, other, folder = script(tmp_path, "one.py"), script(tmp_path, "other.py"), str(tmp_path / "run")

    def named(text: str) -> set[str]:
        return {word for word in (one, other, "--lr 0.1", "--lr 0.2", "--lr 0.3", "--steps") if word in text}

    def warned(*words: str) -> set[str]:
        done = warm.run(words, timeout=DEADLINE, environment={"FOLDER": folder})
        assert done.returncode == 0, done.stderr
        return named(done.stderr)

    assert warned(one, "--lr", "0.1", "--steps", "5") == set()
    assert warned(one, "--steps", "5", "--lr", "0.1") == set()
    assert warned(one, "--lr", "0.2", "--steps", "5") == {"--lr 0.1", "--lr 0.2"}
    assert warned(other, "--lr", "0.2", "--steps", "5") >= {one, other}

    def launched(*words: str) -> set[str]:
        run = Run(tmp_path / "run", *words)
        with running(run):
            assert run.finish() == 0, run.console()
        text = run.console()
        run.output.unlink()
        return named(text)

    # What is saved here is still of the first.
    assert launched(other, "--lr", "0.2", "--steps", "5") >= {one, other}
    assert launched(one, "--lr", "0.1", "--steps", "5") == set()
    assert launched(one, "--lr", "0.3", "--steps", "5") == {"--lr 0.3", "--lr 0.1"}


def test_code_on_the_command_line_has_a_folder_of_its_own_and_standard_input_none(tmp_path: Path) -> None:
    def python(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, input=text, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False
        )

    for code in (TRAIN, f"{TRAIN}#", TRAIN):
        done = python("-c", code)
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "outlast-runs").iterdir())) == 2
    done = python("-", text=TRAIN)
    assert done.returncode != 0
    assert len(list((tmp_path / "outlast-runs").iterdir())) == 2
