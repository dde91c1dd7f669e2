"""KempnerForge's handler and detector in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.launching import SCRIPTS
from tests.support.ranks import ranks

TIMEOUT, PATIENCE = 2.5, 30.0  # seconds; without the deadline's thread nobody looks for 60
FAILED = 1


def test_the_deadline_is_kept_where_the_script_asks_at_once() -> None:
    command = [sys.executable, str(SCRIPTS / "signals_itself.py"), str(TIMEOUT), str(PATIENCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in found] == [FAILED] * 5, (found, done.stderr)
    assert all(seconds >= TIMEOUT for _, seconds in found), found


def test_all_ranks_get_the_same_answer_about_a_loss(tmp_path: Path) -> None:
    with ranks(tmp_path, "detector", steps=6, script="detecting.py") as job:
        assert job.finish() == [0, 0], job.output()
        first, second = (job.lines(rank) for rank in (0, 1))
    assert first == second
    assert [one["loss"] for one in first if "loss" in one] == [True, True, True, False, True, True]
    assert [one["gradients"] for one in first if "gradients" in one] == [True] * 5 + [False]
