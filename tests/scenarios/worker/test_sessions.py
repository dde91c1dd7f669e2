"""Sessions that save nothing, have nothing left to do, or follow each other in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS, Run, running


def test_a_run_folder_is_free_again_when_its_session_has_ended(tmp_path: Path) -> None:
    done = warm.run([SCRIPTS / "sessions.py", tmp_path / "run"], timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["began at 0", "began at 4"]
    assert str(tmp_path / "run") in done.stdout.splitlines()[2]


def test_a_child_of_a_dead_rank_holds_neither_run_folder_nor_writer(tmp_path: Path) -> None:
    """The next start is not refused while it lives, and goes on from what the writer brought to disk."""
    child, output = tmp_path / "child", tmp_path / "output"
    command = [sys.executable, SCRIPTS / "forked.py", tmp_path / "run", child]
    try:
        for expected in (-signal.SIGKILL, 0):
            with open(output, "wb") as file:  # a pipe would stay open as long as the child lives
                done = subprocess.run(command, stdout=file, stderr=file, timeout=DEADLINE, check=False)
            assert done.returncode == expected, output.read_text()
            os.kill(int(child.read_text()), 0)  # it lives
        assert int(output.read_text().split()[1]) > 0
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


UNRESTORED = """
import os, signal
import outlast
for _ in range(2):
    with outlast.start(save_interval=5) as session:
        for step in session.steps(12):
            if step == 8 and (os.environ["OUTLAST_GENERATION"], os.environ["RANK"]) == ("1", "0"):
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_steps_without_a_restore_are_warned_of_once(tmp_path: Path) -> None:
    """They are counted as those of a script without a session."""
    script = tmp_path / "unrestored.py"
    script.write_text(UNRESTORED)
    with running(Run(tmp_path / "run", str(script), options=("--nproc-per-node", "2"))) as run:
        assert run.finish() == 0, run.console()
    warnings = [line for line in run.console().splitlines() if "session.restore" in line]
    assert len(warnings) == 2, run.console()  # rank 0 of each generation
    assert {one["source"] for one in run.records("first_step")} == {"counted"}
    command = [sys.executable, "-m", "outlast", "report", "--json", str(run.folder)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    assert json.loads(text)["steps_unknown"]


COMPLETE = """
import sys
import outlast, torch
with outlast.start(save_interval=5) as session:
    session.restore(state=torch.zeros(1))
    for total in map(int, sys.argv[1:]):
        for step in session.steps(total):
            pass
"""


def test_a_run_that_is_complete_says_so(tmp_path: Path) -> None:
    """A loop in parts is complete when all of its parts are."""
    script = tmp_path / "complete.py"
    script.write_text(COMPLETE)
    said = []
    for arguments in (("3", "6"), ("3", "6"), ("3", "8")):
        run = Run(tmp_path / "run", str(script), *arguments, options=("--nproc-per-node", "1"))
        run.output.write_text("")
        with running(run):
            assert run.finish() == 0, run.console()
        said.append(sum(" 6 " in line and "--run-dir" in line for line in run.console().splitlines()))
    assert said == [0, 1, 0]
