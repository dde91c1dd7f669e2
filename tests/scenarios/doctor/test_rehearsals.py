"""What ``outlast doctor`` starts, and what it tells of a script that comes to its end meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, until
from tests.support.processes import children_running, command_line

pytestmark = pytest.mark.timeout(420)
DOCTOR = (sys.executable, "-m", "outlast", "doctor", "--nproc-per-node", "1", "--check")


def test_a_script_is_not_started_unasked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('latest.pt', 'w').close()\n")
    with subprocess.Popen([*DOCTOR, "start", "train.py"], cwd=tmp_path) as doctor:
        launches = until(lambda: children_running(doctor.pid, "outlast run"), "a launch")
        words = [word for pid in launches for word in command_line(pid).split()]
        doctor.terminate()
        assert doctor.wait(DEADLINE) == 128 + signal.SIGTERM
    assert words
    assert "train.py" not in words
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


FINISHES = """
import outlast, torch
with outlast.start(save_interval=1000) as session:
    session.restore(state=torch.zeros(1))
    for step in session.steps(1):
        pass
open("finished", "w").close()
"""


@pytest.mark.long
def test_a_script_that_finishes_meanwhile_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FINISHES)
    words = [*DOCTOR, "crash", "--timeout", "240", "--train", "train.py"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE + 240, check=False
    )
    assert (tmp_path / "finished").exists()
    assert done.returncode == 0, done.stdout
