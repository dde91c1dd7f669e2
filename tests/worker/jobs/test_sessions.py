"""Several sessions in one process, without a launcher."""

from __future__ import annotations

from pathlib import Path

from tests.support import warm
from tests.support.launching import SCRIPTS


def test_a_run_folder_is_free_again_when_its_session_has_ended(tmp_path: Path) -> None:
    done = warm.run([SCRIPTS / "sessions.py", tmp_path / "run"], timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["began at 0", "began at 4"]
    assert "held by an open session of this process; close it first" in done.stdout
