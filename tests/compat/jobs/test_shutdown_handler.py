"""ShutdownHandler's deadline in real processes."""

from __future__ import annotations

import json
import subprocess
import sys

from outlast.errors import ExitCode
from tests.support.launching import SCRIPTS

TIMEOUT, PATIENCE = 2.5, 30.0  # seconds; without the deadline's thread nobody looks for 60


def test_the_deadline_is_kept_where_the_script_asks_at_once() -> None:
    command = [sys.executable, str(SCRIPTS / "signals_itself.py"), str(TIMEOUT), str(PATIENCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in found] == [int(ExitCode.FAILED)] * 5, (found, done.stderr)
    assert all(seconds >= TIMEOUT for _, seconds in found), found
