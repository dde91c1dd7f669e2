"""Each benchmark runs by the command that its docstring gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(one.name for one in (ROOT / "bench").glob("*.py") if "argparse" in one.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_starts_outside_of_the_repository(script: str, tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "bench" / script), "--help"]
    told = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("usage:")
