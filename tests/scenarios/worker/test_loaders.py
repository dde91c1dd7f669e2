"""Scripts with torch's loaders, killed within an epoch and at its end: the resumed run is bitwise equal."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, SCRIPTS


@pytest.mark.long
def test_making_an_iterator_again_changes_no_bit(tmp_path: Path) -> None:
    leaves_out = () if importlib.util.find_spec("torchdata") else ("--without", "stateful")
    words = [sys.executable, SCRIPTS / "loaders.py", tmp_path, *leaves_out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=3 * DEADLINE, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout.splitlines()[-1])
    assert len(table) >= 10
    assert not {name: row for name, row in table.items() if row}, done.stderr
